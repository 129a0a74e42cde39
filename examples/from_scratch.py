"""A small model with a gated position bias from scratch: no RoPE, no checkpoint, only a config.

python examples/from_scratch.py
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_drope import DroPEParameters, drope_config_class

config = drope_config_class(LlamaConfig)(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    drope_parameters=DroPEParameters.preset("gated", max_distance=64).to_dict(),
)
model = AutoModelForCausalLM.from_config(config)
print(model.model.layers[0].self_attn)

ids = torch.randint(0, 256, (1, 200))
print("loss past the table's 64 distances:", model(ids, labels=ids).loss.item())

"""Tiny random models for the tests: two layers, four heads, weights scaled up so that attention is far from uniform.

With the usual 0.02 initialisation attention is almost flat and a missing bias or mask can pass unnoticed.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.gptj import modeling_gptj

VOCAB = 97

_LLAMA_STYLE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT_STYLE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# One row a family: the class-name prefix and the arguments of its config. A new family costs one line.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA_STYLE),
    "mistral": ("Mistral", {**_LLAMA_STYLE, "sliding_window": None}),
    "qwen2": ("Qwen2", _LLAMA_STYLE),
    "qwen3": ("Qwen3", {**_LLAMA_STYLE, "head_dim": 8}),
    "phi3": ("Phi3", _LLAMA_STYLE),
    "gpt_neox": (
        "GPTNeoX",
        {
            **{key: value for key, value in _LLAMA_STYLE.items() if key != "num_key_value_heads"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gptj": ("GPTJ", {**_GPT_STYLE, "rotary_dim": 4}),
    "gpt2": ("GPT2", _GPT_STYLE),
}
# GPT-J and CodeGen go through the attention interface since Transformers 5.24.
NOT_THERE = () if hasattr(modeling_gptj, "GPTJRotaryEmbedding") else ("gptj", "codegen")
for _name in NOT_THERE:
    FAMILIES.pop(_name, None)


# Arguments of a short, quiet and repeatable run of a Trainer.
TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 1,
}


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    prefix, arguments = FAMILIES[family]
    return getattr(transformers, f"{prefix}Config")(**{**arguments, **overrides})


def tiny_model(family: str, kind: str = "ForCausalLM", seed: int = 0, scale: float = 6.0, **overrides: Any) -> Any:
    """A stock model of `family` in evaluation mode; `kind` is the class-name suffix ("Model", "ForCausalLM", ...)."""
    attn_implementation = overrides.pop("attn_implementation", "sdpa")
    config = tiny_config(family, **overrides)
    config._attn_implementation = attn_implementation
    torch.manual_seed(seed)
    if family == "gpt2" and kind == "ForCausalLM":
        kind = "LMHeadModel"
    model: PreTrainedModel = getattr(transformers, f"{FAMILIES[family][0]}{kind}")(config)
    scale_up(model, scale)
    return model.eval()


@torch.no_grad()
def scale_up(model: torch.nn.Module, scale: float = 6.0) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(scale)


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)

"""A tiny stock model of any text decoder in Transformers, made from its config class's own fields.

Sizes are cut down wherever a config has a field of a known name; what a few types need besides is a line each.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from tiny import VOCAB, scale_up
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_WIDTH, _HEADS, _LAYERS = 32, 4, 2
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "ffn_hidden_size", "decoder_ffn_dim"), 48
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 16),
    "qk_head_dim": 16,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a type needs besides.
SPECIAL: dict[str, dict[str, Any]] = {}


def small_config(model_type: str, **overrides: Any) -> Any:
    """A config of two layers with four heads of eight channels."""
    config_class: Any = CONFIG_MAPPING[model_type]
    fields = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        fields |= set(getattr(base, "__annotations__", {}))
    fields -= set(getattr(config_class, "attribute_map", {}))
    given = {name: value for name, value in _SMALL.items() if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in given:
        given["num_key_value_heads"] = _HEADS
    return config_class(**{**given, **SPECIAL.get(model_type, {}), **overrides})


def class_of(model_type: str) -> Any:
    name: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def small_model(model_type: str, backend: str = "sdpa", seed: int = 0, scale: float = 6.0, **overrides: Any) -> Any:
    """A stock causal language model in evaluation mode, with random weights large enough for uneven attention."""
    config = small_config(model_type, **overrides)
    config._attn_implementation = backend
    torch.manual_seed(seed)
    model = class_of(model_type)(config)
    scale_up(model, scale)
    return model.eval()

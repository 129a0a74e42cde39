"""A tiny stock model of any text decoder in Transformers, made from its config class's own fields.

Sizes are cut down wherever a config has a field of a known name; what a few types need besides is a line each.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from tiny import NOT_THERE, VOCAB, scale_up
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from hf_drope.model_types import DECODERS, ENCODERS

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
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a type needs besides.
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bailing_hybrid"), _HYBRID),
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "flint": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "esm": {"position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": _HEADS},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "longcat_flash": {"num_layers": 1, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
    },
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


# Capped on eager alone, had a cache of its own, or rotated outside the attention interface before some release.
_LATER = {"gemma2": "5.24", "olmo_hybrid": "5.16", **dict.fromkeys(NOT_THERE, "5.24")}


def _is_there(model_type: str) -> bool:
    later = Version(transformers.__version__) < Version(_LATER.get(model_type, "0"))
    return model_type in CONFIG_MAPPING and not later


# What the installed Transformers has of the supported types.
DECODER_TYPES = tuple(filter(_is_there, DECODERS))
TYPES = tuple(sorted((*DECODER_TYPES, *filter(_is_there, ENCODERS))))


def small_config(model_type: str, **overrides: Any) -> Any:
    """A config of two layers with four heads of eight channels."""
    config_class: Any = CONFIG_MAPPING[model_type]
    fields = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        fields |= set(getattr(base, "__annotations__", {}))
    fields -= set(getattr(config_class, "attribute_map", {}))
    if not is_decoder(model_type):
        fields -= {"is_decoder"}
    given = {name: value for name, value in _SMALL.items() if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in given:
        given["num_key_value_heads"] = _HEADS
    return config_class(**{**given, **SPECIAL.get(model_type, {}), **overrides})


def is_decoder(model_type: str) -> bool:
    """Whether a type is tried as a causal language model; some have that class besides what they are for."""
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in ENCODERS


def class_of(model_type: str) -> Any:
    """The stock class with a head: a causal language model or, for what sees both sides, a masked one."""
    table: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_decoder(model_type) else MODEL_FOR_MASKED_LM_MAPPING_NAMES
    name = table[model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def small_model(
    model_type: str, backend: str | None = None, seed: int = 0, scale: float = 6.0, **overrides: Any
) -> Any:
    """A stock language model in evaluation mode, with random weights large enough for uneven attention."""
    config = small_config(model_type, **overrides)
    stock = class_of(model_type)
    config._attn_implementation = backend or ("sdpa" if stock._supports_sdpa else "eager")
    torch.manual_seed(seed)
    model = stock(config)
    scale_up(model, scale)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and scales that begin at zero could hide a part of the model.
            if not parameter.any():
                parameter.normal_(0.0, 0.1)
    return model.eval()

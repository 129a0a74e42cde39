"""Putting both seams into a model: what is wrapped, what changes class, what is refused. This file travels with every checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from .attention_drope import QKNorm, drope_attention_class
from .attention_masks import check_scale
from .biased_attention import refuse_sinks
from .drope_parameters import DroPEParameters
from .position_bias import build_position_bias
from .position_modules import is_wrapped, refuse_other_tables, rotary_places, table_places
from .rotary_drope import FadingRotaryEmbedding, RopeScale, fade_embedding
from .rotary_pairs import RotaryPairs
from .stock_attention import (
    head_dim_of,
    heads_of,
    is_attention,
    is_given_rotations,
    layer_type_of,
    rotary_pairs,
    rotated_shapes,
    rotated_types,
    rotates_by_itself,
)


def install(model: Any, class_of: Callable[[type], type]) -> None:
    """Put both seams into `model` as `model.config.drope_parameters` asks, once.

    class_of: the converted form of a stock model class, for models within the model.
    """
    settings = DroPEParameters.from_dict(model.config.drope_parameters)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder with a decoder, which hf_drope does not convert.")
    if not hasattr(model.config, "num_hidden_layers"):
        raise ValueError(f"{type(model).__name__} is made of several models; convert the one that reads text.")
    settings.check_layers(model.config.num_hidden_layers)
    _install_position_encoding(model, settings)
    attentions = [module for module in model.modules() if is_attention(module)]
    for index, module in enumerate(attentions):
        if getattr(module, "layer_idx", None) is None:
            # Encoders do not count their layers, and one goes through the same several times.
            if isinstance(settings.window, list | tuple) and len(attentions) < model.config.num_hidden_layers:
                raise ValueError(
                    f"window is a list, but {type(model).__name__} goes through one attention layer several times; give one "
                    "number for all."
                )
            module.layer_idx = index
    for module in model.modules():
        if rotates_by_itself(module):
            raise ValueError(
                f"{type(module).__name__} rotates queries and keys without the Transformers attention interface, so hf_drope "
                "cannot change how it encodes position."
            )
        if isinstance(module, PreTrainedModel) and not hasattr(module, "set_rope_scale"):
            module.__class__ = class_of(type(module))
        elif is_attention(module) and not hasattr(type(module), "needs_position"):
            _install_attention(model, module, settings)
    if not attentions:
        raise ValueError(
            f"No attention layer of {type(model).__name__} goes through the Transformers attention interface, so hf_drope can "
            "neither tell how it encodes position nor add to its scores; where another library has replaced their forward, "
            "convert the model first."
        )
    if settings.needs_own_attention:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module._supports_attention_backend = False
    # In place of a class attribute, which would hide the stock class's own.
    strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    in_fp32 = {"position_bias": settings.position_bias, "qk_norm": settings.qk_norm}
    model._keep_in_fp32_modules_strict = strict | {name for name, value in in_fp32.items() if value is not None}
    mark_dropped_table(model)


def _install_position_encoding(model: Any, settings: DroPEParameters) -> None:
    """Wrap the modules that make rotations of positions, or look vectors up by them."""
    refuse_other_tables(model)
    rotaries, tables = rotary_places(model), table_places(model)
    if not rotaries and not tables:
        raise ValueError(
            f"{type(model.base_model).__name__} has neither a rotary module nor a table of learned positions, "
            "so there is no position encoding here that hf_drope could take out."
        )
    if tables and settings.rope_layers is not None:
        raise ValueError("rope_layers needs rotary positions; a learned table is added once, before all layers.")
    keeps = settings.rope_layers is not None
    deferred = (settings.position_bias or {}).get("type") == "disentangled"
    for place in rotaries:
        if not is_wrapped(place.module):
            settled = settings.rope_fade, settings.rope_scale, keeps, deferred
            place.put(FadingRotaryEmbedding(place.module, *settled))
    for place in tables:
        if not is_wrapped(place.module):
            place.put(fade_embedding(place.module, settings.rope_scale))


def _install_attention(model: Any, module: Any, settings: DroPEParameters) -> None:
    config, index = model.config, module.layer_idx
    if settings.position_bias is not None and getattr(module, "reorder_and_upcast_attn", False):
        raise ValueError("reorder_and_upcast_attn=True bypasses the position bias; set it to False in the config.")
    bias = settings.position_bias or {}
    if bias.get("num_buckets") and not bias["bidirectional"] and not getattr(module, "is_causal", True):
        raise ValueError(
            f"{type(module).__name__} sees later tokens too, for which one-sided buckets have no place; set bidirectional to true."
        )
    stock = type(module)
    deferred = (settings.position_bias or {}).get("type") == "disentangled"
    # A disentangled bias is RoPE taken apart, so it has no place where there is none.
    pairs = rotary_pairs_of(model, module, stock) if deferred else None
    still = deferred and pairs is None and bool(rotary_places(model))
    if deferred:
        refuse_sinks(module, getattr(module, "sinks", None))
    module.__class__ = drope_attention_class(stock)
    if settings.rope_layers is not None and not is_given_rotations(stock):
        raise ValueError(f"rope_layers is not possible for {stock.__name__}, which is not given its rotations.")
    heads, groups = heads_of(module, config)
    head_dim = getattr(module, "head_dim", None) or head_dim_of(config)
    module.keeps_rope = settings.rope_layers is not None and index in settings.rope_layers
    module.position_bias = build_position_bias(
        settings,
        num_heads=heads,
        num_key_value_heads=groups,
        hidden_size=config.hidden_size,
        head_dim=head_dim,
        rotary=pairs,
        keeps_rope=module.keeps_rope or still,
    )
    # A few families have a module of this name themselves.
    module.adds_qk_norm = settings.qk_norm is not None
    if settings.qk_norm is not None:
        _refuse_norm(module, stock, config.hidden_size, {"q": (1, heads, 1, head_dim), "k": (1, groups, 1, head_dim)})
        eps = getattr(config, "rms_norm_eps", 1e-6)
        module.qk_norm = QKNorm(settings.qk_norm, heads * head_dim, groups * head_dim, eps)
    module.attention_scale = check_scale(settings.attention_scale)
    module.window = settings.window[index] if isinstance(settings.window, list | tuple) else settings.window


def _refuse_norm(module: Any, stock: Any, hidden_size: int, whole: dict[str, tuple[int, ...]]) -> None:
    """Refuse the norms of `qk_norm` where a layer does not hand all queries and keys to its rotation at once."""
    if hasattr(module, "qk_norm"):
        raise ValueError(f"{stock.__name__} has norms of its own for queries and keys; set qk_norm to null.")
    shapes = rotated_shapes(module, stock, hidden_size) if is_given_rotations(stock) else None
    if shapes is None or any(shapes.get(name) != shape for name, shape in whole.items()):
        raise ValueError(
            f"qk_norm is not possible for {stock.__name__} (layer {module.layer_idx}), which never holds its queries and keys "
            "together and whole before it rotates them."
        )


def rotary_pairs_of(model: Any, module: Any, attention: type) -> RotaryPairs | None:
    """How the source rotates in this attention module, of the stock class `attention`; None where it does not.

    Raises:
        ValueError: its rotation cannot be taken apart.
    """
    rotaries = [place.module for place in rotary_places(model)]
    if not rotaries:
        return None
    if getattr(module, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"{attention.__name__} keeps keys compressed (multi-head latent attention), which cannot be taken apart for a "
            "disentangled bias or a calibration; use 'table', 'log', 'linear' or 'low_rank' as they start."
        )
    if len(rotaries) > 1:
        raise ValueError(
            f"{type(model).__name__} has {len(rotaries)} rotary modules, which cannot be taken apart for a disentangled bias "
            "or a calibration."
        )
    rotary = rotaries[0]
    layer_type = layer_type_of(rotary.rotary, module, model.config)
    if layer_type not in rotated_types(rotary.rotary):
        return None
    if rotated_shapes(module, attention, model.config.hidden_size) is None:
        return None
    if layer_type not in rotary.pairs:
        rotary.pairs[layer_type] = rotary_pairs(rotary.rotary, model.config, attention, layer_type)
    return rotary.pairs[layer_type]


def mark_dropped_table(model: Any) -> None:
    """A learned table at strength 0 is not saved: the checkpoint says that it was dropped."""
    keys = {
        name for name, module in model.named_modules() if isinstance(module, RopeScale) and hasattr(module, "weight")
    }
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    weights = {f"{name}.weight" for name in keys}
    dropped = model.config.drope_parameters["rope_scale"] == 0.0
    model._keys_to_ignore_on_save = ignored | weights if dropped else ignored - weights

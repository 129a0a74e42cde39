"""Converted models: any stock Transformers decoder class with the two seams in place.

`drope_class(LlamaForCausalLM)` is a subclass of the stock class that reads `config.drope_parameters`; `apply_drope(model, ...)`
turns a stock model into one in memory. Classes are made when first asked for, so that `DroPELlamaForCausalLM` and its like
are attributes of this module, here and where a checkpoint's copy of it is loaded with `trust_remote_code=True`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .attention_backends import refuse_backend
from .attention_drope import (
    QKNorm,
    drope_attention_class,
    is_attention,
    is_given_rotations,
    layer_type_of,
    rotary_pairs,
    rotates,
    rotates_by_itself,
    rotates_queries_and_keys_together,
)
from .attention_masks import check_scale
from .configuration_drope import (
    DroPEParameters,
    auto_map,
    drope_class_name,
    drope_config_class,
    stock_class_name,
)
from .fp32_module import Fp32Module
from .position_bias import PositionBias, build_position_bias
from .position_modules import rotary_places, table_places
from .rotary_drope import FadingRotaryEmbedding, RopeScale, fade_embedding
from .rotary_pairs import RotaryPairs

# Types of the public DroPE checkpoints, whose norms of queries and keys have keys of their own.
_PUBLIC_TYPES = ("llama", "qwen2")


class DroPEMixin:
    """What a converted model adds to its stock class."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Classification heads ask AutoModel for their base model; the answer is keyed by this very config class.
        base = auto_map(config.model_type)["AutoModel"].rpartition(".")[2]
        transformers.AutoModel.register(type(config), __getattr__(base), exist_ok=True)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    def post_init(self) -> None:
        _install(self)
        super().post_init()  # type: ignore[misc]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Fp32Module | RopeScale):
            module.reset_parameters()
            if not isinstance(module, nn.Embedding):
                return
        super()._init_weights(module)  # type: ignore[misc]

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        settings = DroPEParameters.from_dict(self.config.drope_parameters)
        refuse_backend(settings, attn_implementation or "sdpa", _head_dim(self.config))
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]

    def set_rope_scale(self, rope_scale: float) -> None:
        """Set the strength of the model's own position encoding: 1 is the source's, 0 drops it.

        The value goes into `config.drope_parameters` too, so that a saved checkpoint carries its stage.
        """
        settings = DroPEParameters.from_dict(self.config.drope_parameters).replace(rope_scale=rope_scale)
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, RopeScale):
                module.set_rope_scale(settings.rope_scale)
        self._write(settings)

    def set_gate_temperature(self, temperature: float) -> None:
        """Set the temperature T > 0 of every query or score gate; stored in `config.drope_parameters` as well.

        Raises:
            ValueError: the model has no gate with a temperature.
        """
        settings = DroPEParameters.from_dict(self.config.drope_parameters)
        if "temperature" not in (settings.gate or {}):
            raise ValueError("This model has no gate with a temperature; convert it with a 'query' or 'score' gate.")
        settings = settings.replace(temperature=temperature)
        # By method and not through `position_biases`: adapters keep a second copy of each gate.
        for module in self.modules():  # type: ignore[attr-defined]
            if hasattr(type(module), "set_temperature"):
                module.set_temperature(float(temperature))
        self._write(settings)

    def set_terms_scale(self, terms_scale: float) -> None:
        """Set the strength of a disentangled bias's position terms, 1 to 0 (no position at all); stored in the config.

        Raises:
            ValueError: the model's bias is not a disentangled one.
        """
        settings = DroPEParameters.from_dict(self.config.drope_parameters)
        if "terms_scale" not in (settings.position_bias or {}):
            raise ValueError("This model has no disentangled bias; convert its source with the preset 'disentangled'.")
        settings = settings.replace(terms_scale=terms_scale)
        for module in self.modules():  # type: ignore[attr-defined]
            # The model itself has a method of this name, its adapters' copies of a bias have no other mark.
            if hasattr(type(module), "content_scores"):
                module.set_terms_scale(float(terms_scale))
        self._write(settings)

    def position_biases(self) -> Iterator[PositionBias]:
        """The `position_bias` module of each layer that has one."""
        for module in self.modules():  # type: ignore[attr-defined]
            if getattr(module, "position_bias", None) is not None:
                yield module.position_bias

    def position_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that carry position: those of every bias and gate."""
        for module in self.position_biases():
            yield from module.parameters()

    def _write(self, settings: DroPEParameters) -> None:
        self.config.drope_parameters = settings.to_dict()
        _mark_dropped_table(self)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _install(model: Any) -> None:
    """Put both seams into `model` as `model.config.drope_parameters` asks, once."""
    settings = DroPEParameters.from_dict(model.config.drope_parameters)
    settings.check_layers(model.config.num_hidden_layers)
    _install_position_encoding(model, settings)
    for module in model.modules():
        if rotates_by_itself(module):
            raise ValueError(
                f"{type(module).__name__} rotates queries and keys without the Transformers attention interface, so hf_drope "
                "cannot change how it encodes position."
            )
        if isinstance(module, PreTrainedModel) and not hasattr(module, "set_rope_scale"):
            module.__class__ = drope_class(type(module))
        elif is_attention(module) and not hasattr(type(module), "needs_position"):
            _install_attention(model, module, settings)
    # In place of a class attribute, which would hide the stock class's own.
    strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    model._keep_in_fp32_modules_strict = strict | {"position_bias", *(("qk_norm",) if settings.qk_norm else ())}
    _mark_dropped_table(model)


def _install_position_encoding(model: Any, settings: DroPEParameters) -> None:
    """Wrap the modules that make rotations of positions, or look vectors up by them."""
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
        if not isinstance(place.module, RopeScale):
            settled = settings.rope_fade, settings.rope_scale, keeps, deferred
            place.put(FadingRotaryEmbedding(place.module, *settled))
    for place in tables:
        if not isinstance(place.module, RopeScale):
            place.put(fade_embedding(place.module, settings.rope_scale))


def _install_attention(model: Any, module: Any, settings: DroPEParameters) -> None:
    config, index = model.config, module.layer_idx
    if settings.position_bias is not None and getattr(module, "reorder_and_upcast_attn", False):
        raise ValueError("reorder_and_upcast_attn=True bypasses the position bias; set it to False in the config.")
    stock = type(module)
    deferred = (settings.position_bias or {}).get("type") == "disentangled"
    if deferred and getattr(module, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"{stock.__name__} keeps keys compressed (multi-head latent attention), which a disentangled bias cannot take "
            "apart; use 'table', 'log', 'linear' or 'low_rank'."
        )
    # A disentangled bias is RoPE taken apart, so it has no place where there is none.
    still = deferred and not rotates(module, config.hidden_size)
    module.__class__ = drope_attention_class(stock)
    if settings.rope_layers is not None and not is_given_rotations(stock):
        raise ValueError(f"rope_layers is not possible for {stock.__name__}, which is not given its rotations.")
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(module, "head_dim", None) or _head_dim(config)
    module.keeps_rope = settings.rope_layers is not None and index in settings.rope_layers
    module.position_bias = build_position_bias(
        settings,
        num_heads=heads,
        num_key_value_heads=groups,
        hidden_size=config.hidden_size,
        head_dim=head_dim,
        rotary=_rotary_pairs(model, module, stock) if deferred else None,
        keeps_rope=module.keeps_rope or still,
    )
    # A few families have a module of this name themselves.
    module.adds_qk_norm = settings.qk_norm is not None
    if settings.qk_norm is not None:
        if not rotates_queries_and_keys_together(stock):
            raise ValueError(
                f"qk_norm is not possible for {stock.__name__}, which never holds its queries and keys together."
            )
        eps = getattr(config, "rms_norm_eps", 1e-6)
        module.qk_norm = QKNorm(settings.qk_norm, heads * head_dim, groups * head_dim, eps)
    module.attention_scale = check_scale(settings.attention_scale)
    module.window = settings.window[index] if isinstance(settings.window, list | tuple) else settings.window


def _rotary_pairs(model: Any, module: Any, attention: type) -> RotaryPairs | None:
    """How the source rotates in this layer."""
    rotaries = [place.module for place in rotary_places(model)]
    if not rotaries:
        return None
    if len(rotaries) > 1:
        raise ValueError(
            f"{type(model).__name__} has {len(rotaries)} rotary modules, which a disentangled bias cannot take apart."
        )
    layer_type = layer_type_of(rotaries[0].rotary, module, model.config)
    if layer_type not in rotaries[0].pairs:
        rotaries[0].pairs[layer_type] = rotary_pairs(rotaries[0].rotary, model.config, attention, layer_type)
    return rotaries[0].pairs[layer_type]


def _mark_dropped_table(model: Any) -> None:
    """A learned table at strength 0 is not saved: the checkpoint says that it was dropped."""
    keys = {
        name for name, module in model.named_modules() if isinstance(module, RopeScale) and hasattr(module, "weight")
    }
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    weights = {f"{name}.weight" for name in keys}
    dropped = model.config.drope_parameters["rope_scale"] == 0.0
    model._keys_to_ignore_on_save = ignored | weights if dropped else ignored - weights


_model_classes: dict[type, type] = {}


def drope_class(stock: Any) -> Any:
    """The converted form of a stock model class, for example `drope_class(LlamaForCausalLM)` → `DroPELlamaForCausalLM`.

    Its config class is `drope_config_class(stock)`; it builds, saves and loads like the stock class.
    """
    if issubclass(stock, DroPEMixin):
        return stock
    if stock not in _model_classes:
        namespace = {
            "__module__": __name__,
            "__doc__": f"{stock.__name__} with its position encoding as `config.drope_parameters` asks.",
            "config_class": drope_config_class(stock),
        }
        converted: Any = type(drope_class_name(stock.__name__), (DroPEMixin, stock), namespace)
        homes = {entry.rpartition(".")[2]: auto for auto, entry in auto_map(stock.config_class.model_type).items()}
        converted.register_for_auto_class(homes.get(converted.__name__, "AutoModel"))
        _rename_keys_like(stock, converted)
        # Stock classes enter themselves when built; ours are also reached by changing the class of a built module.
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(converted), stock._can_record_outputs)
        _model_classes[stock] = converted
    return _model_classes[stock]


def _rename_keys_like(stock: Any, converted: Any) -> None:
    """Give the converted type the renaming of checkpoint keys that Transformers does for the stock type (by name)."""
    names = (
        (stock.__name__, converted.__name__),
        (stock.config_class.model_type, converted.config_class.model_type),
    )
    for theirs, ours in names:
        mapping = list(get_checkpoint_conversion_mapping(theirs) or ())
        if stock.config_class.model_type in _PUBLIC_TYPES:
            mapping += [
                WeightRenaming(f"self_attn.{name}", f"self_attn.qk_norm.{name}") for name in ("q_norm", "k_norm")
            ]
        if mapping:
            register_checkpoint_conversion_mapping(ours, mapping, overwrite=True)


def apply_drope(model: Any, parameters: str | DroPEParameters = "nope", **overrides: Any) -> Any:
    """Convert a stock model in memory.

    Args:
        model: a stock Transformers model.
        parameters: a preset ("nope", "simple", "gated", "drope", "t5", "alibi", "kerple", "disentangled") or settings.
        overrides: single settings, such as `rope_scale=1.0` or `max_distance=1024`.

    Returns:
        The same object, its class and config changed; its weights are untouched.

    Raises:
        ValueError: not a stock model, a setting is wrong, or the model's attention backend cannot run the bias.
    """
    if isinstance(parameters, str):
        settings = DroPEParameters.preset(parameters, **overrides)
    else:
        settings = parameters.replace(**overrides)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"apply_drope takes a Transformers model, not {type(model).__name__}; unwrap it first.")
    if hasattr(model, "set_rope_scale"):
        raise ValueError(
            f"{type(model).__name__} is converted already; use set_rope_scale, or convert its source with other settings."
        )
    old_config: Any = model.config
    # The caller may have built other models from the same config object: they keep it.
    config = copy.deepcopy(old_config)
    config.__class__ = drope_config_class(type(old_config))
    # A loaded config has its source's type in the instance as well.
    vars(config).pop("model_type", None)
    config.drope_parameters = settings.to_dict()
    config.auto_map = auto_map(config.model_type)
    refuse_backend(settings, config._attn_implementation, _head_dim(config))
    # Every refusal comes before the first change: a trial on a model without weights.
    with torch.device("meta"):
        drope_class(type(model))(copy.deepcopy(config))
    for module in model.modules():
        if getattr(module, "config", None) is old_config:
            module.config = config
    model.__class__ = drope_class(type(model))
    _install(model)
    for module in model.modules():
        if getattr(module, "position_bias", None) is not None or getattr(module, "adds_qk_norm", False):
            module.to(next(iter(module.parameters())).device)
        if isinstance(module, RopeScale):
            module.scale.data = module.scale.to(model.device)
    return model


def register_model_classes(config_class: Any) -> None:
    """Tell Transformers' Auto classes about the models of a converted config class."""
    for auto_name, entry in auto_map(config_class.model_type).items():
        if auto_name != "AutoConfig":
            model_class = __getattr__(entry.rpartition(".")[2])
            getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)


def __getattr__(name: str) -> Any:
    """`DroPELlamaForCausalLM` and its like are made when first asked for."""
    stock = getattr(transformers, stock_class_name(name), None) if name == drope_class_name(name) else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel):
        return drope_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

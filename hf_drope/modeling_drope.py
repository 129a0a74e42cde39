"""Converted models: any stock Transformers class with the two seams in place.

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
from transformers import GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .attention_backends import refuse_backend, refuse_continuous_batching
from .configuration_drope import OWN_ATTENTION, auto_map, drope_class_name, drope_config_class, stock_class_name
from .drope_parameters import DroPEParameters
from .fp32_module import Fp32Module
from .installation import install, mark_dropped_table
from .packed_documents import refuse_mixed_documents
from .position_bias import PositionBias
from .rotary_drope import RopeScale
from .stock_attention import head_dim_of

# Types of the public DroPE checkpoints, whose norms of queries and keys have keys of their own.
_PUBLIC_TYPES = ("llama", "qwen2")


class DroPEMixin:
    """What a converted model adds to its stock class."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(config, "drope_parameters"):
            stock = type(config).__name__
            raise ValueError(
                f"{type(self).__name__} takes a {drope_class_name(stock)}, not a {stock}; convert a model with apply_drope, or "
                "make the config with drope_config_class."
            )
        # Classification heads ask AutoModel for their base model; the answer is keyed by this very config class.
        base = auto_map(config.model_type)["AutoModel"].rpartition(".")[2]
        transformers.AutoModel.register(type(config), __getattr__(base), exist_ok=True)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    @classmethod
    def is_custom_code(cls) -> bool:
        # Custom code is not asked to initialise modules without weights, as a few stock models do on behalf of others.
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_ids") is not None and self.base_model is self:  # type: ignore[attr-defined]
            refuse_mixed_documents(self, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def post_init(self) -> None:
        # Built by way of the class that answers engines, it is a model like any other.
        self.__class__ = getattr(type(self), "built_as", type(self))
        install(self, drope_class)
        super().post_init()  # type: ignore[misc]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Fp32Module | RopeScale):
            module.reset_parameters()
            if not isinstance(module, nn.Embedding):
                return
        super()._init_weights(module)  # type: ignore[misc]

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        settings = DroPEParameters.from_dict(self.config.drope_parameters)
        refuse_backend(settings, attn_implementation or "sdpa", head_dim_of(self.config))
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
        mark_dropped_table(self)


_model_classes: dict[type, type] = {}
_answers: dict[str, type] = {}


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
            # Read off the source of the module that a class is from, which ours is not.
            "_can_set_attn_implementation": classmethod(lambda cls: stock._can_set_attn_implementation()),
            "_can_set_experts_implementation": classmethod(lambda cls: stock._can_set_experts_implementation()),
            "__reduce_ex__": lambda self, protocol: (_new_model, (stock,), vars(self)),
        }
        if hasattr(stock, "init_continuous_batching"):
            namespace["init_continuous_batching"] = _init_continuous_batching
        # Some code looks for this one among the direct bases.
        generation = (GenerationMixin,) if GenerationMixin in stock.__bases__ else ()
        converted: Any = type(drope_class_name(stock.__name__), (DroPEMixin, stock, *generation), namespace)
        homes = {entry.rpartition(".")[2]: auto for auto, entry in auto_map(stock.config_class.model_type).items()}
        converted.register_for_auto_class(homes.get(converted.__name__, "AutoModel"))
        _rename_keys_like(stock, converted)
        # Stock classes enter themselves when built; ours are also reached by changing the class of a built module.
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(converted), stock._can_record_outputs)
        _model_classes[stock] = converted
    return _model_classes[stock]


def _init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_continuous_batching(DroPEParameters.from_dict(self.config.drope_parameters))
    return super(DroPEMixin, self).init_continuous_batching(*args, **kwargs)


def _own_attention_class(converted: Any) -> Any:
    """What `auto_map` names for a model with a bias: builds `converted`, and tells engines to keep their attention out."""
    name = converted.__name__ + OWN_ATTENTION
    if name not in _answers:
        namespace = {
            "__module__": __name__,
            "__doc__": f"{converted.__name__} for which no other attention can stand in.",
            "_supports_attention_backend": False,
            "built_as": converted,
        }
        _answers[name] = type(name, (converted,), namespace)
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(_answers[name]), converted._can_record_outputs)
    return _answers[name]


def _new_model(stock: type) -> Any:
    """An empty model for a pickle or a copy to fill: not every class made here can be found by its name."""
    return object.__new__(drope_class(stock))


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
        parameters: a preset ("nope", "simple", "gated", "drope", "t5", "alibi", "kerple", "disentangled") or settings, also as a dict.
        overrides: single settings, such as `rope_scale=1.0` or `max_distance=1024`.

    Returns:
        The same object, its class and config changed; its weights are untouched.

    Raises:
        ValueError: not a stock model, a setting is wrong, or the model's attention backend cannot run the bias.
    """
    settings = DroPEParameters.of(parameters).replace(**overrides)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"apply_drope takes a Transformers model, not {type(model).__name__}; unwrap it first.")
    if hasattr(model, "set_rope_scale"):
        raise ValueError(
            f"{type(model).__name__} is converted already; use set_rope_scale, or convert its source with other settings."
        )
    home: Any = type(model).config_class
    if home is not type(model.config):
        own, given = home.model_type, model.config.model_type
        raise ValueError(
            f"{type(model).__name__} runs a {given!r} config here and is the class of {own!r}; save the model with a config of "
            f"that type (model_type {own!r} in config.json) and convert that."
        )
    old_config: Any = model.config
    # The caller may have built other models from the same config object: they keep it.
    config = copy.deepcopy(old_config)
    config.__class__ = drope_config_class(type(old_config))
    # A loaded config has its source's type in the instance as well.
    vars(config).pop("model_type", None)
    config.drope_parameters = settings.to_dict()
    config.auto_map = auto_map(config.model_type, settings)
    refuse_backend(settings, config._attn_implementation, head_dim_of(config))
    # Every refusal comes before the first change: a trial on a model without weights.
    with torch.device("meta"):
        drope_class(type(model))(copy.deepcopy(config))
    for module in model.modules():
        if getattr(module, "config", None) is old_config:
            module.config = config
    model.__class__ = drope_class(type(model))
    install(model, drope_class)
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
    if name.endswith(OWN_ATTENTION) and name == drope_class_name(name):
        return _own_attention_class(__getattr__(name.removesuffix(OWN_ATTENTION)))
    stock = getattr(transformers, stock_class_name(name), None) if name == drope_class_name(name) else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel):
        return drope_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

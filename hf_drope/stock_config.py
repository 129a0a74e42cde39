"""The config with which a stock architecture does not rotate, and the proof that it does not.

Families that know the `llama3` type divide every frequency by 10³⁰, so that every cosine is 1 and every sine vanishes beside
it; those that know only `longrope` divide by a list of factors, to the same end. Nothing but the rotation may change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .configuration_drope import PUBLIC_FIELDS, base_model_type, stock_class_name
from .conversion_additions import ConversionError, read_config

_FACTOR = 1e30
# Every wavelength is above `original_max_position_embeddings / low_freq_factor`, so every frequency is divided by the factor.
NO_ROTATION = {
    "rope_type": "llama3",
    "factor": _FACTOR,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1,
}
_KEPT = ("rope_theta", "partial_rotary_factor")
# What belongs to the types of rotations, and goes with them.
_SCALING = frozenset(
    {"rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    | {"attention_factor", "beta_fast", "beta_slow", "truncate", "short_factor", "long_factor"}
    | {"short_mscale", "long_mscale", "mscale", "mscale_all_dim", "mrope_section"}
)
_OURS = ("drope_parameters", "auto_map")
_ROPE = ("rope_scaling", "rope_theta", "rope_parameters")


class StockForm:
    """A stock architecture without position encoding.

    Args:
        config: the `config.json` of a converted checkpoint.

    Attributes:
        config: the stock one, without rotations.
        model: the stock model that it makes, without memory.
        scale: what queries have to be multiplied by, since the source's rope settings scaled them besides (DeepSeek's YaRN).

    Raises:
        ConversionError: the architecture's config cannot say that it does not rotate.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        from .position_modules import rotary_places

        left_out = _OURS if "drope_parameters" in config else (*_OURS, *PUBLIC_FIELDS)
        rotating = {name: value for name, value in config.items() if name not in left_out}
        rotating["model_type"] = base_model_type(config["model_type"])
        rotating["architectures"] = [stock_class_name(name) for name in config.get("architectures") or []]
        if not rotating["architectures"]:
            del rotating["architectures"]
        self.config, self.model, self.scale = rotating, _build(rotating), 1.0
        if rotary_places(self.model):
            source = self.model
            self.config, self.model = _without_rotation(rotating, source)
            self.scale = _scale_lost(source, self.model)


def _build(config: dict[str, Any]) -> Any:
    """The stock model on the meta device."""
    import torch
    import transformers

    stock: Any = read_config(transformers.CONFIG_MAPPING[config["model_type"]], config)
    name = (config.get("architectures") or [None])[0]
    with torch.device("meta"):
        if name is None:
            return transformers.AutoModelForCausalLM.from_config(stock)
        return getattr(transformers, name)(stock)


def _without_rotation(rotating: dict[str, Any], source: Any) -> tuple[dict[str, Any], Any]:
    from huggingface_hub.errors import StrictDataclassError

    rope = source.config.to_dict().get("rope_parameters")
    config = {name: value for name, value in rotating.items() if name not in _ROPE}
    if getattr(source.config, "rope_interleave", False):
        # It reorders the channels of queries and keys alike, which without a rotation changes the order of sums only.
        config["rope_interleave"] = False
    _refuse_other_settings(rotating["model_type"], rope or {})
    for form, kept in itertools.product(_forms(source) if rope else (), (_KEPT, _KEPT[:1])):
        candidate = {**config, "rope_parameters": _replace(rope, form, kept)}
        try:
            model = _build(candidate)
        except (StrictDataclassError, ValueError, TypeError, KeyError):
            continue
        # Some types of rotation read the rotated share and others do not.
        rotations = list(_rotations(model))
        is_as_wide = [cos.shape for cos, _ in rotations] == [cos.shape for cos, _ in _rotations(source)]
        if is_as_wide and all((cos == 1).all() and sin.abs().max() <= 1e-20 for cos, sin in rotations):
            return candidate, model
    raise ConversionError(
        f"{rotating['model_type']} has no setting with which it does not rotate, so it has no stock form; its converted folder "
        "runs in Transformers with trust_remote_code=True."
    )


def _forms(source: Any) -> Iterator[dict[str, Any]]:
    from .position_modules import rotary_places

    yield NO_ROTATION
    frequencies = getattr(rotary_places(source)[0].module, "inv_freq", None)
    if frequencies is not None:
        factors = [_FACTOR] * frequencies.shape[-1]
        names = ("short_factor", "long_factor")
        ones = dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), 1.0)
        length = source.config.max_position_embeddings
        lengths = {"factor": 1.0, "original_max_position_embeddings": length}
        yield {"rope_type": "longrope", **dict.fromkeys(names, factors), **ones, **lengths}


def _refuse_other_settings(model_type: str, rope: dict[str, Any]) -> None:
    for name, value in rope.items():
        if isinstance(value, dict):
            _refuse_other_settings(model_type, value)
        elif name not in _SCALING.union(_KEPT) and value is not None:
            raise ConversionError(
                f"{model_type} reads {name} in its rope settings for more than rotations, so it has no stock form without them; "
                "its converted folder runs in Transformers with trust_remote_code=True."
            )


def _replace(rope: dict[str, Any], form: dict[str, Any], kept: tuple[str, ...]) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in rope.values()):
        # By layer type.
        return {kind: _replace(value, form, kept) if isinstance(value, dict) else value for kind, value in rope.items()}
    return {**{name: rope[name] for name in kept if name in rope}, **form}


def _rotations(model: Any) -> Iterator[tuple[Any, Any]]:
    """cos and sin of a near and a far position, for each rotary module and each kind of layer that it knows."""
    import torch

    from .position_modules import rotary_places
    from .stock_attention import rotated_types

    for place in rotary_places(model):
        rotary = type(place.module)(getattr(place.module, "config", model.config))
        for kind in rotated_types(rotary):
            given = () if kind is None else (kind,)
            rotation = rotary(torch.zeros(1, 1, 1), torch.tensor([[1, 1 << 24]]), *given)
            yield rotation if isinstance(rotation, tuple) else (rotation.real, rotation.imag)


def _scale_lost(source: Any, model: Any) -> float:
    """The factor on scores that went with the source's rope settings; any other change outside rotary modules is refused."""
    factors = set()
    for one, other in zip(source.modules(), model.modules(), strict=True):
        if "Rotary" in type(one).__name__:
            continue
        for name, value in vars(one).items():
            if not isinstance(value, int | float) or value == vars(other).get(name):
                continue
            if name != "scaling":
                raise ConversionError(
                    f"{type(one).__name__} takes {name} from its rope settings, which an export has to replace, so there is no "
                    "stock form."
                )
            factors.add(value / other.scaling)
    if len(factors) > 1:
        raise ConversionError("The layers' rope settings scale their scores differently, so there is no stock form.")
    return factors.pop() if factors else 1.0

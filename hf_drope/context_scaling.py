"""Ways to use a model beyond the window that it was trained on, by the factor s = length / window.

    pi        every frequency divided by s (arXiv 2306.15595): "linear" in Transformers
    ntk       θ · s^(d / (d − 2)) for d rotated channels: the fastest pair unchanged, the slowest divided by s
    dynamic   ntk with s·l / window − s + 1 in the place of s, where l is the longest length so far: "dynamic" in Transformers
              with factor s, which at length s · window comes to s² − s + 1
    yarn      fast pairs unchanged, slow ones divided by s, a factor on the scores (arXiv 2309.00071)

for the RoPE of a stock model, and `position_scaling` for the position terms of a disentangled bias alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .calibration import context_length
from .drope_parameters import DroPEParameters
from .position_modules import rotary_places, table_places

ROPE_SCALINGS = ("pi", "ntk", "dynamic", "yarn")
POSITION_SCALINGS = ("linear", "ntk", "yarn", "clip")
# Kinds of RoPE that are stretched without training, or with little, from what is then called the original context.
_STRETCHED = ("yarn", "dynamic", "linear")


def trained_window(config: Any) -> int | None:
    """The context that a model was trained on, by its config; None where that does not say."""
    content = config.to_dict()
    if not (content.get("max_position_embeddings") or content.get("n_positions")):
        return None
    originals = [
        group.get("original_max_position_embeddings")
        for group in _groups(getattr(config, "rope_parameters", None))
        if group.get("rope_type") in _STRETCHED
    ]
    return min([context_length(content), *filter(None, originals)])


def _groups(parameters: Any) -> list[dict[str, Any]]:
    """The RoPE settings of a config: one, or one a type of layer."""
    if not parameters:
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def check_rope(model: Any, name: str, kinds: Sequence[str]) -> None:
    """Raise ValueError for a model whose RoPE cannot be scaled in these ways; `model` may be without weights."""
    groups = _groups(getattr(model.config, "rope_parameters", None))
    rotaries = [place.module for place in rotary_places(model)]
    if not groups or not rotaries or not all(hasattr(rotary, "rope_type") for rotary in rotaries):
        why = "has no RoPE" if not rotaries else "makes its RoPE from no settings of its config"
        raise ValueError(f"{name} {why}, so there is nothing for a RoPE scaling to change; give --rope-scaling none.")
    for group in groups:
        if group.get("rope_type", "default") != "default":
            raise ValueError(
                f"The RoPE of {name} is scaled already (rope_type {group['rope_type']!r}), so no other scaling can be put on it; "
                "give --rope-scaling none."
            )
    if trained_window(model.config) is None:
        raise ValueError(f"The config of {name} does not say how long its window is; give --rope-scaling none.")
    for kind in kinds:
        config = scaled_rope(model.config, kind, 2.0, rotated_channels(model))
        try:
            with torch.device("meta"):
                scaled = type(model)(config)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"Transformers has no {kind} RoPE for {name} ({type(error).__name__}: {error}); leave it out of --rope-scaling."
            ) from error
        # Some make a part of their rotations from other fields.
        if any(place.module.config.rope_parameters != config.rope_parameters for place in rotary_places(scaled)):
            raise ValueError(
                f"{name} makes its RoPE from more than rope_parameters, so {kind} would miss some of it; leave it out of "
                "--rope-scaling."
            )


def scaled_rope(config: Any, kind: str, factor: float, rotated: dict[str | None, int]) -> Any:
    """A copy of a stock config with its RoPE scaled.

    Args:
        kind: one of `ROPE_SCALINGS`.
        rotated: channels that rotate, by type of layer (None where all are of one).
    """
    config = copy.deepcopy(config)
    window = trained_window(config)
    parameters = copy.deepcopy(config.rope_parameters)
    for layer_type, channels in rotated.items():
        group = parameters if layer_type is None else parameters[layer_type]
        if kind == "ntk":
            group["rope_theta"] *= factor ** (channels / max(channels - 2, 1))
        else:
            group |= {"rope_type": "linear" if kind == "pi" else kind, "factor": factor}
        if kind == "yarn":
            group["original_max_position_embeddings"] = window
    config.rope_parameters = parameters
    return config


def rotated_channels(model: Any) -> dict[str | None, int]:
    """How many channels of a head rotate, by type of layer (None where all are of one); `model` may be without weights."""
    parameters = model.config.rope_parameters
    types = [key for key, value in parameters.items() if isinstance(value, dict)] or [None]
    found: dict[str | None, int] = {}
    for rotary in (place.module for place in rotary_places(model)):
        for layer_type in types:
            frequencies = getattr(rotary, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq", None)
            if frequencies is not None:
                found[layer_type] = 2 * frequencies.numel()
    return found


def check_position_scaling(config: Any, name: str) -> None:
    """Raise ValueError for a converted model whose position terms cannot be stretched."""
    if config.drope_parameters["position_bias"]["position_scaling"] is not None:
        raise ValueError(f"{name} has a position_scaling already; leave --position-scaling out.")
    if trained_window(config) is None:
        raise ValueError(f"The config of {name} does not say how long its window is; leave --position-scaling out.")


def has_position_terms(config: Any) -> bool:
    parameters = getattr(config, "drope_parameters", None) or {}
    bias = parameters.get("position_bias") or {}
    # Terms that have faded out have no positions to stretch.
    return bias.get("type") == "disentangled" and bias.get("terms_scale", 1.0) > 0


def scaled_terms(config: Any, kind: str, factor: float) -> Any:
    """A copy of a converted config whose position terms are stretched by one of `POSITION_SCALINGS`."""
    config = copy.deepcopy(config)
    window = trained_window(config) or 0
    scaling: dict[str, Any] = {"type": kind}
    if kind == "clip":
        scaling["max_distance"] = window - 1
    else:
        scaling["factor"] = factor
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = window
    settings = DroPEParameters.from_dict(config.drope_parameters)
    config.drope_parameters = settings.replace(position_scaling=scaling).to_dict()
    return config


def reach(model: Any) -> int | None:
    """The longest sequence that a model's tables of positions allow; None where nothing ends. Weights are not needed."""
    ends = []
    for table in (place.module for place in table_places(model)):
        if getattr(table, "state", "stock") != "dropped" and isinstance(table, torch.nn.Embedding):
            ends.append(table.num_embeddings - getattr(table, "offset", 0))
    for rotary in (place.module for place in rotary_places(model)):
        is_used = getattr(rotary, "state", "stock") != "dropped" or getattr(rotary, "keeps_layers", False)
        sines = getattr(getattr(rotary, "rotary", rotary), "embed_positions", None)
        if is_used and isinstance(sines, torch.Tensor):
            ends.append(len(sines))
    # ALiBi there is a table.
    if model.config.model_type == "mpt":
        ends.append(model.config.max_seq_len)
    return min(ends, default=None)

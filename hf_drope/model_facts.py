"""What is inside a converted model, in numbers for a report: biases by distance, gates, the course of training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .conversion_plan import RECORD
from .record import METRICS_FILE, read_record

DISTANCES = 64
_POINTS = 300
_LOGGED = {
    "loss": "loss",
    "rope_scale": "drope/rope_scale",
    "temperature": "drope/temperature",
    "gate": "drope/gate",
    "bias_norm": "drope/bias_norm",
    "terms_scale": "drope/terms_scale",
}
FACTS = ("bias", "gates", "training", "attention_scale")


def model_facts(model: Any, folder: Path, longest: int) -> dict[str, Any]:
    """ "bias", "gates", "training" and "attention_scale" of a model and its folder, null where it has none.

    Args:
        longest: distances go to that, or to the end of a longer table.
    """
    return {
        "bias": bias_by_distance(model, longest),
        "gates": gate_values(model),
        "training": training_course(folder),
        "attention_scale": attention_scale(folder),
    }


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "position_bias", None) is not None]


@torch.no_grad()
def bias_by_distance(model: Any, longest: int) -> dict[str, Any] | None:
    """What each head adds to a score for a key so many tokens back, without its gate.

    Of a disentangled bias it is what position does by itself, μ_q'(R_Δ − 1)μ_k times the scaling of the scores.
    """
    layers = _layers(model)
    if not layers:
        return None
    bias = layers[0].position_bias.bias
    furthest = max(longest - 1, getattr(bias, "max_distance", 1) - 1)
    distances = log_spaced(furthest)
    values = [_curves(module, torch.tensor(distances)) for module in layers]
    return {
        "kind": "buckets" if getattr(bias, "num_buckets", None) else bias.kind,
        "distances": distances,
        "layers": [module.layer_idx for module in layers],
        "values": [[[_rounded(value) for value in head] for head in layer.tolist()] for layer in values],
    }


def log_spaced(furthest: int) -> list[int]:
    """0, 1 and on to `furthest`, about 64 whole numbers evenly apart in their logarithm."""
    steps = DISTANCES - 2
    found = {round(furthest ** (step / steps)) for step in range(steps + 1)} if furthest > 1 else {furthest}
    return sorted({0, *found})


def _curves(module: Any, distances: Tensor) -> Tensor:
    """(heads, distances), in fp32."""
    bias = module.position_bias.bias
    device = next(iter(module.parameters())).device
    if bias.kind != "disentangled":
        return bias.values(-distances.to(device)).float().cpu()
    furthest = int(distances.max())
    query, key = bias.means()
    # One mean query at the end of a row of mean keys.
    row = bias.scores(query[None], key[None].expand(-1, -1, furthest + 1, -1), query_offset=furthest)[0, :, 0]
    scaling = getattr(module, "scaling", None) or bias.head_dim**-0.5
    return row[:, furthest - distances.to(device)].float().cpu() * scaling


def gate_values(model: Any) -> dict[str, Any] | None:
    """What is constant about the gates: a number a layer and head, and the temperature.

    A query gate's number is what it gives where the layer's input says nothing, σ(b / T); a score gate has none.
    """
    layers = [module for module in _layers(model) if module.position_bias.gate is not None]
    if not layers:
        return None
    settings = model.config.drope_parameters["gate"]
    found: dict[str, Any] = {"type": settings["type"]}
    if "temperature" in settings:
        found["temperature"] = settings["temperature"]
    if settings["type"] in ("head", "query"):
        found["layers"] = [module.layer_idx for module in layers]
        found["values"] = [
            [_rounded(value) for value in module.position_bias.gate.constant().tolist()] for module in layers
        ]
    return found


def training_course(folder: Path) -> dict[str, Any] | None:
    """What a folder's `metrics.jsonl` says of its training, in at most 300 points; null where an entry lacks a number."""
    file = folder / METRICS_FILE
    if not file.is_file():
        return None
    entries = [entry for entry in read_record(file) if "step" in entry and "loss" in entry]
    if not entries:
        return None
    count = min(_POINTS, len(entries))
    chosen = [entries[round(place * (len(entries) - 1) / max(count - 1, 1))] for place in range(count)]
    course = {"step": [entry["step"] for entry in chosen], "tokens": [entry.get("tokens") for entry in chosen]}
    return course | {name: [_rounded(entry.get(key)) for entry in chosen] for name, key in _LOGGED.items()}


def attention_scale(folder: Path) -> dict[str, Any] | None:
    """The attention scale that was fitted to a model and what it does, as its conversion record has it; None where the model
    was trained or calibrated since."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = record.get("attention_scale")
    if not isinstance(found, dict) or not isinstance(found.get("curve"), list):
        return None
    weights = found.get("weights")
    is_of_these = weights is None or weights == checkpoint.fingerprint(checkpoint.read_checkpoint(folder))
    return found if is_of_these else None


def _rounded(value: Any) -> float | None:
    """Four significant digits; JSON has no NaN and no infinity."""
    return float(f"{value:.4g}") if isinstance(value, int | float) and math.isfinite(value) else None

"""A made-up `results.json` as an evaluation of real models would leave it: curves of the right shape, seeded noise."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

LENGTHS = (512, 2048, 4096, 8192)
TASKS = ("passkey", "multikey", "multiquery", "multivalue", "variable-tracking")
WINDOW = 2048
SOURCE = "SmolLM2-135M"
# By name: role, scaling, how far perplexity rises past the window, retrieval in the window and at four times it.
MODELS: dict[str, tuple[str, str | None, float, float, float]] = {
    SOURCE: ("source", None, 3.2, 0.96, 0.01),
    f"{SOURCE} + ntk": ("baseline", "ntk", 0.5, 0.95, 0.22),
    f"{SOURCE} + yarn": ("baseline", "yarn", 0.25, 0.95, 0.31),
    "SmolLM2-135M-same-tokens": ("stock", None, 3.0, 0.97, 0.02),
    "drope-log-score": ("converted", None, 0.03, 0.93, 0.62),
    "disentangled-stretched-recalibrated": ("converted", None, 0.0, 0.95, 0.78),
    "nope": ("converted", None, 0.12, 0.86, 0.48),
}


def wilson(hits: int, count: int) -> dict[str, float | None]:
    if not count:
        return {"rate": None, "low": None, "high": None}
    rate, z = hits / count, 1.959964
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return {"rate": round(rate, 4), "low": round(max(0.0, centre - half), 4), "high": round(min(1.0, centre + half), 4)}


def sample_results(
    lengths: tuple[int, ...] = LENGTHS,
    tasks: tuple[str, ...] = TASKS,
    layers: int = 12,
    heads: int = 4,
    names: tuple[str, ...] = tuple(MODELS),
) -> dict[str, Any]:
    dice = random.Random(0)
    return {
        "format": 1,
        "identity": "0f" * 32,
        "provenance": {
            "hf_drope": "0.1.0",
            "git_revision": "1234567890abcdef1234567890abcdef12345678",
            "torch": "2.13.0",
            "transformers": "5.24.0",
            "python": "3.12.4",
            "cpu": "2 × some processor",
            "threads": 2,
            "command": [
                "hf-drope",
                "evaluate",
                SOURCE,
                "drope-log-score",
                "--text",
                "held out.txt",
                "--out",
                "evaluation",
            ],
            "started": "2026-01-01T00:00:00Z",
            "finished": "2026-01-01T03:00:00Z",
            "seconds": 10800,
        },
        "settings": {
            "lengths": list(lengths),
            "tasks": ["perplexity", *tasks],
            "trials": 20,
            "seed": 0,
            "digits": 7,
            "dtype": "float32",
            "text_tokens": 200_000,
            "rope_scaling": ["ntk", "yarn"],
        },
        "text": {"files": ["held out.txt"], "sha256": "ab" * 32, "tokens": 200_000},
        "models": [_model(name, layers, heads, dice) for name in names],
        "perplexity": [_perplexity(name, length, dice) for name in names for length in lengths],
        "retrieval": [_retrieval(name, task, length, dice) for name in names for task in tasks for length in lengths],
    }


def _model(name: str, layers: int, heads: int, dice: random.Random) -> dict[str, Any]:
    role, scaling, *_ = MODELS[name]
    is_biased = name in ("drope-log-score", "disentangled-stretched-recalibrated")
    return {
        "name": name,
        "path": f"out/{name}",
        "sha256": "cd" * 32,
        "model_type": "llama_drope" if role == "converted" else "llama",
        "window": WINDOW,
        "scaling": scaling,
        "role": role,
        "drope_parameters": {"rope_scale": 0.0, "position_bias": {"type": "log"}} if role == "converted" else None,
        "bias": _bias(layers, heads, dice, name) if is_biased else None,
        "gates": {"kind": "head", "layers": list(range(layers)), "values": [[0.7] * heads] * layers}
        if is_biased
        else None,
        "training": _training(dice) if role == "converted" and name != "nope" else None,
        "attention_scale": _scale() if name == "drope-log-score" else None,
    }


def _bias(layers: int, heads: int, dice: random.Random, name: str) -> dict[str, Any]:
    distances = sorted({0, *(round(2 ** (step / 4)) for step in range(4 * 13 + 1))})
    is_log = name == "drope-log-score"

    def value(slope: float, distance: int) -> float:
        if is_log:
            return round(-slope * math.log1p(distance), 4)
        return round(3 * math.cos(slope * math.log1p(distance)) / (1 + 0.1 * distance**0.5), 4)

    slopes = [[dice.uniform(0.05, 1.4) for _ in range(heads)] for _ in range(layers)]
    return {
        "kind": "log" if is_log else "disentangled",
        "distances": distances,
        "layers": list(range(layers)),
        "values": [[[value(slope, distance) for distance in distances] for slope in layer] for layer in slopes],
    }


def _training(dice: random.Random) -> dict[str, Any]:
    steps = list(range(10, 1001, 10))
    return {
        "step": steps,
        "tokens": [step * 16384 for step in steps],
        "loss": [
            round(
                2.9 + 0.9 * math.exp(-step / 150) + 0.5 * math.exp(-(((step - 420) / 120) ** 2)) + dice.gauss(0, 0.03),
                4,
            )
            for step in steps
        ],
        "rope_scale": [round(min(1.0, max(0.0, (600 - step) / 400)), 4) for step in steps],
        "temperature": [round(max(1.0, 4.0 - 3 * step / 800), 4) for step in steps],
        "gate": [round(0.73 + 0.15 * step / 1000, 4) for step in steps],
        "bias_norm": [None if step < 50 else round(5 + step / 400, 4) for step in steps],
    }


def _scale() -> dict[str, Any]:
    return {
        "coefficient": 0.1172,
        "curve": [
            {
                "length": length,
                "factor": 1 + 0.1172 * max(0.0, math.log(length / WINDOW)),
                "without": plain,
                "with": scaled,
            }
            for length, plain, scaled in (
                (2048, 18.9, 18.9),
                (4096, 19.4, 18.8),
                (8192, 22.3, 18.95),
                (16384, 31.0, 19.6),
            )
        ],
    }


def _perplexity(name: str, length: int, dice: random.Random) -> dict[str, Any]:
    rise, scaling = MODELS[name][2], MODELS[name][1]
    edges = list(range(0, length + 1, 64))

    def nats(place: float) -> float:
        value = 2.85 + 1.3 / math.sqrt(1 + place / 24) + dice.gauss(0, 0.025)
        if scaling and length > WINDOW:
            value += rise * 0.2 * math.log2(length / WINDOW)
        elif place > WINDOW:
            value += rise * (1 - math.exp(-(place - WINDOW) / 900))
        return round(value, 4)

    by_position = [nats((low + high) / 2) for low, high in itertools.pairwise(edges)]
    second = by_position[len(by_position) // 2 :]
    perplexity = math.exp(sum(second) / len(second))
    return {
        "model": name,
        "length": length,
        "perplexity": round(perplexity, 4),
        "low": round(perplexity * 0.985, 4),
        "high": round(perplexity * 1.015, 4),
        "tokens": 100_000,
        "windows": 2 * 100_000 // length,
        "edges": edges,
        "by_position": by_position,
    }


def _retrieval(name: str, task: str, length: int, dice: random.Random) -> dict[str, Any]:
    *_, inside, outside = MODELS[name]
    far = min(1.0, max(0.0, math.log2(length / WINDOW) / 2))
    chance = (inside + (outside - inside) * far) * (1 - 0.12 * TASKS.index(task) * (0.4 + far))
    parts = []
    for depth in range(5):
        hits = sum(dice.random() < max(0.0, chance - 0.12 * far * (2 - abs(depth - 2))) for _ in range(16))
        parts.append({"from": depth / 5, "to": (depth + 1) / 5, "values": 16, "hits": hits})
    counted = [
        {**{key: part[key] for key in ("from", "to", "values")}, **wilson(int(part["hits"]), 16)} for part in parts
    ]
    total = sum(int(part["hits"]) for part in parts)
    asked = f"What number does the quiet heron of {task} hold?"
    return {
        "model": name,
        "task": task,
        "length": length,
        "trials": 20,
        **wilson(total, 80),
        "by_depth": counted,
        "examples": [
            {"question": asked, "expected": ["4821903"], "answer": " 4821903" if total > 40 else " 4821 and so on"}
        ],
    }


def sample_bench() -> dict[str, Any]:
    rows = [
        {
            "variant": variant,
            "measure": measure,
            "length": length,
            "ratio": ratio,
            "low": ratio - 0.02,
            "high": ratio + 0.03,
            "value": ratio * stock,
            "stock": stock,
            "rounds": 5,
        }
        for measure, stock in (("prefill", 0.82), ("memory", 1.3e9), ("decode", 0.021), ("train", 2.4))
        for variant, base in (("NoPE", 0.96), ("table", 1.31), ("low rank 16, head gate", 1.07))
        for length in (1024, 4096, 16384)
        for ratio in [round(base + (0.02 if measure == "train" else 0.0) + length / 400_000, 4)]
    ]
    return {
        "machine": {"cpu": "2 × some processor", "torch": "2.13.0", "transformers": "5.24.0"},
        "settings": {"threads": 2, "dtype": "bfloat16", "device": "cpu"},
        "rows": rows,
        "skipped": {"others: dense bias": "takes 2.1 GB."},
    }

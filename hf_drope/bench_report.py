"""What `bench` found: as a table, as JSON and as a picture, beside the ratios that this project means to stay below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from .bench_variants import STOCK

# By device, measure and variant: length → ratio to stay below. "flex" is what a variant runs on.
Bounds = dict[str, dict[str, dict[int, float]]]


def _at(lengths: tuple[int, ...], **bounds: tuple[float, ...] | float) -> dict[str, dict[int, float]]:
    spread = {name: (b,) * len(lengths) if isinstance(b, float) else b for name, b in bounds.items()}
    return {name.replace("_", " "): dict(zip(lengths, b, strict=False)) for name, b in spread.items()}


_CPU, _GPU = (1024, 4096, 16384), (4096, 16384, 65536)
_ON_GPU = _at(_GPU, NoPE=1.0, low_rank=1.06, table_flex=1.25, score_gate_flex=1.35)
TARGETS: dict[str, Bounds] = {
    "cpu": {
        "prefill": _at(
            _CPU,
            NoPE=(0.97, 0.97, 1.0),
            low_rank=(1.10, 1.08, 1.10),
            table=(1.5, 1.5, 1.8),
            log=(1.5, 1.5, 1.8),
            linear=(1.5, 1.5, 1.8),
            score_gate=(1.7, 1.8, 2.2),
            disentangled_pruned=(1.3, 1.5, 1.9),
        ),
        "decode": _at(_CPU, NoPE=(0.97, 0.97, 1.0), any_bias=(1.10, 1.15, 1.20)),
        "train": _at(
            _CPU,
            NoPE=(0.97, 0.97),
            low_rank=(1.20, 1.15),
            table=(1.8, 2.2),
            score_gate=(2.5, 3.0),
            disentangled_pruned=(1.4, 1.7),
        ),
        "memory": _at(_CPU, any_bias=(1.15, 1.2, 1.3)),
    },
    "cuda": {"prefill": _ON_GPU, "train": _ON_GPU},
}


class Row(NamedTuple):
    """Medians over the rounds, and the quartiles of the ratio.

    For a memory `ratio` is of peak bytes, and `value` and `stock` are bytes; otherwise seconds.
    """

    variant: str
    measure: str
    length: int
    ratio: float
    low: float
    high: float
    value: float
    stock: float
    rounds: int


def describe(result: dict[str, Any]) -> str:
    """A table: a line a variant and measure, a column a length."""
    rows = [Row(**row) for row in result["rows"]]
    lengths = sorted({row.length for row in rows})
    cells = {(row.measure, row.variant, row.length): row for row in rows}
    device = result["settings"]["device"]
    settings = result["settings"]
    where = ", ".join(
        value if name in ("cpu", "gpu") else f"{name} {value}" for name, value in result["machine"].items()
    )
    lines = [
        f"{where}, {settings['threads']} threads, {settings['dtype']}; ratios to {STOCK}, peaks of memory as well",
        "",
    ]
    for measure in dict.fromkeys(row.measure for row in rows):
        names = list(dict.fromkeys(row.variant for row in rows if row.measure == measure))
        width = max(map(len, names))
        lines.append(f"{measure:{width}}  " + "  ".join(f"{length:>18}" for length in lengths))
        for name in names:
            found = [cells.get((measure, name, length)) for length in lengths]
            lines.append(f"{name:{width}}  " + "  ".join(f"{_cell(row, device):>18}" for row in found))
        lines.append("")
    lines += [f"skipped {name}: {why}" for name, why in result["skipped"].items()]
    return "\n".join(lines).rstrip()


def _cell(row: Row | None, device: str) -> str:
    if row is None:
        return "–"
    bound = target(row, device)
    verdict = "" if bound is None else (" pass" if row.ratio <= bound else f" > {bound:g}")
    return f"{row.ratio:.2f}{verdict}"


def write_json(result: dict[str, Any], path: str | Path) -> None:
    Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def target(row: Row, device: str = "cpu") -> float | None:
    """The ratio that this project means to stay below, by variant, measure, length and device; None where it has set none."""
    bounds = TARGETS.get(device.partition(":")[0], {}).get(row.measure, {})
    for name in _kinds(row.variant):
        if name in bounds:
            return bounds[name].get(row.length)
    return None


def _kinds(variant: str) -> list[str]:
    """What a variant is called among the targets, the most telling name first."""
    if variant.startswith("others"):
        return []
    on_flex, name = variant.endswith(", flex"), variant.removesuffix(", flex")
    score = ["score gate"] if "score gate" in name else []
    if name.startswith("disentangled"):
        kinds = score or (["disentangled pruned"] if "rank" in name else [])
    else:
        kinds = score or [kind for kind in ("NoPE", "low rank", "table", "log", "linear") if name.startswith(kind)]
    kinds = [f"{kind} flex" for kind in kinds] if on_flex else kinds
    return kinds if name == "NoPE" or on_flex else [*kinds, "any bias"]


def has_targets(result: dict[str, Any]) -> bool:
    """Whether anything that was measured has a target: some lengths and variants have none."""
    return any(target(Row(**row), result["settings"]["device"]) is not None for row in result["rows"])


def missed(result: dict[str, Any]) -> list[Row]:
    rows, device = [Row(**row) for row in result["rows"]], result["settings"]["device"]
    return [row for row in rows if (target(row, device) or row.ratio) < row.ratio]


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Ratio against length, a panel a measure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A plot needs matplotlib: pip install hf-drope[plot].") from error
    rows = [Row(**row) for row in result["rows"]]
    measures = list(dict.fromkeys(row.measure for row in rows))
    figure = Figure(figsize=(5 * len(measures), 5), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for panel, measure in zip(panels, measures, strict=True):
        for name in dict.fromkeys(row.variant for row in rows if row.measure == measure):
            line = [row for row in rows if (row.measure, row.variant) == (measure, name)]
            panel.plot([row.length for row in line], [row.ratio for row in line], marker="o", label=name)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set(xscale="log", xlabel="tokens", ylabel=f"{measure}, ratio to {STOCK}", title=measure)
    panels[-1].legend(fontsize="small", bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.savefig(path, dpi=150)

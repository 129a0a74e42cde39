"""What `bench` found: as a table, as JSON and as a picture, beside the ratios that this project means to stay below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from .bench_variants import STOCK

TARGET_LENGTHS = (1024, 4096, 16384)
TARGETS: dict[str, dict[str, tuple[float, ...]]] = {
    "prefill": {
        "NoPE": (0.97, 0.97, 1.0),
        "low rank": (1.10, 1.08, 1.10),
        "table": (1.5, 1.5, 1.8),
        "log": (1.5, 1.5, 1.8),
        "linear": (1.5, 1.5, 1.8),
        "score gate": (1.7, 1.8, 2.2),
        "disentangled, rank": (1.3, 1.5, 1.9),
    },
    "decode": {"NoPE": (0.97, 0.97, 1.0), "any bias": (1.10, 1.15, 1.20)},
    "train": {
        "NoPE": (0.97, 0.97),
        "low rank": (1.20, 1.15),
        "table": (1.8, 2.2),
        "score gate": (2.5, 3.0),
        "disentangled, rank": (1.4, 1.7),
    },
    "memory": {"any bias": (1.15, 1.2, 1.3)},
}


class Row(NamedTuple):
    """Medians over the rounds. For "memory" `ratio` is of peak bytes, and `value`, `stock` are bytes; otherwise seconds."""

    variant: str
    measure: str
    length: int
    ratio: float
    low: float
    high: float
    value: float
    stock: float


def describe(result: dict[str, Any]) -> str:
    """A table: a line a variant and measure, a column a length."""
    rows = [Row(**row) for row in result["rows"]]
    lengths = sorted({row.length for row in rows})
    cells = {(row.measure, row.variant, row.length): row for row in rows}
    lines = [", ".join(result["machine"].values()), ""]
    for measure in dict.fromkeys(row.measure for row in rows):
        names = list(dict.fromkeys(row.variant for row in rows if row.measure == measure))
        width = max(map(len, names))
        lines.append(f"{measure:{width}}  " + "  ".join(f"{length:>18}" for length in lengths))
        for name in names:
            found = [cells.get((measure, name, length)) for length in lengths]
            lines.append(f"{name:{width}}  " + "  ".join(f"{_cell(row):>18}" for row in found))
        lines.append("")
    lines += [f"skipped {name}: {why}" for name, why in result["skipped"].items()]
    return "\n".join(lines).rstrip()


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    bound = target(row)
    verdict = "" if bound is None else (" pass" if row.ratio <= bound else f" > {bound:g}")
    return f"{row.ratio:.2f}{verdict}"


def write_json(result: dict[str, Any], path: str | Path) -> None:
    Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def target(row: Row) -> float | None:
    """The ratio that this project means to stay below, by variant, measure and length; None where it has set none."""
    if row.variant.startswith("others"):
        return None
    bounds = TARGETS[row.measure]
    names = (
        ("score gate",)
        if "score gate" in row.variant
        else tuple(name for name in bounds if row.variant.startswith(name))
    )
    for name in (*names, "NoPE" if row.variant.startswith("NoPE") else "any bias"):
        if name in bounds:
            return dict(zip(TARGET_LENGTHS, bounds[name], strict=False)).get(row.length)
    return None


def missed(result: dict[str, Any]) -> list[Row]:
    rows = [Row(**row) for row in result["rows"]]
    return [row for row in rows if (target(row) or row.ratio) < row.ratio]


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

"""The reference experiment's results over its seeds, as a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

RECALL = ("passkey", "multikey")
# Forms drawn in the picture, by the beginning of their names, and how.
DRAWN = {
    "source": ("black", "-"),
    "source + ntk": ("0.6", ":"),
    "source + yarn": ("0.6", "--"),
    "YaRN": ("0.6", "-"),
    "nope": ("tab:blue", "-"),
    "drope": ("tab:green", "-"),
    "disentangled": ("tab:red", "-"),
    "disentangled + yarn": ("tab:red", "--"),
    "hybrid": ("tab:purple", "-"),
}


def figures(results: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, list[float]]]]:
    """{form: {length: {"perplexity" or "retrieval": a value a seed}}}, retrieval as the mean of single- and multi-key."""
    found: dict[str, dict[int, dict[str, list[float]]]] = {}
    for result in results:
        for row in result["perplexity"]:
            cell = found.setdefault(row["model"], {}).setdefault(row["length"], {"perplexity": [], "retrieval": []})
            cell["perplexity"].append(row["perplexity"])
        rates: dict[tuple[str, int], list[float]] = {}
        for row in result["retrieval"]:
            if row["task"] in RECALL:
                rates.setdefault((row["model"], row["length"]), []).append(row["rate"])
        for (model, length), values in rates.items():
            found[model][length]["retrieval"].append(100 * mean(values))
    return found


def write_table(results: list[dict[str, Any]], out: Path) -> str:
    """Write `table.md`, `table.json` and, with matplotlib, `figure.png` to `out`; returns the table."""
    found = figures(results)
    lengths = sorted(results[0]["settings"]["lengths"])
    header = [f"ppl {length}" for length in lengths] + [f"retrieval {length}" for length in lengths]
    lines = ["| form | " + " | ".join(header) + " |", "|---|" + "---|" * len(header)]
    for form, by_length in found.items():
        cells = [_cell(by_length[length]["perplexity"], 2) for length in lengths]
        cells += [_cell(by_length[length]["retrieval"], 0) for length in lengths]
        lines.append(f"| {form} | " + " | ".join(cells) + " |")
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "table.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    _draw(found, lengths, out / "figure.png")
    return "\n".join(lines)


def _cell(values: Iterable[float], digits: int) -> str:
    """The mean over the seeds, and from where to where they go."""
    values = list(values)
    middle = f"{mean(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})" if len(values) > 1 else middle


def _draw(found: dict[str, Any], lengths: list[int], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for form, (colour, style) in DRAWN.items():
        if form not in found:
            continue
        for axes, name in ((left, "perplexity"), (right, "retrieval")):
            values = [mean(found[form][length][name]) for length in lengths]
            axes.plot(lengths, values, style, color=colour, marker="o", markersize=4, label=form)
    for axes, name in ((left, "perplexity"), (right, "retrieval, %")):
        axes.set(xscale="log", xlabel="context (tokens)", ylabel=name)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        axes.axvline(lengths[0], color="0.8", linewidth=1, zorder=0)
    left.set_yscale("log")
    right.set_ylim(-3, 103)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

"""An evaluation as text: for each task a table of models by lengths."""

from __future__ import annotations

from typing import Any

from .evaluation_plan import PERPLEXITY

_NONE = "–"


def describe(results: dict[str, Any]) -> str:
    """A table a task: a line a model, a column a length, each figure with its 95 % interval."""
    settings = results["settings"]
    tables = []
    for task in settings["tasks"]:
        rows = (
            results["perplexity"]
            if task == PERPLEXITY
            else [row for row in results["retrieval"] if row["task"] == task]
        )
        cells = {(row["model"], row["length"]): _cell(row, task) for row in rows}
        tables.append(_table(_title(results, task), [m["name"] for m in results["models"]], settings["lengths"], cells))
    return "\n\n".join(tables)


def _title(results: dict[str, Any], task: str) -> str:
    if task == PERPLEXITY:
        return "perplexity"
    return f"{task}, % of the answers, {results['settings']['trials']} trials"


def _cell(row: dict[str, Any], task: str) -> str:
    if task == PERPLEXITY:
        figures = [_NONE if row[key] is None else f"{row[key]:.4g}" for key in ("perplexity", "low", "high")]
    else:
        figures = [f"{100 * row[key]:.0f}" for key in ("rate", "low", "high")]
    return f"{figures[0]} ({figures[1]} to {figures[2]})"


def _table(title: str, names: list[str], lengths: list[int], cells: dict[tuple[str, int], str]) -> str:
    columns = [[str(length), *(cells.get((name, length), _NONE) for name in names)] for length in lengths]
    first = [title, *names]
    widths = [max(map(len, column)) for column in (first, *columns)]
    lines = []
    for place, name in enumerate(first):
        line = [f"{name:{widths[0]}}"]
        line += [f"{column[place]:>{width}}" for column, width in zip(columns, widths[1:], strict=True)]
        lines.append("  ".join(line))
    return "\n".join(lines)

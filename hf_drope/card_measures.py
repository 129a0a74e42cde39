"""The measured part of a model card: tables with intervals, and in words what is worse than the source or was not measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NO_RECORD = (
    "Not measured: no evaluation of these weights is recorded (`hf-drope evaluate MODEL --against SRC --update-card`)."
)
Row = dict[str, Any]


def measured(evaluation: dict[str, Any]) -> str:
    """Perplexity and retrieval by length, beside the source and the baselines; one sentence where there is no record."""
    if not evaluation:
        return _NO_RECORD
    parts = [_preamble(evaluation)]
    if evaluation["perplexity"]:
        parts.append(
            "Perplexity per token by context length, over the second half of each window, with 95 % intervals:\n\n"
            + _table(evaluation, {"": evaluation["perplexity"]}, _perplexity)
        )
    if evaluation["retrieval"]:
        tasks: dict[str, list[Row]] = {}
        for row in evaluation["retrieval"]:
            tasks.setdefault(row["task"], []).append(row)
        trials = sorted({row["trials"] for row in evaluation["retrieval"]})
        parts.append(
            f"Values retrieved, exactly and greedily, by context length ({_range(trials)} trials a cell, 95 % Wilson "
            "intervals):\n\n" + _table(evaluation, tasks, _rate)
        )
    return "\n\n".join(parts)


def _preamble(evaluation: dict[str, Any]) -> str:
    provenance, settings = evaluation["provenance"], evaluation["settings"]
    versions = ", ".join(
        f"{name} {provenance[key]}"
        for name, key in (("hf_drope", "hf_drope"), ("torch", "torch"), ("transformers", "transformers"))
        if provenance.get(key)
    )
    parts = [f"By `hf-drope evaluate`{f' ({versions})' if versions else ''}"]
    if settings.get("dtype"):
        parts.append(f"in {settings['dtype']}")
    if settings.get("seed") is not None:
        parts.append(f"seed {settings['seed']}")
    text = ", ".join(parts) + "."
    if evaluation.get("text"):
        files = ", ".join(f"`{name}`" for name in evaluation["text"]["files"])
        digest = evaluation["text"]["sha256"][:16]
        text += f" Text: {files} (sha256 `{digest}`)."
    if not provenance.get("finished"):
        text += " The evaluation had not finished when this was written."
    return text


def _table(evaluation: dict[str, Any], groups: dict[str, list[Row]], cell: Callable[[Row], str]) -> str:
    lengths = sorted({row["length"] for rows in groups.values() for row in rows})
    header = (["task"] if "" not in groups else []) + ["model", *map(str, lengths)]
    lines = [header, ["---"] * len(header)]
    for task, rows in groups.items():
        cells = {(row["model"], row["length"]): cell(row) for row in rows}
        for model in evaluation["models"]:
            name = model["name"]
            values = [cells.get((name, length), "–") for length in lengths]
            if set(values) == {"–"}:
                continue
            label = "**this model**" if name == evaluation["name"] else f"{name}{_role(model)}"
            lines.append(([task] if task else []) + [label, *values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _role(model: Row) -> str:
    if model.get("position_scaling"):
        return " (this model, its position terms stretched)"
    return {"source": " (the source)", "baseline": " (baseline)", "stock": " (a stock model)"}.get(
        model.get("role", ""), ""
    )


def _perplexity(row: Row) -> str:
    if row["perplexity"] is None:
        return "not a number"
    # Of one window there is no interval.
    return f"{row['perplexity']:.4g}" + (f" ({row['low']:.4g}–{row['high']:.4g})" if _has_interval(row) else "")


def _has_interval(row: Row) -> bool:
    return row["low"] is not None and row["high"] is not None


def _rate(row: Row) -> str:
    return f"{100 * row['rate']:.0f} % ({100 * row['low']:.0f}–{100 * row['high']:.0f})"


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def limits(evaluation: dict[str, Any], *, untouched: bool) -> str:
    """What is worse than the source and what was not measured, as a list; `untouched`: dropped, not calibrated or trained."""
    lines = []
    if untouched and not evaluation:
        lines.append(
            "The position encoding was taken out, and neither a calibration nor a training is recorded since: expect it to "
            "predict far worse than its source until it is trained."
        )
    if evaluation:
        lines += [*_worse(evaluation), *_gaps(evaluation)]
    else:
        lines.append("Perplexity and retrieval were not measured, so nothing is known about what got worse.")
    lines.append("Standard benchmarks, other languages and tasks, bias and safety were not measured by these commands.")
    return "\n".join(f"- {line}" for line in lines)


def _worse(evaluation: dict[str, Any]) -> list[str]:
    """Where this model is behind its source by more than both intervals allow."""
    source = next((model["name"] for model in evaluation["models"] if model.get("role") == "source"), None)
    if source is None:
        return ["The source was not measured beside it, so these numbers do not say what the conversion cost."]
    pairs = [
        (mine, theirs)
        for mine, theirs in _pairs(evaluation["perplexity"], evaluation["name"], source)
        if _has_interval(mine) and _has_interval(theirs)
    ]
    found = [
        f"{mine['length']} tokens (+{100 * (mine['perplexity'] / theirs['perplexity'] - 1):.1f} %)"
        for mine, theirs in pairs
        if mine["low"] > theirs["high"]
    ]
    lines = [f"Perplexity is higher than the source's at {', '.join(found)}."] if found else []
    rates = _pairs(evaluation["retrieval"], evaluation["name"], source)
    lost = [
        f"{mine['task']} at {mine['length']} ({100 * mine['rate']:.0f} % against {100 * theirs['rate']:.0f} %)"
        for mine, theirs in rates
        if mine["high"] < theirs["low"]
    ]
    lines += [f"It retrieves less than the source: {', '.join(lost)}."] if lost else []
    if not lines and (pairs or rates):
        lines = [
            "Where both were measured, no interval of its numbers lies behind the source's; smaller differences stay open."
        ]
    return lines


def _pairs(rows: list[Row], mine: str, theirs: str) -> list[tuple[Row, Row]]:
    other = {(row.get("task"), row["length"]): row for row in rows if row["model"] == theirs}
    places = [(row, other.get((row.get("task"), row["length"]))) for row in rows if row["model"] == mine]
    return [(row, beside) for row, beside in places if beside is not None]


def _gaps(evaluation: dict[str, Any]) -> list[str]:
    lines = []
    mine = [
        row for name in ("perplexity", "retrieval") for row in evaluation[name] if row["model"] == evaluation["name"]
    ]
    for name in ("perplexity", "retrieval"):
        if not any(row["model"] == evaluation["name"] for row in evaluation[name]):
            lines.append(f"{name.capitalize()} was not measured.")
    perplexities = [row for row in mine if "perplexity" in row]
    broken = [str(row["length"]) for row in perplexities if row["perplexity"] is None]
    if broken:
        lines.append(f"Its perplexity is no finite number at {', '.join(broken)} tokens.")
    bare = [str(row["length"]) for row in perplexities if row["perplexity"] is not None and not _has_interval(row)]
    if bare:
        lines.append(f"The text held too few windows of {', '.join(bare)} tokens for an interval of the perplexity.")
    model = next(model for model in evaluation["models"] if model["name"] == evaluation["name"])
    if mine:
        longest = max(row["length"] for row in mine)
        window = model.get("window")
        beyond = "" if window is None else f", {longest / window:.3g} times the window of {window} it was trained with"
        lines.append(f"The longest context measured is {longest} tokens{beyond}.")
    return lines

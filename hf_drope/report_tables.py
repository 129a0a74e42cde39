"""The report's tables: everything that its figures show, as numbers, and what has no figure."""

from __future__ import annotations

import json
import shlex
import statistics
from typing import Any

from .report_figures import depth_of
from .report_numbers import (
    Interval,
    Results,
    by_octave,
    change,
    findings,
    hundredths,
    interval_of,
    number,
    percent,
    verdict,
)
from .report_page import Cell, Markup, definitions, markup, swatch, table

_MARKS = {"better": "▲ ", "worse": "▼ ", "": ""}


def model_cell(results: Results, colours: dict[str, str], name: str) -> Markup:
    return Markup(f"{swatch(colours[name])}{markup(results.label(name, 80))}")


def _length_header(results: Results) -> list[object]:
    def kind(length: int) -> Cell:
        if results.window is None:
            return Cell(f"{length:,}")
        if results.beyond(length):
            return Cell(f"{length:,}", f"{results.times(length)} window", "beyond")
        return Cell(f"{length:,}", "in window")

    return [kind(length) for length in results.lengths]


def summary(results: Results, colours: dict[str, str]) -> Markup:
    """Model × length: perplexity with its change from the source, mean retrieval with its interval."""
    groups: list[tuple[object, list[Any]]] = []
    if results.perplexity:
        rows = [
            [model_cell(results, colours, name), *(_perplexity_cell(results, name, at) for at in results.lengths)]
            for name in results.names
        ]
        groups.append(("Perplexity, lower is better", rows))
    if results.retrieval:
        rows = [
            [model_cell(results, colours, name), *(_rate_cell(results, name, at) for at in results.lengths)]
            for name in results.names
        ]
        of = f"mean of {len(results.tasks)} tasks" if len(results.tasks) > 1 else results.tasks[0]
        groups.append((f"Retrieval ({of}), higher is better", rows))
    caption = "By length in tokens."
    if results.source is not None:
        caption += (
            f" ▲ better and ▼ worse than {results.source} at the same length, where 95 % intervals do not overlap."
        )
    if results.perplexity and results.source is not None:
        caption += " Small under a perplexity: its change from the source."
    if results.retrieval:
        caption += " Small under a retrieval: its interval."
    return table(caption, ["Model", *_length_header(results)], groups, "summary")


def _perplexity_cell(results: Results, name: str, length: int) -> Cell:
    mine = results.perplexity_at(name, length)
    if mine is None:
        return Cell("–")
    theirs = results.perplexity_at(results.source, length) if results.source not in (None, name) else None
    found = verdict(mine, theirs, higher_is_better=False)
    small = change(mine.value, theirs.value) if theirs else ""
    return Cell(f"{_MARKS[found]}{number(mine.value)}", small, found)


def _rate_cell(results: Results, name: str, length: int) -> Cell:
    mine = results.mean_rate_at(name, length)
    if mine is None:
        return Cell("–")
    theirs = results.mean_rate_at(results.source, length) if results.source not in (None, name) else None
    found = verdict(mine, theirs, higher_is_better=True)
    note = f"{interval_of(mine)}, {mine.note}" if mine.note else interval_of(mine)
    return Cell(f"{_MARKS[found]}{percent(mine.value)}", note, found)


def findings_cards(results: Results, colours: dict[str, str]) -> Markup:
    """A card a converted model: its figures in the window and farthest from it, beside what they are to be held against."""
    cards = []
    for name, rows in findings(results).items():
        parts = []
        for row in rows:
            say = number if row.what == "perplexity" else percent
            found = verdict(row.mine, row.source, row.what == "retrieval")
            rivals = [] if row.source is None else [f"source\N{NO-BREAK SPACE}{say(row.source.value)}"]
            if row.best is not None:
                rivals.append(
                    f"{results.label(row.best[1]).removeprefix('+ ')}\N{NO-BREAK SPACE}{say(row.best[0].value)}"
                )
            small = f"<small>{markup(', '.join(rivals))}</small>" if rivals else ""
            kind = f' class="{found}"' if found else ""
            parts.append(
                f"<div><dt>{row.what} at {row.length:,}</dt><dd{kind}>{_MARKS[found]}{say(row.mine.value)}{small}</dd></div>"
            )
        cards.append(f"<li><strong>{model_cell(results, colours, name)}</strong><dl>{''.join(parts)}</dl></li>")
    return Markup(f'<ul class="findings">{"".join(cards)}</ul>' if cards else "")


def perplexity_by_length(results: Results, colours: dict[str, str]) -> Markup:
    def content(name: str, length: int) -> Cell:
        found = results.perplexity_at(name, length)
        if found is None:
            return Cell("–")
        return Cell(number(found.value), f"{number(found.low)}–{number(found.high)}" if found.has_width else "")

    rows = [
        [model_cell(results, colours, name), *(content(name, at) for at in results.lengths)] for name in results.names
    ]
    scored = {row["length"]: row.get("tokens") for row in results.perplexity.values() if row.get("tokens")}
    of = f" of {min(scored.values()):,} scored tokens or more" if scored else ""
    return table(f"Perplexity by length{of}; small: 95 % interval.", ["Model", *_length_header(results)], [("", rows)])


def perplexity_by_position(results: Results, colours: dict[str, str]) -> Markup:
    curves = {name: row for name in results.names if (row := results.longest_curve(name))}
    spans = {name: {(low, high): value for low, high, value in by_octave(row)} for name, row in curves.items()}
    header = sorted({span for found in spans.values() for span in found})
    lengths = {row["length"] for row in curves.values()}
    rows = [
        [
            Cell(
                model_cell(results, colours, name),
                f"windows of {curves[name]['length']:,}" if len(lengths) > 1 else "",
            ),
            *(number(found.get(span)) for span in header),
        ]
        for name, found in spans.items()
    ]
    of = "" if len(lengths) > 1 else f", in windows of {lengths.pop():,}"
    return table(
        f"Perplexity of the tokens from one position to another{of}.",
        ["Model", *(f"{low:,.0f}–{high:,.0f}" for low, high in header)],
        [("", rows)],
    )


def retrieval_by_length(results: Results, colours: dict[str, str], task: str | None) -> Markup:
    def content(name: str, length: int) -> Cell:
        found = results.mean_rate_at(name, length) if task is None else results.rate_at(name, task, length)
        if found is None:
            return Cell("–")
        return Cell(percent(found.value), f"{interval_of(found)}{', ' + found.note if found.note else ''}")

    rows = [
        [model_cell(results, colours, name), *(content(name, at) for at in results.lengths)] for name in results.names
    ]
    what = "Retrieval, mean over the tasks" if task is None else f"Retrieval, {task}"
    return table(f"{what}; small: 95 % interval.", ["Model", *_length_header(results)], [("", rows)])


def retrieval_by_depth(results: Results, colours: dict[str, str], task: str) -> Markup:
    """The cells of the heat map, with their intervals."""
    groups: list[tuple[object, list[Any]]] = []
    header: list[str] = []
    for name in results.names:
        found = sorted((key[2], row) for key, row in results.retrieval.items() if key[:2] == (name, task))
        rows = []
        for length, row in found:
            header = header or [depth_of(part) for part in row["by_depth"]]
            rows.append([f"{length:,}", *(_depth_cell(part) for part in row["by_depth"])])
        if rows:
            groups.append((model_cell(results, colours, name), rows))
    return table(f"{task}: retrieved, %, by length and depth; small: 95 % interval.", ["Length", *header], groups)


def _depth_cell(part: dict[str, Any]) -> Cell:
    if part.get("rate") is None:
        return Cell("–")
    found = Interval(part["rate"], part.get("low", part["rate"]), part.get("high", part["rate"]))
    return Cell(hundredths(found.value), interval_of(found))


def examples(results: Results) -> Markup:
    """A question of each task at the longest length it was asked at, and what each model answered."""
    groups = []
    for task in results.done_tasks:
        length = max(at for _, of, at in results.retrieval if of == task)
        asked = {
            name: row["examples"][0]
            for name in results.names
            if (row := results.retrieval.get((name, task, length))) and row.get("examples")
        }
        if asked:
            first = next(iter(asked.values()))
            rows: list[list[object]] = [
                ["question", Cell(first["question"], kind="text")],
                ["expected", Cell(", ".join(map(str, first["expected"])), kind="text")],
            ]
            rows += [
                [name, Cell(example["answer"], kind="text")]
                for name, example in asked.items()
                if example["question"] == first["question"]
            ]
            groups.append((f"{task}, {length:,} tokens", rows))
    return table("What was asked, and what came.", ["", Cell("Text", kind="text")], groups) if groups else Markup("")


def bias(model: dict[str, Any]) -> Markup:
    """The mean over heads of each layer's bias at some distances, and the heads' extremes."""
    found = model["bias"]
    last = len(found["distances"]) - 1
    places = sorted({round(step * last / 6) for step in range(7)})
    rows = []
    for layer, heads in zip(found["layers"], found["values"], strict=True):
        row: list[object] = [f"{layer}"]
        for place in places:
            values = [line[place] for line in heads if line[place] is not None]
            extremes = f"{_signed(min(values))} to {_signed(max(values))}" if values else ""
            row.append(Cell(_signed(sum(values) / len(values)) if values else "–", extremes))
        rows.append(row)
    header = ["Layer", *(f"{found['distances'][place]:,}" for place in places)]
    return table("The bias by distance: mean of the heads; small: lowest and highest head.", header, [("", rows)])


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def training(record: dict[str, Any], panels: dict[str, list[str]]) -> Markup:
    """First, middle and last entries of a record of training."""
    keys = [key for keys in panels.values() for key in keys]
    count = max(len(record.get(key) or ()) for key in keys)
    places = sorted({round(at * (count - 1) / 8) for at in range(9)})
    unit = "tokens" if any(value is not None for value in record.get("tokens") or ()) else "step"

    def value(key: str, place: int) -> str:
        given = record.get(key) or []
        return "–" if place >= len(given) or given[place] is None else f"{given[place]:,.4g}"

    rows = [
        [f"{record[unit][place]:,}" if record[unit][place] is not None else "–", *(value(key, place) for key in keys)]
        for place in places
    ]
    return table("Nine moments of the training.", [unit, *(key.replace("_", " ") for key in keys)], [("", rows)])


def gates(found: dict[str, Any]) -> Markup:
    """What is constant about a model's gates: numbers per layer and head as a table, all else by name."""
    plain = [(key, _plain(value)) for key, value in found.items() if not _is_grid(value) and key != "layers"]
    parts = [definitions(plain)] if plain else []
    for key, grid in ((key, value) for key, value in found.items() if _is_grid(value)):
        layers = found.get("layers") or range(len(grid))
        heads = max(map(len, grid))
        rows = [
            [f"{layer}", *("–" if value is None else f"{value:.3g}" for value in row)]
            for layer, row in zip(layers, grid, strict=False)
        ]
        parts.append(
            table(
                f"Gates, {key.replace('_', ' ')}, by layer and head.",
                ["Layer", *(f"head {head}" for head in range(heads))],
                [("", rows)],
            )
        )
    return Markup("".join(parts))


def _is_grid(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, list) and row for row in value)


def _plain(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def attention_scale(model: dict[str, Any]) -> Markup:
    curve = sorted(model["attention_scale"]["curve"], key=lambda at: at["length"])
    rows = [
        [
            f"{at['length']:,}",
            "–" if at.get("factor") is None else f"{at['factor']:.4g}",
            number(at.get("without")),
            number(at.get("with")),
        ]
        for at in curve
    ]
    return table(
        "Perplexity with and without the attention scale.", ["Length", "Factor", "Without", "With"], [("", rows)]
    )


def cost(bench: dict[str, Any]) -> Markup:
    """Ratios to the stock model, by measure and variant, a column a length."""
    lengths = sorted({row["length"] for row in bench["rows"]})
    found = {(row["measure"], row["variant"], row["length"]): row for row in bench["rows"]}
    groups: list[tuple[object, list[Any]]] = []
    for measure in dict.fromkeys(row["measure"] for row in bench["rows"]):
        variants = dict.fromkeys(row["variant"] for row in bench["rows"] if row["measure"] == measure)
        say = _bytes if "memory" in measure else _seconds
        stock = [
            [row["stock"] for row in bench["rows"] if (row["measure"], row["length"]) == (measure, at)]
            for at in lengths
        ]
        rows: list[list[object]] = [
            ["stock, RoPE", *(say(statistics.median(values)) if values else "–" for values in stock)]
        ]
        rows += [[variant, *(_cost_cell(found.get((measure, variant, at))) for at in lengths)] for variant in variants]
        groups.append((measure, rows))
    caption = (
        "Tokens in the column heads. First what the stock model takes, in time or for memory at its peak; then ratios to it, "
        "below 1 is cheaper, and small their quartiles."
    )
    return table(caption, ["Variant", *(f"{length:,}" for length in lengths)], groups)


def _cost_cell(row: dict[str, Any] | None) -> Cell:
    return Cell("–") if row is None else Cell(f"{row['ratio']:.2f}", f"{row['low']:.2f}–{row['high']:.2f}")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.3g} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"


def models(results: Results, colours: dict[str, str]) -> Markup:
    rows = [
        [
            model_cell(results, colours, model["name"]),
            Cell(model.get("role") or "–"),
            Cell(model.get("model_type") or "–"),
            Cell("–" if model.get("window") is None else f"{model['window']:,}"),
            Cell(model.get("path") or "–", kind="text"),
            Cell(Markup(f"<code>{markup(model.get('sha256') or '–')}</code>"), kind="text"),
            Cell(
                Markup(f"<code>{markup(json.dumps(settings, ensure_ascii=False))}</code>") if settings else "–",
                kind="text",
            ),
        ]
        for model in results.models
        for settings in [model.get("drope_parameters")]
    ]
    header = ["Model", "Role", "Type", "Window", *(Cell(name, kind="text") for name in ("Path", "SHA-256", "Settings"))]
    return table("The models.", header, [("", rows)])


def provenance(results: Results) -> Markup:
    """Versions, command, text, seeds and settings."""
    entries: list[tuple[object, object]] = []
    for key, value in results.provenance.items():
        if value is not None:
            if key == "continued_with":
                text: object = "; ".join(", ".join(f"{name} {new}" for name, new in later.items()) for later in value)
            else:
                text = shlex.join(map(str, value)) if isinstance(value, list) else value
            shown = Markup(f"<code>{markup(text)}</code>") if key in ("command", "git_revision") else text
            entries.append((key.replace("_", " "), shown))
    text = results.content.get("text") or {}
    for key, name in (("files", "text"), ("sha256", "SHA-256 of the text"), ("tokens", "tokens of the text")):
        if text.get(key) is not None:
            value = text[key]
            entries.append((name, ", ".join(map(str, value)) if isinstance(value, list) else _plain(value)))
    for key, value in results.settings.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else _plain(value)
        entries.append((key.replace("_", " "), shown or "none"))
    if results.content.get("identity"):
        entries.append(("identity", Markup(f"<code>{markup(results.content['identity'])}</code>")))
    return definitions(entries)

"""The report of an evaluation: `report.html`, one file that needs no network, and its figures as PNG."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import report_tables as tables
from .report_drawing import Picture, colours, house_style, settle, to_png, to_svg
from .report_figures import perplexity_by_length, perplexity_by_position, retrieval_by_length, retrieval_map
from .report_inside import attention_scale, bias_curves, bias_map, chosen_layers, recorded, training_course
from .report_numbers import Results, words
from .report_page import Markup, escape, figure, figures, fold, page, paragraph, section, subheading, swatch
from .whole_file import write_whole

RESULTS, REPORT = "results.json", "report.html"
FORMAT = 1


def write_report(folder: str | Path, bench: str | Path | None = None) -> list[Path]:
    """Write `report.html` and its figures as PNG beside an evaluation's `results.json`, finished or not.

    Args:
        folder: holds `results.json`, as `hf-drope evaluate --out` writes it; the report goes there and replaces an earlier one.
        bench: a file of `hf-drope bench --json`, for the table of costs.

    Returns:
        What was written, `report.html` first. Without Matplotlib there are no figures, and the page says so.

    Raises:
        ValueError: a file is missing or is not of this form.
    """
    folder = Path(folder)
    content = _read(folder / RESULTS, "models", f"hf-drope evaluate --out {folder} writes it")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{folder / RESULTS} has format {content.get('format')!r}, and this version of hf_drope reads {FORMAT}; evaluate again."
        )
    costs = None if bench is None else _read(Path(bench), "rows", "hf-drope bench --json writes one")
    results = Results(content)
    gallery = Gallery(folder)
    text = _page(results, costs, gallery)
    write_whole(folder / REPORT, text)
    return [folder / REPORT, *gallery.files]


def _read(path: Path, key: str, advice: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; {advice}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        raise ValueError(f"{path} has no list {key!r}; {advice}.")
    return content


class Gallery:
    """Draws figures, keeps each as PNG in `folder` and gives it back as SVG; nothing without Matplotlib."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []
        try:
            import matplotlib  # noqa: F401

            self.draws = True
        except ImportError:
            self.draws = False

    def svg(self, draw: Callable[..., Picture], *arguments: Any) -> str:
        if not self.draws:
            return ""
        with house_style():
            picture = draw(*arguments)
            settle(picture.figure)
            self.files.append(to_png(picture, self.folder))
            return to_svg(picture)


def _page(results: Results, costs: dict[str, Any] | None, gallery: Gallery) -> str:
    palette = colours(results)
    slugs = _slugs(results.names)
    made = [
        ("summary", "Summary", "What you gain and what you lose", _summary(results, palette)),
        ("perplexity", "Perplexity", "Perplexity", _perplexity(results, palette, gallery)),
        ("retrieval", "Retrieval", "Retrieval", _retrieval(results, palette, gallery)),
        ("bias", "Bias", "What each head adds by distance", _bias(results, palette, gallery, slugs)),
        ("training", "Training", "Over the training", _training(results, palette, gallery, slugs)),
        ("scale", "Attention scale", "Attention scale", _scale(results, palette, gallery, slugs)),
        ("cost", "Cost", "What it costs", _cost(costs)),
        ("provenance", "Provenance", "How this was made", _provenance(results, palette)),
    ]
    sections = [
        (identity, name, section(identity, heading, *inner)) for identity, name, heading, inner in made if any(inner)
    ]
    is_converted = results.source is not None and "converted" in map(results.role, results.names)
    title = (
        f"{results.source} with its position encoding dropped or replaced"
        if is_converted
        else "Models compared by length"
    )
    return page(title, _head(results, title, gallery), sections)


def _slugs(names: list[str]) -> dict[str, str]:
    """A file name for each model, no two alike."""
    found: dict[str, str] = {}
    for name in names:
        slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:60] or "model"
        count = 1
        while (unique := slug if count == 1 else f"{slug}-{count}") in found.values():
            count += 1
        found[name] = unique
    return found


def _head(results: Results, title: str, gallery: Gallery) -> Markup:
    done, asked = results.progress()
    parts = [f"<h1>{escape(title)}</h1>", paragraph(_what_was_compared(results), "lead")]
    if results.provenance.get("finished") is None:
        text = f"This evaluation is not finished: {done} of {asked} results are here. The command goes on where it was."
        parts.append(paragraph(text, "warning"))
    if not gallery.draws:
        text = "There are no figures, as Matplotlib is not installed: pip install hf-drope[plot], then evaluate again into this folder."
        parts.append(paragraph(text, "warning"))
    return Markup("".join(parts))


def _what_was_compared(results: Results) -> Markup:
    """One sentence: these against those, at which lengths."""

    def named(names: list[str]) -> str:
        return words(f"<strong>{escape(name)}</strong>" for name in names)

    others = [name for name in results.names if results.role(name) not in ("source", "baseline")]
    scaled = [results.label(name).removeprefix("+ ") for name in results.names if results.role(name) == "baseline"]
    lengths = results.lengths
    at = (
        f"at {lengths[0]:,} tokens"
        if len(lengths) == 1
        else f"from {lengths[0]:,} to {lengths[-1]:,} tokens"
        if lengths
        else ""
    )
    if results.source is None:
        return Markup(f"{named(results.names) or 'No model'} {at}.")
    trained = f", trained at {results.window:,} tokens" if results.window else ""
    against = f"{named([results.source])} as it was{trained}"
    if scaled:
        against += f", and with its RoPE scaled by {escape(words(scaled))}"
    beginning = f"{named(others)} against {against}" if others else against
    return Markup(f"{beginning}; each {at}." if at else f"{beginning}.")


def _summary(results: Results, palette: dict[str, str]) -> list[Markup]:
    if not results.perplexity and not results.retrieval:
        return []
    return [tables.findings_cards(results, palette), tables.summary(results, palette)]


def _perplexity(results: Results, palette: dict[str, str], gallery: Gallery) -> list[Markup]:
    if not any(row.get("perplexity") is not None for row in results.perplexity.values()):
        return []
    made = []
    if any(results.longest_curve(name) for name in results.names):
        caption = (
            "By position in a window of each model's longest length; a scaled RoPE is set for that length. A model that uses "
            "its context comes down to the right; one that cannot go on past its window turns up."
        )
        svg = gallery.svg(perplexity_by_position, results)
        made.append(figure(svg, caption, tables.perplexity_by_position(results, palette)))
    caption = (
        "By length: the tokens of the second half of each window, so that each is predicted from at least half the length. "
        "Bars are 95 % intervals over windows."
    )
    svg = gallery.svg(perplexity_by_length, results)
    made.append(figure(svg, caption, tables.perplexity_by_length(results, palette)))
    intro = (
        "How many tokens the model hesitates between, on text that it was not trained on; 1k is 1,024 tokens. A low perplexity at "
        "length does not yet mean that far text is read: see retrieval."
    )
    return [paragraph(intro), figures(*made)]


_TASKS = {
    "passkey": "one number, hidden under one name",
    "multikey": "one number of four that are hidden under four names",
    "multiquery": "all four numbers that are hidden under four names",
    "multivalue": "all four numbers that are hidden under one name",
    "variable-tracking": "all boxes to which a value was handed on",
}


def _retrieval(results: Results, palette: dict[str, str], gallery: Gallery) -> list[Markup]:
    if not results.retrieval:
        return []
    trials = results.settings.get("trials")
    asked = f"{trials} questions a task and length. " if trials else ""
    intro = (
        f"Facts are hidden in text of exactly the given length, and asked for at its end; an answer counts where it is exactly right. "
        f"{asked}Intervals are 95 % (Wilson)."
    )
    lines, maps = [], []
    if len(results.done_tasks) > 1:
        svg = gallery.svg(retrieval_by_length, results, None)
        caption = Markup(f"<strong>Mean</strong> over {escape(words(results.done_tasks))}.")
        lines.append(figure(svg, caption, tables.retrieval_by_length(results, palette, None)))
    for task in results.done_tasks:
        what = f": {_TASKS[task]}" if task in _TASKS else ""
        caption = Markup(f"<strong>{escape(task)}</strong>{escape(what)}.")
        svg = gallery.svg(retrieval_by_length, results, task)
        lines.append(figure(svg, caption, tables.retrieval_by_length(results, palette, task)))
        svg = gallery.svg(retrieval_map, results, task)
        maps.append(figure(svg, caption, tables.retrieval_by_depth(results, palette, task)))
    depths = "The upper row of a panel is the beginning of the text, the lowest is just before the question."
    if any(map(results.beyond, results.lengths)):
        depths += " Right of the dotted line lies what is longer than the trained window."
    parts = [paragraph(intro), subheading("By length"), figures(*lines)]
    parts += [subheading("By length and depth"), paragraph(depths), figures(*maps)]
    if found := tables.examples(results):
        parts.append(fold("Questions and answers, one a task", found))
    return parts


def _heading(palette: dict[str, str], model: dict[str, Any], more: str = "") -> Markup:
    return subheading(Markup(f"{swatch(palette[model['name']])}{escape(model['name'])}{escape(more)}"))


def _bias(results: Results, palette: dict[str, str], gallery: Gallery, slugs: dict[str, str]) -> list[Markup]:
    with_bias = [model for model in results.models if model.get("bias") and model["bias"].get("values")]
    if not with_bias:
        return []
    parts = [
        paragraph(
            "What the model adds to an attention score by the distance of query and key. Only differences along a line count: what is added to "
            "all keys alike cancels in the softmax. Where a line falls, a head prefers nearer keys. Of a disentangled bias it is what position does by itself, for a mean query and a mean key."
        )
    ]
    for model in with_bias:
        name, kind = model["name"], model["bias"].get("kind")
        layers = len(model["bias"]["layers"])
        shown = len(chosen_layers(model["bias"]["layers"]))
        caption = "A line a head" + (
            f"; {shown} of {layers} layers are drawn, evenly from first to last." if shown < layers else "."
        )
        numbers = tables.bias(model)
        parts += [
            _heading(palette, model, f", {kind.replace('_', ' ')}" if kind else ""),
            figures(
                figure(gallery.svg(bias_curves, results, name, slugs[name]), caption),
                figure(
                    gallery.svg(bias_map, results, name, slugs[name]),
                    "The same for all layers and heads. Colours end at the 98th percentile.",
                    numbers,
                ),
            ),
        ]
    return parts


def _training(results: Results, palette: dict[str, str], gallery: Gallery, slugs: dict[str, str]) -> list[Markup]:
    trained = []
    parts: list[Markup] = []
    for model in results.models:
        panels = recorded(model.get("training") or {})
        if panels:
            name = model["name"]
            caption = Markup(f"{swatch(palette[name])}{escape(name)}")
            svg = gallery.svg(training_course, results, name, slugs[name])
            trained.append(figure(svg, caption, tables.training(model["training"], panels)))
    if trained:
        text = (
            "The loss of each training, and beside it how much of RoPE was left, how far the gates were open, how sharp they were, "
            "and how large the bias was."
        )
        parts += [paragraph(text), figures(*trained)]
    for model in results.models:
        if model.get("gates"):
            summary = Markup(f"{swatch(palette[model['name']])}{escape(model['name'])}: its gates as they are now")
            parts.append(fold(summary, tables.gates(model["gates"])))
    return parts


def _scale(results: Results, palette: dict[str, str], gallery: Gallery, slugs: dict[str, str]) -> list[Markup]:
    made = []
    for model in results.models:
        found = model.get("attention_scale")
        if found and found.get("curve"):
            name = model["name"]
            fitted = f": coefficient {found['coefficient']:.4g}" if found.get("coefficient") is not None else ""
            caption = Markup(f"{swatch(palette[name])}{escape(name + fitted)}")
            svg = gallery.svg(attention_scale, results, name, slugs[name])
            made.append(figure(svg, caption, tables.attention_scale(model)))
    text = "A factor on the attention scores that grows with the length, so that attention over more keys stays as sharp; fitted on held-out text."
    return [paragraph(text), figures(*made)] if made else []


def _cost(costs: dict[str, Any] | None) -> list[Markup]:
    if costs is None or not costs["rows"]:
        return []
    machine, settings = costs.get("machine") or {}, costs.get("settings") or {}
    where = ", ".join(
        [
            *(str(value) if name in ("cpu", "gpu") else f"{name} {value}" for name, value in machine.items()),
            *([f"{settings['threads']} threads"] if settings.get("threads") else []),
            *([str(settings["dtype"])] if settings.get("dtype") else []),
        ]
    )
    skipped = [paragraph(f"Not measured: {name}. {why}", "note") for name, why in (costs.get("skipped") or {}).items()]
    return [
        paragraph(f"Measured with hf-drope bench{f' on {where}' if where else ''}.", "note"),
        tables.cost(costs),
        *skipped,
    ]


def _provenance(results: Results, palette: dict[str, str]) -> list[Markup]:
    inner = Markup(tables.provenance(results) + tables.models(results, palette))
    return [fold("Versions, command, text, seeds, hashes", inner)]

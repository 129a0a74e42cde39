"""The report's figures of perplexity and retrieval; each is made with Matplotlib from the numbers of `results.json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .report_drawing import (
    WIDTH,
    Picture,
    legend,
    length_axis,
    line_style,
    mark_window,
    new_figure,
    perplexity_axis,
)
from .report_numbers import Interval, Results, axis_length, curve, hundredths, interval_of, number
from .report_page import GRID, MUTED

RATES = "YlGnBu"


def perplexity_by_position(results: Results) -> Picture:
    """Each model's perplexity along the windows of its longest length."""
    figure = new_figure(WIDTH, 2.8)
    axes = figure.add_subplot()
    handles, labels, values, ends, titles = [], [], [], [1.0], {}
    for index, name in enumerate(results.names):
        row = results.longest_curve(name)
        if row is None:
            continue
        spans = curve(row)
        points = [((low + high) / 2, value) for low, high, value in spans]
        style = {**line_style(results, name), "markevery": max(1, len(points) // 6)}
        (line,) = axes.plot(*zip(*points, strict=True), gid=f"curve-{index}", **style)
        titles[f"curve-{index}"] = f"{name}, windows of {row['length']:,} tokens"
        handles.append(line)
        labels.append(results.label(name))
        values += [value for _, value in points]
        ends.append(row["edges"][-1])
    first = min(low for name in results.names if (row := results.longest_curve(name)) for low in [row["edges"][1] / 2])
    ticks = [2**power for power in range(4, 24, 1) if first <= 2**power <= max(ends)]
    length_axis(axes, ticks, width=6)
    axes.set_xlim(first, max(ends))
    perplexity_axis(axes, values)
    mark_window(axes, results.window, max(ends))
    axes.set(xlabel="position in the window, tokens", ylabel="perplexity")
    legend(figure, handles, labels)
    return Picture(
        "perplexity-by-position",
        figure,
        f"Perplexity against position for {len(handles)} models, to {max(ends):,.0f} tokens. The numbers follow in a table.",
        titles,
    )


def by_length(
    results: Results,
    name: str,
    what: str,
    ylabel: str,
    value_at: Callable[[str, int], Interval | None],
    say: Callable[[Interval], str],
    *,
    rates: bool,
) -> Picture:
    """A line a model over the lengths, with bars for the intervals."""
    figure = new_figure(WIDTH, 2.8)
    axes = figure.add_subplot()
    handles, labels, values, titles = [], [], [], {}
    scale = 100 if rates else 1
    shown = [length for length in results.lengths if any(value_at(model, length) for model in results.names)]
    for index, model in enumerate(results.names):
        found = [(length, value) for length in shown if (value := value_at(model, length)) is not None]
        if not found:
            continue
        # Side by side, so that bars at one length do not hide each other.
        shift = 2 ** (0.05 * (index - (len(results.names) - 1) / 2))
        places = [length * shift for length, _ in found]
        heights = [scale * value.value for _, value in found]
        style = line_style(results, model)
        (line,) = axes.plot(places, heights, **style)
        for (length, value), place in zip(found, places, strict=True):
            part = f"bar-{index}-{length}"
            bars = axes.vlines(
                place, scale * value.low, scale * value.high, color=style["color"], linewidth=1.1, gid=part
            )
            bars.set_zorder(2)
            titles[part] = f"{model}, {length:,} tokens: {say(value)}"
            values += [scale * value.low, scale * value.high]
        handles.append(line)
        labels.append(results.label(model))
    length_axis(axes, shown)
    left, right = shown[0] * 0.8, shown[-1] * 1.25
    axes.set_xlim(left, right)
    if rates:
        axes.set_ylim(-3, 103)
        axes.set_yticks([0, 25, 50, 75, 100])
        axes.tick_params(length=0, axis="y")
    else:
        perplexity_axis(axes, values)
    if results.window is not None and left < results.window:
        longer = [length for length in shown if length > results.window]
        # Just after the points at the window's own length, which stand side by side.
        edge = min(results.window * 2 ** (0.03 * len(results.names)), longer[0] * 0.9) if longer else None
        mark_window(axes, edge, right)
    axes.set(xlabel="length, tokens", ylabel=ylabel)
    legend(figure, handles, labels)
    return Picture(
        name,
        figure,
        f"{what} by length for {len(handles)} models, with intervals. The numbers follow in a table.",
        titles,
    )


def perplexity_by_length(results: Results) -> Picture:
    return by_length(
        results,
        "perplexity-by-length",
        "Perplexity",
        "perplexity",
        results.perplexity_at,
        lambda value: f"{number(value.value)} ({number(value.low)}–{number(value.high)})",
        rates=False,
    )


def retrieval_by_length(results: Results, task: str | None) -> Picture:
    """One task, or with None the mean over all."""

    def value_at(model: str, length: int) -> Interval | None:
        return results.mean_rate_at(model, length) if task is None else results.rate_at(model, task, length)

    return by_length(
        results,
        "retrieval-by-length" if task is None else f"retrieval-by-length-{task}",
        "Retrieval, mean over the tasks," if task is None else f"Retrieval, {task},",
        "retrieved, %",
        value_at,
        lambda value: f"{hundredths(value.value)} % ({interval_of(value)})",
        rates=True,
    )


def retrieval_map(results: Results, task: str) -> Picture:
    """Depth against length, a panel a model, with the rate in each cell."""
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    models = [name for name in results.names if any(key[:2] == (name, task) for key in results.retrieval)]
    lengths = sorted({length for _, of, length in results.retrieval if of == task})
    columns = 2 if len(lengths) <= 5 and len(models) > 1 else 1
    rows = -(-len(models) // columns)
    depths = max((len(row["by_depth"]) for key, row in results.retrieval.items() if key[1] == task), default=5)
    figure = new_figure(max(WIDTH, columns * (0.7 + 0.35 * len(lengths))), 0.9 + rows * (0.45 + 0.235 * depths))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(models) :]:
        axes.axis("off")
    colours, titles = _colours(), {}
    for panel, (axes, name) in enumerate(zip(grid.flat, models, strict=False)):
        axes.set(xlim=(0, len(lengths)), ylim=(depths, 0))
        axes.set_title(results.label(name, 20 if columns == 2 else 36), loc="left", fontsize=9.5)
        axes.grid(False)
        axes.tick_params(length=0, labelbottom=panel + columns >= len(models))
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xticks([index + 0.5 for index in range(len(lengths))], [axis_length(length) for length in lengths])
        for column, length in enumerate(lengths):
            row = results.retrieval.get((name, task, length))
            for depth, part in enumerate([] if row is None else row["by_depth"]):
                if part.get("rate") is None:
                    continue
                gid = f"cell-{panel}-{length}-{depth}"
                colour = colours(part["rate"])
                axes.add_patch(
                    Rectangle((column + 0.02, depth + 0.03), 0.96, 0.94, facecolor=colour, gid=gid, clip_on=False)
                )
                axes.text(
                    column + 0.5,
                    depth + 0.5,
                    hundredths(part["rate"]),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="black" if _is_light(colour) else "white",
                )
                titles[gid] = f"{name}, {length:,} tokens, needle at {depth_of(part)}: {rate_of(part)}"
        inside = sum(not results.beyond(length) for length in lengths)
        if results.window is not None and inside < len(lengths):
            axes.axvline(inside, color=MUTED, linewidth=1.6, linestyle=(0, (1.5, 1)), clip_on=False)
        axes.set_yticks([0.5, depths - 0.5], ["start", "end"])
    figure.supylabel("where the needle lies", fontsize=9.5, color=MUTED)
    figure.supxlabel("length, tokens", fontsize=9.5, color=MUTED)
    scale = _scale(Normalize(0, 100))
    bar = figure.colorbar(scale, ax=grid, location="top", aspect=36, pad=0.02, shrink=0.96, label="retrieved, %")
    bar.outline.set_visible(False)
    bar.ax.tick_params(color=GRID)
    return Picture(
        f"retrieval-map-{task}",
        figure,
        f"Retrieval by depth and length, {task}, a panel for each of {len(models)} models. The numbers follow in a table.",
        titles,
    )


def _colours() -> Any:
    import matplotlib

    return matplotlib.colormaps[RATES]


def _scale(norm: Any) -> Any:
    from matplotlib.cm import ScalarMappable

    return ScalarMappable(norm, RATES)


def _is_light(colour: tuple[float, float, float, float]) -> bool:
    """Whether black reads better on it than white, by WCAG's relative luminance."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179


def depth_of(part: dict[str, Any]) -> str:
    return f"{hundredths(part['from'])}–{hundredths(part['to'])} %"


def rate_of(part: dict[str, Any]) -> str:
    """A rate by depth in words: "95 % (83–99) of 40 values"."""
    if part.get("rate") is None:
        return "–"
    text = f"{hundredths(part['rate'])} %"
    if part.get("low") is not None and part.get("high") is not None:
        text += f" ({hundredths(part['low'])}–{hundredths(part['high'])})"
    return f"{text} of {part['values']} values" if part.get("values") else text

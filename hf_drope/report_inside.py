"""The report's figures of what is inside the models: biases, the course of training, the attention scale."""

from __future__ import annotations

import math
from typing import Any

from .report_drawing import WIDTH, Picture, colours, legend, length_axis, mark_window, new_figure, perplexity_axis
from .report_numbers import Results, axis_length
from .report_page import GREYS, GRID, INK, MUTED

LAYERS_SHOWN = 12
# What a record of training may hold: a panel each, with the lines in it.
COURSES = {
    "loss": ("loss",),
    "strength": ("rope_scale", "gate", "terms_scale"),
    "temperature": ("temperature",),
    "bias norm": ("bias_norm",),
}


def chosen_layers(layers: list[int]) -> list[int]:
    """Places of the layers that are drawn: all, or some evenly from first to last."""
    if len(layers) <= LAYERS_SHOWN:
        return list(range(len(layers)))
    return [round(place * (len(layers) - 1) / (LAYERS_SHOWN - 1)) for place in range(LAYERS_SHOWN)]


def _bias(results: Results, name: str) -> tuple[list[int], list[int], list[list[list[float]]]]:
    found = results.models[results.names.index(name)]["bias"]
    values = [[[math.nan if value is None else value for value in head] for head in layer] for layer in found["values"]]
    return found["distances"], found["layers"], values


def _distance_axis(axes: Any, distances: list[int], many: bool = True) -> None:
    """Distance 0 and on, as a logarithm from 1."""
    powers = [4**power for power in range(12) if distances[0] <= 4**power <= distances[-1]]
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.6)
    shown = powers if many else [*powers[:1], *powers[len(powers) // 2 : len(powers) // 2 + 1], *powers[-1:]]
    axes.set_xticks(shown, [axis_length(power) for power in shown])
    axes.minorticks_off()
    axes.set_xlim(distances[0], distances[-1])


def bias_curves(results: Results, name: str, slug: str) -> Picture:
    """A panel a layer, a line a head."""
    distances, layers, values = _bias(results, name)
    places = chosen_layers(layers)
    columns = min(3, len(places))
    rows = -(-len(places) // columns)
    figure = new_figure(WIDTH, 0.45 + 1.12 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    colour, titles = colours(results)[name], {}
    for axes in grid.flat[len(places) :]:
        axes.axis("off")
    for panel, (axes, place) in enumerate(zip(grid.flat, places, strict=False)):
        heads = values[place]
        for head, line in enumerate(heads):
            gid = f"line-{panel}-{head}"
            axes.plot(distances, line, color=colour, linewidth=1.1, alpha=max(0.3, min(0.85, 4 / len(heads))), gid=gid)
            titles[gid] = f"layer {layers[place]}, head {head}"
        axes.axhline(0, color=MUTED, linewidth=0.7)
        _distance_axis(axes, distances, many=False)
        axes.set_title(f"layer {layers[place]}", loc="left", fontsize=9.5, color=MUTED, pad=2)
        axes.tick_params(length=0, labelbottom=panel + columns >= len(places))
    figure.supxlabel("distance, tokens", fontsize=9.5, color=MUTED)
    figure.supylabel("added to the score", fontsize=9.5, color=MUTED)
    shown = f"{len(places)} of {len(layers)} layers" if len(places) < len(layers) else f"{len(layers)} layers"
    return Picture(
        f"bias-curves-{slug}",
        figure,
        f"The position bias of {name} against distance, a line a head, for {shown}.",
        titles,
    )


def bias_map(results: Results, name: str, slug: str) -> Picture:
    """A row a head, layer by layer; colour is what the bias adds at each distance."""
    import matplotlib
    import numpy

    distances, layers, values = _bias(results, name)
    lines = numpy.array([line for heads in values for line in heads], dtype=float)
    heads = [len(layer) for layer in values]
    height = min(5.5, max(1.4, 0.065 * len(lines)))
    figure = new_figure(WIDTH, 1.25 + height)
    axes = figure.add_subplot()
    # The few largest values would leave the others without colour.
    limit = float(numpy.nanquantile(numpy.abs(lines), 0.98)) if numpy.isfinite(lines).any() else 0.0
    limit = limit or 1.0
    cut = bool(numpy.nanmax(numpy.abs(lines)) > limit) if numpy.isfinite(lines).any() else False
    image = axes.imshow(
        lines, cmap=matplotlib.colormaps["PuOr"], vmin=-limit, vmax=limit, aspect="auto", interpolation="none"
    )
    axes.grid(False)
    starts = [sum(heads[:index]) for index in range(len(heads) + 1)]
    for start in starts[1:-1]:
        axes.axhline(start - 0.5, color="white", linewidth=0.8 if len(layers) <= 16 else 0.3)
    step = -(-len(layers) // 16)
    axes.set_yticks(
        [(starts[index] + starts[index + 1] - 1) / 2 for index in range(0, len(layers), step)],
        [str(layer) for layer in layers[::step]],
    )
    ticks = [power for power in (0, *(4**power for power in range(1, 12))) if distances[0] <= power <= distances[-1]]
    axes.set_xticks(numpy.interp(ticks, distances, range(len(distances))), [axis_length(tick) for tick in ticks])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set(xlabel="distance, tokens", ylabel="layer, a row a head")
    bar = figure.colorbar(
        image, ax=axes, location="top", aspect=36, extend="both" if cut else "neither", label="added to the score"
    )
    bar.outline.set_visible(False)
    bar.ax.tick_params(color=GRID)
    return Picture(
        f"bias-map-{slug}", figure, f"The position bias of {name} as a heat map: {len(lines)} heads against distance."
    )


def recorded(training: dict[str, Any]) -> dict[str, list[str]]:
    """The panels that a record of training has something for."""
    found = {
        title: [key for key in keys if any(value is not None for value in training.get(key) or ())]
        for title, keys in COURSES.items()
    }
    return {title: keys for title, keys in found.items() if keys}


def training_course(results: Results, name: str, slug: str) -> Picture:
    """Loss, strength of RoPE and gate, temperature and bias norm over the tokens or steps of training."""
    from matplotlib.ticker import MaxNLocator

    training = results.models[results.names.index(name)]["training"]
    panels = recorded(training)
    unit = "tokens" if any(value is not None for value in training.get("tokens") or ()) else "step"
    figure = new_figure(WIDTH, 0.7 + 1.25 * len(panels))
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (title, keys) in zip(grid, panels.items(), strict=True):
        for index, key in enumerate(keys):
            points = [
                (place, value)
                for place, value in zip(training[unit], training[key], strict=False)
                if place is not None and value is not None
            ]
            colour = (colours(results)[name], INK, GREYS[0])[index] if len(keys) > 1 else colours(results)[name]
            dashes = ("-", (0, (4, 1.5)), (0, (1, 1)))[index]
            axes.plot(
                *zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.5, label=_COURSE_NAMES[key]
            )
        axes.set_ylabel("" if title == "strength" else title)
        axes.tick_params(length=0)
        if title == "strength":
            # A head gate may open beyond 1.
            highest = max(value for key in keys for value in training[key] if value is not None)
            axes.set_ylim(-0.04, 1.06 * max(1.0, highest))
            axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderpad=0.2, borderaxespad=0)
        elif title == "temperature":
            axes.set_ylim(bottom=0)
        figure.align_ylabels()
    grid[-1].set_xlabel("tokens of training" if unit == "tokens" else "steps of training")
    grid[-1].xaxis.set_major_formatter(_millions)
    grid[-1].xaxis.set_major_locator(MaxNLocator(5))
    return Picture(f"training-{slug}", figure, f"{name} over its training: {', '.join(panels)} against {unit}.")


_COURSE_NAMES = {
    "loss": "loss",
    "rope_scale": "RoPE",
    "gate": "gate",
    "terms_scale": "terms",
    "temperature": "temperature",
    "bias_norm": "bias norm",
}


def _millions(value: float, _: Any) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value / 1e3:g} k" if value >= 1e3 else f"{value:g}"


def attention_scale(results: Results, name: str, slug: str) -> Picture:
    """Perplexity by length, with the attention scale and without."""
    points = sorted(results.models[results.names.index(name)]["attention_scale"]["curve"], key=lambda at: at["length"])
    figure = new_figure(WIDTH, 2.7)
    axes = figure.add_subplot()
    handles, labels, values = [], [], []
    for key, colour, dashes, marker in (
        ("without", GREYS[0], (0, (4, 2)), "s"),
        ("with", colours(results)[name], "-", "o"),
    ):
        line = [(at["length"], at[key]) for at in points if at.get(key) is not None]
        if line:
            handles += axes.plot(*zip(*line, strict=True), color=colour, linestyle=dashes, marker=marker)
            labels.append(f"{key} scale")
            values += [value for _, value in line]
    lengths = [at["length"] for at in points]
    length_axis(axes, lengths)
    window = results.models[results.names.index(name)].get("window")
    perplexity_axis(axes, values)
    mark_window(axes, window if window and window > lengths[0] else None, lengths[-1] * 1.06)
    axes.set(xlabel="length, tokens", ylabel="perplexity")
    legend(figure, handles, labels)
    return Picture(
        f"attention-scale-{slug}", figure, f"Perplexity of {name} by length, with its attention scale and without."
    )

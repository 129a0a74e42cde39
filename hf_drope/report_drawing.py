"""From a Matplotlib figure to SVG inside a page and to PNG; what all figures of the report share."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .report_numbers import Results, axis_length, number
from .report_page import BEYOND, GREYS, GRID, INK, MUTED, ON_DARK, PALETTE, Markup, escape

# Inches; a phone of 360 pixels shows it at four fifths of its size.
WIDTH = 4.2
# Inches.
_LEGEND_LINE = 0.2
_MARKERS = "osD^vPX*"
_DASHES: tuple[Any, ...] = ((0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (2, 2)))
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_drope",
}


@dataclass
class Picture:
    """A figure, the name of its PNG, what it shows in one sentence, and a tooltip for each of its parts by gid."""

    name: str
    figure: Any
    alt: str
    titles: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = re.sub(r"[^A-Za-z0-9-]+", "-", self.name)


@contextmanager
def house_style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # A name in a script that the font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    # Not pyplot's, which would choose the backend for the whole process.
    return Figure(figsize=(width, height), layout="constrained")


def settle(figure: Any) -> None:
    """Lay out once, for both formats."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def to_svg(picture: Picture) -> Markup:
    """The figure as an `svg` element: text as text, ids of its own, the colours of the page's style sheet."""
    text = io.StringIO()
    nothing = {"Creator": None, "Date": None, "Format": None, "Type": None}
    picture.figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*(<metadata>.*?</metadata>|<!--.*?-->)", "", svg, flags=re.DOTALL)
    for part, title in picture.titles.items():
        svg = svg.replace(f'<g id="{part}">', f'<g id="{part}"><title>{escape(title)}</title>', 1)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{picture.name}-", svg)
    for colour, (name, _) in ON_DARK.items():
        svg = svg.replace(f": {colour}", f": var(--{name})")
    head = f'<svg role="img" aria-label="{escape(picture.alt)}" '
    return Markup(svg.replace("<svg ", head, 1).strip())


def to_png(picture: Picture, folder: Path) -> Path:
    path = folder / f"{picture.name}.png"
    picture.figure.savefig(path, dpi=150, format="png", facecolor="white")
    return path


def colours(results: Results) -> dict[str, str]:
    """One colour a model, the same in every figure and table."""
    found: dict[str, str] = {}
    for name in results.names:
        role = results.role(name)
        if role == "source":
            found[name] = INK
        elif role == "baseline":
            found[name] = GREYS[sum(colour in GREYS for colour in found.values()) % 2]
        else:
            coloured = sum(colour not in (INK, *GREYS) for colour in found.values())
            found[name] = PALETTE[coloured % len(PALETTE)][0]
    return found


def line_style(results: Results, name: str) -> dict[str, Any]:
    """Colour, dashes and marker of a model's lines: a baseline is grey and dashed."""
    same = [
        other for other in results.names if (results.role(other) == "baseline") == (results.role(name) == "baseline")
    ]
    place = same.index(name)
    style: dict[str, Any] = {"color": colours(results)[name], "marker": _MARKERS[place % len(_MARKERS)]}
    if results.role(name) == "baseline":
        style |= {"linestyle": _DASHES[place % len(_DASHES)], "linewidth": 1.4, "markersize": 3.8}
    return style


def legend(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Below the axes, which keep their height, in two columns where they fit."""
    if handles:
        # Matplotlib would leave out a name that begins with "_".
        texts = [f" {label}" if label.startswith("_") else label for label in labels]
        half = -(-len(texts) // 2)
        is_narrow = max(map(len, texts[:half])) + max(map(len, texts[half:]), default=0) <= 36
        columns = 2 if len(texts) > 1 and is_narrow else 1
        figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * -(-len(texts) // columns))
        figure.legend(
            handles, texts, loc="outside lower left", ncols=columns, frameon=False, handlelength=2.2, columnspacing=1
        )


def length_axis(axes: Any, lengths: Sequence[float], width: int = 8) -> None:
    """A logarithmic axis of tokens with a tick at each length, or at some where there are more than `width`."""
    axes.set_xscale("log", base=2)
    step = -(-len(lengths) // width)
    shown = list(lengths)[::-1][::step][::-1]
    axes.set_xticks(shown, [axis_length(length) for length in shown])
    axes.minorticks_off()


def mark_window(axes: Any, window: float | None, right: float) -> None:
    """Shade what lies beyond the trained window, up to `right`."""
    if window is not None and right > window:
        axes.axvspan(window, right, color=BEYOND, linewidth=0, zorder=0)
        axes.axvline(window, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        # In the wider part of the two.
        left = axes.get_xlim()[0]
        is_late = window / left > (right / left) ** 0.45
        axes.annotate(
            "trained window " if is_late else " beyond the window",
            (window, 1.0),
            xycoords=("data", "axes fraction"),
            va="bottom",
            ha="right" if is_late else "left",
            fontsize=9,
            color=MUTED,
        )


def perplexity_axis(axes: Any, values: Sequence[float]) -> None:
    """Logarithmic where the figures are far apart, with plain numbers, and no higher than `highest`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    top = highest(values)
    if values and top > 2.5 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axes.set_ylim(0.9 * min(values), 1.08 * top)
        if top < max(values):
            axes.annotate(
                f"↑ up to {number(max(values))}",
                (1.0, 1.0),
                xycoords="axes fraction",
                ha="right",
                va="bottom",
                fontsize=9,
                color=MUTED,
            )
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.tick_params(length=0, axis="y", which="both")


def highest(values: Sequence[float]) -> float:
    """Where an axis of perplexity ends: what has gone wrong altogether leaves the picture, and the others stay apart."""
    return min(max(values), 12 * min(values)) if values else 1.0

"""What `results.json` of an evaluation says, put in the order and the words of the report; no HTML, no figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_SCALINGS = {"pi": "PI", "ntk": "NTK", "dynamic": "dynamic NTK", "yarn": "YaRN"}
_ORDER = ("source", "baseline", "stock", "converted")


class Interval(NamedTuple):
    """A figure and its 95 % interval; `note` says of what it is the mean where something is missing."""

    value: float
    low: float
    high: float
    note: str = ""

    @property
    def has_width(self) -> bool:
        """A figure from one window of text has no interval: both its bounds are the figure."""
        return self.low < self.high


class Results:
    """A `results.json`, finished or not.

    `models` are ordered source, baselines, others; `source` is the only one with that role, or None; `window` is its trained
    context, or that of all models where they agree, or None.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.settings: dict[str, Any] = content.get("settings") or {}
        self.provenance: dict[str, Any] = content.get("provenance") or {}
        models: list[dict[str, Any]] = content.get("models") or []
        self.models = sorted(
            models, key=lambda model: _ORDER.index(role) if (role := model.get("role")) in _ORDER else 9
        )
        self.names: list[str] = [model["name"] for model in self.models]
        self.perplexity = {(row["model"], row["length"]): row for row in content.get("perplexity") or []}
        self.retrieval = {(row["model"], row["task"], row["length"]): row for row in content.get("retrieval") or []}
        sources = [model for model in self.models if model.get("role") == "source"]
        self.source: str | None = sources[0]["name"] if len(sources) == 1 else None
        windows = {model.get("window") for model in (sources if self.source else self.models)}
        self.window: int | None = windows.pop() if len(windows) == 1 else None
        found = {length for *_, length in (*self.perplexity, *self.retrieval)}
        self.lengths = sorted(found | set(self.settings.get("lengths") or ()))
        asked = [task for task in self.settings.get("tasks") or () if task != "perplexity"]
        self.tasks = list(dict.fromkeys([*asked, *(task for _, task, _ in self.retrieval)]))
        self.done_tasks = [task for task in self.tasks if any(key[1] == task for key in self.retrieval)]

    def role(self, name: str) -> str:
        return str(self.models[self.names.index(name)].get("role"))

    def label(self, name: str, width: int = 34) -> str:
        """The model's name as it fits a figure: a baseline by its scaling, without the source's name before its own, and
        where it is long without its middle."""
        scaling = self.models[self.names.index(name)].get("scaling")
        if scaling and self.source is not None:
            name = f"+ {_SCALINGS.get(scaling, scaling)}"
        elif self.source is not None and name.startswith(self.source):
            rest = name.removeprefix(self.source)
            name = rest[1:] if len(rest) > 2 and rest[0] in "-_ ." and rest[1:] not in self.names else name
        if len(name) > width:
            name = f"{name[: width // 2]}…{name[-(width - width // 2 - 1) :]}"
        return name

    def beyond(self, length: int) -> bool:
        return self.window is not None and length > self.window

    def times(self, length: int) -> str:
        """The length as a multiple of the window, as "4×"; empty without a window."""
        if not self.window:
            return ""
        ratio = length / self.window
        return f"{ratio:.2g}×" if ratio < 99.5 else f"{ratio:,.0f}×"

    def perplexity_at(self, name: str, length: int) -> Interval | None:
        row = self.perplexity.get((name, length))
        return None if row is None else _interval(row, "perplexity")

    def rate_at(self, name: str, task: str, length: int) -> Interval | None:
        row = self.retrieval.get((name, task, length))
        return None if row is None else _interval(row, "rate")

    def mean_rate_at(self, name: str, length: int) -> Interval | None:
        """The mean over the tasks, each with the same weight; the distances to the bounds add in squares (Newcombe's
        square-and-add)."""
        found = [rate for task in self.tasks if (rate := self.rate_at(name, task, length)) is not None]
        if not found:
            return None
        mean = math.fsum(rate.value for rate in found) / len(found)
        below = math.sqrt(math.fsum((rate.value - rate.low) ** 2 for rate in found)) / len(found)
        above = math.sqrt(math.fsum((rate.high - rate.value) ** 2 for rate in found)) / len(found)
        note = "" if len(found) == len(self.tasks) else f"{len(found)} of {len(self.tasks)} tasks"
        return Interval(mean, max(0.0, mean - below), min(1.0, mean + above), note)

    def longest_curve(self, name: str) -> dict[str, Any] | None:
        """The perplexity row of the longest length that has figures by position."""
        rows = [
            row
            for (model, _), row in self.perplexity.items()
            if model == name and any(nats is not None for nats in row.get("by_position") or ())
        ]
        return max(rows, key=lambda row: row["length"], default=None)

    def progress(self) -> tuple[int, int]:
        """Results that are there, and results that were asked for."""
        tasks = len(self.settings.get("tasks") or [*self.tasks, *(["perplexity"] if self.perplexity else [])])
        done = len(self.perplexity) + len(self.retrieval)
        return done, max(done, len(self.models) * len(self.settings.get("lengths") or self.lengths) * tasks)


def _interval(row: dict[str, Any], key: str) -> Interval | None:
    value = row.get(key)
    if value is None:
        return None
    low, high = row.get("low"), row.get("high")
    return Interval(value, value if low is None else low, value if high is None else high)


def verdict(one: Interval | None, reference: Interval | None, higher_is_better: bool) -> str:
    """ "better" or "worse" where the intervals do not overlap, else empty."""
    if one is None or reference is None or (one.note != reference.note):
        return ""
    if not (one.has_width and reference.has_width):
        return ""
    if one.low > reference.high:
        return "better" if higher_is_better else "worse"
    if one.high < reference.low:
        return "worse" if higher_is_better else "better"
    return ""


def by_octave(row: dict[str, Any]) -> list[tuple[float, float, float]]:
    """(from, to, perplexity) of a row's tokens by position, each span twice as far as the one before."""
    edges = row["edges"]
    bounds = [edges[0], edges[1]]
    while bounds[-1] < edges[-1]:
        bounds.append(min(bounds[-1] * 2, edges[-1]))
    return _merge(edges, row["by_position"], bounds)


def curve(row: dict[str, Any], per_octave: int = 6) -> list[tuple[float, float, float]]:
    """The same, in spans that are at most a `per_octave`-th of an octave, or a bin where bins are wider."""
    edges = row["edges"]
    bounds = [edges[0], edges[1]]
    for edge in edges[2:]:
        if edge >= bounds[-1] * 2 ** (1 / per_octave) or edge == edges[-1]:
            bounds.append(edge)
    return _merge(edges, row["by_position"], bounds)


def _merge(
    edges: Sequence[float], nats: Sequence[float | None], bounds: Sequence[float]
) -> list[tuple[float, float, float]]:
    """exp of the mean nats of the bins between each two bounds, weighted by their widths."""
    merged = []
    for low, high in itertools.pairwise(bounds):
        inside = [
            (right - left, value)
            for left, right, value in zip(edges, edges[1:], nats, strict=False)
            if low <= left < high and value is not None
        ]
        if inside:
            mean = math.fsum(width * value for width, value in inside) / math.fsum(width for width, _ in inside)
            merged.append((low, high, math.exp(min(mean, 700))))
    return merged


class Finding(NamedTuple):
    """One model at one length beside its source and the best of those that keep RoPE: stock models, such as the source after
    the same training, and beyond the window the source's scalings."""

    length: int
    what: str
    mine: Interval
    source: Interval | None
    best: tuple[Interval, str] | None


def findings(results: Results) -> dict[str, list[Finding]]:
    """What each converted model gains and loses, at the longest length in its window and at the longest of all.

    Without a converted model those that are neither source nor baseline; nothing without a source and its window.
    """
    if results.source is None or results.window is None:
        return {}
    inside = [length for length in results.lengths if not results.beyond(length)]
    outside = [length for length in results.lengths if results.beyond(length)]
    names = [name for name in results.names if results.role(name) == "converted"]
    names = names or [name for name in results.names if results.role(name) not in ("source", "baseline")]
    found = {name: _findings(results, name, [*inside[-1:], *outside[-1:]]) for name in names}
    return {name: rows for name, rows in found.items() if rows}


def _findings(results: Results, name: str, lengths: Sequence[int]) -> list[Finding]:
    source = str(results.source)
    found = []
    for what, value_at, choose in (
        ("perplexity", results.perplexity_at, min),
        ("retrieval", results.mean_rate_at, max),
    ):
        for length in lengths:
            mine, theirs = value_at(name, length), value_at(source, length)
            if mine is None:
                continue
            roles = ("stock", "baseline") if results.beyond(length) else ("stock",)
            rivals = [
                (value, other)
                for other in results.names
                if other != name and results.role(other) in roles
                if (value := value_at(other, length)) is not None and value.note == mine.note
            ]
            comparable = theirs if theirs is not None and theirs.note == mine.note else None
            found.append(Finding(length, what, mine, comparable, choose(rivals, default=None)))
    return found


def number(value: float | None) -> str:
    """Three digits that count, thousands apart; an en dash for what is not there."""
    if value is None or math.isnan(value):
        return "–"
    if value >= 1e6:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    if abs(value) >= 999.5:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:#.3g}".rstrip(".")


def percent(rate: float | None) -> str:
    return "–" if rate is None else f"{hundredths(rate)}\N{NO-BREAK SPACE}%"


def hundredths(rate: float) -> str:
    """A rate as a whole number of hundredths, half up."""
    return f"{math.floor(100 * rate + 0.5 + 1e-9)}"


def interval_of(rate: Interval) -> str:
    return f"{hundredths(rate.low)}–{hundredths(rate.high)}"


def change(value: float, reference: float) -> str:
    """How far a perplexity is from another: in per cent, or as a factor from two on."""
    if reference <= 0 or value <= 0:
        return ""
    ratio = value / reference
    if ratio >= 2:
        return f"× {_two(ratio)}"
    if ratio <= 0.5:
        return f"÷ {_two(1 / ratio)}"
    per_cent = 100 * (ratio - 1)
    digits = 1 if abs(per_cent) < 9.95 else 0
    sign = "±" if abs(per_cent) < 0.05 else "+" if per_cent > 0 else "−"
    return f"{sign}{abs(per_cent):.{digits}f}\N{NO-BREAK SPACE}%"


def _two(ratio: float) -> str:
    """Two digits that count."""
    return f"{ratio:.1f}" if ratio < 9.95 else f"{float(f'{ratio:.2g}'):,.0f}"


def axis_length(length: float) -> str:
    """A length as it stands on an axis: 2k is 2,048."""
    return f"{length / 1024:g}k" if length >= 1024 and length % 512 == 0 else f"{length:g}"


def words(items: Iterable[str]) -> str:
    """ "a, b and c"."""
    given = list(items)
    return given[0] if len(given) == 1 else f"{', '.join(given[:-1])} and {given[-1]}" if given else ""

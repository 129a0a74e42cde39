"""The lowest point of a curve that is dear to compute, by few steps: downhill from 0, then by parabolas."""

from __future__ import annotations

import math
from collections.abc import Callable

REFINEMENTS = 2
_DIGITS = 4
_NEAR = 2e-3


def find_lowest(
    curve: Callable[[float], float],
    first: float,
    least: float,
    most: float,
    known: dict[float, float] | None = None,
) -> dict[float, float]:
    """What was tried of a smooth curve with one valley, in the order of the trials; the lowest is near the valley's floor.

    It goes from 0 by `first`, or the other way where that is uphill, in steps that double until they are uphill or at a bound;
    then to the lowest point of the parabola through the three points around the lowest so far, at most twice.

    Args:
        curve: asked for numbers of four decimals; NaN counts as infinite.
        first: the first step, not 0.
        least, most: bounds, below and above 0.
        known: points that need no asking.
    """
    tried = dict(known or {})

    def at(x: float) -> float:
        x = round(min(max(x, least), most), _DIGITS)
        if x not in tried:
            value = curve(x)
            tried[x] = math.inf if math.isnan(value) else value
        return tried[x]

    step = first if at(first) < at(0.0) else -first
    if at(step) < at(0.0):
        while at(2 * step) < at(step):
            step *= 2
    for _ in range(REFINEMENTS):
        floor = _floor(tried)
        if floor is None or min(abs(floor - x) for x in tried) < _NEAR:
            break
        at(floor)
    return tried


def _floor(points: dict[float, float]) -> float | None:
    """Where the parabola through the lowest point and its neighbours is lowest, or half-way from a lowest point at a bound.

    None where the three lie on a line.
    """
    xs = sorted(points)
    place = xs.index(min(xs, key=points.__getitem__))
    if not 0 < place < len(xs) - 1:
        return (xs[place] + xs[1 if place == 0 else -2]) / 2
    x0, x1, x2 = xs[place - 1 : place + 2]
    left, right = (points[x0] - points[x1]) / (x0 - x1), (points[x2] - points[x1]) / (x2 - x1)
    if not left < right < math.inf or left == -math.inf:
        return None
    # The slope between two points is that of the parabola in their middle.
    return (x0 + x1) / 2 - left * (x2 - x0) / 2 / (right - left)

"""Least squares by distance: a bias that is a function of distance, fitted to values for each distance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .position_bias import SMALLEST_SLOPE

_LOG_SLOPES = [10 ** (exponent / 4) for exponent in range(-8, 5)]


def fit_by_distance(bias: Any, above: Tensor, below: Tensor) -> float:
    """Fit R_h(−d) to values above / below with weights `below`, both (heads, distances), up to a constant a head.

    Args:
        bias: a `TableBias`, `LogBias`, `LinearBias` or `LowRankBias`; its backward side is set.

    Returns:
        The weighted R² of the fit, the mean over parameter groups.
    """
    above, below = (share(part.double(), bias.num_groups, torch.sum) for part in (above, below))
    value = torch.where(below > 0, above / below.clamp(min=1e-30), 0.0)
    distance = torch.arange(above.shape[1], dtype=torch.float64, device=above.device)
    with torch.no_grad():
        if bias.kind == "table":
            _fit_table(bias, above, below)
        elif bias.kind == "linear":
            basis = -distance[None, :, None].expand(bias.num_groups, -1, -1)
            bias.slopes[0] = _least_squares(basis, value, below)[0][:, 0].float()
        elif bias.kind == "log":
            _fit_log(bias, distance, value, below)
        else:
            angle = distance[:, None] * bias.frequencies.double()
            basis = torch.cat([angle.cos(), -angle.sin()], -1).expand(bias.num_groups, -1, -1)
            solution, _ = _least_squares(basis, value, below)
            alpha, beta = solution.float().chunk(2, -1)
            bias.alpha.copy_(alpha)
            bias.beta.copy_(beta)
        got = bias.group_values(-distance.long()).double()
    return _r_squared(got, value, below)


def share(values: Tensor, groups: int, reduce: Any = torch.mean) -> Tensor:
    """(heads, ...) → (groups, ...), heads of a group taken together."""
    return reduce(values.unflatten(0, (groups, values.shape[0] // groups)), dim=1)


def _r_squared(got: Tensor, value: Tensor, weight: Tensor) -> float:
    total = weight.sum(-1, keepdim=True).clamp(min=1e-30)
    centre = (weight * value).sum(-1, keepdim=True) / total
    shift = (weight * (value - got)).sum(-1, keepdim=True) / total
    error = (weight * (value - got - shift) ** 2).sum(-1)
    return (1 - error / (weight * (value - centre) ** 2).sum(-1).clamp(min=1e-30)).mean().item()


def _least_squares(basis: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted least squares with a free constant: basis (groups, n, terms) → (groups, terms) and the squared error."""
    total = weight.sum(-1, keepdim=True).clamp(min=1e-30)
    centred = basis - ((weight[..., None] * basis).sum(1) / total)[:, None]
    wanted = value - (weight * value).sum(-1, keepdim=True) / total
    gram = centred.transpose(1, 2) @ (weight[..., None] * centred)
    # Slow frequencies are nearly constant within the window: without a ridge their coefficients would explode.
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp(min=1e-30)
    gram = gram + 1e-6 * size * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    solution = torch.linalg.solve(gram, centred.transpose(1, 2) @ (weight * wanted)[..., None])[..., 0]
    error = (weight * (wanted - (centred @ solution[..., None])[..., 0]) ** 2).sum(-1)
    return solution, error


def _fit_table(bias: Any, above: Tensor, below: Tensor) -> None:
    rows = bias.rows(-torch.arange(above.shape[1], device=above.device))
    table = above.new_zeros(bias.num_groups, len(bias.weight))
    weight = table.index_add(1, rows, below)
    table = table.index_add(1, rows, above) / weight.clamp(min=1e-30)
    seen = (weight > 0).any(0)
    known = seen.nonzero()[:, 0]
    if not len(known):
        return
    # A distance that no window reaches is as far as the nearest that one does.
    rows = torch.arange(len(seen), device=known.device)
    after = torch.searchsorted(known, rows).clamp(max=len(known) - 1)
    before = (after - 1).clamp(min=0)
    nearest = torch.where(rows - known[before] <= known[after] - rows, before, after)
    backward = torch.unique(bias.rows(-torch.arange(max(bias.max_distance, above.shape[1]), device=known.device)))
    bias.weight[backward] = table[:, known[nearest]].T[backward].float()


def _fit_log(bias: Any, distance: Tensor, value: Tensor, weight: Tensor) -> None:
    best = torch.full((bias.num_groups,), math.inf, dtype=torch.float64, device=value.device)
    for slope in _LOG_SLOPES:
        basis = bias.sign * torch.log1p(slope * distance)[None, :, None].expand(bias.num_groups, -1, -1)
        solution, error = _least_squares(basis, value, weight)
        better = error < best
        bias.gamma[0] = torch.where(better, solution[:, 0].float(), bias.gamma[0])
        bias.a[0] = torch.where(better, torch.full_like(bias.a[0], slope), bias.a[0])
        best = torch.where(better, error, best)
    keep_in_range(bias)


def keep_in_range(bias: Any) -> None:
    """Move the numbers of a log bias that it holds above a limit up to that; below it they would have no gradient."""
    if bias.kind == "log":
        with torch.no_grad():
            for parameter in (bias.a, bias.gamma) if bias.init == "kerple" else (bias.a,):
                parameter.clamp_(min=SMALLEST_SLOPE)

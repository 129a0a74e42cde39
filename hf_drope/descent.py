"""A short gradient descent on position parameters, whose sizes differ by orders of magnitude within one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# The rate of a number is in units of its size, and that is at least this share of its tensor's root mean square.
_SMALLEST = 0.1


def descend(
    parameters: Sequence[Tensor], loss: Callable[[int], Tensor], steps: int, learning_rate: float, advance: Any = None
) -> None:
    """Adam with a cosine decay on p = p₀ + size ∘ z from z = 0: each number moves in units of its own size.

    Args:
        parameters: changed in place, without gradients and with their flags as they were afterwards.
        loss: of a step, counted from 0; it is called with gradients enabled.
        learning_rate: at the first step, in those units.
        advance: called without arguments after each step.
    """
    starts = [parameter.detach().clone() for parameter in parameters]
    sizes = [start.abs().clamp(min=max(_SMALLEST * _rms(start), 1e-2)) for start in starts]
    moves = [torch.zeros_like(start) for start in starts]
    optimizer = torch.optim.Adam(moves, lr=learning_rate, betas=(0.9, 0.95))
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    with only_trained(parameters):
        for step in range(steps):
            with torch.enable_grad():
                value = loss(step)
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
            for move, size, gradient in zip(moves, sizes, gradients, strict=True):
                move.grad = None if gradient is None else gradient * size
            optimizer.step()
            decay.step()
            with torch.no_grad():
                for parameter, start, size, move in zip(parameters, starts, sizes, moves, strict=True):
                    parameter.copy_(start + size * move)
            if advance is not None:
                advance()


def _rms(x: Tensor) -> float:
    return x.float().pow(2).mean().sqrt().item()


@contextmanager
def only_trained(parameters: Sequence[Tensor], everything: Sequence[Tensor] = ()) -> Iterator[None]:
    """`parameters` take gradients in the block, the others in `everything` do not."""
    before = [(parameter, parameter.requires_grad) for parameter in (*everything, *parameters)]
    try:
        for parameter in everything:
            parameter.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)

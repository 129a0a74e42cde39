"""The last part of a calibration: all position parameters descend together towards the source's next-token distribution."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .descent import descend, only_trained
from .distance_fit import keep_in_range
from .distill import as_source, distillation_loss
from .hardware import multiplies_bf16
from .top_k_logits import evaluating, top_k_logits

# Tokens a step: many steps of few tokens got further than the same tokens in fewer, longer ones, at 512 and at 2048 tokens,
# and need no gradient checkpointing.
LENGTH = 512
_TOP_K = 64


def descend_to_outputs(
    model: Any, source: Any, ids: Tensor, steps: int, learning_rate: float, generator: torch.Generator, progress: bool
) -> tuple[float, float]:
    """Descend on the divergence from the source's likeliest next tokens; a descent that ends further away is undone.

    Args:
        source: None where the model with RoPE back on is its own source.
        ids: (windows, length); each step takes a part of a window, in an order that `generator` draws.
        learning_rate: see `descend`.

    Returns:
        The divergence over the whole first window in nats a token, before and after.
    """
    parameters = [parameter for bias in model.position_biases() for parameter in bias.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    rows = [row for window in ids for row in window.split(LENGTH) if len(row) == min(LENGTH, ids.shape[1])]
    order = torch.randperm(len(rows), generator=generator).tolist()
    bar = tqdm(total=steps, desc="descend", unit="step", file=sys.stderr, disable=None if progress else True)
    autocast = torch.autocast(ids.device.type, torch.bfloat16, enabled=multiplies_bf16())

    def divergence(row: Tensor) -> Tensor:
        with torch.no_grad(), autocast, as_source(model) if source is None else nullcontext():
            teacher, place = (model, row.device) if source is None else (source, source.device)
            logits = teacher(row[None].to(place), use_cache=False).logits
            expected = top_k_logits(logits, min(_TOP_K, logits.shape[-1]))
            del logits
        with autocast:
            return distillation_loss(model(row[None], use_cache=False).logits, expected, row[None])

    with (
        bar,
        evaluating(model),
        at_rest(model),
        only_trained(parameters, list(model.parameters())),
    ):
        start = divergence(ids[0]).item()
        if not math.isfinite(start):
            raise ValueError("The logits are not finite on this text; look at the source's weights.")
        descend(parameters, lambda step: divergence(rows[order[step % len(order)]]), steps, learning_rate, bar.update)
        for position_bias in model.position_biases():
            keep_in_range(position_bias.bias)
        end = divergence(ids[0]).item()
        if not end < start:
            end = start
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
    return start, end


@contextmanager
def at_rest(model: Any) -> Iterator[None]:
    """Dropped for the length of the block."""
    encodings = [m for m in model.modules() if hasattr(type(m), "_init_scale")]
    before = [(m, m._initial) for m in encodings]
    try:
        for module in encodings:
            module.set_rope_scale(0.0)
        yield
    finally:
        for module, rope_scale in before:
            module.set_rope_scale(rope_scale)

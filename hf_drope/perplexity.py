"""Perplexity by position, from overlapping windows, with logits of a few tokens at a time.

Windows of L tokens begin every L/2 tokens. The figure for a length is that of the second half of each window, so that every token
is scored once and with at least L/2 tokens before it; whatever the length, the same tokens are scored.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

# Logits held at a time are those of this many tokens.
CHUNK = 512
_BIN = 64


@torch.no_grad()
def token_losses(model: Any, ids: Tensor, chunk: int = CHUNK) -> Tensor:
    """What each token after the first costs, in nats: `ids` (batch, length) → (batch, length − 1) in fp32.

    The model runs once; its head gets the states of about `chunk` tokens at a time, in place of those of a first token that is
    run for that, so that whatever the model does to states before its head and to logits after it is done.

    Raises:
        ValueError: the model has no output head, or calls it otherwise than once.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head, so it predicts no next tokens.")
    states: list[Tensor] = []

    def keep(given: Tensor) -> Tensor:
        states.append(given)
        return given[:, :1]

    with _head_given(head, keep):
        model(input_ids=ids, use_cache=False)
    if len(states) != 1 or states[0].shape[:2] != ids.shape:
        raise ValueError(
            f"{type(model).__name__} does not make its logits by one call of its head, so they cannot be had in parts."
        )
    losses = []
    size = max(1, chunk // len(ids))
    for part, truth in zip(states[0][:, :-1].split(size, 1), ids[:, 1:].split(size, 1), strict=True):
        with _head_given(head, lambda _, part=part: part):  # type: ignore[misc]
            logits = model(input_ids=ids[:, :1], use_cache=False).logits
        losses.append(cross_entropy(logits.float().flatten(0, 1), truth.flatten(), reduction="none").view(truth.shape))
    return torch.cat(losses, 1)


@contextmanager
def _head_given(head: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The head's input changed for the length of the block."""
    hook = head.register_forward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))
    try:
        yield
    finally:
        hook.remove()


def window_starts(tokens: int, length: int, longest: int) -> list[int]:
    """Where windows of `length` begin in a text so that the same tokens are scored as with windows of `longest`.

    Raises:
        ValueError: the text has fewer tokens than `longest`.
    """
    if tokens < longest:
        raise ValueError(f"The text has {tokens} tokens, fewer than the longest length of {longest}.")
    half = longest // 2
    begin = longest - half
    end = begin + (tokens - begin) // half * half
    half = length // 2
    first = begin - (length - half)
    return list(range(first, end - length + 1, half))


def window_losses(
    model: Any,
    text: Tensor,
    length: int,
    longest: int,
    *,
    beginning: Sequence[int] = (),
    batch_size: int = 1,
    advance: Callable[[int], Any] = lambda tokens: None,
) -> Iterator[Tensor]:
    """`token_losses` of the windows of a text, a batch at a time and in fp64 on the CPU; arguments as in `measure_perplexity`."""
    starts = window_starts(len(text), length, longest)
    for at in range(0, len(starts), batch_size):
        ids = torch.stack([text[start : start + length] for start in starts[at : at + batch_size]])
        ids[:, : len(beginning)] = torch.tensor(beginning, dtype=ids.dtype)
        yield token_losses(model, ids.to(model.device)).double().cpu()
        advance(ids.numel())


def position_edges(length: int) -> list[int]:
    """Edges of the bins of `by_position`: 0 to `length`, 64 tokens apart; at most 64 bins, and 8 in a short window."""
    width = max(1, min(_BIN, length // 8), -(-length // 64))
    return [*range(0, length, width), length]


def measure_perplexity(
    model: Any,
    text: Tensor,
    length: int,
    longest: int,
    *,
    beginning: Sequence[int] = (),
    batch_size: int = 1,
    advance: Callable[[int], Any] = lambda tokens: None,
) -> dict[str, Any]:
    """Perplexity of a model at one length.

    Args:
        text: (tokens,) ids.
        longest: the longest length that it is compared with, which decides what is scored.
        beginning: tokens that the model expects at the beginning of a sequence; they take the place of the first of each window.
        advance: called with the number of tokens done.

    Returns:
        "perplexity", "low", "high" (95 % interval over windows, null for one window), "tokens" (scored), "windows", "edges" and
        "by_position" (mean nats of the tokens of each bin, null for a bin without one).
    """
    starts = window_starts(len(text), length, longest)
    sums = torch.zeros(length, dtype=torch.float64)
    means: list[float] = []
    for losses in window_losses(
        model, text, length, longest, beginning=beginning, batch_size=batch_size, advance=advance
    ):
        sums[1:] += losses.sum(0)
        means += losses[:, -(length // 2) :].mean(1).tolist()
    edges = position_edges(length)
    # Nothing predicts the first token, and those of the beginning are not the text's.
    firsts = [max(edge, 1, len(beginning)) for edge in edges]
    bins = [
        (sums[first:last].mean() / len(starts)).item() if first < last else math.nan
        for first, last in zip(firsts[:-1], edges[1:], strict=True)
    ]
    mean, spread = statistics.fmean(means), half_width(means)
    return {
        "perplexity": _rounded(_exp(mean)),
        "low": _rounded(_exp(mean - spread)),
        "high": _rounded(_exp(mean + spread)),
        "tokens": len(starts) * (length // 2),
        "windows": len(starts),
        "edges": edges,
        "by_position": [_rounded(value) for value in bins],
    }


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean, by Student's t; NaN for one value, or where one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, else by Cornish and Fisher's expansion."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _rounded(value: float) -> float | None:
    """Five significant digits; JSON has no NaN and no infinity."""
    return float(f"{value:.5g}") if math.isfinite(value) else None

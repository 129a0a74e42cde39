"""How a source rotates its channels, and how fast with a stretched context. This file travels with every checkpoint."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RotaryPairs(NamedTuple):
    """How a source rotates: pair r of its first 2n channels turns by `frequencies[r]` radians a token (below 0: the other way).

    interleaved: pair r is the channels (2r, 2r + 1) and not (r, r + n); amplitude: factor on cos and sin (YaRN has one).
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False
    amplitude: float = 1.0


def scaled_frequencies(pairs: RotaryPairs, scaling: dict[str, Any] | None) -> list[float]:
    """The frequencies of the position terms, stretched for contexts `factor` times as long.

    linear (PI, arXiv 2306.15595): all divided by `factor`. ntk: a larger base, the fastest pair unchanged, the slowest
    divided by `factor`. yarn (arXiv 2309.00071): divided where a pair turns less than `beta_slow` times in
    `original_max_position_embeddings` tokens, unchanged above `beta_fast` turns, a ramp between; without YaRN's factor on
    the scores, which is for content. clip leaves them as they are.
    """
    frequencies = list(pairs.frequencies)
    kind = None if scaling is None else scaling["type"]
    if scaling is None or kind == "clip":
        return frequencies
    factor, last = float(scaling["factor"]), max(len(frequencies) - 1, 1)
    if kind == "linear":
        return [frequency / factor for frequency in frequencies]
    if kind == "ntk":
        return [frequency * factor ** (-index / last) for index, frequency in enumerate(frequencies)]
    fast, slow = scaling["beta_fast"], scaling["beta_slow"]
    turns = [scaling["original_max_position_embeddings"] * abs(frequency) / (2 * math.pi) for frequency in frequencies]
    # Linear in the pair's number, which is linear in the logarithm of its turns.
    kept = [min(1.0, max(0.0, math.log(max(t, 1e-12) / slow) / math.log(fast / slow))) for t in turns]
    return [f * share + f / factor * (1 - share) for f, share in zip(frequencies, kept, strict=True)]


def turns(frequencies: tuple[float, ...], length: int, held: Tensor) -> Tensor:
    """cos and sin of all frequencies at places 0 … length − 1: (length, 2 · pairs) in fp32, the same for every layer.

    held: the frequencies as a tensor, on the device where the result is wanted.
    """
    if torch.compiler.is_compiling():
        # A compiler keeps one for all layers by itself.
        return _turns(held.float(), length)
    return _kept_turns(frequencies, length, held.device)


def _turns(frequencies: Tensor, length: int) -> Tensor:
    angle = torch.arange(length, device=frequencies.device)[:, None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], -1)


@functools.lru_cache(maxsize=8)
def _kept_turns(frequencies: tuple[float, ...], length: int, device: torch.device) -> Tensor:
    return _turns(torch.tensor(frequencies, dtype=torch.float32, device=device), length)

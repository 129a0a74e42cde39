"""A disentangled bias for a few tokens more, whose keys join a cache. This file travels with every checkpoint.

A step of decoding is many small operations, so what follows from the bias's parameters alone is worked out once a generation. With
h = [h1, h2] the halves of all pairs of a query and h' = [h2, h1], content and what is matched with turned keys are all

    constant + direct · h + swapped · h'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .disentangled_bias import DisentangledBias
from .rotary_pairs import turns


class _Terms(NamedTuple):
    """What parameters alone decide, in fp32, for pairs in halves whatever the source's layout; f is the number of pairs.

    constant, direct, swapped: (heads, 1, 1 or 3, 2f): content and, with c2p, what cos and sin of a query's turn multiply.
    removed: (heads, 1, 2f), what a gate's value takes out of content. turned: (heads, 2, 2 · pairs), what cos and sin of the
    turn of a mean query multiply. chosen: (heads · 2 · 2 · pairs), their places in a row of [cos, sin].
    """

    constant: Tensor
    direct: Tensor
    swapped: Tensor
    removed: Tensor
    turned: Tensor
    chosen: Tensor


class _Keys(NamedTuple):
    """What parameters alone decide of how keys turn.

    channels, mean: (key/value heads, 1, 4 · pairs): the channels of all chosen pairs, [k1, k2] for cos and [k2, k1] for sin,
    and what the p2c term takes off them. signs: (key/value heads, 2, 2 · pairs), of those products. chosen: as in `_Terms`.
    """

    channels: Tensor
    mean: Tensor
    signs: Tensor
    chosen: Tensor


def decoded_scores(
    bias: DisentangledBias,
    query: Tensor,
    rotated: Tensor,
    query_offset: int | Tensor,
    key_offset: int | Tensor,
    factor: Tensor | None,
    scaling: float,
    kept: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Content queries (batch, heads, n, head_dim), to be matched with the keys as they are, and the position terms.

    Args:
        query: un-rotated, (batch, heads, n, head_dim).
        rotated: `bias.rotated_keys` of all keys, (batch, key/value heads, keys, channels), the first at place `key_offset`.
        query_offset: index of the first query among the keys.
        factor: a gate's value, broadcastable to (batch, heads, n, 1).
        scaling: of the scores.
        kept: where to keep what parameters decide, until they change; one dictionary a generation and layer.

    Returns:
        queries, and scores to add to theirs (batch, heads, n, keys) in fp32, scaled; without gradients, for a bias with the
        p2c term, not clipped, with RoPE dropped from the content.
    """
    terms = _kept(_terms, bias, kept, scaling, factor is not None)
    full = query.float()
    halves, swapped = _halves(bias, full)
    linear = torch.addcmul(terms.constant, halves[..., None, :], terms.direct)
    linear = linear.addcmul_(swapped[..., None, :], terms.swapped)
    content = linear[..., 0, :]
    if factor is not None:
        content = content - factor * terms.removed
    count, keys = query.shape[-2], rotated.shape[-2]
    row = _turns_at(bias, query_offset + key_offset, count, keys)
    # (n, heads, 2, pairs) → (heads, n, pairs), cos and sin together.
    turned = (_picked(row, terms.chosen, terms.turned) * terms.turned).sum(-2).transpose(0, 1).to(query.dtype)
    scores = bias.products(turned.expand(query.shape[0], -1, -1, -1), rotated).float()
    if linear.shape[-2] > 1:
        pairs = bias.rotated // 2
        if not isinstance(key_offset, int) or key_offset:
            # A bias depends on distance alone, and here keys are counted from the first that the cache still holds.
            row = _turns_at(bias, query_offset, count, keys)
        cos, sin = row[:, None, :pairs], row[:, None, pairs:]
        by_cos, by_sin = (linear[..., part, :].unflatten(-1, (2, pairs)) for part in (1, 2))
        weights = torch.addcmul(by_cos * cos, by_sin, sin).flatten(-2)
        scores = scores + weights @ _table(bias, keys).T
    first, second = content.chunk(2, -1)
    content = bias.merge(first, second, full).to(query.dtype)
    return content, scores if factor is None else scores * factor


def rotated_keys(
    bias: DisentangledBias, key: Tensor, offset: int | Tensor, length: int, kept: dict[Any, Any] | None
) -> Tensor:
    """`bias.rotated_keys` of a few keys (batch, key/value heads, n, head_dim), without gradients.

    length: of the table of rotations that is looked up for places within it.
    """
    terms = _kept(_keys, bias, kept)
    row = _turns_at(bias, offset, key.shape[-2], length)
    chosen = key.gather(-1, terms.channels.expand(*key.shape[:-1], -1)).float() - terms.mean
    turns = (_picked(row, terms.chosen, terms.signs) * terms.signs).transpose(0, 1)
    return (chosen.unflatten(-1, (2, -1)) * turns).sum(-2).to(key.dtype)


def _picked(row: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    """Some entries of rows (n, 2f) of [cos, sin]: (n, heads, 2, 2 · pairs)."""
    return row.index_select(-1, chosen).view(-1, *like.shape)


def _kept(work_out: Callable[..., Any], bias: DisentangledBias, kept: dict[Any, Any] | None, *settings: Any) -> Any:
    """What `work_out` makes of the bias and the settings; anew only if they have changed, where there is `kept`."""
    parameters = [bias.query_mean, bias.key_mean, bias.gain, bias.pairs, bias.terms_scale]
    # Inference tensors do not count what is written to them.
    if kept is None or any(x is not None and x.is_inference() for x in parameters):
        return work_out(bias, *settings)
    # Which tensors, and how often each has been written to, but for writes through `.data`.
    state = [(x.data_ptr(), x._version) for x in parameters if x is not None]
    held = kept.get(work_out.__name__)
    if held is None or held[0] != (state, settings):
        kept[work_out.__name__] = held = (state, settings), work_out(bias, *settings)
    return held[1]


@torch.no_grad()
def _keys(bias: DisentangledBias) -> _Keys:
    chosen, pairs = _chosen(bias), bias.rotated // 2
    first, second = bias.split(torch.arange(bias.head_dim, device=chosen.device))
    channels = torch.cat([first[chosen], second[chosen], second[chosen], first[chosen]], -1)
    mean = bias.means()[1].gather(-1, channels) * float(bias.centres_keys)
    one = torch.ones(chosen.shape, device=chosen.device)
    signs = torch.cat([torch.cat([one, one], -1), torch.cat([-one, one], -1)], 1) * bias.source.amplitude
    return _Keys(channels, mean, signs, _places_in_row(chosen, pairs))


def _chosen(bias: DisentangledBias) -> Tensor:
    """The pairs that rotate in the terms, (key/value heads, 1, pairs)."""
    if bias.pairs is not None:
        return bias.pairs.long()[:, None]
    every = torch.arange(bias.rotated // 2, device=bias.frequencies.device)
    return every.expand(bias.num_key_value_heads, 1, -1)


def _places_in_row(chosen: Tensor, pairs: int) -> Tensor:
    both = torch.cat([chosen, chosen], -1)
    return torch.cat([both, both + pairs], 1).flatten()


@torch.no_grad()
def _terms(bias: DisentangledBias, scaling: float, gated: bool) -> _Terms:
    heads, key_heads, pairs = bias.num_heads, bias.num_key_value_heads, bias.rotated // 2
    query_mean, key_mean = bias.means()
    inside, amplitude = bias.in_terms(), bias.source.amplitude
    mean, swapped_mean = _halves(bias, query_mean)
    strength = bias.terms_scale
    removed = _halves(bias, query_mean * bias.spread(inside))[0] * strength
    gain = bias.spread_gain()
    one = mean.new_ones(heads, 1, pairs)
    a, b = (one, 0 * one) if gain is None else (gain[..., 0], gain[..., 1])
    direct, swapped = [torch.cat([a, a], -1)], [torch.cat([b, -b], -1)]
    # q̃ and μ_q together, M only on the former. A gate's value, which scales what is removed, is not known here.
    constant = [mean - direct[0] * mean - swapped[0] * swapped_mean - (0.0 if gated else removed)]
    if "c2p" in bias.terms:
        b1, b2 = _halves(bias, bias.spread(key_mean * inside) * (strength * scaling * amplitude**2))[0].chunk(2, -1)
        for x, y in (([b1, b1], [b2, -b2]), ([b2, b2], [-b1, b1])):
            direct.append(torch.cat(x, -1))
            swapped.append(torch.cat(y, -1))
            # Without p2p it is for q̃, not q.
            still = -direct[-1] * mean - swapped[-1] * swapped_mean
            constant.append(0 * still if "p2p" in bias.terms else still)
    chosen = _chosen(bias).repeat_interleave(heads // key_heads, 0)
    m1, m2 = (x.gather(-1, chosen) * (strength * scaling * amplitude) for x in mean.chunk(2, -1))
    turned = torch.cat([torch.cat([m1, m2], -1), torch.cat([-m2, m1], -1)], 1)
    linear = [torch.stack(x, 2) for x in (constant, direct, swapped)]
    return _Terms(linear[0], linear[1], linear[2], removed, turned, _places_in_row(chosen, pairs))


def _halves(bias: DisentangledBias, x: Tensor) -> tuple[Tensor, Tensor]:
    """[h1, h2] and [h2, h1] of all pairs."""
    first, second = bias.split(x)
    halves = torch.cat([first, second], -1) if bias.source.interleaved else x[..., : bias.rotated]
    return halves, torch.cat([second, first], -1)


def _table(bias: DisentangledBias, length: int) -> Tensor:
    """[cos, sin] of all pairs at places 0 … length − 1, shared by the layers."""
    enough = 1 << max(length - 1, 1).bit_length()
    return turns(bias.pair_frequencies, enough, bias.frequencies)[:length]


def _turns_at(bias: DisentangledBias, first: int | Tensor, count: int, length: int) -> Tensor:
    """[cos, sin] of all pairs at the places first …: (count, 2f); a part of the table for `length` places if they are in it."""
    # A compiler would make a graph for each length of the table.
    if isinstance(first, int) and first + count <= length and not torch.compiler.is_compiling():
        return _table(bias, length)[first : first + count]
    places = torch.arange(count, device=bias.frequencies.device) + first
    angle = places.float()[:, None] * bias.frequencies.float()
    return torch.cat([angle.cos(), angle.sin()], -1)

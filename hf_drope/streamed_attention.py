"""Attention whose bias depends on the scores themselves, on the CPU: a few queries of one head at a time, in the cache.

    softmax(s + g·R(j − i) + mask) v,    g = σ(s / T), or a number a query, or 1

No fused kernel takes a bias that is gated by the score. Here the scores of a block stay in the processor's cache while the
gate, the bias (a strided view of one row of values), the mask and the softmax go over them, and nothing of a block is kept: the
backward pass makes it anew. Memory grows linearly with length. This file travels with every
checkpoint and imports torch only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Scores of a block, about what a core's second-level cache holds in fp32.
_SCORES = 1 << 18
_LEAST, _MOST = 32, 128


def streamed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor,
    *,
    scaling: float,
    factor: Tensor | None = None,
    temperature: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of queries (batch, heads, n, d), the last n positions, to keys and values (batch, key/value heads, m, d).

    Args:
        row: R by ascending Δ = j − i, (heads, n + m − 1) in fp32.
        factor: g by query, broadcastable to (batch, heads, n, 1).
        temperature: T of the score gate; with it there is no `factor`.
        mask: bool (True is seen) or additive, broadcastable to (batch, heads, n, m).
        causal: hide keys after the query as well.

    Returns:
        (batch, heads, n, d). Gradients go to queries, keys, values, `row` and `factor`.
    """
    # Autocast would turn the products to half precision; the scores are fp32 here.
    with torch.autocast(query.device.type, enabled=False):
        if not torch.is_grad_enabled():
            return _Stream(query, key, value, row, factor, temperature, mask, causal, scaling).output()
        return _Streamed.apply(query, key, value, row, factor, temperature, mask, causal, scaling)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _Stream(*inputs).output()
        *tensors, causal, scaling = inputs
        ctx.save_for_backward(*tensors, output)
        ctx.settings = causal, scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *inputs, output = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            return (*_Stream(*inputs, *ctx.settings).gradients(gradient, output), None, None, None, None)


class _Block(NamedTuple):
    batch: int
    head: int
    rows: slice
    keys: int


class _Stream:
    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: Tensor,
        factor: Tensor | None,
        temperature: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        scaling: float,
    ) -> None:
        self.dtype = query.dtype
        self.query, self.key, self.value = query.float(), key.float(), value.float()
        self.row, self.temperature, self.mask, self.causal, self.scaling = row, temperature, mask, causal, scaling
        batch, self.heads, self.queries, _ = query.shape
        self.keys, self.groups = key.shape[2], self.heads // key.shape[1]
        self.factor_shape: Any = None if factor is None else factor.shape
        self.factor: Any = None if factor is None else factor.float().expand(batch, self.heads, self.queries, 1)
        self.count = min(max(_SCORES // self.keys, _LEAST), _MOST)
        self.buffer, self.gate, self.spare = query.new_empty(3, self.count * self.keys, dtype=torch.float32)
        # Row r of the last columns of a causal block sees column c where c ≤ r.
        self.future = torch.ones(self.count, self.count, dtype=torch.bool).triu(1)

    def blocks(self) -> Iterator[_Block]:
        past = self.keys - self.queries
        for batch in range(self.query.shape[0]):
            for head in range(self.heads):
                for start in range(0, self.queries, self.count):
                    stop = min(start + self.count, self.queries)
                    yield _Block(batch, head, slice(start, stop), past + stop if self.causal else self.keys)

    def values(self, place: _Block) -> Tensor:
        return self.value[place.batch, place.head // self.groups, : place.keys]

    def keys_of(self, place: _Block) -> Tensor:
        return self.key[place.batch, place.head // self.groups, : place.keys]

    def bias(self, place: _Block) -> Tensor:
        """R of the block's rows and keys, a view: row r begins r places earlier in `row`."""
        first = self.queries - place.rows.stop
        count = place.rows.stop - place.rows.start
        return self.row[place.head, first : first + count + place.keys - 1].unfold(0, place.keys, 1).flip(0)

    def scores(self, place: _Block) -> Tensor:
        """s + g·R + mask, in the buffer; a score gate's g is left in `gate`."""
        count = place.rows.stop - place.rows.start
        scores = self.buffer[: count * place.keys].view(count, place.keys)
        query = self.query[place.batch, place.head, place.rows] * self.scaling
        torch.mm(query, self.keys_of(place).T, out=scores)
        bias = self.bias(place)
        if self.temperature is not None:
            gate = self.gate[: count * place.keys].view(count, place.keys)
            torch.sigmoid(torch.div(scores, self.temperature, out=gate), out=gate)
            scores.addcmul_(gate, bias)
        elif self.factor is not None:
            scores.addcmul_(self.factor[place.batch, place.head, place.rows], bias)
        else:
            scores.add_(bias)
        self._hide(scores, place)
        return scores

    def probability(self, place: _Block) -> Tensor:
        """The softmax of `scores`, in a buffer of its own."""
        scores = self.scores(place)
        return torch.softmax(scores, -1, out=self.spare[: scores.numel()].view(scores.shape))

    def output(self) -> Tensor:
        output = torch.empty(self.query.shape, dtype=self.dtype)
        for place in self.blocks():
            output[place.batch, place.head, place.rows] = self.probability(place) @ self.values(place)
        return output

    def _hide(self, scores: Tensor, place: _Block) -> None:
        lowest = torch.finfo(torch.float32).min
        if self.causal:
            count = len(scores)
            scores[:, place.keys - count :].masked_fill_(self.future[:count, :count], lowest)
        mask = self.mask_of(place)
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~mask, lowest)
        elif mask is not None:
            hidden = mask <= torch.finfo(mask.dtype).min / 2
            scores.add_(mask.masked_fill(hidden, 0.0)).masked_fill_(hidden, lowest)

    def mask_of(self, place: _Block) -> Tensor | None:
        if self.mask is None:
            return None
        batch, head = min(place.batch, len(self.mask) - 1), min(place.head, self.mask.shape[1] - 1)
        return self.mask[batch, head, place.rows, : place.keys]

    def gradients(self, gradient: Tensor, output: Tensor) -> tuple[Any, ...]:
        gradient = gradient.float()
        delta = (gradient * output.float()).sum(-1, keepdim=True)
        by_query, by_key, by_value = (torch.zeros_like(x) for x in (self.query, self.key, self.value))
        by_row = torch.zeros_like(self.row)
        by_factor = None if self.factor is None else self.factor.new_zeros(self.factor.shape)
        width = self.keys + self.count
        skewed = self.row.new_empty(self.count * (width + 1))
        for place in self.blocks():
            b, h, rows, keys = place
            kv = h // self.groups
            probability = self.probability(place)
            by_value[b, kv, :keys].addmm_(probability.T, gradient[b, h, rows])
            inner = torch.mm(
                gradient[b, h, rows],
                self.values(place).T,
                out=self.buffer[: probability.numel()].view(probability.shape),
            )
            inner.sub_(delta[b, h, rows]).mul_(probability)
            count, bias, by_bias, mask = len(inner), self.bias(place), inner, self.mask_of(place)
            if mask is not None:
                # A query that sees nothing has all keys alike, and no bias.
                hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
                by_bias = inner.masked_fill(hidden, 0.0)
            # By R: each diagonal's sum. Rows of the second view are longer by one, which shifts row r left by r.
            part = skewed.zero_()[: count * width].view(count, width)[:, count - 1 :][:, :keys]
            diagonals = skewed[: count * (width + 1)].view(count, width + 1)
            if self.temperature is not None:
                gate = self.gate[: count * keys].view(count, keys)
                torch.mul(gate, by_bias, out=part)
                # dg/ds = g(1 − g) / T.
                slope = gate.sub_(gate.square()).mul_(bias).div_(self.temperature)
                inner.addcmul_(by_bias, slope)
            elif by_factor is not None:
                by_factor[b, h, rows] = (by_bias * bias).sum(-1, keepdim=True)
                torch.mul(by_bias, self.factor[b, h, rows], out=part)
            else:
                part.copy_(by_bias)
            first = self.queries - rows.stop
            by_row[h, first : first + count + keys - 1] += diagonals[:, : count + keys - 1].sum(0)
            by_query[b, h, rows] = inner @ self.keys_of(place) * self.scaling
            by_key[b, kv, :keys].addmm_(inner.T, self.query[b, h, rows], alpha=self.scaling)
        if by_factor is not None:
            by_factor = by_factor.sum_to_size(self.factor_shape)
        return by_query, by_key, by_value, by_row, by_factor

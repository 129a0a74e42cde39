"""Attention on the CPU whose bias no fused kernel takes, or whose values are narrower than its keys.

    softmax(s + g·B + mask) v,    B = R(j − i) or a_i·b_j or nothing,    g = σ(s / T), or a number a query, or 1

Scores are made for a few queries and keys at a time, for all heads that share a key head at once, so that they stay in the
processor's cache while gate, bias (a strided view of one row of values), mask and softmax go over them; a softmax over parts
of its keys is put together by their sums (https://arxiv.org/abs/1805.02867). Nothing of a block is kept: the backward pass,
whose blocks have all keys, makes it anew, and memory grows linearly with length. Scores are in fp32; the products after the
softmax are in the dtype of the values, as in the fused kernels. This file travels with every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .hardware import cpu_multiplies_bf16

# Rows of a block, over all heads of a group: products of fewer are slow. And the most scores of a block, which glibc would map
# and clear each time from 32 MiB on; the most in the backward pass, which holds several; the fewest queries of a block.
_ROWS, _SCORES, _MOST, _LEAST = 384, 3 << 21, 1 << 22, 8
# How many different numbers of keys the blocks, or parts of blocks, may have.
_SHAPES = 32
# Scores of a block that more key heads join, and multiplications from which on oneDNN is worth its preparation.
_SMALL, _LARGE = 1 << 20, 1 << 21
_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def streamed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    row: Tensor | None = None,
    product: tuple[Tensor, Tensor] | None = None,
    factor: Tensor | None = None,
    temperature: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of queries (batch, heads, n, d), the last n positions, to keys (batch, key/value heads, m, d).

    Args:
        value: (batch, key/value heads, m, e).
        row: R by ascending Δ = j − i, (heads, n + m − 1) in fp32.
        product: in place of `row`, a (batch, heads, n, c) and b (batch, key/value heads, m, c).
        factor: g by query, broadcastable to (batch, heads, n, 1).
        temperature: T of the score gate; with it there is no `factor`.
        mask: bool (True is seen) or additive, broadcastable to (batch, heads, n, m).
        causal: hide keys after the query as well.

    Returns:
        (batch, heads, n, e). Gradients go to queries, keys, values, `row`, `product` and `factor`.
    """
    a, b = (None, None) if product is None else product
    inputs = (query, key, value, row, a, b, factor, temperature, mask, causal, scaling)
    # Autocast would turn the products to half precision; the scores are fp32 here.
    with torch.autocast(query.device.type, enabled=False):
        return _Streamed.apply(*inputs) if torch.is_grad_enabled() else _Stream(*inputs).output()


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, causal, scaling = inputs
        ctx.save_for_backward(*tensors)
        ctx.settings = causal, scaling
        return _Stream(*inputs).output()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.autocast(gradient.device.type, enabled=False):
            inputs: Any = (*ctx.saved_tensors, *ctx.settings, True)
            stream = _Stream(*inputs)
            moving = any(ctx.needs_input_grad[3:6])
            return (*stream.gradients(gradient, moving), None, None, None, None)


class _Block(NamedTuple):
    """Some queries of the heads that share some key heads, and some keys, of which the last few may be after all of them."""

    batches: slice
    shared: slice
    rows: slice
    keys: slice
    after: int
    is_last: bool = True

    @property
    def queries(self) -> tuple[slice, ...]:
        return self.batches, self.shared, slice(None), self.rows

    @property
    def seen(self) -> tuple[slice, ...]:
        return self.batches, self.shared, self.keys

    def parts(self, size: int) -> Iterator[_Block]:
        """The block cut into `size` keys each. The last part has more, or fewer, and all that are after one of its queries."""
        start, least = self.keys.start, self.rows.stop - self.rows.start + self.after
        while self.keys.stop - start - size >= least:
            yield self._replace(keys=slice(start, start + size), is_last=False)
            start += size
        yield self._replace(keys=slice(start, self.keys.stop))


class _Stream:
    """What belongs to queries is held as (batch, key heads, heads that share one, queries, channels), keys and values as
    (batch, key heads, keys, channels); a block of scores is (batch · key heads, heads that share one · rows, keys). Its last
    query comes first: R(j − i) is then a view of one row of values, whose row r begins r places later.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        factor: Tensor | None,
        temperature: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        scaling: float,
        whole_rows: bool = False,
    ) -> None:
        self.temperature, self.causal, self.scaling = temperature, causal, scaling
        self.batch, heads, self.queries, _ = query.shape
        self.shared, self.keys = key.shape[1:3]
        self.groups = heads // self.shared
        # The products after the softmax are twice as fast in bf16 where the processor has instructions for it.
        self.is_half = value.dtype == torch.bfloat16 and cpu_multiplies_bf16()
        query = self._grouped(query)
        kind = torch.bfloat16 if self.is_half else torch.float32
        self.half = query.to(kind), key.to(kind), value.to(kind)
        # Queries and values become fp32 a block at a time.
        self.query, self.key, self.value = query, _dense(key), value
        self.row = None if row is None else self._grouped(row[None])
        self.a, self.b = (None if a is None else self._grouped(a.float())), (None if b is None else _dense(b))
        self.factor_shape: Any = None if factor is None else factor.shape
        self.factor: Any = None
        if factor is not None:
            self.factor = self._grouped(factor.float().expand(self.batch, heads, self.queries, 1))
        self.mask: Any = None
        if mask is not None:
            self.mask = mask[:, :, None] if mask.shape[1] == 1 else self._grouped(mask)
        rows = (min(_ROWS, _MOST // self.keys) if whole_rows else _ROWS) // self.groups
        self.count = max(1, min(max(rows, _LEAST), self.queries))
        # Numbers of keys are multiples of a step: even rows are faster, and oneDNN keeps a megabyte for each shape of a product.
        most = self.keys if whole_rows else min(self.keys, _SCORES // (self.groups * self.count))
        self.step = self.count * max(1, -(-most // (_SHAPES * self.count)))
        self.part = self.step * max(1, most // self.step)
        self.products: Tensor | None = None
        self.keeps_products = whole_rows
        # Where queries are few, several key heads, or texts, at once.
        self.pairs = max(1, _SMALL // (self.groups * self.count * self.keys))
        self.buffers: dict[str, Tensor] = {}
        # In a causal block row r is query count − 1 − r, which sees the last columns c up to its own.
        self.future = torch.ones(self.count, self.count + self.step, dtype=torch.bool).triu(1).flip(0)

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.shared, self.groups))

    def blocks(self) -> Iterator[_Block]:
        texts, heads = max(1, self.pairs // self.shared), min(self.pairs, self.shared)
        for batch in range(0, self.batch, texts):
            batches = slice(batch, min(batch + texts, self.batch))
            for head in range(0, self.shared, heads):
                shared = slice(head, min(head + heads, self.shared))
                # The largest block first: smaller ones then find room in what it leaves.
                for start in reversed(range(0, self.queries, self.count)):
                    stop = min(start + self.count, self.queries)
                    seen = self.keys - self.queries + stop if self.causal else self.keys
                    keys = min(-(-seen // self.step) * self.step, self.keys)
                    yield _Block(batches, shared, slice(start, stop), slice(0, keys), keys - seen)

    # Parts of tensors.

    def _rows(self, x: Tensor, block: _Block) -> Tensor:
        """What belongs to a block's queries: (batch · key heads, heads that share one · rows, channels)."""
        return x[block.queries].flip(3).flatten(2, 3).flatten(0, 1)

    @staticmethod
    def _seen(x: Tensor, block: _Block) -> Tensor:
        """What belongs to a block's keys: (batch · key heads, keys, channels)."""
        return x[block.seen].flatten(0, 1)

    def _by_head(self, x: Tensor, block: _Block) -> Tensor:
        """The inverse of `_rows` but for the order: (batch, key heads, heads that share one, rows, channels)."""
        heads = block.shared.stop - block.shared.start
        return x.unflatten(1, (self.groups, -1)).unflatten(0, (-1, heads))

    def _like(self, x: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A buffer of that name, shaped as a block; the blocks share it."""
        if name not in self.buffers or self.buffers[name].numel() < x.numel():
            self.buffers[name] = torch.empty(x.numel(), dtype=dtype)
        return self.buffers[name][: x.numel()].view(x.shape)

    def _halved(self, x: Tensor) -> Tensor:
        return self._like(x, "half", torch.bfloat16).copy_(x) if self.is_half else x

    def mask_of(self, block: _Block) -> Tensor | None:
        if self.mask is None:
            return None
        batches = block.batches if len(self.mask) > 1 else slice(1)
        shared = block.shared if self.mask.shape[1] > 1 else slice(1)
        return self.mask[batches, shared, :, block.rows, block.keys].flip(3)

    # Forward.

    def bias(self, block: _Block) -> Tensor | None:
        """B, by head."""
        if self.a is not None and self.b is not None:
            products = self._by_head(_all_pairs(self._rows(self.a, block), self._seen(self.b, block)), block)
            # The backward pass reads them again.
            self.products = products if self.keeps_products else None
            return products
        if self.row is None:
            return None
        first, count = self.queries - block.rows.stop, block.rows.stop - block.rows.start
        values = self.row[:, block.shared, :, first + block.keys.start : first + count + block.keys.stop - 1]
        return values.unfold(3, block.keys.stop - block.keys.start, 1)

    def scores(self, block: _Block) -> Tensor:
        """s + g·B + mask; a score gate's g is left in the buffer "gate"."""
        scores = _all_pairs(self._rows(self.query, block).float() * self.scaling, self._seen(self.key, block))
        by_head, bias = self._by_head(scores, block), self.bias(block)
        if bias is not None and self.temperature is not None:
            gate = self._like(scores, "gate")
            torch.sigmoid(torch.div(scores, self.temperature, out=gate), out=gate)
            by_head.addcmul_(self._by_head(gate, block), bias)
        elif bias is not None and self.factor is not None:
            by_head.addcmul_(self.factor[block.queries].flip(3), bias)
        elif bias is not None:
            by_head.add_(bias)
        self._hide(by_head, block)
        return scores

    def _hide(self, scores: Tensor, block: _Block) -> None:
        lowest = torch.finfo(torch.float32).min
        if self.causal and block.is_last:
            count = scores.shape[3]
            last = count + block.after
            scores[..., -last:].masked_fill_(self.future[self.count - count :, :last], lowest)
        mask = self.mask_of(block)
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~mask, lowest)
        elif mask is not None:
            hidden = mask <= torch.finfo(mask.dtype).min / 2
            scores.add_(mask.masked_fill(hidden, 0.0)).masked_fill_(hidden, lowest)

    def mixed(self, block: _Block) -> Tensor:
        """The values that the block's queries get, (batch · key heads, heads that share one · rows, channels)."""
        parts: list[tuple[Tensor, ...]] = []
        for part in block.parts(self.part):
            scores, is_whole = self.scores(part), part.is_last and not parts
            highest = None if is_whole else scores.amax(-1, keepdim=True)
            probability = torch.softmax(scores, -1, out=scores)
            mixed = _product(self._halved(probability), self._seen(self.half[2], part))
            if highest is None:
                return mixed
            # The sum of e^(score − highest), without another exponential.
            parts.append((highest, probability.amax(-1, keepdim=True).reciprocal(), mixed))
            # Not two blocks at once.
            del scores, probability
        highest, total, mixed = (torch.stack(x) for x in zip(*parts, strict=True))
        weight = total * (highest - highest.amax(0)).exp()
        return (mixed * (weight / weight.sum(0))).sum(0)

    def output(self) -> Tensor:
        # Laid out as what comes next wants it: (batch, queries, heads, channels).
        heads, width = self.shared * self.groups, self.value.shape[-1]
        output = self._grouped(self.value.new_empty(self.batch, self.queries, heads, width).transpose(1, 2))
        for block in self.blocks():
            output[block.queries] = self._by_head(self.mixed(block), block).flip(3)
        return output.flatten(1, 2)

    # Backward.

    def gradients(self, gradient: Tensor, bias_moves: bool = True) -> tuple[Any, ...]:
        """By query, key, value, `row`, a, b and factor; without `bias_moves` those of the bias are left at 0."""
        states = (self.query, self.key, self.value, self.row, self.a, self.b, self.factor)
        totals: list[Any] = [None if x is None else torch.zeros(x.shape) for x in states]
        by_query, by_key, by_value, by_row, by_a, by_b, by_factor = totals
        query, key, _ = self.half
        gradient = self._grouped(gradient)
        gradient, full_value = gradient.to(query.dtype), _dense(self.value)
        for block in self.blocks():
            scores = self.scores(block)
            probability = torch.softmax(scores, -1, out=scores)
            self._add(by_value, block, self._halved(probability).mT, self._rows(gradient, block))
            inner = _all_pairs(self._rows(gradient, block).float(), self._seen(full_value, block))
            # By the scores. Rows are whole, so that their sum need not come from an output that was rounded.
            inner.mul_(probability)
            inner.addcmul_(probability, inner.sum(-1, keepdim=True), value=-1)
            bias = self.products if self.a is not None else self.bias(block)
            if bias is not None:
                by_bias = self._gradient_of_bias(inner, bias, block, by_factor, probability)
                if by_row is not None and bias_moves:
                    first = self.queries - block.rows.stop
                    diagonals = self._sum_of_diagonals(by_bias)
                    by_row[0, block.shared, :, first : first + diagonals.shape[-1]] += diagonals
                elif self.a is not None and self.b is not None and bias_moves:
                    by_bias = by_bias.flatten(2, 3).flatten(0, 1)
                    by_a[block.queries] = self._by_head(_product(by_bias, self._seen(self.b, block)), block).flip(3)
                    self._add(by_b, block, by_bias.mT, self._rows(self.a, block))
            inner = self._halved(inner)
            product = _product(inner, self._seen(key, block)).float() * self.scaling
            by_query[block.queries] = self._by_head(product, block).flip(3)
            self._add(by_key, block, inner.mT, self._rows(query, block), self.scaling)
        by_query, by_row, by_a = (None if x is None else x.flatten(1, 2) for x in (by_query, by_row, by_a))
        by_row = None if by_row is None else by_row[0]
        if by_factor is not None:
            by_factor = by_factor.flatten(1, 2).sum_to_size(self.factor_shape)
        return by_query, by_key, by_value, by_row, by_a, by_b, by_factor

    def _add(self, total: Tensor, block: _Block, a: Tensor, b: Tensor, scaling: float = 1.0) -> None:
        """Add a product, what the block's keys get, to the sum over all blocks."""
        part = total[block.seen]
        part.add_(_product(a, b).view(part.shape), alpha=scaling)

    def _gradient_of_bias(self, inner: Tensor, bias: Tensor, block: _Block, by_factor: Any, free: Tensor) -> Tensor:
        """The gradient by B, by head, maybe in `free`; that of the scores, `inner`, gets what the gate adds to it."""
        scores, mask = self._by_head(inner, block), self.mask_of(block)
        by_bias, free = scores, self._by_head(free, block)
        if mask is not None:
            # A query that sees nothing has all keys alike, and no bias.
            hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
            by_bias = scores.masked_fill(hidden, 0.0)
        if self.temperature is not None:
            gate = self._by_head(self._like(inner, "gate"), block)
            gated = torch.mul(gate, by_bias, out=free)
            # dg/ds = g(1 − g) / T.
            slope = gate.sub_(gate.square()).mul_(bias).div_(self.temperature)
            scores.addcmul_(by_bias, slope)
            return gated
        if self.factor is not None:
            by_factor[block.queries] = (by_bias * bias).sum(-1, keepdim=True).flip(3)
            return torch.mul(by_bias, self.factor[block.queries].flip(3), out=free)
        return by_bias

    def _sum_of_diagonals(self, by_bias: Tensor) -> Tensor:
        """By R: (batch, key heads, heads that share one, rows, keys) → (key heads, heads that share one, rows + keys − 1)."""
        count, width = by_bias.shape[-2], sum(by_bias.shape[-2:])
        # Rows that are shorter by one shift row r right by r.
        skewed = torch.nn.functional.pad(by_bias, (0, count)).flatten(-2)[..., : count * (width - 1)]
        return skewed.unflatten(-1, (count, width - 1)).sum((0, -2))


def _dense(x: Tensor) -> Tensor:
    """In fp32 and without gaps: of rows that are strided oneDNN's product is a hundred times slower."""
    return x.float().contiguous()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b of matrices (p, n, k) and (p, k, m)."""
    return (a[0] @ b[0])[None] if len(a) == 1 else torch.bmm(a, b)


def _all_pairs(a: Tensor, b: Tensor) -> Tensor:
    """The products of all rows of a (p, n, c) with those of b (p, m, c), in fp32: (p, n, m)."""
    large = len(a) == 1 and a.shape[1] * b.shape[1] * a.shape[2] > _LARGE
    if _linear is None or not large:
        return _product(a, b.mT)
    # Of this shape oneDNN's product is up to twice as fast as that behind `@`.
    return _linear(a[0], b[0], None, "none", [], "")[None]

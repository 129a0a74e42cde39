"""Causal attention with a bias by distance at the price of plain attention: a near field and a far field.

Queries come in blocks. Keys less than `reach` before a block are its near field: the fused kernel gets the bias as a mask that
is the same for every block, since it depends on distances alone. All older keys are its far field, where a bias is either
constant, which softmax cancels once it is taken out of the near field too, or so smooth that within a block it is a polynomial
of the query's place, exact to rounding: interpolated between a few Chebyshev nodes,

    R(s + r − j) = Σ_k ℓ_k(r) · R(s + r_k − j),

it is a dot product and goes into the fused kernel as a few more head dimensions. Both results are joined by their logarithmic
sums. (The split is that of the fast multipole method, https://doi.org/10.1016/0021-9991(87)90140-9.) The backward pass has the
fused kernel recompute the far field; the near field's probabilities are recomputed here, for the gradient of the bias. Memory
grows linearly with length. This file travels with every checkpoint and imports torch only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Polynomials of this degree − 1 in the query's place leave an error of 5.8^-8, fp32's own, for a logarithm of distance at least
# one block away.
_NODES = 8
_forward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


class Fields(NamedTuple):
    """A bias by distance: `near` (heads, block + reach − 1) at distances 0, 1, ...; `far` (heads, nodes, length), at
    distances t + r_k for t = 0, 1, ... and the nodes r_k of a block, or None where it is 0 from `reach` on."""

    near: Tensor
    far: Tensor | None
    reach: int
    block: int


def chebyshev_nodes(count: int, block: int) -> Tensor:
    """Places (count,) in a block of queries, 0 to block − 1, between which a smooth bias is interpolated."""
    angle = (torch.arange(count, dtype=torch.float64) + 0.5) * (math.pi / count)
    return (block - 1) / 2 * (1 - angle.cos())


def interpolation(nodes: Tensor, block: int) -> Tensor:
    """ℓ_k(r) at r = 0 … block − 1: (block, nodes), rows that sum to 1, in fp32."""
    places = torch.arange(block, dtype=torch.float64)
    ratio = (places[:, None, None] - nodes) / (nodes[:, None] - nodes).fill_diagonal_(1.0)
    ratio.diagonal(dim1=1, dim2=2).fill_(1.0)
    return ratio.prod(-1).float()


def fields_of(bias: Any, keys: int, block: int, device: torch.device) -> Fields:
    """The fields of a `RelativeBias` for `keys` keys, differentiable in its parameters.

    The value where the far field begins, which softmax cancels, is taken out of all others: it leaves nothing of a bias that
    is constant from there on, and little to be rounded of one that is not.
    """
    reach = block if bias.reach is None else bias.reach
    border = bias.values(-torch.tensor([reach], device=device))
    if bias.reach is not None:
        return Fields(bias.values(-torch.arange(reach, device=device)) - border, None, reach, block)
    near = bias.values(-torch.arange(2 * block - 1, device=device)) - border
    distance = torch.arange(keys, device=device) + chebyshev_nodes(_NODES, block).float()[:, None].to(device)
    far = bias.values(-distance.flatten()) - border
    return Fields(near, far.unflatten(-1, (_NODES, keys)), reach, block)


def is_available(query: Tensor) -> bool:
    return _forward is not None and query.device.type == "cpu"


def near_far_attention(
    query: Tensor, key: Tensor, value: Tensor, fields: Fields, factor: Tensor | None, scaling: float
) -> Tensor:
    """Causal attention of queries (batch, heads, n, d) to keys and values (batch, key/value heads, m, d).

    The queries are the last n of the m positions. `factor`: a gate on the bias, broadcastable to (batch, heads, n, 1), or
    None. Returns (batch, heads, n, d); gradients go to all tensors.
    """
    near, far, reach, block = fields
    with torch.autocast(query.device.type, enabled=False):
        return _NearFar.apply(query, key, value, near, far, factor, reach, block, scaling)


class _NearFar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        layout = _Layout(*inputs)
        *tensors, reach, block, scaling = inputs
        query = layout.query
        output, total = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        for rows in layout.blocks():
            part, weight = layout.near(rows)
            old = layout.far(rows)
            if old is not None:
                joint = torch.logaddexp(weight, old[1])
                part = part * (weight - joint).exp()[..., None] + old[0] * (old[1] - joint).exp()[..., None]
                weight = joint
            output[:, :, rows], total[:, :, rows] = part, weight
        ctx.save_for_backward(*tensors, output, total)
        ctx.settings = reach, block, scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *inputs, output, total = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            layout = _Layout(*inputs, *ctx.settings)
            layout.start_backward(gradient, output, total)
            for rows in layout.blocks():
                layout.near_backward(rows)
                layout.far_backward(rows)
        return (*layout.gradients(), None, None, None)


class _Layout:
    """The blocks of one attention call."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        near: Tensor,
        far: Tensor | None,
        factor: Tensor | None,
        reach: int,
        block: int,
        scaling: float,
    ) -> None:
        self.query, self.key, self.value, self.values = query, key, value, far
        self.factor, self.reach, self.block, self.scaling = factor, reach, block, scaling
        self.heads, self.head_dim = query.shape[1], query.shape[3]
        self.offset = key.shape[2] - query.shape[2]
        self.groups = self.heads // key.shape[1]
        self.near_length = near.shape[1]
        # Row r of a block sees column c of its near field at distance r + reach − 1 − c.
        self.width = reach - 1 + block
        row = torch.nn.functional.pad(near.flip(-1), (self.width - near.shape[1], block - 1))
        self.bias = row.unfold(-1, self.width, 1).flip(-2)[None]
        hidden = torch.arange(self.width) - torch.arange(block)[:, None] >= reach
        self.mask = self.bias.masked_fill(hidden, torch.finfo(torch.float32).min)
        self.hidden = hidden
        if far is not None:
            self._widen(far.shape[1])

    def _widen(self, nodes: int) -> None:
        """Queries, keys and values with room for the far bias; key heads are no longer shared, as biases are not."""
        extra = -(-nodes // 8) * 8
        self.basis = interpolation(chebyshev_nodes(nodes, self.block), self.block).to(self.query.dtype)
        batch, _, queries, _ = self.query.shape
        self.wide_query = torch.nn.functional.pad(self.query, (0, extra))
        self.wide_key = self.key.new_zeros(batch, self.heads, self.key.shape[2], self.head_dim + extra)
        self.wide_key[..., : self.head_dim] = self._spread(self.key)
        self.wide_value = torch.nn.functional.pad(self._spread(self.value), (0, extra))
        self.extra = slice(self.head_dim, self.head_dim + nodes)
        repeated = self.basis.repeat(-(-queries // self.block), 1)[:queries]
        self.wide_query[..., self.extra] = repeated / self.scaling
        if self.factor is not None:
            self.wide_query[..., self.extra] *= self.factor.to(self.query.dtype)

    def blocks(self) -> list[slice]:
        queries = self.query.shape[2]
        return [slice(start, min(start + self.block, queries)) for start in range(0, queries, self.block)]

    def _spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.groups, 1)

    # Forward.

    def _near_field(self, rows: slice) -> tuple[slice, slice, slice]:
        """Its keys, and the rows and columns of the bias that they have."""
        place, count = rows.start + self.offset, rows.stop - rows.start
        keys = slice(max(0, place - self.reach + 1), place + count)
        last = self.reach - 1 + count
        return keys, slice(0, count), slice(last - (keys.stop - keys.start), last)

    def near(self, rows: slice) -> tuple[Tensor, Tensor]:
        keys, r, c = self._near_field(rows)
        if self.factor is None:
            mask = self.mask[:, :, r, c]
        else:
            bias = self.bias[:, :, r, c] * self.factor[:, :, self._factor_rows(rows)]
            mask = bias.masked_fill(self.hidden[r, c], torch.finfo(torch.float32).min)
        mask = mask.expand(self.query.shape[0], -1, -1, -1)
        return _forward(
            self.query[:, :, rows], self.key[:, :, keys], self.value[:, :, keys], attn_mask=mask, scale=self.scaling
        )

    def _factor_rows(self, rows: slice) -> slice:
        return rows if self.factor is not None and self.factor.shape[2] > 1 else slice(None)

    def _far_field(self, rows: slice) -> tuple[Any, Any, Any]:
        keys = self._far_keys(rows)
        if self.values is None:
            return self.query[:, :, rows], self.key[:, :, keys], self.value[:, :, keys]
        self.wide_key[:, :, keys, self.extra] = self.values[..., self._distances(rows)].flip(-1).transpose(-1, -2)
        return self.wide_query[:, :, rows], self.wide_key[:, :, keys], self.wide_value[:, :, keys]

    def _far_keys(self, rows: slice) -> slice:
        return slice(0, max(0, rows.start + self.offset - self.reach + 1))

    def _distances(self, rows: slice) -> slice:
        """The t of a block's far keys, from the nearest to the oldest."""
        return slice(self.reach, rows.start + self.offset + 1)

    def far(self, rows: slice) -> tuple[Tensor, Tensor] | None:
        if self._far_keys(rows).stop == 0:
            return None
        output, total = _forward(*self._far_field(rows), scale=self.scaling)
        return output[..., : self.head_dim], total

    # Backward.

    def start_backward(self, gradient: Tensor, output: Tensor, total: Tensor) -> None:
        self.gradient, self.output, self.total = gradient, output, total
        self.delta = (gradient.float() * output.float()).sum(-1, keepdim=True)
        self.query_gradient = torch.zeros_like(self.query, dtype=torch.float32)
        self.key_gradient, self.value_gradient = (
            torch.zeros_like(x, dtype=torch.float32) for x in (self.key, self.value)
        )
        self.bias_gradient = torch.zeros_like(self.bias[0])
        self.far_gradient: Any = None if self.values is None else torch.zeros_like(self.values)
        self.factor_gradient: Any = None if self.factor is None else torch.zeros_like(self.factor, dtype=torch.float32)

    def near_backward(self, rows: slice) -> None:
        keys, r, c = self._near_field(rows)
        bias = self.bias[:, :, r, c]
        factor = None if self.factor is None else self.factor[:, :, self._factor_rows(rows)]
        mask = (bias if factor is None else bias * factor).masked_fill(self.hidden[r, c], -torch.inf)
        query, gradient = (self._grouped(x[:, :, rows].float()) for x in (self.query, self.gradient))
        key, value = (x[:, :, None, keys].float() for x in (self.key, self.value))
        scores = (query @ key.transpose(-1, -2)).flatten(1, 2).mul_(self.scaling).add_(mask)
        probability = scores.sub_(self.total[:, :, rows, None]).exp_()
        inner = (gradient @ value.transpose(-1, -2)).flatten(1, 2).sub_(self.delta[:, :, rows]).mul_(probability)
        self.value_gradient[:, :, keys] += (self._grouped(probability).transpose(-1, -2) @ gradient).sum(2)
        by_bias = inner if factor is None else inner * factor
        self.bias_gradient[:, r, c] += by_bias.sum(0)
        if self.factor_gradient is not None:
            self._add_to_factor(rows, (inner * bias).sum(-1, keepdim=True))
        inner = self._grouped(inner)
        self.query_gradient[:, :, rows] += (inner @ key).flatten(1, 2) * self.scaling
        self.key_gradient[:, :, keys] += (inner.transpose(-1, -2) @ query).sum(2) * self.scaling

    def far_backward(self, rows: slice) -> None:
        keys = self._far_keys(rows)
        if keys.stop == 0:
            return
        query, key, value = self._far_field(rows)
        extra = query.shape[-1] - self.head_dim
        gradient, output = (
            torch.nn.functional.pad(x[:, :, rows], (0, extra)) if extra else x[:, :, rows].contiguous()
            for x in (self.gradient, self.output)
        )
        dq, dk, dv = _backward(
            gradient, query, key, value, output, self.total[:, :, rows].contiguous(), 0.0, False, scale=self.scaling
        )
        self.query_gradient[:, :, rows] += dq[..., : self.head_dim]
        if self.values is None:
            self.key_gradient[:, :, keys] += dk
            self.value_gradient[:, :, keys] += dv
            return
        self.key_gradient[:, :, keys] += self._gathered(dk[..., : self.head_dim])
        self.value_gradient[:, :, keys] += self._gathered(dv[..., : self.head_dim])
        by_key = dk[..., self.extra].float().sum(0).transpose(-1, -2)
        self.far_gradient[..., self._distances(rows)] += by_key.flip(-1)
        if self.factor_gradient is not None:
            count = rows.stop - rows.start
            per_row = (dq[..., self.extra].float() * (self.basis[:count] / self.scaling).float()).sum(-1, keepdim=True)
            self._add_to_factor(rows, per_row)

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.key.shape[1], self.groups))

    def _gathered(self, x: Tensor) -> Tensor:
        return x.float().unflatten(1, (self.key.shape[1], self.groups)).sum(2)

    def _add_to_factor(self, rows: slice, gradient: Tensor) -> None:
        part = self.factor_gradient[:, :, self._factor_rows(rows)]
        part += gradient.sum_to_size(part.shape)

    def gradients(self) -> tuple[Any, ...]:
        # Columns to distances: the sum of each diagonal.
        height, width = self.bias_gradient.shape[-2:]
        skewed = torch.nn.functional.pad(self.bias_gradient.flip(-1), (0, height)).flatten(1)[:, :-height]
        by_distance = skewed.unflatten(1, (height, width + height - 1)).sum(1)
        nearest = height - 1
        return (
            self.query_gradient.to(self.query.dtype),
            self.key_gradient.to(self.key.dtype),
            self.value_gradient.to(self.value.dtype),
            by_distance[:, nearest : nearest + self.near_length],
            self.far_gradient,
            self.factor_gradient,
        )

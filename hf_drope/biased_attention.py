"""Attention with a position bias, a window or an attention scale, by way of the stock attention function.

A bias that is a dot product widens the heads; any other one is added as a mask, one block of queries at a time. This file
travels with every checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .disentangled_bias import DisentangledBias
from .near_far_attention import fields_of, is_available, near_far_attention
from .position_bias import LowRankBias, PositionBias, offsets, unfold_rows
from .streamed_attention import streamed_attention

BIAS_BACKENDS = ("eager", "sdpa")
# Queries per block of a dense bias: the block of scores stays in cache and (heads, L, L) is never made.
QUERY_BLOCK = 256
# Queries per block of a bias split into a near and a far field.
NEAR_FAR_BLOCK = 128
# Fewer queries are better off with one call of the fused kernel.
OWN_KERNEL_QUERIES = 32


class Position(NamedTuple):
    """Where a block of queries stands, read from the cache before the layer adds to it.

    query_offset: index of the first query; key_offset: index of the first key that attention will see (a sliding cache
    forgets the oldest); hidden_states: the layer's input, for gates that read it.
    """

    query_offset: int | Tensor
    key_offset: int | Tensor
    hidden_states: Tensor


def refuse_backend(implementation: str | None, what: str) -> None:
    """Raise ValueError unless `what` (a position bias, a window, ...) can run on this attention implementation."""
    if implementation not in BIAS_BACKENDS:
        raise ValueError(
            f"A model with {what} cannot run on attn_implementation={implementation!r}, which would leave it out; "
            f"load it with one of {', '.join(map(repr, BIAS_BACKENDS))}."
        )


def attend(
    stock: Callable[..., Any],
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    drope_position: Position | None = None,
    **kwargs: Any,
) -> Any:
    """Scores (batch, heads, queries, keys) plus the module's position bias, by way of the stock attention function."""
    if module.observe is not None:
        module.observe(module, query, key, attention_mask, drope_position, kwargs.get("scaling"))
    if not module.needs_position:
        return stock(module, query, key, value, attention_mask, **kwargs)
    if drope_position is None:
        raise ValueError(
            f"{type(module).__name__} does not hand keyword arguments on to its attention function, so hf_drope cannot "
            "tell it where the queries stand; a position bias, window or attention scale is not possible for this family."
        )
    refuse_backend(implementation, "a position bias, window or attention scale")
    offset = drope_position.query_offset - drope_position.key_offset
    scaling = kwargs.pop("scaling", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if module.attention_scale is not None:
        query = scale_queries(module.attention_scale, query, key, attention_mask, offset)
    if module.window is not None:
        attention_mask = _window_mask(module, query, key, attention_mask, offset, kwargs)
    position_bias = module.position_bias
    if position_bias is None:
        return stock(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Decoding: a row of scores is less than a copy of all keys with more channels.
    few = query.shape[2] < OWN_KERNEL_QUERIES and not torch.is_grad_enabled()
    if isinstance(position_bias.bias, DisentangledBias):
        if not position_bias.bias.is_dense and not position_bias.reads_scores:
            call = functools.partial(stock, module, scaling=scaling, **kwargs)
            return _attend_disentangled(call, module, query, key, value, attention_mask, drope_position, scaling, few)
    elif isinstance(position_bias.bias, LowRankBias) and not position_bias.reads_scores and not few:
        call = functools.partial(stock, module, attention_mask=attention_mask, scaling=1.0, **kwargs)
        return _attend_low_rank(call, position_bias, query * scaling, key, value, offset, drope_position.hidden_states)
    if implementation == "sdpa" and _has_own_kernel(position_bias, query, kwargs):
        hidden = drope_position.hidden_states
        causal = attention_mask is None and _is_causal(module, kwargs)
        # A static cache is longer than it is filled; its mask says what is there.
        if not causal or (isinstance(offset, int) and key.shape[2] == query.shape[2] + offset):
            return _attend_by_own_kernel(
                position_bias, query, key, value, attention_mask, causal, offset, hidden, scaling
            )
    return _attend_in_blocks(
        stock, implementation, module, query, key, value, attention_mask, drope_position, offset, scaling, kwargs
    )


def _attend_disentangled(
    call: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position: Position,
    scaling: float,
    few: bool,
) -> Any:
    position_bias, offset = module.position_bias, position.query_offset - position.key_offset
    bias: Any = position_bias.bias
    factor = position_bias.factor(None, position.hidden_states)
    key, rotated = key[..., : bias.head_dim], (key[..., bias.head_dim :] if key.shape[-1] > bias.head_dim else None)
    if rotated is None or not few or bias.content_rotation.state != "dropped":
        wide_query, wide_key = bias(query, key, offset, factor, rotated, position.key_offset)
        return _attend_wider(functools.partial(call, attention_mask=mask), wide_query, wide_key, value)
    query, scores = bias.decoded_scores(query, key, rotated, offset, position.key_offset, factor)
    scores = scores * scaling
    if mask is not None:
        scores = _mask_bias(scores, mask, torch.float32)
    elif query.shape[2] > 1:
        scores = _hide(
            scores, unfold_rows(offsets(query.shape[2], key.shape[2], offset, query.device) > 0, *scores.shape[2:])
        )
    # The fused kernel of the CPU takes a mask in fp32 whatever the queries are.
    scores = scores if query.device.type == "cpu" else scores.to(query.dtype)
    return call(query=query, key=key, value=value, attention_mask=scores)


def _attend_low_rank(
    call: Callable[..., Any],
    position_bias: PositionBias,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: int | Tensor,
    hidden_states: Tensor,
) -> Any:
    """The bias as extra head dimensions: [q·scaling, u_i]·[k, v_j] with values [v, 0], so any fused kernel stays in use."""
    bias: Any = position_bias.bias
    batch, heads, queries, _ = query.shape
    u = bias.query_factors(torch.arange(queries, device=query.device) + offset)[None]
    factor = position_bias.factor(None, hidden_states)
    u = (u if factor is None else u * factor).expand(batch, heads, queries, -1)
    v = bias.key_factors(torch.arange(key.shape[2], device=key.device)).to(key.dtype)
    wide_query = torch.cat([query, u.to(query.dtype)], dim=-1)
    return _attend_wider(call, wide_query, torch.cat([key, v.expand(batch, key.shape[1], -1, -1)], dim=-1), value)


def _attend_wider(call: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Attention with queries and keys wider than values: fused kernels want one width, so values get zeros."""
    output, weights = call(query=query, key=key, value=nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1])))
    return output[..., : value.shape[-1]], weights


def _has_own_kernel(position_bias: PositionBias, query: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether many queries at once meet a dense bias on the CPU, where a fused kernel with a mask is slow."""
    return (
        query.device.type == "cpu"
        and query.shape[2] >= OWN_KERNEL_QUERIES
        and not isinstance(position_bias.bias, DisentangledBias)
        and not torch.compiler.is_compiling()
        and not kwargs.get("dropout")
        and all(kwargs.get(name) is None for name in ("softcap", "s_aux"))
    )


def _attend_by_own_kernel(
    position_bias: PositionBias,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    offset: int | Tensor,
    hidden_states: Tensor,
    scaling: float,
) -> Any:
    bias: Any = position_bias.bias
    gate: Any = position_bias.gate if position_bias.reads_scores else None
    kind, queries, keys = query.device.type, query.shape[2], key.shape[2]
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    factor = None if gate is not None else position_bias.factor(None, hidden_states)
    if causal and gate is None and queries > NEAR_FAR_BLOCK and is_available(query):
        fields = fields_of(bias, keys, NEAR_FAR_BLOCK, query.device)
        output = near_far_attention(query, key, value, fields, factor, scaling)
    else:
        output = streamed_attention(
            query,
            key,
            value,
            bias.values(offsets(queries, keys, offset, query.device)),
            scaling=scaling,
            factor=factor,
            temperature=None if gate is None else gate.temperature,
            mask=mask,
            causal=causal,
        )
    return output.transpose(1, 2).contiguous(), None


def _attend_in_blocks(
    stock: Callable[..., Any],
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position: Position,
    offset: int | Tensor,
    scaling: float,
    kwargs: dict[str, Any],
) -> Any:
    """The bias as an additive mask, one block of queries at a time; eager takes all queries at once, as it does in stock."""
    queries, keys = query.shape[2], key.shape[2]
    position_bias = module.position_bias
    causal = attention_mask is None and implementation != "eager" and _is_causal(module, kwargs)
    row_offsets = offsets(queries, keys, offset, query.device)
    disentangled = isinstance(position_bias.bias, DisentangledBias)
    # One row of values over all Δ serves every block; a disentangled bias depends on queries and keys.
    row = query.new_empty(0) if disentangled else position_bias.bias.values(row_offsets)
    block = queries if implementation == "eager" else QUERY_BLOCK
    # Fused kernels want the mask in the dtype of the queries; eager adds it to the scores, which it then promotes.
    dtype = torch.float32 if implementation == "eager" else query.dtype

    def attend_block(start: int, query: Tensor, key: Tensor, value: Tensor, row: Tensor) -> Any:
        count, width = query.shape[2], key.shape[2]
        first = queries - start - count
        part = slice(first, first + count + width - 1)
        hidden = position.hidden_states[:, start : start + count]
        if disentangled:
            scores = position_bias.bias.content_scores(query, key, offset + start) * scaling
            bias = position_bias.bias.scores(query, key, offset + start) * scaling
            query, key = position_bias.bias.content(query, key, offset + start)
            value = nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
        else:
            scores = _scores(query, key, scaling) if position_bias.reads_scores else None
            bias = unfold_rows(row[:, part], count, width)[None]
        factor = position_bias.factor(scores, hidden)
        bias = bias if factor is None else factor * bias
        if attention_mask is not None:
            bias = _mask_bias(bias, attention_mask[:, :, start : start + count, :width], dtype)
        elif causal:
            bias = _hide(bias.to(dtype), unfold_rows(row_offsets[part] > 0, count, width))
        bias = bias.to(dtype).expand(query.shape[0], query.shape[1], count, width)
        output, weights = stock(module, query, key, value, bias, scaling=scaling, **kwargs)
        return output[..., :value_width], weights

    value_width = value.shape[-1]
    if queries <= block:
        return attend_block(0, query, key, value, row)
    outputs = []
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        # Keys after the block's last query are in its future.
        seen = min(keys, stop + offset) if causal and isinstance(offset, int) else keys
        inputs = (start, query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], row)
        if torch.is_grad_enabled():
            # Keeping every block's bias for the backward pass would be (heads, L, L) after all.
            outputs.append(
                checkpoint(lambda *block_inputs: attend_block(*block_inputs)[0], *inputs, use_reentrant=False)
            )
        else:
            outputs.append(attend_block(*inputs)[0])
    return torch.cat(outputs, dim=1), None


def _is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """q·k·scaling in fp32 with key heads shared by groups of query heads: (batch, heads, queries, keys)."""
    groups = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (key.shape[1], groups))
    return (grouped.float() @ key.float()[:, :, None].transpose(-1, -2) * scaling).flatten(1, 2)


def _hide(bias: Tensor, hidden: Tensor) -> Tensor:
    # Not −inf, which turns a row with nothing to see into NaN; and in place of the bias, whose sum might overflow.
    return bias.masked_fill(hidden, torch.finfo(bias.dtype).min)


def _mask_bias(bias: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias plus mask in `dtype`, where masked entries stay masked for any bias value and no row becomes NaN."""
    if mask.dtype == torch.bool:
        return _hide(bias.to(dtype), ~mask)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return _hide((bias + mask.masked_fill(hidden, 0.0)).to(dtype), hidden)


def _visible_keys(query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor) -> Tensor:
    """How many keys each query may see, (batch or 1, 1, queries, 1): its position + 1, padding and other documents aside."""
    if mask is None:
        position = torch.arange(query.shape[2], device=query.device) + offset
        return (position + 1).clamp(max=key.shape[2])[None, None, :, None].float()
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen[:, :1].sum(-1, keepdim=True).float()


def scale_queries(
    scale: dict[str, Any], query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor
) -> Tensor:
    """Queries times the attention scale `check_scale` let through; arguments as an attention function gets them."""
    if "factor" in scale:
        return query * scale["factor"]
    length = scale["original_max_position_embeddings"]
    growth = (_visible_keys(query, key, mask, offset) / length).clamp(min=1).log()
    return query * (1 + scale["coefficient"] * growth).to(query.dtype)


def _window_mask(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor, kwargs: dict[str, Any]
) -> Tensor:
    """The mask with keys further back than the window hidden."""
    row = offsets(query.shape[2], key.shape[2], offset, query.device)
    near = row > -module.window
    if mask is None and _is_causal(module, kwargs):
        near = near & (row <= 0)
    near = unfold_rows(near, query.shape[2], key.shape[2])[None, None]
    if mask is None:
        return near
    return mask & near if mask.dtype == torch.bool else _hide(mask, ~near)


def check_scale(scale: dict[str, Any] | None) -> dict[str, Any] | None:
    """None for a scale that changes nothing, so that such a model pays nothing."""
    if scale is None or math.isclose(scale.get("factor", 0.0), 1.0) or scale.get("coefficient") == 0.0:
        return None
    return scale

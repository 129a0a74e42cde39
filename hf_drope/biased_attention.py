"""Attention with a position bias, a window or an attention scale, by way of the stock attention function.

A bias that is a dot product widens the heads, for every backend alike. Any other one is a `score_mod` of flex attention or a
mask, one block of queries at a time. On the CPU a kernel of our own takes both. This file travels with every checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .attention_call import AttentionCall, Position
from .attention_masks import hide, mask_bias, scale_queries, visible, window_mask
from .block_bias_attention import attend_in_blocks
from .disentangled_bias import DisentangledBias
from .disentangled_decoding import decoded_scores
from .flex_attention_drope import flex_attention_with_bias, window_block_mask
from .position_bias import LowRankBias, PositionBias, is_exporting, offsets, unfold_rows
from .streamed_attention import streamed_attention

# Queries per block of a window.
WINDOW_BLOCK = 256
# Fewer queries are better off with one call of the fused kernel.
OWN_KERNEL_QUERIES = 32


def attend(
    stock: Callable[..., Any],
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    drope_position: Position | None = None,
    **kwargs: Any,
) -> Any:
    """The attention function that a converted module calls: `stock`, its backend's own, with the module's additions."""
    if module.observe is not None:
        module.observe(module, query, key, attention_mask, drope_position, kwargs.get("scaling"))
    if not module.needs_position:
        return stock(module, query, key, value, attention_mask, **kwargs)
    if drope_position is None:
        raise ValueError(
            f"{type(module).__name__} does not hand keyword arguments on to its attention function, so hf_drope cannot "
            "tell it where the queries stand; a position bias, window or attention scale is not possible for this family."
        )
    _check_keys(module, key, drope_position)
    counted = isinstance(drope_position.query_offset, Tensor) and not torch.compiler.is_compiling()
    if counted and implementation == "flex_attention":
        raise ValueError(
            "flex_attention reads its mask after a static cache has counted the new tokens, so that they would see the wrong "
            "keys; use a dynamic cache, or sdpa."
        )
    scaling = kwargs.pop("scaling", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(
        stock, implementation, module, query, key, value, attention_mask, drope_position, scaling, kwargs
    )
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        # One row for all queries, or one a query.
        call = call._replace(mask=attention_mask.expand(-1, -1, query.shape[2], -1))
    if module.attention_scale is not None:
        query = scale_queries(module.attention_scale, query, key, attention_mask, call.offset)
        call = call._replace(query=query)
    return _attend(call) if module.window is None else _attend_within_window(call)


def _check_keys(module: Any, key: Tensor, position: Position) -> None:
    """Raise ValueError where other keys came than the cache foretold, because then their distances are not known."""
    expected = position.key_length
    # A compiler would guard on the length of every cache.
    if torch.compiler.is_compiling() or not isinstance(expected, int) or key.shape[2] == expected:
        return
    raise ValueError(
        f"{type(module).__name__} got {key.shape[2]} keys where its cache foretold {expected}, so their distances are not known "
        "to the position bias, window or attention scale; use a cache class of Transformers, or use_cache=False."
    )


def are_few(states: Tensor) -> bool:
    """Whether queries or keys (batch, heads, n, channels) are those of decoding, for which there are shorter ways in fp32."""
    # An exported program takes any length, so it has one way.
    if is_exporting() or torch.is_grad_enabled():
        return False
    return states.shape[2] < OWN_KERNEL_QUERIES and states.dtype != torch.float64


def _attend(call: AttentionCall) -> Any:
    position_bias = call.module.position_bias
    if position_bias is None:
        return call.run()
    # Decoding: a row of scores is less than a copy of all keys with more channels.
    few = are_few(call.query) and call.implementation in ("eager", "sdpa")
    # A family that caps its scores caps a product with its bias, and a mask is added after that.
    few = few and call.kwargs.get("softcap") is None
    if isinstance(position_bias.bias, DisentangledBias):
        if not position_bias.bias.is_dense and not position_bias.reads_scores:
            return _attend_disentangled(call, few)
    elif isinstance(position_bias.bias, LowRankBias) and not position_bias.reads_scores and not few:
        return _attend_low_rank(call)
    if call.implementation == "flex_attention":
        return flex_attention_with_bias(call)
    clipped = isinstance(position_bias.bias, DisentangledBias) and position_bias.bias.is_dense
    if _has_own_kernel(call) and not clipped:
        return _attend_by_own_kernel(call)
    return attend_in_blocks(call)


def _attend_within_window(call: AttentionCall) -> Any:
    """Keys further back than the module's window are hidden and, where that saves work, not read."""
    window, query, key = call.module.window, call.query, call.key
    if call.implementation == "flex_attention":
        return _attend(call._replace(mask=window_block_mask(call)))
    offset: Any = call.offset
    by_block = call.implementation == "sdpa" and isinstance(offset, int) and not torch.compiler.is_compiling()
    if not by_block:
        mask = window_mask(window, query, key, call.mask, offset, call.is_causal)
        return _attend(call._replace(mask=mask))
    outputs = []
    for start in range(0, query.shape[2], WINDOW_BLOCK):
        stop = min(start + WINDOW_BLOCK, query.shape[2])
        end = key.shape[2] if _shows_later_keys(call, start, stop) else min(key.shape[2], offset + stop)
        part = call.part(start, stop, max(0, offset + start - window + 1), end)
        mask = window_mask(window, part.query, part.key, part.mask, part.offset, call.is_causal)
        outputs.append(_attend(part._replace(mask=mask))[0])
    return torch.cat(outputs, 1), None


def _shows_later_keys(call: AttentionCall, start: int, stop: int) -> bool:
    """Whether queries start … stop may see keys after themselves; a mask on another device than the CPU is not asked."""
    if call.mask is None:
        return not call.is_causal
    offset: Any = call.offset
    return call.mask.device.type != "cpu" or bool(visible(call.mask[:, :, start:stop, offset + stop :]).any())


def refuse_sinks(module: Any, sinks: Tensor | None) -> None:
    """Raise ValueError where a module has attention sinks, which what is constant along the keys does not leave alone."""
    if sinks is not None:
        raise ValueError(
            f"{type(module).__name__} has attention sinks, which tell apart what a disentangled bias leaves out of all scores "
            "of a query; use 'table', 'log', 'linear' or 'low_rank'."
        )


def _attend_disentangled(call: AttentionCall, few: bool) -> Any:
    position_bias, position, offset = call.module.position_bias, call.position, call.offset
    bias: Any = position_bias.bias
    refuse_sinks(call.module, call.kwargs.get("s_aux"))
    factor = position_bias.factor(None, position.hidden_states)
    key, query, width = call.key[..., : bias.head_dim], call.query, call.key.shape[-1]
    rotated = call.key[..., bias.head_dim :] if width > bias.head_dim else None
    if rotated is None or not few or bias.content_rotation.state != "dropped":
        wide_query, wide_key = bias(query, key, offset, factor, rotated, position.key_offset)
        return _attend_wider(call._replace(query=wide_query, key=wide_key))
    query, scores = decoded_scores(
        bias, query, rotated, offset, position.key_offset, factor, call.scaling, position.kept
    )
    # The fused kernel of the CPU takes a mask in fp32 whatever the queries are.
    dtype = torch.float32 if query.device.type == "cpu" else query.dtype
    if call.mask is not None:
        scores = mask_bias(scores, call.mask, dtype)
    elif query.shape[2] > 1:
        later = offsets(query.shape[2], key.shape[2], offset, query.device) > 0
        scores = hide(scores.to(dtype), unfold_rows(later, *scores.shape[2:]))
    scores = scores.to(dtype)
    return call.run(query=query, key=key, mask=scores)


def _attend_low_rank(call: AttentionCall) -> Any:
    """The bias as extra head dimensions: [q, u_i / scaling]·[k, v_j], so any fused kernel stays in use."""
    position_bias, key, device = call.module.position_bias, call.key, call.query.device
    bias: Any = position_bias.bias
    batch, heads, queries, _ = call.query.shape
    u = bias.query_factors(torch.arange(queries, device=device) + call.offset)[None]
    factor = position_bias.factor(None, call.position.hidden_states)
    u = ((u if factor is None else u * factor) / call.scaling).expand(batch, heads, queries, -1)
    v = bias.key_factors(torch.arange(key.shape[2], device=device)).to(key.dtype)
    wide_query = torch.cat([call.query, u.to(call.query.dtype)], dim=-1)
    wide_key = torch.cat([key, v.expand(batch, key.shape[1], -1, -1)], dim=-1)
    return _attend_wider(call._replace(query=wide_query, key=wide_key))


def _attend_wider(call: AttentionCall) -> Any:
    """Attention with queries and keys wider than values, which most fused kernels want as wide: they get zeros."""
    if _has_own_kernel(call):
        return _stream(call)
    if call.implementation == "flex_attention":
        return call.run()
    width = call.value.shape[-1]
    output, weights = call.run(value=nn.functional.pad(call.value, (0, max(0, call.key.shape[-1] - width))))
    # Some families view the output in another shape, which only a contiguous one allows.
    return output[..., :width].contiguous(), weights


def _has_own_kernel(call: AttentionCall) -> bool:
    """Whether many queries at once meet a bias on the CPU, where a fused kernel with a mask or with wider heads is slow."""
    return (
        call.implementation == "sdpa"
        and call.query.device.type == "cpu"
        and call.query.dtype != torch.float64
        and not torch.compiler.is_compiling()
        and call.query.shape[2] >= OWN_KERNEL_QUERIES
        and not call.kwargs.get("dropout")
        and all(call.kwargs.get(name) is None for name in ("softcap", "s_aux"))
        # A static cache's mask says what is there.
        and (call.mask is not None or not call.is_causal or call.ends_with_its_queries)
    )


def _attend_by_own_kernel(call: AttentionCall) -> Any:
    position_bias: PositionBias = call.module.position_bias
    bias: Any = position_bias.bias
    query, key, offset = call.query, call.key, call.offset
    temperature = position_bias.gate.temperature if position_bias.reads_scores else None  # type: ignore[union-attr]
    if isinstance(bias, DisentangledBias):
        a, b = bias.terms_product(query, key, offset)
        query, key = bias.content_product(query, key, offset)
        call = call._replace(query=query, key=key)
        return _stream(call, product=(a * call.scaling, b), temperature=temperature)
    row = bias.values(offsets(query.shape[2], key.shape[2], offset, query.device))
    factor = None if temperature is not None else position_bias.factor(None, call.position.hidden_states)
    return _stream(call, row=row, factor=factor, temperature=temperature)


def _stream(call: AttentionCall, **bias: Any) -> Any:
    kind, states = call.query.device.type, (call.query, call.key, call.value)
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in states)
    else:
        query, key, value = states
    causal = call.mask is None and call.is_causal
    output = streamed_attention(query, key, value, scaling=call.scaling, mask=call.mask, causal=causal, **bias)
    return output.transpose(1, 2).contiguous(), None

"""Biases and gates as `score_mod` of PyTorch's flex attention (https://pytorch.org/blog/flexattention/), windows as block masks.

This file travels with every checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_call import AttentionCall
from .position_bias import offsets

try:
    from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask
    from transformers.integrations.flex_attention import compile_friendly_flex_attention
except ImportError:
    BlockMask = None  # type: ignore[assignment,misc]


def _check_mask(call: AttentionCall) -> None:
    if BlockMask is None:
        raise ImportError("flex_attention needs a PyTorch that has torch.nn.attention.flex_attention; use sdpa.")
    if not isinstance(call.mask, BlockMask) and (call.mask is not None or call.module.window is not None):
        raise ValueError(
            "flex_attention takes a block mask, which Transformers makes; for a mask of your own use sdpa."
        )


def _check(call: AttentionCall) -> None:
    _check_mask(call)
    if call.query.device.type == "cpu" and torch.is_grad_enabled():
        raise ValueError(
            "flex_attention has no backward pass on the CPU; train with sdpa, or run under torch.no_grad()."
        )
    if call.kwargs.get("dropout"):
        raise ValueError("flex_attention has no dropout; set the config's attention_dropout to 0, or use sdpa.")
    if call.kwargs.get("s_aux") is not None:
        raise ValueError("flex_attention with a position bias has no attention sinks; use eager.")


def flex_attention_with_bias(call: AttentionCall) -> tuple[Tensor, None]:
    """Attention with the module's bias by distance and its gate: (batch, queries, heads, channels).

    Raises:
        ValueError, ImportError: flex attention cannot run here; the sentence says what can.
    """
    _check(call)
    query, key, value, position_bias = call.query, call.key, call.value, call.module.position_bias
    batch, heads, queries, _ = query.shape
    row = position_bias.bias.values(offsets(queries, key.shape[2], call.offset, query.device))
    # As a tensor: what is captured as a number is compiled in, and a new length would compile anew.
    shift = torch.full((), queries - 1, device=query.device)
    by_score, softcap = position_bias.reads_scores, call.kwargs.get("softcap")
    factor = None if by_score else position_bias.factor(None, call.position.hidden_states)
    factor = None if factor is None else factor[..., 0].expand(batch, heads, queries).contiguous()
    temperature = position_bias.gate.temperature if by_score else None

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        bias = row[head, key_index - query_index + shift]
        if temperature is not None:
            bias = bias * torch.sigmoid(score / temperature)
        elif factor is not None:
            bias = bias * factor[batch, head, query_index]
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score + bias

    groups = heads // key.shape[1]
    if groups & (groups - 1):
        # The kernels share keys among 2, 4, 8, ... heads.
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    output: Any = compile_friendly_flex_attention(
        query,
        key,
        value,
        training=call.module.training,
        score_mod=score_mod,
        block_mask=call.mask,
        enable_gqa=key.shape[1] != heads,
        scale=call.scaling,
        kernel_options=call.kwargs.get("kernel_options"),
    )
    return output.transpose(1, 2).contiguous(), None


def window_block_mask(call: AttentionCall) -> Any:
    """The block mask with keys further back than the window hidden; blocks without any other key are skipped."""
    _check_mask(call)
    mask, window, query, key = call.mask, call.module.window, call.query, call.key
    # As a tensor, like `shift` above.
    edge = torch.full((), -window, device=query.device) + call.offset

    def near(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        return key_index > query_index + edge

    # One for all layers: the mask is theirs together.
    known = vars(mask).setdefault("drope_windows", {})
    if window not in known:
        known[window] = create_block_mask(
            and_masks(mask.mask_mod, near),
            mask.shape[0],
            mask.shape[1],
            query.shape[2],
            key.shape[2],
            query.device,
            # Otherwise a matrix of queries by keys is made first.
            _compile=query.device.type != "cpu",
        )
    return known[window]

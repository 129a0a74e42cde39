"""Any bias as an additive mask of the stock attention function, one block of queries at a time.

The way of the backends that take a mask and nothing else, wherever no better one is at hand: a block of scores stays small and
(heads, L, L) is never made, nor kept for the backward pass. This file travels with every checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention_call import AttentionCall
from .attention_masks import hide, mask_bias
from .disentangled_bias import DisentangledBias
from .position_bias import is_exporting, offsets, unfold_rows

# Queries per block.
QUERY_BLOCK = 256
_KEY_PART = 2048


def attend_in_blocks(call: AttentionCall) -> Any:
    """Attention with the module's bias and gate; eager takes all queries at once, as it does in stock."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    position_bias, eager = call.module.position_bias, call.implementation == "eager"
    offset, device = call.offset, call.query.device
    causal = call.mask is None and not eager and call.is_causal
    row_offsets = offsets(queries, keys, offset, device)
    disentangled = isinstance(position_bias.bias, DisentangledBias)
    # One row of values over all Δ serves every block; a disentangled bias depends on queries and keys.
    row = call.query.new_empty(0) if disentangled else position_bias.bias.values(row_offsets)
    block = queries if eager or is_exporting() else QUERY_BLOCK
    # Fused kernels want the mask in the dtype of the queries; eager adds it to the scores, which it then promotes.
    dtype = torch.float32 if eager else call.query.dtype

    def attend_block(start: int, query: Tensor, key: Tensor, value: Tensor, row: Tensor) -> Any:
        count, width = query.shape[2], key.shape[2]
        first = queries - start - count
        part = slice(first, first + count + width - 1)
        hidden_states = call.position.hidden_states[:, start : start + count]
        if disentangled:
            scores = position_bias.bias.content_scores(query, key, offset + start) * call.scaling
            bias = position_bias.bias.scores(query, key, offset + start) * call.scaling
            query, key = position_bias.bias.content(query, key, offset + start)
            value = nn.functional.pad(value, (0, max(0, key.shape[-1] - value.shape[-1])))
        else:
            scores = _scores(query, key, call.scaling) if position_bias.reads_scores else None
            bias = unfold_rows(row[:, part], count, width)[None]
        factor = position_bias.factor(scores, hidden_states)
        bias = bias if factor is None else factor * bias
        if call.mask is not None:
            bias = mask_bias(bias, call.mask[:, :, start : start + count, :width], dtype)
        elif causal:
            bias = hide(bias.to(dtype), unfold_rows(row_offsets[part] > 0, count, width))
        bias = bias.to(dtype).expand(query.shape[0], query.shape[1], count, width)
        output, weights = call.run(query=query, key=key, value=value, mask=bias)
        return output[..., : call.value.shape[-1]], weights

    if queries <= block:
        return attend_block(0, call.query, call.key, call.value, row)
    outputs = []
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        # Keys after the block's last query are in its future.
        seen = min(keys, stop + offset) if causal and isinstance(offset, int) else keys
        inputs = (start, call.query[:, :, start:stop], call.key[:, :, :seen], call.value[:, :, :seen], row)
        if torch.is_grad_enabled():
            # Keeping every block's bias for the backward pass would be (heads, L, L) after all.
            outputs.append(
                checkpoint(lambda *block_inputs: attend_block(*block_inputs)[0], *inputs, use_reentrant=False)
            )
        else:
            outputs.append(attend_block(*inputs)[0])
    return torch.cat(outputs, dim=1), None


def _scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """q·k·scaling in fp32 with key heads shared by groups of query heads: (batch, heads, queries, keys)."""
    groups = query.shape[1] // key.shape[1]
    # Heads that share keys side by side: their product reads the keys once.
    grouped = query.float().unflatten(1, (key.shape[1], groups)).flatten(2, 3)
    # A part at a time where keys become fp32 in a processor's cache.
    by_part = key.device.type == "cpu" and key.dtype != torch.float32 and not torch.compiler.is_compiling()
    parts = key.split(_KEY_PART, 2) if by_part else (key,)
    scores = torch.cat([grouped @ part.float().mT for part in parts], -1) * scaling
    return scores.unflatten(2, (groups, -1)).flatten(1, 2)

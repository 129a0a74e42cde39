"""What an attention mask says and how a bias, a window and an attention scale go with it.

Masks are as Transformers hands them to an attention function: None, bool (True is seen) or additive, broadcastable to (batch,
heads, queries, keys). This file travels with every checkpoint.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .position_bias import offsets, unfold_rows


def hide(bias: Tensor, hidden: Tensor) -> Tensor:
    # Not −inf, which turns a row with nothing to see into NaN; and in place of the bias, whose sum might overflow.
    return bias.masked_fill(hidden, torch.finfo(bias.dtype).min)


def visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def mask_bias(bias: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias plus mask in `dtype`, where masked entries stay masked for any bias value and no row becomes NaN."""
    if mask.dtype == torch.bool:
        return hide(bias.to(dtype), ~mask)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return hide((bias + mask.masked_fill(hidden, 0.0)).to(dtype), hidden)


def _visible_keys(query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor) -> Tensor:
    """How many keys each query may see, (batch or 1, 1, queries, 1): its position + 1, padding and other documents aside."""
    if mask is None:
        position = torch.arange(query.shape[2], device=query.device) + offset
        return (position + 1).clamp(max=key.shape[2])[None, None, :, None].float()
    return visible(mask)[:, :1].sum(-1, keepdim=True).float()


def scale_queries(
    scale: dict[str, Any], query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor
) -> Tensor:
    """Queries times the attention scale `check_scale` let through; arguments as an attention function gets them."""
    if "factor" in scale:
        return query * scale["factor"]
    length = scale["original_max_position_embeddings"]
    growth = (_visible_keys(query, key, mask, offset) / length).clamp(min=1).log()
    return query * (1 + scale["coefficient"] * growth).to(query.dtype)


def check_scale(scale: dict[str, Any] | None) -> dict[str, Any] | None:
    """None for a scale that changes nothing, so that such a model pays nothing."""
    if scale is None or math.isclose(scale.get("factor", 0.0), 1.0) or scale.get("coefficient") == 0.0:
        return None
    return scale


def window_mask(
    window: int, query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor, causal: bool
) -> Tensor:
    """The mask with keys further back than the window hidden; `causal`: where there is no mask, later keys as well."""
    row = offsets(query.shape[2], key.shape[2], offset, query.device)
    near = row > -window
    if mask is None and causal:
        near = near & (row <= 0)
    near = unfold_rows(near, query.shape[2], key.shape[2])[None, None]
    if mask is None:
        return near
    return mask & near if mask.dtype == torch.bool else hide(mask, ~near)

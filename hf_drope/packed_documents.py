"""Documents packed into one row, which must not see each other. This file travels with every checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def refuse_mixed_documents(model: Any, given: dict[str, Any]) -> None:
    """Raise ValueError for packed documents that would see each other: Transformers parts them only without mask and cache."""
    positions, mask = given["position_ids"], given.get("attention_mask")
    # Flash kernels part documents themselves; a mask of one's own says all there is to say.
    by_kernel = str(model.config._attn_implementation).startswith("flash_attention")
    is_own_mask = mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2)
    if torch.compiler.is_compiling() or positions.dim() != 2 or positions.shape[1] < 2 or by_kernel or is_own_mask:
        return
    if not is_causal(model):
        if positions_restart(positions, mask):
            raise ValueError(
                "position_ids restart within a row, as for packed documents, which a model that sees both sides does not keep "
                "apart; pass an attention_mask of shape (batch, 1, queries, keys), or a row for each document."
            )
        return
    use_cache = given.get("use_cache")
    use_cache = getattr(model.config, "use_cache", False) if use_cache is None else use_cache
    checkpoints = getattr(model, "gradient_checkpointing", False) and model.training and torch.is_grad_enabled()
    has_cache = given.get("cache") is not None or given.get("past_key_values") is not None
    if mask is None and not has_cache and (checkpoints or not use_cache):
        return
    if positions_restart(positions, mask):
        raise ValueError(
            "position_ids restart within a row, as for packed documents, which Transformers keeps apart only where there is "
            "neither an attention_mask nor a cache; leave attention_mask out and pass use_cache=False."
        )


def is_causal(model: Any) -> bool:
    """Whether a converted model's tokens see only what is before them."""
    attention = next((module for module in model.modules() if hasattr(type(module), "needs_position")), None)
    return bool(getattr(attention, "is_causal", True))


def positions_restart(position_ids: Tensor, mask: Tensor | None) -> bool:
    """Whether positions (batch, length) do not grow from one token to the next that `mask` (batch, at least length) shows."""
    again = position_ids[:, 1:] <= position_ids[:, :-1]
    if mask is not None:
        seen = mask[:, -position_ids.shape[1] :].bool()
        again = again & seen[:, 1:] & seen[:, :-1]
    return bool(again.any())

"""Modules that keep their parameters in fp32 whatever the model's dtype. This file travels with every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class Fp32Module(nn.Module):
    """Keeps its parameters in fp32 when the model around it is cast to half precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.is_floating_point() and moved.dtype in _LOW_PRECISION:
                # Cast the original, not the result: its low bits are gone.
                moved = tensor.to(device=moved.device, dtype=torch.float32)
            return moved

        return super()._apply(keep_precision, recurse)

    def reset_parameters(self) -> None:
        """Fill parameters and buffers with their initial values; nothing to do for a module that has none."""


def fp32_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32))


@torch.no_grad()
def fill(tensor: Tensor, values: Sequence[float] | Tensor) -> None:
    """Set initial values, but for a tensor that Transformers has marked as loaded from a checkpoint."""
    if not getattr(tensor, "_is_hf_initialized", False):
        tensor.copy_(torch.as_tensor(values, dtype=tensor.dtype))

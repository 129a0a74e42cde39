"""What the machine at hand can do. This file travels with every checkpoint."""

from __future__ import annotations

import torch


def multiplies_bf16() -> bool:
    """Whether bf16 matrices are multiplied by the hardware itself, faster than fp32 ones."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return cpu_multiplies_bf16()


def cpu_multiplies_bf16() -> bool:
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)

"""What `bench` measures beside the stock RoPE model: every bias, gate and backend of ours, and two ways in which others do it."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from .drope_parameters import DroPEParameters
from .modeling_drope import apply_drope
from .position_modules import rotary_places
from .stock_attention import is_attention

STOCK = "RoPE"
_DENSE = "hf_drope_bench_dense"
BIASES: dict[str, dict[str, Any]] = {
    "low rank 16": {"type": "low_rank", "rank": 16},
    "table": {"type": "table", "max_distance": 128},
    "table of 512": {"type": "table", "max_distance": 512},
    "log": {"type": "log"},
    "linear": {"type": "linear", "learned": True},
    "disentangled": {"type": "disentangled"},
    "disentangled, rank 32": {"type": "disentangled", "rank": 32},
}
GATES = (None, "head", "query", "score")
# What is measured unless more is asked for: a line each of the targets, and what others do.
CHOSEN = (
    "NoPE",
    "low rank 16",
    "low rank 16, head gate",
    "low rank 16, query gate",
    "table",
    "table, score gate",
    "log",
    "linear",
    "disentangled, rank 32",
    "others: rotation by 1 and 0",
    "others: dense bias",
)


class Variant(NamedTuple):
    """`settings` of `DroPEParameters`, or None for what others do; `backend` is the attention implementation."""

    name: str
    settings: dict[str, Any] | None
    backend: str

    @property
    def is_chosen(self) -> bool:
        return self.name.removesuffix(_suffix(self.backend)) in CHOSEN


def variants(backends: tuple[str, ...] = ("sdpa",)) -> list[Variant]:
    found = []
    for backend in backends:
        suffix = _suffix(backend)
        found.append(Variant(f"NoPE{suffix}", {}, backend))
        for name, bias in BIASES.items():
            for gate in GATES:
                settings = {"position_bias": bias, "gate": gate and {"type": gate}}
                found.append(Variant(name + (f", {gate} gate" if gate else "") + suffix, settings, backend))
    return [*found, Variant("others: rotation by 1 and 0", None, "sdpa"), Variant("others: dense bias", None, "sdpa")]


def _suffix(backend: str) -> str:
    return "" if backend == "sdpa" else f", {backend.removesuffix('_attention')}"


def too_large(name: str, config: Any, length: int, itemsize: int) -> str | None:
    """Why a variant is not measured at a length: a bias of queries by keys is not worth gigabytes to show that it is slow."""
    size = config.num_attention_heads * length**2 * itemsize
    return f"its bias alone takes {size / 1e9:.1f} GB" if "dense" in name and size > 1e9 else None


def build(variant: Variant, stock: Any) -> Any:
    """A copy of the stock model turned into the variant.

    Raises:
        ValueError, ImportError: the variant or its backend does not run here; the sentence says why.
    """
    model = copy.deepcopy(stock)
    if variant.settings is not None:
        model = apply_drope(model, DroPEParameters.from_dict(variant.settings))
        model.set_attn_implementation(variant.backend)
    elif "dense" in variant.name:
        _use_dense_bias(model)
    elif not rotary_places(model):
        raise ValueError(f"{type(model).__name__} has no rotation.")
    for place in rotary_places(model) if variant.settings is None and "dense" not in variant.name else ():
        place.put(_OneAndZero(place.module))
    return model


class _OneAndZero(nn.Module):
    """Cosines of 1 and sines of 0: position is gone and the rotation is still computed."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(*args, **kwargs)
        return torch.ones_like(cos), torch.zeros_like(sin)


def _use_dense_bias(model: Any) -> None:
    """A learned bias a distance, looked up for every pair and handed to Transformers' own `position_bias`."""
    AttentionInterface.register(_DENSE, _dense_attention)
    AttentionMaskInterface.register(_DENSE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    heads = model.config.num_attention_heads
    for module in model.modules():
        if is_attention(module):
            module.register_parameter("bench_table", nn.Parameter(torch.zeros(255, heads, dtype=model.dtype)))
    model.set_attn_implementation(_DENSE)


def _dense_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    queries, keys = query.shape[2], key.shape[2]
    offset = torch.arange(keys, device=query.device) - torch.arange(keys - queries, keys, device=query.device)[:, None]
    bias = module.bench_table[(offset + 127).clamp(0, 254)].permute(2, 0, 1)[None]
    return sdpa_attention_forward(module, query, key, value, mask, position_bias=bias, **kwargs)

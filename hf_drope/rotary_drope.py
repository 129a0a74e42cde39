"""The rotary seam: a model's own position encoding, at a strength from 1 (unchanged) to 0 (dropped).

`FadingRotaryEmbedding` wraps the model-level rotary module. At scale 1 it is the stock module bit for bit; at 0 it computes
nothing and returns what the rebound attention takes as "do not rotate"; between, it fades:

    angle       rotate by θ·scale
    blend       1 + scale·(R − 1)
    frequency   rotary pairs dropped one after another, the slowest first: within the training window they turn least

`FadingPositionEmbedding` does the same for a learned absolute table (GPT-2's `wpe`). This file travels with every checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Rotary modules that return (sin, cos), and those that return cos + i sin; all others return (cos, sin).
_SIN_FIRST = ("GPTJRotaryEmbedding", "CodeGenRotaryEmbedding")
_COMPLEX = ("DeepseekV2RotaryEmbedding", "Llama4TextRotaryEmbedding")


class NoRotation:
    """In place of complex rotations: do not rotate. On any device."""

    def to(self, *_: Any, **__: Any) -> NoRotation:
        return self


class TwoStrengths(NamedTuple):
    """Rotations at the model's strength, and as they were for the layers that keep RoPE."""

    faded: Any
    stock: Any


class RopeScale(nn.Module):
    """Holds a strength in [0, 1]: as a Python branch at the ends, as a buffer between, so a schedule never recompiles."""

    # A checkpoint has its own copy of these classes, which `isinstance` would not recognise.
    holds_rope_scale = True
    scale: Tensor

    def _init_scale(self, rope_scale: float) -> None:
        self.register_buffer("scale", torch.empty((), dtype=torch.float32), persistent=False)
        self.set_rope_scale(rope_scale)

    def set_rope_scale(self, rope_scale: float) -> None:
        self._initial = float(rope_scale)
        self.state = "stock" if rope_scale == 1.0 else "dropped" if rope_scale == 0.0 else "fading"
        with torch.no_grad():
            self.scale.fill_(self._initial)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self._initial)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:
            # A cast of the model rounds the strength, and a long position multiplies the error.
            self.scale = torch.full_like(self.scale, self._initial, dtype=torch.float32)
        return self


class FadingRotaryEmbedding(RopeScale):
    """A stock rotary module at an adjustable strength.

    Args:
        rotary: the stock module, called as `rotary(hidden_states, position_ids, ...)`.
        fade: "angle", "blend" or "frequency".
        rope_scale: 1.0 to 0.0.
        keeps_layers: some layers keep RoPE: the result is then a `TwoStrengths`, and each attention takes its own.
        deferred: the attention layers rotate by themselves, after the cache (a disentangled bias): nothing is rotated here.
    """

    def __init__(
        self, rotary: nn.Module, fade: str, rope_scale: float, keeps_layers: bool = False, deferred: bool = False
    ) -> None:
        super().__init__()
        self.rotary = rotary
        self.fade, self.keeps_layers, self.deferred = fade, keeps_layers, deferred
        # How a deferred rotation turns, by layer type, once the attention layers have asked.
        self.pairs: dict[str | None, Any] = {}
        self._init_scale(rope_scale)

    def forward(self, hidden_states: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        stock: Any = None
        if self.keeps_layers or (self.state == "stock" and not self.deferred):
            stock = self.rotary(hidden_states, position_ids, *args, **kwargs)
        if self.state == "dropped" or self.deferred:
            faded: Any = NoRotation() if self._is_complex else (None, None)
        elif self.state == "stock":
            faded = stock
        else:
            faded = getattr(self, f"_fade_{self.fade}")(hidden_states, position_ids, *args, **kwargs)
        return TwoStrengths(faded, stock) if self.keeps_layers else faded

    def __getattr__(self, name: str) -> Any:
        # A few models read fields of their rotary modules; what is private, such as having been initialised, is its own.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(super().__getattr__("rotary"), name)

    @property
    def _is_complex(self) -> bool:
        return type(self.rotary).__name__ in _COMPLEX

    def _fade_blend(self, hidden_states: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cos, sin = self._cos_sin(hidden_states, position_ids, *args, **kwargs)
        return self._in_stock_order(*self._weigh(cos, sin, self.scale), hidden_states.dtype)

    def _fade_frequency(self, hidden_states: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cos, sin = self._cos_sin(hidden_states, position_ids, *args, **kwargs)
        # One radian a token at most, so the sine at position 1 orders the channels by frequency in any layout.
        _, speed = self._cos_sin(hidden_states[:1], torch.ones_like(position_ids[:1, :1]), *args, **kwargs)
        speed = speed.flatten()
        faster = (speed[None, :] > speed[:, None]).sum(-1)
        copies = (faster == 0).sum()
        weight = (self.scale * speed.numel() / copies - faster / copies).clamp(0, 1)
        return self._in_stock_order(*self._weigh(cos, sin, weight), hidden_states.dtype)

    def _fade_angle(self, hidden_states: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        amplitude = self.amplitude(*args, **kwargs)
        if hasattr(self.rotary, "embed_positions"):
            # A table of sines and cosines knows whole positions only: take the angles from its row for position 1.
            cos, sin = self._cos_sin(hidden_states[:1], torch.ones_like(position_ids[:1, :1]), *args, **kwargs)
            angle = torch.atan2(sin, cos) * (position_ids[..., None].float() * self.scale)
            cos, sin = angle.cos(), angle.sin()
        else:
            cos, sin = self._cos_sin(hidden_states, position_ids.float() * self.scale, *args, **kwargs)
        # YaRN-like types scale cos and sin; that factor has to reach 1 together with the angle.
        factor = (1 + self.scale * (amplitude - 1)) / amplitude
        return self._in_stock_order(cos * factor, sin * factor, hidden_states.dtype)

    def amplitude(self, layer_type: str | None = None) -> float:
        """The factor on cos and sin that YaRN-like types have; families with rotations by layer type have one for each."""
        name = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
        return float(getattr(self.rotary, name, 1.0))

    def _cos_sin(self, hidden_states: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # In fp32 whatever the model's dtype: only dtype and device of the first argument are read by rotary modules.
        rotation = self.rotary(hidden_states.float(), position_ids, *args, **kwargs)
        if self._is_complex:
            return rotation.real, rotation.imag
        first, second = rotation
        return (second, first) if type(self.rotary).__name__ in _SIN_FIRST else (first, second)

    @staticmethod
    def _weigh(cos: Tensor, sin: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return 1 + weight * (cos - 1), weight * sin

    def _in_stock_order(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any:
        if self._is_complex:
            return torch.complex(cos, sin)
        cos, sin = cos.to(dtype), sin.to(dtype)
        return (sin, cos) if type(self.rotary).__name__ in _SIN_FIRST else (cos, sin)

    def extra_repr(self) -> str:
        return f"rope_scale={self._initial:g}, fade={self.fade!r}"


class FadingPositionEmbedding(RopeScale):
    """A learned absolute table at an adjustable strength; the stock embedding's class is mixed in by `fade_embedding`."""

    weight: nn.Parameter

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.state == "stock":
            return super().forward(*args, **kwargs)
        if self.state == "fading":
            return super().forward(*args, **kwargs) * self.scale.to(self.weight.dtype)
        # One product keeps the table part of the graph: data-parallel training reports parameters that get no gradient.
        return self.weight[0, 0] * 0 if self.training else self.weight.new_zeros(())


class RemovedPositionEmbedding(RopeScale):
    """What stands in for a learned table that the checkpoint no longer has: adds nothing, at any position."""

    def __init__(self) -> None:
        super().__init__()
        self._init_scale(0.0)

    def set_rope_scale(self, rope_scale: float) -> None:
        if rope_scale != 0.0:
            raise ValueError(
                f"rope_scale is {rope_scale:g}, but this checkpoint's position table was removed; "
                "convert its source with rope_scale=1.0 to keep the table."
            )
        super().set_rope_scale(rope_scale)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.scale * 0

    def extra_repr(self) -> str:
        return "removed"


_fading_classes: dict[type, type] = {}


def _fading_class(stock: type) -> type:
    if stock not in _fading_classes:
        namespace = {
            "__module__": __name__,
            "__reduce_ex__": lambda self, protocol: (_new_fading, (stock,), vars(self)),
        }
        _fading_classes[stock] = type(f"Fading{stock.__name__}", (FadingPositionEmbedding, stock), namespace)
    return _fading_classes[stock]


def _new_fading(stock: type) -> Any:
    """An empty table for a pickle or a copy to fill: a class made here has no name of its own to be found by."""
    return object.__new__(_fading_class(stock))


def fade_embedding(embedding: nn.Module, rope_scale: float) -> nn.Module:
    """The learned table made adjustable in place, so that its weight keeps its key; a new stand-in at `rope_scale` 0."""
    if rope_scale == 0.0:
        return RemovedPositionEmbedding()
    stock = type(embedding)
    embedding.__class__ = _fading_class(stock)
    embedding._init_scale(rope_scale)  # type: ignore[operator]
    return embedding

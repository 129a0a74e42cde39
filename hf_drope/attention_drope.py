"""The attention seam: a stock attention module whose `forward` finds changed names.

Each attention module's class becomes a subclass of its own class. Its `forward` is the stock function object bound to a copy
of its globals in which two names differ: the rotation, which leaves queries and keys alone when there is nothing to rotate
by, and `ALL_ATTENTION_FUNCTIONS`, which adds the module's `position_bias` and then calls the backend that the user chose. No
`forward` is copied and nothing outside the subclass changes. This file travels with every checkpoint.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .attention_call import Position
from .biased_attention import are_few, attend
from .disentangled_decoding import rotated_keys
from .fp32_module import Fp32Module
from .rotary_drope import NoRotation, TwoStrengths
from .stock_attention import (
    DISPATCH,
    innermost,
    is_given_rotations,
    parameters_of,
    rebind,
    rotation_functions,
    states_of,
)

_CACHE_NAMES = ("cache", "past_key_values", "layer_past")
# For each cache and layer what its generation need not work out anew.
_kept: WeakKeyDictionary[Cache, dict[int, dict[Any, Any]]] = WeakKeyDictionary()


class ProjectionNorm(Fp32Module):
    """RMSNorm over all concatenated heads of a projection: (batch, heads, length, head_dim), weight starts at 1."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        merged = states.transpose(1, 2).flatten(2).float()
        normed = nn.functional.rms_norm(merged, (merged.shape[-1],), self.weight.float(), self.eps)
        return normed.to(states.dtype).unflatten(2, (states.shape[1], -1)).transpose(1, 2)


class QKNorm(nn.Module):
    """The optional norms of the projected queries and keys (`qk_norm` "q", "k" or "qk")."""

    def __init__(self, which: str, query_size: int, key_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.q_norm = ProjectionNorm(query_size, eps) if "q" in which else nn.Identity()
        self.k_norm = ProjectionNorm(key_size, eps) if "k" in which else nn.Identity()


class _NormedRotation(NamedTuple):
    """Carries a module's norms to the rotation, the one place before the cache where it holds queries and keys."""

    norm: QKNorm
    first: Tensor | None


def _rotation_for(home: ModuleType, name: str) -> Callable[..., Any]:
    """The stock rotation, returning its inputs untouched where there is no cos and sin to rotate by.

    It is looked up at every call, as the stock `forward` does: other libraries replace it, before or after a conversion.
    """
    parameters = list(parameters_of(getattr(home, name)))
    states = states_of(getattr(home, name))

    def rotate(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        tensors, angle = [given.pop(name) for name in parameters[:states]], given.pop(parameters[states])
        if isinstance(angle, _NormedRotation):
            norm, angle = angle
            tensors = [norm.q_norm(tensors[0]), norm.k_norm(tensors[1])]
        if angle is None or isinstance(angle, NoRotation):
            return tensors[0] if states == 1 else tuple(tensors)
        return getattr(home, name)(*tensors, angle, **given)

    return rotate


_attention_classes: dict[type, type] = {}


def drope_attention_class(stock: Any) -> type:
    """A subclass of the stock attention class `stock` with the seam in place.

    Raises:
        ValueError: the stock code does not use a name that has to be rebound.
    """
    if stock in _attention_classes:
        return _attention_classes[stock]
    code, arguments = innermost(stock.forward), list(parameters_of(stock.forward))[1:]
    rotations = rotation_functions(stock)
    if is_given_rotations(stock) and not rotations:
        raise ValueError(
            f"{stock.__name__} is given rotations and calls none of the functions by which families rotate, so hf_drope "
            "cannot change how it encodes position."
        )
    names: dict[str, Any] = {DISPATCH: _AttentionFunctions(code.__globals__[DISPATCH])}
    home = sys.modules[code.__globals__["__name__"]]
    names.update({name: _rotation_for(home, name) for name in rotations})
    stock_forward = rebind(stock.forward, names)

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        embeddings = given.get("position_embeddings")
        if embeddings is not None:
            if isinstance(embeddings, TwoStrengths):
                embeddings = embeddings.stock if self.keeps_rope else embeddings.faded
            if self.adds_qk_norm and self.qk_norm is not None:
                embeddings = (_NormedRotation(self.qk_norm, embeddings[0]), *embeddings[1:])
            given["position_embeddings"] = embeddings
        if self.needs_position:
            given["drope_position"] = _position(self, given)
            _keep_rotated_keys(self, given)
        return stock_forward(self, **given)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _new_attention, (stock,), vars(self)

    namespace = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "extra_repr": _extra_repr,
        "__module__": __name__,
        "__doc__": stock.__doc__,
        "needs_position": property(_needs_position),
        # Calibration looks at queries and keys here, as attention gets them.
        "observe": None,
    }
    _attention_classes[stock] = type(f"DroPE{stock.__name__}", (stock,), namespace)
    return _attention_classes[stock]


def _new_attention(stock: type) -> Any:
    """An empty module for a pickle or a copy to fill: classes made here have no name of their own to be found by."""
    return object.__new__(drope_attention_class(stock))


def _needs_position(module: Any) -> bool:
    added = (module.position_bias, module.attention_scale, module.window, module.observe)
    return any(part is not None for part in added)


def _extra_repr(module: Any) -> str:
    parts = [f"attention_scale={module.attention_scale}"] if module.attention_scale else []
    parts += [f"window={module.window}"] if module.window else []
    parts += ["keeps RoPE"] if module.keeps_rope else []
    return ", ".join(parts)


def _position(module: Any, given: dict[str, Any]) -> Position:
    hidden_states = given["hidden_states"]
    cache = next((value for value in given.values() if isinstance(value, Cache)), None)
    if cache is None:
        other = next((given[name] for name in _CACHE_NAMES if given.get(name) is not None), None)
        if other is None:
            return Position(0, 0, hidden_states, key_length=hidden_states.shape[1])
        _refuse_unknown_places(module, other)
        return Position(0, 0, hidden_states)
    # Per layer: within one forward the lower layers have already added the new tokens.
    index = _cache_layer(module, given)
    key_length, key_offset = cache.get_mask_sizes(hidden_states.shape[1], index)
    query_offset = cache.get_seq_length(index)
    # A static cache advances its counter in place while it stores the new keys.
    query_offset = query_offset.clone() if isinstance(query_offset, Tensor) else query_offset
    return Position(query_offset, key_offset, hidden_states, key_length=key_length)


def _refuse_unknown_places(module: Any, held: Any) -> None:
    """Raise ValueError if the module asks where keys stand: `held`, as continuous batching has it, does not say."""
    if module.position_bias is not None or module.window is not None or "coefficient" in (module.attention_scale or {}):
        raise ValueError(
            f"{type(module).__name__} was given a {type(held).__name__}, which does not say where its keys stand, as a position "
            "bias, window or growing attention scale has to know; generate with a Cache of Transformers instead."
        )


def _cache_layer(module: Any, given: dict[str, Any]) -> int:
    """Where the cache holds the module's keys: a stack that a model goes through several times keeps its rounds apart."""
    return module.layer_idx + given.get("cycle_offset", 0)


class _WideningCache:
    """A cache seen by one layer, which adds what the layer's bias keeps of every key to the key itself.

    The cache then moves both together, whatever it does with them: reorder beams, crop, slide, offload.
    """

    def __init__(self, cache: Cache, bias: Any, layer_idx: int, position: Position) -> None:
        self.cache, self.bias, self.layer_idx, self.position = cache, bias, layer_idx, position

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = self.cache.layers
        layer: Any = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        held: Any = getattr(layer, "keys", None)
        is_laid_out = isinstance(held, Tensor) and held.dim() == 4
        # One that was laid out for keys alone stays so; one that quantises is there to save memory, and counts channels in groups.
        if (is_laid_out and held.shape[-1] == key.shape[-1]) or hasattr(layer, "_dequantize"):
            return self.cache.update(key, value, *args, **kwargs)
        offset, kept = self.position.query_offset, self.position.kept
        if are_few(key):
            length = key.shape[2] + (held.shape[2] if is_laid_out else 0)
            rotated = rotated_keys(self.bias, key, offset, length, kept)
        else:
            rotated = self.bias.rotated_keys(key, offset).to(key.dtype)
        return self.cache.update(torch.cat([key, rotated], -1), value, *args, **kwargs)


def _keep_rotated_keys(module: Any, given: dict[str, Any]) -> None:
    bias = getattr(module.position_bias, "bias", None)
    if getattr(bias, "keeps_rotated_keys", False) and not module.position_bias.reads_scores:
        index = _cache_layer(module, given)
        for name, argument in given.items():
            if isinstance(argument, Cache):
                position = given["drope_position"]
                if not torch.compiler.is_compiling():
                    layers = _kept.setdefault(argument, {})
                    # A prompt begins anew: parameters may have been written to in ways that leave no trace.
                    if position.hidden_states.shape[1] > 1:
                        layers.pop(index, None)
                    position = position._replace(kept=layers.setdefault(index, {}))
                given["drope_position"] = position
                given[name] = _WideningCache(argument, bias, index, position)


class _AttentionFunctions:
    """Stands in for `ALL_ATTENTION_FUNCTIONS`: the function it hands out adds the position bias, then calls the stock one."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(attend, self.stock.get_interface(implementation, default), implementation)

"""The attention seam: a stock attention module whose `forward` finds changed names.

Each attention module's class becomes a subclass of its own class. Its `forward` is the stock function object bound to a copy
of its globals in which two names differ: the rotation, which leaves queries and keys alone when there is nothing to rotate
by, and `ALL_ATTENTION_FUNCTIONS`, which adds the module's `position_bias` and then calls the backend that the user chose. No
`forward` is copied and nothing outside the subclass changes. This file travels with every checkpoint.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .attention_call import Position
from .biased_attention import are_few, attend
from .disentangled_decoding import rotated_keys
from .fp32_module import Fp32Module
from .rotary_pairs import RotaryPairs

_ROTATION = "apply_rotary_pos_emb"
_DISPATCH = "ALL_ATTENTION_FUNCTIONS"
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

    def __init__(self, which: str, query_size: int, key_size: int) -> None:
        super().__init__()
        self.q_norm = ProjectionNorm(query_size) if "q" in which else nn.Identity()
        self.k_norm = ProjectionNorm(key_size) if "k" in which else nn.Identity()


class _NormedRotation(NamedTuple):
    """Carries a module's norms to the rotation, the one place before the cache where it holds queries and keys."""

    norm: QKNorm
    first: Tensor | None


def innermost(function: Callable[..., Any]) -> FunctionType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function  # type: ignore[return-value]


def rebind(function: Any, names: dict[str, Any]) -> FunctionType:
    """The same function, decorators included, with other objects behind some global names of its innermost code."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        namespace = {**function.__globals__, **names}
        # With a module name dynamo would look these globals up in that module and find the stock ones.
        namespace.pop("__name__", None)
        closure = function.__closure__
    else:
        namespace = function.__globals__
        inner = rebind(wrapped, names)
        closure = tuple(CellType(inner) if c.cell_contents is wrapped else c for c in function.__closure__ or ())
    bound = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    bound.__kwdefaults__ = function.__kwdefaults__
    bound.__dict__.update(function.__dict__)
    if wrapped is not None:
        bound.__wrapped__ = inner  # type: ignore[attr-defined]
    bound.__qualname__, bound.__module__, bound.__doc__ = function.__qualname__, function.__module__, function.__doc__
    return bound


def is_attention(module: nn.Module) -> bool:
    """Whether the module's own `forward` asks the attention interface for its function."""
    code = getattr(innermost(type(module).forward), "__code__", None)
    return code is not None and _DISPATCH in code.co_names and not getattr(module, "is_cross_attention", False)


def _rotation_for(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The stock rotation, returning its inputs untouched where there is no cos and sin to rotate by."""
    parameters = list(inspect.signature(stock).parameters)
    states = min(parameters.index(name) for name in ("cos", "sin", "freqs_cis") if name in parameters)

    def rotate(*args: Any, **kwargs: Any) -> Any:
        arguments = [*args, *(kwargs.pop(name) for name in parameters[len(args) :] if name in kwargs)]
        tensors, angles = arguments[:states], arguments[states:]
        if isinstance(angles[0], _NormedRotation):
            norm, first = angles[0]
            tensors, angles = [norm.q_norm(tensors[0]), norm.k_norm(tensors[1])], [first, *angles[1:]]
        if angles[0] is None:
            return tensors[0] if states == 1 else tuple(tensors)
        return stock(*tensors, *angles)

    return rotate


def rotates_queries_and_keys_together(attention: type) -> bool:
    """Whether the stock rotation sees queries and keys at once and whole, as the optional QK-norm needs."""
    stock = innermost(attention.forward).__globals__.get(_ROTATION)  # type: ignore[attr-defined]
    return stock is not None and list(inspect.signature(stock).parameters)[:3] == ["q", "k", "cos"]


def rotary_pairs(rotary: nn.Module, config: Any, attention: type) -> RotaryPairs:
    """Which channels the source's rotation turns and how fast, read off its own rotary module and rotation function.

    Raises:
        ValueError: the rotation pairs its channels in a way that is not known here.
    """
    stock = innermost(attention.forward).__globals__[_ROTATION]  # type: ignore[attr-defined]
    names = list(inspect.signature(stock).parameters)
    if "cos" not in names or "sin" not in names:
        raise ValueError(
            f"{attention.__name__} rotates without cos and sin, which a disentangled bias cannot take apart."
        )
    # A fresh one: the model's own is on the meta device while a checkpoint loads, or may have been cast.
    with torch.device("cpu"):
        default = torch.get_default_dtype()
        try:
            # A load in half precision changes it, and a table of sines would be rounded.
            torch.set_default_dtype(torch.float32)
            fresh: Any = type(rotary)(config)
            angles = fresh(torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.long))
        finally:
            torch.set_default_dtype(default)
        if hasattr(fresh, "inv_freq"):
            frequencies = getattr(fresh, "original_inv_freq", fresh.inv_freq).double().tolist()
        else:
            cos, sin = angles if names.index("cos") < names.index("sin") else angles[::-1]
            frequencies = torch.atan2(sin.double(), cos.double()).flatten().tolist()
        width = 2 * len(frequencies)
        probe = torch.zeros(1, 1, 1, width, dtype=torch.float32)
        probe[..., 0] = 1.0
        states = min(names.index("cos"), names.index("sin"))
        turned = stock(*[probe] * states, *angles)
        turned = (turned[0] if states > 1 else turned).flatten()
    partner = int(turned[1:].abs().argmax()) + 1
    if partner not in (1, width // 2):
        raise ValueError(f"{attention.__name__} pairs channel 0 with channel {partner}, which is not known here.")
    amplitude = float(getattr(fresh, "attention_scaling", 1.0))
    return RotaryPairs(tuple(frequencies), partner == 1 and width > 2, amplitude)


_attention_classes: dict[type, type] = {}


def drope_attention_class(stock: Any, rotary: bool) -> type:
    """A subclass of the stock attention class `stock` with the seam in place; `rotary`: the model rotates here.

    Raises:
        ValueError: the stock code does not use a name that has to be rebound.
    """
    if stock in _attention_classes:
        return _attention_classes[stock]
    code = innermost(stock.forward)
    for name in (_DISPATCH, _ROTATION) if rotary else (_DISPATCH,):
        if name not in code.__code__.co_names or name not in code.__globals__:
            raise ValueError(
                f"{stock.__name__} does not call {name} in its forward, so hf_drope cannot change how it encodes "
                "position; use a family whose attention goes through the Transformers attention interface."
            )
    names: dict[str, Any] = {_DISPATCH: _AttentionFunctions(code.__globals__[_DISPATCH])}
    if _ROTATION in code.__globals__:
        names[_ROTATION] = _rotation_for(code.__globals__[_ROTATION])
    stock_forward = rebind(stock.forward, names)
    arguments = list(inspect.signature(stock.forward).parameters)[1:]

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        embeddings = given.get("position_embeddings")
        if embeddings is not None:
            if len(embeddings) == 4:
                embeddings = embeddings[2:] if self.keeps_rope else embeddings[:2]
            if self.qk_norm is not None:
                embeddings = (_NormedRotation(self.qk_norm, embeddings[0]), *embeddings[1:])
            given["position_embeddings"] = embeddings
        if self.needs_position:
            given["drope_position"] = _position(self, given)
            _keep_rotated_keys(self, given)
        return stock_forward(self, **given)

    namespace = {
        "forward": forward,
        "extra_repr": _extra_repr,
        "__module__": __name__,
        "__doc__": stock.__doc__,
        "needs_position": property(_needs_position),
        # Calibration looks at queries and keys here, as attention gets them.
        "observe": None,
    }
    _attention_classes[stock] = type(f"DroPE{stock.__name__}", (stock,), namespace)
    return _attention_classes[stock]


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
        return Position(0, 0, hidden_states)
    # Per layer: within one forward the lower layers have already added the new tokens.
    _, key_offset = cache.get_mask_sizes(hidden_states.shape[1], module.layer_idx)
    query_offset = cache.get_seq_length(module.layer_idx)
    # A static cache advances its counter in place while it stores the new keys.
    query_offset = query_offset.clone() if isinstance(query_offset, Tensor) else query_offset
    return Position(query_offset, key_offset, hidden_states)


class _WideningCache:
    """A cache seen by one layer, which adds what the layer's bias keeps of every key to the key itself.

    The cache then moves both together, whatever it does with them: reorder beams, crop, slide, quantise.
    """

    def __init__(self, cache: Cache, bias: Any, layer_idx: int, position: Position) -> None:
        self.cache, self.bias, self.layer_idx, self.position = cache, bias, layer_idx, position

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = self.cache.layers
        held: Any = getattr(layers[self.layer_idx], "keys", None) if self.layer_idx < len(layers) else None
        is_laid_out = isinstance(held, Tensor) and held.dim() == 4
        # One that was laid out for keys alone stays so.
        if is_laid_out and held.shape[-1] == key.shape[-1]:
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
        for name, argument in given.items():
            if isinstance(argument, Cache):
                position = given["drope_position"]
                if not torch.compiler.is_compiling():
                    layers = _kept.setdefault(argument, {})
                    # A prompt begins anew: parameters may have been written to in ways that leave no trace.
                    if position.hidden_states.shape[1] > 1:
                        layers.pop(module.layer_idx, None)
                    position = position._replace(kept=layers.setdefault(module.layer_idx, {}))
                given["drope_position"] = position
                given[name] = _WideningCache(argument, bias, module.layer_idx, position)


class _AttentionFunctions:
    """Stands in for `ALL_ATTENTION_FUNCTIONS`: the function it hands out adds the position bias, then calls the stock one."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(attend, self.stock.get_interface(implementation, default), implementation)

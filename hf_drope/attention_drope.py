"""The attention seam: a stock attention module whose `forward` finds changed names.

Each attention module's class becomes a subclass of its own class. Its `forward` is the stock function object bound to a copy
of its globals in which two names differ: the rotation, which leaves queries and keys alone when there is nothing to rotate
by, and `ALL_ATTENTION_FUNCTIONS`, which adds the module's `position_bias` and then calls the backend that the user chose. No
`forward` is copied and nothing outside the subclass changes. This file travels with every checkpoint.
"""

from __future__ import annotations

import functools
import inspect
import re
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
from .rotary_drope import NoRotation, TwoStrengths
from .rotary_pairs import RotaryPairs

# How families call the function that rotates queries and keys.
_ROTATION = re.compile(r"_?apply_rotary(_pos)?_emb(_interleave)?$")
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

    def __init__(self, which: str, query_size: int, key_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.q_norm = ProjectionNorm(query_size, eps) if "q" in which else nn.Identity()
        self.k_norm = ProjectionNorm(key_size, eps) if "k" in which else nn.Identity()


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
    names = _global_names(module)
    crosses = getattr(module, "is_cross_attention", False) or "cross_attention_states" in _parameters(module.forward)
    return _DISPATCH in names and not crosses


def rotates_by_itself(module: nn.Module) -> bool:
    """Whether a module rotates queries and keys and does not go through the attention interface."""
    names = _global_names(module)
    return _DISPATCH not in names and any(map(_ROTATION.match, names))


def _global_names(module: nn.Module) -> tuple[str, ...]:
    """What the module's own `forward` speaks of outside itself."""
    code = getattr(innermost(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _rotation_for(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The stock rotation, returning its inputs untouched where there is no cos and sin to rotate by."""
    parameters = list(_parameters(stock))
    states = _states(parameters)

    def rotate(*args: Any, **kwargs: Any) -> Any:
        arguments = [*args, *(kwargs.pop(name) for name in parameters[len(args) :] if name in kwargs)]
        tensors, angles = arguments[:states], arguments[states:]
        if isinstance(angles[0], _NormedRotation):
            norm, first = angles[0]
            tensors, angles = [norm.q_norm(tensors[0]), norm.k_norm(tensors[1])], [first, *angles[1:]]
        if angles[0] is None or isinstance(angles[0], NoRotation):
            return tensors[0] if states == 1 else tuple(tensors)
        return stock(*tensors, *angles)

    return rotate


def _states(parameters: list[str]) -> int:
    """How many tensors a rotation function turns."""
    return min(parameters.index(name) for name in ("cos", "sin", "freqs_cis") if name in parameters)


def rotates_queries_and_keys_together(attention: type) -> bool:
    """Whether the stock rotation sees queries and keys at once and whole, as the optional QK-norm needs."""
    rotations = rotation_functions(attention)
    return len(rotations) == 1 and all(list(_parameters(f))[:3] == ["q", "k", "cos"] for f in rotations.values())


def rotation_functions(attention: type) -> dict[str, Any]:
    """The stock functions, by name, with which a stock attention class rotates queries and keys."""
    code = innermost(attention.forward)  # type: ignore[attr-defined]
    names = (name for name in code.__code__.co_names if _ROTATION.match(name))
    return {name: code.__globals__[name] for name in names if name in code.__globals__}


def _parameters(function: Any) -> Any:
    return inspect.signature(function).parameters


def is_given_rotations(attention: type) -> bool:
    """Whether the model makes the rotations and hands them to its layers, as most do."""
    return "position_embeddings" in _parameters(attention.forward)  # type: ignore[attr-defined]


def layer_type_of(rotary: nn.Module, module: Any, config: Any) -> str | None:
    """What a rotary module that rotates by layer type is asked for by this attention module; None for other ones."""
    if "layer_type" not in _parameters(rotary.forward):
        return None
    return getattr(module, "layer_type", None) or config.layer_types[module.layer_idx]


class _RotatedError(Exception):
    """The rotation was reached."""


class _AnyRotation(tuple):
    """Stands for rotations that nobody looks at, of whatever form."""

    def to(self, *_: Any, **__: Any) -> _AnyRotation:
        return self


@torch.no_grad()
def rotates(module: Any, hidden_size: int) -> bool:
    """Whether this stock attention layer rotates at all, seen by what it does to one token: some families rotate in some layers."""

    def reached(*_: Any, **__: Any) -> None:
        raise _RotatedError

    rotations = rotation_functions(type(module))
    if not rotations:
        return False
    forward = rebind(type(module).forward, dict.fromkeys(rotations, reached))
    weight = next(module.parameters())
    token = torch.zeros(1, 1, hidden_size, dtype=weight.dtype, device=weight.device)
    try:
        forward(module, token, position_embeddings=_AnyRotation((None, None)), attention_mask=None)
    except _RotatedError:
        return True
    return False


def rotary_pairs(rotary: nn.Module, config: Any, attention: type, layer_type: str | None = None) -> RotaryPairs:
    """Which channels the source's rotation turns and how fast, read off its own rotary module and rotation function.

    Raises:
        ValueError: the rotation pairs its channels in a way that is not known here.
    """
    rotations = rotation_functions(attention)
    stock = next(iter(rotations.values()))
    names = list(_parameters(stock))
    if len(rotations) > 1:
        raise ValueError(
            f"{attention.__name__} rotates a part of its keys alone, which a disentangled bias cannot take apart."
        )
    # A fresh one: the model's own is on the meta device while a checkpoint loads, or may have been cast.
    with torch.device("cpu"):
        default = torch.get_default_dtype()
        try:
            # A load in half precision changes it, and a table of sines would be rounded.
            torch.set_default_dtype(torch.float32)
            fresh: Any = type(rotary)(config)
            by_type = () if layer_type is None else (layer_type,)
            angles = fresh(torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.long), *by_type)
        finally:
            torch.set_default_dtype(default)
        if not isinstance(angles, tuple):
            angles = (angles,)
        prefix = "" if layer_type is None else f"{layer_type}_"
        held = getattr(fresh, f"{prefix}original_inv_freq", getattr(fresh, f"{prefix}inv_freq", None))
        if held is not None:
            frequencies = held.double().tolist()
        else:
            cos, sin = angles if names.index("cos") < names.index("sin") else angles[::-1]
            frequencies = torch.atan2(sin.double(), cos.double()).flatten().tolist()
        width = 2 * len(frequencies)
        probe = torch.zeros(1, 1, 1, width, dtype=torch.float32)
        probe[..., 0] = 1.0
        states = _states(names)
        turned = stock(*[probe] * states, *angles)
        turned = (turned[0] if states > 1 else turned).flatten()
    partner = int(turned[1:].abs().argmax()) + 1
    if partner not in (1, width // 2):
        raise ValueError(f"{attention.__name__} pairs channel 0 with channel {partner}, which is not known here.")
    if turned[partner] < 0:
        # A few families turn the other way round.
        frequencies = [-frequency for frequency in frequencies]
    amplitude = float(getattr(fresh, f"{prefix}attention_scaling", 1.0))
    return RotaryPairs(tuple(frequencies), partner == 1 and width > 2, amplitude)


_attention_classes: dict[type, type] = {}


def drope_attention_class(stock: Any) -> type:
    """A subclass of the stock attention class `stock` with the seam in place.

    Raises:
        ValueError: the stock code does not use a name that has to be rebound.
    """
    if stock in _attention_classes:
        return _attention_classes[stock]
    code, arguments = innermost(stock.forward), list(_parameters(stock.forward))[1:]
    rotations = rotation_functions(stock)
    if is_given_rotations(stock) and not rotations:
        raise ValueError(
            f"{stock.__name__} is given rotations and calls none of the functions by which families rotate, so hf_drope "
            "cannot change how it encodes position."
        )
    names: dict[str, Any] = {_DISPATCH: _AttentionFunctions(code.__globals__[_DISPATCH])}
    names.update({name: _rotation_for(function) for name, function in rotations.items()})
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
    index = _cache_layer(module, given)
    _, key_offset = cache.get_mask_sizes(hidden_states.shape[1], index)
    query_offset = cache.get_seq_length(index)
    # A static cache advances its counter in place while it stores the new keys.
    query_offset = query_offset.clone() if isinstance(query_offset, Tensor) else query_offset
    return Position(query_offset, key_offset, hidden_states)


def _cache_layer(module: Any, given: dict[str, Any]) -> int:
    """Where the cache holds the module's keys: a stack that a model goes through several times keeps its rounds apart."""
    return module.layer_idx + given.get("cycle_offset", 0)


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

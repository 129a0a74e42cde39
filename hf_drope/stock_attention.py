"""What a stock attention module is and does, found by its code and by running it. This file travels with every checkpoint."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from .rotary_pairs import RotaryPairs

# How families call the function that rotates queries and keys.
_ROTATION = re.compile(r"_?apply_rotary(_pos)?_emb(_interleave)?$")
DISPATCH = "ALL_ATTENTION_FUNCTIONS"


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
    """Whether the module's own `forward` asks the attention interface for its function, and not for another text's states."""
    if DISPATCH not in _global_names(module):
        return False
    return not getattr(module, "is_cross_attention", False) and "cross_attention_states" not in parameters_of(
        type(module).forward
    )


def rotates_by_itself(module: nn.Module) -> bool:
    """Whether a module rotates queries and keys and does not go through the attention interface."""
    names = _global_names(module)
    return DISPATCH not in names and any(map(_ROTATION.match, names))


def _global_names(module: nn.Module) -> tuple[str, ...]:
    """What the module's own `forward` speaks of outside itself."""
    return _names_of(type(module).forward)


@functools.cache
def _names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    # By function and not by class, whose `forward` other libraries replace.
    code = getattr(innermost(forward), "__code__", None)
    return () if code is None else code.co_names


def states_of(rotation: Callable[..., Any]) -> int:
    """How many tensors a rotation function turns."""
    parameters = list(parameters_of(rotation))
    angles = [parameters.index(name) for name in ("cos", "sin", "freqs_cis") if name in parameters]
    if not angles:
        raise ValueError(
            f"{rotation.__module__}.{rotation.__qualname__} is in the place of a rotation and takes neither cos and sin nor "
            "freqs_cis; convert the model before another library replaces that function."
        )
    return min(angles)


def rotation_functions(attention: type) -> dict[str, Any]:
    """The stock functions, by name, with which a stock attention class rotates queries and keys."""
    code = innermost(attention.forward)  # type: ignore[attr-defined]
    names = (name for name in code.__code__.co_names if _ROTATION.match(name))
    return {name: code.__globals__[name] for name in names if name in code.__globals__}


def parameters_of(function: Any) -> Any:
    return inspect.signature(function).parameters


def is_given_rotations(attention: type) -> bool:
    """Whether the model makes the rotations and hands them to its layers, as most do."""
    return "position_embeddings" in parameters_of(attention.forward)  # type: ignore[attr-defined]


def rotated_types(rotary: nn.Module) -> list[str | None]:
    """The types of layers that a rotary module tells apart; [None] for one that rotates all alike."""
    kinds = getattr(rotary, "rope_type", None)
    return sorted(kinds) if isinstance(kinds, dict) and kinds else [None]


def layer_type_of(rotary: nn.Module, module: Any, config: Any) -> str | None:
    """What a rotary module that rotates by layer type is asked for by this attention module; None for other ones."""
    if rotated_types(rotary) == [None]:
        return None
    return getattr(module, "layer_type", None) or config.layer_types[module.layer_idx]


class _RotatedError(Exception):
    """The rotation was reached, with these states."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states


class _AnyRotation(tuple):
    """Stands for rotations that nobody looks at, of whatever form."""

    def to(self, *_: Any, **__: Any) -> _AnyRotation:
        return self


@torch.no_grad()
def rotated_shapes(module: Any, attention: Any, hidden_size: int) -> dict[str, torch.Size] | None:
    """Shapes of what a layer of the stock class `attention` rotates of one token, by the names that its rotation gives them.

    None where it does not rotate: some families do in some layers only, which nothing but running one shows.

    Raises:
        ValueError: the layer cannot be run alone.
    """

    def stop(stock: Any) -> Any:
        def reached(*args: Any, **kwargs: Any) -> None:
            given = {**dict(zip(parameters_of(stock), args, strict=False)), **kwargs}
            raise _RotatedError({name: value.shape for name, value in given.items() if isinstance(value, torch.Tensor)})

        return reached

    rotations = rotation_functions(attention)
    if not rotations:
        return None
    forward = rebind(attention.forward, {name: stop(stock) for name, stock in rotations.items()})
    weight = next(module.parameters())
    token = torch.zeros(1, 1, hidden_size, dtype=weight.dtype, device=weight.device)
    given = {"position_embeddings": _AnyRotation((None, None)), "attention_mask": None}
    parameters = list(parameters_of(attention.forward).values())[2:]
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    given.update(dict.fromkeys(needed - set(given), torch.zeros(1, 1, dtype=torch.long, device=weight.device)))
    try:
        forward(module, token, **given)
    except _RotatedError as found:
        return found.states
    except Exception as error:
        raise ValueError(
            f"{attention.__name__} cannot be run alone, so there is no telling whether it rotates, as a disentangled bias, "
            "qk_norm or a calibration has to know; use 'table', 'log', 'linear' or 'low_rank'."
        ) from error
    return None


def heads_of(module: Any, config: Any) -> tuple[int, int]:
    """Query heads and key/value heads of an attention module: the layers of one model may differ."""
    repeats, head_dim = getattr(module, "num_key_value_groups", None), getattr(module, "head_dim", None)
    projection: Any = getattr(module, "k_proj", None)
    if isinstance(repeats, int) and isinstance(head_dim, int) and hasattr(projection, "out_features"):
        groups = projection.out_features // head_dim
        return groups * repeats, groups
    own = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None)
    heads = own if isinstance(own, int) else config.num_attention_heads
    groups = getattr(module, "num_key_value_heads", None)
    return heads, groups if isinstance(groups, int) else getattr(config, "num_key_value_heads", None) or heads


def head_dim_of(config: Any) -> int:
    """Channels a head as a config has them; 0 where it does not say, or has more than one."""
    try:
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Also what a config raises whose layers differ.
    except (AttributeError, RuntimeError):
        return 0


def rotary_pairs(rotary: nn.Module, config: Any, attention: type, layer_type: str | None = None) -> RotaryPairs:
    """Which channels the source's rotation turns and how fast, read off its own rotary module and rotation function.

    Raises:
        ValueError: the rotation pairs its channels in a way that is not known here.
    """
    rotations = rotation_functions(attention)
    stock = next(iter(rotations.values()))
    names = list(parameters_of(stock))
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
        states = states_of(stock)
        try:
            turned = stock(*[probe] * states, *angles)
        except Exception as error:
            raise ValueError(
                f"{stock.__module__}.{stock.__qualname__}, by which {attention.__name__} rotates, does not run on the CPU; "
                "convert the model before another library replaces that function."
            ) from error
        turned = (turned[0] if states > 1 else turned).flatten()
    partner = int(turned[1:].abs().argmax()) + 1
    if partner not in (1, width // 2):
        raise ValueError(f"{attention.__name__} pairs channel 0 with channel {partner}, which is not known here.")
    if turned[partner] < 0:
        # A few families turn the other way round.
        frequencies = [-frequency for frequency in frequencies]
    amplitude = float(getattr(fresh, f"{prefix}attention_scaling", 1.0))
    return RotaryPairs(tuple(frequencies), partner == 1 and width > 2, amplitude)

"""The attention seam: a stock attention module whose `forward` finds changed names.

Each attention module's class becomes a subclass of its own class. Its `forward` is the stock function object bound to a copy
of its globals in which two names differ: the rotation, which leaves queries and keys alone when there is nothing to rotate
by, and `ALL_ATTENTION_FUNCTIONS`, which adds the module's `position_bias` and then calls the backend that the user chose. No
`forward` is copied and nothing outside the subclass changes. This file travels with every checkpoint.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from .disentangled_bias import DisentangledBias, RotaryPairs
from .fp32_module import Fp32Module
from .position_bias import LowRankBias, PositionBias, offsets, unfold_rows

BIAS_BACKENDS = ("eager", "sdpa")
_ROTATION = "apply_rotary_pos_emb"
_DISPATCH = "ALL_ATTENTION_FUNCTIONS"
# Queries per block of a dense bias: the block of scores stays in cache and (heads, L, L) is never made.
QUERY_BLOCK = 256


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


class Position(NamedTuple):
    """Where a block of queries stands, read from the cache before the layer adds to it.

    query_offset: index of the first query; key_offset: index of the first key that attention will see (a sliding cache
    forgets the oldest); hidden_states: the layer's input, for gates that read it.
    """

    query_offset: int | Tensor
    key_offset: int | Tensor
    hidden_states: Tensor


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
        return stock_forward(self, **given)

    namespace = {
        "forward": forward,
        "extra_repr": _extra_repr,
        "__module__": __name__,
        "__doc__": stock.__doc__,
        "needs_position": property(_needs_position),
        # Calibration looks at un-rotated queries and keys here.
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
    return Position(
        query_offset.clone() if isinstance(query_offset, Tensor) else query_offset, key_offset, hidden_states
    )


class _AttentionFunctions:
    """Stands in for `ALL_ATTENTION_FUNCTIONS`: the function it hands out adds the position bias, then calls the stock one."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_attend, self.stock.get_interface(implementation, default), implementation)


def refuse_backend(implementation: str | None, what: str) -> None:
    """Raise ValueError unless `what` (a position bias, a window, ...) can run on this attention implementation."""
    if implementation not in BIAS_BACKENDS:
        raise ValueError(
            f"A model with {what} cannot run on attn_implementation={implementation!r}, which would leave it out; "
            f"load it with one of {', '.join(map(repr, BIAS_BACKENDS))}."
        )


def _attend(
    stock: Callable[..., Any],
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    drope_position: Position | None = None,
    **kwargs: Any,
) -> Any:
    """Scores (batch, heads, queries, keys) plus the module's position bias, by way of the stock attention function."""
    if module.observe is not None:
        module.observe(module, query, key, attention_mask, drope_position, kwargs.get("scaling"))
    if not module.needs_position:
        return stock(module, query, key, value, attention_mask, **kwargs)
    if drope_position is None:
        raise ValueError(
            f"{type(module).__name__} does not hand keyword arguments on to its attention function, so hf_drope cannot "
            "tell it where the queries stand; a position bias, window or attention scale is not possible for this family."
        )
    refuse_backend(implementation, "a position bias, window or attention scale")
    offset = drope_position.query_offset - drope_position.key_offset
    scaling = kwargs.pop("scaling", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if module.attention_scale is not None:
        query = scale_queries(module.attention_scale, query, key, attention_mask, offset)
    if module.window is not None:
        attention_mask = _window_mask(module, query, key, attention_mask, offset, kwargs)
    position_bias = module.position_bias
    if position_bias is None:
        return stock(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if isinstance(position_bias.bias, DisentangledBias):
        if not position_bias.bias.is_dense and not position_bias.reads_scores:
            factor = position_bias.factor(None, drope_position.hidden_states)
            wide_query, wide_key = position_bias.bias(query, key, offset, factor)
            call = functools.partial(stock, module, attention_mask=attention_mask, scaling=scaling, **kwargs)
            return _attend_wider(call, wide_query, wide_key, value)
    elif isinstance(position_bias.bias, LowRankBias) and not position_bias.reads_scores:
        call = functools.partial(stock, module, attention_mask=attention_mask, scaling=1.0, **kwargs)
        return _attend_low_rank(call, position_bias, query * scaling, key, value, offset, drope_position.hidden_states)
    return _attend_in_blocks(
        stock, implementation, module, query, key, value, attention_mask, drope_position, offset, scaling, kwargs
    )


def _attend_low_rank(
    call: Callable[..., Any],
    position_bias: PositionBias,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: int | Tensor,
    hidden_states: Tensor,
) -> Any:
    """The bias as extra head dimensions: [q·scaling, u_i]·[k, v_j] with values [v, 0], so any fused kernel stays in use."""
    bias: Any = position_bias.bias
    batch, heads, queries, _ = query.shape
    u = bias.query_factors(torch.arange(queries, device=query.device) + offset)[None]
    factor = position_bias.factor(None, hidden_states)
    u = (u if factor is None else u * factor).expand(batch, heads, queries, -1)
    v = bias.key_factors(torch.arange(key.shape[2], device=key.device)).to(key.dtype)
    wide_query = torch.cat([query, u.to(query.dtype)], dim=-1)
    return _attend_wider(call, wide_query, torch.cat([key, v.expand(batch, key.shape[1], -1, -1)], dim=-1), value)


def _attend_wider(call: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Attention with queries and keys wider than values: fused kernels want one width, so values get zeros."""
    output, weights = call(query=query, key=key, value=nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1])))
    return output[..., : value.shape[-1]], weights


def _attend_in_blocks(
    stock: Callable[..., Any],
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position: Position,
    offset: int | Tensor,
    scaling: float,
    kwargs: dict[str, Any],
) -> Any:
    """The bias as an additive mask, one block of queries at a time; eager takes all queries at once, as it does in stock."""
    queries, keys = query.shape[2], key.shape[2]
    position_bias = module.position_bias
    causal = attention_mask is None and implementation != "eager" and _is_causal(module, kwargs)
    row_offsets = offsets(queries, keys, offset, query.device)
    disentangled = isinstance(position_bias.bias, DisentangledBias)
    # One row of values over all Δ serves every block; a disentangled bias depends on queries and keys.
    row = query.new_empty(0) if disentangled else position_bias.bias.values(row_offsets)
    block = queries if implementation == "eager" else QUERY_BLOCK
    # Fused kernels want the mask in the dtype of the queries; eager adds it to the scores, which it then promotes.
    dtype = torch.float32 if implementation == "eager" else query.dtype

    def attend(start: int, query: Tensor, key: Tensor, value: Tensor, row: Tensor) -> Any:
        count, width = query.shape[2], key.shape[2]
        first = queries - start - count
        part = slice(first, first + count + width - 1)
        hidden = position.hidden_states[:, start : start + count]
        if disentangled:
            scores = position_bias.bias.content_scores(query, key, offset + start) * scaling
            bias = position_bias.bias.scores(query, key, offset + start) * scaling
            query, key = position_bias.bias.content(query, key, offset + start)
            value = nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
        else:
            scores = _scores(query, key, scaling) if position_bias.reads_scores else None
            bias = unfold_rows(row[:, part], count, width)[None]
        factor = position_bias.factor(scores, hidden)
        bias = bias if factor is None else factor * bias
        if attention_mask is not None:
            bias = _mask_bias(bias, attention_mask[:, :, start : start + count, :width], dtype)
        elif causal:
            bias = _hide(bias.to(dtype), unfold_rows(row_offsets[part] > 0, count, width))
        bias = bias.to(dtype).expand(query.shape[0], query.shape[1], count, width)
        output, weights = stock(module, query, key, value, bias, scaling=scaling, **kwargs)
        return output[..., :value_width], weights

    value_width = value.shape[-1]
    if queries <= block:
        return attend(0, query, key, value, row)
    outputs = []
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        # Keys after the block's last query are in its future.
        seen = min(keys, stop + offset) if causal and isinstance(offset, int) else keys
        inputs = (start, query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], row)
        if torch.is_grad_enabled():
            # Keeping every block's bias for the backward pass would be (heads, L, L) after all.
            outputs.append(checkpoint(lambda *block_inputs: attend(*block_inputs)[0], *inputs, use_reentrant=False))
        else:
            outputs.append(attend(*inputs)[0])
    return torch.cat(outputs, dim=1), None


def _is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """q·k·scaling in fp32 with key heads shared by groups of query heads: (batch, heads, queries, keys)."""
    groups = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (key.shape[1], groups))
    return (grouped.float() @ key.float()[:, :, None].transpose(-1, -2) * scaling).flatten(1, 2)


def _hide(bias: Tensor, hidden: Tensor) -> Tensor:
    # Not −inf, which turns a row with nothing to see into NaN; and in place of the bias, whose sum might overflow.
    return bias.masked_fill(hidden, torch.finfo(bias.dtype).min)


def _mask_bias(bias: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias plus mask in `dtype`, where masked entries stay masked for any bias value and no row becomes NaN."""
    if mask.dtype == torch.bool:
        return _hide(bias.to(dtype), ~mask)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return _hide((bias + mask.masked_fill(hidden, 0.0)).to(dtype), hidden)


def _visible_keys(query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor) -> Tensor:
    """How many keys each query may see, (batch or 1, 1, queries, 1): its position + 1, padding and other documents aside."""
    if mask is None:
        position = torch.arange(query.shape[2], device=query.device) + offset
        return (position + 1).clamp(max=key.shape[2])[None, None, :, None].float()
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen[:, :1].sum(-1, keepdim=True).float()


def scale_queries(
    scale: dict[str, Any], query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor
) -> Tensor:
    """Queries times the attention scale `check_scale` let through; arguments as an attention function gets them."""
    if "factor" in scale:
        return query * scale["factor"]
    length = scale["original_max_position_embeddings"]
    growth = (_visible_keys(query, key, mask, offset) / length).clamp(min=1).log()
    return query * (1 + scale["coefficient"] * growth).to(query.dtype)


def _window_mask(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor, kwargs: dict[str, Any]
) -> Tensor:
    """The mask with keys further back than the window hidden."""
    row = offsets(query.shape[2], key.shape[2], offset, query.device)
    near = row > -module.window
    if mask is None and _is_causal(module, kwargs):
        near = near & (row <= 0)
    near = unfold_rows(near, query.shape[2], key.shape[2])[None, None]
    if mask is None:
        return near
    return mask & near if mask.dtype == torch.bool else _hide(mask, ~near)


def check_scale(scale: dict[str, Any] | None) -> dict[str, Any] | None:
    """None for a scale that changes nothing, so that such a model pays nothing."""
    if scale is None or math.isclose(scale.get("factor", 0.0), 1.0) or scale.get("coefficient") == 0.0:
        return None
    return scale

"""Which weights of an attention layer to multiply so that its queries come out multiplied, found by trying it.

Queries may have a projection of their own or some rows of a fused one, in any layout, and a norm behind it whose weight counts
from 0 or from 1. So the layer is run on one token with random weights: the last of its parts from which a gradient flows to
the queries and not to the keys is scaled, and then queries have to be multiplied, keys and the output as they were.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .conversion_additions import ConversionError
from .modeling_drope import drope_class
from .rotary_drope import NoRotation

_TRIAL = 1.25


class _Nothing(NoRotation, tuple):
    """Neither cosines and sines nor complex rotations."""


_NO_ROTATION = _Nothing((None, None))


class Fold(NamedTuple):
    """Some channels (along `axis`) of a weight that counts from `zero` (−1 where the norm multiplies by 1 + weight)."""

    channels: Tensor
    axis: int
    zero: float

    def apply(self, weight: Tensor, scale: float) -> Tensor:
        """The weight with the channels multiplied, in its own dtype: rounded once, exact for powers of two."""
        shape = [1] * weight.dim()
        shape[self.axis] = -1
        scaled = ((weight.float() - self.zero) * scale + self.zero).to(weight.dtype)
        return torch.where(self.channels.reshape(shape), scaled, weight)


def find_folds(stock: type, config: Any) -> dict[str, Fold]:
    """Key of each weight to fold a factor on the queries into.

    Args:
        stock: a stock model class.
        config: the converted model's config.

    Raises:
        ConversionError: one sentence on the layer whose weights cannot take the factor.
    """
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = drope_class(stock)(config)
    known: dict[Any, dict[str, Fold]] = {}
    folds = {}
    for prefix, module in model.named_modules():
        if hasattr(type(module), "needs_position"):
            kind = type(module), tuple((name, weight.shape) for name, weight in module.named_parameters())
            if kind not in known:
                known[kind] = _Trial(module, config.hidden_size).fold()
            folds.update({f"{prefix}.{name}": fold for name, fold in known[kind].items()})
    return folds


class _Seen(NamedTuple):
    query: Tensor
    key: Tensor
    output: Tensor
    # What each part with weights of its own gave, in the order of their use.
    parts: dict[nn.Module, Tensor]


class _Trial:
    """One attention layer with random weights, run on one token: it attends to itself, so its output is its value's."""

    def __init__(self, module: Any, hidden_size: int) -> None:
        self.module = module.to_empty(device="cpu").float().eval()
        module.attention_scale = module.window = None
        generator = torch.Generator().manual_seed(0)
        for weight in module.parameters():
            weight.data.normal_(0, 1 / max(weight.shape[-1], 1) ** 0.5, generator=generator)
        self.token = torch.randn(1, 1, hidden_size, generator=generator)

    def fold(self) -> dict[str, Fold]:
        names = {part: name for name, part in self.module.named_modules()}
        before = self.run()
        for part, given in reversed(before.parts.items()):
            channels = _reached(before.query, given) & ~_reached(before.key, given)
            if not channels.any():
                continue
            for zero in (0.0, -1.0):
                folds = {
                    name: Fold(channels, 0 if isinstance(part, nn.Linear) and weight.dim() > 1 else -1, zero)
                    for name, weight in part.named_parameters(recurse=False)
                }
                if self.works(part, folds, before):
                    return {f"{names[part]}.{name}": fold for name, fold in folds.items()}
        raise ConversionError(
            f"{type(self.module).__name__.removeprefix('DroPE')} has no weights that multiply its queries alone, so a constant "
            "attention scale cannot be folded into them; set attention_scale to null before the export."
        )

    def works(self, part: nn.Module, folds: dict[str, Fold], before: _Seen) -> bool:
        old = {name: weight.data for name, weight in part.named_parameters(recurse=False)}
        try:
            for name, fold in folds.items():
                part.get_parameter(name).data = fold.apply(old[name], _TRIAL)
            after = self.run()
        finally:
            for name, data in old.items():
                part.get_parameter(name).data = data
        expected = (before.query * _TRIAL, before.key, before.output)
        return all(map(_close, (after.query, after.key, after.output), expected))

    def run(self) -> _Seen:
        parts: dict[nn.Module, Tensor] = {}
        twice = set()

        def note(part: nn.Module, _: Any, output: Any) -> None:
            twice.update({part} & parts.keys())
            if isinstance(output, Tensor):
                parts[part] = output

        seen: list[Tensor] = []
        self.module.observe = lambda module, query, key, *_: seen.extend((query, key))
        owners = [part for part in self.module.modules() if _owns(part) and part is not self.module]
        hooks = [part.register_forward_hook(note) for part in owners]
        try:
            output = self.module(hidden_states=self.token, **self.arguments())[0]
        finally:
            self.module.observe = None
            for hook in hooks:
                hook.remove()
        return _Seen(seen[0], seen[1], output, {part: given for part, given in parts.items() if part not in twice})

    def arguments(self) -> dict[str, Any]:
        parameters = inspect.signature(type(self.module).forward).parameters
        given: dict[str, Any] = {"position_embeddings": _NO_ROTATION, "attention_mask": torch.zeros(1, 1, 1, 1)}
        return {name: value for name, value in given.items() if name in parameters}


def _owns(part: nn.Module) -> bool:
    return next(part.parameters(recurse=False), None) is not None


def _reached(states: Tensor, given: Tensor) -> Tensor:
    """Which channels (last dimension) of a part's output these queries or keys depend on."""
    weights = torch.linspace(0.5, 1.5, states.numel()).reshape(states.shape)
    (gradient,) = torch.autograd.grad((states * weights).sum(), given, retain_graph=True, allow_unused=True)
    if gradient is None:
        return torch.zeros(given.shape[-1], dtype=torch.bool)
    return (gradient != 0).flatten(0, -2).any(0)


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-4 * other.abs().max())

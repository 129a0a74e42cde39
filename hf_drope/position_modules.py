"""Which modules of a stock model encode position, found by what they are. This file travels with every checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

# What families call a table of learned positions.
_TABLES = ("wpe", "positions_embed", "embed_positions", "position_embeddings")

_OTHER_TABLES = ("RoFormerSinusoidalPositionalEmbedding", "ProphetNetPositionalEmbeddings")


class Place(NamedTuple):
    """Where a module is held."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> Any:
        return self.parent._modules[self.name]

    def put(self, module: nn.Module) -> None:
        self.parent._modules[self.name] = module


def is_wrapped(module: nn.Module) -> bool:
    """Whether a module is one of ours, of whichever copy of the code, with a position encoding at a strength of its own."""
    return hasattr(type(module), "holds_rope_scale")


def _children(model: nn.Module) -> Iterator[Place]:
    for parent in model.modules():
        if not is_wrapped(parent):
            for name, child in parent._modules.items():
                if child is not None:
                    yield Place(parent, name)


def rotary_places(model: nn.Module) -> list[Place]:
    """The rotary modules of a model, wrapped or not: those that turn position ids into rotations."""
    return [place for place in _children(model) if _is_rotary(place.module)]


def _is_rotary(module: nn.Module) -> bool:
    return "Rotary" in type(module).__name__ and "position_ids" in inspect.signature(module.forward).parameters


def refuse_other_tables(model: nn.Module) -> None:
    """Raise ValueError for tables whose rows are not simply added to the embeddings of tokens."""
    for place in _children(model):
        name = type(place.module).__name__
        if name in _OTHER_TABLES:
            raise ValueError(
                f"{name} of {type(model).__name__} does more than look up vectors to be added, so hf_drope cannot change how "
                "it encodes position."
            )


def table_places(model: nn.Module) -> list[Place]:
    """The tables of learned absolute positions, wrapped, removed or not."""
    found = (place for place in _children(model) if place.name in _TABLES)
    return [place for place in found if isinstance(place.module, nn.Embedding) or is_wrapped(place.module)]

"""One call of an attention function, with what hf_drope knows about it. This file travels with every checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Position(NamedTuple):
    """Where a block of queries stands, read from the cache before the layer adds to it.

    query_offset: index of the first query; key_offset: index of the first key that attention will see (a sliding cache
    forgets the oldest); hidden_states: the layer's input, for gates that read it; kept: a dictionary for what the steps of a
    generation need not work out anew, or None; key_length: how many keys attention will see, or None where nobody says.
    """

    query_offset: int | Tensor
    key_offset: int | Tensor
    hidden_states: Tensor
    kept: dict[Any, Any] | None = None
    key_length: int | None = None


class AttentionCall(NamedTuple):
    """`stock` is the attention function of the backend `implementation`; the other fields are what it would be given.

    query: (batch, heads, queries, channels); key, value: (batch, key/value heads, keys, channels).
    """

    stock: Callable[..., Any]
    implementation: str
    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    position: Position
    scaling: float
    kwargs: dict[str, Any]

    @property
    def offset(self) -> int | Tensor:
        """Index of the first query among the keys."""
        return self.position.query_offset - self.position.key_offset

    @property
    def is_causal(self) -> bool:
        """Whether keys after a query are hidden where there is no mask."""
        given = self.kwargs.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if given is None else given)

    @property
    def ends_with_its_queries(self) -> bool:
        """Whether the last query is the last key: not in a static cache, which is longer than it is filled."""
        offset = self.offset
        return isinstance(offset, int) and self.key.shape[2] == self.query.shape[2] + offset

    def run(self, **changed: Any) -> Any:
        """What the stock function returns, some arguments changed."""
        call = self._replace(**changed)
        return self.stock(self.module, call.query, call.key, call.value, call.mask, scaling=call.scaling, **self.kwargs)

    def part(self, start: int, stop: int, first_key: int, end_key: int) -> AttentionCall:
        """The call for queries start … stop and keys first_key … end_key."""
        position = self.position
        keys = slice(first_key, end_key)
        return self._replace(
            query=self.query[:, :, start:stop],
            key=self.key[:, :, keys],
            value=self.value[:, :, keys],
            mask=None if self.mask is None else self.mask[:, :, start:stop, keys],
            position=position._replace(
                query_offset=position.query_offset + start,
                key_offset=position.key_offset + first_key,
                hidden_states=position.hidden_states[:, start:stop],
            ),
        )

"""The disentangled bias: what a model's own RoPE says about position, set apart from what it does to content.

With μ_q and μ_k the mean un-rotated query and key, q̃ = q − μ_q, k̃ = k − μ_k and R_Δ the source's rotation by Δ = j − i, RoPE's
score splits exactly into

    q'R_Δ k = q̃'R_Δ k̃ + q̃'R_Δ μ_k + μ_q'R_Δ k̃ + μ_q'R_Δ μ_k
              content   c2p         p2c         p2p

the terms that Transformer-XL (arXiv 1901.02860) and DeBERTa (arXiv 2006.03654) learn from scratch. Here the last three keep
their rotation and the first loses it: content is matched alike at every distance.

    score = q̃'M k̃ + μ_q'k̃ + g · Σ over terms (R_Δ − 1) + a term constant along the keys, which softmax cancels

M is 1, or RoPE's mean effect on content: per head and channel pair the average of R_Δ over the distances that the head
attends to, a damping and a turn. (A fast pair turns many times within a window, so that its content match averages out;
with M = 1 it would be heard in full.) Every term is a dot product of wider heads, so any fused kernel runs it:

    [M'q̃ + μ_q − g μ_q, g R_i q, g R_i μ_q] · [k, R_j μ_k, R_j (k − μ_k)]

Keys are cached un-rotated, with what p2c needs of them, R_j (k_j − μ_k), beside them. This file travels with every checkpoint
and imports torch only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .fp32_module import Fp32Module, fill, fp32_parameter
from .position_shapes import check_rotation
from .rotary_drope import RopeScale
from .rotary_pairs import RotaryPairs, scaled_frequencies

TERMS = ("p2p", "c2p", "p2c")


class ContentRotation(RopeScale):
    """The strength of RoPE on the content term, `rope_scale` of the model: 1 puts it back, 0 takes it out."""

    def __init__(self, rope_scale: float) -> None:
        super().__init__()
        self._init_scale(rope_scale)


class DisentangledBias(Fp32Module):
    """The disentangled bias of one attention layer (see the module's docstring).

    Called with un-rotated queries and keys it returns wider ones, whose products are the scores before scaling, up to a
    term constant along the keys. Means start at 0, which is a dropped model; `hf_drope.calibrate` computes them.

    Args:
        num_heads, num_key_value_heads: of the layer; key/value heads divide query heads.
        head_dim: channels a head; those beyond `2 · len(pairs.frequencies)` are never rotated.
        pairs: the source's rotation.
        terms: those of "p2p", "c2p" and "p2c" that keep their rotation; a term left out is not rotated.
        rank: None for all pairs, or twice the number of pairs of a key/value head that rotate in the terms.
        content: "mean_rotation" for a learned M, "identity" for M = 1.
        share: "head": a mean query a head and a mean key a key/value head; "kv_group": both a key/value head; "layer": one.
        terms_scale: g, from 1 to 0 (all terms un-rotated: no position at all).
        position_scaling: see `scaled_frequencies`; {"type": "clip", "max_distance": D} gives keys further away than D the
            position terms of distance D.
        rope_scale, rope_fade: strength of RoPE on the content term, and how it fades.
    """

    kind = "disentangled"
    pairs: Tensor | None
    frequencies: Tensor
    source_frequencies: Tensor
    terms_scale: Tensor

    def __init__(
        self,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        pairs: RotaryPairs,
        terms: tuple[str, ...] | list[str] = TERMS,
        rank: int | None = None,
        content: str = "mean_rotation",
        share: str = "head",
        terms_scale: float = 1.0,
        position_scaling: dict[str, Any] | None = None,
        rope_scale: float = 0.0,
        rope_fade: str = "angle",
    ) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        self.terms, self.share, self.rank = tuple(terms), share, rank
        self.position_scaling, self.rope_fade = position_scaling, rope_fade
        self.pair_frequencies = tuple(scaled_frequencies(pairs, position_scaling))
        self.source, self.rotated = pairs, 2 * len(pairs.frequencies)
        check_rotation({"type": "disentangled", "rank": rank}, self.rotated)
        query_groups = {"head": num_heads, "kv_group": num_key_value_heads, "layer": 1}[share]
        key_groups = 1 if share == "layer" else num_key_value_heads
        self.query_mean = fp32_parameter(query_groups, head_dim)
        self.key_mean = fp32_parameter(key_groups, head_dim)
        # M as (cos-like, sin-like) of each pair: an average of rotations is a rotation times a number.
        self.gain = fp32_parameter(query_groups, self.rotated // 2, 2) if content == "mean_rotation" else None
        if rank is None:
            self.pairs = None
        else:
            # Saved with the weights: calibration keeps those with the most energy. In fp32, to which a load in half
            # precision turns all that belongs to a position bias.
            self.register_buffer("pairs", torch.empty(num_key_value_heads, rank // 2, dtype=torch.float32))
        self.register_buffer("frequencies", torch.empty(self.rotated // 2, dtype=torch.float32), persistent=False)
        self.register_buffer(
            "source_frequencies", torch.empty(self.rotated // 2, dtype=torch.float32), persistent=False
        )
        self.register_buffer("terms_scale", torch.empty((), dtype=torch.float32), persistent=False)
        self.content_rotation = ContentRotation(rope_scale)
        self.set_terms_scale(terms_scale)
        self.reset_parameters()

    def set_terms_scale(self, terms_scale: float) -> None:
        self._terms_scale = float(terms_scale)
        # A branch on the number itself would recompile at every step of a schedule.
        self.terms_off = terms_scale == 0.0
        with torch.no_grad():
            self.terms_scale.fill_(self._terms_scale)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query_mean)
        nn.init.zeros_(self.key_mean)
        fill(self.frequencies, scaled_frequencies(self.source, self.position_scaling))
        fill(self.source_frequencies, self.source.frequencies)
        nn.init.constant_(self.terms_scale, self._terms_scale)
        if self.gain is not None:
            fill(self.gain, torch.tensor([1.0, 0.0]).expand(self.gain.shape))
        if self.pairs is not None:
            chosen = torch.linspace(0, self.rotated // 2 - 1, self.pairs.shape[-1]).round()
            fill(self.pairs, chosen.expand(self.pairs.shape))

    # Parameters, spread over the heads of the layer.

    def means(self) -> tuple[Tensor, Tensor]:
        """μ_q (heads, 1, head_dim) and μ_k (key/value heads, 1, head_dim) in fp32."""
        query = _repeated(self.query_mean.float(), self.num_heads)
        key = _repeated(self.key_mean.float(), self.num_key_value_heads)
        return query[:, None], key[:, None]

    def spread_gain(self) -> Tensor | None:
        """M of each head and pair, (heads, 1, n, 2), or None for M = 1."""
        if self.gain is None:
            return None
        return _repeated(self.gain.float(), self.num_heads)[:, None]

    # Channels.

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two halves of every pair: (..., head_dim) → 2 × (..., n)."""
        if self.source.interleaved:
            return x[..., 0 : self.rotated : 2], x[..., 1 : self.rotated : 2]
        return x[..., : self.rotated // 2], x[..., self.rotated // 2 : self.rotated]

    def merge(self, first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        """The inverse of `split`, with the channels of `x` that are never rotated."""
        turned = (
            torch.stack([first, second], -1).flatten(-2) if self.source.interleaved else torch.cat([first, second], -1)
        )
        return turned if self.rotated == self.head_dim else torch.cat([turned, x[..., self.rotated :]], -1)

    def _chosen(self, x: Tensor, heads: int) -> Tensor:
        """The pairs that rotate in the terms: (..., heads, length, n) → (..., heads, length, rank / 2)."""
        if self.pairs is None:
            return x
        index = _repeated(self.pairs.long(), heads)[:, None]
        return x.gather(-1, index.expand(*x.shape[:-1], -1))

    def _cos_sin(self, position: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the position terms at `position` (n,): (heads or 1, n, pairs) in fp32, with the amplitude."""
        angle = position.float()[None, :, None] * self.frequencies.float()
        angle = self._chosen(angle.expand(heads, -1, -1), heads) if self.pairs is not None else angle
        return angle.cos() * self.source.amplitude, angle.sin() * self.source.amplitude

    def _rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """R applied to the chosen pairs of `x` (..., heads, n, head_dim) → (..., heads, n, 2 · pairs), in x's dtype."""
        heads = x.shape[-3]
        cos, sin = (part.to(x.dtype) for part in self._cos_sin(position, heads))
        first, second = (self._chosen(half, heads) for half in self.split(x))
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    # Content.

    def _damped(self, query: Tensor, rope: Tensor | None) -> Tensor:
        """M'q̃ for centred queries q̃ (batch, heads, n, head_dim); RoPE at strength `rope` on the content takes M's place."""
        gain = self.spread_gain()
        if gain is None:
            return query
        a, b = gain[..., 0], gain[..., 1]
        if rope is not None:
            a, b = 1 + (1 - rope) * (a - 1), (1 - rope) * b
        a, b = a.to(query.dtype), b.to(query.dtype)
        first, second = self.split(query)
        return self.merge(a * first + b * second, a * second - b * first, query)

    def _content_cos_sin(self, position: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE at strength `rope` as the model-level seam fades it, from the source's own frequencies."""
        source = self.source_frequencies.float()
        place, amplitude = position.float()[:, None], self.source.amplitude
        if self.rope_fade == "angle":
            angle = place * rope * source
            factor = 1 + rope * (amplitude - 1)
            return angle.cos() * factor, angle.sin() * factor
        weight = rope
        if self.rope_fade == "frequency":
            faster = (source.abs()[None, :] > source.abs()[:, None]).sum(-1)
            weight = (rope * len(source) - faster).clamp(0, 1)
        angle = place * source
        return 1 + weight * (angle.cos() * amplitude - 1), weight * angle.sin() * amplitude

    def _content_rotated(self, x: Tensor, position: Tensor, rope: Tensor) -> Tensor:
        cos, sin = (part.to(x.dtype) for part in self._content_cos_sin(position, rope))
        first, second = self.split(x)
        return self.merge(first * cos - second * sin, second * cos + first * sin, x)

    def content(
        self, query: Tensor, key: Tensor, query_offset: int | Tensor = 0, removed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys of the content part, score q̃'M k̃ + (μ_q − removed)'k̃ up to a term constant along the keys.

        removed: what the position terms account for of μ_q, broadcastable to (batch, heads, queries, head_dim), or None.
        """
        query_mean, key_mean = self.means()
        rest = query_mean if removed is None else query_mean - removed
        centred = query - query_mean.to(query.dtype)
        if self.content_rotation.state == "dropped":
            return self._damped(centred, None) + rest.to(query.dtype), key
        rope = self.content_rotation.scale
        centred_key = key - key_mean.to(key.dtype)
        places, key_places = self._places(query, key, query_offset)
        turned = self._content_rotated(self._damped(centred, rope), places, rope)
        turned_key = self._content_rotated(centred_key, key_places, rope)
        rest = rest.to(query.dtype).expand_as(query)
        return torch.cat([turned, rest], -1), torch.cat([turned_key, key], -1)

    # Position.

    @staticmethod
    def _places(query: Tensor, key: Tensor, query_offset: int | Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(query.shape[-2], device=query.device) + query_offset
        return places, torch.arange(key.shape[-2], device=key.device)

    def _factors(self, query: Tensor, key: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The terms as products a'R_Δ b: pairs of a (…, heads, n, head_dim) and b (…, key/value heads, n, head_dim)."""
        query_mean, key_mean = (mean.to(query.dtype) for mean in self.means())
        p2p, c2p, p2c = (term in self.terms for term in TERMS)
        factors = []
        if c2p:
            factors.append((query if p2p else query - query_mean, key_mean.expand(-1, key.shape[-2], -1)))
        if p2c:
            factors.append((query_mean.expand(-1, query.shape[-2], -1), self._p2c_keys(key)))
        if p2p and not c2p and not p2c:
            factors.append((query_mean.expand(-1, query.shape[-2], -1), key_mean.expand(-1, key.shape[-2], -1)))
        return factors

    def _p2c_keys(self, key: Tensor) -> Tensor:
        return key - self.means()[1].to(key.dtype) if self.centres_keys else key

    @property
    def centres_keys(self) -> bool:
        """Whether the p2c term is for k − μ_k; without c2p the p2p term is in it, and it is for k."""
        return "p2p" not in self.terms or "c2p" in self.terms

    def in_terms(self) -> Tensor:
        """1 for the channels that rotate in the terms, 0 for the others: (key/value heads or 1, 1, head_dim)."""
        channels = self.frequencies.new_zeros(1, 1, self.head_dim, dtype=torch.float32)
        if self.pairs is None:
            one = channels.new_ones(1, 1, self.rotated // 2)
        else:
            empty = channels.new_zeros(self.num_key_value_heads, self.rotated // 2)
            one = empty.scatter(1, self.pairs.long(), 1.0)[:, None]
        return self.merge(one, one, channels.expand(one.shape[0], -1, -1))

    def _removed(self) -> Tensor:
        """The share of μ_q whose un-rotated match with keys the p2c term replaces: (heads, 1, head_dim)."""
        inside = self.in_terms()
        return self.means()[0] * _repeated(inside, self.num_heads)

    # What a cache keeps.

    @property
    def keeps_rotated_keys(self) -> bool:
        """Whether a cache holds rotated keys beside the others, which decoding would have to rotate anew at every step."""
        return "p2c" in self.terms and not self.is_dense and not self.terms_off

    def rotated_keys(self, key: Tensor, offset: int | Tensor) -> Tensor:
        """R_j of the p2c term's keys: `key` (batch, key/value heads, n, head_dim) at places offset … → (…, n, 2 · pairs)."""
        return self._rotate(self._p2c_keys(key), torch.arange(key.shape[-2], device=key.device) + offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        query_offset: int | Tensor = 0,
        factor: Tensor | None = None,
        rotated: Tensor | None = None,
        key_offset: int | Tensor = 0,
    ) -> tuple[Tensor, Tensor]:
        """Un-rotated `query` (batch, heads, queries, head_dim) and `key` (batch, key/value heads, keys, head_dim) → wider ones.

        Args:
            query_offset: index of the first query among the keys; the number of cached keys when decoding.
            factor: a gate's value on the terms, broadcastable to (batch, heads, queries, 1).
            rotated: `rotated_keys` of the keys, from a cache that has them, the first of them at place `key_offset`.
        """
        if self.terms_off or not self.terms:
            content_query, content_key = self.content(query, key, query_offset)
            return content_query + self._unused(factor).to(content_query.dtype), content_key
        strength = self.terms_scale if factor is None else factor * self.terms_scale
        removed = strength * self._removed() if "p2c" in self.terms else None
        content_query, content_key = self.content(query, key, query_offset, removed)
        if {"p2p", "p2c"} == set(self.terms):
            # Together they are μ_q'R k.
            content_query = content_query + self._unused(None).to(content_query.dtype)
        places, key_places = self._places(query, key, query_offset)
        queries: list[Any] = [content_query]
        keys: list[Any] = [content_key]
        factors = self._factors(query, key)
        for index, (a, b) in enumerate(factors):
            is_kept = rotated is not None and index == len(factors) - 1
            turned = self._rotate(a, places + key_offset if is_kept else places) * strength.to(query.dtype)
            queries.append(turned.expand(query.shape[0], -1, -1, -1))
            keys.append(rotated if is_kept else self._rotate(b, key_places).expand(key.shape[0], -1, -1, -1))
        return torch.cat(queries, -1), torch.cat(keys, -1)

    def _unused(self, factor: Tensor | None) -> Tensor:
        """0 with a gradient of 0 to what the terms alone use: data-parallel training waits for every parameter's."""
        unused = self.key_mean.sum() if factor is None else self.key_mean.sum() + factor.sum()
        return 0.0 * unused

    def content_product(self, query: Tensor, key: Tensor, query_offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Queries and keys of the whole content part, with the term that is constant along the keys, which a gate reads.

        In fp32: a (batch, heads, queries, n) and b (batch, key/value heads, keys, n).
        """
        query, key = query.float(), key.float()
        query_mean, key_mean = self.means()
        a, b = self.content(query, key, query_offset)
        centred = query - query_mean
        if self.content_rotation.state == "dropped":
            centred = centred - self._damped(centred, None)
        constant = (centred * self.spread(key_mean)).sum(-1, keepdim=True)
        return torch.cat([a, constant], -1), torch.cat([b, torch.ones_like(b[..., :1])], -1)

    def content_scores(self, query: Tensor, key: Tensor, query_offset: int | Tensor = 0) -> Tensor:
        """The content part of the scores, complete and in fp32: (batch, heads, queries, keys), for gates that read it."""
        return self.products(*self.content_product(query, key, query_offset))

    def terms_product(self, query: Tensor, key: Tensor, query_offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """`scores` as a product, for terms that are not clipped: a and b as in `content_product`."""
        query, key = query.float(), key.float()
        places, key_places = self._places(query, key, query_offset)
        left, right = [query[..., :0]], [key[..., :0]]
        for a, b in self._factors(query, key):
            still = a * self.spread(self.in_terms())
            a, b = (x.expand(len(query), -1, -1, -1) for x in (a, b))
            left += [self._rotate(a, places), -still.expand(len(query), -1, -1, -1)]
            right += [self._rotate(b, key_places), b]
        return torch.cat(left, -1) * self.terms_scale, torch.cat(right, -1)

    def scores(self, query: Tensor, key: Tensor, query_offset: int | Tensor = 0) -> Tensor:
        """Σ over terms of (R_Δ − 1), in fp32: (batch, heads, queries, keys); what a gate multiplies, before scaling."""
        if not self.is_dense:
            return self.products(*self.terms_product(query, key, query_offset))
        query, key = query.float(), key.float()
        places, key_places = self._places(query, key, query_offset)
        total = query.new_zeros(query.shape[0], 1, 1, 1)
        furthest = self.position_scaling["max_distance"]  # type: ignore[index]
        for a, b in self._factors(query, key):
            turned = self.products(self._rotate(a, places), self._rotate(b, key_places))
            # As if every such key stood at 0 and every query at `furthest`.
            far = self.products(
                self._rotate(a, torch.full_like(places, furthest)), self._rotate(b, torch.zeros_like(key_places))
            )
            turned = torch.where(key_places - places[:, None] < -furthest, far, turned)
            total = total + turned - self.products(a * self.spread(self.in_terms()), b)
        return total * self.terms_scale

    def spread(self, per_key_head: Tensor) -> Tensor:
        """What each key/value head, or all, has, for each head."""
        return _repeated(per_key_head, self.num_heads)

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """a·b with key heads shared by groups of query heads: (batch, heads, queries, keys)."""
        a, b = (x if x.dim() == 4 else x[None] for x in (a, b))
        groups = a.shape[1] // b.shape[1]
        # A group's queries as rows of one product: broadcast keys would be copied for every head.
        grouped = a.unflatten(1, (b.shape[1], groups)).flatten(2, 3)
        return (grouped @ b.transpose(-1, -2)).unflatten(2, (groups, -1)).flatten(1, 2)

    @property
    def is_dense(self) -> bool:
        """Whether the terms are no dot product, so that they have to be computed as (queries, keys) blocks."""
        return self.position_scaling is not None and self.position_scaling["type"] == "clip"

    def extra_repr(self) -> str:
        parts = [f"terms={list(self.terms)}", f"share={self.share!r}"]
        parts += [f"rank={self.rank}"] if self.rank is not None else []
        parts += ["content='identity'"] if self.gain is None else []
        parts += [f"terms_scale={self._terms_scale:g}"] if self._terms_scale != 1.0 else []
        parts += [f"position_scaling={self.position_scaling}"] if self.position_scaling is not None else []
        return ", ".join(parts)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """What each of some groups of heads has, for each of `heads` heads, along the first dimension."""
    return x if x.shape[0] == heads else x.repeat_interleave(heads // x.shape[0], 0)

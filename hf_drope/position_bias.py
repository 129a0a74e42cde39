"""Relative position biases, and the gates that scale them on the scores.

An attention score s_ij = q_i·k_j / sqrt(d) becomes s_ij + g · R_h(Δ), where Δ = j − i is the key's offset from the query
(causal: Δ ≤ 0), R_h the position bias of head h, and g a gate: 1, one number per head, or a function of the query or of the
score itself. Everything here works on plain scores `(batch, heads, queries, keys)` outside any Transformers model:

    scores = TableBias(num_heads=8, max_distance=128)(scores)
    scores = PositionBias(LogBias(8), ScoreGate())(scores, query_offset=past_length)

Distances are whole numbers and all position arithmetic is fp32, whatever the scores' dtype: in bf16, 600 positions become
407 distinct values. This file travels with every checkpoint and imports torch only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .disentangled_bias import DisentangledBias
from .fp32_module import Fp32Module, fill, fp32_parameter
from .gates import Gate, HeadGate, QueryGate, ScoreGate
from .position_shapes import check_rotation
from .rotary_pairs import RotaryPairs

SMALLEST_SLOPE = 1e-2


class RelativeBias(Fp32Module):
    """Base of the biases R_h(Δ).

    Args:
        num_heads: query heads.
        num_groups: independent sets of parameters (`num_heads`: one a head; key/value heads: one a group; 1: one a layer).

    Raises:
        ValueError: `num_groups` does not divide `num_heads`.
    """

    # By name: a checkpoint has its own copy of these classes, which `isinstance` would not recognise.
    kind: str

    def __init__(self, num_heads: int, num_groups: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_groups = num_heads if num_groups is None else num_groups
        if self.num_groups < 1 or num_heads % self.num_groups:
            raise ValueError(f"{num_heads} heads cannot be shared by {self.num_groups} sets of position parameters.")

    def group_values(self, offset: Tensor) -> Tensor:
        """R for each parameter group: `offset` (n,) of Δ = j − i, whole numbers where R is not smooth → (num_groups, n) in fp32."""
        raise NotImplementedError(f"{type(self).__name__} has to define group_values.")

    def values(self, offset: Tensor) -> Tensor:
        """R_h(Δ): `offset` (n,) → (num_heads, n) in fp32."""
        return self.group_values(offset).repeat_interleave(self.num_heads // self.num_groups, dim=0)

    def forward(self, scores: Tensor, query_offset: int | Tensor = 0) -> Tensor:
        """Scores with the bias added.

        Args:
            scores: (batch, heads, queries, keys); columns are key positions 0, 1, ...
            query_offset: position of the first query; the number of cached keys when decoding.
        """
        bias = toeplitz(self, scores.shape[-2], scores.shape[-1], query_offset, scores.device)
        return (scores.float() + bias).to(scores.dtype)

    def extra_repr(self) -> str:
        shared = "" if self.num_groups == self.num_heads else f", num_groups={self.num_groups}"
        return f"num_heads={self.num_heads}{shared}"


def is_exporting() -> bool:
    """Whether `torch.export` is looking: its program takes any length, so none may decide which way is gone."""
    # Before torch 2.7 the two are not told apart.
    return getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


def offsets(queries: int, keys: int, query_offset: int | Tensor, device: torch.device) -> Tensor:
    """All Δ = j − i of a block, ascending: (queries + keys − 1,). Nothing is read back from the device."""
    return torch.arange(-(queries - 1), keys, device=device) - query_offset


def unfold_rows(row: Tensor, queries: int, keys: int) -> Tensor:
    """(…, queries + keys − 1) values over ascending Δ → the Toeplitz block (…, queries, keys)."""
    if is_exporting():
        # An unfolded view would fix the length for good.
        later = torch.arange(keys, device=row.device) - torch.arange(queries, device=row.device)[:, None]
        return row[..., later + queries - 1]
    return row.unfold(-1, keys, 1).flip(-2)


def toeplitz(
    bias: RelativeBias, queries: int, keys: int, query_offset: int | Tensor, device: torch.device | None = None
) -> Tensor:
    """The bias of a block as (heads, queries, keys): one row of 2L − 1 values unfolded, no gather over (L, L)."""
    row = bias.values(offsets(queries, keys, query_offset, device or torch.device("cpu")))
    return unfold_rows(row, queries, keys)


def _by_side(offset: Tensor, values: Tensor) -> Tensor:
    """Pick the parameters of the offset's direction: `values` (sides, groups, n), side 0 backward (Δ ≤ 0), 1 forward."""
    if values.shape[0] == 1:
        return values[0]
    return torch.where(offset > 0, values[1], values[0])


class TableBias(RelativeBias):
    """A learned value per distance (simple bias RPE), or per T5 bucket of distances.

    Without buckets the table is (2·max_distance − 1, groups) and Δ reads row Δ + max_distance − 1: the centre is
    `max_distance`, never the running length, so a distance reads the same row at every length. Offsets past the table use
    the last row of their side. With `num_buckets` it is T5's rule (arXiv 1910.10683): half the buckets of a side hold one
    distance each, the others grow logarithmically up to `max_distance`; `bidirectional` gives each side its own half.

    Args:
        max_distance: distances told apart, at least 1.
        num_buckets: None for one row a distance.
        init_range: the table starts as U(−init_range, init_range).
    """

    kind = "table"

    def __init__(
        self,
        num_heads: int,
        max_distance: int = 512,
        num_buckets: int | None = None,
        init_range: float = 0.1,
        bidirectional: bool = False,
        num_groups: int | None = None,
    ) -> None:
        super().__init__(num_heads, num_groups)
        if max_distance < 1:
            raise ValueError(f"max_distance is {max_distance}; it has to be at least 1.")
        self.max_distance = max_distance
        self.num_buckets = num_buckets
        self.init_range, self.bidirectional = init_range, bidirectional
        self.weight = fp32_parameter(2 * max_distance - 1 if num_buckets is None else num_buckets, self.num_groups)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -self.init_range, self.init_range)

    def rows(self, offset: Tensor) -> Tensor:
        """The table row that each Δ reads, shape as `offset`."""
        if self.num_buckets is None:
            return (offset + self.max_distance - 1).clamp(0, 2 * self.max_distance - 2)
        buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        first = (offset > 0).long() * buckets if self.bidirectional else 0
        distance = offset.abs() if self.bidirectional else (-offset).clamp(min=0)
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, far)

    def group_values(self, offset: Tensor) -> Tensor:
        return self.weight.float()[self.rows(offset)].T

    def extra_repr(self) -> str:
        buckets = "" if self.num_buckets is None else f", num_buckets={self.num_buckets}"
        return f"{super().extra_repr()}, max_distance={self.max_distance}{buckets}"


class LogBias(RelativeBias):
    """R = sign · γ · log(1 + a·|Δ|), two numbers per group and direction (KERPLE-log, arXiv 2205.09921, has sign −1).

    Args:
        sign: −1 favours near keys, +1 far ones.
        init: "constant" (γ = 0.1, a = 1) or "kerple" (γ ~ U(0, 2), a ~ U(0, 1), both held above 0.01).
        bidirectional: own parameters for Δ > 0; otherwise |Δ| decides alone.
    """

    kind = "log"

    def __init__(
        self,
        num_heads: int,
        sign: int = -1,
        init: str = "constant",
        bidirectional: bool = False,
        num_groups: int | None = None,
    ) -> None:
        super().__init__(num_heads, num_groups)
        self.sign, self.init = sign, init
        self.gamma = fp32_parameter(1 + bidirectional, self.num_groups)
        self.a = fp32_parameter(1 + bidirectional, self.num_groups)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.init == "kerple":
            nn.init.uniform_(self.gamma, 0.0, 2.0)
            nn.init.uniform_(self.a, 0.0, 1.0)
        else:
            nn.init.constant_(self.gamma, 0.1)
            nn.init.constant_(self.a, 1.0)

    def group_values(self, offset: Tensor) -> Tensor:
        gamma, a = self.gamma.float(), self.a.float().clamp(min=SMALLEST_SLOPE)
        if self.init == "kerple":
            gamma = gamma.clamp(min=SMALLEST_SLOPE)
        growth = torch.log1p(a[..., None] * offset.abs().float())
        return _by_side(offset, self.sign * gamma[..., None] * growth)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sign={self.sign:+d}, init={self.init!r}"


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes (arXiv 2108.12409): 2^(−8k/n), k = 1…n, for n a power of two.

    Otherwise the slopes of the next lower power p, then every other slope of 2p, the first, the third, and so on.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * k / power) for k in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * k / power) for k in range(1, 2 * (num_heads - power), 2)]


class LinearBias(RelativeBias):
    """R = −m·|Δ| with ALiBi's slopes m per group, fixed, or learned per direction."""

    kind = "linear"

    def __init__(
        self, num_heads: int, learned: bool = False, bidirectional: bool = False, num_groups: int | None = None
    ) -> None:
        super().__init__(num_heads, num_groups)
        self.learned = learned
        sides = 1 + bidirectional
        if learned:
            self.slopes = fp32_parameter(sides, self.num_groups)
        else:
            self.register_buffer("slopes", torch.empty(sides, self.num_groups, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill(self.slopes, alibi_slopes(self.num_groups))

    def group_values(self, offset: Tensor) -> Tensor:
        return _by_side(offset, -self.slopes.float()[..., None] * offset.abs().float())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, learned={self.learned}"


class LowRankBias(RelativeBias):
    """R = Σ_r α_r cos(ω_r Δ) + β_r sin(ω_r Δ): `rank` = two terms for each of rank/2 log-spaced frequencies.

    A sum of cosines of j − i is a dot product u_i · v_j, so the bias can enter a fused attention kernel as `rank` extra
    head dimensions, at any length and without a bias tensor. It starts at zero.

    Args:
        rank: even, at least 2.
        max_distance: the slowest frequency is 1 / max_distance radians a token, the fastest 1.
    """

    kind = "low_rank"
    frequencies: Tensor

    def __init__(self, num_heads: int, rank: int = 16, max_distance: int = 2048, num_groups: int | None = None) -> None:
        super().__init__(num_heads, num_groups)
        if rank < 2 or rank % 2:
            raise ValueError(f"rank is {rank}; it has to be even and at least 2.")
        self.rank, self.max_distance = rank, max_distance
        self.alpha = fp32_parameter(self.num_groups, rank // 2)
        self.beta = fp32_parameter(self.num_groups, rank // 2)
        # Saved with the weights: a fit may choose other frequencies than the log-spaced ones.
        self.register_buffer("frequencies", torch.empty(rank // 2, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)
        nn.init.zeros_(self.beta)
        steps = max(self.rank // 2 - 1, 1)
        fill(self.frequencies, [self.max_distance ** (-index / steps) for index in range(self.rank // 2)])

    def _angles(self, position: Tensor) -> Tensor:
        return position.float()[:, None] * self.frequencies.float()

    def group_values(self, offset: Tensor) -> Tensor:
        angles = self._angles(offset)
        return self.alpha.float() @ angles.cos().T + self.beta.float() @ angles.sin().T

    def query_factors(self, position: Tensor) -> Tensor:
        """u_i: `position` (n,) → (heads, n, rank), so that u_i · v_j = R_h(j − i)."""
        cos, sin = self._angles(position).cos(), self._angles(position).sin()
        alpha, beta = self.alpha.float()[:, None], self.beta.float()[:, None]
        u = torch.cat([alpha * cos - beta * sin, alpha * sin + beta * cos], dim=-1)
        return u.repeat_interleave(self.num_heads // self.num_groups, dim=0)

    def key_factors(self, position: Tensor) -> Tensor:
        """v_j: `position` (n,) → (n, rank), the same for every head."""
        angles = self._angles(position)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, max_distance={self.max_distance}"


class PositionBias(nn.Module):
    """A bias and, optionally, its gate: what a converted attention module holds as `position_bias`."""

    def __init__(self, bias: RelativeBias | DisentangledBias, gate: Gate | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.gate = gate

    @property
    def reads_scores(self) -> bool:
        return self.gate is not None and self.gate.reads_scores

    def factor(self, scores: Tensor | None = None, hidden_states: Tensor | None = None) -> Tensor | None:
        return None if self.gate is None else self.gate(scores, hidden_states)

    def forward(self, scores: Tensor, query_offset: int | Tensor = 0, hidden_states: Tensor | None = None) -> Tensor:
        """Scores (batch, heads, queries, keys) with the gated bias added; `query_offset` as in `RelativeBias.forward`."""
        if isinstance(self.bias, DisentangledBias):
            raise ValueError("A disentangled bias needs queries and keys, not scores: call its `bias` with them.")
        bias = toeplitz(self.bias, scores.shape[-2], scores.shape[-1], query_offset, scores.device)
        factor = self.factor(scores, hidden_states)
        return (scores.float() + (bias if factor is None else factor * bias)).to(scores.dtype)


_BIASES: dict[str, type[RelativeBias]] = {bias.kind: bias for bias in (TableBias, LogBias, LinearBias, LowRankBias)}


def build_position_bias(
    parameters: Any,
    *,
    num_heads: int,
    num_key_value_heads: int,
    hidden_size: int,
    head_dim: int | None = None,
    rotary: RotaryPairs | None = None,
    keeps_rope: bool = False,
) -> PositionBias | None:
    """The bias and gate that `parameters` (`DroPEParameters`) ask for, initialised; None where they ask for none.

    Args:
        head_dim, rotary: channels a head and how the source rotates them; None where its positions are a learned table.
        keeps_rope: the layer is one of `rope_layers`, or never rotates; a disentangled bias, which is RoPE taken apart, has no
            place there.

    Raises:
        ValueError: a disentangled bias is asked for and there is no rotation to take apart.
    """
    if parameters.position_bias is None:
        return None
    settings = dict(parameters.position_bias)
    kind = settings.pop("type")
    bias: RelativeBias | DisentangledBias
    if kind == "disentangled":
        if keeps_rope:
            return None
        pairs: Any = rotary
        check_rotation(parameters.position_bias, 0 if pairs is None else 2 * len(pairs.frequencies))
        settings |= {"rope_scale": parameters.rope_scale, "rope_fade": parameters.rope_fade}
        bias = DisentangledBias(num_heads, num_key_value_heads, head_dim or 0, pairs, **settings)
    else:
        groups = {"head": num_heads, "kv_group": num_key_value_heads, "layer": 1}[settings.pop("share")]
        bias = _BIASES[kind](num_heads, num_groups=groups, **settings)
    gate: Gate | None = None
    if parameters.gate is not None:
        settings = dict(parameters.gate)
        kind = settings.pop("type")
        if kind == "head":
            gate = HeadGate(num_heads, **settings)
        elif kind == "query":
            gate = QueryGate(hidden_size, num_heads, **settings)
        else:
            gate = ScoreGate(**settings)
    return PositionBias(bias, gate)

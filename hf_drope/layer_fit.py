"""The calibration of one attention layer: a closed-form start, then a descent towards the source's attention.

Queries and keys are those of one layer over all windows, un-rotated. The target is the source's scores on them: rotated here,
or, where the source has a learned position table, taken from a run of the source.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .descent import descend
from .distance_fit import fit_by_distance, keep_in_range, share
from .rotary_pairs import RotaryPairs

# Queries of one window whose whole rows of scores are in memory at once.
ROWS = 64
# Blocks of that many queries a window, over which statistics are taken.
_BLOCKS = 2
# Rounds in which a fit by distance and the rows' constants are fitted in turn.
_ROUNDS = 3
_HIDDEN = -1e9


class LayerReport(NamedTuple):
    """Mean divergence (nats a query and head) of the layer's attention from the source's: `dropped` without the bias,
    `start` after the closed form, `end` after the descent; `r2` of the least-squares fit where there was one."""

    layer: int
    dropped: float
    start: float
    end: float
    r2: float | None


class LayerStates(NamedTuple):
    """What one attention layer has at hand: `query`, `key` (windows, heads, length, head_dim) un-rotated.

    source_query: without the attention scale that the conversion added.
    """

    module: Any
    position_bias: Any
    window: int | None
    query: Tensor
    key: Tensor
    source_query: Tensor
    mask: Tensor | None
    hidden_states: Tensor | None
    scaling: float

    @property
    def groups(self) -> int:
        return self.query.shape[1] // self.key.shape[1]


class _Sample(NamedTuple):
    """A few queries of one window: `rows` (n,) their positions, `visible` (n, keys), `target` (heads, n, keys) the
    source's scores with unseen keys at `_HIDDEN`."""

    query: Tensor
    key: Tensor
    rows: Tensor
    visible: Tensor
    hidden_states: Tensor | None
    target: Tensor


class LayerFit:
    """The calibration of one layer."""

    def __init__(
        self,
        layer: LayerStates,
        pairs: RotaryPairs | None,
        target: tuple[Tensor, Tensor] | None,
        generator: torch.Generator,
    ) -> None:
        self.layer, self.target, self.generator = layer, target, generator
        self.pairs: Any = pairs
        self.position_bias: Any = layer.position_bias
        self.bias: Any = self.position_bias.bias
        self.windows, self.heads, self.length, _ = layer.query.shape
        self.places = torch.arange(self.length, device=layer.query.device)

    def run(self, steps: int, learning_rate: float) -> LayerReport:
        block = min(ROWS, self.length)
        # The one at the end sees every distance.
        spread = (
            torch.linspace(self.length - block, self.length // 4, _BLOCKS)
            .clamp(max=self.length - block)
            .long()
            .tolist()
        )
        samples = [(window, self.places[start : start + block]) for window in range(self.windows) for start in spread]
        r2 = self._start(samples)
        held = [self._sample(window, self._random_rows()) for window in range(min(self.windows, 4))]
        dropped = sum(self._divergence(s, self._plain(s)) for s in held) / len(held)
        start = sum(self._divergence(s, self._scores(s)) for s in held) / len(held)
        end = start
        if steps:
            before = self._values()
            self._descend(steps, learning_rate)
            end = sum(self._divergence(s, self._scores(s)) for s in held) / len(held)
            if not end < start:
                # An exact start: full steps on rounding noise only lead away from it.
                self._set(before)
                end = start
        return LayerReport(self.layer.module.layer_idx, float(dropped), float(start), float(end), r2)

    def _values(self) -> list[Tensor]:
        return [parameter.clone() for parameter in self.position_bias.parameters()]

    def _set(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.position_bias.parameters(), values, strict=True):
            parameter.copy_(value)

    # Samples and scores.

    def _random_rows(self) -> Tensor:
        # Chosen on the CPU, so that every device takes the same queries.
        return torch.randperm(self.length, generator=self.generator)[:ROWS].sort().values.to(self.places.device)

    def _sample(self, window: int, rows: Tensor) -> _Sample:
        layer = self.layer
        query, key = layer.query[window][:, rows], layer.key[window]
        visible = self.places <= rows[:, None]
        if layer.window is not None:
            visible = visible & (self.places > rows[:, None] - layer.window)
        if layer.mask is not None:
            mask = layer.mask[min(window, len(layer.mask) - 1), 0, rows]
            visible = visible & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
        if self.target is not None:
            target = _products(self.target[0][window][:, rows], self.target[1][window])
        else:
            source_query = layer.source_query[window][:, rows]
            target = _products(_rotate(source_query, rows, self.pairs), _rotate(key, self.places, self.pairs))
        target = (target * layer.scaling).masked_fill(~visible, _HIDDEN)
        hidden = None if layer.hidden_states is None else layer.hidden_states[window : window + 1, rows]
        return _Sample(query, key, rows, visible, hidden, target)

    def _plain(self, sample: _Sample) -> Tensor:
        return (_products(sample.query, sample.key) * self.layer.scaling).masked_fill(~sample.visible, _HIDDEN)

    def _gate(self, sample: _Sample, scores: Tensor) -> Any:
        factor = self.position_bias.factor(scores[None], sample.hidden_states)
        return None if factor is None else factor[0]

    def _scores(self, sample: _Sample) -> Tensor:
        """The layer's own scores of a sample, bias included: (heads, n, keys)."""
        scaling = self.layer.scaling
        if self.bias.kind == "disentangled":
            offset = sample.rows - self.places[: len(sample.rows)]
            query, key = sample.query[None], sample.key[None]
            if self.position_bias.reads_scores or self.bias.is_dense:
                content = self.bias.content_scores(query, key, offset)[0] * scaling
                factor = self._gate(sample, content)
                terms = self.bias.scores(query, key, offset)[0] * scaling
                scores = content + (terms if factor is None else factor * terms)
            else:
                factor = self.position_bias.factor(None, sample.hidden_states)
                wide_query, wide_key = self.bias(query, key, offset, factor)
                scores = _products(wide_query[0], wide_key[0]) * scaling
        else:
            plain = _products(sample.query, sample.key) * scaling
            values = self.bias.values(-self.places)
            distance = (sample.rows[:, None] - self.places).clamp(min=0)
            factor = self._gate(sample, plain)
            added = values[:, distance]
            scores = plain + (added if factor is None else factor * added)
        return scores.masked_fill(~sample.visible, _HIDDEN)

    @staticmethod
    def _divergence(sample: _Sample, scores: Tensor) -> Tensor:
        """KL(source ‖ layer) of the attention probabilities, the mean over heads and queries."""
        wanted, got = sample.target.log_softmax(-1), scores.log_softmax(-1)
        return (wanted.exp() * (wanted - got)).sum(-1).mean()

    # Descent.

    def _descend(self, steps: int, learning_rate: float) -> None:
        def loss(step: int) -> Tensor:
            sample = self._sample(step % self.windows, self._random_rows())
            return self._divergence(sample, self._scores(sample))

        descend([p for p in self.position_bias.parameters() if p.numel()], loss, steps, learning_rate)
        keep_in_range(self.bias)

    # Closed forms.

    def _start(self, samples: list[tuple[int, Tensor]]) -> float | None:
        if self.bias.kind == "disentangled":
            self._start_disentangled(samples)
            return None
        if self.bias.kind == "low_rank" and self.pairs is not None:
            self._start_low_rank(samples)
            return None
        return self._start_by_distance(samples)

    def _start_disentangled(self, samples: list[tuple[int, Tensor]]) -> None:
        bias = self.bias
        query_mean, key_mean = self.layer.query.mean((0, 2)), self.layer.key.mean((0, 2))
        bias.query_mean.copy_(share(query_mean, len(bias.query_mean)))
        bias.key_mean.copy_(share(key_mean, len(bias.key_mean)))
        if self.position_bias.gate is not None:
            # The terms are exact in full strength.
            self.position_bias.gate.open()
        if bias.gain is None and bias.pairs is None:
            return
        turn, energy = self._mean_rotation(samples)
        if bias.gain is not None:
            total = share(energy, len(bias.gain), torch.sum)
            average = share(turn * energy[..., None], len(bias.gain), torch.sum) / total[..., None].clamp(min=1e-9)
            bias.gain.copy_(average * bias.source.amplitude**2)
        if bias.pairs is not None:
            # What rotation changes in the terms: nothing where a pair hardly turns over the attended distances.
            mu_q, mu_k = bias.means()
            power_q = _pair_power(self.layer.query, bias).mean((0, 2)), _pair_power(mu_q, bias)[:, 0]
            power_k = _pair_power(self.layer.key, bias).mean((0, 2)), _pair_power(mu_k, bias)[:, 0]
            spread = [power.repeat_interleave(self.layer.groups, 0) for power in power_k]
            moved = (power_q[0] * spread[1] + power_q[1] * spread[0]) * (2 - 2 * turn[..., 0])
            best = share(moved, self.layer.key.shape[1], torch.sum).topk(bias.pairs.shape[-1], -1).indices
            bias.pairs.copy_(best.sort(-1).values)

    def _mean_rotation(self, samples: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        """The mean of R_Δ over attended keys, as (heads, pairs, 2) cos-like and sin-like, and its weights (heads, pairs).

        Each key counts with the source's attention and with the size of its pair's content: the least squares of the centred
        scores where the pairs are independent of each other and of the distance.
        """
        bias = self.bias
        mu_q, mu_k = bias.means()
        angle = self.places[:, None] * torch.tensor(bias.source.frequencies, device=self.places.device)
        turns = torch.cat([angle.cos(), angle.sin(), torch.ones_like(angle)], -1)
        cos_sum = sin_sum = weight_sum = self.layer.query.new_zeros(())
        for window, rows in samples:
            sample = self._sample(window, rows)
            weight = sample.target.softmax(-1)
            power_q = _pair_power(sample.query - mu_q, bias)
            power_k = _pair_power(sample.key - mu_k, bias).repeat(1, 1, 3) * turns
            summed = weight @ power_k.repeat_interleave(self.layer.groups, 0)
            cos_j, sin_j, total = summed.chunk(3, -1)
            cos_i, sin_i = angle[rows].cos(), angle[rows].sin()
            # e^{iω(j − i)}: the turn of keys against queries.
            cos_sum = cos_sum + (power_q * (cos_j * cos_i + sin_j * sin_i)).sum(1)
            sin_sum = sin_sum + (power_q * (sin_j * cos_i - cos_j * sin_i)).sum(1)
            weight_sum = weight_sum + (power_q * total).sum(1)
        turn = torch.stack([cos_sum, sin_sum], -1) / weight_sum[..., None].clamp(min=1e-9)
        return turn, weight_sum

    def _start_low_rank(self, samples: list[tuple[int, Tensor]]) -> None:
        """α_r = s·(μ_q·μ_k)_r and β_r, its turned twin, at the source's frequencies with the most energy in the layer."""
        # The bias is added as it is, whatever scales the queries.
        query_mean, key_mean = self.layer.source_query.mean((0, 2)), self.layer.key.mean((0, 2))
        key_mean = key_mean.repeat_interleave(self.layer.groups, 0)
        (q1, q2), (k1, k2) = (_halves(mean, self.pairs) for mean in (query_mean, key_mean))
        scale = self.layer.scaling * self.pairs.amplitude**2 / self._mean_gate(samples)
        alpha, beta = (q1 * k1 + q2 * k2) * scale, (q2 * k1 - q1 * k2) * scale
        frequencies = torch.tensor(self.pairs.frequencies, device=alpha.device)
        count = min(self.bias.alpha.shape[-1], len(frequencies))
        # A pair that hardly turns within the window adds a constant, which softmax cancels.
        moved = (alpha**2 + beta**2).sum(0) * (self.length * frequencies.abs()).clamp(max=1.0) ** 2
        chosen = moved.topk(count).indices.sort().values
        groups = self.bias.num_groups
        self.bias.frequencies[:count] = frequencies[chosen]
        self.bias.alpha.zero_()[:, :count] = share(alpha[:, chosen], groups)
        self.bias.beta.zero_()[:, :count] = share(beta[:, chosen], groups)

    def _mean_gate(self, samples: list[tuple[int, Tensor]]) -> Tensor | float:
        """Mean gate by head (heads, 1), over attended keys; 1 without a gate."""
        if self.position_bias.gate is None:
            return 1.0
        total = self.layer.query.new_zeros(self.heads, 1)
        for window, rows in samples:
            sample = self._sample(window, rows)
            factor = self._gate(sample, self._plain(sample)).expand(self.heads, len(rows), -1)
            weight = sample.target.softmax(-1) if factor.shape[-1] > 1 else total.new_ones(1)
            total += (factor * weight).sum(-1).mean(-1, keepdim=True)
        return (total / len(samples)).clamp(min=1e-3)

    def _start_by_distance(self, samples: list[tuple[int, Tensor]]) -> float:
        """Weighted least squares on what the source's encoding adds to the scores; the weighted R² of the bias's form.

        Softmax cancels a constant of each row. Taking out each row's mean is a first guess of it; fitting both in turn is
        exact for a source that is a function of distance, and not always better for one that is not: the better one stays.
        """
        parts = [self._added(self._sample(window, rows)) for window, rows in samples]
        r2 = self._by_distance(parts, None)
        first, before = self._mean_divergence(samples), self._values()
        for _ in range(_ROUNDS):
            joint = self._by_distance(parts, self.bias.values(-self.places))
        if self._mean_divergence(samples) < first:
            return joint
        self._set(before)
        return r2

    def _mean_divergence(self, samples: list[tuple[int, Tensor]]) -> float:
        total = 0.0
        for window, rows in samples:
            sample = self._sample(window, rows)
            total += float(self._divergence(sample, self._scores(sample)))
        return total / len(samples)

    def _added(self, sample: _Sample) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the source adds to the scores, its weight (heads, n, keys), the gate and the distances (n, keys)."""
        plain = self._plain(sample)
        # Both ends count: where the source looks, and where the dropped model wrongly does.
        weight = (sample.target.softmax(-1) + plain.softmax(-1)) / 2
        added = (sample.target - plain).masked_fill(~sample.visible, 0.0)
        factor = self._gate(sample, plain)
        factor = added.new_ones(1) if factor is None else factor
        return added, weight, factor, (sample.rows[:, None] - self.places).clamp(min=0)

    def _by_distance(self, parts: list[tuple[Tensor, Tensor, Tensor, Tensor]], values: Tensor | None) -> float:
        """One fit; `values` (heads, distances) of the bias tell what of a row is its constant."""
        above, below = (self.layer.query.new_zeros(self.heads, self.length) for _ in range(2))
        for added, weight, factor, distance in parts:
            rest = added if values is None else added - factor * values[:, distance]
            centred = added - (weight * rest).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
            places = distance.flatten().expand(self.heads, -1)
            for total, part in ((above, weight * factor * centred), (below, weight * factor**2)):
                total.scatter_add_(1, places, part.expand_as(added).flatten(1))
        return fit_by_distance(self.bias, above, below)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """(heads, n, d) · (key/value heads, keys, d) → (heads, n, keys)."""
    grouped = a.unflatten(0, (b.shape[0], a.shape[0] // b.shape[0]))
    return (grouped @ b[:, None].transpose(-1, -2)).flatten(0, 1)


def _halves(x: Tensor, pairs: Any) -> tuple[Tensor, Tensor]:
    width = 2 * len(pairs.frequencies)
    if pairs.interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    return x[..., : width // 2], x[..., width // 2 : width]


def _rotate(x: Tensor, position: Tensor, pairs: Any) -> Tensor:
    """The source's rotation of (heads, n, head_dim); the order of the channels does not matter for a dot product."""
    angle = position[:, None] * torch.tensor(pairs.frequencies, device=position.device)
    cos, sin = angle.cos() * pairs.amplitude, angle.sin() * pairs.amplitude
    first, second = _halves(x, pairs)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * len(pairs.frequencies) :]], -1)


def unrotate(x: Tensor, pairs: Any) -> Tensor:
    """(..., n, head_dim) as the source rotated it, positions 0 to n − 1 → what it was before."""
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * torch.tensor(pairs.frequencies, device=x.device)
    cos, sin = angle.cos() / pairs.amplitude, angle.sin() / pairs.amplitude
    first, second = _halves(x.float(), pairs)
    halves = first * cos + second * sin, second * cos - first * sin
    turned = torch.stack(halves, -1).flatten(-2) if pairs.interleaved else torch.cat(halves, -1)
    return torch.cat([turned, x[..., 2 * len(pairs.frequencies) :].float()], -1)


def _pair_power(x: Tensor, bias: Any) -> Tensor:
    first, second = _halves(x, bias.source)
    return first**2 + second**2

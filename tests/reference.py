"""Attention with a position bias and gate as the formulas say it: float64, one number at a time, nothing shared with the code.

`Recorder` captures what the attention function of a converted model got and gave back, so that a model's layers can be
compared with `reference_attention` on their own projected queries, keys and values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from hf_drope import attention_drope

SMALLEST_SLOPE = 0.01


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def t5_bucket(delta: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """arXiv 1910.10683: half the buckets of a side are single distances, the rest grow logarithmically."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if delta > 0 else 0
        distance = abs(delta)
    else:
        distance = max(-delta, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    growth = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return first + min(exact + int(growth), num_buckets - 1)


def reference_bias(bias: Any, settings: dict[str, Any], head: int, delta: int) -> float:
    """R_h(Δ) of one head, from the settings' formula and the numbers that `bias` holds."""
    group = head // (bias.num_heads // bias.num_groups)
    kind = settings["type"]
    distance = abs(delta)
    side = 1 if settings.get("bidirectional") and delta > 0 else 0
    if kind == "table":
        if settings["num_buckets"] is None:
            last = settings["max_distance"] - 1
            row = max(-last, min(last, delta)) + last
        else:
            row = t5_bucket(delta, settings["num_buckets"], settings["max_distance"], settings["bidirectional"])
        return bias.weight[row, group].item()
    if kind == "log":
        gamma, a = bias.gamma[side, group].item(), max(bias.a[side, group].item(), SMALLEST_SLOPE)
        if settings["init"] == "kerple":
            gamma = max(gamma, SMALLEST_SLOPE)
        return settings["sign"] * gamma * math.log(1 + a * distance)
    if kind == "linear":
        return -bias.slopes[side, group].item() * distance
    assert kind == "low_rank"
    total = 0.0
    for term in range(settings["rank"] // 2):
        angle = bias.frequencies[term].item() * delta
        total += bias.alpha[group, term].item() * math.cos(angle) + bias.beta[group, term].item() * math.sin(angle)
    return total


class ReferenceDisentangled:
    """The disentangled score of one query and one key, RoPE dropped from its content, from the numbers that `bias` holds.

    With q̃ = q − μ_q and k̃ = k − μ_k, the content is q̃'M k̃ + μ_q'k̃ + q̃'μ_k + μ_q'μ_k. What a gate multiplies is the sum of
    a'(A²R_Δ − 1)b over the terms: (μ_q, μ_k), (q̃, μ_k) and (μ_q, k̃), and over the pairs of channels that rotate in them.
    """

    def __init__(self, bias: Any, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.heads, self.groups = bias.num_heads, bias.num_key_value_heads
        self.query_mean, self.key_mean = bias.query_mean.tolist(), bias.key_mean.tolist()
        self.gain = None if settings["content"] == "identity" else bias.gain.tolist()
        self.frequencies, self.amplitude = bias.frequencies.tolist(), bias.source.amplitude
        count = len(self.frequencies)
        self.channels = [(2 * r, 2 * r + 1) if bias.source.interleaved else (r, r + count) for r in range(count)]
        self.chosen = [list(range(count))] * self.groups if settings["rank"] is None else bias.pairs.long().tolist()

    def turned(self, a: list[float], b: list[float], pair: int, cos: float, sin: float) -> float:
        """a'(cos, −sin; sin, cos)b in one pair of channels."""
        x, y = self.channels[pair]
        return cos * (a[x] * b[x] + a[y] * b[y]) + sin * (a[y] * b[x] - a[x] * b[y])

    def scores(self, query: list[float], key: list[float], head: int, delta: int) -> tuple[float, float]:
        """Content and position terms, before scaling."""
        group = head // (self.heads // self.groups)
        # One mean per head, per group of heads or per layer.
        query_set = head * len(self.query_mean) // self.heads
        query_mean, key_mean = self.query_mean[query_set], self.key_mean[group * len(self.key_mean) // self.groups]
        q = [x - mean for x, mean in zip(query, query_mean, strict=True)]
        k = [x - mean for x, mean in zip(key, key_mean, strict=True)]
        content = sum(m * x for m, x in zip(query_mean, k, strict=True))
        content += sum((x + m) * n for x, m, n in zip(q, query_mean, key_mean, strict=True))
        rotated = {channel for pair in self.channels for channel in pair}
        content += sum(q[c] * k[c] for c in range(len(q)) if c not in rotated)
        for pair in range(len(self.channels)):
            cos, sin = (1.0, 0.0) if self.gain is None else self.gain[query_set][pair]
            content += self.turned(q, k, pair, cos, sin)
        scaling = self.settings["position_scaling"]
        if scaling is not None and scaling["type"] == "clip":
            delta = max(delta, -scaling["max_distance"])
        sides = {"p2p": (query_mean, key_mean), "c2p": (q, key_mean), "p2c": (query_mean, k)}
        terms = 0.0
        for term in self.settings["terms"]:
            for pair in self.chosen[group]:
                angle, size = self.frequencies[pair] * delta, self.amplitude**2
                terms += self.turned(*sides[term], pair, size * math.cos(angle) - 1, size * math.sin(angle))
        return content, self.settings["terms_scale"] * terms


def reference_gate(gate: Any, settings: dict[str, Any] | None, head: int, score: float, hidden: list[float]) -> float:
    if settings is None:
        return 1.0
    if settings["type"] == "head":
        factor = sigmoid(gate.g[head].item())
        return factor * math.exp(gate.t[head].item()) if settings["exponential"] else factor
    if settings["type"] == "score":
        return sigmoid(score / settings["temperature"])
    logit = sum(w * x for w, x in zip(gate.weight[head].tolist(), hidden, strict=True)) + gate.bias[head].item()
    return sigmoid(logit / settings["temperature"])


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden_states: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    position_bias: Any,
    settings: dict[str, Any],
    query_offset: int = 0,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output (batch, queries, heads, head_dim) and weights (batch, heads, queries, keys) in float64.

    query (batch, heads, queries, head_dim), key and value (batch, key_value_heads, keys, head_dim), hidden_states (batch,
    queries, hidden), visible (batch, keys): False where a key is padding. A query that sees no key gives zeros.
    """
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1], key.shape[2]
    q, k, v, x = (tensor.double().tolist() for tensor in (query, key, value, hidden_states))
    bias_settings, disentangled = settings["position_bias"], None
    if bias_settings is not None and bias_settings["type"] == "disentangled":
        disentangled = ReferenceDisentangled(position_bias.bias, bias_settings)
    output = torch.zeros(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    weights = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(queries):
                logits = {}
                for j in range(keys):
                    delta = j - (i + query_offset)
                    if (causal and delta > 0) or not visible[b, j]:
                        continue
                    score, bias = scaling * sum(q[b][h][i][d] * k[b][g][j][d] for d in range(width)), 0.0
                    if disentangled is not None:
                        score, bias = (scaling * x for x in disentangled.scores(q[b][h][i], k[b][g][j], h, delta))
                    elif bias_settings is not None:
                        bias = reference_bias(position_bias.bias, bias_settings, h, delta)
                    if bias_settings is not None:
                        score += bias * reference_gate(position_bias.gate, settings["gate"], h, score, x[b][i])
                    logits[j] = score
                if not logits:
                    continue
                highest = max(logits.values())
                total = sum(math.exp(score - highest) for score in logits.values())
                for j, score in logits.items():
                    weight = math.exp(score - highest) / total
                    weights[b, h, i, j] = weight
                    for d in range(value.shape[-1]):
                        output[b, i, h, d] += weight * v[b][g][j][d]
    return output, weights


class Call(NamedTuple):
    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    query_offset: int
    hidden_states: torch.Tensor | None
    output: torch.Tensor
    weights: torch.Tensor | None


class Recorder:
    """Every call of the converted attention function while the `monkeypatch` given to it is active."""

    def __init__(self, monkeypatch: Any) -> None:
        self.calls: list[Call] = []
        original = attention_drope.attend

        def record(stock, implementation, module, query, key, value, attention_mask, drope_position=None, **kwargs):
            scaling = kwargs.get("scaling")
            output, weights = original(
                stock, implementation, module, query, key, value, attention_mask, drope_position, **kwargs
            )
            offset, hidden = 0, None
            if drope_position is not None:
                offset = int(drope_position.query_offset) - int(drope_position.key_offset)
                hidden = drope_position.hidden_states
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            # A cache may hold more with every key.
            key = key[..., : query.shape[-1]]
            self.calls.append(Call(module, query, key, value, attention_mask, scaling, offset, hidden, output, weights))
            return output, weights

        monkeypatch.setattr(attention_drope, "attend", record)


@torch.no_grad()
def randomise_position(model: Any, seed: int = 0) -> Any:
    """Give every position parameter a value of order one, so that a bias that is left out changes the result."""
    generator = torch.Generator().manual_seed(seed)
    for bias in model.position_biases():
        for name, parameter in bias.named_parameters():
            if name in ("bias.gamma", "bias.a", "bias.slopes"):
                parameter.uniform_(0.3, 1.5, generator=generator)
            else:
                parameter.normal_(generator=generator)
        pairs = getattr(bias.bias, "pairs", None)
        if pairs is not None:
            count = bias.bias.frequencies.numel()
            for head in pairs:
                head.copy_(torch.randperm(count, generator=generator)[: len(head)])
    return model

"""Gates: the factor on a position bias, one number a head, or a function of the query or of the score itself.

This file travels with every checkpoint and imports torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .fp32_module import Fp32Module, fp32_parameter

# Its sigmoid is 0.95, where the slope is still a fifth of the steepest.
_OPEN = 3.0


class Gate(Fp32Module):
    """Base of the gates: a factor on the bias, broadcastable to (batch, heads, queries, keys)."""

    reads_scores = False
    reads_input = False

    def forward(self, scores: Tensor | None = None, hidden_states: Tensor | None = None) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has to define forward.")

    def constant(self) -> Tensor | None:
        """The factor where the layer's input says nothing, (heads,) in fp32; None where the scores decide."""
        return None

    def open(self) -> None:
        """Bring the factor to 1, or as near as leaves a gradient; a gate without parameters stays as it is."""


class HeadGate(Gate):
    """σ(g_h) · exp(t_h), one pair a head: g starts at 1, t at 0; `exponential=False` leaves the second factor out."""

    def __init__(self, num_heads: int, exponential: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.g = fp32_parameter(num_heads)
        self.t = fp32_parameter(num_heads) if exponential else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.g)
        if self.t is not None:
            nn.init.zeros_(self.t)

    @torch.no_grad()
    def open(self) -> None:
        if self.t is None:
            self.g.fill_(_OPEN)
        else:
            self.t.copy_(-nn.functional.logsigmoid(self.g))

    def constant(self) -> Tensor:
        factor = self.g.float().sigmoid()
        return factor if self.t is None else factor * self.t.float().exp()

    def forward(self, scores: Tensor | None = None, hidden_states: Tensor | None = None) -> Tensor:
        return self.constant()[None, :, None, None]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, exponential={self.t is not None}"


class TemperatureGate(Gate):
    """A gate with a temperature T > 0, held as a buffer so that a schedule may move it without recompiling."""

    temperature: Tensor

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.empty((), dtype=torch.float32), persistent=False)
        self.set_temperature(temperature)

    def set_temperature(self, temperature: float) -> None:
        if not temperature > 0:
            raise ValueError(f"gate temperature is {temperature!r}; it has to be above 0.")
        self._initial = float(temperature)
        with torch.no_grad():
            self.temperature.fill_(self._initial)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.temperature, self._initial)

    def extra_repr(self) -> str:
        return f"temperature={self._initial:g}"


class QueryGate(TemperatureGate):
    """σ((x_i W + b)_h / T) of the layer's input x_i; W starts at 0 and b at 1."""

    reads_input = True

    def __init__(self, hidden_size: int, num_heads: int, temperature: float = 1.0) -> None:
        super().__init__(temperature)
        self.weight = fp32_parameter(num_heads, hidden_size)
        self.bias = fp32_parameter(num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.bias)

    @torch.no_grad()
    def open(self) -> None:
        self.weight.zero_()
        self.bias.copy_(_OPEN * self.temperature)

    def constant(self) -> Tensor:
        return (self.bias.float() / self._initial).sigmoid()

    def forward(self, scores: Tensor | None = None, hidden_states: Tensor | None = None) -> Tensor:
        """`hidden_states` (batch, queries, hidden) → (batch, heads, queries, 1)."""
        if hidden_states is None:
            raise ValueError("A query gate reads the layer's input; pass hidden_states (batch, queries, hidden).")
        logits = nn.functional.linear(hidden_states.float(), self.weight.float(), self.bias.float())
        return (logits.float() / self.temperature).sigmoid().transpose(1, 2)[..., None]

    def extra_repr(self) -> str:
        heads, hidden = self.weight.shape
        return f"hidden_size={hidden}, num_heads={heads}, {super().extra_repr()}"


class ScoreGate(TemperatureGate):
    """σ(s_ij / T): the content score decides how much position counts. No parameters."""

    reads_scores = True

    def forward(self, scores: Tensor | None = None, hidden_states: Tensor | None = None) -> Tensor:
        """`scores` (batch, heads, queries, keys), scaled as for the softmax → the same shape in fp32."""
        if scores is None:
            raise ValueError("A score gate reads the attention scores; pass scores (batch, heads, queries, keys).")
        return (scores.float() / self.temperature).sigmoid()

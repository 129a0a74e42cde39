"""The staged schedule: which stage a training step is in, how strong RoPE is there, and how warm the gate.

    warmup       RoPE's strength falls from 1 to 0
    transition   RoPE is gone; the gate's temperature falls
    finetune     the temperature is at its floor

Everything is a function of the step and the total number of steps and of nothing else, so a resumed run needs no memory.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

STAGES = ("warmup", "transition", "finetune")
Curve = str | Callable[[float], float]
_STEEPNESS = 5.0

# Each falls from 1 at progress 0 to 0 at progress 1, but for "constant".
_CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "exponential": lambda p: (math.exp(-_STEEPNESS * p) - math.exp(-_STEEPNESS)) / (1 - math.exp(-_STEEPNESS)),
    "constant": lambda p: 1.0,
}


class ScheduleState(NamedTuple):
    """`stage` is one of `STAGES`; `rope_scale` 1 to 0; `temperature` above 0."""

    stage: str
    rope_scale: float
    temperature: float


@dataclass(frozen=True)
class DroPESchedule:
    """Lengths and curves of the stages.

    Args:
        warmup, transition: whole optimizer steps, or a float in [0, 1] as a share of all steps; the rest is "finetune".
        rope_curve: how the strength falls during warm-up: "linear", "cosine", "exponential", or a callable from progress
            in [0, 1) to a strength.
        temperature_curve: the same for the temperature during the transition, or "constant", which never moves it. Linear
            is T(t) = max(floor, T_0·(1 − t / T_total)) with t and T_total counted in the transition.
        temperature_floor, initial_temperature: T is never below the first and starts at the second.

    Raises:
        ValueError: one sentence with the value and what is allowed.
    """

    warmup: int | float = 0.3
    transition: int | float = 0.3
    rope_curve: Curve = "linear"
    temperature_curve: Curve = "linear"
    temperature_floor: float = 0.1
    initial_temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("warmup", "transition"):
            value = getattr(self, name)
            is_share = isinstance(value, float) and 0.0 <= value <= 1.0
            if not is_share and not (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
                raise ValueError(
                    f"{name} is {value!r}; it has to be whole steps of at least 0 or a share from 0.0 to 1.0."
                )
        shares = [value for value in (self.warmup, self.transition) if isinstance(value, float)]
        if sum(shares) > 1.0 + 1e-9:
            raise ValueError(
                f"warmup and transition take {sum(shares):g} of the run; together they have to be at most 1.0."
            )
        for name, extra in (("rope_curve", ()), ("temperature_curve", ("constant",))):
            value = getattr(self, name)
            known = ("linear", "cosine", "exponential", *extra)
            if not callable(value) and value not in known:
                nearest = difflib.get_close_matches(str(value), known, n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(f"{name} is {value!r}; it has to be one of {', '.join(known)}, or a callable.{hint}")
        if not 0.0 < self.temperature_floor <= self.initial_temperature:
            raise ValueError(
                f"temperature_floor is {self.temperature_floor!r}; it has to be above 0 and at most "
                f"initial_temperature ({self.initial_temperature!r})."
            )

    def stage_ends(self, total_steps: int) -> tuple[int, int]:
        """The steps at which the warm-up and the transition are over.

        Raises:
            ValueError: stages given in steps do not fit into `total_steps`.
        """
        lengths = [
            value if isinstance(value, int) else round(value * total_steps) for value in (self.warmup, self.transition)
        ]
        given = sum(value for value in (self.warmup, self.transition) if isinstance(value, int))
        if given > total_steps:
            raise ValueError(f"warmup and transition ask for {given} steps, but the whole run has {total_steps}.")
        end = min(lengths[0], total_steps)
        return end, min(end + lengths[1], total_steps)

    def at(self, step: int, total_steps: int) -> ScheduleState:
        """The state for the step that follows `step` finished ones; at `total_steps` and after, the final state."""
        if total_steps <= 0:
            return ScheduleState("finetune", 0.0, self._temperature(1.0))
        warmup_end, transition_end = self.stage_ends(total_steps)
        if step < warmup_end:
            strength = _value(self.rope_curve, step / warmup_end)
            return ScheduleState("warmup", min(max(strength, 0.0), 1.0), self.initial_temperature)
        if step < transition_end:
            progress = (step - warmup_end) / (transition_end - warmup_end)
            return ScheduleState("transition", 0.0, self._temperature(progress))
        return ScheduleState("finetune", 0.0, self._temperature(1.0))

    def _temperature(self, progress: float) -> float:
        return max(self.temperature_floor, self.initial_temperature * _value(self.temperature_curve, progress))

    def describe(self, total_steps: int) -> list[str]:
        """One line a stage: its steps and what moves in it."""
        first, second = self.stage_ends(total_steps)
        floor = self._temperature(1.0)
        return [
            f"warmup: steps 0 to {first}, rope_scale 1 → 0 ({_name(self.rope_curve)})",
            f"transition: steps {first} to {second}, temperature {self.initial_temperature:g} → {floor:g} "
            f"({_name(self.temperature_curve)})",
            f"finetune: steps {second} to {total_steps}, temperature {floor:g}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; refuses curves that are callables."""
        for name in ("rope_curve", "temperature_curve"):
            if callable(getattr(self, name)):
                raise ValueError(f"{name} is a callable and cannot be stored; name one of {', '.join(_CURVES)}.")
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> DroPESchedule:
        known = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                nearest = difflib.get_close_matches(key, known, n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(f"Unknown schedule setting {key!r}; known are {', '.join(known)}.{hint}")
        return cls(**settings)


def _value(curve: Curve, progress: float) -> float:
    return curve(progress) if callable(curve) else _CURVES[curve](progress)


def _name(curve: Curve) -> str:
    return getattr(curve, "__name__", "callable") if callable(curve) else curve


def learning_rate_warmup_steps(max_steps: int, steps: int = 5000, share: float = 0.1) -> int:
    """Steps of linear learning-rate warm-up: `steps`, but at most `share` of a short run."""
    return min(steps, math.ceil(max_steps * share))

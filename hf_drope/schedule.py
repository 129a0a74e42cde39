"""The staged schedule: which stage a training step is in, how strong RoPE is there, and how warm the gate.

    warmup       RoPE's strength falls from 1 to 0
    transition   RoPE is gone; the gate's temperature falls
    finetune     the temperature is at its floor

Everything is a function of the step and the total number of steps and of nothing else, so a resumed run needs no memory.
With `DroPESchedule(warmup=0, transition=1.0)` the temperature is T(t) = max(0.1, 1 − t / T_total) over the whole run.
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
# 0.1 · 30 is a hair above 3.
_TOLERANCE = 1e-9

# Each falls from 1 at progress 0 to 0 at progress 1, but for "constant".
_CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "exponential": lambda p: (math.exp(-_STEEPNESS * p) - math.exp(-_STEEPNESS)) / (1 - math.exp(-_STEEPNESS)),
    "constant": lambda p: 1.0,
}


class ScheduleState(NamedTuple):
    """`stage` is one of `STAGES`; `rope_scale` 1 to 0; `temperature` above 0; `terms_scale` 1 to 0, None to leave it."""

    stage: str
    rope_scale: float
    temperature: float
    terms_scale: float | None = None


@dataclass(frozen=True)
class DroPESchedule:
    """Lengths and curves of the stages.

    Args:
        warmup, transition: whole optimizer steps (int), or a share of all steps (float in [0, 1], rounded up, so that 1 is one
            step and 1.0 the whole run); the rest is "finetune".
        rope_curve: how the strength falls during warm-up: "linear", "cosine", "exponential", or a callable from progress
            in (0, 1) to a strength in [0, 1]; the strength is 1 at step 0 and 0 after the warm-up whatever the curve.
        temperature_curve: the same for T / T_0 during the transition, or "constant", which never moves T; the fine-tuning
            stage has the value at progress 1. Linear is T(t) = max(floor, T_0·(1 − t / T_total)) with t and T_total counted
            in the transition; in the warm-up T is T_0.
        temperature_floor, initial_temperature: T is never below the first and starts at the second (T_0); None is 1, or, for
            `recalibrate`, the temperature of the model's gate.
        fade_terms: fade the position terms of a disentangled bias out as well, during the transition, from 1 to 0: they are
            then the scaffold between RoPE and no position at all.
        terms_curve: how: "linear", "cosine", "exponential", or a callable from progress in (0, 1) to a strength.

    Raises:
        ValueError: one sentence with the value, what is allowed and the nearest match.
    """

    warmup: int | float = 0.3
    transition: int | float = 0.3
    rope_curve: Curve = "linear"
    temperature_curve: Curve = "linear"
    temperature_floor: float = 0.1
    initial_temperature: float | None = None
    fade_terms: bool = False
    terms_curve: Curve = "linear"

    def __post_init__(self) -> None:
        for name in ("warmup", "transition"):
            value = getattr(self, name)
            is_share = isinstance(value, float) and 0.0 <= value <= 1.0
            if not is_share and not (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
                raise ValueError(
                    f"{name} is {value!r}; it has to be whole steps of at least 0 or a share from 0.0 to 1.0."
                )
        shares = [value for value in (self.warmup, self.transition) if isinstance(value, float)]
        if sum(shares) > 1.0 + _TOLERANCE:
            raise ValueError(
                f"warmup and transition take {sum(shares):g} of the run; together they have to be at most 1.0."
            )
        if not isinstance(self.fade_terms, bool):
            raise ValueError(f"fade_terms is {self.fade_terms!r}; it has to be True or False.")
        for name, extra in (("rope_curve", ()), ("terms_curve", ()), ("temperature_curve", ("constant",))):
            value = getattr(self, name)
            known = ("linear", "cosine", "exponential", *extra)
            if not callable(value) and value not in known:
                nearest = difflib.get_close_matches(str(value), known, n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(f"{name} is {value!r}; it has to be one of {', '.join(known)}, or a callable.{hint}")
        for name in ("temperature_floor", "initial_temperature"):
            value = getattr(self, name)
            optional = name == "initial_temperature" and value is None
            if not optional and (
                not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < math.inf
            ):
                raise ValueError(f"{name} is {value!r}; it has to be a number above 0.")
        if self.temperature_floor > self._start:
            raise ValueError(
                f"temperature_floor is {self.temperature_floor!r}; it has to be at most initial_temperature, "
                f"{self._start!r}."
            )

    @property
    def _start(self) -> float:
        return 1.0 if self.initial_temperature is None else float(self.initial_temperature)

    def stage_ends(self, total_steps: int) -> tuple[int, int]:
        """The steps at which the warm-up and the transition are over.

        Raises:
            ValueError: the stages do not fit into `total_steps`.
        """
        warmup, transition = (
            value if isinstance(value, int) else value * total_steps for value in (self.warmup, self.transition)
        )
        if warmup + transition > total_steps + _TOLERANCE * max(total_steps, 1):
            raise ValueError(
                f"warmup={self.warmup!r} and transition={self.transition!r} ask for {warmup + transition:g} steps, "
                f"but the whole run has {total_steps}."
            )
        warmup_end = _round_up(warmup)
        # Two shares of a whole, each rounded up, may be one step more than it.
        return warmup_end, min(warmup_end + _round_up(transition), total_steps)

    def at(self, step: int, total_steps: int) -> ScheduleState:
        """The state after `step` finished steps of a run of `total_steps`, with which the next step trains.

        At `total_steps`, past it, and for a run of no steps it is the final state.

        Raises:
            ValueError: the stages do not fit into `total_steps`, `step` is negative, or a callable curve goes out of range.
        """
        if step < 0:
            raise ValueError(f"step is {step}; it has to be at least 0.")
        if total_steps <= 0:
            return self.final()
        warmup_end, transition_end = self.stage_ends(total_steps)
        if step < warmup_end:
            strength = self._strength("rope_curve", step / warmup_end)
            return ScheduleState("warmup", strength, self._start, 1.0 if self.fade_terms else None)
        if step < transition_end:
            progress = (step - warmup_end) / (transition_end - warmup_end)
            terms = self._strength("terms_curve", progress) if self.fade_terms else None
            return ScheduleState("transition", 0.0, self._temperature(progress), terms)
        return self.final()

    def final(self) -> ScheduleState:
        """The state at the end of every run."""
        return ScheduleState("finetune", 0.0, self._temperature(1.0), 0.0 if self.fade_terms else None)

    def _strength(self, name: str, progress: float) -> float:
        if progress == 0.0:
            return 1.0
        strength = _value(getattr(self, name), progress)
        if not 0.0 <= strength <= 1.0:
            raise ValueError(f"{name} gives {strength!r} at progress {progress:g}; it has to stay in 0.0 to 1.0.")
        return float(strength)

    def _temperature(self, progress: float) -> float:
        share = _value(self.temperature_curve, progress)
        if not math.isfinite(share):
            raise ValueError(
                f"temperature_curve gives {share!r} at progress {progress:g}; it has to be a finite number."
            )
        return max(float(self.temperature_floor), self._start * share)

    def describe(self, total_steps: int, gated: bool = True) -> list[str]:
        """One line a stage that has steps: which ones, and what moves in it; `gated`: the model's gate has a temperature.

        Raises:
            ValueError: the stages do not fit into `total_steps`.
        """
        first, second = self.stage_ends(total_steps)
        start, floor = f"{self._start:g}", f"{self._temperature(1.0):g}"
        transition = [f"temperature {start} → {floor} ({_name(self.temperature_curve)})"] if gated else []
        transition += [f"position terms 1 → 0 ({_name(self.terms_curve)})"] if self.fade_terms else []
        lines = {
            "warmup": (0, first, f"rope_scale 1 → 0 ({_name(self.rope_curve)})"),
            "transition": (first, second, ", ".join(transition) or "nothing moves"),
            "finetune": (second, total_steps, f"temperature {floor}" if gated else "nothing moves"),
        }
        return [
            f"{stage}: steps {begin} to {end}, {text}" for stage, (begin, end, text) in lines.items() if end > begin
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; refuses curves that are callables."""
        for name in ("rope_curve", "terms_curve", "temperature_curve"):
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


def _round_up(steps: float) -> int:
    return math.ceil(steps - _TOLERANCE * max(steps, 1))


def _name(curve: Curve) -> str:
    return getattr(curve, "__name__", "callable") if callable(curve) else curve


def learning_rate_warmup_steps(max_steps: int, steps: int = 5000, share: float = 0.1) -> int:
    """Steps of linear learning-rate warm-up, for `TrainingArguments.warmup_steps`: `steps`, at most `share` of a short run."""
    return min(steps, math.ceil(max_steps * share))

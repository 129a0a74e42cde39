"""What `recalibrate` does where it is not told: the recipe for a kind of model, and what a run will take."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .conversion_plan import RECORD
from .distill import Distillation
from .schedule import DroPESchedule
from .top_k_logits import TopKLogits


@dataclass(frozen=True)
class Recipe:
    """How a kind of model is trained where nothing else is asked for; first tried on a 135M model."""

    tokens: int
    learning_rate: float
    batch_size: int


# After calibration little is left to learn; a model that was only dropped has everything to learn anew.
CALIBRATED = Recipe(tokens=100_000, learning_rate=1e-4, batch_size=2)
UNCALIBRATED = Recipe(tokens=500_000, learning_rate=1e-3, batch_size=1)
# Adapters start at zero and want larger steps.
LORA_LEARNING_RATE = 5e-4


def is_calibrated(folder: Path) -> bool:
    """Whether the position parameters of a converted checkpoint come from its source, by its conversion record or config."""
    for file, entry in ((RECORD, "calibration"), ("config.json", "drope_calibrated")):
        try:
            if json.loads((folder / file).read_text(encoding="utf-8")).get(entry):
                return True
        except (OSError, ValueError):
            continue
    return False


def fitting_schedule(model: Any, schedule: DroPESchedule | None, calibrated: bool) -> DroPESchedule:
    """The given stages, checked against the model, or the default ones: a warm-up only where there is RoPE to fade."""
    before = model.config.drope_parameters["rope_scale"]
    temperature = (model.config.drope_parameters["gate"] or {}).get("temperature", 1.0)
    if schedule is None and calibrated:
        # The position parameters are right for this very temperature.
        return DroPESchedule(
            warmup=0,
            transition=0,
            temperature_curve="constant",
            temperature_floor=min(temperature, 0.1),
            initial_temperature=temperature,
        )
    if schedule is None:
        # Bringing RoPE back into a model that has been trained without it would undo that training.
        return DroPESchedule(
            warmup=0.3 if before > 0 else 0, temperature_floor=min(temperature, 0.1), initial_temperature=temperature
        )
    if schedule.fade_terms and (model.config.drope_parameters["position_bias"] or {}).get("type") != "disentangled":
        raise ValueError("fade_terms fades the terms of a disentangled bias, which this model has not; leave it out.")
    if schedule.initial_temperature is None:
        floor = min(schedule.temperature_floor, temperature)
        schedule = dataclasses.replace(schedule, initial_temperature=temperature, temperature_floor=floor)
    if schedule.warmup:
        model.set_rope_scale(1.0)
        model.set_rope_scale(before)
    return schedule


def training_memory(model: Any, teaching: Distillation | None, tokens: int) -> float:
    """Bytes of weights, gradients, AdamW's two moments, a second model, and the logits of a batch in fp32 with gradient."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    moving = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = 4 * weights + 12 * moving + 3 * 4 * tokens * model.config.vocab_size
    if teaching is not None and isinstance(teaching.teacher, torch.nn.Module):
        total += sum(p.numel() * p.element_size() for p in teaching.teacher.parameters())
    return total


def disk_space(trained: Any, model: Any) -> int:
    """Bytes of two checkpoints, one more while it is written, and the result."""
    moving = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    weights = sum(parameter.numel() for parameter in model.parameters())
    saved = moving if trained is not model else weights
    return 3 * (4 * saved + 8 * moving) + 4 * weights


def time_of_a_token(model: Any, data: Any, teaching: Distillation | None, bf16: bool, device: torch.device) -> float:
    """Seconds of training a token takes here, from one sequence forward and backward, after one to warm up."""
    model.to(device).train()
    ids = data[0]["input_ids"][None].to(device)
    with torch.random.fork_rng(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for _ in range(2):
            started = time.monotonic()
            if teaching is not None and not isinstance(teaching.teacher, TopKLogits):
                with torch.no_grad():
                    (model if isinstance(teaching.teacher, str) else teaching.teacher.to(device))(ids)
            model(ids, labels=ids).loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    return (time.monotonic() - started) / ids.numel()


def run_record(
    plan: dict[str, Any],
    given: dict[str, Any],
    losses: Sequence[float],
    seconds: float,
    command: Sequence[str] | None,
) -> dict[str, Any]:
    """What a finished run leaves for the model card: its plan, what it was given, its losses and its command line."""
    told = {name: plan[name] for name in plan if name not in ("model", "memory_gb", "estimated_seconds")}
    ends = {"first_loss": losses[0], "last_loss": losses[-1]} if losses else {}
    return {**({"command": list(command)} if command else {}), **told, **given, **ends, "seconds": seconds}


def describe_plan(plan: dict[str, Any]) -> str:
    minutes = plan["estimated_seconds"] / 60
    steady = plan["calibrated"] and len(plan["stages"]) == 1
    lines = [
        f"plan for {plan['model']} ({'calibrated' if plan['calibrated'] else 'not calibrated'}):",
        f"  {plan['tokens']} tokens in {plan['steps']} steps, {plan['sequences']}, learning rate {plan['learning_rate']:g}, training {plan['train']}",
        *(f"  {stage}" for stage in plan["stages"] if not steady),
        f"  distillation: weight {plan['distill']:g}" if plan["distill"] else "  no distillation",
        f"  about {plan['memory_gb']} GB without activations, about {minutes:.1f} minutes here"
        + (", bf16" if plan["bf16"] else ""),
    ]
    if steady:
        lines.insert(2, "  nothing fades: a calibrated start needs no warm-up")
    return "\n".join(lines)

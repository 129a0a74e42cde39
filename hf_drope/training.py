"""Training through the staged schedule with Transformers' own Trainer.

`DroPECallback` moves RoPE's strength and the gate's temperature, `PositionGroupsMixin` gives the position parameters their
own learning rate. The callback keeps no state: a resumed run equals an uninterrupted one because everything follows from
`global_step / max_steps`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from .distill import DistillationMixin
from .position_prediction import PositionPredictionMixin
from .record import FiniteLossMixin
from .schedule import STAGES, DroPESchedule, ScheduleState
from .sharding import keep_class_name, shard_position_parameters

logger = logging.getLogger(__name__)

_POSITION = "position_bias"
# Beside an adapter there is no config.json that could carry the stage.
_STAGE_FILE = "drope_parameters.json"


def unwrap(model: Any) -> Any:
    """The converted model inside wrappers for adapters, compilation or data parallelism."""
    while not hasattr(type(model), "set_rope_scale"):
        if hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        else:
            inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None or inner is model:
            raise ValueError(f"{type(model).__name__} is not a converted model; convert it with apply_drope first.")
        model = inner
    return model


def position_parameters(model: Any) -> Iterable[tuple[str, nn.Parameter]]:
    """Names and parameters of biases and gates; with adapters, of the copy that is trained."""
    for name, parameter in model.named_parameters():
        if _POSITION in name and "original_module" not in name:
            yield name, parameter


def position_logs(model: Any, state: ScheduleState) -> dict[str, float]:
    """What the log shows of the schedule: `drope/stage` (0 warm-up, 1 transition, 2 fine-tuning), strength, temperature
    where a gate has one, `drope/gate`, the mean over layers and heads of what a head or query gate gives by itself, strength of the
    position terms where a bias is disentangled, and the L2 norm over all position parameters."""
    logs: dict[str, float] = {"drope/stage": STAGES.index(state.stage), "drope/rope_scale": state.rope_scale}
    temperature = (unwrap(model).config.drope_parameters["gate"] or {}).get("temperature")
    if temperature is not None:
        logs["drope/temperature"] = temperature
    gates = list(_constant_gates(model))
    if gates:
        logs["drope/gate"] = torch.stack(gates).mean().item()
    terms_scale = (unwrap(model).config.drope_parameters["position_bias"] or {}).get("terms_scale")
    if terms_scale is not None:
        logs["drope/terms_scale"] = terms_scale
    norms = [parameter.detach().float().norm() for _, parameter in position_parameters(model)]
    if norms:
        logs["drope/bias_norm"] = torch.stack(norms).norm().item()
    return logs


@torch.no_grad()
def _constant_gates(model: Any) -> Iterable[Tensor]:
    """The mean over heads of each layer's gate; of a gate whose parameters are away on other processes nothing."""
    for name, module in model.named_modules():
        if all(hasattr(type(module), what) for what in ("reads_scores", "constant")) and "original_module" not in name:
            values: Any = module.constant()
            # Each process has a part of a sharded one.
            values = values.full_tensor() if hasattr(values, "full_tensor") else values
            if values is not None and values.numel():
                yield values.mean()


class DroPECallback(TrainerCallback):
    """Moves a converted model through the stages of a `DroPESchedule` (default: its defaults).

    A step trains with the state of the steps finished before it; a checkpoint, a log entry or an evaluation after it sees
    that same state, and the checkpoint's config carries it. When training ends the model is left in the state for the steps
    done, which is the final one unless it was stopped early, or, with `load_best_model_at_end`, in the stage of the
    checkpoint that was loaded. A checkpoint of adapters has its stage in `drope_parameters.json`.

    Each log entry with a training loss gets what `position_logs` returns, in the log history and, with a trainer that has
    `PositionGroupsMixin`, for every tracker; a plain Trainer lets its trackers read an entry before any user's callback.

    Raises:
        ValueError: when training begins, where the stages do not fit into it or the model has no strength to fade.
    """

    def __init__(self, schedule: DroPESchedule | None = None) -> None:
        self.schedule = schedule or DroPESchedule()
        # What the model was last set to, for the log; always set anew before a step.
        self.state: ScheduleState | None = None

    def _set(self, model: Any, step: int, total: int) -> None:
        self.state = self.schedule.at(step, total)
        set_stage(model, *self.state[1:])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        trained = [parameter.requires_grad for _, parameter in position_parameters(model)]
        if trained and not any(trained):
            logger.warning(
                "None of the %d position parameters is trained; with PEFT, add modules_to_save=[%r].",
                len(trained),
                _POSITION,
            )
        self._set(model, state.global_step, state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._set(model, state.global_step, state.max_steps)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and self.state is not None and "loss" in logs:
            extra = position_logs(model, self.state)
            logs.update(extra)
            state.log_history[-1].update(extra)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir() and not (folder / "config.json").exists():
            settings = unwrap(model).config.drope_parameters
            (folder / _STAGE_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # The Trainer has loaded its weights and nothing else.
            self._set(model, max(0, (state.best_global_step or 0) - 1), state.max_steps)
            restore_stage(model, state.best_model_checkpoint)
        else:
            self._set(model, state.global_step, state.max_steps)


def set_stage(model: Any, rope_scale: float, temperature: float | None, terms_scale: float | None = None) -> None:
    """Set what differs from the model's config; a strength or temperature it has no use for, or None, is left out."""
    converted = unwrap(model)
    parameters = converted.config.drope_parameters
    if parameters["rope_scale"] != rope_scale:
        converted.set_rope_scale(rope_scale)
    current = (parameters["gate"] or {}).get("temperature")
    if current is not None and temperature is not None and current != temperature:
        converted.set_gate_temperature(temperature)
    current = (parameters["position_bias"] or {}).get("terms_scale")
    if current is not None and terms_scale is not None and current != terms_scale:
        converted.set_terms_scale(terms_scale)


def restore_stage(model: Any, checkpoint: str | Path) -> None:
    """Give `model` the strength and temperature that `checkpoint` was saved with, as after loading an adapter from it.

    A folder that does not say (weights alone, as of a sharded model) changes nothing.
    """
    folder = Path(checkpoint)
    if (folder / _STAGE_FILE).exists():
        settings = json.loads((folder / _STAGE_FILE).read_text(encoding="utf-8"))
    elif (folder / "config.json").exists():
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["drope_parameters"]
    else:
        return
    temperature, terms = ((settings[key] or {}) for key in ("gate", "position_bias"))
    set_stage(model, settings["rope_scale"], temperature.get("temperature"), terms.get("terms_scale"))


class PositionGroupsMixin:
    """Gives a Trainer a parameter group of its own for biases and gates: own learning rate, no weight decay, from step 0.

    Mix it into any Trainer, for example `class DroPESFTTrainer(PositionGroupsMixin, SFTTrainer)`.

    Args:
        position_learning_rate: default ten times `learning_rate`; few numbers move far, while the weights only adapt. (A
            135M model took 1e-2 beside 3e-4.) Both follow the same schedule.
    """

    def __init__(self, *args: Any, position_learning_rate: float | None = None, **kwargs: Any) -> None:
        self.position_learning_rate = position_learning_rate
        super().__init__(*args, **kwargs)
        # Trackers come first in a Trainer and would read a log entry before it is complete.
        callbacks: list[Any] = self.callback_handler.callbacks  # type: ignore[attr-defined]
        callbacks.sort(key=lambda callback: not isinstance(callback, DroPECallback))

    def create_optimizer(self, model: Any = None) -> Any:
        trainer: Any = self
        if trainer.optimizer is not None:
            return trainer.optimizer
        if _is_fsdp2(trainer):
            shard_position_parameters(trainer.model, offload_policy=trainer.accelerator.state.fsdp_plugin.cpu_offload)
        optimizer: Any = super().create_optimizer(*([] if model is None else [model]))  # type: ignore[misc]
        named = position_parameters(trainer.model if model is None else model)
        chosen = {id(parameter): parameter for _, parameter in named if parameter.requires_grad}
        if chosen:
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            rate = self.position_learning_rate
            rate = 10 * trainer.args.learning_rate if rate is None else rate
            optimizer.add_param_group({"params": list(chosen.values()), "lr": rate, "weight_decay": 0.0})
        return optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        if _is_fsdp2(trainer):
            model = trainer.accelerator.unwrap_model(trainer.model)
            keep_class_name(model)
            # accelerate knows parameters by their addresses, and a process's share of a small one is empty.
            named = position_parameters(model)
            chosen = [parameter for _, parameter in named if parameter.requires_grad]
            if chosen:
                trainer.optimizer.param_groups[-1]["params"] = chosen
        return super().create_scheduler(*args, **kwargs)  # type: ignore[misc]


def _is_fsdp2(trainer: Any) -> bool:
    return trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2


# Distillation inside: its weight is shared with the ordinary loss alone.
class DroPETrainer(FiniteLossMixin, PositionPredictionMixin, DistillationMixin, PositionGroupsMixin, Trainer):
    """Transformers' Trainer with the mixins of this package; give it a `DroPECallback` for the staged schedule.

    Args:
        distill: a `Distillation` (see `DistillationMixin`), or None.
        position_learning_rate: of biases and gates (see `PositionGroupsMixin`).
        position_prediction: weight of the auxiliary loss (see `PositionPredictionMixin`), 0 for none.

    A NaN or infinite loss stops the training before it reaches the weights (see `FiniteLossMixin`).
    """


def train_attention_and_position(model: Any) -> None:
    """Train the projections of the attention layers, their position parameters and added norms; freeze everything else."""
    chosen = set()
    for name, module in unwrap(model).named_modules():
        if hasattr(type(module), "needs_position"):
            chosen |= {f"{name}.{inner}" for inner, _ in module.named_parameters()}
    for name, parameter in unwrap(model).named_parameters():
        parameter.requires_grad_(name in chosen)


def freeze_all_but_position(model: Any) -> None:
    """Train the position parameters alone, to adapt to a new domain.

    Raises:
        ValueError: the model has none.
    """
    names = {name for name, _ in position_parameters(model)}
    if not names:
        raise ValueError("The model has no position parameters to train; convert it with a position_bias.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)

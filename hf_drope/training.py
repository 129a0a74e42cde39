"""Training through the staged schedule with Transformers' own Trainer.

`DroPECallback` moves RoPE's strength and the gate's temperature, `PositionGroupsMixin` gives the position parameters their
own learning rate, `recalibrate` is both over a checkpoint folder. The callback keeps no state: a resumed run equals an
uninterrupted one because everything follows from `global_step / max_steps`.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.pytorch_utils import Conv1D
from transformers.trainer import TRAINER_STATE_NAME

from .convert import RECORD, other_files, read_source
from .schedule import STAGES, DroPESchedule, ScheduleState, learning_rate_warmup_steps
from .text import PackedText

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
    where a gate has one, and the L2 norm over all position parameters."""
    logs: dict[str, float] = {"drope/stage": STAGES.index(state.stage), "drope/rope_scale": state.rope_scale}
    temperature = (unwrap(model).config.drope_parameters["gate"] or {}).get("temperature")
    if temperature is not None:
        logs["drope/temperature"] = temperature
    norms = [parameter.detach().float().norm() for _, parameter in position_parameters(model)]
    if norms:
        logs["drope/bias_norm"] = torch.stack(norms).norm().item()
    return logs


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
        _set_stage(model, self.state.rope_scale, self.state.temperature)

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


def _set_stage(model: Any, rope_scale: float, temperature: float | None) -> None:
    converted = unwrap(model)
    parameters = converted.config.drope_parameters
    if parameters["rope_scale"] != rope_scale:
        converted.set_rope_scale(rope_scale)
    current = (parameters["gate"] or {}).get("temperature")
    if current is not None and temperature is not None and current != temperature:
        converted.set_gate_temperature(temperature)


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
    _set_stage(model, settings["rope_scale"], (settings["gate"] or {}).get("temperature"))


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


class DroPETrainer(PositionGroupsMixin, Trainer):
    """Transformers' Trainer with `PositionGroupsMixin`; give it a `DroPECallback` for the staged schedule."""


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


def lora_config(model: Any, rank: int) -> Any:
    """A PEFT `LoraConfig` for a converted model: adapters on the attention projections, what conversion added in full."""
    from peft import LoraConfig

    converted = unwrap(model)
    # Whole names: GPT-2 calls a projection of its MLP as it calls one of its attention.
    projections = {
        f"{name}.{child_name}": child
        for name, module in converted.named_modules()
        if hasattr(type(module), "needs_position")
        for child_name, child in module.named_children()
        if isinstance(child, nn.Linear | Conv1D)
    }
    added = {name.rpartition(".")[2] for name, _ in converted.named_modules()} & {_POSITION, "qk_norm"}
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=sorted(projections),
        modules_to_save=sorted(added) or None,
        fan_in_fan_out=any(isinstance(child, Conv1D) for child in projections.values()),
        task_type="CAUSAL_LM",
    )


class _Progress(TrainerCallback):
    """A bar by tokens on standard error, silent where that is not a terminal; the Trainer's own writes to standard output."""

    def __init__(self, tokens_a_step: int) -> None:
        self.tokens_a_step = tokens_a_step
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar = tqdm(
            desc="recalibrate",
            total=state.max_steps * self.tokens_a_step,
            initial=state.global_step * self.tokens_a_step,
            unit="token",
            unit_scale=True,
            file=sys.stderr,
            disable=None if state.is_world_process_zero else True,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update(self.tokens_a_step)
        # The mean loss since the last log starts anew on resumption, so it has to start anew at every checkpoint.
        control.should_log = control.should_log or control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}", rope_scale=f"{logs['drope/rope_scale']:.2f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()


def recalibrate(
    model_path: str | Path,
    out: str | Path,
    text_files: Sequence[str | Path],
    *,
    max_steps: int,
    sequence_length: int = 512,
    batch_size: int = 4,
    gradient_accumulation_steps: int = 1,
    learning_rate: float = 3e-4,
    position_learning_rate: float | None = None,
    lora_rank: int | None = None,
    resume: bool = False,
    schedule: DroPESchedule | None = None,
    train_only: str = "all",
    seed: int = 0,
    save_steps: int | None = None,
    logging_steps: int | None = None,
    bf16: bool = False,
) -> dict[str, Any]:
    """Train a converted checkpoint through the staged schedule and save the result in `out`.

    Args:
        model_path: a converted checkpoint folder.
        out: for the result; checkpoints go to `out/checkpoint-N`, the log to `out/metrics.jsonl`.
        text_files: `.txt` or `.jsonl` (field "text").
        max_steps: optimizer steps; 0 saves and trains nothing.
        sequence_length: tokens a sequence; `batch_size` sequences a device, `gradient_accumulation_steps` batches a step.
        position_learning_rate: of biases and gates, default ten times `learning_rate`.
        lora_rank: train LoRA adapters of this rank; the result is the merged model.
        resume: go on from the last complete checkpoint in `out`.
        schedule: default stages, without a warm-up where the checkpoint has no position encoding left to fade.
        train_only: "all" or "position".
        save_steps: steps between checkpoints, default a tenth of the run; the last two are kept.
        logging_steps: default a hundredth of the run.
        bf16: autocast to bf16; the weights stay fp32.

    Returns:
        Steps, tokens, seconds, first and last loss, and where the result is.

    Raises:
        ValueError: one sentence on a wrong argument, folder or text file; nothing was written.

    A resumed run equals an uninterrupted one if it is given the same arguments and text.
    """
    source, config = read_source(model_path)
    if not str(config.get("model_type", "")).endswith("_drope"):
        raise ValueError(f"{source} is not a converted checkpoint; convert it first: hf-drope convert {source} DST.")
    if max_steps < 0:
        raise ValueError(f"max_steps is {max_steps}; it has to be at least 0.")
    if train_only not in ("all", "position"):
        raise ValueError(f"train_only is {train_only!r}; it has to be 'all' or 'position'.")
    counts = {
        "lora_rank": lora_rank,
        "batch_size": batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "save_steps": save_steps,
        "logging_steps": logging_steps,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}; it has to be at least 1.")
    for name, rate in (("learning_rate", learning_rate), ("position_learning_rate", position_learning_rate)):
        if rate is not None and not rate >= 0:
            raise ValueError(f"{name} is {rate}; it has to be at least 0.")
    if lora_rank is not None and train_only == "position":
        raise ValueError(
            "train_only is 'position' and lora_rank is given; adapters would stay untrained, so choose one."
        )
    target = Path(out)
    last = _last_checkpoint(target, max_steps) if resume else None
    if not resume and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not empty; choose another folder, or go on there with --resume.")

    import transformers

    import hf_drope  # noqa: F401  (registers the classes)

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{source} has no tokenizer that loads: {str(error).splitlines()[0]}") from error
    data = PackedText(text_files, tokenizer, sequence_length)
    transformers.set_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    schedule = _fitting_schedule(model, schedule)
    if max_steps > 0:
        schedule.stage_ends(max_steps)
    _check_length(model, sequence_length)
    largest = int(data.blocks.max())
    if largest >= model.config.vocab_size:
        raise ValueError(f"The tokenizer gives token {largest}, but the model knows only {model.config.vocab_size}.")
    trained: Any = model
    if lora_rank is not None:
        from peft import get_peft_model

        trained = get_peft_model(model, lora_config(model, lora_rank))
    if train_only == "position":
        freeze_all_but_position(trained)

    target.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    history: list[dict[str, Any]] = []
    tokens_a_step = batch_size * gradient_accumulation_steps * sequence_length
    if max_steps > 0:
        arguments = TrainingArguments(
            output_dir=str(target),
            max_steps=max_steps,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=learning_rate_warmup_steps(max_steps),
            logging_steps=logging_steps or max(1, max_steps // 100),
            save_steps=save_steps or max(1, max_steps // 10),
            save_total_limit=2,
            bf16=bf16,
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
            use_cpu=not torch.accelerator.is_available(),
            disable_tqdm=True,
            seed=seed,
        )
        tokens_a_step *= arguments.world_size
        trainer = DroPETrainer(
            model=trained,
            args=arguments,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[DroPECallback(schedule), _Progress(tokens_a_step)],
            position_learning_rate=position_learning_rate,
        )
        # It would print every log entry to standard output.
        trainer.remove_callback(PrinterCallback)
        if last is not None and _finished_steps(last) >= max_steps:
            # The Trainer would go on for another step.
            trainer._load_from_checkpoint(last)
            trainer.state = TrainerState.load_from_json(str(Path(last) / TRAINER_STATE_NAME))
            final = schedule.final()
            _set_stage(model, final.rope_scale, final.temperature)
        else:
            trainer.train(resume_from_checkpoint=last)
        history = trainer.state.log_history
        if not trainer.is_world_process_zero():
            return {}
    if lora_rank is not None:
        model = trained.merge_and_unload()
    _save(model, source, target, history)
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return {
        "steps": max_steps,
        "tokens": max_steps * tokens_a_step,
        "seconds": round(time.monotonic() - started, 1),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "out": str(target),
    }


def _fitting_schedule(model: Any, schedule: DroPESchedule | None) -> DroPESchedule:
    """The given or default stages; one without a warm-up where nothing is left to fade and none was asked for."""
    before = model.config.drope_parameters["rope_scale"]
    try:
        model.set_rope_scale(1.0)
    except ValueError:
        if schedule is not None and schedule.warmup:
            raise
        return schedule or DroPESchedule(warmup=0)
    model.set_rope_scale(before)
    return schedule or DroPESchedule()


def _check_length(model: Any, sequence_length: int) -> None:
    table = getattr(getattr(model.base_model, "wpe", None), "weight", None)
    if table is not None and sequence_length > len(table):
        raise ValueError(
            f"sequence_length is {sequence_length}; it has to be at most {len(table)}, the positions in this model's table."
        )


def _last_checkpoint(folder: Path, max_steps: int) -> str:
    """The newest complete checkpoint; the Trainer writes `trainer_state.json` last, so a killed run's lacks it."""
    found = {
        int(step): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (step := path.name.removeprefix("checkpoint-")).isdigit() and path.name.startswith("checkpoint-")
    }
    for _, path in sorted(found.items(), reverse=True):
        try:
            state = json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            logger.warning("%s is incomplete and was skipped.", path)
            continue
        if state["max_steps"] != max_steps:
            raise ValueError(
                f"max_steps is {max_steps}, but {path} belongs to a run of {state['max_steps']} steps; resume with that."
            )
        return str(path)
    raise ValueError(f"{folder} holds no complete checkpoint to resume from; run without --resume.")


def _finished_steps(checkpoint: str) -> int:
    return json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]


def _save(model: Any, source: Path, target: Path, history: list[dict[str, Any]]) -> None:
    model.save_pretrained(target)
    record = (RECORD,) if (source / RECORD).is_file() else ()
    for name in (*other_files(source), *record):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    with (target / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in history)

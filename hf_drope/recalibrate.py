"""`recalibrate`: a converted checkpoint folder trained through the staged schedule, with Transformers' own Trainer.

What is not given is chosen for the model at hand (`Recipe`) and told before the training begins.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments, default_data_collator
from transformers.trainer import TRAINER_STATE_NAME

from .adapters import lora_config
from .calibration import context_length
from .conversion_plan import RECORD, other_files, read_source
from .folder_calibration import load_tokenizer, refresh_card, refuse_encoder, text_hashes
from .hardware import multiplies_bf16
from .model_card import TRAINING_RECORD, record_training
from .position_modules import table_places
from .recalibration_plan import (
    CALIBRATED,
    LORA_LEARNING_RATE,
    UNCALIBRATED,
    describe_plan,
    disk_space,
    fitting_schedule,
    is_calibrated,
    run_record,
    time_of_a_token,
    training_memory,
)
from .recalibration_teacher import load_teaching
from .record import METRICS_FILE, ConvergenceRecord, draw_record
from .resume import (
    SETTINGS_FILE,
    check_learning_rate,
    check_settings,
    finished_steps,
    full_disk_told,
    is_unbegun,
    last_checkpoint,
    position_rate,
)
from .schedule import DroPESchedule, learning_rate_warmup_steps
from .sharding import load_whole, whole_weights
from .text import PackedText
from .training import (
    DroPECallback,
    DroPETrainer,
    freeze_all_but_position,
    set_stage,
    train_attention_and_position,
)

logger = logging.getLogger(__name__)

PICTURE = "convergence.png"


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


class _Trainer(DroPETrainer):
    """Says what is left when a checkpoint cannot be written."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(str(self.args.output_dir))
        with full_disk_told(folder, folder / f"checkpoint-{self.state.global_step}"):
            super()._save_checkpoint(model, trial)


def recalibrate(
    model_path: str | Path,
    out: str | Path,
    text_files: Sequence[str | Path],
    *,
    max_steps: int | None = None,
    sequence_length: int | None = None,
    batch_size: int | None = None,
    gradient_accumulation_steps: int = 1,
    learning_rate: float | None = None,
    position_learning_rate: float | None = None,
    lora_rank: int | None = None,
    distill: float = 0.0,
    distill_temperature: float = 1.0,
    distill_top_k: int | None = None,
    distill_hidden: float = 0.0,
    source: str | Path | None = None,
    resume: bool = False,
    schedule: DroPESchedule | None = None,
    position_prediction: float = 0.0,
    train_only: str | None = None,
    seed: int = 0,
    save_steps: int | None = None,
    logging_steps: int | None = None,
    bf16: bool | None = None,
    dry_run: bool = False,
    announce: Callable[[str], Any] | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Train a converted checkpoint through the staged schedule and save the result in `out`.

    Args:
        model_path: a converted checkpoint folder.
        out: for the result; checkpoints go to `out/checkpoint-N`, the record to `out/metrics.jsonl` and, with matplotlib,
            `out/convergence.png`.
        text_files: `.txt` or `.jsonl` (field "text").
        max_steps: optimizer steps; 0 saves and trains nothing. Default: 100,000 tokens for a calibrated model and 500,000
            for another, but at most one pass over the text.
        sequence_length: tokens a sequence, default 512 or the source's context where that is less.
        batch_size: sequences a device, default 2 for a calibrated model and 1 for another: a short run wants many steps;
            `gradient_accumulation_steps` batches a step.
        learning_rate: default 1e-4 for a calibrated model, 1e-3 for another, 5e-4 with `lora_rank`; measured on a model of
            135M parameters, and those of billions may want less.
        position_learning_rate: of biases and gates, default ten times `learning_rate`.
        lora_rank: train LoRA adapters of this rank; the result is the merged model.
        distill: weight, 0 to 1, of the divergence from the source's predictions in the loss; the rest is the ordinary loss.
            With `lora_rank` the source is this model with its adapters off and RoPE on, otherwise the one in `source`.
        distill_temperature, distill_top_k, distill_hidden: see `Distillation`; by default the 64 likeliest tokens are
            compared, which spares the teacher's logits over the whole vocabulary while the model trains; 0 compares all.
        source: the folder the model was converted from, or a folder that `TopKLogits.write` made of its predictions.
        resume: go on from the last complete checkpoint in `out`.
        schedule: default for a calibrated model: no stages, since it has nothing to fade. Default for another: RoPE fades in a
            warm-up where the checkpoint's `rope_scale` is above 0, then the gate's temperature falls. A schedule of your own
            may bring a dropped RoPE back and fade it.
        position_prediction: weight of the auxiliary loss in the early stages (see `PositionPredictionMixin`).
        train_only: "all", "attention" (projections of the attention layers and position parameters) or "position"; default
            "attention".
        save_steps: steps between checkpoints, default a tenth of the run; the last two are kept.
        logging_steps: default a hundredth of the run.
        bf16: autocast to bf16, the weights stay fp32; default where the hardware multiplies bf16 matrices.
        dry_run: make the plan and write nothing.
        announce: called with the plan as text before training; it times one step for that.
        command: the command line for the record, `out/drope_training.json`, which the model card in `out` is filled from.

    Returns:
        Steps, tokens, seconds, first and last loss, and where the result is; for a dry run the plan. With several processes
        (`accelerate launch`) all but the first return an empty dictionary.

    Raises:
        ValueError: one sentence on a wrong argument, folder or text file; nothing was written.
        NonFiniteLossError: the loss became NaN or infinite; the last checkpoint is kept.
        OSError: the disk is full; what was saved before is kept.

    A resumed run equals an uninterrupted one if it is given the same arguments and text.
    """
    folder, config = read_source(model_path)
    if not str(config.get("model_type", "")).endswith("_drope"):
        raise ValueError(f"{folder} is not a converted checkpoint; convert it first: hf-drope convert {folder} DST.")
    refuse_encoder(config, "recalibration")
    calibrated = is_calibrated(folder)
    recipe = CALIBRATED if calibrated else UNCALIBRATED
    if train_only is None:
        train_only = "all" if lora_rank is not None else "attention"
    if learning_rate is None:
        learning_rate = recipe.learning_rate if lora_rank is None else LORA_LEARNING_RATE
    _check_arguments(
        max_steps=max_steps,
        train_only=train_only,
        lora_rank=lora_rank,
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        save_steps=save_steps,
        logging_steps=logging_steps,
        learning_rate=learning_rate,
        position_learning_rate=position_learning_rate,
        position_prediction=position_prediction,
        distill=distill,
        source=source,
    )
    batch_size = recipe.batch_size if batch_size is None else batch_size
    target = Path(out)
    if not resume and not is_unbegun(target):
        raise ValueError(f"{target} is not empty; choose another folder, or go on there with --resume.")

    import transformers

    import hf_drope  # noqa: F401  (registers the classes)

    if sequence_length is None:
        sequence_length = min(512, context_length(config))
    tokenizer = load_tokenizer(folder)
    data = PackedText(text_files, tokenizer, sequence_length)
    if max_steps is None:
        per_step = batch_size * gradient_accumulation_steps * int(os.environ.get("WORLD_SIZE", "1"))
        max_steps = max(1, min(round(recipe.tokens / (per_step * sequence_length)), len(data) // per_step))
    last = last_checkpoint(target, max_steps) if resume else None
    if last is not None:
        check_learning_rate(last, learning_rate, position_learning_rate)
    transformers.set_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    schedule = fitting_schedule(model, schedule, calibrated)
    if max_steps > 0 and schedule.stage_ends(max_steps) == (0, 0) and position_prediction:
        raise ValueError(
            "position_prediction acts in the warm-up and the transition, and this run has neither; leave it out."
        )
    _check_length(model, sequence_length)
    largest = int(data.blocks.max())
    if largest >= model.config.vocab_size:
        raise ValueError(f"The tokenizer gives token {largest}, but the model knows only {model.config.vocab_size}.")
    trained = _trainable(model, lora_rank, train_only)
    teaching = None
    if distill:
        settings = {"temperature": distill_temperature, "weight": distill, "hidden_weight": distill_hidden}
        teaching = load_teaching(source, folder, trained, model, distill_top_k, data[0]["input_ids"], **settings)
    bf16 = multiplies_bf16() if bf16 is None else bf16

    started = time.monotonic()
    tokens_a_step = batch_size * gradient_accumulation_steps * sequence_length
    arguments = TrainingArguments(
        output_dir=str(target),
        max_steps=max_steps or 1,
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
        # Every position parameter takes part in every stage.
        ddp_find_unused_parameters=False,
    )
    tokens_a_step *= arguments.world_size
    plan = {
        "model": str(folder),
        "calibrated": calibrated,
        "steps": max_steps,
        "tokens": max_steps * tokens_a_step,
        "sequences": f"{batch_size * gradient_accumulation_steps * arguments.world_size} of {sequence_length} tokens a step",
        "stages": schedule.describe(max_steps, _has_temperature(model)) if max_steps else [],
        "train": f"LoRA of rank {lora_rank}, position parameters" if lora_rank else train_only,
        "learning_rate": learning_rate,
        "distill": distill,
        "bf16": bf16,
        "memory_gb": round(training_memory(trained, teaching, batch_size * sequence_length) / 1e9, 1),
    }
    if announce is not None and max_steps > 0 and arguments.process_index == 0:
        seconds = (
            time_of_a_token(trained, data, teaching, bf16, arguments.device)
            * tokens_a_step
            * max_steps
            / arguments.world_size
        )
        plan["estimated_seconds"] = round(seconds)
        announce(describe_plan(plan))
    if dry_run:
        return plan if arguments.process_index == 0 else {}
    _check_disk(target, disk_space(trained, model))
    target.mkdir(parents=True, exist_ok=True)
    made_with: dict[str, Any] = {
        "text": hashlib.sha256(data.blocks.numpy().tobytes()).hexdigest()[:16],
        "sequence_length": sequence_length,
        "sequences a step": batch_size * gradient_accumulation_steps * arguments.world_size,
        "train": plan["train"],
        "distill": distill and [distill, distill_temperature, distill_top_k, distill_hidden],
        "position_prediction": position_prediction,
        "seed": seed,
    }
    if arguments.process_index == 0:
        check_settings(target, made_with, resume)
    history: list[dict[str, Any]] = []
    if max_steps > 0:
        trainer = _Trainer(
            model=trained,
            args=arguments,
            train_dataset=data,
            processing_class=tokenizer,
            # All sequences are of one length: a tokenizer without a token to pad with will do.
            data_collator=default_data_collator,
            callbacks=[DroPECallback(schedule), _Progress(tokens_a_step), ConvergenceRecord(tokens_a_step)],
            position_learning_rate=position_learning_rate,
            position_prediction=position_prediction,
            distill=teaching,
        )
        # It would print every log entry to standard output.
        trainer.remove_callback(PrinterCallback)
        if last is not None and finished_steps(last) >= max_steps:
            # The Trainer would go on for another step.
            trainer._load_from_checkpoint(last)
            trainer.state = TrainerState.load_from_json(str(Path(last) / TRAINER_STATE_NAME))
            set_stage(model, *schedule.final()[1:])
            sharded = None
        else:
            trainer.train(resume_from_checkpoint=last)
            sharded = whole_weights(trainer)
        history = trainer.state.log_history
        if not trainer.is_world_process_zero():
            return {}
        if sharded is not None:
            # What is in pieces cannot be merged or saved in place.
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            set_stage(model, *schedule.at(trainer.state.global_step, max_steps)[1:])
            trained = _trainable(model, lora_rank, train_only)
            load_whole(trained, sharded)
    if lora_rank is not None:
        model = trained.merge_and_unload()
    with full_disk_told(target):
        _save(model, folder, target)
    losses = [entry["loss"] for entry in history if "loss" in entry]
    seconds = round(time.monotonic() - started, 1)
    picture = None
    if losses:
        try:
            picture = draw_record(target / METRICS_FILE, target / PICTURE)
        except (OSError, ValueError) as error:
            logger.warning("There is no picture of the run: %s", error)
    if max_steps > 0:
        rate = position_rate(learning_rate, position_learning_rate)
        given = {"position_learning_rate": rate, "seed": seed, "text_sha256": text_hashes(text_files)}
        record_training(target, folder, run_record(plan, given, losses, seconds, command))
    refresh_card(target)
    return {
        "steps": max_steps,
        "tokens": max_steps * tokens_a_step,
        "seconds": seconds,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "out": str(target),
        "picture": None if picture is None else str(picture),
    }


def _check_arguments(
    *,
    max_steps: int | None,
    train_only: str,
    lora_rank: int | None,
    learning_rate: float,
    position_learning_rate: float | None,
    position_prediction: float,
    distill: float,
    source: str | Path | None,
    **counts: int | None,
) -> None:
    if max_steps is not None and max_steps < 0:
        raise ValueError(f"max_steps is {max_steps}; it has to be at least 0.")
    if train_only not in ("all", "attention", "position"):
        raise ValueError(f"train_only is {train_only!r}; it has to be 'all', 'attention' or 'position'.")
    for name, count in {"lora_rank": lora_rank, **counts}.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}; it has to be at least 1.")
    for name, rate in (("learning_rate", learning_rate), ("position_learning_rate", position_learning_rate)):
        if rate is not None and not rate >= 0:
            raise ValueError(f"{name} is {rate}; it has to be at least 0.")
    if lora_rank is not None and train_only != "all":
        raise ValueError(
            f"train_only is {train_only!r} and lora_rank is given; adapters would stay untrained, so choose one."
        )
    if distill and source is None and lora_rank is None:
        raise ValueError(
            "Distillation needs the source as its teacher; give its folder (--source SRC), or train with LoRA."
        )
    if source is not None and not distill:
        raise ValueError(
            f"source is {source} and distill is 0; give the weight of its predictions as well, or leave it out."
        )
    if not position_prediction >= 0:
        raise ValueError(f"position_prediction is {position_prediction}; it has to be a number of at least 0.")


def _trainable(model: Any, lora_rank: int | None, train_only: str) -> Any:
    """The model with what is to be trained set free; with adapters around it where they were asked for."""
    if lora_rank is not None:
        from peft import get_peft_model

        return get_peft_model(model, lora_config(model, lora_rank))
    if train_only == "position":
        freeze_all_but_position(model)
    elif train_only == "attention":
        train_attention_and_position(model)
    return model


def _check_disk(target: Path, needed: int) -> None:
    existing = next(path for path in (target.resolve(), *target.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(
            f"{existing} has {free} bytes free, and this run's checkpoints need about {needed}; make room."
        )


def _has_temperature(model: Any) -> bool:
    return "temperature" in (model.config.drope_parameters["gate"] or {})


def _check_length(model: Any, sequence_length: int) -> None:
    table = next((place.module.weight for place in table_places(model) if hasattr(place.module, "weight")), None)
    if table is not None and sequence_length > len(table):
        raise ValueError(
            f"sequence_length is {sequence_length}; it has to be at most {len(table)}, the positions in this model's table."
        )


def _save(model: Any, source: Path, target: Path) -> None:
    model.save_pretrained(target)
    records = (name for name in (RECORD, TRAINING_RECORD) if (source / name).is_file())
    for name in (*other_files(source), *records):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if name not in (METRICS_FILE, PICTURE, SETTINGS_FILE):
            shutil.copyfile(source / name, target / name)

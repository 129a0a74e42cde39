"""`recalibrate`: a converted checkpoint folder trained through the staged schedule, with Transformers' own Trainer."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from .convert import RECORD, other_files, read_source
from .schedule import DroPESchedule, learning_rate_warmup_steps
from .text import PackedText
from .training import DroPECallback, DroPETrainer, freeze_all_but_position, lora_config, set_stage

logger = logging.getLogger(__name__)


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
        schedule: default stages; the warm-up, in which RoPE fades from 1, only where the checkpoint's
            `rope_scale` is above 0. A schedule of your own may bring a dropped RoPE back and fade it.
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
            set_stage(model, final.rope_scale, final.temperature)
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
    """The given stages, checked against the model, or the default ones: a warm-up only where there is RoPE to fade."""
    before = model.config.drope_parameters["rope_scale"]
    if schedule is None:
        # Bringing RoPE back into a model that has been trained without it would undo that training.
        return DroPESchedule() if before > 0 else DroPESchedule(warmup=0)
    if schedule.warmup:
        model.set_rope_scale(1.0)
        model.set_rope_scale(before)
    return schedule


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

"""`recalibrate`: a converted checkpoint folder trained through the staged schedule, with Transformers' own Trainer.

What is not given is chosen for the model at hand (`_Recipe`) and told before the training begins.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from .calibrate import load_tokenizer
from .convert import RECORD, other_files, read_source
from .distill import Distillation, TopKLogits
from .record import METRICS_FILE, ConvergenceRecord, draw_record
from .schedule import DroPESchedule, learning_rate_warmup_steps
from .text import PackedText
from .training import (
    DroPECallback,
    DroPETrainer,
    freeze_all_but_position,
    lora_config,
    set_stage,
    train_attention_and_position,
)

logger = logging.getLogger(__name__)

# Bytes: less than this left, and a failed write has its reason.
_NEARLY_FULL = 1 << 20


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


@dataclass(frozen=True)
class _Recipe:
    """The best known way to train a kind of model, measured on a 135M model (README)."""

    tokens: int
    learning_rate: float
    train_only: str


# After calibration little is left to learn; a model that was only dropped has everything to learn anew.
_CALIBRATED = _Recipe(tokens=100_000, learning_rate=1e-4, train_only="attention")
_FROM_SCRATCH = _Recipe(tokens=500_000, learning_rate=3e-4, train_only="attention")


class _Trainer(DroPETrainer):
    """Says what is left when a checkpoint cannot be written."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            folder = Path(str(self.args.output_dir))
            if shutil.disk_usage(folder).free > _NEARLY_FULL and "No space left" not in str(error):
                raise
            broken = folder / f"checkpoint-{self.state.global_step}"
            shutil.rmtree(broken, ignore_errors=True)
            kept = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
            left = f"{kept[-1]} is the last good one" if kept else "there is none before it"
            raise OSError(
                f"The disk of {folder} is full: {broken.name} could not be written and was removed, {left}; "
                "make room and go on with --resume."
            ) from error


def recalibrate(
    model_path: str | Path,
    out: str | Path,
    text_files: Sequence[str | Path],
    *,
    max_steps: int | None = None,
    sequence_length: int = 512,
    batch_size: int = 4,
    gradient_accumulation_steps: int = 1,
    learning_rate: float | None = None,
    position_learning_rate: float | None = None,
    lora_rank: int | None = None,
    distill: float = 0.0,
    distill_temperature: float = 1.0,
    distill_top_k: int | None = 64,
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
) -> dict[str, Any]:
    """Train a converted checkpoint through the staged schedule and save the result in `out`.

    Args:
        model_path: a converted checkpoint folder.
        out: for the result; checkpoints go to `out/checkpoint-N`, the record to `out/metrics.jsonl` and, with matplotlib,
            `out/convergence.png`.
        text_files: `.txt` or `.jsonl` (field "text").
        max_steps: optimizer steps; 0 saves and trains nothing. Default: 100,000 tokens for a calibrated model and 500,000
            for another, but at most one pass over the text.
        sequence_length: tokens a sequence; `batch_size` sequences a device, `gradient_accumulation_steps` batches a step.
        learning_rate: default 1e-4 for a calibrated model, 3e-4 for another.
        position_learning_rate: of biases and gates, default ten times `learning_rate`.
        lora_rank: train LoRA adapters of this rank; the result is the merged model.
        distill: weight, 0 to 1, of the divergence from the source's predictions in the loss; the rest is the ordinary loss.
            With `lora_rank` the source is this model with its adapters off and RoPE on, otherwise the one in `source`.
        distill_temperature, distill_top_k, distill_hidden: see `Distillation`; of the teacher's predictions the 64 likeliest
            tokens are compared, which spares its logits over the whole vocabulary while the model trains; None for all.
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

    Returns:
        Steps, tokens, seconds, first and last loss, and where the result is; for a dry run the plan.

    Raises:
        ValueError: one sentence on a wrong argument, folder or text file; nothing was written.
        NonFiniteLossError: the loss became NaN or infinite; the last checkpoint is kept.
        OSError: the disk is full; what was saved before is kept.

    A resumed run equals an uninterrupted one if it is given the same arguments and text.
    """
    folder, config = read_source(model_path)
    if not str(config.get("model_type", "")).endswith("_drope"):
        raise ValueError(f"{folder} is not a converted checkpoint; convert it first: hf-drope convert {folder} DST.")
    calibrated = is_calibrated(folder)
    recipe = _CALIBRATED if calibrated else _FROM_SCRATCH
    if train_only is None:
        train_only = "all" if lora_rank is not None else recipe.train_only
    learning_rate = recipe.learning_rate if learning_rate is None else learning_rate
    if max_steps is not None and max_steps < 0:
        raise ValueError(f"max_steps is {max_steps}; it has to be at least 0.")
    if train_only not in ("all", "attention", "position"):
        raise ValueError(f"train_only is {train_only!r}; it has to be 'all', 'attention' or 'position'.")
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
    if lora_rank is not None and train_only != "all":
        raise ValueError(
            f"train_only is {train_only!r} and lora_rank is given; adapters would stay untrained, so choose one."
        )
    if distill and source is None and lora_rank is None:
        raise ValueError(
            "Distillation needs the source as its teacher; give its folder (--source SRC), or train with LoRA."
        )
    target = Path(out)
    if not resume and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not empty; choose another folder, or go on there with --resume.")

    import transformers

    import hf_drope  # noqa: F401  (registers the classes)

    tokenizer = load_tokenizer(folder)
    data = PackedText(text_files, tokenizer, sequence_length)
    if max_steps is None:
        per_step = batch_size * gradient_accumulation_steps
        max_steps = max(1, min(round(recipe.tokens / (per_step * sequence_length)), len(data) // per_step))
    last = _last_checkpoint(target, max_steps) if resume else None
    transformers.set_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    schedule = _fitting_schedule(model, schedule, calibrated)
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
    elif train_only == "position":
        freeze_all_but_position(trained)
    elif train_only == "attention":
        train_attention_and_position(trained)
    teaching = None
    if distill:
        teaching = Distillation(
            teacher=_teacher(source, model),
            temperature=distill_temperature,
            weight=distill,
            top_k=distill_top_k,
            hidden_weight=distill_hidden,
        )
    bf16 = _multiplies_bf16() if bf16 is None else bf16

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
    )
    tokens_a_step *= arguments.world_size
    plan = {
        "model": str(folder),
        "calibrated": calibrated,
        "steps": max_steps,
        "tokens": max_steps * tokens_a_step,
        "stages": schedule.describe(max_steps) if max_steps else [],
        "train": f"LoRA of rank {lora_rank}, position parameters" if lora_rank else train_only,
        "learning_rate": learning_rate,
        "distill": distill,
        "bf16": bf16,
        "memory_gb": round(_memory(trained, teaching, batch_size * sequence_length) / 1e9, 1),
    }
    needed = _disk(trained, model)
    if announce is not None and max_steps > 0:
        seconds = _time_of_a_token(trained, data, teaching, bf16) * tokens_a_step * max_steps / arguments.world_size
        plan["estimated_seconds"] = round(seconds)
        announce(_describe(plan))
    if dry_run:
        return plan
    target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target).free
    if needed > free:
        raise ValueError(f"{target} has {free} bytes free, and this run's checkpoints need about {needed}; make room.")
    history: list[dict[str, Any]] = []
    if max_steps > 0:
        trainer = _Trainer(
            model=trained,
            args=arguments,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[DroPECallback(schedule), _Progress(tokens_a_step), ConvergenceRecord(tokens_a_step)],
            position_learning_rate=position_learning_rate,
            position_prediction=position_prediction,
            distill=teaching,
        )
        # It would print every log entry to standard output.
        trainer.remove_callback(PrinterCallback)
        if last is not None and _finished_steps(last) >= max_steps:
            # The Trainer would go on for another step.
            trainer._load_from_checkpoint(last)
            trainer.state = TrainerState.load_from_json(str(Path(last) / TRAINER_STATE_NAME))
            set_stage(model, *schedule.final()[1:])
        else:
            trainer.train(resume_from_checkpoint=last)
        history = trainer.state.log_history
        if not trainer.is_world_process_zero():
            return {}
    if lora_rank is not None:
        model = trained.merge_and_unload()
    _save(model, folder, target)
    losses = [entry["loss"] for entry in history if "loss" in entry]
    picture = draw_record(target / METRICS_FILE, target / "convergence.png") if losses else None
    return {
        "steps": max_steps,
        "tokens": max_steps * tokens_a_step,
        "seconds": round(time.monotonic() - started, 1),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "out": str(target),
        "picture": None if picture is None else str(picture),
    }


def is_calibrated(folder: Path) -> bool:
    """Whether the position parameters of a converted checkpoint come from its source, by its conversion record."""
    try:
        return "calibration" in json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _teacher(source: str | Path | None, model: Any) -> Any:
    if source is None:
        return "self"
    if not (Path(source) / "config.json").is_file():
        return TopKLogits(source)
    import transformers

    folder, config = read_source(source)
    if str(config.get("model_type", "")).endswith("_drope"):
        raise ValueError(f"{folder} is a converted checkpoint; the teacher has to be its source.")
    teacher = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if teacher.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"{folder} has a vocabulary of {teacher.config.vocab_size} tokens and the model one of "
            f"{model.config.vocab_size}; a teacher needs the same."
        )
    return teacher


def _multiplies_bf16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def _memory(model: Any, teaching: Distillation | None, tokens: int) -> float:
    """Bytes of weights, gradients, AdamW's two moments, a second model, and the logits of a batch in fp32 with gradient."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    moving = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = 4 * weights + 12 * moving + 3 * 4 * tokens * model.config.vocab_size
    if teaching is not None and isinstance(teaching.teacher, torch.nn.Module):
        total += sum(p.numel() * p.element_size() for p in teaching.teacher.parameters())
    return total


def _disk(trained: Any, model: Any) -> int:
    """Bytes of two checkpoints, one more while it is written, and the result."""
    moving = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    weights = sum(parameter.numel() for parameter in model.parameters())
    saved = moving if trained is not model else weights
    return 3 * (4 * saved + 8 * moving) + 4 * weights


def _time_of_a_token(model: Any, data: Any, teaching: Distillation | None, bf16: bool) -> float:
    """Seconds of training a token takes here, from one sequence forward and backward, after one to warm up."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    ids = data[0]["input_ids"][None].to(device)
    with torch.random.fork_rng(), torch.autocast(device, torch.bfloat16, enabled=bf16):
        for _ in range(2):
            started = time.monotonic()
            if teaching is not None and not isinstance(teaching.teacher, TopKLogits):
                with torch.no_grad():
                    (model if isinstance(teaching.teacher, str) else teaching.teacher.to(device))(ids)
            model(ids, labels=ids).loss.backward()
            if device == "cuda":
                torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    return (time.monotonic() - started) / ids.numel()


def _describe(plan: dict[str, Any]) -> str:
    minutes = plan["estimated_seconds"] / 60
    steady = plan["calibrated"] and len(plan["stages"]) == 1
    lines = [
        f"plan for {plan['model']} ({'calibrated' if plan['calibrated'] else 'not calibrated'}):",
        f"  {plan['tokens']} tokens in {plan['steps']} steps, learning rate {plan['learning_rate']:g}, training {plan['train']}",
        *(f"  {stage}" for stage in plan["stages"] if not steady),
        f"  distillation: weight {plan['distill']:g}" if plan["distill"] else "  no distillation",
        f"  about {plan['memory_gb']} GB without activations, about {minutes:.1f} minutes here"
        + (", bf16" if plan["bf16"] else ""),
    ]
    if steady:
        lines.insert(2, "  nothing fades: a calibrated start needs no warm-up")
    return "\n".join(lines)


def _fitting_schedule(model: Any, schedule: DroPESchedule | None, calibrated: bool) -> DroPESchedule:
    """The given stages, checked against the model, or the default ones: a warm-up only where there is RoPE to fade."""
    before = model.config.drope_parameters["rope_scale"]
    if schedule is None and calibrated:
        # The position parameters are right for this very temperature.
        temperature = (model.config.drope_parameters["gate"] or {}).get("temperature", 1.0)
        return DroPESchedule(
            warmup=0,
            transition=0,
            temperature_curve="constant",
            temperature_floor=min(temperature, 0.1),
            initial_temperature=temperature,
        )
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


def _save(model: Any, source: Path, target: Path) -> None:
    model.save_pretrained(target)
    record = (RECORD,) if (source / RECORD).is_file() else ()
    for name in (*other_files(source), *record):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if name != METRICS_FILE:
            shutil.copyfile(source / name, target / name)

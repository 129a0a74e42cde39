"""SmolLM2-135M up to twice its window: recalibrated forms and RoPE trained on the same tokens, evaluated at 512 to 16,384.

python examples/smollm2_length.py SMOLLM2 CORPUS.jsonl OUT [--tokens N] [--only NAME ...]

Texts and calibration are those of smollm2_recalibration.py; rows have 2048 tokens. Models, checkpoints and results are kept in
OUT, and a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from smollm2_recalibration import STEADY, Experiment
from transformers import AutoModelForCausalLM, PrinterCallback, TrainingArguments

from hf_drope import Distillation, DroPECallback, DroPETrainer, evaluate
from hf_drope.folder_attention_scale import fit_checkpoint_attention_scale
from hf_drope.folder_calibration import text_hashes
from hf_drope.model_card import RECORD, SOURCE_CARD, record_training, shown_command
from hf_drope.record import METRICS_FILE, ConvergenceRecord, read_record
from hf_drope.training import train_attention_and_position

LENGTH = 2048
LOW_RANK = {"position_bias": {"type": "low_rank", "rank": 64, "max_distance": 8192}}


class Form(NamedTuple):
    start: Callable[[Experiment], Path]
    learning_rate: float
    distill: float = 0.0


FORMS = {
    "RoPE, trained": Form(lambda run: Path(run.source), 1e-4),
    "disentangled": Form(lambda run: run.calibrated_folder("disentangled"), 1e-4),
    "low rank": Form(lambda run: run.calibrated_folder("nope", **LOW_RANK), 3e-4),
    "NoPE": Form(lambda run: run.converted_folder("nope"), 1e-3, distill=0.5),
}


class Evaluation(NamedTuple):
    """One call of `evaluate`: what is affordable at these lengths."""

    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    trials: int
    text_tokens: int
    rope_scaling: tuple[str, ...] = ()
    position_scaling: tuple[str, ...] = ()


EVALUATIONS = {
    "window": Evaluation((512, 2048), ("perplexity", "passkey", "multikey"), 50, 32768),
    "whole-window": Evaluation((8192,), ("perplexity", "passkey", "multikey"), 10, 32768),
    "beyond": Evaluation((16384,), ("perplexity", "passkey", "multikey"), 8, 32768, ("ntk", "yarn"), ("ntk", "yarn")),
}


def train(run: Experiment, form: Form, folder: Path, tokens: int) -> Any:
    """Attention projections and position parameters, on the same rows in the same order for every form."""
    model: Any = AutoModelForCausalLM.from_pretrained(form.start(run), dtype=torch.float32)
    is_converted = hasattr(model, "set_rope_scale")
    if is_converted:
        train_attention_and_position(model)
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("self_attn" in name)
    rows = [{"input_ids": row, "labels": row} for row in long_rows(run)]
    steps = round(tokens / LENGTH)
    if steps > len(rows):
        raise SystemExit(
            f"The texts have {len(rows) * LENGTH} tokens for training; give fewer than {tokens} with --tokens."
        )
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=form.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=5,
        save_steps=25,
        save_total_limit=1,
        bf16=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    callbacks: list[Any] = [DroPECallback(STEADY)] if is_converted else []
    trainer = DroPETrainer(
        model=model,
        args=arguments,
        train_dataset=rows[:steps],
        callbacks=[*callbacks, ConvergenceRecord(LENGTH)],
        distill=Distillation(run.rope(), weight=form.distill, top_k=64) if form.distill else None,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return model.eval()


def long_rows(run: Experiment) -> torch.Tensor:
    ids = [run.tokens(run.text[name]) for name in run.training]
    rows = torch.cat([row[: len(row) // LENGTH * LENGTH].view(-1, LENGTH) for row in ids])
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]


def keep(run: Experiment, name: str, tokens: int) -> Path:
    """The folder of a trained form, which is made where it is not there."""
    folder = run.out / name
    if not folder.exists():
        part, started = run.out / f".{name}", time.monotonic()
        model = train(run, FORMS[name], part, tokens)
        for left in part.glob("checkpoint-*"):
            shutil.rmtree(left)
        model.save_pretrained(part)
        run.tokenizer.save_pretrained(part)
        if FORMS[name].start(run) != Path(run.source):
            leave_records(run, FORMS[name], part)
        part.rename(folder)
        print(f"{name}: {tokens} tokens in {(time.monotonic() - started) / 60:.0f} minutes", flush=True)
    return folder


def leave_records(run: Experiment, form: Form, folder: Path) -> None:
    """What `hf-drope card` tells of a converted form: its conversion and calibration, and its training."""
    start = form.start(run)
    for file in (RECORD, SOURCE_CARD):
        if (start / file).exists():
            shutil.copy(start / file, folder / file)
    logged = [entry for entry in read_record(folder / METRICS_FILE) if "loss" in entry]
    training = {
        "tokens": logged[-1]["tokens"],
        "steps": logged[-1]["step"],
        "sequences": f"rows of {LENGTH} tokens",
        "text_sha256": text_hashes([run.corpus]),
        "train": "attention projections and position parameters",
        "learning_rate": form.learning_rate,
        "position_learning_rate": 10 * form.learning_rate,
        "distill": form.distill,
        "bf16": True,
        "first_loss": logged[0]["loss"],
        "last_loss": logged[-1]["loss"],
        "seconds": logged[-1]["seconds"],
        "command": shown_command(sys.argv),
    }
    record_training(folder, start, training)


def scaled(run: Experiment, name: str) -> Path | None:
    """A copy of a trained form with an attention scale past the rows it was trained on; None where none helps."""
    folder, marker = run.out / f"{name}, scaled", run.out / f"{name}.no-scale"
    if not folder.exists() and not marker.exists():
        part = run.out / f".{name}, scaled"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(run.out / name, part)
        report = fit_checkpoint_attention_scale(
            part,
            [text_file(run, "EMMA")],
            lengths=[2 * LENGTH, 4 * LENGTH],
            original_length=LENGTH,
            dtype="bfloat16",
        )
        print(f"{name}\n{report.describe()}", flush=True)
        if report.coefficient is None:
            shutil.rmtree(part)
            marker.touch()
        else:
            part.rename(folder)
    return folder if folder.exists() else None


def text_file(run: Experiment, name: str) -> Path:
    file = run.out / f"{name}.txt"
    if not file.exists():
        file.write_text(run.text[name], encoding="utf-8")
    return file


def measure(run: Experiment, name: str, models: list[Path]) -> None:
    settings = EVALUATIONS[name]
    # From a quarter into a novel that no model was trained on.
    held_out = run.out / "held-out.txt"
    if not held_out.exists():
        text = run.text["Persuasion"]
        held_out.write_text(text[len(text) // 4 :], encoding="utf-8")
    evaluate(
        models,
        run.out / f"evaluation, {name}",
        against=run.source,
        text_files=[held_out],
        dtype="bfloat16",
        batch_size=max(1, 4096 // max(settings.lengths)),
        **settings._asdict(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("corpus")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=700_000, help="of training, for each form (default: 700000)")
    parser.add_argument(
        "--only", nargs="+", default=list(FORMS), choices=list(FORMS), metavar="NAME", help="forms to train"
    )
    parser.add_argument("--evaluate", nargs="*", default=list(EVALUATIONS), choices=list(EVALUATIONS), metavar="NAME")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    run = Experiment(arguments.source, arguments.corpus, arguments.out)
    models = [keep(run, name, arguments.tokens) for name in arguments.only]
    models += [folder for name in arguments.only if name != "RoPE, trained" if (folder := scaled(run, name))]
    for name in arguments.evaluate:
        measure(run, name, models)


if __name__ == "__main__":
    main()

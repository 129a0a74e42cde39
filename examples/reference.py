"""The reference experiment: which form keeps the window and retrieves beyond it, on a small Llama that learned both.

python examples/reference.py OUT [--seeds 0 1 2] [--trials N] [--scale S]

A Llama of 4 layers is trained with RoPE: in contexts of 64 tokens until it finds again what was said, then of 256, half on Python's
standard library and half on rows that ask. It is converted in every form, calibrated where that applies, and each form is
trained on the same further tokens, a tenth of the first; RoPE itself and its scalings are trained on those too. `evaluate`
measures all at 256 to 2048 tokens. Everything is kept in OUT, and what is there is not made again. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from reference_rows import (
    DIGITS,
    SHORT,
    SHORT_ROWS,
    VOCABULARY,
    WINDOW,
    Rows,
    make_tokenizer,
    prose_tokens,
    standard_library,
)
from reference_table import write_table
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from hf_drope import DroPECallback, DroPESchedule, DroPETrainer, apply_drope, calibrate, evaluate
from hf_drope.context_scaling import rotated_channels, scaled_rope
from hf_drope.record import ConvergenceRecord

LENGTHS = (WINDOW, 2 * WINDOW, 4 * WINDOW, 8 * WINDOW)
FACTOR = LENGTHS[-1] / WINDOW
# Rows of the window in a batch, shorter ones as many more; steps in short contexts at most, and then in the window.
BATCH, SHORT_STEPS, STEPS = 6, 12_000, 4000
RECALLED = 0.97
SHARE = 0.1
TASKS = ("perplexity", "passkey", "multikey")
STEADY = DroPESchedule(warmup=0, transition=0, temperature_curve="constant")
FADE_TERMS = DroPESchedule(warmup=0, transition=0.5, fade_terms=True, temperature_curve="constant")
TABLE = {"position_bias.max_distance": WINDOW}


@dataclass(frozen=True)
class Form:
    """One way to make a model that is trained further: converted, or the source with its RoPE scaled for `FACTOR`."""

    preset: str | None = None
    settings: dict[str, Any] | None = None
    calibrated: bool = False
    schedule: DroPESchedule = STEADY
    rope: str | None = None
    length: int = WINDOW


FORMS = {
    "RoPE": Form(),
    "PI": Form(rope="pi"),
    "NTK": Form(rope="ntk"),
    "YaRN": Form(rope="yarn"),
    "YaRN, trained at 2048": Form(rope="yarn", length=LENGTHS[-1]),
    "nope": Form("nope"),
    "simple": Form("simple", TABLE, calibrated=True),
    "gated": Form("gated", TABLE, calibrated=True),
    "drope": Form("drope", calibrated=True),
    "t5": Form("t5", calibrated=True),
    "alibi": Form("alibi"),
    "kerple": Form("kerple", calibrated=True),
    "disentangled": Form("disentangled", calibrated=True),
    "disentangled, faded": Form("disentangled", calibrated=True, schedule=FADE_TERMS),
    # Three layers of RoPE that see near keys only, and one without position that sees all.
    "hybrid": Form("nope", {"rope_layers": [0, 1, 2], "window": [WINDOW // 4] * 3 + [None]}),
}


class RowStream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, rows: Rows, count: int, length: int) -> None:
        self.rows, self.count, self.length = rows, count, length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.rows.row(self.length) for _ in range(self.count))


class UntilRecalled(TrainerCallback):
    """Ends a training when `RECALLED` of the answers are right, in rows that were not trained on."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % 200 == 0:
            rows = [self.rows.row(SHORT) for _ in range(100)]
            ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
            with torch.no_grad():
                given = model(ids.to(model.device)).logits[:, :-1].argmax(-1).cpu()
            asked = labels[:, 1:] != -100
            control.should_training_stop = bool((given == labels[:, 1:])[asked].float().mean() > RECALLED)


def rows_alike(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Mean loss of each row's labels, and of that the mean: answers, few as they are, count as much as prose."""
    logits = outputs.logits[:, :-1].float()
    losses = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none").view(len(labels), -1)
    asked = (labels[:, 1:] != -100).sum(1)
    return (losses.sum(1) / asked.clamp(min=1)).mean()


class Experiment:
    def __init__(self, out: Path, seed: int, scale: float, trials: int) -> None:
        self.out, self.folder, self.seed, self.trials = out, out / f"seed-{seed}", seed, trials
        self.scale = scale
        texts, held_out = standard_library()
        self.text_file = out / "held_out.txt"
        if not self.text_file.exists():
            out.mkdir(parents=True, exist_ok=True)
            self.text_file.write_text("\n\n".join(held_out), encoding="utf-8")
        if not (out / "tokenizer").exists():
            make_tokenizer(texts).save_pretrained(out / "tokenizer")
        self.tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
        if not (out / "prose.pt").exists():
            torch.save(prose_tokens(self.tokenizer, texts), out / "prose.pt")
        self.prose = torch.load(out / "prose.pt")

    def keep(self, name: str, make: Callable[[Path], Any]) -> Path:
        """The folder of a trained model, which is made where it is not there."""
        folder = self.folder / name
        if not folder.exists():
            started = time.monotonic()
            part = self.folder / f".{name}"
            shutil.rmtree(part, ignore_errors=True)
            model = make(part)
            model.save_pretrained(part)
            self.tokenizer.save_pretrained(part)
            part.rename(folder)
            print(f"seed {self.seed}: {name} in {time.monotonic() - started:.0f} s", flush=True)
        return folder

    def pretrained(self, folder: Path) -> Any:
        torch.manual_seed(self.seed)
        hidden = 128
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=WINDOW,
            tie_word_embeddings=True,
            initializer_range=hidden**-0.5,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        model = LlamaForCausalLM(config)
        rows = Rows(self.tokenizer, self.prose, self.seed, SHORT_ROWS)
        check = UntilRecalled(Rows(self.tokenizer, self.prose, self.seed + 1, {"facts": 1.0}))
        steps = self.train(
            model, folder / "short", rows, self.scaled(SHORT_STEPS), 3e-3, length=SHORT, callbacks=[check]
        )
        rows = Rows(self.tokenizer, self.prose, self.seed)
        steps += self.train(model, folder, rows, self.scaled(STEPS), 2e-3, decay=True)
        (folder / "steps.json").write_text(json.dumps(steps))
        return model

    def scaled(self, steps: int) -> int:
        return max(10, round(steps * self.scale))

    def form(self, form: Form, folder: Path) -> Any:
        source = self.folder / "source"
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        if form.rope:
            config = scaled_rope(model.config, form.rope, FACTOR, rotated_channels(model))
            model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32)
        if form.preset:
            model = apply_drope(model, form.preset, **(form.settings or {}))
        if form.calibrated:
            windows = self.prose[: 64 * 50 * WINDOW].view(64, 50 * WINDOW)[:, :WINDOW]
            calibrate(model, None, windows.clone(), progress=False)
        callbacks = [DroPECallback(form.schedule)] if form.preset else []
        steps = max(2, round(json.loads((source / "steps.json").read_text()) * SHARE))
        rows = Rows(self.tokenizer, self.prose, self.seed + 1000)
        self.train(model, folder, rows, steps, 1e-3, length=form.length, decay=True, callbacks=callbacks)
        return model

    def train(
        self,
        model: Any,
        folder: Path,
        rows: Rows,
        steps: int,
        rate: float,
        *,
        length: int = WINDOW,
        decay: bool = False,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> int:
        """All weights, on batches of as many tokens whatever the length of a row; returns the steps that were taken."""
        batch = max(1, BATCH * WINDOW // length)
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=rate,
            lr_scheduler_type="cosine" if decay else "constant_with_warmup",
            warmup_steps=max(1, min(200, steps // 10)),
            weight_decay=0.1,
            adam_beta2=0.95,
            logging_steps=max(1, steps // 100),
            save_strategy="no",
            bf16=True,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            seed=self.seed,
        )
        trainer = DroPETrainer(
            model=model,
            args=arguments,
            train_dataset=RowStream(rows, steps * batch, length),
            callbacks=[*callbacks, ConvergenceRecord(BATCH * WINDOW)],
            compute_loss_func=rows_alike,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        model.eval()
        return int(trainer.state.global_step)

    def run(self) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        source = self.keep("source", self.pretrained)
        models = [self.keep(name, lambda folder, form=form: self.form(form, folder)) for name, form in FORMS.items()]
        return evaluate(
            models,
            self.folder / "evaluation",
            against=source,
            lengths=LENGTHS,
            tasks=TASKS,
            text_files=[self.text_file],
            trials=self.trials,
            digits=DIGITS,
            rope_scaling=("pi", "ntk", "dynamic", "yarn"),
            position_scaling=("ntk", "yarn", "clip"),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trials", type=int, default=100, help="prompts a task and length (default: 100)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual training steps (default: 1)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = [Experiment(arguments.out, seed, arguments.scale, arguments.trials).run() for seed in arguments.seeds]
    print(write_table(results, arguments.out))


if __name__ == "__main__":
    main()

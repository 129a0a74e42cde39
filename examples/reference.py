"""The reference experiment: which form keeps the window and retrieves beyond it, on a small Llama that learned both.

python examples/reference.py OUT [--seeds 0 1 2] [--trials N] [--scale S]

A Llama of 4 layers is trained with RoPE at 256 tokens, half on Python's standard library and half on rows that ask for numbers
said before. It is converted in every form, calibrated where that applies, and each form is
trained on the same further tokens, a tenth of the first; RoPE itself and its scalings are trained on those too. `evaluate`
measures all at 256 to 2048 tokens. Everything is kept in OUT, and what is there is not made again. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from reference_rows import DIGITS, VOCABULARY, WINDOW, Rows, make_tokenizer, prose_tokens, standard_library
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
    TrainingArguments,
)

from hf_drope import DroPECallback, DroPESchedule, DroPETrainer, apply_drope, calibrate, evaluate
from hf_drope.context_scaling import rotated_channels, scaled_rope
from hf_drope.record import ConvergenceRecord

LENGTHS = (WINDOW, 2 * WINDOW, 4 * WINDOW, 8 * WINDOW)
FACTOR = LENGTHS[-1] / WINDOW
BATCH, STEPS = 16, 4000
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
    """Rows as a run needs them; a run of further training (`more`) has those of the end of the first."""

    def __init__(self, rows: Rows, steps: int, batch: int, length: int, more: bool) -> None:
        self.rows, self.steps, self.batch, self.length, self.more = rows, steps, batch, length, more

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self.steps):
            yield from self.rows.batch(self.batch, 1.0 if self.more else step / self.steps, self.length)


def rows_alike(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Mean loss of each row's labels, and of that the mean: answers, few as they are, count as much as prose."""
    logits = outputs.logits[:, :-1].float()
    losses = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none").view(len(labels), -1)
    asked = (labels[:, 1:] != -100).sum(1)
    return (losses.sum(1) / asked.clamp(min=1)).mean()


class Experiment:
    def __init__(self, out: Path, seed: int, scale: float, trials: int) -> None:
        self.out, self.folder, self.seed, self.trials = out, out / f"seed-{seed}", seed, trials
        self.steps = max(10, round(STEPS * scale))
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
        return self.train(model, folder, self.steps, 1.5e-3)

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
        schedule = form.schedule if form.preset else None
        steps = max(2, round(self.steps * SHARE))
        return self.train(model, folder, steps, 1e-3, schedule=schedule, length=form.length, more=True)

    def train(
        self,
        model: Any,
        folder: Path,
        steps: int,
        rate: float,
        *,
        schedule: DroPESchedule | None = None,
        length: int = WINDOW,
        more: bool = False,
    ) -> Any:
        """All weights, on `steps` batches of as many tokens, whatever the length of a row."""
        batch = max(1, BATCH * WINDOW // length)
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, min(100, steps // 10)),
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
        rows = Rows(self.tokenizer, self.prose, seed=self.seed + 1000 * more)
        callbacks: list[Any] = [DroPECallback(schedule)] if schedule else []
        trainer = DroPETrainer(
            model=model,
            args=arguments,
            train_dataset=RowStream(rows, steps, batch, length, more),
            callbacks=[*callbacks, ConvergenceRecord(BATCH * WINDOW)],
            compute_loss_func=rows_alike,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return model.eval()

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

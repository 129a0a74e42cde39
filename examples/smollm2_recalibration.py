"""SmolLM2-135M without RoPE on its content: calibrated, recalibrated, and compared with RoPE trained on the same tokens.

python examples/smollm2_recalibration.py SMOLLM2 CORPUS.jsonl OUT [--only STATE ...] [--long] [--ablations]

SMOLLM2 is a folder with the model, CORPUS.jsonl has one document a line with the fields source, id and text: Austen's novels,
presidential addresses, Moby-Dick and the King James Bible. Training text are the novels but Persuasion and Emma, and the
addresses but those of 1981 and 2026. Perplexity is that of windows from a quarter into Persuasion and the 1981 address, and, to
see whether a model merely adapted to the texts, from Moby-Dick and the King James Bible. Results go to OUT/results.json; a
state that is in there is not measured again. About 90 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainingArguments

from hf_drope import (
    Distillation,
    DroPECallback,
    DroPESchedule,
    DroPETrainer,
    apply_drope,
    calibrate,
    convert_checkpoint,
    lora_config,
    plan_conversion,
)
from hf_drope.folder_calibration import text_hashes
from hf_drope.model_card import RECORD
from hf_drope.training import freeze_all_but_position, train_attention_and_position

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HELD_OUT = ("Persuasion", "1981-Carter-1")
OTHER_KIND = ("Moby-Dick", "King James Bible")
NOT_FOR_TRAINING = {*HELD_OUT, "EMMA", "2026-Trump-1"}
WINDOWS = {512: 4, 2048: 2}
BATCH, LENGTH = 2, 512
FADE = DroPESchedule(warmup=0, transition=0.7, fade_terms=True)
STEADY = DroPESchedule(warmup=0, transition=0, temperature_curve="constant")


class Experiment:
    def __init__(self, source: str, corpus: str, out: Path) -> None:
        self.source, self.corpus, self.out = source, corpus, out
        self.results_file = out / "results.json"
        self.results = json.loads(self.results_file.read_text()) if self.results_file.exists() else {}
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        documents = [json.loads(line) for line in Path(corpus).read_text(encoding="utf-8").split("\n") if line]
        self.text = {document["id"]: document["text"] for document in documents}
        chosen = [d for d in documents if d["source"] in ("austen", "sotu") and d["id"] not in NOT_FOR_TRAINING]
        self.training = [document["id"] for document in chosen]
        ids = [self.tokens(document["text"]) for document in chosen]
        self.calibration = torch.stack([row[len(row) // 2 :][:2048] for row in sorted(ids, key=len)[-8:]])
        blocks = torch.cat([row[: len(row) // LENGTH * LENGTH].view(-1, LENGTH) for row in ids])
        self.blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(1))]

    def tokens(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def rope(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32).eval()

    def converted_folder(self, preset: str, **settings: Any) -> Path:
        """The converted checkpoint, kept in a folder."""
        folder = self.out / f"converted-{_short_hash([preset, settings])}"
        if not folder.exists():
            convert_checkpoint(plan_conversion(self.source, preset, overrides=settings), folder, base_model=BASE_MODEL)
        return folder

    def calibrated_folder(
        self, preset: str, steps: int | None = None, output_steps: int | None = None, **settings: Any
    ) -> Path:
        """The converted and calibrated checkpoint; kept, since many states begin with it."""
        folder = self.out / f"calibrated-{_short_hash([preset, steps, output_steps, settings])}"
        if not folder.exists():
            part = Path(f"{folder}.part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(self.converted_folder(preset, **settings), part)
            model = AutoModelForCausalLM.from_pretrained(part, dtype=torch.float32)
            counts = {"steps": steps, "output_steps": output_steps}
            report = calibrate(model, None, self.calibration, progress=False, **counts)
            print("  " + report.describe().replace("\n", "\n  "), flush=True)
            model.save_pretrained(part)
            # The model card tells of it.
            record = json.loads((part / RECORD).read_text(encoding="utf-8"))
            record["calibration"] = {**report.to_dict(), "text_sha256": text_hashes([self.corpus])}
            (part / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
            part.rename(folder)
        return folder

    def calibrated(self, *which: Any, rope_fade: str = "angle", **settings: Any) -> Any:
        folder = self.calibrated_folder(*which, **settings)
        config = AutoConfig.from_pretrained(folder)
        # Of no matter to the calibration.
        config.drope_parameters["rope_fade"] = rope_fade
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()

    def without_terms(self) -> Any:
        model = self.calibrated("disentangled")
        model.set_terms_scale(0.0)
        return model

    def train(
        self, model: Any, tokens: int, schedule: DroPESchedule | None = None, distill: float = 0.0, **rates: Any
    ) -> Any:
        """Attention projections and position parameters, or adapters; the same batches in the same order for every model."""
        trained, teacher = model, None
        if rates.pop("lora_rank", None):
            from peft import get_peft_model

            trained = get_peft_model(model, lora_config(model, 16))
        elif rates.pop("position_only", False):
            freeze_all_but_position(model)
        elif hasattr(model, "set_rope_scale"):
            train_attention_and_position(model)
        else:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("self_attn" in name)
        if distill:
            own, hidden = trained is not model, rates.get("hidden_weight", 0.0)
            teacher = Distillation("self" if own else self.rope(), weight=distill, top_k=64, hidden_weight=hidden)
        batch = rates.get("batch", BATCH)
        arguments = TrainingArguments(
            output_dir=str(self.out / "trainer"),
            max_steps=round(tokens / (batch * LENGTH)),
            per_device_train_batch_size=batch,
            learning_rate=rates.get("learning_rate", 1e-4),
            lr_scheduler_type="cosine",
            warmup_steps=rates.get("warmup_steps", 5),
            logging_steps=10,
            save_strategy="no",
            bf16=True,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        rows = [{"input_ids": row, "labels": row} for row in self.blocks[: arguments.max_steps * batch]]
        trainer = DroPETrainer(
            model=trained,
            args=arguments,
            train_dataset=rows,
            callbacks=[DroPECallback(schedule)] if schedule else [],
            position_learning_rate=rates.get("position_learning_rate", 10 * arguments.learning_rate),
            distill=teacher,
            position_prediction=rates.get("position_prediction", 0.0),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return (trained.merge_and_unload() if trained is not model else model).eval()

    @torch.no_grad()
    def perplexity(self, model: Any, documents: tuple[str, ...], length: int) -> float:
        total = count = 0.0
        for document in documents:
            text = self.text[document]
            ids = self.tokens(text[len(text) // 4 :][: 8 * 2048 * 2])
            for row in ids[: length * WINDOWS[length]].view(-1, length):
                states = model.base_model(row[None]).last_hidden_state[0, :-1]
                # In chunks: 49,152 logits a token.
                for part, truth in zip(states.split(512), row[1:].split(512), strict=True):
                    total += cross_entropy(model.lm_head(part).float(), truth, reduction="sum").item()
                    count += len(truth)
        return math.exp(total / count)

    def measure(self, name: str, make: Callable[[], Any]) -> None:
        if name in self.results:
            return
        started = time.monotonic()
        model = make()
        made = time.monotonic() - started
        row: dict[str, Any] = {str(length): round(self.perplexity(model, HELD_OUT, length), 2) for length in WINDOWS}
        row["other 2048"] = round(self.perplexity(model, OTHER_KIND, 2048), 2)
        row["seconds"] = round(made)
        self.results[name] = row
        self.results_file.write_text(json.dumps(self.results, indent=2))
        print(f"{name:45} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def _short_hash(key: Any) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]


def states(run: Experiment, long: bool) -> dict[str, Callable[[], Any]]:
    low_rank = {"position_bias": {"type": "low_rank", "rank": 64, "max_distance": 8192}}
    rows: dict[str, Callable[[], Any]] = {
        "RoPE": run.rope,
        "dropped": lambda: apply_drope(run.rope(), "nope"),
        "disentangled, closed form": lambda: run.calibrated("disentangled", 0, 0),
        "disentangled, descent towards attention only": lambda: run.calibrated("disentangled", output_steps=0),
        "disentangled, calibrated": lambda: run.calibrated("disentangled"),
        "low rank 64, calibrated": lambda: run.calibrated("nope", **low_rank),
        "drope (score gate), calibrated": lambda: run.calibrated("drope"),
        "RoPE, 35k tokens": lambda: run.train(run.rope(), 35_000),
        "RoPE, 100k tokens": lambda: run.train(run.rope(), 100_000),
        "disentangled, 35k tokens": lambda: run.train(run.calibrated("disentangled"), 35_000, STEADY),
        "disentangled, 100k tokens": lambda: run.train(run.calibrated("disentangled"), 100_000, STEADY),
        "low rank 64, 100k tokens": lambda: run.train(
            run.calibrated("nope", **low_rank), 100_000, STEADY, learning_rate=3e-4
        ),
        "disentangled, LoRA 16, 100k tokens": lambda: run.train(
            run.calibrated("disentangled"), 100_000, STEADY, lora_rank=16, learning_rate=5e-4
        ),
    }
    nope = {"distill": 0.5, "hidden_weight": 1.0, "learning_rate": 1e-3, "batch": 1}
    rows["NoPE (dropped at once, distilled), 100k tokens"] = lambda: run.train(run.without_terms(), 100_000, **nope)
    rows["NoPE (terms faded out, distilled), 100k tokens"] = lambda: run.train(
        run.calibrated("disentangled"), 100_000, FADE, **nope
    )
    if long:
        rows["NoPE (dropped at once, distilled), 500k tokens"] = lambda: run.train(run.without_terms(), 500_000, **nope)
    return rows


def ablations(run: Experiment) -> dict[str, Callable[[], Any]]:
    """What helps after a calibrated start, each part of the schedule alone, and without one: 35k tokens."""

    def trained(schedule: DroPESchedule = STEADY, rope_fade: str = "angle", **rates: Any) -> Callable[[], Any]:
        return lambda: run.train(run.calibrated("disentangled", rope_fade=rope_fade), 35_000, schedule, **rates)

    def dropped(**rates: Any) -> Callable[[], Any]:
        return lambda: run.train(apply_drope(run.rope(), "nope"), 35_000, **rates)

    fading = DroPESchedule(warmup=0.3, transition=0)
    cooled = DroPESchedule(warmup=0, transition=0.3)
    return {
        "content term as it is (M = 1), closed form": lambda: run.calibrated("disentangled", 0, 0, content="identity"),
        **{
            f"rank {rank}, calibrated": lambda rank=rank: run.calibrated("disentangled", rank=rank) for rank in (32, 24)
        },
        "position parameters alone, distilled": trained(position_only=True, distill=1.0, position_learning_rate=1e-3),
        "distilled, weight 0.5": trained(distill=0.5),
        "one learning rate": trained(position_learning_rate=1e-4),
        "no learning-rate warm-up": trained(warmup_steps=0),
        **{
            f"RoPE on the content fades, {fade}": trained(fading, rope_fade=fade)
            for fade in ("angle", "blend", "frequency")
        },
        "position prediction, 0.1": trained(fading, position_prediction=0.1),
        "score gate, T = 1": lambda: run.train(run.calibrated("drope"), 35_000, STEADY, learning_rate=3e-4),
        "score gate, T falls to 0.1": lambda: run.train(run.calibrated("drope"), 35_000, cooled, learning_rate=3e-4),
        "not calibrated, dropped, batches of 4 at 3e-4": dropped(batch=4, learning_rate=3e-4),
        "not calibrated, dropped, batches of 1 at 1e-3": dropped(batch=1, learning_rate=1e-3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("corpus")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", metavar="STATE", help="states to measure, by the beginning of their names")
    parser.add_argument("--long", action="store_true", help="also NoPE on 500k tokens, three quarters of an hour more")
    parser.add_argument("--ablations", action="store_true", help="the parts of the schedule instead of the main table")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    run = Experiment(arguments.source, arguments.corpus, arguments.out)
    table = ablations(run) if arguments.ablations else states(run, arguments.long)
    for name, make in table.items():
        if arguments.only is None or name.startswith(tuple(arguments.only)):
            run.measure(name, make)


if __name__ == "__main__":
    main()

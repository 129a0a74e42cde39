"""`hf-drope demo`: train a small Llama with RoPE, convert it, recalibrate it in stages, compare by context length.

The text is the source code of Python's own standard library, read as bytes, so nothing is downloaded. Two models get the
same extra tokens: the converted one and, as the honest yardstick, the RoPE model itself.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

import hf_drope  # noqa: F401  (registers the classes)

from .conversion_plan import ConversionError, plan_conversion
from .convert import convert_checkpoint
from .drope_parameters import DroPEParameters
from .model_card import record_training, update_card
from .training import DroPECallback, DroPETrainer

WINDOW = 128
LENGTHS = (WINDOW, 2 * WINDOW, 4 * WINDOW, 8 * WINDOW)
_BATCH = 16
_PRETRAINING_STEPS, _RECALIBRATION_STEPS = 800, 300
_TRAINING_BYTES, _HELD_OUT_BYTES = 6_000_000, 400_000
_MARK, _HELD_OUT, _EVALUATION = "demo.json", "held_out.txt", "evaluation"


def run_demo(out: str | Path, parameters: DroPEParameters, *, scale: float = 1.0) -> str:
    """Run the demo.

    Args:
        out: folder for the two models, `held_out.txt`, `demo.json` and `demo.png` (with matplotlib); an earlier demo there, with
            its evaluation, is replaced.
        parameters: settings of the converted model.
        scale: multiplies the number of training steps.

    Returns:
        A table of held-out perplexity by context length, where everything lies, and the command that looks further.

    Raises:
        ValueError: `out` holds something else than an earlier demo, or `scale` is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it has to be above 0.")
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise ConversionError(f"{folder} is not empty and holds no earlier demo; give another folder with --out.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text("{}\n")
    for name in ("rope", "converted", "trainer", _EVALUATION):
        shutil.rmtree(folder / name, ignore_errors=True)

    started = time.monotonic()
    train, held_out = _standard_library()
    # The last character may be cut.
    text = bytes(held_out.tolist()).decode("utf-8", errors="ignore")
    (folder / _HELD_OUT).write_bytes(text.encode("utf-8"))
    steps, more = (max(2, round(count * scale)) for count in (_PRETRAINING_STEPS, _RECALIBRATION_STEPS))
    evaluations = 4 * len(LENGTHS)
    with tqdm(total=steps + 2 * more + evaluations, unit="step", file=sys.stderr, mininterval=0.5) as bar:
        bar.set_description("train with RoPE")
        rope = _pretrain(train, steps, bar)
        rope.save_pretrained(folder / "rope")
        byte_tokenizer().save_pretrained(folder / "rope")

        plan = plan_conversion(folder / "rope", parameters)
        convert_checkpoint(plan, folder / "converted", progress=False)
        converted = AutoModelForCausalLM.from_pretrained(folder / "converted", dtype=torch.float32)
        rows = {"RoPE": _by_length(rope, held_out, bar), "converted, untrained": _by_length(converted, held_out, bar)}

        bar.set_description("recalibrate in stages")
        _train(converted, train, more, folder / "trainer", bar, staged=True)
        converted.save_pretrained(folder / "converted")
        run = {"tokens": more * _BATCH * WINDOW, "steps": more, "text": "the source code of Python's standard library"}
        record_training(folder / "converted", folder / "converted", run)
        update_card(folder / "converted")
        bar.set_description("RoPE on the same tokens")
        _train(rope, train, more, folder / "trainer", bar, staged=False)
        rows["RoPE, trained on the same tokens"] = _by_length(rope, held_out, bar)
        rows["converted, recalibrated"] = _by_length(converted, held_out, bar)
        bar.set_description("done")
    shutil.rmtree(folder / "trainer", ignore_errors=True)

    seconds = time.monotonic() - started
    result = {
        "window": WINDOW,
        "lengths": LENGTHS,
        "perplexity": rows,
        "drope_parameters": parameters.to_dict(),
        "tokens": {"pretraining": steps * _BATCH * WINDOW, "recalibration": more * _BATCH * WINDOW},
        "seconds": round(seconds, 1),
    }
    (folder / _MARK).write_text(json.dumps(result, indent=2) + "\n")
    picture = _draw(rows, folder / "demo.png")
    lines = [
        f"Held-out perplexity per byte of the last {WINDOW} bytes of a context; both models were trained at {WINDOW}.",
        "",
        _table(rows),
        "",
        f"{seconds:.0f} s; the converted model is in {folder / 'converted'}, the numbers in {folder / _MARK}",
        f"picture: {picture}" if picture else "no picture: install the 'plot' extra for matplotlib",
        "",
        "next, a report by position and beside scaled RoPE, in a minute or two:",
        f"  {shlex.join(next_command(folder))}",
    ]
    return "\n".join(lines)


def next_command(folder: Path) -> list[str]:
    """The command that evaluates a demo's models; a question and its answer would take more bytes than their window has."""
    models = [str(folder / "converted"), "--against", str(folder / "rope")]
    what = ["--lengths", ",".join(map(str, LENGTHS)), "--tasks", "perplexity", "--text", str(folder / _HELD_OUT)]
    return ["hf-drope", "evaluate", *models, *what, "--out", str(folder / _EVALUATION), "--update-card"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the bytes of UTF-8, by their numbers."""
    # Byte-level tokenizers write a byte as the character of its number where that can be seen, else as one of those from 256 on.
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    vocabulary = {chr(byte if byte in seen else next(spare)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _standard_library() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library's source, split by file: every tenth file is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [file for file in files if not {"site-packages", "test", "tests", "lib2to3"} & set(file.parts)]

    def read(chosen: list[Path], limit: int) -> torch.Tensor:
        data = bytearray()
        for file in chosen:
            if len(data) >= limit:
                break
            data += file.read_bytes()
        return torch.frombuffer(data[:limit], dtype=torch.uint8).long()

    held_out = files[::10]
    return read([file for file in files if file not in set(held_out)], _TRAINING_BYTES), read(held_out, _HELD_OUT_BYTES)


def _batches(data: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - WINDOW, (_BATCH,), generator=generator)
        yield torch.stack([data[start : start + WINDOW] for start in starts])


def _pretrain(data: torch.Tensor, steps: int, bar: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, steps // 20)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _, ids in zip(range(steps), _batches(data, seed=1), strict=False):
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
        bar.update()
    return model


class _Advance(TrainerCallback):
    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.bar.update()


def _train(model: Any, data: torch.Tensor, steps: int, folder: Path, bar: Any, staged: bool) -> None:
    """The same further training for both models, but for the staged schedule."""
    rows = [
        {"input_ids": row, "labels": row}
        for _, ids in zip(range(steps), _batches(data, seed=2), strict=False)
        for row in ids
    ]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=_BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        weight_decay=0.1,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    callbacks: list[Any] = [_Advance(bar), *([DroPECallback()] if staged else [])]
    trainer = DroPETrainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
    # It would print what the table says better.
    trainer.remove_callback(PrinterCallback)
    trainer.train()


@torch.no_grad()
def _by_length(model: Any, data: torch.Tensor, bar: Any) -> list[float]:
    """Perplexity of the last `WINDOW` tokens of contexts of each length, at the same places of the text."""
    model.eval()
    ends = range(max(LENGTHS), len(data), max(LENGTHS))[:64]
    rows = []
    for length in LENGTHS:
        losses = []
        for first in range(0, len(ends), 8):
            ids = torch.stack([data[end - length : end] for end in ends[first : first + 8]]).to(model.device)
            logits = model(ids, attention_mask=torch.ones_like(ids), logits_to_keep=WINDOW).logits
            # The context's first token has nothing before it to be predicted from.
            guesses, truth = logits[:, :-1].flatten(0, 1), ids[:, -WINDOW + 1 :].flatten()
            losses.append(cross_entropy(guesses.float(), truth).item())
        rows.append(math.exp(sum(losses) / len(losses)))
        bar.update()
    model.train()
    return rows


def _table(rows: dict[str, list[float]]) -> str:
    width = max(map(len, rows))
    lines = [f"{'context':{width}}" + "".join(f"{length:>10}" for length in LENGTHS)]
    lines += [f"{name:{width}}" + "".join(f"{value:10.2f}" for value in values) for name, values in rows.items()]
    return "\n".join(lines)


def _draw(rows: dict[str, list[float]], path: Path) -> Path | None:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    styles = {"untrained": ":", "recalibrated": "-", "same tokens": "-"}
    for name, values in rows.items():
        style = next((style for part, style in styles.items() if part in name), "--")
        colour = "tab:orange" if name.startswith("converted") else "tab:blue"
        axes.plot(LENGTHS, values, style, color=colour, marker="o", label=name)
    axes.axvline(WINDOW, color="0.6", linewidth=1)
    axes.annotate(
        "trained at", (WINDOW, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points"
    )
    axes.set(
        xscale="log", yscale="log", xlabel="context length (bytes)", ylabel=f"perplexity of its last {WINDOW} bytes"
    )
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.minorticks_off()
    axes.set_yticks([2, 3, 4, 6, 10, 20, 40, 80], ["2", "3", "4", "6", "10", "20", "40", "80"])
    values_seen = [value for values in rows.values() for value in values]
    axes.set_ylim(min(values_seen) * 0.9, max(values_seen) * 1.1)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path

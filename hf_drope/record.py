"""The record of a training run: `metrics.jsonl`, a picture of it, and a stop at the first loss that is not finite."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .schedule import STAGES
from .whole_file import write_whole

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_COLOURS = dict(zip(STAGES, ("tab:orange", "tab:purple", "tab:green"), strict=True))


class ConvergenceRecord(TrainerCallback):
    """Writes each log entry, as it comes, to `metrics.jsonl` in the Trainer's `output_dir`, on the main process only.

    A line has `step` (finished optimizer steps), `tokens` (up to that step), `seconds` (of training, all resumptions
    together) and whatever was logged: `loss`, `learning_rate`, `grad_norm`, what `DroPECallback` adds, `eval_loss` and,
    last, the Trainer's summary with `train_runtime`.

    A run that begins at step 0 begins a new file. One that is resumed from step N first cuts off what an earlier run
    logged after N; entries up to N it lacks are taken from the checkpoint, which does not know their seconds.

    Give it to the Trainer after `DroPECallback`, which completes an entry (in any order with `PositionGroupsMixin`).

    Args:
        tokens_per_step: tokens of one optimizer step over all processes (below 1 a ValueError); without it no `tokens`.
    """

    def __init__(self, tokens_per_step: int | None = None) -> None:
        if tokens_per_step is not None and tokens_per_step < 1:
            raise ValueError(f"tokens_per_step is {tokens_per_step}; it has to be at least 1.")
        self.tokens_per_step = tokens_per_step
        self._path: Path | None = None
        # On the clock, less what an earlier run took.
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._path = Path(args.output_dir) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[dict[str, Any]] = []
        if state.global_step and self._path.is_file():
            try:
                kept = _up_to(read_record(self._path), state.global_step)
            except ValueError as error:
                logger.warning("%s It is written anew from the checkpoint.", error)
        self._began = time.monotonic() - max((entry.get("seconds", 0.0) for entry in kept), default=0.0)
        history = _up_to(state.log_history, state.global_step)
        if len(kept) < len(history):
            kept = [{**entry, **self._place(entry["step"])} for entry in history]
        write_whole(self._path, "".join(map(_line, kept)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # An evaluation before any training belongs to no run.
        if logs and self._path is not None:
            entry = {**logs, **self._place(state.global_step), "seconds": round(time.monotonic() - self._began, 3)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(entry))

    def _place(self, step: int) -> dict[str, int]:
        return {"step": step} if self.tokens_per_step is None else {"step": step, "tokens": step * self.tokens_per_step}


def _up_to(entries: Iterable[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """What was logged before `step` was left: a run that stopped there has a summary, the resumed run's is another."""
    kept = itertools.takewhile(lambda entry: entry.get("step", 0) <= step and "train_runtime" not in entry, entries)
    return list(kept) if step else []


def _line(entry: dict[str, Any]) -> str:
    # For tensors and NumPy's numbers.
    return json.dumps(entry, default=lambda value: value.tolist()) + "\n"


def read_record(path: str | Path) -> list[dict[str, Any]]:
    """The entries of a `metrics.jsonl`, in order; a last line that was cut while it was written is left out.

    Raises:
        ValueError: another line is no JSON object; the sentence names file and line.
    """
    entries = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            entry = None
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, line {number}, is not a JSON object.")
        entries.append(entry)
    return entries


def draw_record(metrics_file: str | Path, picture: str | Path) -> Path | None:
    """Draw the record of a run as a PNG, with a panel for each of these that was recorded:

        loss, eval_loss, eval_*_loss, distill/kl, drope/position_loss
        drope/rope_scale, drope/temperature, drope/gate and drope/terms_scale
        drope/bias_norm

    over `tokens`, or over `step` where an entry has no tokens, with the stages shaded and named. It needs no display.
    It returns the picture's path, or None where matplotlib is not installed.

    Raises:
        ValueError: the file has no entry with a loss, or a bad line.
    """
    entries = read_record(metrics_file)
    if not any(_number(entry.get("loss")) for entry in entries):
        raise ValueError(f"{metrics_file} has no entry with a loss, so there is nothing to draw.")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return None
    entries = [entry for entry in entries if "step" in entry and "train_runtime" not in entry]
    unit = "tokens" if all("tokens" in entry for entry in entries) else "step"
    evaluations = {key for entry in entries for key in entry if key.startswith("eval_") and key.endswith("loss")}
    candidates = {
        "loss": ["loss", *sorted(evaluations), "distill/kl", "drope/position_loss"],
        "strength": ["drope/rope_scale", "drope/temperature", "drope/gate", "drope/terms_scale"],
        "bias norm": ["drope/bias_norm"],
    }
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for title, names in candidates.items():
        for name in names:
            if points := [(entry[unit], entry[name]) for entry in entries if _number(entry.get(name))]:
                panels.setdefault(title, {})[name.removeprefix("drope/")] = points
    spans = _stage_spans(entries, unit)

    # A Figure of its own, not pyplot's: that would choose the backend for the whole process.
    figure = Figure(figsize=(8, 1 + 2.2 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, curves) in zip(grid, panels.items(), strict=True):
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 30 else None, markersize=3, label=name)
        for stage, begin, end in spans:
            axes.axvspan(begin, end, color=_COLOURS[stage], alpha=0.15, linewidth=0)
        axes.set_ylabel(title)
        axes.legend()
    grid[-1].set_xlabel("tokens" if unit == "tokens" else "optimizer steps")
    seen = {stage for stage, _, _ in spans}
    patches = [Patch(color=_COLOURS[stage], alpha=0.3, label=stage) for stage in STAGES if stage in seen]
    if patches:
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches))
    figure.savefig(picture, dpi=150, format="png")
    return Path(picture)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _stage_spans(entries: list[dict[str, Any]], unit: str) -> list[tuple[str, float, float]]:
    """Stage, begin and end of each stretch of one stage; an entry speaks for the steps since the one before it."""
    known = range(len(STAGES))
    points = [(int(entry["drope/stage"]), entry[unit]) for entry in entries if entry.get("drope/stage") in known]
    spans: list[tuple[str, float, float]] = []
    for index, group in itertools.groupby(points, key=lambda point: point[0]):
        places = [place for _, place in group]
        spans.append((STAGES[index], spans[-1][2] if spans else places[0], places[-1]))
    return spans


class NonFiniteLossError(RuntimeError):
    """Training was stopped: the loss, the gradient norm or a trained parameter is NaN or infinite."""


class FiniteLossMixin:
    """Stops a Trainer at a NaN or infinite loss or gradient norm, before the optimizer uses it or anything is saved.

    On one process on the CPU each batch's loss is looked at, elsewhere those of an optimizer step together, so that the
    device is waited for once a step; trained parameters are looked at before they are saved, as an update can overflow.
    With fp16's gradient scaler, which skips a step of infinite gradients, only the loss counts. DeepSpeed updates
    before the loss can be looked at; there only saving is held back.

    Mix it into any Trainer, ahead of it: `class MyTrainer(FiniteLossMixin, Trainer)`.

    Raises:
        NonFiniteLossError: from `train` and `save_model`; one sentence: the step, the last checkpoint, what to try.
    """

    _losses: Any = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        trainer: Any = self
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._losses = self._losses + loss.detach()
        complete = trainer.accelerator.sync_gradients
        if complete or (trainer.args.world_size == 1 and loss.device.type == "cpu"):
            self._check("loss", self._losses)
        if complete:
            self._losses = 0.0
            if getattr(trainer.accelerator, "scaler", None) is None:
                parameters = (p for group in trainer.optimizer.param_groups for p in group["params"])
                # Of a sharded gradient this process's part: no single norm spans parts on different meshes.
                local = [_local(p.grad) for p in parameters if p.grad is not None]
                self._check("gradient norm", get_total_norm(local))
        return loss

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        trainer: Any = self
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and not _local(parameter.detach()).isfinite().all():
                done = trainer.state.global_step
                raise NonFiniteLossError(f"{name} is not finite after step {done}; {self._advice(done - 1)}")
        super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _check(self, what: str, value: torch.Tensor) -> None:
        if not math.isfinite(number := float(value)):
            self._losses = 0.0
            done = self.state.global_step  # type: ignore[attr-defined]
            raise NonFiniteLossError(f"The {what} is {number} at step {done + 1}; {self._advice(done)}")

    def _advice(self, step: int) -> str:
        trainer: Any = self
        # Later ones are of another run; one without a state was not finished.
        folders = (Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{n}" for n in range(step, 0, -1))
        last = next((folder for folder in folders if (folder / TRAINER_STATE_NAME).is_file()), None)
        kept = f"the checkpoints up to {last} are kept" if last else "no checkpoint was saved before"
        return f"nothing was saved after that, {kept}; begin anew in another folder with a learning rate below {trainer.args.learning_rate:g}."


def _local(tensor: torch.Tensor) -> torch.Tensor:
    sharded: Any = tensor
    return sharded.to_local() if hasattr(sharded, "to_local") else tensor

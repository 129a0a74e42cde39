"""The checkpoints of a run in its folder: the newest complete one, and what is said when another cannot be written."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME

from .record import METRICS_FILE, NonFiniteLossError

logger = logging.getLogger(__name__)

# What a run was made with, in its folder.
SETTINGS_FILE = "recalibration.json"
# Bytes: less than this left, and a failed write has its reason.
_NEARLY_FULL = 1 << 20


@contextmanager
def full_disk_told(folder: Path, checkpoint: Path | None = None) -> Iterator[None]:
    """A write that fails for want of space becomes one sentence; an incomplete `checkpoint` is removed."""
    try:
        yield
    except NonFiniteLossError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if shutil.disk_usage(folder).free > _NEARLY_FULL and "No space left" not in str(error):
            raise
        what = "the result could not be written"
        if checkpoint is not None:
            shutil.rmtree(checkpoint, ignore_errors=True)
            what = f"{checkpoint.name} could not be written and was removed"
        found = checkpoints(folder)
        left, then = "there is none before it", "begin anew in another folder"
        if found:
            left, then = f"{found[max(found)]} is the last good one", "go on with --resume"
        raise OSError(f"The disk of {folder} is full: {what}, {left}; make room and {then}.") from error


def is_unbegun(folder: Path) -> bool:
    """Whether a folder is new, empty, or left by a run that was stopped before its first checkpoint."""
    if not folder.exists():
        return True
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {METRICS_FILE, SETTINGS_FILE}


def check_settings(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Record what a run is made with; a resumed run has to be made with the same.

    Raises:
        ValueError: the first setting that differs from those of the run in the folder.
    """
    file = folder / SETTINGS_FILE
    if resume and file.is_file():
        for name, before in json.loads(file.read_text(encoding="utf-8")).items():
            now = json.loads(json.dumps(settings.get(name)))
            if now != before:
                raise ValueError(
                    f"{name} is {now!r}, but the run in {folder} began with {before!r}; resume with that, or begin a new run in "
                    "another folder."
                )
    elif not resume:
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def last_checkpoint(folder: Path, max_steps: int) -> str:
    """The newest complete checkpoint; the Trainer writes `trainer_state.json` last, so a killed run's lacks it."""
    for _, path in sorted(checkpoints(folder).items(), reverse=True):
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
    raise ValueError(f"{folder} holds no complete checkpoint to resume from; begin anew without --resume.")


def checkpoints(folder: Path) -> dict[int, Path]:
    return {
        int(step): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (step := path.name.removeprefix("checkpoint-")).isdigit() and path.name.startswith("checkpoint-")
    }


def check_learning_rate(checkpoint: str, learning_rate: float, position_learning_rate: float | None) -> None:
    """A resumed run goes on with the rates in its scheduler, whatever it is told now."""
    rates = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)["base_lrs"]
    position = position_rate(learning_rate, position_learning_rate)
    given = [("learning_rate", learning_rate, rates[0])]
    # The group of the position parameters comes behind those with and without weight decay.
    given += [("position_learning_rate", position, rates[2])] if len(rates) > 2 else []
    for name, now, before in given:
        if now != before:
            raise ValueError(
                f"{name} is {now:g}, but {checkpoint} belongs to a run with {before:g}; resume with that, or begin a new run "
                "in another folder."
            )


def position_rate(learning_rate: float, position_learning_rate: float | None) -> float:
    """The learning rate of biases and gates: ten times the other where it is not given."""
    return 10 * learning_rate if position_learning_rate is None else position_learning_rate


def finished_steps(checkpoint: str) -> int:
    return json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]

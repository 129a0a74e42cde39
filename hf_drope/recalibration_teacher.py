"""The teacher of a recalibration: the source model, a folder of its predictions, or the model itself without its adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from .conversion_plan import read_source
from .distill import Distillation, check_teacher
from .folder_calibration import is_source
from .top_k_logits import TopKLogits

_TOP_K = 64


def load_teaching(
    source: str | Path | None,
    converted: Path,
    trained: Any,
    model: Any,
    top_k: int | None,
    row: Tensor,
    **settings: Any,
) -> Distillation:
    """The checked distillation of a converted folder's source.

    Args:
        source: its folder, a folder of stored predictions, or None for the model itself.
        converted: the folder of `model`, with the record of its conversion.
        trained: what the Trainer trains, `model` or adapters around it.
        top_k: tokens compared; None for the default, 0 for all.
        row: a sequence of the text, which stored predictions have to know.
        settings: more of `Distillation`.

    Raises:
        ValueError: the teacher is not the model's source, or does not fit.
    """
    teacher = _teacher(source, converted, model)
    # What is stored is cut already, and a small vocabulary has no more.
    cut = None if isinstance(teacher, TopKLogits) else min(_TOP_K, model.config.vocab_size)
    teaching = Distillation(teacher=teacher, top_k=cut if top_k is None else (top_k or None), **settings)
    check_teacher(trained, teaching)
    if isinstance(teacher, TopKLogits):
        teacher.lookup(row[None])
    return teaching


def _teacher(source: str | Path | None, converted: Path, model: Any) -> Any:
    if source is None:
        return "self"
    if not Path(source).is_dir():
        raise ValueError(f"{source} is not a folder; give the source's, or one of stored predictions.")
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
    if not is_source(folder, converted):
        raise ValueError(
            f"{folder} is not the source of {converted}: its weights are not those that the conversion recorded."
        )
    return teacher

"""The attention scale of a converted checkpoint folder, fitted and stored in place: no weights and no code change."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .attention_scale_fit import (
    MULTIPLES,
    AttentionScaleReport,
    check_model,
    check_reach,
    fit_attention_scale,
    fitting_lengths,
    fitting_window,
)
from .configuration_drope import auto_map
from .conversion_plan import RECORD, read_source
from .convert import termination_raises
from .drope_parameters import DroPEParameters, unknown
from .folder_calibration import TOKENS, load_model, load_tokenizer, refresh_card, refuse_encoder, text_hashes
from .text import leading_tokens
from .verify import quiet_transformers
from .whole_file import json_text, write_whole

_CONFIG = "config.json"


@dataclass(frozen=True)
class _Task:
    folder: Path
    ids: Tensor
    tokenizer: Any
    window: int
    lengths: list[int]


def fit_checkpoint_attention_scale(
    model_path: str | Path,
    text_files: Sequence[str | Path],
    *,
    lengths: Sequence[int] | None = None,
    original_length: int | None = None,
    tokens: int | None = None,
    dtype: str = "float32",
    progress: bool = True,
    command: Sequence[str] | None = None,
) -> AttentionScaleReport:
    """Fit the attention scale of a converted checkpoint folder and store it there, as `fit_attention_scale` does in memory.

    Its `config.json` gets the setting and `drope_conversion.json` what was found; both are replaced together, or neither.
    The model card is filled anew.

    Args:
        model_path: a converted checkpoint folder, calibrated, trained or neither.
        text_files: `.txt` or `.jsonl` (field "text") that the model was not trained on.
        lengths, original_length, progress: as in `fit_attention_scale`.
        tokens: of the text, from its beginning; default 16,384, or twice the longest length.
        dtype: "float32", "bfloat16" or "float16".
        command: the command line for the record.

    Raises:
        ValueError: one sentence on why the folder, the text or the arguments cannot be used; nothing was written.
    """
    task = _plan(model_path, text_files, lengths, original_length, tokens, dtype)
    with quiet_transformers():
        report = fit_attention_scale(
            load_model(task.folder, dtype),
            task.ids,
            tokenizer=task.tokenizer,
            lengths=task.lengths,
            original_length=task.window,
            progress=progress,
        )
    made_from = {"text_sha256": text_hashes(text_files), "dtype": dtype}
    _store(task.folder, report, made_from | ({"command": list(command)} if command else {}))
    refresh_card(task.folder)
    return report


def check_attention_scale(
    model_path: str | Path,
    text_files: Sequence[str | Path],
    *,
    lengths: Sequence[int] | None = None,
    original_length: int | None = None,
    tokens: int | None = None,
    dtype: str = "float32",
) -> None:
    """Raise what `fit_checkpoint_attention_scale` would, before any work."""
    _plan(model_path, text_files, lengths, original_length, tokens, dtype)


def _plan(
    model_path: str | Path,
    text_files: Sequence[str | Path],
    lengths: Sequence[int] | None,
    original_length: int | None,
    tokens: int | None,
    dtype: str,
) -> _Task:
    folder, content = read_source(model_path)
    kind = str(content.get("model_type"))
    if not kind.endswith("_drope"):
        raise ValueError(
            f"{folder} is a plain {kind}, which has no place for an attention scale by length; give the converted checkpoint, "
            f"before its export (hf-drope convert {folder} DST makes one)."
        )
    if not isinstance(content.get("drope_parameters"), dict):
        raise ValueError(
            f"{folder} is a public DroPE checkpoint; give it our settings first: hf-drope convert {folder} DST."
        )
    refuse_encoder(content, "an attention scale")
    if dtype not in checkpoint.RUN_DTYPES:
        raise unknown("dtype", dtype, checkpoint.RUN_DTYPES)
    if tokens is not None and tokens < 2:
        raise ValueError(f"tokens is {tokens}; it has to be at least 2.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written to, and the scale is stored there; make it writable, or copy it.")
    import transformers

    import hf_drope  # noqa: F401  (registers the classes)

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    check_model(model)
    window = fitting_window(config, original_length)
    tokenizer = load_tokenizer(folder)
    if tokens is None:
        tokens = max(TOKENS, 2 * max(lengths or [window * MULTIPLES[-1]]))
    ids = leading_tokens(text_files, tokenizer, tokens)
    lengths = fitting_lengths(len(ids), window, lengths)
    check_reach(model, max(lengths), int(ids.max()))
    return _Task(folder, ids, tokenizer, window, lengths)


def _store(folder: Path, report: AttentionScaleReport, made_from: dict[str, Any]) -> None:
    """Write config and record, and take the record back where the config cannot follow."""
    config = checkpoint.read_json(folder / _CONFIG)
    before = DroPEParameters.from_dict(config["drope_parameters"])
    settings = before.replace(attention_scale=report.attention_scale)
    config["drope_parameters"] = settings.to_dict()
    if settings.needs_own_attention != before.needs_own_attention:
        config["auto_map"] = {**config.get("auto_map", {}), **auto_map(config["model_type"], settings)}
    path = folder / RECORD
    old = path.read_text(encoding="utf-8") if path.is_file() else None
    record = {} if old is None else json.loads(old)
    # It tells of the weights it was fitted to, which may be trained on.
    weights = checkpoint.fingerprint(checkpoint.read_checkpoint(folder))
    record["attention_scale"] = {**report.to_dict(), **made_from, "weights": weights}
    with termination_raises():
        try:
            write_whole(path, json_text(record))
            write_whole(folder / _CONFIG, json_text(config))
        except BaseException:
            if old is None:
                path.unlink(missing_ok=True)
            else:
                write_whole(path, old)
            raise

"""Calibration of a converted checkpoint folder, in place: its position tensors change and nothing else."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, checkpoint_writing
from .calibration import LONGEST, CalibrationReport, calibrate, context_length
from .configuration_drope import auto_map
from .conversion_plan import RECORD, read_source
from .drope_parameters import DroPEParameters
from .model_card import update_card
from .position_modules import rotary_places
from .text import text_windows
from .whole_file import json_text, write_whole

logger = logging.getLogger(__name__)

TOKENS = 16384


def calibrate_checkpoint(
    model_path: str | Path,
    source_path: str | Path,
    text_files: Sequence[str | Path],
    *,
    tokens: int = TOKENS,
    length: int | None = None,
    steps: int | None = None,
    output_steps: int | None = None,
    seed: int = 0,
    progress: bool = True,
    command: Sequence[str] | None = None,
) -> CalibrationReport:
    """Calibrate a converted checkpoint folder in place: its position tensors change and nothing else.

    Args:
        model_path: a folder that `convert_checkpoint` wrote.
        source_path: the folder it was converted from.
        text_files: `.txt` or `.jsonl` (field "text"); windows are taken evenly from all of it.
        tokens: in all, rounded down to whole windows.
        length: tokens a window; default the source's context length, at most 8192 and at most an eighth of `tokens`: on
            SmolLM2-135M two windows of 8192 gave a start worse than eight of 2048 up to 4,000 tokens, and no better beyond.
        steps, output_steps, seed, progress: as in `calibrate`.
        command: the command line for the record.

    Raises:
        ValueError: one sentence on why the folders, the text or the arguments cannot be used; nothing was written.
    """
    folder, config = read_source(model_path)
    source_folder, source_config = read_source(source_path)
    if not str(config.get("model_type", "")).endswith("_drope"):
        raise ValueError(f"{folder} is not a converted checkpoint; convert it first: hf-drope convert {folder} DST.")
    refuse_encoder(config, "calibration of a folder")
    if (config.get("drope_parameters") or {}).get("position_bias") is None:
        raise ValueError(
            f"{folder} has no position bias to calibrate; convert its source with one, such as 'disentangled'."
        )
    _check_folders(folder, config, source_folder, source_config)
    import transformers

    import hf_drope  # noqa: F401  (registers the classes)

    tokenizer = load_tokenizer(folder)
    ids = checkpoint_windows(tokenizer, source_config, text_files, tokens, length)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    source = None
    if not rotary_places(model):
        source = transformers.AutoModelForCausalLM.from_pretrained(source_folder, dtype=torch.float32)
    report = calibrate(model, source, ids, steps=steps, output_steps=output_steps, seed=seed, progress=progress)
    changed = {name: tensor for name, tensor in model.state_dict().items() if ".position_bias." in name}
    checkpoint_writing.replace_tensors(folder, changed)
    _write_record(folder, report, text_files, command)
    refresh_card(folder)
    return report


def predicts_next_tokens(config: dict[str, Any]) -> bool:
    """Whether a folder with this config holds a causal language model."""
    names = config.get("architectures") or []
    return "AutoModelForCausalLM" in auto_map(str(config.get("model_type"))) and not any("MaskedLM" in n for n in names)


def refuse_encoder(config: dict[str, Any], what: str) -> None:
    """Raise ValueError for a folder that predicts no next tokens: `what` is done with those."""
    if not predicts_next_tokens(config):
        raise ValueError(
            f"{what} is for causal language models, and this is a {config['model_type']} that sees both sides; call "
            "hf_drope.calibrate with output_steps=0, and train it with a Trainer and DroPECallback."
        )


def check_calibration(
    source: Path,
    parameters: DroPEParameters,
    text_files: Sequence[str | Path],
    *,
    tokens: int = TOKENS,
    length: int | None = None,
    steps: int | None = None,
    output_steps: int | None = None,
) -> None:
    """Raise what `calibrate_checkpoint` would, before the conversion whose result it is to calibrate."""
    if parameters.position_bias is None:
        raise ValueError("There is no position bias to calibrate; convert with one, such as --preset disentangled.")
    if not text_files:
        raise ValueError("Calibration needs text; give it with --text FILE.")
    _, config = read_source(source)
    refuse_encoder(config, "calibration of a folder")
    for name, count in (("steps", steps), ("output_steps", output_steps)):
        if count is not None and count < 0:
            raise ValueError(f"{name} is {count}; it has to be at least 0.")
    if parameters.position_bias.get("learned") is False:
        raise ValueError("This bias has no parameters to calibrate; set learned to true or choose another type.")
    layers = config.get("num_hidden_layers") or config.get("n_layer")
    if len(set(parameters.rope_layers or ())) == layers and parameters.position_bias["type"] == "disentangled":
        raise ValueError("rope_layers names all layers, which leaves none with a bias to calibrate; name fewer.")
    ids = checkpoint_windows(load_tokenizer(source), config, text_files, tokens, length)
    vocabulary = config.get("vocab_size")
    if vocabulary is not None and int(ids.max()) >= vocabulary:
        raise ValueError(f"The text holds token {int(ids.max())}, but the model knows only {vocabulary}.")


def load_tokenizer(folder: Path) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no tokenizer that loads: {str(error).splitlines()[0]}") from error


def load_model(folder: Path, dtype: str, config: Any = None) -> Any:
    """The causal language model of a folder, in evaluation mode, on the GPU where there is one.

    Raises:
        ValueError: the folder lacks a weight; Transformers would draw it at random.
    """
    import transformers

    answer: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, output_loading_info=True
    )
    model, loaded = answer
    missing = sorted(loaded["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{folder} holds no weights for {missing[0]}{more}; save the whole causal language model there."
        )
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def checkpoint_windows(
    tokenizer: Any, config: dict[str, Any], text_files: Sequence[str | Path], tokens: int, length: int | None
) -> Tensor:
    """The windows (n, length) that `calibrate_checkpoint` takes from text files; arguments and errors as there."""
    context = context_length(config)
    if tokens < 2:
        raise ValueError(f"tokens is {tokens}; it has to be at least 2.")
    if length is None:
        length = min(context, LONGEST, max(tokens // 8, 2))
    if not 2 <= length <= min(context, tokens):
        raise ValueError(
            f"length is {length}; it has to be from 2 to {min(context, tokens)}, the source's context or all the tokens."
        )
    return text_windows(text_files, tokenizer, length, tokens // length)


def _check_folders(folder: Path, config: dict[str, Any], source: Path, source_config: dict[str, Any]) -> None:
    """Refuse a source that is not the one `folder` was converted from, by what the conversion recorded and by weights."""
    if f"{source_config.get('model_type')}_drope" != config["model_type"]:
        raise ValueError(
            f"{source} is a {source_config.get('model_type')}, which does not convert to {config['model_type']}."
        )
    mine, theirs = checkpoint.read_checkpoint(folder), checkpoint.read_checkpoint(source)
    for name, info in mine.tensors.items():
        other = theirs.tensors.get(name)
        if other is not None and other.shape != info.shape:
            raise ValueError(
                f"{source} is not the source of {folder}: {name} is {list(other.shape)} there and {list(info.shape)} here."
            )
    names = sorted(set(mine.tensors) & set(theirs.tensors))
    if not is_source(source, folder):
        raise ValueError(
            f"{source} is not the source of {folder}: its weights are not those that the conversion recorded."
        )
    if checkpoint.fingerprint(mine, names) != checkpoint.fingerprint(theirs, names):
        raise ValueError(
            f"The weights of {folder} are not those of {source} any more; calibrate before training, or convert anew."
        )


def is_source(source: Path, folder: Path) -> bool:
    """Whether `source` has the weights that the conversion to `folder` recorded; True where nothing was recorded."""
    record = json.loads((folder / RECORD).read_text(encoding="utf-8")) if (folder / RECORD).is_file() else {}
    known = record.get("source_fingerprint")
    return known is None or known == checkpoint.fingerprint(checkpoint.read_checkpoint(source))


def refresh_card(folder: Path) -> None:
    """Refill the model card; one that cannot be refilled does not undo the work that it would tell of."""
    try:
        update_card(folder)
    except (OSError, ValueError) as error:
        logger.warning("The model card was left as it is: %s", error)


def text_hashes(text_files: Sequence[str | Path]) -> dict[str, str]:
    """SHA-256 of each text file by its name."""
    return {Path(file).name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in text_files}


def _write_record(
    folder: Path, report: CalibrationReport, text_files: Sequence[str | Path], command: Sequence[str] | None
) -> None:
    path = folder / RECORD
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    record["calibration"] = {**report.to_dict(), "text_sha256": text_hashes(text_files)}
    if command:
        record["calibration"]["command"] = list(command)
    write_whole(path, json_text(record))

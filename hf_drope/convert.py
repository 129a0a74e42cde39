"""Conversion of checkpoint folders by a plan; nothing is loaded.

It works in a hidden folder next to the target and renames that at the end, so a target is either absent or complete.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import __version__, checkpoint, checkpoint_writing
from .configuration_drope import TRAVELLING_FILES, public_settings
from .conversion_additions import SEED, ConversionError, first_of, new_tensors
from .conversion_plan import (
    LEARNED_TABLE,
    RECORD,
    ConversionPlan,
    quantised_key,
    read_source,
    refuse_model,
    why_dropped,
)
from .drope_parameters import DroPEParameters
from .model_card import hub_origin, update_card
from .new_folder import new_folder, remove_leftovers

logger = logging.getLogger(__name__)


def convert_checkpoint(
    plan: ConversionPlan,
    dst: str | Path,
    *,
    overwrite: bool = False,
    progress: bool = True,
    base_model: str | None = None,
    command: Sequence[str] | None = None,
) -> Path:
    """Execute a plan: the converted checkpoint appears at `dst`, complete, or not at all.

    Args:
        plan: from `plan_conversion`.
        dst: target folder; must not exist or be empty, unless `overwrite`.
        progress: show a bar by bytes where standard error is a terminal.
        base_model: the source's repository for the record and the model card, as name or name@revision; default what a
            snapshot folder of huggingface_hub says, if the source is one.
        command: the command line for the record.

    Raises:
        ConversionError: the target is refused, or there is not enough space; nothing was written.
    """
    target = check_target(plan.source, dst, plan.bytes, overwrite)
    with termination_raises(), new_folder(target) as work:
        _write(plan, work, progress)
        _write_json(work / RECORD, _record(plan, base_model, command))
        update_card(work)
    for reason, count in Counter(plan.dropped.values()).items():
        logger.info("%d × %s left out of %s", count, reason, target.name)
    return target


def check_target(source: Path, dst: str | Path, needed: int, overwrite: bool) -> Path:
    """The folder that may be written, cleared of what killed runs left beside it.

    Raises:
        ConversionError: it overlaps the source, is not empty, or has fewer than `needed` bytes free; nothing was written.
    """
    target = Path(dst).resolve()
    _refuse_overlap(source, target)
    remove_leftovers(target)
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ConversionError(f"The target {target} is not empty; choose another, or overwrite it with --overwrite.")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise ConversionError(f"{target.parent} has {free} bytes free, and {needed} are needed.")
    return target


@contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM ends the block with SystemExit, so that it cleans up; a handler of the program's own stays in charge."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _refuse_overlap(source: Path, target: Path) -> None:
    source = source.resolve()
    same = target.exists() and target.samefile(source)
    if same or target == source or source in target.parents or target in source.parents:
        raise ConversionError(f"The target {target} and the source {source} overlap; choose a folder of its own.")
    if target.exists() and not target.is_dir():
        raise ConversionError(f"The target {target} is a file; choose a folder.")
    if target.is_mount():
        raise ConversionError(f"The target {target} is a mount point, which cannot be replaced; choose a folder in it.")


def _write(plan: ConversionPlan, work: Path, progress: bool) -> None:
    from tqdm import tqdm

    weight_map: dict[str, str] = {}
    total = 0
    with tqdm(total=plan.bytes, unit="B", unit_scale=True, disable=None if progress else True, file=sys.stderr) as bar:
        for shard in plan.shards:
            if plan.is_safetensors:
                header = checkpoint.read_shard(plan.source / shard.source)
                names = shard.kept if shard.kept is not None else tuple(header.tensors)
                if shard.kept is None:
                    checkpoint_writing.copy_file(header.path, work / shard.target, bar.update)
                else:
                    checkpoint_writing.copy_tensors(header, names, work / shard.target, bar.update)
                total += sum(header.tensors[name].end - header.tensors[name].start for name in names)
            else:
                state = checkpoint.load_bin(plan.source / shard.source)
                names = shard.kept or ()
                checkpoint_writing.write_tensors({name: state[name] for name in names}, work / shard.target, bar.update)
                total += shard.bytes
            weight_map.update(dict.fromkeys(names, shard.target))
        if plan.extra_shard is not None:
            new = new_tensors(plan.config, plan.parameters, plan.additions)
            checkpoint_writing.write_tensors(new, work / plan.extra_shard, bar.update)
            weight_map.update(dict.fromkeys(new, plan.extra_shard))
            total += sum(tensor.numel() * 4 for tensor in new.values())
        if len(set(weight_map.values())) > 1:
            checkpoint_writing.write_index(work, weight_map, total)
        for name in plan.copied:
            copy = work / plan.target_name(name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            checkpoint_writing.copy_file(plan.source / name, copy, bar.update)
    for name in TRAVELLING_FILES:
        shutil.copyfile(Path(__file__).parent / name, work / name)
    _write_json(work / "config.json", plan.config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _record(plan: ConversionPlan, base_model: str | None, command: Sequence[str] | None) -> dict[str, Any]:
    config = (plan.source / "config.json").read_bytes()
    origin = hub_origin(plan.source, base_model)
    return {
        **({"command": list(command)} if command else {}),
        **({"base_model": origin} if origin else {}),
        "source": plan.source.resolve().name,
        "source_config_sha256": hashlib.sha256(config).hexdigest(),
        "source_fingerprint": checkpoint.fingerprint(checkpoint.read_checkpoint(plan.source)),
        "drope_parameters": plan.parameters.to_dict(),
        "dropped": plan.dropped,
        "added": plan.added,
        "left_out": plan.left_out,
        "seed": SEED,
        "versions": {
            "hf-drope": __version__,
            **{name: importlib.metadata.version(name) for name in ("transformers", "torch", "safetensors")},
        },
    }


def _convertible(config: dict[str, Any]) -> str:
    try:
        refuse_model(config)
    except ConversionError as error:
        return f"no: {error}"
    return "yes"


def inspect_checkpoint(path: str | Path) -> dict[str, Any]:
    """What is in a checkpoint folder, read from its JSON and weight headers: architecture, positions, weights.

    Raises:
        ValueError: one sentence on what cannot be read.
    """
    source, config = read_source(path)
    weights = checkpoint.read_checkpoint(source)
    heads = first_of(config, "num_attention_heads", "n_head")
    hidden = first_of(config, "hidden_size", "n_embd")
    rope = config.get("rope_parameters") or {
        key: config[key] for key in ("rope_theta", "rope_scaling", "rotary_dim") if config.get(key) is not None
    }
    table = next((list(info.shape) for name, info in weights.tensors.items() if LEARNED_TABLE.search(name)), None)
    dropped = Counter(filter(None, (why_dropped(name, DroPEParameters()) for name in weights.tensors)))
    return {
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
        "layers": first_of(config, "num_hidden_layers", "n_layer"),
        "heads": heads,
        "key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (hidden // heads if heads and hidden else None),
        "context_length": first_of(config, "max_position_embeddings", "n_positions"),
        "rope": rope or None,
        "learned_table": table,
        "tied": config.get("tie_word_embeddings"),
        "parameters": checkpoint.parameter_count(weights.tensors.values()),
        "dtypes": dict(Counter(info.dtype for info in weights.tensors.values())),
        "files": {name: len(tensors) for name, tensors in weights.files.items()},
        "quantised": bool(config.get("quantization_config")) or quantised_key(weights.tensors) is not None,
        "drope_parameters": config.get("drope_parameters") or public_settings(config),
        "convertible": _convertible(config),
        "conversion_would_drop": dict(dropped),
    }

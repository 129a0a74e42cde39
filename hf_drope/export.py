"""A model without position encoding as a plain checkpoint of its own architecture, which needs no code of ours.

Rotary models get rope settings that turn nothing (`stock_config`), learned tables get zeros, a constant attention scale is
multiplied into the weights that make the queries. All other weights are copied byte for byte, and so is every other file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checkpoint, checkpoint_writing
from .configuration_drope import TRAVELLING_FILES, base_model_type, drope_config_class
from .conversion_additions import ConversionError, read_config
from .conversion_plan import other_files, read_source
from .convert import check_target, termination_raises
from .drope_parameters import DroPEParameters
from .model_card import card_of_export
from .new_folder import new_folder

_TABLES_ALONE = "model-position.safetensors"


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write.

    Attributes:
        config: the stock `config.json`.
        shards: weight file of the source → its name in the export.
        added: key → shape of the learned position tables, which will be zero.
        scale: the factor on the queries, and `folds` the weights (by key) that take it.
        copied: other files, unchanged.
    """

    source: Path
    config: dict[str, Any]
    weights: checkpoint.Checkpoint
    shards: dict[str, str]
    added: dict[str, list[int]]
    added_shard: str | None
    scale: float
    folds: dict[str, Any] = field(repr=False)
    copied: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes to write, the copied files included."""
        sizes = (self.source / name for name in (*self.weights.files, *self.copied))
        return sum(path.stat().st_size for path in sizes) + 4 * sum(map(math.prod, self.added.values()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source.name,
            "model_type": self.config["model_type"],
            "architectures": self.config.get("architectures"),
            "rope_parameters": self.config.get("rope_parameters"),
            "shards": self.shards,
            "added": self.added,
            "scale": self.scale,
            "scaled": sorted(self.folds),
            "copied": list(self.copied),
            "bytes": self.bytes,
        }

    def describe(self) -> str:
        """The plan in a few lines for a person."""
        lines = [f"{self.source.name} → {self.config['model_type']} without position encoding"]
        for source, target in self.shards.items():
            scaled = sum(key in self.folds for key in self.weights.files[source])
            how = f"{scaled} weights times {self.scale:g}" if scaled else "copied as bytes"
            lines.append(f"  {source} → {target}: {how}")
        for key, shape in self.added.items():
            lines.append(f"  added: {key} {shape}, zeros, in {self.added_shard}")
        lines.append(f"  {len(self.copied)} other files unchanged")
        return "\n".join(lines)


def plan_export(src: str | Path) -> ExportPlan:
    """Say what exporting the converted checkpoint in `src` would write. Reads no weights.

    Raises:
        ConversionError: the model has something that its stock architecture cannot express; the message says what.
    """
    from .stock_config import StockForm

    source, config = read_source(src)
    settings = _settings(source, config)
    weights = checkpoint.read_checkpoint(source)
    if not weights.is_safetensors:
        raise ConversionError(f"{source.name} holds no safetensors; save the model with save_pretrained first.")
    form = StockForm(config)
    scale = form.scale * (settings.attention_scale or {}).get("factor", 1.0)
    added = _added_tables(form.model, weights.tensors)
    shards, added_shard = _plan_shards(list(weights.files), bool(added))
    return ExportPlan(
        source=source,
        config=form.config,
        weights=weights,
        shards=shards,
        added=added,
        added_shard=added_shard,
        scale=scale,
        folds={} if math.isclose(scale, 1.0) else _folds(type(form.model), config, weights.tensors),
        copied=tuple(name for name in other_files(source) if name not in TRAVELLING_FILES),
    )


def _settings(source: Path, config: dict[str, Any]) -> DroPEParameters:
    model_type = str(config.get("model_type"))
    if base_model_type(model_type) == model_type:
        raise ConversionError(
            f"{source.name} is a {model_type} model, which is no converted one; there is nothing to export."
        )
    settings = DroPEParameters.from_dict(_drope_config(config).drope_parameters)
    if settings.rope_scale != 0.0:
        raise ConversionError(
            f"rope_scale is {settings.rope_scale:g}; a stock model has its position encoding whole or not at all: set it to 0, "
            "or use the source."
        )
    held = {
        "position_bias": settings.position_bias and settings.position_bias["type"],
        "gate": settings.gate and settings.gate["type"],
        "qk_norm": settings.qk_norm,
        "window": settings.window,
        "rope_layers": settings.rope_layers,
        "attention_scale": "coefficient" in (settings.attention_scale or {}) and "by length",
    }
    for name, value in held.items():
        if value:
            raise ConversionError(
                f"{name} is {value!r}, which no stock architecture has; only a model without position encoding, with at most "
                "a constant attention scale, can be exported."
            )
    return settings


def _drope_config(config: dict[str, Any]) -> Any:
    drope: Any = drope_config_class(config["model_type"])
    return read_config(drope, config)


def _added_tables(model: Any, tensors: dict[str, Any]) -> dict[str, list[int]]:
    """The learned tables that the conversion took out."""
    from .position_modules import table_places

    tables = {id(place.module.weight) for place in table_places(model)}
    found = {key: list(weight.shape) for key, weight in model.named_parameters() if id(weight) in tables}
    clash = next((key for key in found if key in tensors), None)
    if clash is not None:
        raise ConversionError(f"{clash} is still in the checkpoint, though rope_scale is 0; save the model anew first.")
    return found


def _folds(stock: type, config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    from .query_scale import find_folds

    folds = find_folds(stock, _drope_config(config))
    for key in folds:
        if key not in tensors or tensors[key].dtype not in ("F64", "F32", "F16", "BF16"):
            raise ConversionError(
                f"attention_scale has to be folded into {key}, which is not in the checkpoint under this name in a floating-point "
                "dtype; save the model with save_pretrained first."
            )
    return folds


def _plan_shards(files: list[str], added: bool) -> tuple[dict[str, str], str | None]:
    """Names of the weight files: Transformers takes a file called model.safetensors for the whole."""
    if not added:
        return {name: name for name in files}, None
    if files == [checkpoint.SAFE_WEIGHTS]:
        return {files[0]: "model-00001-of-00002.safetensors"}, "model-00002-of-00002.safetensors"
    return {name: name for name in files}, _TABLES_ALONE


def export_checkpoint(plan: ExportPlan, dst: str | Path, *, overwrite: bool = False, progress: bool = True) -> Path:
    """Execute a plan: the stock checkpoint appears at `dst`, complete, or not at all.

    Args:
        plan: from `plan_export`.
        dst: target folder; must not exist or be empty, unless `overwrite`.
        progress: show a bar by bytes where standard error is a terminal.

    Raises:
        ConversionError: the target is refused, or there is not enough space; nothing was written.
    """
    from tqdm import tqdm

    target = check_target(plan.source, dst, plan.bytes, overwrite)
    off = None if progress else True
    with termination_raises(), new_folder(target) as work:
        with tqdm(total=plan.bytes, unit="B", unit_scale=True, disable=off, file=sys.stderr) as bar:
            _write_weights(plan, work, bar.update)
            for name in plan.copied:
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                checkpoint_writing.copy_file(plan.source / name, work / name, bar.update)
        text = json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n"
        (work / "config.json").write_text(text, encoding="utf-8")
        card_of_export(plan.source, work)
    return target


def _write_weights(plan: ExportPlan, work: Path, advance: Callable[[int], Any]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for name, tensors in plan.weights.files.items():
        if plan.folds.keys() & tensors.keys():
            checkpoint_writing.write_tensors(dict(scaled_tensors(plan, name)), work / plan.shards[name], advance)
        else:
            checkpoint_writing.copy_file(plan.source / name, work / plan.shards[name], advance)
        weight_map.update(dict.fromkeys(tensors, plan.shards[name]))
        total += sum(info.end - info.start for info in tensors.values())
    if plan.added_shard is not None:
        zeros = _zeros(plan)
        checkpoint_writing.write_tensors(zeros, work / plan.added_shard, advance)
        weight_map.update(dict.fromkeys(zeros, plan.added_shard))
        total += sum(tensor.numel() * tensor.element_size() for tensor in zeros.values())
    if len(set(weight_map.values())) > 1:
        checkpoint_writing.write_index(work, weight_map, total)


def scaled_tensors(plan: ExportPlan, file: str) -> Iterator[tuple[str, Any]]:
    """The tensors of one of the source's weight files, by key and one at a time, as the export has them."""
    from safetensors import safe_open

    with safe_open(plan.source / file, framework="pt") as opened:
        for key in plan.weights.files[file]:
            tensor = opened.get_tensor(key)
            yield key, plan.folds[key].apply(tensor, plan.scale) if key in plan.folds else tensor


def _zeros(plan: ExportPlan) -> dict[str, Any]:
    import torch
    from safetensors import safe_open

    # In the dtype of the first weights; older files hold positions as whole numbers besides.
    dtype = torch.float32
    for file, tensors in plan.weights.files.items():
        with safe_open(plan.source / file, framework="pt") as opened:
            kinds = (opened.get_slice(key)[:1].dtype for key in tensors)
            found = next((kind for kind in kinds if kind.is_floating_point), None)
        if found is not None:
            dtype = found
            break
    return {key: torch.zeros(shape, dtype=dtype) for key, shape in plan.added.items()}

"""A model without position encoding as a plain checkpoint of its own architecture, which needs no code of ours.

Rotary models get rotations whose frequencies are divided by 10³⁰, so that every cosine is 1 and every sine vanishes beside
it, in any engine that knows the `llama3` type; learned tables get zeros. Weights are copied byte for byte.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checkpoint, checkpoint_writing
from .configuration_drope import TRAVELLING_FILES, DroPEParameters, base_model_type, stock_class_name
from .conversion_additions import ConversionError
from .conversion_plan import RECORD, other_files, read_source
from .convert import check_target, termination_raises
from .new_folder import new_folder

FORMATS = ("stock",)
# Every wavelength is above `original_max_position_embeddings / low_freq_factor`, so every frequency is divided by the factor.
NO_ROTATION = {
    "rope_type": "llama3",
    "factor": 1e30,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1,
}
_ROTATION_KEYS = ("rope_theta", "partial_rotary_factor")
_QUERY_PROJECTIONS = ("q_norm.weight", "q_proj.weight", "q_proj.bias")


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write: `config` is the stock one, `added` a table's key → shape, `scaled` keys to be multiplied."""

    source: Path
    config: dict[str, Any]
    weights: checkpoint.Checkpoint
    added: dict[str, list[int]]
    scaled: tuple[str, ...]
    scale: float
    copied: tuple[str, ...]

    @property
    def bytes(self) -> int:
        files = (*self.weights.files, *self.copied)
        return sum((self.source / name).stat().st_size for name in files)


def plan_export(src: str | Path) -> ExportPlan:
    """Say what exporting the converted checkpoint in `src` would write.

    Raises:
        ConversionError: the model has something that its stock architecture cannot express; the message says what.
    """
    source, config = read_source(src)
    model_type = str(config.get("model_type"))
    if base_model_type(model_type) == model_type or "drope_parameters" not in config:
        raise ConversionError(
            f"{source.name} is a {model_type} model, which is no converted one; there is nothing to export."
        )
    settings = DroPEParameters.from_dict(config["drope_parameters"])
    _refuse_settings(settings)
    weights = checkpoint.read_checkpoint(source)
    if not weights.is_safetensors:
        raise ConversionError(f"{source.name} holds no safetensors; save the model with save_pretrained first.")
    stock = _stock_config(config)
    added = _added_tables(stock, weights.tensors)
    scale = (settings.attention_scale or {}).get("factor", 1.0)
    return ExportPlan(
        source=source,
        config=stock,
        weights=weights,
        added=added,
        scaled=() if scale == 1.0 else _scaled_keys(weights.tensors),
        scale=scale,
        copied=tuple(name for name in other_files(source) if name not in (*TRAVELLING_FILES, RECORD)),
    )


def _refuse_settings(settings: DroPEParameters) -> None:
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


def _stock_config(config: dict[str, Any]) -> dict[str, Any]:
    """The source architecture's config, without rotations."""
    left_out = ("drope_parameters", "auto_map", "rope_scaling", "rope_theta", "rope_parameters")
    stock = {name: value for name, value in config.items() if name not in left_out}
    stock["model_type"] = base_model_type(config["model_type"])
    stock["architectures"] = [stock_class_name(name) for name in config.get("architectures") or []]
    if not stock["architectures"]:
        del stock["architectures"]
    rope = _rope_of(config)
    if rope is not None:
        stock["rope_parameters"] = _without_rotation(rope)
        _check_rotation(stock)
    return stock


def _rope_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_parameters` as the stock config class reads them, older names included."""
    import transformers

    stock_class: Any = transformers.CONFIG_MAPPING[base_model_type(config["model_type"])]
    held = stock_class.from_dict({**config, "model_type": stock_class.model_type}).to_dict()
    return held.get("rope_parameters")


def _without_rotation(rope: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _without_rotation(value) if isinstance(value, dict) else value for kind, value in rope.items()}
    return {**{name: rope[name] for name in _ROTATION_KEYS if name in rope}, **NO_ROTATION}


def _stock_model(stock: dict[str, Any]) -> Any:
    """The stock model on the meta device."""
    import torch
    import transformers

    config: Any = transformers.CONFIG_MAPPING[stock["model_type"]].from_dict(stock)
    name = (stock.get("architectures") or [None])[0]
    with torch.device("meta"):
        if name is None:
            return transformers.AutoModelForCausalLM.from_config(config)
        return getattr(transformers, name)(config)


def _check_rotation(stock: dict[str, Any]) -> None:
    """Refuse an architecture whose own rotary module still rotates with this config."""
    import inspect

    import torch

    from .position_modules import rotary_places

    model = _stock_model(stock)
    for place in rotary_places(model):
        rotary = type(place.module)(getattr(place.module, "config", model.config))
        takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
        kinds: Any = sorted(set(model.config.layer_types)) if takes_type else [None]
        for kind in kinds:
            given = () if kind is None else (kind,)
            rotation = rotary(torch.zeros(1, 1, 1), torch.tensor([[1, 65535]]), *given)
            parts = rotation if isinstance(rotation, tuple) else (rotation.real, rotation.imag)
            if not (parts[0] == 1).all() or parts[1].abs().max() > 1e-20:
                raise ConversionError(
                    f"{stock['model_type']} cannot say in its config that it does not rotate, so it has no stock form."
                )


def _added_tables(stock: dict[str, Any], tensors: dict[str, Any]) -> dict[str, list[int]]:
    """The learned tables that the conversion took out."""
    from .position_modules import table_places

    model = _stock_model(stock)
    tables = {id(place.module.weight) for place in table_places(model)}
    prefix = f"{model.base_model_prefix}."
    has_prefix = any(name.startswith(prefix) for name in tensors)
    found = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in tables:
            found[name if has_prefix else name.removeprefix(prefix)] = list(parameter.shape)
    clash = next((name for name in found if name in tensors), None)
    if clash is not None:
        raise ConversionError(f"{clash} is still in the checkpoint, though rope_scale is 0; save the model anew first.")
    return found


def _scaled_keys(tensors: dict[str, Any]) -> tuple[str, ...]:
    """What to multiply queries by: the norm that is their last step, or else their projection."""
    found = {end: [name for name in tensors if name.endswith(f".{end}")] for end in _QUERY_PROJECTIONS}
    norms, projections, biases = found.values()
    if not projections:
        raise ConversionError(
            "attention_scale cannot be folded into this model's weights, which have no projection for queries alone; "
            "set it to null before the export."
        )
    return tuple(norms) if norms else (*projections, *biases)


def export_checkpoint(plan: ExportPlan, dst: str | Path, *, overwrite: bool = False, progress: bool = True) -> Path:
    """Execute a plan: the stock checkpoint appears at `dst`, complete, or not at all.

    Raises:
        ConversionError: the target is refused, or there is not enough space; nothing was written.
    """
    target = check_target(plan.source, dst, plan.bytes, overwrite)
    with termination_raises(), new_folder(target) as work:
        _write(plan, work, progress)
    return target


def _write(plan: ExportPlan, work: Path, progress: bool) -> None:
    import torch
    from safetensors import safe_open
    from tqdm import tqdm

    weight_map: dict[str, str] = {}
    total = 0
    with tqdm(total=plan.bytes, unit="B", unit_scale=True, disable=None if progress else True, file=sys.stderr) as bar:
        for file, tensors in plan.weights.files.items():
            if set(tensors) & set(plan.scaled):
                with safe_open(plan.source / file, framework="pt") as opened:
                    state = {name: opened.get_tensor(name) for name in tensors}
                for name in set(tensors) & set(plan.scaled):
                    state[name] = (state[name].float() * plan.scale).to(state[name].dtype)
                checkpoint_writing.write_tensors(state, work / file, bar.update)
            else:
                checkpoint_writing.copy_file(plan.source / file, work / file, bar.update)
            weight_map.update(dict.fromkeys(tensors, file))
            total += sum(info.end - info.start for info in tensors.values())
        if plan.added:
            kind = _dtype_of(plan)
            zeros = {name: torch.zeros(shape, dtype=kind) for name, shape in plan.added.items()}
            checkpoint_writing.write_tensors(zeros, work / "model-position.safetensors", bar.update)
            weight_map.update(dict.fromkeys(zeros, "model-position.safetensors"))
            total += sum(x.numel() * x.element_size() for x in zeros.values())
        if len(set(weight_map.values())) > 1:
            checkpoint_writing.write_index(work, weight_map, total)
        for name in plan.copied:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            checkpoint_writing.copy_file(plan.source / name, work / name, bar.update)
    (work / "config.json").write_text(json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _dtype_of(plan: ExportPlan) -> Any:
    from safetensors import safe_open

    file, tensors = next(iter(plan.weights.files.items()))
    with safe_open(plan.source / file, framework="pt") as opened:
        return opened.get_tensor(next(iter(tensors))).dtype

"""The plan of a conversion: what would be written, dropped and added, from JSON and weight headers alone.

Everything that can be refused is refused here. A shard without a dropped key is copied as bytes; new position parameters go
to one small shard of their own; every other file stays as it is, except `config.json`, the code that travels along, and the
source's model card, which makes room for ours under another name.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checkpoint
from .configuration_drope import (
    PUBLIC_FIELDS,
    TRAVELLING_FILES,
    auto_map,
    drope_class_name,
    drope_model_type,
    public_settings,
)
from .conversion_additions import Additions, ConversionError, find_additions, what_stands_in_the_way
from .drope_parameters import DroPEParameters
from .model_card import CARD, EVALUATION_RECORD, RECORD, TRAINING_RECORD, free_source_card
from .model_types import SUPPORTED_MODEL_TYPES

_DROPPED = (
    (re.compile(r"(^|\.)rotary_emb\.((\w+_)?inv_freq|(cos|sin)_cached)$|\.attn\.embed_positions$"), "rotary buffer"),
    (re.compile(r"(^|\.)(attn|attention|crossattention)\.(bias|masked_bias|causal_mask)$"), "causal mask buffer"),
)
LEARNED_TABLE = re.compile(r"(^|\.)(wpe|positions_embed|embed_positions|position_embeddings)\.weight$")
# Keys that only quantised weights have, and the methods that write them.
_QUANTISED = {
    "bitsandbytes": re.compile(r"\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\S+|SCB)$"),
    "GPTQ or AWQ": re.compile(r"\.(qweight|qzeros|g_idx)$"),
    "compressed-tensors or FP8": re.compile(r"\.(weight_scales?|weight_scale_inv|weight_packed)$"),
    "quanto": re.compile(r"\.weight\._(data|scale|shift)$"),
    "HQQ or AQLM": re.compile(r"\.(W_q|codes|codebooks)$"),
    "MXFP4": re.compile(r"_proj_(blocks|scales)$"),
}
_QUANTISED_DTYPES = re.compile(r"[UI](8|16|32)|F(4|6|8)(_\w+)?")
_OUTPUT_HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight", "decoder.weight")
_TRAINING_LEFTOVERS = re.compile(
    r"^(optimizer|scheduler|scaler|training_args)\.(pt|bin)$|^position_prediction\.safetensors$|^rng_state.*\.pth$|^trainer_state\.json$"
)
_WEIGHTS = re.compile(
    r"^(model|pytorch_model)(\..*)?(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?$"
    r"|\.(h5|msgpack|onnx|onnx_data|gguf|pth|ot)$|^consolidated.*|^tf_model.*|^flax_model.*|(^|/)openvino_.*\.(bin|xml)$"
)
_LEFT_OUT_FOLDERS = {".git": "version control", ".cache": "download cache", "original": "weights in another format"}


@dataclass(frozen=True)
class ShardPlan:
    """One weight file of the source; `kept` is None where it is copied as bytes."""

    source: str
    target: str
    kept: tuple[str, ...] | None
    bytes: int


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion will do.

    `dropped` and `left_out` map a name to the reason.
    """

    source: Path
    parameters: DroPEParameters
    config: dict[str, Any]
    shards: tuple[ShardPlan, ...]
    extra_shard: str | None
    dropped: dict[str, str]
    additions: Additions
    copied: tuple[str, ...]
    left_out: dict[str, str]
    is_safetensors: bool

    @property
    def added(self) -> dict[str, list[int]]:
        """Key → shape of the new position parameters."""
        return self.additions.shapes

    @property
    def source_card(self) -> str | None:
        """Where the source's own model card goes; None where it has none."""
        return free_source_card(set(self.copied)) if CARD in self.copied else None

    def target_name(self, name: str) -> str:
        """The name under which one of the `copied` files arrives."""
        return self.source_card or name if name == CARD else name

    @property
    def bytes(self) -> int:
        """Bytes to write, the copied files included."""
        files = sum((self.source / name).stat().st_size for name in self.copied)
        return files + sum(shard.bytes for shard in self.shards) + 4 * sum(map(math.prod, self.added.values()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source.name,
            "model_type": self.config["model_type"],
            "drope_parameters": self.parameters.to_dict(),
            "shards": [
                {"source": s.source, "target": s.target, "as_bytes": s.kept is None, "bytes": s.bytes}
                for s in self.shards
            ],
            "extra_shard": self.extra_shard,
            "dropped": self.dropped,
            "added": self.added,
            "copied": list(self.copied),
            "source_card": self.source_card,
            "left_out": self.left_out,
            "bytes": self.bytes,
        }

    def describe(self) -> str:
        """The plan in a few lines for a person."""
        lines = [f"{self.source.name} → {self.config['model_type']}, rope_scale {self.parameters.rope_scale:g}"]
        for name in ("position_bias", "gate", "attention_scale", "qk_norm", "window", "rope_layers"):
            if getattr(self.parameters, name) is not None:
                lines.append(f"  {name}: {getattr(self.parameters, name)}")
        for shard in self.shards:
            how = "copied as bytes" if shard.kept is None else "rewritten" if self.is_safetensors else "to safetensors"
            lines.append(f"  {shard.source} → {shard.target}: {how}, {shard.bytes / 1e6:.1f} MB")
        for reason, count in Counter(self.dropped.values()).items():
            lines.append(f"  dropped: {count} × {reason}")
        if self.added:
            numbers = sum(map(math.prod, self.added.values()))
            lines.append(f"  added: {len(self.added)} position tensors, {numbers} numbers, in {self.extra_shard}")
        lines.append(
            f"  {len(self.copied)} other files unchanged, {len(TRAVELLING_FILES)} code files, {RECORD}, {CARD}"
        )
        if self.source_card:
            lines.append(f"  {CARD} → {self.source_card}: a model card takes its place")
        lines += [f"  left out: {name} ({reason})" for name, reason in self.left_out.items()]
        return "\n".join(lines)


def read_source(folder: str | Path) -> tuple[Path, dict[str, Any]]:
    """The folder and its `config.json`; refuses what is not a local checkpoint folder."""
    path = Path(folder)
    if not path.is_dir():
        raise ConversionError(f"{folder} is not a local folder; download the checkpoint first and give its folder.")
    if not (path / "config.json").is_file():
        raise ConversionError(f"The local folder {path} was used, and it has no config.json.")
    return path, checkpoint.read_json(path / "config.json")


def plan_conversion(
    src: str | Path, parameters: DroPEParameters | str = "nope", *, overrides: dict[str, Any] | None = None
) -> ConversionPlan:
    """Say what converting the checkpoint in `src` would write, drop and add. Reads no weights.

    Args:
        src: a local checkpoint folder (safetensors or `.bin`, sharded or not).
        parameters: settings or the name of a preset, changed by `overrides` as in `DroPEParameters.preset`.

    Raises:
        ValueError: one sentence on why this source or these settings are refused.
    """
    settings = DroPEParameters.of(parameters)
    settings = settings.replace(**(overrides or {}))
    source, config = read_source(src)
    public = public_settings(config)
    if public is not None:
        return _plan_normalising(source, config, settings, DroPEParameters.from_dict(public))
    refuse_model(config)
    weights = checkpoint.read_checkpoint(source)
    quantised = quantised_key(weights.tensors)
    if quantised is not None:
        raise ConversionError(
            f"{source.name} holds quantised weights ({quantised}); convert the unquantised checkpoint."
        )
    _refuse_settings(config, settings, weights.tensors)
    new_config = _new_config(config, settings)
    additions = find_additions(config, settings, weights.tensors, new_config)
    added = additions.shapes

    dropped = {name: reason for name in weights.tensors if (reason := why_dropped(name, settings))}
    if not weights.is_safetensors and _ties_its_head(config):
        tied = (name for name in weights.tensors if name in _OUTPUT_HEADS)
        dropped.update({name: "output head tied to the embedding" for name in tied if _is_a_copy(weights, name)})
    clash = next((name for name in added if name in weights.tensors), None)
    if clash is not None:
        raise ConversionError(f"{source.name} already holds {clash}, which this conversion would add.")
    shards, extra = _plan_shards(weights, dropped, bool(added))
    copied, left_out = _plan_files(source, {shard.source for shard in shards})
    return ConversionPlan(
        source=source,
        parameters=settings,
        config=new_config,
        shards=shards,
        extra_shard=extra,
        dropped=dropped,
        additions=additions,
        copied=copied,
        left_out=left_out,
        is_safetensors=weights.is_safetensors,
    )


def _plan_normalising(
    source: Path, config: dict[str, Any], asked: DroPEParameters, public: DroPEParameters
) -> ConversionPlan:
    """A public DroPE checkpoint with our settings and code, its weights as they are."""
    if asked != DroPEParameters.preset("nope"):
        raise ConversionError(
            f"{source.name} is a public DroPE checkpoint ({config['model_type']}, attention_type {config['attention_type']}), whose "
            "own settings are kept; convert it with the preset nope alone."
        )
    weights = checkpoint.read_checkpoint(source)
    dropped = {name: reason for name in weights.tensors if (reason := why_dropped(name, public))}
    shards, _ = _plan_shards(weights, dropped, False)
    copied, left_out = _plan_files(source, {shard.source for shard in shards})
    kept = {name: value for name, value in config.items() if name not in PUBLIC_FIELDS}
    return ConversionPlan(
        source=source,
        parameters=public,
        config=_new_config(kept, public),
        shards=shards,
        extra_shard=None,
        dropped=dropped,
        additions=Additions({}),
        copied=copied,
        left_out=left_out,
        is_safetensors=weights.is_safetensors,
    )


def refuse_model(config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type.endswith("_drope"):
        raise ConversionError(f"This checkpoint is converted already ({model_type}); convert its source instead.")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConversionError(
            f"model_type {model_type!r} cannot be converted: {what_stands_in_the_way(config)} (the README has a "
            "table of the supported types)."
        )
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        method = method or "an unnamed method"
        raise ConversionError(f"This checkpoint is quantised ({method}); convert the unquantised checkpoint.")


def _refuse_settings(config: dict[str, Any], settings: DroPEParameters, tensors: dict[str, Any]) -> None:
    """Settings that the converted model would refuse when it is loaded, which is too late."""
    model_type = config["model_type"]
    if settings.rope_layers is not None and any(map(LEARNED_TABLE.search, tensors)):
        raise ConversionError(
            f"rope_layers is {settings.rope_layers}, but {model_type} has a learned position table, which is added once "
            "before all layers; set rope_layers to null."
        )
    if settings.position_bias is not None and config.get("reorder_and_upcast_attn"):
        raise ConversionError(
            "reorder_and_upcast_attn is true in config.json, which bypasses a position bias; set it to false there first."
        )


def quantised_key(tensors: dict[str, Any]) -> str | None:
    """A key that gives quantised weights away, and the method or dtype it speaks of."""
    for method, pattern in _QUANTISED.items():
        for name in tensors:
            if pattern.search(name):
                return f"{method}: {name}"
    for name, info in tensors.items():
        if name.endswith("weight") and len(info.shape) > 1 and _QUANTISED_DTYPES.fullmatch(info.dtype):
            return f"{info.dtype}: {name}"
    return None


def why_dropped(name: str, settings: DroPEParameters) -> str | None:
    for pattern, reason in _DROPPED:
        if pattern.search(name):
            return reason
    if settings.rope_scale == 0.0 and LEARNED_TABLE.search(name):
        return "learned position table"
    return None


def _ties_its_head(config: dict[str, Any]) -> bool:
    """Where `config.json` does not say, the type's own default holds."""
    said = config.get("tie_word_embeddings")
    if said is not None:
        return bool(said)
    from transformers import CONFIG_MAPPING

    return bool(getattr(CONFIG_MAPPING[config["model_type"]], "tie_word_embeddings", False))


def _is_a_copy(weights: checkpoint.Checkpoint, name: str) -> bool:
    """Whether another tensor holds the same numbers, in the same storage or, where shards part them, in another."""
    import torch

    homes = {key: file for file, tensors in weights.files.items() for key in tensors}
    head = checkpoint.load_bin(weights.folder / homes[name])[name]
    infos = weights.tensors
    alike = [key for key in infos if key != name and infos[key][:2] == infos[name][:2]]
    return any(torch.equal(checkpoint.load_bin(weights.folder / homes[key])[key], head) for key in alike)


def _plan_shards(
    weights: checkpoint.Checkpoint, dropped: dict[str, str], extra: bool
) -> tuple[tuple[ShardPlan, ...], str | None]:
    files = {}
    for name, tensors in weights.files.items():
        kept = tuple(tensor for tensor in tensors if tensor not in dropped)
        if kept:
            files[name] = kept
    total = len(files) + extra
    numbered = not weights.is_safetensors or (extra and len(files) == 1)
    plans = []
    for number, (name, kept) in enumerate(files.items(), start=1):
        target = f"model-{number:05d}-of-{total:05d}.safetensors" if numbered and total > 1 else name
        if total == 1:
            target = checkpoint.SAFE_WEIGHTS
        # Transformers refuses, and older readers crash on, a file whose metadata does not give this format.
        whole = weights.formats[name] == "pt" and len(kept) == len(weights.files[name])
        infos = weights.files[name]
        size = (weights.folder / name).stat().st_size if whole else sum(infos[t].end - infos[t].start for t in kept)
        plans.append(ShardPlan(name, target, None if whole else kept, size))
    if not extra:
        return tuple(plans), None
    return tuple(plans), f"model-{total:05d}-of-{total:05d}.safetensors" if numbered else "model-position.safetensors"


def _plan_files(source: Path, weights: set[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The other files: copied as they are, or left out with a reason."""
    copied, left_out = [], {}
    for folder, folders, names in os.walk(source):
        inside = Path(folder).relative_to(source)
        if inside == Path("."):
            for name in [name for name in folders if name in _LEFT_OUT_FOLDERS or name.startswith("checkpoint-")]:
                left_out[name + "/"] = _LEFT_OUT_FOLDERS.get(name, "training checkpoint")
                folders.remove(name)
        left_out.update(
            {f"{inside / name}/": "link to a folder" for name in folders if Path(folder, name).is_symlink()}
        )
        for name in sorted(names):
            relative = str(inside / name)
            if (name == "config.json" and inside == Path(".")) or relative in weights:
                continue
            if _TRAINING_LEFTOVERS.search(name):
                left_out[relative] = "left over from training"
            elif _WEIGHTS.search(name):
                left_out[relative] = "weights in another file or format"
            elif relative in (*TRAVELLING_FILES, RECORD, TRAINING_RECORD, EVALUATION_RECORD):
                left_out[relative] = "written anew"
            elif not Path(folder, name).is_file():
                left_out[relative] = "broken link or not a regular file"
            else:
                copied.append(relative)
    return tuple(sorted(copied)), left_out


def other_files(source: Path) -> tuple[str, ...]:
    """The files of a checkpoint folder that are neither weights, config nor code: tokenizer, chat template and the like."""
    return _plan_files(source, set())[0]


def _new_config(config: dict[str, Any], settings: DroPEParameters) -> dict[str, Any]:
    """The source's config with four entries changed; its RoPE settings stay, so a conversion can be undone."""
    entries = auto_map(config["model_type"], settings)
    # Where the source does not say: its class with a head for tokens, as which people load it.
    home = next(
        entries[name] for name in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel") if name in entries
    )
    names = [drope_class_name(name) for name in config.get("architectures") or [home.rpartition(".")[2]]]
    changed = {
        "model_type": drope_model_type(config["model_type"]),
        "architectures": names,
        "auto_map": entries,
        "drope_parameters": settings.to_dict(),
    }
    return {**config, **changed}

"""A model without position encoding as one GGUF file of llama.cpp's architecture `llama`.

llama.cpp always rotates, but it divides the frequencies by the factors in `rope_freqs.weight`: by 10³⁰ nothing turns. (It refuses
a rotation of 0 channels.) Where nothing turns the order of a head's channels does not matter, so that weights go in as they are.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .conversion_additions import ConversionError, first_of, read_config
from .convert import termination_raises
from .export import ExportPlan, plan_export, scaled_tensors
from .gguf_tokenizer import GGUFTokenizer, read_tokenizer

ROPE_FACTOR = 1e30
# Types that without rotations compute what `llama` computes.
LLAMA_TYPES = ("llama", "mistral", "qwen2", "smollm3")
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}


@dataclass(frozen=True)
class GGUFPlan:
    """What a GGUF export will write; `names` maps the checkpoint's keys to the file's, `config` has its defaults filled in."""

    export: ExportPlan
    config: dict[str, Any]
    names: dict[str, str]
    tokenizer: GGUFTokenizer
    file_type: str

    @property
    def bytes(self) -> int:
        return self.export.bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.export.source.name,
            "architecture": "llama",
            "file_type": self.file_type,
            "tensors": len(self.names) + 1,
            "tokenizer": self.tokenizer.pre,
            "tokens": len(self.tokenizer.tokens),
            "scale": self.export.scale,
            "bytes": self.bytes,
        }

    def describe(self) -> str:
        lines = [f"{self.export.source.name} → GGUF, architecture llama without rotation"]
        lines.append(f"  {len(self.names)} tensors ({self.file_type}), rope_freqs.weight")
        lines.append(f"  {len(self.tokenizer.tokens)} tokens, split as in {self.tokenizer.pre}")
        if self.export.folds:
            lines.append(f"  {len(self.export.folds)} weights times {self.export.scale:g}")
        return "\n".join(lines)


def plan_gguf(src: str | Path) -> GGUFPlan:
    """Say what writing the converted checkpoint in `src` as GGUF would do. Reads no weights.

    Raises:
        ConversionError: the model is no Llama without rotations, or llama.cpp lacks its tokenizer; the message says what.
        ImportError: the package `gguf` is not installed.
    """
    import transformers

    export = plan_export(src)
    stock: Any = transformers.CONFIG_MAPPING[export.config["model_type"]]
    config = read_config(stock, export.config).to_dict()
    _refuse_model(config)
    kinds = {info.dtype for info in export.weights.tensors.values() if len(info.shape) > 1}
    if len(kinds) != 1 or not kinds <= _FILE_TYPES.keys():
        raise ConversionError(
            f"The weights are {', '.join(sorted(kinds))}; a GGUF file needs one of F32, F16 and BF16."
        )
    return GGUFPlan(
        export, config, _names(export, config), read_tokenizer(export.source, config), _FILE_TYPES[kinds.pop()]
    )


def _refuse_model(config: dict[str, Any]) -> None:
    model_type = config["model_type"]
    if model_type not in LLAMA_TYPES:
        raise ConversionError(
            f"--format gguf writes the Llama family ({', '.join(LLAMA_TYPES)}) and not {model_type}; export with --format stock."
        )
    classes = config.get("architectures") or []
    if not all(name.endswith("ForCausalLM") for name in classes):
        raise ConversionError(f"A GGUF file holds a causal language model, and this one is {', '.join(classes)}.")
    if config.get("hidden_act", "silu") != "silu":
        raise ConversionError(f"hidden_act is {config['hidden_act']!r}; llama.cpp's llama has 'silu' only.")
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    if slides or "sliding_attention" in (config.get("layer_types") or ()):
        raise ConversionError(
            f"sliding_window is {config['sliding_window']}, which llama.cpp's llama does not have; export with --format stock."
        )


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("--format gguf needs the package gguf: pip install 'hf-drope[gguf]'.") from error
    return gguf


def _names(export: ExportPlan, config: dict[str, Any]) -> dict[str, str]:
    gguf = _gguf()
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    names = {}
    for key in export.weights.tensors:
        if key == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        name = table.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None or re.search(r"_norm\.bias$|rope", name):
            raise ConversionError(f"{key} has no place in llama.cpp's llama; export with --format stock.")
        names[key] = name
    return names


def export_gguf(plan: GGUFPlan, dst: str | Path, *, overwrite: bool = False, progress: bool = True) -> Path:
    """Execute a plan: the file appears at `dst`, complete, or not at all.

    Args:
        plan: from `plan_gguf`.
        dst: target, a file name that ends in ".gguf"; must not exist, unless `overwrite`.
        progress: show a bar by bytes where standard error is a terminal.

    Raises:
        ConversionError: the target is refused, or there is not enough space; nothing was written.
    """
    target = _check_target(plan, Path(dst).resolve(), overwrite)
    part = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:12]}")
    with termination_raises():
        try:
            _write(plan, part, progress)
            if overwrite:
                os.replace(part, target)
            else:
                # Fails where another process was faster.
                os.link(part, target)
        except FileExistsError as error:
            raise ConversionError(f"The target {target} exists by now; choose another, or overwrite it.") from error
        finally:
            part.unlink(missing_ok=True)
    return target


def _check_target(plan: GGUFPlan, target: Path, overwrite: bool) -> Path:
    if target.suffix != ".gguf":
        raise ConversionError(f"The target {target} has to be a file name that ends in .gguf.")
    if target.is_dir() or (target.exists() and not overwrite):
        raise ConversionError(f"The target {target} exists; choose another, or overwrite it with --overwrite.")
    if plan.export.source.resolve() in target.parents:
        raise ConversionError(f"The target {target} is inside the source, which is only read; choose another folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if plan.bytes > free:
        raise ConversionError(f"{target.parent} has {free} bytes free, and {plan.bytes} are needed.")
    return target


def _write(plan: GGUFPlan, path: Path, progress: bool) -> None:
    import numpy
    from tqdm import tqdm

    gguf = _gguf()
    writer = gguf.GGUFWriter(path, "llama")
    _add_model(writer, plan, gguf)
    _add_tokenizer(writer, plan.tokenizer)
    # One dtype for matrices; norms and biases are fp32 in every file of llama.cpp.
    kinds = {"F32": (4, "F32"), "F16": (2, "F16"), "BF16": (2, "BF16")}
    factors = numpy.full(_head_dim(plan.config) // 2, ROPE_FACTOR, dtype=numpy.float32)
    writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensors in plan.export.weights.files.values():
        for key in filter(plan.names.__contains__, tensors):
            info = tensors[key]
            size, kind = kinds[info.dtype] if len(info.shape) > 1 else kinds["F32"]
            count = int(numpy.prod(info.shape)) * size
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(plan.names[key], info.shape, numpy.dtype(f"V{size}"), count, raw)
    off = None if progress else True
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.write_tensor_data(factors)
        with tqdm(total=plan.bytes, unit="B", unit_scale=True, disable=off, file=sys.stderr) as bar:
            for array in _arrays(plan):
                writer.write_tensor_data(array)
                bar.update(array.nbytes)
    finally:
        writer.close()


def _arrays(plan: GGUFPlan) -> Iterator[Any]:
    import torch

    for file in plan.export.weights.files:
        for key, tensor in scaled_tensors(plan.export, file):
            if key in plan.names:
                held = tensor.float() if tensor.dim() < 2 else tensor
                # NumPy has no bf16.
                yield held.contiguous().view(torch.int16 if held.dtype == torch.bfloat16 else held.dtype).numpy()


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _add_model(writer: Any, plan: GGUFPlan, gguf: Any) -> None:
    config = plan.config
    heads, head_dim = config["num_attention_heads"], _head_dim(config)
    writer.add_name(plan.export.source.resolve().name)
    writer.add_file_type(gguf.LlamaFileType[plan.file_type])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(first_of(config, "num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: Any, tokenizer: GGUFTokenizer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    writer.add_add_bos_token(tokenizer.adds_bos)
    for name, index in tokenizer.special.items():
        getattr(writer, f"add_{name}_token_id")(index)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)

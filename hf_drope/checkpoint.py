"""Checkpoint folders read from their headers, without loading a model.

A safetensors file is an 8-byte little-endian length, that many bytes of JSON (name → dtype, shape, byte range), and the
tensors' bytes (https://github.com/huggingface/safetensors#format). Reading the header is enough to know everything about a
shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SAFE_WEIGHTS, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN_WEIGHTS, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# What a model may be run in, as names in torch.
RUN_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLE = 1 << 12
# The format's own bound on a header, which keeps a damaged length from asking for all memory.
_LARGEST_HEADER = 100_000_000
_LFS_POINTER = b"version https://git-lfs"
_ITEM_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be read; the message is one sentence."""


class TensorInfo(NamedTuple):
    """`start` and `end` count bytes from the beginning of the shard's data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Shard:
    """The header of one safetensors file; `data_start` is the byte at which its tensors begin."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int


def read_shard(path: Path) -> Shard:
    """Read a safetensors header and check all that it says against itself and the file's size.

    Raises:
        CheckpointError: not a safetensors file, shorter or longer than its header says, or a tensor whose bytes do not
            fit its dtype and shape or are another tensor's as well.
    """
    _refuse_lfs_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CheckpointError(
                f"{path.name} is truncated: its header alone needs more than the {size} bytes there are."
            )
        if length > _LARGEST_HEADER:
            raise CheckpointError(f"{path.name} is not a safetensors file: a header of {length} bytes is too long.")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", None) or {}
            tensors = {
                name: TensorInfo(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in header.items()
            }
            whole = all(type(n) is int for info in tensors.values() for n in (*info.shape, info.start, info.end))
            named = all(isinstance(info.dtype, str) for info in tensors.values())
            if not whole or not named or not isinstance(metadata, dict):
                raise TypeError("dtypes are strings, shapes and offsets whole numbers, metadata is an object")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path.name} is not a safetensors file: its header cannot be read.") from error
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        fits = 8 * (info.end - info.start) == _ITEM_BITS.get(info.dtype, -1) * math.prod(info.shape)
        if info.start != position or info.end < info.start or min(info.shape, default=0) < 0 or not fits:
            raise CheckpointError(
                f"{path.name} is damaged: the bytes {info.start} to {info.end} cannot be {name} of dtype {info.dtype} "
                f"and shape {list(info.shape)}."
            )
        position = info.end
    needed = 8 + length + position
    if needed != size:
        what = "truncated" if needed > size else "damaged"
        raise CheckpointError(f"{path.name} is {what}: it needs {needed} bytes and has {size}.")
    return Shard(path, tensors, metadata, 8 + length)


def _refuse_lfs_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path.name} is a Git LFS pointer and not the weights; fetch them with `git lfs pull` first."
            )


class Checkpoint(NamedTuple):
    """The weights of a folder: file name → tensors. For `.bin` files byte ranges are not known and are 0 to size.

    `formats` holds what each file's metadata calls its format ("pt", mostly), or None.
    """

    folder: Path
    files: dict[str, dict[str, TensorInfo]]
    is_safetensors: bool
    formats: dict[str, str | None]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: info for tensors in self.files.values() for name, info in tensors.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; anything else is a CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} in {path.parent} is not readable JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} in {path.parent} holds no JSON object.")
    return content


def read_checkpoint(folder: Path) -> Checkpoint:
    """List a folder's weights from headers and index only.

    Raises:
        CheckpointError: no weights, a missing or truncated shard, an index and a shard that disagree, a foreign pickle.
    """
    is_safetensors = (folder / SAFE_WEIGHTS).is_file() or (folder / SAFE_INDEX).is_file()
    single, index = (SAFE_WEIGHTS, SAFE_INDEX) if is_safetensors else (BIN_WEIGHTS, BIN_INDEX)
    if (folder / single).is_file():
        names, weight_map = [single], None
    elif (folder / index).is_file():
        weight_map = _read_weight_map(folder / index)
        names = sorted(set(weight_map.values()))
    else:
        raise CheckpointError(
            f"{folder} holds no weights: neither {SAFE_WEIGHTS}, {SAFE_INDEX}, {BIN_WEIGHTS} nor {BIN_INDEX} is there."
        )
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks the shard {name} that {index} names.")
    formats: dict[str, str | None] = dict.fromkeys(names)
    files = {}
    for name in names:
        if is_safetensors:
            shard = read_shard(folder / name)
            files[name], formats[name] = shard.tensors, shard.metadata.get("format")
        else:
            files[name] = _read_bin_tensors(folder / name)
    if weight_map is not None:
        for tensor, name in weight_map.items():
            if tensor not in files[name]:
                raise CheckpointError(f"{index} says that {tensor} is in {name}, but that shard does not hold it.")
        for name, tensors in files.items():
            for tensor in tensors:
                if weight_map.get(tensor) != name:
                    raise CheckpointError(f"{name} holds {tensor}, which {index} does not say.")
    return Checkpoint(folder, files, is_safetensors, formats)


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name} has no weight_map, so it names no shard.")
    for name in weight_map.values():
        # A path would be read, and later written, outside the folder.
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise CheckpointError(f"{path.name} names the shard {name!r}, which is not a plain file name.")
    return weight_map


def load_bin(path: Path, device: str = "cpu") -> dict[str, Any]:
    """The tensors of a `.bin` file, memory-mapped; only plain tensors are unpickled, never code."""
    import torch

    _refuse_lfs_pointer(path)
    try:
        try:
            state = torch.load(path, map_location=device, weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            state = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # A damaged pickle may raise anything; only this wording says that it is whole and asks for a foreign class.
        if "Unsupported global" in str(error) or "Unsupported class" in str(error):
            raise CheckpointError(
                f"{path.name} holds more than tensors, so unpickling it could run code; it is refused."
            ) from error
        raise CheckpointError(f"{path.name} is damaged or not a PyTorch file.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path.name} holds a {type(state).__name__} and not a dict of tensors.")
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _read_bin_tensors(path: Path) -> dict[str, TensorInfo]:
    return {name: tensor_info(name, tensor) for name, tensor in load_bin(path, "meta").items()}


def tensor_info(name: str, tensor: Any, start: int = 0) -> TensorInfo:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _TORCH_DTYPES:
        raise CheckpointError(f"{name} has the dtype {dtype}, which safetensors does not store.")
    end = start + tensor.numel() * tensor.element_size()
    return TensorInfo(_TORCH_DTYPES[dtype], tuple(tensor.shape), start, end)


def fingerprint(weights: Checkpoint, names: Iterable[str] | None = None) -> str:
    """SHA-256 over names, dtypes, shapes and three samples of the bytes of each tensor: tells checkpoints apart in no time.

    Args:
        names: default all tensors of the checkpoint.
    """
    if not weights.is_safetensors:
        import torch
    digest, homes = hashlib.sha256(), {name: file for file, tensors in weights.files.items() for name in tensors}
    paths = {file: weights.folder / file for file in weights.files}
    starts = {file: read_shard(path).data_start for file, path in paths.items()} if weights.is_safetensors else {}
    states = {} if weights.is_safetensors else {file: load_bin(path) for file, path in paths.items()}
    for name in sorted(homes if names is None else names):
        file, info = homes[name], weights.files[homes[name]][name]
        digest.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
        size = info.end - info.start
        places = (0, max(0, size // 2 - _SAMPLE // 2), max(0, size - _SAMPLE))
        if states:
            data = states[file][name].contiguous().flatten().view(torch.uint8).numpy()
            for place in places:
                digest.update(data[place : place + _SAMPLE].tobytes())
            continue
        with paths[file].open("rb") as reading:
            for place in places:
                reading.seek(starts[file] + info.start + place)
                digest.update(reading.read(min(_SAMPLE, size - place)))
    return digest.hexdigest()


def parameter_count(tensors: Iterable[TensorInfo]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)

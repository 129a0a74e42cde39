"""Checkpoint folders read and written shard by shard, without loading a model.

A safetensors file is an 8-byte little-endian length, that many bytes of JSON (name → dtype, shape, byte range), and the
tensors' bytes (https://github.com/huggingface/safetensors#format). Reading the header is enough to know everything about a
shard, and copying byte ranges keeps every tensor as it is, bit for bit.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SAFE_WEIGHTS, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN_WEIGHTS, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_CHUNK = 16 << 20
_FICLONE = 0x40049409
Progress = Callable[[int], Any]


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
    """Read and check a safetensors header.

    Raises:
        CheckpointError: not a safetensors file, or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CheckpointError(
                f"{path.name} is truncated: its header alone needs more than the {size} bytes there are."
            )
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", None) or {}
            tensors = {
                name: TensorInfo(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path.name} is not a safetensors file: its header cannot be read.") from error
    needed = 8 + length + max((tensor.end for tensor in tensors.values()), default=0)
    if needed > size:
        raise CheckpointError(f"{path.name} is truncated: it needs {needed} bytes and has {size}.")
    return Shard(path, tensors, metadata, 8 + length)


class Checkpoint(NamedTuple):
    """The weights of a folder: file name → tensors. For `.bin` files byte ranges are not known and are 0 to size."""

    folder: Path
    files: dict[str, dict[str, TensorInfo]]
    is_safetensors: bool

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: info for tensors in self.files.values() for name, info in tensors.items()}


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name} in {path.parent} is not readable JSON: {error}.") from error


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
        weight_map = read_json(folder / index).get("weight_map", {})
        names = sorted(set(weight_map.values()))
    else:
        raise CheckpointError(
            f"{folder} holds no weights: neither {SAFE_WEIGHTS}, {SAFE_INDEX}, {BIN_WEIGHTS} nor {BIN_INDEX} is there."
        )
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks the shard {name} that {index} names.")
    read = (lambda path: read_shard(path).tensors) if is_safetensors else _read_bin_tensors
    files = {name: read(folder / name) for name in names}
    if weight_map is not None:
        for tensor, name in weight_map.items():
            if tensor not in files[name]:
                raise CheckpointError(f"{index} says that {tensor} is in {name}, but that shard does not hold it.")
        for name, tensors in files.items():
            for tensor in tensors:
                if weight_map.get(tensor) != name:
                    raise CheckpointError(f"{name} holds {tensor}, which {index} does not say.")
    return Checkpoint(folder, files, is_safetensors)


def load_bin(path: Path, device: str = "cpu") -> dict[str, Any]:
    """The tensors of a `.bin` file, memory-mapped; only plain tensors are unpickled, never code."""
    import torch

    try:
        try:
            state = torch.load(path, map_location=device, weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            state = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} holds more than tensors, so unpickling it could run code; it is refused."
        ) from error
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path.name} is damaged or not a PyTorch file: {str(error).splitlines()[0]}") from error
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _read_bin_tensors(path: Path) -> dict[str, TensorInfo]:
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32"}
    return {
        name: TensorInfo(
            names.get(str(tensor.dtype).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")),
            tuple(tensor.shape),
            0,
            tensor.numel() * tensor.element_size(),
        )
        for name, tensor in load_bin(path, "meta").items()
    }


def copy_file(source: Path, target: Path, progress: Progress | None = None) -> None:
    """Copy a file's bytes: shared blocks (a reflink) where the file system has them, never a hard link.

    Older safetensors write through a hard link into the source.
    """
    advance = progress or (lambda count: None)
    with source.open("rb") as reading, target.open("wb") as writing:
        size = os.fstat(reading.fileno()).st_size
        if _reflink(reading.fileno(), writing.fileno()):
            advance(size)
        else:
            _copy_range(reading.fileno(), writing.fileno(), 0, size, advance)
    shutil.copymode(source, target)


def _reflink(source: int, target: int) -> bool:
    try:
        import fcntl

        fcntl.ioctl(target, _FICLONE, source)
    except (ImportError, OSError):
        return False
    return True


def _copy_range(source: int, target: int, start: int, count: int, advance: Progress) -> None:
    """Append `count` bytes from `start` of one file descriptor to another, in the kernel where it can."""
    end = start + count
    while start < end:
        step = min(_CHUNK, end - start)
        try:
            done = os.copy_file_range(source, target, step, offset_src=start)
        except (AttributeError, OSError):
            done = 0
        if done == 0:
            data = os.pread(source, step, start)
            if not data:
                raise CheckpointError("The source became shorter while it was copied.")
            done = os.write(target, data)
        start += done
        advance(done)


def copy_tensors(shard: Shard, names: Iterable[str], target: Path, progress: Progress | None = None) -> None:
    """Write some of a shard's tensors to a new safetensors file, a few megabytes at a time."""
    kept = sorted(names, key=lambda name: shard.tensors[name].start)
    header: dict[str, Any] = {"__metadata__": {**shard.metadata, "format": "pt"}}
    position = 0
    for name in kept:
        info = shard.tensors[name]
        size = info.end - info.start
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [position, position + size]}
        position += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with shard.path.open("rb") as reading, target.open("wb") as writing:
        writing.write(struct.pack("<Q", len(encoded)) + encoded)
        writing.flush()
        for name in kept:
            info = shard.tensors[name]
            start = shard.data_start + info.start
            _copy_range(
                reading.fileno(), writing.fileno(), start, info.end - info.start, progress or (lambda count: None)
            )


def write_tensors(tensors: dict[str, Any], target: Path) -> None:
    """Write torch tensors to a new safetensors file; tensors that share storage are written in full, each."""
    from safetensors.torch import save_file

    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target, metadata={"format": "pt"}
    )


def write_index(folder: Path, weight_map: dict[str, str], total_size: int) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / SAFE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def parameter_count(tensors: Iterable[TensorInfo]) -> int:
    total = 0
    for tensor in tensors:
        count = 1
        for size in tensor.shape:
            count *= size
        total += count
    return total

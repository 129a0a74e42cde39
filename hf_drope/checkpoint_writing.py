"""Shards of a checkpoint written: copied byte by byte, cut, or made from tensors, in bounded memory.

Copying byte ranges keeps every tensor as it is, bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .checkpoint import SAFE_INDEX, CheckpointError, Shard, TensorInfo, read_checkpoint, tensor_info

_CHUNK = 16 << 20
_FICLONE = 0x40049409
Progress = Callable[[int], Any]


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
    placed: dict[str, TensorInfo] = {}
    position = 0
    for name in kept:
        info = shard.tensors[name]
        placed[name] = info._replace(start=position, end=position + info.end - info.start)
        position = placed[name].end
    with shard.path.open("rb") as reading, target.open("wb") as writing:
        writing.write(_header(placed, shard.metadata))
        writing.flush()
        for name in kept:
            info = shard.tensors[name]
            start, count = shard.data_start + info.start, info.end - info.start
            _copy_range(reading.fileno(), writing.fileno(), start, count, progress or (lambda count: None))


def write_tensors(tensors: dict[str, Any], target: Path, progress: Progress | None = None) -> None:
    """Write torch tensors to a new safetensors file, one at a time; those that share storage are written in full, each."""
    import torch

    # Wide items first keeps every tensor aligned, as the format's own writer does.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    placed: dict[str, TensorInfo] = {}
    position = 0
    for name in names:
        placed[name] = tensor_info(name, tensors[name], position)
        position = placed[name].end
    with target.open("wb") as writing:
        writing.write(_header(placed, {}))
        for name in names:
            data = tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            writing.write(data.data)
            if progress is not None:
                progress(data.nbytes)


def replace_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Give tensors of a safetensors checkpoint new values, file by file; each file is replaced when it is complete.

    Raises:
        CheckpointError: a name is not in the checkpoint, or its shape differs; nothing was written.
    """
    from safetensors import safe_open

    found = read_checkpoint(folder)
    for name, tensor in tensors.items():
        info = found.tensors.get(name)
        if info is None or info.shape != tuple(tensor.shape):
            raise CheckpointError(f"{folder.name} holds no {name} of shape {list(tensor.shape)}.")
    for file, names in found.files.items():
        if not set(names) & set(tensors):
            continue
        path, part = folder / file, folder / f".{file}.part"
        try:
            with safe_open(path, framework="pt") as opened:
                state = {name: tensors[name] if name in tensors else opened.get_tensor(name) for name in names}
                write_tensors(state, part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def _header(tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    for name, info in tensors.items():
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [info.start, info.end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def write_index(folder: Path, weight_map: dict[str, str], total_size: int) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / SAFE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

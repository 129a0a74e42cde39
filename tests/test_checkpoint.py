"""Reading and writing of checkpoint files: what is accepted is what the format's own reader accepts, bit for bit."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from hf_drope import checkpoint, checkpoint_writing
from hf_drope.checkpoint import CheckpointError
from hf_drope.new_folder import new_folder, remove_leftovers

WIDE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
BYTE_DTYPES = (torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in (*WIDE_DTYPES, *BYTE_DTYPES)}
    return {**tensors, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "ünïcode": torch.ones(1)}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(found[name]), raw(tensor)), name


def replace_header(path: Path, change: Any) -> None:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    encoded = json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


def test_header_says_what_the_file_holds(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "note": "n"})
    shard = checkpoint.read_shard(tmp_path / "x.safetensors")
    assert shard.metadata == {"format": "pt", "note": "n"}
    content = (tmp_path / "x.safetensors").read_bytes()
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        for name, info in shard.tensors.items():
            piece = opened.get_slice(name)
            assert (info.dtype, list(info.shape)) == (piece.get_dtype(), piece.get_shape())
            mine = content[shard.data_start + info.start : shard.data_start + info.end]
            assert mine == bytes(raw(tensors[name]).tolist()), name


def test_copied_tensors_keep_bytes_dtype_and_metadata(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "x.safetensors", metadata={"note": "kept"})
    kept = [name for name in tensors if name not in ("torch.float32", "torch.uint8")]
    seen: list[int] = []
    shard = checkpoint.read_shard(tmp_path / "x.safetensors")
    checkpoint_writing.copy_tensors(shard, kept, tmp_path / "y.safetensors", seen.append)
    assert_same(load_file(tmp_path / "y.safetensors"), {name: tensors[name] for name in kept})
    copied = checkpoint.read_shard(tmp_path / "y.safetensors")
    assert copied.metadata == {"format": "pt", "note": "kept"}
    assert copied.data_start % 8 == 0
    assert sum(seen) == (tmp_path / "y.safetensors").stat().st_size - copied.data_start


def test_copy_works_where_the_kernel_copies_little_or_nothing(tmp_path, monkeypatch):
    save_file(some_tensors(), tmp_path / "x.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(checkpoint_writing, "_CHUNK", 7)
    monkeypatch.setattr(checkpoint_writing, "_reflink", lambda source, target: False)

    def unsupported(*args: Any, **kwargs: Any) -> int:
        raise OSError("cross-device link")

    for name, copy in (("in chunks", os.copy_file_range), ("read and write", unsupported)):
        monkeypatch.setattr(os, "copy_file_range", copy)
        checkpoint_writing.copy_file(tmp_path / "x.safetensors", tmp_path / name)
        assert (tmp_path / name).read_bytes() == (tmp_path / "x.safetensors").read_bytes()


def test_copy_keeps_the_mode_and_is_no_hard_link(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    (tmp_path / "x").chmod(0o640)
    checkpoint_writing.copy_file(tmp_path / "x", tmp_path / "y")
    assert (tmp_path / "y").stat().st_mode == (tmp_path / "x").stat().st_mode
    (tmp_path / "y").write_bytes(b"other")
    assert (tmp_path / "x").read_bytes() == b"12345"


COPY_A_LARGE_FILE = """
import os, sys
from pathlib import Path
from hf_drope import checkpoint, checkpoint_writing

def unsupported(*args, **kwargs):
    raise OSError

os.copy_file_range = unsupported
checkpoint_writing.copy_tensors(checkpoint.read_shard(Path(sys.argv[1])), ["w"], Path(sys.argv[2]))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_copy_of_a_large_tensor_needs_little_memory(tmp_path):
    size = 256 << 20
    with (tmp_path / "x.safetensors").open("wb") as file:
        header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    command = [sys.executable, "-c", COPY_A_LARGE_FILE, tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "y.safetensors").stat().st_size > size
    (tmp_path / "y.safetensors").unlink()
    assert int(done.stdout) < 128 << 10, "kilobytes at the peak, half of the tensor"


def test_written_tensors_come_back_as_they_were(tmp_path):
    shared = torch.arange(12.0).reshape(3, 4)
    tensors = {**some_tensors(), "shared": shared, "transposed": shared.t(), "strided": shared[:, ::2]}
    tensors["parameter"] = torch.nn.Parameter(torch.ones(2))
    checkpoint_writing.write_tensors(tensors, tmp_path / "x.safetensors")
    assert_same(load_file(tmp_path / "x.safetensors"), {name: t.detach() for name, t in tensors.items()})
    shard = checkpoint.read_shard(tmp_path / "x.safetensors")
    assert shard.metadata == {"format": "pt"}
    for name, info in shard.tensors.items():
        assert (shard.data_start + info.start) % tensors[name].element_size() == 0, f"{name} is not aligned"


def test_a_dtype_that_the_format_lacks_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="w has the dtype complex64"):
        checkpoint_writing.write_tensors({"w": torch.ones(1, dtype=torch.complex64)}, tmp_path / "x.safetensors")


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_truncated_file_is_named(kept, tmp_path):
    save_file({"w": torch.ones(50)}, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"^x\.safetensors is truncated: [^.]*\.$"):
        checkpoint.read_shard(tmp_path / "x.safetensors")


def set_entry(**changes: Any) -> Any:
    return lambda header: {**header, "b": {**header["b"], **changes}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_entry(data_offsets=[-4, 4]), "is damaged: the bytes -4 to 4"),
        (set_entry(data_offsets=[8, 0]), "is damaged"),
        (set_entry(data_offsets=[0, 8]), "is damaged"),
        (set_entry(shape=[3]), r"is damaged: the bytes 8 to 16 cannot be b of dtype F32 and shape \[3\]"),
        (set_entry(shape=[-1, -2]), "is damaged"),
        (set_entry(dtype="F64"), "is damaged"),
        (set_entry(dtype="F39"), "is damaged"),
        (set_entry(data_offsets=[8]), "is not a safetensors file"),
        (set_entry(data_offsets=["8", "16"]), "is not a safetensors file"),
        (set_entry(dtype=["F32"]), "is not a safetensors file"),
        (lambda header: {**header, "__metadata__": ["pt"]}, "is not a safetensors file"),
        (lambda header: [header], "is not a safetensors file"),
        (lambda header: {"a": header["a"]}, "is damaged: it needs"),
    ],
)
def test_header_that_contradicts_itself_or_the_file_is_refused(change, message, tmp_path):
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "x.safetensors")
    replace_header(tmp_path / "x.safetensors", change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_shard(tmp_path / "x.safetensors")


def test_nothing_is_accepted_that_the_formats_own_reader_refuses(tmp_path):
    """Random damage to the header; being stricter than the format is allowed."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4).bfloat16(), "c": torch.ones(1)}, path)
    whole = path.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    generator = random.Random(0)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(generator.randint(1, 2)):
            content[generator.randrange(length)] = generator.choice(b'0123456789[]{},:"-x ')
        path.write_bytes(content)
        try:
            checkpoint.read_shard(path)
        except CheckpointError:
            refused += 1
            continue
        try:
            with safe_open(path, "pt") as opened:
                list(opened.keys())
        except SafetensorError as error:
            pytest.fail(f"accepted, but {error}: {bytes(content[:length])!r}")
    assert 100 < refused < 400


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_called_one(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer"):
        checkpoint.read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "sub/x.safetensors", "..", "", 3])
def test_an_index_cannot_lead_outside_the_folder(name, tmp_path):
    (tmp_path / checkpoint.SAFE_INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        checkpoint.read_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"weight_map": []}', b'{"weight_map": {}}', b"{", b"\xff"])
def test_a_broken_index_is_one_sentence(content, tmp_path):
    (tmp_path / checkpoint.SAFE_INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no weight_map|no JSON object|not readable JSON"):
        checkpoint.read_checkpoint(tmp_path)


def test_index_and_shard_have_to_agree_in_both_directions(tmp_path):
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "one.safetensors")
    index = tmp_path / checkpoint.SAFE_INDEX
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "c": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"c is in one\.safetensors, but that shard does not hold it"):
        checkpoint.read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"one\.safetensors holds b, which"):
        checkpoint.read_checkpoint(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_bin_files_are_listed_as_safetensors_are(zipped, tmp_path):
    # The older form of these files knows no 8-bit floats.
    tensors = {name: tensor for name, tensor in some_tensors().items() if zipped or "float8" not in name}
    torch.save(tensors, tmp_path / checkpoint.BIN_WEIGHTS, _use_new_zipfile_serialization=zipped)
    save_file(tensors, tmp_path / "x.safetensors")
    found = checkpoint.read_checkpoint(tmp_path).tensors
    expected = checkpoint.read_shard(tmp_path / "x.safetensors").tensors
    assert {n: (i.dtype, i.shape) for n, i in found.items()} == {n: (i.dtype, i.shape) for n, i in expected.items()}
    assert_same(checkpoint.load_bin(tmp_path / checkpoint.BIN_WEIGHTS), tensors)


@pytest.mark.parametrize("content", [b"", b"\x80\x02garbage", b"PK\x03\x04", bytes(range(256)) * 8])
def test_a_damaged_bin_file_is_called_damaged(content, tmp_path):
    (tmp_path / checkpoint.BIN_WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^pytorch_model\.bin is damaged or not a PyTorch file\.$"):
        checkpoint.read_checkpoint(tmp_path)


def test_a_bin_file_of_something_else_is_refused(tmp_path):
    torch.save([torch.ones(1)], tmp_path / checkpoint.BIN_WEIGHTS)
    with pytest.raises(CheckpointError, match="holds a list and not a dict of tensors"):
        checkpoint.read_checkpoint(tmp_path)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_appears_whole_or_not_at_all(tmp_path):
    with new_folder(tmp_path / "out") as work:
        (work / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert names_in(tmp_path) == ["out"]

    def interrupted() -> None:
        with new_folder(tmp_path / "other") as work:
            (work / "a").write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names_in(tmp_path) == ["out"]


def test_old_folder_stands_until_the_new_one_is_complete(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(OSError, match="disk full"), new_folder(tmp_path / "out"):
        raise OSError("disk full")
    assert (tmp_path / "out/mine").read_text() == "mine"
    with new_folder(tmp_path / "out") as work:
        (work / "new").write_text("new")
    assert names_in(tmp_path / "out") == ["new"]
    assert names_in(tmp_path) == ["out"]


def test_folder_filled_by_someone_else_meanwhile_is_left_alone(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/mine").write_text("mine")
    with pytest.raises(CheckpointError, match="filled by someone else"), new_folder(tmp_path / "out"):
        (tmp_path / "theirs").rename(tmp_path / "out")
    assert (tmp_path / "out/mine").read_text() == "mine"
    assert names_in(tmp_path) == ["out"]


def test_a_failed_second_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    rename = Path.rename

    def fails_for_the_new(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError("no rename today")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new)
    with pytest.raises(OSError, match="no rename today"), new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out/mine").read_text() == "mine"
    assert names_in(tmp_path) == ["out"]


def test_leftovers_of_a_dead_run_go_and_those_of_a_live_one_stay(tmp_path):
    target = tmp_path / "a[b].old-x"
    dead = tmp_path / f".{target.name}.partial-{os.getpid()}"
    dead.mkdir()
    with new_folder(target) as live:
        remove_leftovers(target)
        assert live.is_dir()
        assert not dead.exists()
    assert names_in(tmp_path) == [target.name]


def test_a_folder_moved_aside_by_a_dead_run_comes_back(tmp_path):
    (tmp_path / ".out.old-0").mkdir()
    (tmp_path / ".out.old-0/mine").write_text("mine")
    (tmp_path / ".out.partial-0").mkdir()
    remove_leftovers(tmp_path / "out")
    assert (tmp_path / "out/mine").read_text() == "mine"
    (tmp_path / ".out.old-1").mkdir()
    remove_leftovers(tmp_path / "out")
    assert names_in(tmp_path) == ["out"]


def replaceable(folder: Path, shards: int = 1) -> dict[str, torch.Tensor]:
    """A checkpoint of eight tensors in `shards` files."""
    folder.mkdir()
    torch.manual_seed(1)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
    tensors = {f"t{index}": (torch.randn(3, 4) * 9).to(dtypes[index % 4]) for index in range(8)}
    if shards == 1:
        save_file(tensors, folder / checkpoint.SAFE_WEIGHTS, metadata={"format": "pt"})
        return tensors
    weight_map = {name: f"model-{index % shards + 1:05}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: x for n, x in tensors.items() if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    checkpoint_writing.write_index(folder, weight_map, sum(x.nbytes for x in tensors.values()))
    return tensors


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


@pytest.mark.parametrize("shards", [1, 3])
def test_only_the_named_tensors_are_replaced(shards, tmp_path):
    tensors = replaceable(tmp_path / "x", shards)
    before = files_in(tmp_path / "x")
    new = {"t0": torch.full((3, 4), 0.5), "t3": torch.arange(12).view(3, 4)}
    checkpoint_writing.replace_tensors(tmp_path / "x", new)
    assert_same(loaded(tmp_path / "x"), {**tensors, **new})
    after = files_in(tmp_path / "x")
    # t0 and t3 are both in the first shard of three.
    assert {name for name in before if before[name] != after[name]} == {sorted(before)[0]}
    assert set(after) == set(before)
    for path in (tmp_path / "x").glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_tensors_in_several_shards_are_replaced_in_each(tmp_path):
    tensors = replaceable(tmp_path / "x", 3)
    new = {name: torch.zeros_like(tensors[name]) for name in ("t0", "t1", "t2")}
    checkpoint_writing.replace_tensors(tmp_path / "x", new)
    assert_same(loaded(tmp_path / "x"), {**tensors, **new})


@pytest.mark.parametrize(
    "new",
    [
        {"t0": torch.zeros(3, 4), "t1": torch.zeros(4, 3)},
        {"t0": torch.zeros(3, 4), "t1": torch.zeros(12)},
        {"t0": torch.zeros(3, 4), "other": torch.zeros(3, 4)},
    ],
)
def test_a_replacement_of_another_shape_or_name_is_refused_before_anything_is_written(new, tmp_path):
    replaceable(tmp_path / "x", 3)
    before = files_in(tmp_path / "x")
    with pytest.raises(CheckpointError, match=rf"^x holds no {list(new)[1]} of shape \[[\d, ]+\]\.$"):
        checkpoint_writing.replace_tensors(tmp_path / "x", new)
    assert files_in(tmp_path / "x") == before


def test_a_replacement_that_fails_leaves_no_part_behind(tmp_path, monkeypatch):
    replaceable(tmp_path / "x")
    before = files_in(tmp_path / "x")

    def full(*arguments: Any) -> None:
        raise OSError("no space left")

    for home, name in ((os, "replace"), (checkpoint_writing, "tensor_info")):
        with monkeypatch.context() as patch:
            patch.setattr(home, name, full)
            with pytest.raises(OSError, match="no space left"):
                checkpoint_writing.replace_tensors(tmp_path / "x", {"t0": torch.zeros(3, 4)})
        assert files_in(tmp_path / "x") == before


def print_of(tensors: dict[str, torch.Tensor], folder: Path, names: Any = None) -> str:
    folder.mkdir()
    save_file(tensors, folder / checkpoint.SAFE_WEIGHTS)
    return checkpoint.fingerprint(checkpoint.read_checkpoint(folder), names)


def test_fingerprint_changes_with_the_first_middle_and_last_bytes_and_with_names_shapes_and_dtypes(tmp_path):
    size = 5 * checkpoint._SAMPLE
    tensors = {"a": torch.zeros(size, dtype=torch.uint8), "b": torch.ones(2, 3)}
    whole = print_of(tensors, tmp_path / "whole")
    assert print_of({name: x.clone() for name, x in tensors.items()}, tmp_path / "same") == whole
    sample = checkpoint._SAMPLE
    for place in (
        0,
        sample - 1,
        size // 2 - sample // 2,
        size // 2,
        size // 2 + sample // 2 - 1,
        size - sample,
        size - 1,
    ):
        changed = tensors["a"].clone()
        changed[place] = 1
        assert print_of({**tensors, "a": changed}, tmp_path / str(place)) != whole, place
    small = tensors["b"].clone()
    small[1, 2] = 1.0000001
    for number, other in enumerate(
        (
            {**tensors, "b": small},
            {**tensors, "b": tensors["b"].view(3, 2)},
            {**tensors, "b": tensors["b"].view(torch.int32)},
            {"a": tensors["a"], "c": tensors["b"]},
            {"b": tensors["b"]},
            {**tensors, "c": tensors["b"].clone()},
        )
    ):
        assert print_of(other, tmp_path / f"other{number}") != whole, number


def test_fingerprint_of_some_names_does_not_depend_on_the_rest_or_on_the_shards(tmp_path):
    tensors = replaceable(tmp_path / "one")
    replaceable(tmp_path / "three", 3)
    one, three = (checkpoint.read_checkpoint(tmp_path / name) for name in ("one", "three"))
    assert checkpoint.fingerprint(one) == checkpoint.fingerprint(three)
    some = ["t1", "t5"]
    expected = print_of({name: tensors[name] for name in some}, tmp_path / "some")
    assert checkpoint.fingerprint(one, some) == checkpoint.fingerprint(three, reversed(some)) == expected
    checkpoint_writing.replace_tensors(tmp_path / "three", {"t0": torch.zeros(3, 4)})
    again = checkpoint.read_checkpoint(tmp_path / "three")
    assert checkpoint.fingerprint(again, some) == expected
    assert checkpoint.fingerprint(again) != checkpoint.fingerprint(one)

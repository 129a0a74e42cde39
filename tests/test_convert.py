"""Checkpoint conversion: what is written, what is refused, and what is left behind when it is stopped."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import edit_json, logits, write_source
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, random_ids
from transformers import AutoModelForCausalLM

from hf_drope import (
    DroPEParameters,
    checkpoint,
    convert_checkpoint,
    inspect_checkpoint,
    plan_conversion,
    verify_checkpoint,
)
from hf_drope.configuration_drope import TRAVELLING_FILES


def convert(source: Path, target: Path, preset: str = "nope", **overrides) -> Path:
    return convert_checkpoint(plan_conversion(source, preset, overrides=overrides), target)


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_model_passes_every_check(family, tmp_path):
    write_source(tmp_path / "src", family)
    convert(tmp_path / "src", tmp_path / "dst", "drope")
    report = verify_checkpoint(tmp_path / "dst", tmp_path / "src", length=16, progress=False)
    assert report.passed, report.describe()


def test_verification_notices_a_changed_weight_and_a_changed_file(tmp_path):
    write_source(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    state = load_file(tmp_path / "dst/model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, tmp_path / "dst/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "dst/special.txt").write_text("changed")
    report = verify_checkpoint(tmp_path / "dst", tmp_path / "src", length=16, progress=False)
    failed = {check.name for check in report.checks if not check.passed}
    assert {"weights", "other files", "source at rope_scale 1"} <= failed
    assert "model.norm.weight" in report.describe()


def test_a_shard_without_a_dropped_key_and_all_other_files_are_the_same_bytes(tmp_path):
    """https://github.com/hiyouga/EasyR1/pull/11007: the eos list and the chat template survive."""
    write_source(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", "drope")
    src, dst = tmp_path / "src", tmp_path / "dst"
    first = dst / "model-00001-of-00002.safetensors"
    assert first.read_bytes() == (src / "model.safetensors").read_bytes()
    for path in src.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert (dst / path.name).read_bytes() == path.read_bytes(), path.name
    assert AutoModelForCausalLM.from_pretrained(dst).generation_config.eos_token_id == [2, 5]
    assert set(TRAVELLING_FILES) <= {path.name for path in dst.iterdir()}
    assert first.stat().st_ino != (src / "model.safetensors").stat().st_ino


def test_config_changes_only_what_a_conversion_has_to(tmp_path):
    """https://github.com/vllm-project/vllm/pull/28542: the RoPE settings stay, an explicit field says that it is dropped."""
    write_source(tmp_path / "src")
    before = edit_json(
        tmp_path / "src/config.json", auto_map={"AutoConfig": "owner/repo--other.Config"}, unknown_key={"a": [1]}
    )
    convert(tmp_path / "src", tmp_path / "dst")
    after = json.loads((tmp_path / "dst/config.json").read_text())
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed == {"model_type", "architectures", "auto_map", "drope_parameters"}
    assert after["model_type"] == "llama_drope"
    assert after["architectures"] == ["DroPELlamaForCausalLM"]
    assert "--" not in json.dumps(after["auto_map"])


@pytest.mark.parametrize("preset", ["nope", "drope"])
def test_sharded_sources_keep_their_shards(preset, tmp_path):
    write_source(tmp_path / "src", max_shard_size="20KB")
    shards = sorted(path.name for path in (tmp_path / "src").glob("*.safetensors"))
    assert len(shards) > 2
    convert(tmp_path / "src", tmp_path / "dst", preset)
    for name in shards:
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "src" / name).read_bytes()
    assert verify_checkpoint(tmp_path / "dst", tmp_path / "src", length=16, progress=False).passed


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_stay_as_they_are(tied, tmp_path):
    """https://github.com/huggingface/transformers/pull/43429"""
    source = write_source(tmp_path / "src", tie_word_embeddings=tied)
    convert(tmp_path / "src", tmp_path / "dst", rope_scale=1.0)
    assert ("lm_head.weight" in load_file(tmp_path / "dst/model.safetensors")) is not tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
    assert torch.equal(logits(model, random_ids(1, 9)), logits(source, random_ids(1, 9)))


def test_legacy_rotary_and_mask_buffers_are_dropped_and_named(tmp_path):
    """https://github.com/unslothai/unsloth/issues/270"""
    for family, key in (
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt_neox", "gpt_neox.layers.1.attention.masked_bias"),
    ):
        src, dst = tmp_path / family, tmp_path / f"{family}-out"
        write_source(src, family)
        state = load_file(src / "model.safetensors")
        state[key] = torch.ones(4)
        save_file(state, src / "model.safetensors", metadata={"format": "pt", "note": "kept"})
        plan = plan_conversion(src, "nope", overrides={"rope_scale": 1.0})
        assert list(plan.dropped) == [key]
        assert "1 × " in plan.describe()
        convert_checkpoint(plan, dst)
        with safe_open(dst / "model.safetensors", "pt") as file:
            assert set(file.keys()) == set(state) - {key}
            assert file.metadata() == {"format": "pt", "note": "kept"}
        _, info = AutoModelForCausalLM.from_pretrained(dst, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]


def test_learned_table_is_stripped_when_dropped_and_kept_when_not(tmp_path):
    write_source(tmp_path / "src", "gpt2")
    convert(tmp_path / "src", tmp_path / "dropped")
    convert(tmp_path / "src", tmp_path / "kept", rope_scale=1.0)
    assert "transformer.wpe.weight" not in load_file(tmp_path / "dropped/model.safetensors")
    assert (tmp_path / "kept/model.safetensors").read_bytes() == (tmp_path / "src/model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dropped")
    assert logits(model, random_ids(1, 80)).shape[1] == 80, "past n_positions"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_bin_sources_become_safetensors(tied, sharded, tmp_path):
    """https://github.com/huggingface/transformers/issues/38464"""
    source = write_source(tmp_path / "src", tie_word_embeddings=tied)
    (tmp_path / "src/model.safetensors").unlink()
    state = source.state_dict()
    if sharded:
        names = sorted(state)
        parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
        for file, keys in parts.items():
            torch.save({key: state[key] for key in keys}, tmp_path / "src" / file)
        weight_map = {key: file for file, keys in parts.items() for key in keys}
        (tmp_path / "src/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(state, tmp_path / "src/pytorch_model.bin")
    convert(tmp_path / "src", tmp_path / "dst", "drope", rope_scale=1.0)
    assert not list((tmp_path / "dst").glob("*.bin*"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    for name, tensor in source.named_parameters():
        assert torch.equal(model.get_parameter(name), tensor), name


def test_a_pickle_that_could_run_code_is_refused(tmp_path):
    write_source(tmp_path / "src")
    (tmp_path / "src/model.safetensors").unlink()

    class Foreign:
        def __reduce__(self):
            return print, ("ran",)

    torch.save({"x": Foreign()}, tmp_path / "src/pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(ValueError, match="holds more than tensors"):
        plan_conversion(tmp_path / "src")


def test_every_tensor_keeps_its_dtype(tmp_path):
    """https://github.com/huggingface/transformers/pull/34919"""
    write_source(tmp_path / "src")
    state = {name: t.bfloat16() for name, t in load_file(tmp_path / "src/model.safetensors").items()}
    state["model.norm.weight"] = state["model.norm.weight"].float()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, tmp_path / "src/model.safetensors")
    for dtype in ("bfloat16", None, "float32"):
        edit_json(tmp_path / "src/config.json", dtype=dtype)
        convert(tmp_path / "src", tmp_path / f"dst-{dtype}")
        out = load_file(tmp_path / f"dst-{dtype}/model.safetensors")
        assert all(torch.equal(out[name], state[name]) and out[name].dtype == state[name].dtype for name in out)
        assert json.loads((tmp_path / f"dst-{dtype}/config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("metadata", [None, {}])
def test_output_shards_always_say_their_format(metadata, tmp_path):
    """https://github.com/ml-explore/mlx/issues/743"""
    write_source(tmp_path / "src")
    save_file(load_file(tmp_path / "src/model.safetensors"), tmp_path / "src/model.safetensors", metadata=metadata)
    convert(tmp_path / "src", tmp_path / "dst", "drope")
    for path in (tmp_path / "dst").glob("*.safetensors"):
        assert checkpoint.read_shard(path).metadata["format"] == "pt"


def test_padded_vocabulary_stays(tmp_path):
    """https://github.com/arcee-ai/mergekit/issues/425"""
    write_source(tmp_path / "src", vocab_size=104)
    convert(tmp_path / "src", tmp_path / "dst")
    assert json.loads((tmp_path / "dst/config.json").read_text())["vocab_size"] == 104
    assert load_file(tmp_path / "dst/model.safetensors")["model.embed_tokens.weight"].shape[0] == 104


@pytest.mark.parametrize(
    "style",
    [
        {"rope_theta": 500000.0, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
        {
            "rope_theta": 500000.0,
            "rope_parameters": None,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ],
)
def test_old_and_new_rope_settings_mean_what_they_meant(style, tmp_path):
    """https://github.com/vllm-project/vllm/pull/44158"""
    write_source(tmp_path / "src")
    edit_json(tmp_path / "src/config.json", **style)
    convert(tmp_path / "src", tmp_path / "dst", rope_scale=1.0)
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "src")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert torch.equal(logits(model, random_ids(1, 30)), logits(source, random_ids(1, 30)))
    assert model.config.max_position_embeddings == 64


def damage(src: Path, kind: str) -> None:
    weights = src / "model.safetensors"
    if kind == "no weights":
        weights.unlink()
    elif kind == "no config.json":
        (src / "config.json").unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "not a safetensors file":
        weights.write_bytes(b"\x10" + b"\0" * 7 + b"no json here at all")
    elif kind == "lacks the shard":
        sorted(src.glob("model-*"))[1].unlink()
    elif kind == "does not hold it":
        index = json.loads((src / "model.safetensors.index.json").read_text())
        shard = index["weight_map"]["model.norm.weight"]
        state = load_file(src / shard)
        state.pop("model.norm.weight")
        save_file(state, src / shard, metadata={"format": "pt"})
    elif kind == "quantised (gptq)":
        edit_json(src / "config.json", quantization_config={"quant_method": "gptq"})
    elif kind == "holds quantised weights":
        state = load_file(weights)
        state["model.layers.0.self_attn.q_proj.weight.absmax"] = torch.ones(2)
        save_file(state, weights)
    elif kind == "converted already":
        edit_json(src / "config.json", model_type="llama_drope")
    elif kind == "is not supported":
        edit_json(src / "config.json", model_type="t5")
    elif kind == "speaks of 3 layers":
        edit_json(src / "config.json", num_hidden_layers=3)


@pytest.mark.parametrize(
    "kind",
    [
        "no weights",
        "no config.json",
        "truncated",
        "not a safetensors file",
        "lacks the shard",
        "does not hold it",
        "quantised (gptq)",
        "holds quantised weights",
        "converted already",
        "is not supported",
        "speaks of 3 layers",
    ],
)
def test_unusable_source_is_refused_in_one_sentence(kind, tmp_path):
    """https://github.com/huggingface/huggingface_hub/pull/4728 and https://github.com/hiyouga/LlamaFactory/issues/5155"""
    sharded = kind in ("lacks the shard", "does not hold it")
    write_source(tmp_path / "src", **({"max_shard_size": "20KB"} if sharded else {}))
    damage(tmp_path / "src", kind)
    with pytest.raises(ValueError, match=kind.replace("(", r"\(").replace(")", r"\)")) as caught:
        plan_conversion(tmp_path / "src", "drope")
    assert str(caught.value).count(". ") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_folder_that_shadows_a_hub_id_is_named(tmp_path, monkeypatch):
    """https://github.com/huggingface/transformers/issues/27954"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(ValueError, match="local folder gpt2 was used"):
        plan_conversion("gpt2")
    with pytest.raises(ValueError, match="is not a local folder"):
        plan_conversion("no/such")


def test_target_that_would_lose_something_is_refused(tmp_path):
    """https://github.com/huggingface/transformers/issues/37713"""
    write_source(tmp_path / "src")
    (tmp_path / "link").symlink_to(tmp_path / "src")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    before = {path: path.read_bytes() for path in (tmp_path / "src").iterdir()}
    for target in ("src", "link", "src/inside", "full"):
        with pytest.raises(ValueError, match=r"overlap|not empty"):
            convert(tmp_path / "src", tmp_path / target)
    assert (tmp_path / "full/mine.txt").read_text() == "mine"
    assert {path: path.read_bytes() for path in (tmp_path / "src").iterdir()} == before
    convert_checkpoint(plan_conversion(tmp_path / "src"), tmp_path / "full", overwrite=True)
    assert not (tmp_path / "full/mine.txt").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "full").config.model_type == "llama_drope"


def test_failure_midway_leaves_no_target_and_a_rerun_succeeds(tmp_path, monkeypatch):
    """https://github.com/JustVugg/colibri/pull/1026"""
    write_source(tmp_path / "src", max_shard_size="20KB")
    calls = []

    def fail_at_second(source, target, progress=None, copy=checkpoint.copy_file):
        calls.append(source)
        if len(calls) == 2:
            raise OSError("disk full")
        copy(source, target, progress)

    monkeypatch.setattr(checkpoint, "copy_file", fail_at_second)
    with pytest.raises(OSError, match="disk full"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    monkeypatch.undo()
    (tmp_path / ".dst.partial-999999999").mkdir()
    convert(tmp_path / "src", tmp_path / "dst")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


def test_too_little_space_is_said_in_bytes(tmp_path, monkeypatch):
    write_source(tmp_path / "src")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ValueError, match="1 bytes free, and this conversion needs"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


KILLED = """
import os, signal, sys
from hf_drope import checkpoint, convert
step, seen = int(sys.argv[3]), 0

def count(*names):
    for module, name in names:
        original = getattr(module, name)
        def counted(*args, original=original, **kwargs):
            global seen
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(module, name, counted)

count((checkpoint, "copy_file"), (checkpoint, "write_tensors"), (checkpoint, "write_index"), (convert, "_write_json"))
rename = convert.Path.rename
def killed_after_rename(self, target):
    rename(self, target)
    if step == 0:
        os.kill(os.getpid(), signal.SIGKILL)
convert.Path.rename = killed_after_rename
convert.convert_checkpoint(convert.plan_conversion(sys.argv[1], "drope"), sys.argv[2], progress=False)
"""


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 9, 10])
def test_killed_conversion_leaves_a_complete_target_or_none(step, tmp_path):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/688"""
    write_source(tmp_path / "src")
    before = {path.name: path.read_bytes() for path in (tmp_path / "src").iterdir()}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "src"), str(tmp_path / "dst"), str(step)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    if step == 0:
        assert verify_checkpoint(tmp_path / "dst", tmp_path / "src", length=8, progress=False).passed
    else:
        assert not (tmp_path / "dst").exists()
        convert(tmp_path / "src", tmp_path / "dst", "drope")
    assert {path.name: path.read_bytes() for path in (tmp_path / "src").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


def test_plan_and_inspection_write_nothing_and_say_what_they_see(tmp_path):
    write_source(tmp_path / "src", "gpt2")
    plan = plan_conversion(tmp_path / "src", DroPEParameters.preset("simple", max_distance=16))
    assert json.loads(json.dumps(plan.to_dict()))["dropped"] == {"transformer.wpe.weight": "learned position table"}
    assert plan.added["transformer.h.1.attn.position_bias.bias.weight"] == [31, 4]
    found = inspect_checkpoint(tmp_path / "src")
    assert (found["model_type"], found["layers"], found["heads"], found["head_dim"]) == ("gpt2", 2, 4, 8)
    assert found["learned_table"] == [64, 32]
    assert found["conversion_would_drop"] == {"learned position table": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_per_layer_settings_have_to_fit_the_model(tmp_path):
    write_source(tmp_path / "src")
    for settings in ({"rope_layers": [2]}, {"window": [4]}):
        with pytest.raises(ValueError, match="layer"):
            plan_conversion(tmp_path / "src", "nope", overrides=settings)

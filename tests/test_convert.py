"""Checkpoint conversion: what is written, what is refused, and what is left behind when it is stopped."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import edit_json, logits, tiny_tokenizer, write_source
from model_types import DECODER_TYPES, small_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, random_ids, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_drope import (
    DroPEParameters,
    apply_drope,
    checkpoint,
    checkpoint_writing,
    convert_checkpoint,
    inspect_checkpoint,
    plan_conversion,
    verify_checkpoint,
)
from hf_drope.cli import main
from hf_drope.configuration_drope import TRAVELLING_FILES
from hf_drope.conversion_additions import new_tensors
from hf_drope.drope_parameters import PRESETS


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
    """https://github.com/hiyouga/EasyR1/pull/11007: the eos list and the chat template survive.

    https://github.com/arcee-ai/mergekit/issues/275, https://github.com/OpenEuroLLM/oellm-autoexp/pull/51 and
    https://github.com/marin-community/marin/pull/7406
    """
    write_source(tmp_path / "src")
    edit_json(tmp_path / "src/generation_config.json", temperature=0.6, do_sample=True)
    (tmp_path / "src/additional_chat_templates").mkdir()
    (tmp_path / "src/additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    convert(tmp_path / "src", tmp_path / "dst", "drope")
    src, dst = tmp_path / "src", tmp_path / "dst"
    first = dst / "model-00001-of-00002.safetensors"
    assert first.read_bytes() == (src / "model.safetensors").read_bytes()
    for path in src.rglob("*"):
        if path.is_file() and path.name not in ("config.json", "model.safetensors"):
            assert (dst / path.relative_to(src)).read_bytes() == path.read_bytes(), path.name
    generation = AutoModelForCausalLM.from_pretrained(dst).generation_config
    assert (generation.eos_token_id, generation.temperature) == ([2, 5], 0.6)
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
    """https://github.com/ml-explore/mlx-lm/pull/1605 and https://github.com/huggingface/transformers/pull/42362"""
    source = write_source(tmp_path / "src", tie_word_embeddings=tied)
    convert(tmp_path / "src", tmp_path / "dst", rope_scale=1.0)
    assert ("lm_head.weight" in load_file(tmp_path / "dst/model.safetensors")) is not tied
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", output_loading_info=True)
    assert not info["missing_keys"]
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
    assert torch.equal(logits(model, random_ids(1, 9)), logits(source, random_ids(1, 9)))


def test_legacy_rotary_and_mask_buffers_are_dropped_and_named(tmp_path):
    """https://github.com/unslothai/unsloth/issues/270 and https://github.com/jzhang38/TinyLlama/issues/127"""
    for family, key in (
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("qwen2", "model.layers.1.self_attn.rotary_emb.cos_cached"),
        ("phi3", "model.rotary_emb.original_inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt_neox", "gpt_neox.layers.1.attention.masked_bias"),
        ("gptj", "transformer.h.1.attn.masked_bias"),
    ):
        if family not in FAMILIES:
            continue
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
    """https://github.com/huggingface/transformers/issues/38464 and https://github.com/castorini/rank_llm/pull/398"""
    source = write_source(tmp_path / "src", tie_word_embeddings=tied)
    (write_bin_shards if sharded else write_bin)(tmp_path / "src", source.state_dict())
    convert(tmp_path / "src", tmp_path / "dst", "drope", rope_scale=1.0)
    assert not list((tmp_path / "dst").glob("*.bin*"))
    assert ("lm_head.weight" in checkpoint.read_checkpoint(tmp_path / "dst").tensors) is not tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
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
        dst = tmp_path / f"dst-{dtype}"
        convert(tmp_path / "src", dst)
        out = load_file(dst / "model.safetensors")
        assert all(torch.equal(out[name], state[name]) and out[name].dtype == state[name].dtype for name in out)
        assert json.loads((dst / "config.json").read_text())["dtype"] == dtype
        assert (
            AutoModelForCausalLM.from_pretrained(dst).dtype
            == AutoModelForCausalLM.from_pretrained(tmp_path / "src").dtype
        )


@pytest.mark.parametrize("metadata", [None, {}, {"note": "kept"}])
@pytest.mark.parametrize("sharded", [False, True])
def test_output_shards_always_say_their_format(sharded, metadata, tmp_path):
    """https://github.com/ml-explore/mlx/issues/743 and https://github.com/safetensors/safetensors/issues/549"""
    write_source(tmp_path / "src", **({"max_shard_size": "20KB"} if sharded else {}))
    for path in (tmp_path / "src").glob("*.safetensors"):
        save_file(load_file(path), path, metadata=metadata)
    convert(tmp_path / "src", tmp_path / "dst", "drope")
    written = [checkpoint.read_shard(path).metadata for path in (tmp_path / "dst").glob("*.safetensors")]
    assert len(written) > (2 if sharded else 1)
    # The one that holds the position parameters is new.
    assert sorted(written, key=len) == [{"format": "pt"}] + [{"format": "pt", **(metadata or {})}] * (len(written) - 1)


SHAPED = [
    {"position_bias": {"type": "table", "max_distance": 6, "share": "layer"}, "gate": {"type": "head"}},
    {
        "position_bias": {"type": "table", "max_distance": 6, "num_buckets": 4},
        "gate": {"type": "head", "exponential": False},
    },
    {"position_bias": {"type": "log", "bidirectional": True}, "gate": {"type": "query"}},
    {"position_bias": {"type": "linear"}, "gate": {"type": "score"}},
    {"position_bias": {"type": "linear", "learned": True, "share": "kv_group"}},
    {"position_bias": {"type": "low_rank", "rank": 4}, "qk_norm": "qk"},
    {"position_bias": {"type": "disentangled", "rank": 2}, "rope_layers": [1]},
    {"position_bias": {"type": "disentangled", "share": "layer", "content": "identity"}},
    {"position_bias": {"type": "disentangled", "share": "kv_group"}, "qk_norm": "k"},
]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gptj"])
@pytest.mark.parametrize("settings", SHAPED, ids=str)
def test_a_plan_knows_the_shapes_without_making_the_tensors(settings, family, tmp_path):
    if family != "llama":
        settings = {key: value for key, value in settings.items() if key != "qk_norm"}
    model = write_source(tmp_path, family)
    plan = plan_conversion(tmp_path, DroPEParameters.from_dict(settings))
    made = new_tensors(plan.config, plan.parameters, plan.additions)
    assert {name: list(tensor.shape) for name, tensor in made.items()} == plan.added
    apply_drope(model, DroPEParameters.from_dict(settings))
    assert set(made) == {name for name in model.state_dict() if "position_bias" in name or "qk_norm" in name}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_padded_vocabulary_stays(family, tmp_path):
    """https://github.com/arcee-ai/mergekit/issues/425 and https://github.com/unslothai/unsloth-zoo/pull/923"""
    source = write_source(tmp_path / "src", family, vocab_size=104)
    tokenizer = tiny_tokenizer()
    assert tokenizer.add_tokens(["new", "words"]) == 2
    tokenizer.save_pretrained(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", rope_scale=1.0)
    assert json.loads((tmp_path / "dst/config.json").read_text())["vocab_size"] == 104
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "dst")) == len(tokenizer) < 104
    assert model.get_input_embeddings().weight.shape[0] == model.get_output_embeddings().weight.shape[0] == 104
    assert torch.equal(logits(model, torch.tensor([[5, 103, 98]])), logits(source, torch.tensor([[5, 103, 98]])))


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
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
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
    elif kind == "cannot be converted: Transformers has no language model":
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
        "cannot be converted: Transformers has no language model",
        "speaks of 3 layers",
    ],
)
def test_unusable_source_is_refused_in_one_sentence(kind, tmp_path):
    """https://github.com/hiyouga/LlamaFactory/issues/5155"""
    sharded = kind in ("lacks the shard", "does not hold it")
    write_source(tmp_path / "src", **({"max_shard_size": "20KB"} if sharded else {}))
    damage(tmp_path / "src", kind)
    with pytest.raises(ValueError, match=kind.replace("(", r"\(").replace(")", r"\)")) as caught:
        plan_conversion(tmp_path / "src", "drope")
    assert str(caught.value).count(". ") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("lost", ["tensor", "shard"])
def test_a_tensor_or_shard_that_is_not_where_the_index_says_is_named(lost, binary, tmp_path, capsys):
    """https://github.com/huggingface/huggingface_hub/pull/4728 and https://github.com/sgl-project/sglang/pull/32279"""
    source = write_source(tmp_path / "src", max_shard_size="20KB")
    if binary:
        write_bin_shards(tmp_path / "src", source.state_dict())
    index = next((tmp_path / "src").glob("*.index.json"))
    shard = json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    path = tmp_path / "src" / shard
    if lost == "shard":
        path.unlink()
    else:
        state = torch.load(path) if binary else load_file(path)
        state.pop("model.norm.weight")
        if binary:
            torch.save(state, path)
        else:
            save_file(state, path, metadata={"format": "pt"})
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "dst")]) == 2
    message = capsys.readouterr().err
    assert shard in message
    assert ("model.norm.weight" in message) is (lost == "tensor")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_folder_that_shadows_a_hub_id_is_named(tmp_path, monkeypatch):
    """https://github.com/huggingface/transformers/issues/27954 and https://github.com/TransformerLensOrg/TransformerLens/issues/332"""

    def no_network(*arguments):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(ValueError, match=r"local folder gpt2 was used, and it has no config\.json"):
        plan_conversion("gpt2")
    assert main(["convert", "gpt2", "out"]) == main(["inspect", "gpt2"]) == 2
    (tmp_path / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"gpt2 holds no weights: neither model\.safetensors"):
        plan_conversion("gpt2")
    assert not (tmp_path / "out").exists()
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
    for source in ("src", "link"):
        for target in ("src", "link", "src/../src/"):
            with pytest.raises(ValueError, match="overlap"):
                convert_checkpoint(plan_conversion(tmp_path / source), tmp_path / target, overwrite=True)
    assert (tmp_path / "full/mine.txt").read_text() == "mine"
    assert {path: path.read_bytes() for path in (tmp_path / "src").iterdir()} == before
    convert_checkpoint(plan_conversion(tmp_path / "src"), tmp_path / "full", overwrite=True)
    assert not (tmp_path / "full/mine.txt").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "full").config.model_type == "llama_drope"
    assert main(["export", str(tmp_path / "full"), str(tmp_path / "full"), "--overwrite"]) == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "full").config.model_type == "llama_drope"


def test_failure_midway_leaves_no_target_and_a_rerun_succeeds(tmp_path, monkeypatch):
    """https://github.com/JustVugg/colibri/pull/1026 and https://github.com/huggingface/transformers/issues/36099"""
    write_source(tmp_path / "src", max_shard_size="20KB")
    calls = []

    def fail_at_second(source, target, progress=None, copy=checkpoint_writing.copy_file):
        calls.append(source)
        if len(calls) == 2:
            raise OSError("disk full")
        copy(source, target, progress)

    monkeypatch.setattr(checkpoint_writing, "copy_file", fail_at_second)
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
    with pytest.raises(ValueError, match=r"1 bytes free, and \d+ are needed"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


KILLED = """
import os, signal, sys
from hf_drope import checkpoint_writing, convert, plan_conversion
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

count(*((checkpoint_writing, name) for name in ("copy_file", "write_tensors", "write_index")), (convert, "_write_json"))
rename = convert.Path.rename
def killed_after_rename(self, target):
    rename(self, target)
    if step == 0:
        os.kill(os.getpid(), signal.SIGKILL)
convert.Path.rename = killed_after_rename
convert.convert_checkpoint(plan_conversion(sys.argv[1], "drope"), sys.argv[2], progress=False)
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
    assert found["convertible"] == "yes"
    edit_json(tmp_path / "src/config.json", model_type="falcon", n_layer=None, n_head=None)
    assert "FalconAttention rotates queries and keys" in inspect_checkpoint(tmp_path / "src")["convertible"]
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_per_layer_settings_have_to_fit_the_model(tmp_path):
    write_source(tmp_path / "src")
    for settings in ({"rope_layers": [2]}, {"window": [4]}):
        with pytest.raises(ValueError, match="layer"):
            plan_conversion(tmp_path / "src", "nope", overrides=settings)


def write_bin(folder: Path, state: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")


def write_bin_shards(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Two of them, a tied head apart from its embedding."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    names = sorted(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[1:], "pytorch_model-00002-of-00002.bin": names[:1]}
    assert names[0] == "lm_head.weight"
    for file, keys in parts.items():
        torch.save({key: state[key] for key in keys}, folder / file)
    weight_map = {key: file for file, keys in parts.items() for key in keys}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("said", [True, False])
def test_a_head_that_shares_storage_is_left_out_only_where_the_model_ties_it(family, said, tmp_path):
    """https://github.com/huggingface/transformers/pull/43429: a config without the flag means the type's own default."""
    source = write_source(tmp_path / "src", family)
    head, embedding = source.get_output_embeddings(), source.get_input_embeddings()
    head.weight = embedding.weight
    write_bin(tmp_path / "src", source.state_dict())
    config = json.loads((tmp_path / "src/config.json").read_text())
    ties = config.pop("tie_word_embeddings")
    if said:
        config["tie_word_embeddings"] = ties = True
    (tmp_path / "src/config.json").write_text(json.dumps(config))
    plan = plan_conversion(tmp_path / "src", "nope", overrides={"rope_scale": 1.0})
    assert ("output head tied to the embedding" in plan.dropped.values()) is ties
    convert_checkpoint(plan, tmp_path / "dst")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(model.get_output_embeddings().weight, head.weight)


def test_every_type_ties_by_its_own_default(tmp_path):
    """https://github.com/huggingface/transformers/pull/43429, for a `.bin` whose config does not say and whose head has any name."""
    seen = set()
    for model_type in DECODER_TYPES:
        source, folder = small_model(model_type), tmp_path / model_type
        ties = source.config.tie_word_embeddings
        source.save_pretrained(folder)
        edit_json(folder / "config.json", tie_word_embeddings=None)
        write_bin(folder, source.state_dict())
        dropped = plan_conversion(folder, "nope", overrides={"rope_scale": 1.0}).dropped
        assert ("output head tied to the embedding" in dropped.values()) is ties, model_type
        seen.add(ties)
    assert seen == {True, False}


@pytest.mark.parametrize(("family", "preset"), [("llama", "nope"), ("gpt2", "drope"), ("gpt_neox", "simple")])
def test_a_checkpoint_of_the_bare_model_converts_too(family, preset, tmp_path):
    """Its keys have no `model.` or `transformer.` in front."""
    source = tiny_model(family, "Model")
    source.save_pretrained(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", preset)
    report = verify_checkpoint(tmp_path / "dst", tmp_path / "src", length=16, progress=False)
    assert report.passed, report.describe()
    _, info = AutoModel.from_pretrained(tmp_path / "dst", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


# Setting or preset, and the setting that the refusal names.
REFUSED = {
    ("gpt2", "rope_layers"): "rope_layers",
    ("gpt2", "qk_norm"): "qk_norm",
    ("gptj", "qk_norm"): "qk_norm",
    ("gpt2", "disentangled"): "position_bias",
}


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        *((preset, {}) for preset in PRESETS),
        ("gated", {"qk_norm": "q"}),
        ("gated", {"qk_norm": "k"}),
        ("nope", {"qk_norm": "qk"}),
        ("nope", {"rope_layers": [1]}),
        ("nope", {"window": [4, None]}),
        ("nope", {"attention_scale": {"factor": 1.1}}),
        ("drope", {"gate": {"type": "query"}, "share": "layer"}),
        ("nope", {"position_bias": {"type": "low_rank", "share": "kv_group"}}),
        ("disentangled", {"rank": 2, "content": "identity", "share": "kv_group", "gate": {"type": "query"}}),
        ("disentangled", {"rope_layers": [1], "share": "layer"}),
    ],
)
def test_settings_are_refused_when_planned_or_load_in_full(preset, settings, tmp_path):
    """New parameters are exactly those that the model has: same names, same shapes, fp32 in a bf16 model."""
    for family in FAMILIES:
        src, dst = tmp_path / family, tmp_path / f"{family}-out"
        write_source(src, family)
        refused = [REFUSED[family, name] for name in (*settings, preset) if (family, name) in REFUSED]
        if refused:
            with pytest.raises(ValueError, match=refused[0]):
                plan_conversion(src, preset, overrides=settings)
            continue
        plan = plan_conversion(src, preset, overrides=settings)
        convert_checkpoint(plan, dst)
        model, info = AutoModelForCausalLM.from_pretrained(dst, output_loading_info=True, dtype=torch.bfloat16)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[problem], family
        positions = [parameter for name, parameter in model.named_parameters() if ".position_bias." in name]
        assert all(parameter.dtype == torch.float32 for parameter in positions), family


def test_a_new_table_arrives_in_the_model_as_it_was_written(tmp_path):
    write_source(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", "simple", max_distance=8)
    written = load_file(tmp_path / "dst/model-00002-of-00002.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", dtype=torch.bfloat16)
    loaded = {name: p for name, p in model.named_parameters() if name in written}
    assert set(loaded) == set(written)
    for name, table in loaded.items():
        assert table.dtype == torch.float32
        assert torch.equal(table, written[name])
        assert 0.05 < table.abs().max() <= 0.1
    first, second = written.values()
    assert not torch.equal(first, second), "every layer draws its own"


def test_cross_attention_gets_no_position_bias(tmp_path):
    write_source(tmp_path / "src", "gpt2", add_cross_attention=True)
    added = plan_conversion(tmp_path / "src", "drope").added
    assert added
    assert not any("crossattention" in name for name in added)


def test_the_same_plan_writes_the_same_bytes(tmp_path):
    write_source(tmp_path / "src")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    convert(tmp_path / "src", tmp_path / "one", "simple")
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers are untouched"
    torch.manual_seed(2)
    convert(tmp_path / "src", tmp_path / "two", "simple")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    assert json.loads((tmp_path / "one/drope_conversion.json").read_text())["source"] == "src"
    assert str(tmp_path) not in (tmp_path / "one/drope_conversion.json").read_text()


def test_a_plain_conversion_needs_no_torch(tmp_path):
    write_source(tmp_path / "src")
    code = (
        "import sys\nfrom hf_drope import convert_checkpoint, plan_conversion\n"
        "convert_checkpoint(plan_conversion(sys.argv[1]), sys.argv[2])\nsys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "src"), str(tmp_path / "dst")]
    assert subprocess.run(command, check=False).returncode == 0
    assert (tmp_path / "dst/config.json").is_file()


def test_tokenizer_class_is_copied_and_not_rewritten(tmp_path):
    """https://github.com/unslothai/unsloth/issues/8444 and https://github.com/Open-Athena/MarinFold/pull/165"""
    write_source(tmp_path / "src")
    edit_json(tmp_path / "src/tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    convert(tmp_path / "src", tmp_path / "dst")
    after = (tmp_path / "dst/tokenizer_config.json").read_bytes()
    assert after == (tmp_path / "src/tokenizer_config.json").read_bytes()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_the_config_says_as_much_about_dtype_as_before(key, tmp_path):
    """https://github.com/huggingface/transformers/issues/40513"""
    write_source(tmp_path / "src")
    config = json.loads((tmp_path / "src/config.json").read_text())
    config.pop("dtype", None)
    (tmp_path / "src/config.json").write_text(json.dumps({**config, **({key: "bfloat16"} if key else {})}))
    convert(tmp_path / "src", tmp_path / "dst")
    after = json.loads((tmp_path / "dst/config.json").read_text())
    assert {name: after[name] for name in ("dtype", "torch_dtype") if name in after} == (
        {key: "bfloat16"} if key else {}
    )


def test_files_that_have_no_place_in_a_checkpoint_are_left_out_and_named(tmp_path):
    source = tmp_path / "src"
    write_source(source)
    kept = ["images/README.md", "images/a.png", "onnx/notes.txt", "1_Pooling/config.json", "modeling_other.py"]
    gone = ["optimizer.pt", "rng_state_0.pth", "trainer_state.json", "training_args.bin", "pytorch_model.bin"]
    gone += ["tf_model.h5", "flax_model.msgpack", "m.gguf", "consolidated.00.pth", "original/params.json"]
    gone += ["onnx/model.onnx", "onnx/model.onnx_data", "openvino_model.bin", ".git/HEAD", "checkpoint-5/config.json"]
    for name in (*kept, *gone):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    (source / "broken").symlink_to("nowhere")
    (source / "linked").symlink_to(tmp_path)
    os.mkfifo(source / "pipe")
    plan = plan_conversion(source)
    convert_checkpoint(plan, tmp_path / "dst")
    assert all((tmp_path / "dst" / name).read_text() == name for name in kept)
    names = {str(path.relative_to(tmp_path / "dst")) for path in (tmp_path / "dst").rglob("*")}
    for name in (*gone, "broken", "linked", "pipe"):
        assert name not in names
        assert any(name == left or name == left.rstrip("/") or name.startswith(left) for left in plan.left_out), name
        top = name.split("/")[0]
        assert top in plan.describe()


def test_metadata_of_another_framework_does_not_stop_the_result_from_loading(tmp_path):
    write_source(tmp_path / "src")
    path = tmp_path / "src/model.safetensors"
    save_file(load_file(path), path, metadata={"format": "np", "note": "kept"})
    plan = plan_conversion(tmp_path / "src")
    assert "rewritten" in plan.describe()
    convert_checkpoint(plan, tmp_path / "dst")
    assert checkpoint.read_shard(tmp_path / "dst/model.safetensors").metadata == {"format": "pt", "note": "kept"}
    assert verify_checkpoint(tmp_path / "dst", tmp_path / "src", length=8, progress=False).checks[0].passed


@pytest.mark.parametrize(
    ("suffixes", "method"),
    [
        (("weight.absmax", "weight.quant_map"), "bitsandbytes"),
        (("weight.quant_state.bitsandbytes__nf4",), "bitsandbytes"),
        (("SCB",), "bitsandbytes"),
        (("qweight", "qzeros", "scales"), "GPTQ or AWQ"),
        (("weight_scale",), "compressed-tensors or FP8"),
        (("weight_scale_inv",), "compressed-tensors or FP8"),
        (("weight._data", "weight._scale"), "quanto"),
        (("W_q", "meta"), "HQQ or AQLM"),
        (("codes", "codebooks"), "HQQ or AQLM"),
        ((), "U8"),
    ],
)
@pytest.mark.parametrize("said", [True, False])
def test_quantised_weights_are_refused_and_name_their_method(said, suffixes, method, tmp_path, capsys):
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1946 and https://github.com/huggingface/optimum-quanto/issues/372"""
    write_source(tmp_path / "src")
    state, layer = load_file(tmp_path / "src/model.safetensors"), "model.layers.0.self_attn.q_proj."
    state[layer + "weight"] = torch.ones(16, 32, dtype=torch.uint8)
    state.update({layer + suffix: torch.ones(2) for suffix in suffixes})
    save_file(state, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    if said:
        edit_json(tmp_path / "src/config.json", quantization_config={"quant_method": "gptq"})
    else:
        assert inspect_checkpoint(tmp_path / "src")["quantised"]
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "dst")]) == 2
    message = capsys.readouterr().err
    assert ("quantised (gptq)" if said else f"quantised weights ({method}: {layer}") in message
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_a_narrow_dtype_are_called_quantised(dtype, tmp_path):
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1946: even where no other key gives them away."""
    write_source(tmp_path / "src")
    state, key = load_file(tmp_path / "src/model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    save_file({**state, key: state[key].to(dtype)}, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"quantised weights \(\w+: {key}\)"):
        plan_conversion(tmp_path / "src")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"quantization_config": "awq"}, r"quantised \(awq\)"),
        ("llama", {"num_attention_heads": None}, "None heads"),
        ("llama", {"num_hidden_layers": None}, "None layers"),
        ("llama", {"model_type": None}, "None cannot be converted"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "bypasses a position bias"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_sentence(family, changes, message, tmp_path):
    write_source(tmp_path / "src", family)
    edit_json(tmp_path / "src/config.json", **changes)
    with pytest.raises(ValueError, match=message):
        plan_conversion(tmp_path / "src", "drope")


def test_overwriting_through_a_link_replaces_what_it_leads_to(tmp_path):
    write_source(tmp_path / "src")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    convert_checkpoint(plan_conversion(tmp_path / "src"), tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere/config.json").is_file()
    assert not (tmp_path / "elsewhere/mine.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "link", "src"]


@pytest.mark.parametrize("name", [".", "smol-v1.5.drope", "a b", "deep/er/"])
def test_any_folder_name_will_do(name, tmp_path, monkeypatch):
    """https://github.com/huggingface/transformers/issues/29101"""
    write_source(tmp_path / "src")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert(tmp_path / "src", name)
    assert AutoModelForCausalLM.from_pretrained(name).config.model_type == "llama_drope"
    assert not list(tmp_path.glob(".*"))


TERMINATED = """
import os, signal, sys
from hf_drope import checkpoint_writing, convert, plan_conversion

checkpoint_writing.copy_file = lambda *arguments: os.kill(os.getpid(), signal.SIGTERM)
convert.convert_checkpoint(plan_conversion(sys.argv[1]), sys.argv[2], progress=False)
"""


def test_a_terminated_conversion_cleans_up(tmp_path):
    write_source(tmp_path / "src")
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "src"), str(tmp_path / "dst")]
    assert subprocess.run(command, check=False).returncode == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_the_programs_own_handler_of_termination_stays(tmp_path):
    write_source(tmp_path / "src")
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        convert(tmp_path / "src", tmp_path / "dst")
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


LIMITED = """
import resource, sys
from hf_drope.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
sys.exit(main(["convert", *sys.argv[1:]]))
"""


def test_a_limit_on_file_size_is_one_sentence_and_leaves_nothing(tmp_path):
    """https://github.com/JustVugg/colibri/pull/1026, as `ulimit -f` or a full disk would stop it."""
    write_source(tmp_path / "src")
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "src"), str(tmp_path / "dst")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    convert(tmp_path / "src", tmp_path / "dst")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "dst").config.model_type == "llama_drope"


KILLED_IN_BETWEEN = """
import os, signal, sys
from pathlib import Path
from hf_drope import convert, plan_conversion

rename, left = Path.rename, [int(sys.argv[3])]

def killed_before(self, target):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)

Path.rename = killed_before
convert.convert_checkpoint(plan_conversion(sys.argv[1]), sys.argv[2], overwrite=True, progress=False)
"""


@pytest.mark.parametrize("rename", [1, 2])
def test_killed_overwrite_loses_nothing_that_was_there(rename, tmp_path):
    write_source(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst/mine.txt").write_text("mine")
    command = [sys.executable, "-c", KILLED_IN_BETWEEN, str(tmp_path / "src"), str(tmp_path / "dst"), str(rename)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "dst/config.json").exists(), "no half target"
    with pytest.raises(ValueError, match="is not empty"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert (tmp_path / "dst/mine.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]
    convert_checkpoint(plan_conversion(tmp_path / "src"), tmp_path / "dst", overwrite=True)
    assert (tmp_path / "dst/config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]

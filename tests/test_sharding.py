"""Training in several processes: DDP and FSDP2 through `accelerate launch`, and what FSDP2 and ZeRO-3 want of a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import logits, write_source
from test_examples import write_words
from tiny import random_ids, tiny_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from hf_drope import apply_drope, convert_checkpoint, plan_conversion
from hf_drope.fp32_module import Fp32Module
from hf_drope.recalibrate import recalibrate
from hf_drope.sharding import keep_class_name, load_whole, shard_position_parameters

EXAMPLES = Path(__file__).parents[1] / "examples"
BIASES: dict[str, dict[str, Any]] = {
    "table, query gate": {"parameters": "simple", "gate": {"type": "query"}},
    "table, head gate": {"parameters": "gated"},
    "log, score gate": {"parameters": "drope"},
    "low rank": {"parameters": "nope", "position_bias": {"type": "low_rank"}},
    "learned slopes, norms": {"parameters": "alibi", "learned": True, "qk_norm": "qk"},
    "disentangled": {"parameters": "disentangled"},
}
# Port 0 is any free one.
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A converted model, a text, and the result of one process with the batches of two."""
    folder = tmp_path_factory.mktemp("place")
    write_source(folder / "src")
    write_words(folder / "text.txt", 1200, seed=1)
    plan = plan_conversion(folder / "src", "drope", overrides={"rope_scale": 1.0, "gate": {"type": "query"}})
    convert_checkpoint(plan, folder / "converted", progress=False)
    settings: dict[str, Any] = {"max_steps": 6, "sequence_length": 16, "save_steps": 3, "bf16": False}
    batches = {"batch_size": 4, "gradient_accumulation_steps": 2}
    recalibrate(folder / "converted", folder / "one", [folder / "text.txt"], **settings, **batches)
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def launch(config: str, program: list[str], place: Path, out: Path) -> str:
    """`recalibrate` in two processes as a user of `examples/` starts it."""
    recalibration = ["recalibrate", str(place / "converted"), str(out), "--text", str(place / "text.txt"), "--json"]
    settings = ["--max-steps", "6", "--length", "16", "--save-steps", "3", "--batch-size", "2", "--accumulate", "2"]
    command = [*LAUNCH, "--config_file", str(EXAMPLES / config), *program, *recalibration, *settings, "--no-bf16"]
    path = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])}
    environment = {**os.environ, **path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def agree(place: Path, out: Path) -> None:
    one, two = rows(place / "one"), rows(out)
    assert len(one) == len(two) == 6
    for name in ("loss", "grad_norm", "drope/bias_norm", "drope/gate", "drope/rope_scale", "learning_rate"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=1e-5, abs=1e-12), name
    ids = random_ids(1, 9)
    one_model, two_model = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (place / "one", out))
    assert two_model.config.drope_parameters == one_model.config.drope_parameters
    torch.testing.assert_close(logits(two_model, ids), logits(one_model, ids), atol=1e-4, rtol=1e-4)
    # What was saved on the way is whole as well, with the code that it needs.
    for folder in (out / "checkpoint-6", place / "one/checkpoint-6"):
        assert (folder / "modeling_drope.py").is_file()
        assert (folder / "config.json").read_text().count("modeling_drope.DroPELlamaForCausalLM") == 1
    reloaded = AutoModelForCausalLM.from_pretrained(out / "checkpoint-6").eval()
    torch.testing.assert_close(logits(reloaded, ids), logits(two_model, ids), atol=1e-5, rtol=1e-5)


def test_two_processes_of_data_parallel_training_agree_with_one(place, tmp_path):
    """https://github.com/pytorch/pytorch/issues/41324: across the stages, with accumulation, no search for unused parameters."""
    out = launch("accelerate_ddp.yaml", ["-m", "hf_drope"], place, tmp_path / "out")
    # The first process alone speaks.
    assert json.loads(out)["steps"] == 6
    agree(place, tmp_path / "out")


def test_two_processes_of_sharded_training_agree_with_one(place, tmp_path):
    """https://github.com/huggingface/transformers/issues/20082: whole parameters in every folder."""
    out = launch("accelerate_fsdp2.yaml", [str(Path(__file__).parent / "fsdp2_on_cpu.py")], place, tmp_path / "out")
    assert json.loads(out)["steps"] == 6
    agree(place, tmp_path / "out")
    # Only sharded training writes this, so it was one.
    assert (tmp_path / "out/checkpoint-6/pytorch_model_fsdp.bin").is_file()


@pytest.fixture
def group():
    """A process group of this process alone, in which sharding works as among many."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def build(name: str) -> Any:
    settings = dict(BIASES[name])
    model = apply_drope(tiny_model("llama", scale=2.0), settings.pop("parameters"), **settings)
    with torch.no_grad():
        for index, parameter in enumerate(model.position_parameters()):
            # Numbers that bf16 cannot hold.
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model


def shard(model: Any, **settings: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model(ids, labels=ids, use_cache=False).loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (grad.full_tensor() if hasattr(grad, "full_tensor") else grad) for name, grad in named.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", BIASES)
def test_position_parameters_stay_fp32_in_a_bf16_model_that_is_sharded(name, checkpointing, group):
    """https://github.com/huggingface/trl/issues/1723"""
    model, sharded = build(name).to(torch.bfloat16).train(), build(name).to(torch.bfloat16).train()
    mixed = shard(build(name).to(torch.bfloat16))
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        mixed(random_ids(1, 12))
    shard(shard_position_parameters(sharded))
    if checkpointing:
        sharded.gradient_checkpointing_enable()
    for step in range(2):
        model.zero_grad(), sharded.zero_grad()
        expected, found = (gradients(m, random_ids(2, 12, seed=step)) for m in (model, sharded))
        assert expected.keys() == found.keys()
        for key in expected:
            assert torch.equal(expected[key], found[key]), key
            assert (found[key].dtype == torch.float32) == ("position_bias" in key or "qk_norm" in key)


@pytest.mark.parametrize("name", BIASES)
def test_mixed_precision_does_not_round_position_parameters(name, group):
    model = build(name).train()
    shard(shard_position_parameters(model), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    dtypes: dict[str, torch.dtype] = {}
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.register_forward_hook(
            lambda module, *_: dtypes.update({name: p.dtype for name, p in module.named_parameters()})
        )
    model(random_ids(1, 12))
    assert {dtypes[key] for key in dtypes if "_proj" in key} == {torch.bfloat16}
    assert {dtypes[key] for key in dtypes if "_proj" not in key} == {torch.float32}


def test_a_sharded_model_is_saved_under_its_own_name_with_its_code(group, tmp_path):
    model = build("table, head gate")
    expected, weights = logits(model, random_ids(1, 9)), dict(model.state_dict())
    shard(shard_position_parameters(model))
    # Twice, and where adapters are the sharded root: the class of the model itself stays what it is.
    keep_class_name(model), keep_class_name(model)
    model.save_pretrained(tmp_path, state_dict=weights)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DroPELlamaForCausalLM"]
    assert (tmp_path / "modeling_drope.py").is_file()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(reloaded, random_ids(1, 9)), expected)
    plain = build("table, head gate")
    keep_class_name(plain)
    assert type(plain).__name__ == "DroPELlamaForCausalLM"


def test_weights_that_lack_a_trained_parameter_are_not_taken():
    model = build("table, head gate")
    weights = dict(model.state_dict())
    load_whole(model, weights)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.position_bias.bias.weight"):
        load_whole(model, {key: value for key, value in weights.items() if "layers.0.self_attn.position" not in key})
    with pytest.raises(ValueError, match="nowhere"):
        load_whole(model, {**weights, "nowhere": torch.zeros(1)})


@pytest.mark.parametrize("name", BIASES)
def test_position_parameters_are_read_while_their_attention_layer_runs_and_never_elsewhere(name, monkeypatch):
    """https://github.com/deepspeedai/DeepSpeed/issues/3599: ZeRO-3 and FSDP hold nothing outside the forward of an owner."""
    model, running, read = build(name).train(), [], []
    owners: dict[int, Any] = {}
    for layer in model.model.layers:
        for module in layer.self_attn.modules():
            owners[id(module)] = layer.self_attn
        layer.self_attn.register_forward_pre_hook(lambda module, _: running.append(module))
        layer.self_attn.register_forward_hook(lambda module, *_: running.remove(module))
    found = nn.Module.__getattr__

    def watched(self: Any, attribute: str) -> Any:
        if isinstance(self, Fp32Module) and attribute in self._parameters and id(self) in owners:
            assert owners[id(self)] in running, f"{attribute} is read outside"
            read.append(self._parameters[attribute])
        return found(self, attribute)

    monkeypatch.setattr(nn.Module, "__getattr__", watched)
    model(random_ids(1, 12), labels=random_ids(1, 12)).loss.backward()
    monkeypatch.undo()
    assert {id(p) for p in read} >= {id(p) for p in model.position_parameters()}


def test_the_zero3_config_shares_out_parameters_and_saves_them_whole():
    """https://github.com/hiyouga/LlamaFactory/issues/7993: what it leaves to the Trainer is what the Trainer fills in."""
    config = json.loads((EXAMPLES / "deepspeed_zero3.json").read_text())
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    # Otherwise every weight in a saved folder has size 0.
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    left = {name for name, value in config.items() if value == "auto"}
    assert left == {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    # The Trainer's own optimizer has the group of the position parameters, so DeepSpeed must not make one.
    assert "optimizer" not in config
    assert "scheduler" not in config

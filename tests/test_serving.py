"""What the Transformers backends of vLLM and SGLang ask of a model class, statically and with a stand-in for their attention.

Both load the config, take the class that `auto_map` names for AutoModel, ask it `is_backend_compatible()`, set the attention
implementation to their own, build with `AutoModel.from_config` and hand their state through keyword arguments down to attention.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import run_python
from model_types import TYPES, small_config, small_model
from test_saving import IDS as OTHER_IDS
from test_saving import run_without_package
from tiny import random_ids, tiny_model
from transformers import AutoConfig, AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_drope import DroPEParameters, apply_drope, convert_checkpoint, drope_config_class, plan_conversion
from hf_drope.configuration_drope import auto_map

IDS = random_ids(1, 9)
NOT_SERVED: list[tuple[str, dict[str, Any]]] = [
    ("simple", {}),
    ("drope", {}),
    ("disentangled", {}),
    ("nope", {"window": 4}),
    ("nope", {"qk_norm": "q"}),
    ("nope", {"attention_scale": {"coefficient": 0.1, "original_max_position_embeddings": 32}}),
]
SERVED: list[dict[str, Any]] = [
    {},
    {"rope_scale": 1.0},
    {"rope_scale": 0.5},
    {"rope_layers": [1]},
    {"attention_scale": {"factor": 1.5}},
]


def folder_of(tmp_path: Path, preset: str, family: str = "llama", **overrides: Any) -> Path:
    tiny_model(family).save_pretrained(tmp_path / "src")
    plan = plan_conversion(tmp_path / "src", preset, overrides=overrides)
    return convert_checkpoint(plan, tmp_path / "dst", progress=False)


def answer(folder: Path) -> bool:
    """What an engine hears before it builds anything."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return get_class_from_dynamic_module(config.auto_map["AutoModel"], folder).is_backend_compatible()


@pytest.fixture
def engine_attention(monkeypatch):
    """An attention of an engine's own, registered as theirs are: it wants state through keyword arguments and no mask."""
    seen = []

    def attend(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
        seen.append(attention_instances[module.layer_idx])
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "engine", attend)
    return seen


@pytest.mark.parametrize("overrides", SERVED, ids=str)
def test_a_model_without_a_bias_runs_on_an_attention_from_outside(overrides, engine_attention, tmp_path):
    """https://github.com/vllm-project/vllm/issues/16826 and https://github.com/vllm-project/vllm/issues/7366"""
    folder = folder_of(tmp_path, "nope", **overrides)
    assert answer(folder)
    ours = AutoModel.from_pretrained(folder).eval()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config._attn_implementation = "engine"
    model = AutoModel.from_config(config, trust_remote_code=True).eval()
    assert model._supports_attention_backend
    model.load_state_dict(ours.state_dict())
    given = {"position_ids": torch.arange(9)[None], "use_cache": False, "return_dict": False}
    with torch.no_grad():
        found = model(input_ids=IDS, inputs_embeds=None, attention_instances={0: "a", 1: "b"}, **given)[0]
        expected = ours(IDS).last_hidden_state
    assert engine_attention == ["a", "b"]
    torch.testing.assert_close(found, expected, atol=2e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("preset", "overrides"), NOT_SERVED, ids=str)
def test_a_model_with_parts_that_an_engine_would_leave_out_does_not_promise(preset, overrides, tmp_path):
    """https://github.com/vllm-project/vllm/pull/15231: an engine cannot take an arbitrary bias, and runs on without it."""
    folder = folder_of(tmp_path, preset, **overrides)
    assert not answer(folder)
    model = AutoModel.from_pretrained(folder)
    assert not model._supports_attention_backend
    model.save_pretrained(tmp_path / "again")
    assert not answer(tmp_path / "again")
    assert not apply_drope(tiny_model("llama"), preset, **overrides)._supports_attention_backend


@pytest.mark.parametrize(("preset", "overrides"), [case for case in NOT_SERVED if "qk_norm" not in case[1]], ids=str)
def test_an_engine_that_does_not_ask_is_told_when_it_builds(preset, overrides, engine_attention, tmp_path):
    config = AutoConfig.from_pretrained(folder_of(tmp_path, preset, **overrides), trust_remote_code=True)
    config._attn_implementation = "engine"
    with pytest.raises(ValueError, match="cannot run on attn_implementation='engine', which would leave it out"):
        AutoModel.from_config(config, trust_remote_code=True)


def test_the_class_that_says_no_builds_the_same_model_where_the_package_is_not(tmp_path):
    folder = folder_of(tmp_path, "simple")
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder).eval()(OTHER_IDS).last_hidden_state
    torch.save(expected, tmp_path / "expected.pt")
    code = """
        model, info = AutoModel.from_pretrained("dst", trust_remote_code=True, output_loading_info=True)
        assert not info["missing_keys"], info
        assert type(model).__name__ == "DroPELlamaModel", type(model)
        with torch.no_grad():
            assert torch.equal(model.eval()(ids).last_hidden_state, torch.load("expected.pt"))
        model.save_pretrained("again")
        again = AutoModel.from_pretrained("again", trust_remote_code=True)
        assert again.config.architectures == ["DroPELlamaModel"]
        causal = AutoModelForCausalLM.from_pretrained("dst", trust_remote_code=True)
        assert type(causal.model).__name__ == "DroPELlamaModel"
        assert not causal._supports_attention_backend and not causal.model._supports_attention_backend
    """
    run_without_package(code, tmp_path, tmp_path / "modules")


@pytest.mark.parametrize("model_type", TYPES)
def test_every_type_has_a_base_class_that_promises_what_the_stock_class_does(model_type):
    config = drope_config_class(model_type)
    entries = auto_map(model_type)
    assert entries["AutoModel"].startswith("modeling_drope.DroPE")
    from hf_drope import modeling_drope

    converted = getattr(modeling_drope, entries["AutoModel"].rpartition(".")[2])
    stock = converted.__mro__[2]
    assert converted.config_class is config
    assert converted.is_backend_compatible() == stock.is_backend_compatible()
    simple = auto_map(model_type, DroPEParameters.preset("simple"))["AutoModel"]
    assert not getattr(modeling_drope, simple.rpartition(".")[2]).is_backend_compatible()
    # No argument of its own that an engine would have to give.
    assert inspect.signature(converted.forward) == inspect.signature(stock.forward)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_neox", "mixtral", "gemma3_text", "deepseek_v3", "phi3"])
def test_plans_of_tensor_and_pipeline_parallelism_are_the_stock_ones(model_type):
    stock = small_model(model_type)
    plans = stock.tp_plan, stock._pp_plan, small_config(model_type).base_model_tp_plan
    model = apply_drope(stock, "nope")
    assert (model.tp_plan, model._pp_plan, model.config.base_model_tp_plan) == plans
    names = {name for name, _ in model.named_modules()}
    for pattern in model.config.base_model_pp_plan or {}:
        assert f"{model.base_model_prefix}.{pattern}" in names
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    assert causal
    assert all(causal)


def test_a_llama_only_reader_refuses_a_converted_folder(tmp_path):
    """https://github.com/airockchip/rknn-llm/issues/501: a NoPE model that is taken for a Llama is rotated in every layer."""
    folder = folder_of(tmp_path, "nope")
    code = """
import sys, transformers
config, _ = transformers.PreTrainedConfig.get_config_dict(sys.argv[1])
assert config["model_type"] not in transformers.CONFIG_MAPPING
assert not any(hasattr(transformers, name) for name in config["architectures"])
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    print("refused:", error)
"""
    done = run_python(code, folder, cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout

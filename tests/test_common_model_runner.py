"""The script that runs Transformers' common model tests on converted classes."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import common_model_plugin
import pytest
import run_common_model_tests
from run_common_model_tests import EXCEPTIONS, FAMILIES, PRESETS, compare, main, table

from hf_drope import drope_class, drope_config_class

# As in Transformers: a tester and a test class hold the classes, and so does the module.
MODULE = """
from transformers import GPT2DoubleHeadsModel, GPT2LMHeadModel, GPT2Model, GPT2Config, LlamaModel


class GPT2ModelTester:
    base_model_class = GPT2Model

    def get_config(self):
        return GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)


class GPT2ModelTest:
    all_model_classes = (GPT2Model, GPT2DoubleHeadsModel, LlamaModel)
    pipeline_model_mapping = {"text-generation": GPT2LMHeadModel}

    def build(self):
        return GPT2LMHeadModel(GPT2ModelTester().get_config())
"""


def test_a_test_module_is_given_converted_classes_wherever_it_holds_stock_ones(monkeypatch):
    common = ModuleType("tests.test_modeling_common")
    common.get_values = lambda mapping: mapping.values()
    monkeypatch.setitem(sys.modules, common.__name__, common)
    module = ModuleType("tests.models.gpt2.test_modeling_gpt2")
    exec(MODULE, vars(module))
    stock = [module.GPT2Model, module.GPT2DoubleHeadsModel, module.GPT2LMHeadModel]
    ours = [drope_class(model_class) for model_class in stock]
    monkeypatch.setenv("HF_DROPE_UNDER_TEST", str(run_common_model_tests.ROOT))
    common_model_plugin._convert(module, "drope")
    assert ours[1].__name__ == "GPT2DoubleHeadsModel"
    ours[1].__name__ = "DroPEGPT2DoubleHeadsModel"
    assert [module.GPT2Model, module.GPT2DoubleHeadsModel, module.GPT2LMHeadModel] == ours
    assert module.GPT2ModelTester.base_model_class is ours[0]
    assert module.GPT2ModelTest.all_model_classes == (*ours[:2], module.LlamaModel)
    assert module.LlamaModel is not drope_class(module.LlamaModel)
    assert module.GPT2ModelTest.pipeline_model_mapping == {"text-generation": ours[2]}
    model = module.GPT2ModelTest().build()
    assert type(model) is ours[2]
    assert type(model.config) is drope_config_class("gpt2") is module.GPT2Config
    assert model.config.drope_parameters["gate"]["type"] == "score"
    assert any("position_bias" in name for name, _ in model.named_parameters())
    assert common.get_values({"gpt2": "GPT2Model"}) == ["GPT2Model", "DroPEGPT2Model"]


@pytest.mark.parametrize("exception", EXCEPTIONS, ids=lambda exception: exception.test)
def test_an_excepted_test_counts_neither_as_passed_nor_as_failed(exception):
    family, preset = (exception.families or FAMILIES)[0], (exception.presets or PRESETS)[0]
    name = exception.test.replace("*", "some")
    stock, ours = {name: "passed", "test_other": "passed"}, {name: "failed", "test_other": "skipped"}
    lost = compare(family, preset, stock, ours)
    assert lost == {name: exception.reason, "test_other": None}
    results = {family: {"stock": {"outcomes": stock}, preset: {"outcomes": ours, "lost": lost}}}
    assert f"| {family} | 2 / 0 / 0 | 0 / 0 / 1 / 1 |" in table(results, [preset])


@pytest.mark.parametrize(("outcome", "code"), [("passed", 0), ("failed", 1), ("skipped", 1)])
def test_a_test_that_passes_for_stock_classes_alone_is_an_error(outcome, code, monkeypatch, tmp_path, capsys):
    def run(source, family, preset, pattern):
        return {"outcomes": {"test_a": "passed" if preset == "stock" else outcome, "test_b": "failed"}, "reasons": {}}

    monkeypatch.setattr(run_common_model_tests, "run", run)
    arguments = ["--families", "qwen3", "--presets", "nope", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["run", "--source", str(tmp_path), *arguments])
    assert main() == code
    assert ("qwen3, nope: test_a: NOT LISTED" in capsys.readouterr().out) is bool(code)
    assert json.loads((tmp_path / "out.json").read_text())["qwen3"]["nope"]["outcomes"]["test_a"] == outcome


def test_exceptions_name_families_and_presets_that_exist():
    assert {family for exception in EXCEPTIONS for family in exception.families} <= set(FAMILIES)
    assert {preset for exception in EXCEPTIONS for preset in exception.presets} <= set(PRESETS)

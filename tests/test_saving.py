"""Saving and loading: by every route, with and without the package, bit for bit."""

from __future__ import annotations

import ast
import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from model_types import DECODER_TYPES, TYPES, small_config, small_model
from reference import randomise_position, reference_bias
from safetensors.torch import load_file
from tiny import FAMILIES, scale_up, tiny_config, tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_drope
from hf_drope import DroPEParameters, apply_drope, drope_class, drope_config_class
from hf_drope.configuration_drope import TRAVELLING_FILES, auto_map

PACKAGE = Path(hf_drope.__file__).parent
LOW_RANK_QUERY = {"position_bias": {"type": "low_rank", "rank": 6}, "gate": {"type": "query", "temperature": 0.7}}

# What a machine without the package looks like; the folder of remote code is the test's own.
WITHOUT_PACKAGE = """
import json, sys
class Hiding:
    hidden = ("hf_drope", "flash_attn", "triton", "peft", "kernels")
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in self.hidden else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Hiding, sys.meta_path)
import socket
def no_network(*args, **kwargs):
    raise AssertionError("the network was used")
socket.socket.connect = no_network
import torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
torch.set_num_threads(1)
ids = torch.tensor([[5, 9, 40, 7, 22, 61, 5]])
def logits(model):
    with torch.no_grad():
        return model.eval()(ids).logits
"""
IDS = torch.tensor([[5, 9, 40, 7, 22, 61, 5]])


def run_without_package(code, cwd, modules):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(modules)}
    script = WITHOUT_PACKAGE + textwrap.dedent(code)
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def converted(family, parameters="gated", **overrides):
    model = tiny_model(family, **overrides)
    settings = DroPEParameters.preset(parameters) if isinstance(parameters, str) else parameters
    return randomise_position(apply_drope(model, settings))


def assert_complete(folder, family):
    """The code and the settings are in the folder."""
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == f"{family}_drope"
    assert config["auto_map"] == auto_map(family, DroPEParameters.from_dict(config["drope_parameters"]))
    for name in TRAVELLING_FILES:
        assert (folder / name).read_text() == (PACKAGE / name).read_text()


@pytest.mark.parametrize("parameters", ["nope", "gated", "drope", "alibi", "low_rank_query"])
@pytest.mark.parametrize("family", FAMILIES)
def test_reloaded_model_is_the_same_bit_for_bit(family, parameters, tmp_path):
    settings = DroPEParameters.from_dict(LOW_RANK_QUERY) if parameters == "low_rank_query" else parameters
    model = converted(family, settings)
    model.save_pretrained(tmp_path / "one")
    assert_complete(tmp_path / "one", family)
    loaded, info = type(model).from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.drope_parameters == model.config.drope_parameters
    loaded.save_pretrained(tmp_path / "two")
    assert_complete(tmp_path / "two", family)
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert type(auto) is type(model)
    assert torch.equal(logits(auto), logits(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_auto_class_loads_and_only_heads_are_new(family, tmp_path):
    """https://github.com/hiyouga/LlamaFactory/issues/904"""
    model = converted(family)
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        states = body(IDS).last_hidden_state
        expected = model.base_model(IDS).last_hidden_state
    assert torch.equal(states, expected)
    for auto in auto_map(family):
        if not auto.endswith("Classification"):
            continue
        loaded, info = getattr(transformers, auto).from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
        assert type(loaded).__name__ == auto_map(family)[auto].rpartition(".")[2]
        new = {key.rpartition(".")[0] for key in info["missing_keys"]}
        assert new in ({"score"}, {"classifier"})
        with torch.no_grad():
            assert torch.equal(loaded.base_model(IDS).last_hidden_state, expected)


def test_checkpoints_load_where_the_package_is_not_installed(tmp_path):
    """https://github.com/huggingface/transformers/issues/15224 and https://github.com/huggingface/transformers/issues/28459

    Loaded, saved and loaded once more; the Trainer's checkpoints and further ways to load are in test_remote_code.py.
    """
    presets = ["nope", "gated", "drope", "t5", "alibi", "kerple", "simple", "gated"]
    for family, preset in zip(FAMILIES, presets, strict=False):
        model = converted(family, preset)
        model.save_pretrained(tmp_path / family)
        torch.save(logits(model), tmp_path / family / "logits.pt")
    low_rank = converted("llama", DroPEParameters.from_dict(LOW_RANK_QUERY))
    low_rank.save_pretrained(tmp_path / "low_rank")
    torch.save(logits(low_rank), tmp_path / "low_rank" / "logits.pt")
    # Odd names (https://github.com/huggingface/transformers/issues/29101), relative and with a slash at the end.
    for name in ("smol-v1.5.drope", "a b"):
        low_rank.save_pretrained(tmp_path / name)
        torch.save(logits(low_rank), tmp_path / name / "logits.pt")
    folders = [*FAMILIES, "low_rank", "smol-v1.5.drope", "./a b/"]
    output = run_without_package(
        f"""
        classes = {{}}
        for folder in {folders!r}:
            expected = torch.load(folder + "/logits.pt")
            model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"], (folder, info)
            assert torch.equal(logits(model), expected), folder
            generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, min_new_tokens=3)
            assert generated.shape == (1, 10), folder
            again = folder.rstrip("/") + " again"
            model.save_pretrained(again)
            second = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
            assert torch.equal(logits(second), expected), folder
            config = json.load(open(again + "/config.json"))
            assert all("--" not in entry for entry in config["auto_map"].values()), config["auto_map"]
            base = AutoModel.from_pretrained(folder, trust_remote_code=True)
            assert base(ids).last_hidden_state.isfinite().all()
            for auto in config["auto_map"]:
                if auto.endswith("Classification"):
                    _, info = getattr(transformers, auto).from_pretrained(
                        folder, trust_remote_code=True, output_loading_info=True)
                    heads = {{key.rpartition(".")[0] for key in info["missing_keys"]}}
                    assert heads in ({{"score"}}, {{"classifier"}}), (folder, auto, heads)
            classes[folder] = type(model).__module__
        assert "hf_drope" not in sys.modules
        assert all(name.startswith("transformers_modules.") for name in classes.values()), classes
        for folder in ("llama", "gpt2"):
            for load in (AutoConfig, AutoModelForCausalLM):
                try:
                    load.from_pretrained(folder, trust_remote_code=False)
                    raise SystemExit("loaded without trust")
                except ValueError as error:
                    assert "trust_remote_code" in str(error) or "llama_drope" in str(error), error
        print("done", len(classes))
        """,
        tmp_path,
        tmp_path / "modules",
    )
    assert output.split() == ["done", str(len(folders))]
    for family in FAMILIES:
        assert_complete(tmp_path / f"{family} again", family)
    local = AutoModelForCausalLM.from_pretrained(tmp_path / "low_rank again")
    assert torch.equal(logits(local), logits(low_rank))


def test_a_stock_class_never_runs_the_checkpoint_with_rope_on(tmp_path):
    """https://github.com/unslothai/unsloth/pull/8229: without trust the load stops, it does not fall back to stock code."""
    converted("llama", "nope").save_pretrained(tmp_path / "llama")
    output = run_without_package(
        """
        try:
            model = AutoModelForCausalLM.from_pretrained("llama")
            print("loaded", type(model))
        except (ValueError, EOFError) as error:
            print("refused")
        """,
        tmp_path,
        tmp_path / "modules",
    )
    # The question whether to trust the code may stand on the same line.
    assert output.strip().endswith("refused")
    assert "loaded" not in output


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_stock_config_is_no_config_of_a_converted_model(family, tmp_path):
    """https://github.com/huggingface/transformers/pull/46455: such a model would be saved without code or settings."""
    stock = tiny_model(family)
    converted_class = drope_class(type(stock))
    with pytest.raises(ValueError, match=r"takes a DroPE\w+Config, not a .*; convert a model with apply_drope"):
        converted_class(stock.config)
    stock.save_pretrained(tmp_path / "stock")
    model = converted_class.from_pretrained(tmp_path / "stock")
    assert model.config.drope_parameters["rope_scale"] == 0.0
    model.save_pretrained(tmp_path / "saved")
    assert_complete(tmp_path / "saved", family)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))
    assert type(AutoModel.from_config(stock.config)) is type(stock.base_model)


@pytest.mark.parametrize("trust", [True, False])
def test_package_and_remote_code_work_side_by_side(trust, tmp_path):
    """https://github.com/allenai/OLMo/issues/459 and https://github.com/huggingface/transformers/issues/30149

    Two copies of the config class in one process.
    """
    model = converted("llama")
    model.save_pretrained(tmp_path / "model")
    config = drope_config_class("llama").from_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", config=config, trust_remote_code=trust)
    assert torch.equal(logits(loaded), logits(model))
    remote_config = AutoConfig.from_pretrained(tmp_path / "model", trust_remote_code=trust)
    for load in (
        AutoModelForCausalLM.from_pretrained,
        lambda path, config: type(model).from_pretrained(path, config=config),
    ):
        loaded = load(tmp_path / "model", config=remote_config)
        assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert_complete(tmp_path / "again", "llama")


def test_remote_copy_saves_and_reloads_beside_the_package(tmp_path):
    """A checkpoint's own copy of the code, loaded in a process that has the package too."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    model = converted("llama", "drope")
    model.save_pretrained(tmp_path / "model")
    remote = get_class_from_dynamic_module("modeling_drope.DroPELlamaForCausalLM", str(tmp_path / "model"))
    assert remote is not type(model)
    assert remote.__module__.startswith("transformers_modules.")
    ours = type(model).from_pretrained(tmp_path / "model")
    theirs = remote.from_pretrained(tmp_path / "model")
    crossed = remote.from_pretrained(tmp_path / "model", config=ours.config)
    for loaded in (ours, theirs, crossed):
        assert torch.equal(logits(loaded), logits(model))
    theirs.save_pretrained(tmp_path / "again")
    assert_complete(tmp_path / "again", "llama")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))


def test_config_of_a_checkpoint_can_be_pickled(tmp_path):
    """https://github.com/vllm-project/vllm/issues/14925"""
    model = converted("llama")
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    again = pickle.loads(pickle.dumps(config))
    assert again.to_dict() == config.to_dict()
    code = "import pickle, sys; print(type(pickle.load(sys.stdin.buffer)).__name__)"
    result = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), capture_output=True, timeout=120)
    assert result.stdout.decode().strip() == "DroPELlamaConfig", result.stderr.decode()[-2000:]


@pytest.mark.parametrize("model_type", TYPES)
def test_models_and_configs_can_be_pickled_and_copied(model_type):
    """https://github.com/huggingface/transformers/issues/34303: spawned workers get models that way."""
    model = apply_drope(small_model(model_type), "drope", rope_scale=1.0)
    expected = model(IDS, use_cache=False).logits
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is type(model)
        assert torch.equal(again(IDS, use_cache=False).logits, expected)
        again.set_rope_scale(0.0)
        assert not torch.equal(again(IDS, use_cache=False).logits, expected)
    assert torch.equal(model(IDS, use_cache=False).logits, expected)


@pytest.mark.parametrize("model_type", DECODER_TYPES)
def test_tied_heads_of_every_type_build_and_follow_the_vocabulary(model_type):
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/1998"""
    stock = small_config(model_type, tie_word_embeddings=True)
    arguments = {key: value for key, value in stock.to_dict().items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(drope_config_class(model_type)(**arguments))

    def shares():
        return model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()

    ties = shares()
    assert ties is type_ties(stock)
    model.resize_token_embeddings(101)
    assert shares() is ties
    assert model(IDS, use_cache=False).logits.shape[-1] == 101


def type_ties(config):
    """Whether the stock model of this config shares its head's weights with its embedding."""
    model = AutoModelForCausalLM.from_config(config)
    return model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_tied_and_untied_heads_survive(family, tied, tmp_path):
    """https://github.com/huggingface/transformers/pull/43429 and https://github.com/PrimeIntellect-ai/prime-rl/pull/1998"""
    model = converted(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(logits(loaded), logits(model))

    def shares(model):
        return model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()

    assert shares(model) is shares(loaded) is tied
    loaded.resize_token_embeddings(101)
    assert shares(loaded) is tied
    assert logits(loaded).shape[-1] == 101
    torch.testing.assert_close(logits(loaded)[..., :97], logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["gated", "kerple", "low_rank_query"])
def test_position_parameters_stay_in_full_precision(parameters, dtype, tmp_path):
    """https://github.com/Dao-AILab/flash-attention/pull/846"""
    settings = DroPEParameters.from_dict(LOW_RANK_QUERY) if parameters == "low_rank_query" else parameters
    model = converted("llama", settings).to(dtype)
    exact = {name: value for name, value in model.state_dict().items() if "position_bias" in name}
    assert exact
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for load in (
        lambda: type(model).from_pretrained(tmp_path),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype),
        lambda: type(model).from_pretrained(tmp_path, dtype="auto"),
    ):
        loaded = load()
        assert loaded.model.embed_tokens.weight.dtype == dtype
        for name, value in exact.items():
            assert stored[name].dtype == loaded.state_dict()[name].dtype == torch.float32, name
            assert torch.equal(stored[name], value), name
            assert torch.equal(loaded.state_dict()[name], value), name
        for name, buffer in loaded.named_buffers():
            assert buffer.dtype == torch.float32, name
        assert logits(loaded).dtype == dtype
        assert torch.equal(logits(loaded), logits(model)) or parameters == "low_rank_query"


@pytest.mark.parametrize("preset", ["simple", "alibi", "kerple", "drope", "low_rank_query"])
@pytest.mark.parametrize("cast", ["loaded", "cast later"])
def test_distances_stay_apart_in_a_half_precision_model(cast, preset, tmp_path):
    """https://github.com/HabanaAI/vllm-fork/pull/503 and https://github.com/NVIDIA/TensorRT-Model-Connect/issues/667"""
    settings = DroPEParameters.from_dict(LOW_RANK_QUERY) if preset == "low_rank_query" else preset
    overrides = {"max_distance": 1024} if preset == "simple" else {}
    model = randomise_position(apply_drope(tiny_model("llama"), settings, **overrides))
    model.save_pretrained(tmp_path)
    if cast == "loaded":
        half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    else:
        half = type(model).from_pretrained(tmp_path).to(torch.bfloat16)
    for ours, exact in zip(half.position_biases(), model.position_biases(), strict=True):
        values = ours.bias.values(torch.arange(-599, 1))
        assert torch.equal(values, exact.bias.values(torch.arange(-599, 1)))
        assert all(len(head.unique()) == 600 for head in values)
        assert (values[:, 599 - 257] != values[:, 599 - 258]).all()


@pytest.mark.parametrize("preset", ["nope", "simple"])
def test_modules_kept_in_full_precision_exist(preset):
    model = converted("llama", preset)
    kept = model._keep_in_fp32_modules_strict
    assert kept == ({"position_bias"} if preset == "simple" else set())
    assert all(any(name in key for key in model.state_dict()) for name in kept)


@pytest.mark.parametrize("kwargs", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}])
@pytest.mark.parametrize("preset", ["simple", "gated", "drope", "alibi", "kerple", "low_rank_query", "learned_slopes"])
def test_plain_checkpoint_gets_initialised_position_parameters(preset, kwargs, tmp_path):
    """https://github.com/huggingface/transformers/issues/48892: new parameters and buffers must not be raw memory."""
    if kwargs.get("device_map"):
        pytest.importorskip("accelerate")
    tiny_model("llama").save_pretrained(tmp_path)
    settings = {
        "low_rank_query": DroPEParameters.from_dict(LOW_RANK_QUERY),
        "learned_slopes": DroPEParameters.preset("alibi", learned=True, bidirectional=True),
    }.get(preset) or DroPEParameters.preset(preset)
    data = {**tiny_config("llama").to_dict(), "drope_parameters": settings.to_dict(), "model_type": "llama_drope"}
    for _ in range(2):
        dirt = [torch.full((size,), 1e27) for size in (4, 8, 16, 1023 * 4, 128)]
        del dirt
        config = drope_config_class("llama").from_dict(data)
        model, info = drope_class(transformers.LlamaForCausalLM).from_pretrained(
            tmp_path, config=config, output_loading_info=True, **kwargs
        )
        assert all("position_bias" in key for key in info["missing_keys"])
        for position in model.position_biases():
            check_initial_values(position, settings)
        if model.dtype == torch.float32:
            fresh = apply_drope(tiny_model("llama"), settings)
            for ours, theirs in zip(model.position_biases(), fresh.position_biases(), strict=True):
                if preset not in ("simple", "gated", "kerple"):
                    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
                        assert torch.equal(a, b)


def check_initial_values(position, settings):
    bias, gate = position.bias, position.gate
    for tensor in (*position.parameters(), *position.buffers()):
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()
    kind = settings.position_bias["type"]
    if kind == "table":
        assert bias.weight.abs().max() <= 0.1
        assert bias.weight.std() > 0.04
    elif kind == "log" and settings.position_bias["init"] == "constant":
        assert (bias.gamma == torch.tensor(0.1)).all()
        assert (bias.a == 1).all()
    elif kind == "log":
        assert (bias.gamma >= 0).all()
        assert (bias.gamma <= 2).all()
        assert (bias.a >= 0).all()
        assert (bias.a <= 1).all()
        assert bias.gamma.unique().numel() == 4
    elif kind == "linear":
        assert bias.slopes.tolist() == [[2**-2, 2**-4, 2**-6, 2**-8]] * bias.slopes.shape[0]
    else:
        assert (bias.alpha == 0).all()
        assert (bias.beta == 0).all()
        expected = [2048 ** (-index / 2) for index in range(3)]
        torch.testing.assert_close(bias.frequencies, torch.tensor(expected))
    if settings.gate is None:
        return
    if settings.gate["type"] == "head":
        assert (gate.g == 1).all()
        assert (gate.t == 0).all()
    else:
        assert gate.temperature.item() == pytest.approx(settings.gate["temperature"])
        if settings.gate["type"] == "query":
            assert (gate.weight == 0).all()
            assert (gate.bias == 1).all()


@pytest.mark.parametrize("preset", ["nope", "gated", "drope", "alibi", "kerple"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_can_be_built_from_a_config_alone(family, preset, tmp_path):
    parameters = DroPEParameters.preset(preset).to_dict()
    config = drope_config_class(family)(**FAMILIES[family][1], drope_parameters=parameters)
    model = AutoModelForCausalLM.from_config(config).eval()
    for position in model.position_biases():
        check_initial_values(position, DroPEParameters.from_dict(parameters))
        if preset == "alibi":
            expected = reference_bias(position.bias, parameters["position_bias"], 3, -7)
            assert position.bias.values(torch.tensor([-7]))[3, 0].item() == pytest.approx(expected)
    scale_up(model)
    model.save_pretrained(tmp_path)
    assert_complete(tmp_path, family)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path)), logits(model))


def test_stage_is_saved_with_the_model(tmp_path):
    """https://github.com/allenai/OLMo-core/pull/622"""
    model = converted("llama", DroPEParameters.preset("drope", rope_scale=1.0))
    for scale, temperature in ((1.0, 1.0), (0.4, 0.8), (0.0, 0.1)):
        model.set_rope_scale(scale)
        model.set_gate_temperature(temperature)
        folder = tmp_path / str(scale)
        model.save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())["drope_parameters"]
        assert (saved["rope_scale"], saved["gate"]["temperature"]) == (scale, temperature)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))


@pytest.mark.parametrize("kind", ["Model", "ForCausalLM"])
def test_generation_is_among_the_direct_bases_as_in_the_stock_class(kind):
    stock = getattr(transformers, f"Llama{kind}")
    generates = transformers.GenerationMixin in stock.__bases__
    assert (transformers.GenerationMixin in drope_class(stock).__bases__) is generates is (kind == "ForCausalLM")


def test_generation_config_survives(tmp_path):
    """https://github.com/hiyouga/EasyR1/pull/11007"""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [2, 5]
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.6
    apply_drope(model, "nope").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.eos_token_id == [2, 5]
    assert loaded.generation_config.temperature == 0.6


def test_dropped_buffers_and_tables_are_not_in_the_file(tmp_path):
    for family in FAMILIES:
        converted(family, "alibi").save_pretrained(tmp_path / family)
        keys = load_file(tmp_path / family / "model.safetensors").keys()
        assert not [key for key in keys if "rotary" in key or "wpe" in key or "inv_freq" in key or "slopes" in key]


@pytest.mark.parametrize("file", TRAVELLING_FILES)
def test_travelling_files_import_only_what_a_checkpoint_can_have(file):
    """https://github.com/huggingface/transformers/issues/29714: a checkpoint's code is flat and stands alone."""
    source = (PACKAGE / file).read_text(encoding="utf-8")
    allowed = {"torch", "transformers", "__future__", *sys.stdlib_module_names}
    siblings = {name.removesuffix(".py") for name in TRAVELLING_FILES}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            assert node.module in siblings
            # The bundler finds such lines at the left margin only.
            assert node.col_offset == 0
        elif isinstance(node, ast.ImportFrom):
            assert node.module.partition(".")[0] in allowed

"""Settings, their errors, the config classes, and what importing the package does."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import textwrap

import pytest
import transformers
from tiny import FAMILIES, tiny_config
from transformers import AutoConfig

from hf_drope import DroPEParameters, drope_config_class
from hf_drope.configuration_drope import auto_map, base_model_type, drope_model_type
from hf_drope.drope_parameters import BIAS_SETTINGS, GATE_SETTINGS, POSITION_SCALINGS, PRESETS
from hf_drope.model_types import SUPPORTED_MODEL_TYPES

DEFAULTS = {
    "rope_scale": 0.0,
    "rope_fade": "angle",
    "rope_layers": None,
    "position_bias": None,
    "gate": None,
    "attention_scale": None,
    "qk_norm": None,
    "window": None,
}
TABLE = {
    "type": "table",
    "max_distance": 512,
    "num_buckets": None,
    "init_range": 0.1,
    "bidirectional": False,
    "share": "head",
}
LOG = {"type": "log", "sign": -1, "init": "constant", "bidirectional": False, "share": "head"}
DISENTANGLED = {
    "type": "disentangled",
    "terms": ["p2p", "c2p", "p2c"],
    "rank": None,
    "content": "mean_rotation",
    "terms_scale": 1.0,
    "position_scaling": None,
    "share": "head",
}
EXPECTED_PRESETS = {
    "nope": {},
    "simple": {"position_bias": TABLE},
    "gated": {"position_bias": TABLE, "gate": {"type": "head", "exponential": True}},
    "drope": {"position_bias": LOG, "gate": {"type": "score", "temperature": 1.0}},
    "t5": {"position_bias": {**TABLE, "num_buckets": 32, "max_distance": 128}},
    "alibi": {"position_bias": {"type": "linear", "learned": False, "bidirectional": False, "share": "head"}},
    "kerple": {"position_bias": {**LOG, "init": "kerple"}},
    "disentangled": {"position_bias": DISENTANGLED},
}


def run_python(code: str) -> str:
    """Output of `code` in a new interpreter."""
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_with_every_default_written_out(name):
    assert DroPEParameters.preset(name).to_dict() == {**DEFAULTS, **EXPECTED_PRESETS[name]}


def test_overrides_with_and_without_dots():
    parameters = DroPEParameters.preset(
        "drope", rope_scale=1, sign=1, temperature=0.5, **{"position_bias.share": "layer"}
    )
    assert parameters.rope_scale == 1.0
    assert parameters.position_bias == {**LOG, "sign": 1, "share": "layer"}
    assert parameters.gate == {"type": "score", "temperature": 0.5}
    again = parameters.replace(gate=None, **{"position_bias.bidirectional": True})
    assert again.gate is None
    assert again.position_bias == {**LOG, "sign": 1, "share": "layer", "bidirectional": True}
    assert parameters.gate is not None, "replace makes a copy"


@pytest.mark.parametrize("name", PRESETS)
def test_settings_survive_json_and_share_nothing_with_their_dict(name):
    settings = DroPEParameters.preset(name, attention_scale={"factor": 1.2}, window=[3, None], rope_layers=[1, 0, 1])
    data = json.loads(json.dumps(settings.to_dict()))
    assert DroPEParameters.from_dict(data) == settings
    assert settings.rope_layers == [0, 1]
    data["attention_scale"]["factor"] = 7
    if data["position_bias"] is not None:
        data["position_bias"]["type"] = "changed"
    assert settings == DroPEParameters.preset(
        name, attention_scale={"factor": 1.2}, window=[3, None], rope_layers=[0, 1]
    )


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"rope_scal": 1.0}, ["'rope_scal'", "known are", "Did you mean 'rope_scale'?"]),
        ({"position_bais": None}, ["'position_bais'", "Did you mean 'position_bias'?"]),
        ({"rope_scale": 1.5}, ["rope_scale is 1.5", "from 0.0 (dropped) to 1.0 (RoPE)"]),
        ({"rope_scale": -0.1}, ["rope_scale is -0.1"]),
        ({"rope_scale": True}, ["rope_scale is True"]),
        ({"rope_scale": "1"}, ["rope_scale is '1'"]),
        ({"rope_scale": float("nan")}, ["rope_scale is nan"]),
        ({"rope_scale": None}, ["rope_scale is None"]),
        ({"rope_fade": "blemd"}, ["'blemd'", "angle, blend, frequency", "Did you mean 'blend'?"]),
        ({"rope_layers": 3}, ["rope_layers is 3", "null or a list of layer indices"]),
        ({"rope_layers": [0, True]}, ["rope_layers is [0, True]"]),
        ({"rope_layers": [-1]}, ["rope_layers is [-1]"]),
        ({"rope_layers": ["0"]}, ["rope_layers is ['0']"]),
        ({"position_bias": "table"}, ["position_bias is 'table'", "null or a dict with a 'type'"]),
        ({"position_bias": {}}, ["position_bias type None", "linear, log, low_rank, table"]),
        ({"position_bias": {"type": "tabel"}}, ["'tabel'", "Did you mean 'table'?"]),
        (
            {"position_bias": {"type": "table", "max_distence": 8}},
            ["'max_distence'", "Did you mean 'max_distance'?"],
        ),
        ({"position_bias": {"type": "table", "max_distance": 0}}, ["position_bias.max_distance is 0", "at least 1"]),
        ({"position_bias": {"type": "table", "max_distance": True}}, ["max_distance is True", "whole number"]),
        ({"position_bias": {"type": "table", "max_distance": 8.0}}, ["max_distance is 8.0", "whole number"]),
        ({"position_bias": {"type": "table", "num_buckets": 1}}, ["num_buckets is 1", "null or a whole number"]),
        ({"position_bias": {"type": "table", "num_buckets": 32, "max_distance": 16}}, ["max_distance is 16", "32"]),
        ({"position_bias": {"type": "table", "init_range": -1.0}}, ["init_range is -1.0"]),
        ({"position_bias": {"type": "table", "share": "heads"}}, ["share is 'heads'", "'head', 'kv_group', 'layer'"]),
        ({"position_bias": {"type": "table", "bidirectional": 1}}, ["bidirectional is 1", "true or false"]),
        ({"position_bias": {"type": "log", "sign": 0}}, ["position_bias.sign is 0", "one of -1, 1"]),
        ({"position_bias": {"type": "log", "sign": True}}, ["position_bias.sign is True"]),
        ({"position_bias": {"type": "low_rank", "rank": 5}}, ["rank is 5", "even"]),
        ({"position_bias": {"type": "low_rank", "rank": True}}, ["rank is True"]),
        ({"position_bias": {"type": "linear", "max_distance": 5}}, ["'max_distance'", "bidirectional, learned, share"]),
        ({"position_bias": {"type": "disentangled", "terms": ["c2c"]}}, ["terms is ['c2c']", "'p2p', 'c2p', 'p2c'"]),
        ({"position_bias": {"type": "disentangled", "terms": "p2p"}}, ["terms is 'p2p'", "a list of some of"]),
        ({"position_bias": {"type": "disentangled", "terms": ["p2p", "p2p"]}}, ["terms is ['p2p', 'p2p']"]),
        ({"position_bias": {"type": "disentangled", "rank": 3}}, ["rank is 3", "null or an even"]),
        ({"position_bias": {"type": "disentangled", "content": "mean"}}, ["content is 'mean'", "'mean_rotation'"]),
        ({"position_bias": {"type": "disentangled", "terms_scale": 1.5}}, ["terms_scale is 1.5", "from 0.0 to 1.0"]),
        ({"position_bias": {"type": "disentangled", "terms_scale": True}}, ["terms_scale is True"]),
        ({"position_bias": {"type": "disentangled", "position_scaling": "ntk"}}, ["position_scaling is 'ntk'"]),
        (
            {"position_bias": {"type": "disentangled", "position_scaling": {"type": "yarm"}}},
            ["position_bias.position_scaling type 'yarm'", "clip, linear, ntk, yarn", "Did you mean 'yarn'?"],
        ),
        (
            {"position_bias": {"type": "disentangled", "position_scaling": {"type": "linear", "factor": 0.5}}},
            ["position_bias.position_scaling.factor is 0.5", "a number of at least 1"],
        ),
        (
            {"position_bias": {"type": "disentangled", "position_scaling": {"type": "yarn", "beta_fast": 1}}},
            ["position_scaling.beta_fast is 1", "larger than beta_slow"],
        ),
        (
            {"position_bias": {"type": "disentangled", "position_scaling": {"type": "clip", "max_distance": 0}}},
            ["position_bias.position_scaling.max_distance is 0"],
        ),
        ({"gate": {"type": "head"}}, ["gate is", "no position_bias", "or gate to null"]),
        ({"position_bias": {"type": "log"}, "gate": {"type": "scores"}}, ["'scores'", "Did you mean 'score'?"]),
        (
            {"position_bias": {"type": "log"}, "gate": {"type": "score", "temperature": 0}},
            ["gate.temperature is 0", "a number above 0"],
        ),
        (
            {"position_bias": {"type": "log"}, "gate": {"type": "query", "temprature": 1}},
            ["'temprature'", "Did you mean 'temperature'?"],
        ),
        (
            {"position_bias": {"type": "log"}, "gate": {"type": "head", "exponential": "yes"}},
            ["gate.exponential is 'yes'"],
        ),
        ({"attention_scale": 1.2}, ["attention_scale is 1.2", "'factor'", "'coefficient'"]),
        ({"attention_scale": {"factor": 0}}, ["attention_scale.factor is 0", "above 0"]),
        ({"attention_scale": {"factor": True}}, ["attention_scale is"]),
        ({"attention_scale": {"coefficient": 0.1}}, ["attention_scale is", "original_max_position_embeddings"]),
        (
            {"attention_scale": {"coefficient": 0.1, "original_max_position_embeddings": 0}},
            ["original_max_position_embeddings is 0", "at least 1"],
        ),
        ({"qk_norm": "kq"}, ["qk_norm is 'kq'", "null, 'q', 'k' or 'qk'"]),
        ({"window": 0}, ["window is 0", "at least 1"]),
        ({"window": True}, ["window is True"]),
        ({"window": [4, "8"]}, ["window is [4, '8']", "per layer"]),
        ({"window": []}, ["window is []"]),
    ],
    ids=str,
)
def test_wrong_settings_are_one_sentence_with_key_value_and_what_is_allowed(settings, parts):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked part by part
        DroPEParameters.from_dict(settings)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_terms_are_kept_in_their_own_order_and_scalings_get_their_defaults():
    scaling = {"type": "yarn", "factor": 4}
    settings = DroPEParameters.preset("disentangled", terms=["p2c", "p2p"], position_scaling=scaling)
    assert settings.position_bias["terms"] == ["p2p", "p2c"]
    assert settings.position_bias["position_scaling"] == {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert DroPEParameters.preset("disentangled", terms=[]).position_bias["terms"] == []


def test_wrong_presets_and_overrides_name_the_nearest_match():
    with pytest.raises(ValueError, match=r"Unknown preset 'drop'; .* Did you mean 'drope'"):
        DroPEParameters.preset("drop")
    with pytest.raises(ValueError, match=r"Unknown setting 'max_distanc'; .* Did you mean 'max_distance'"):
        DroPEParameters.preset("simple", max_distanc=4)
    with pytest.raises(ValueError, match=r"Unknown setting 'gate\.max_distance'"):
        DroPEParameters.preset("gated", **{"gate.max_distance": 4})
    with pytest.raises(ValueError, match=r"Unknown setting 'temperature'"):
        DroPEParameters.preset("simple", temperature=0.5)


def test_settings_per_layer_have_to_fit_the_model():
    with pytest.raises(ValueError, match=r"rope_layers is \[0, 2\]; it has to be layer indices below 2"):
        DroPEParameters(rope_layers=[0, 2]).check_layers(2)
    with pytest.raises(ValueError, match=r"window is \[4, 4, 4\]; it has to be a list of 2 entries"):
        DroPEParameters(window=[4, 4, 4]).check_layers(2)
    DroPEParameters(rope_layers=[1], window=[4, None]).check_layers(2)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_keeps_its_settings_through_a_folder(family, tmp_path):
    stock = tiny_config(family)
    config_class = drope_config_class(type(stock))
    config_class(**FAMILIES[family][1], drope_parameters={"rope_scale": 0.25}).save_pretrained(tmp_path)
    own = ("model_type", "_name_or_path")
    fields = {key: value for key, value in stock.to_dict().items() if key not in own}
    for loaded in (AutoConfig.from_pretrained(tmp_path), config_class.from_pretrained(tmp_path)):
        assert type(loaded) is config_class
        assert loaded.model_type == f"{family}_drope"
        assert loaded.drope_parameters == {**DEFAULTS, "rope_scale": 0.25}
        assert {key: loaded.to_dict()[key] for key in fields} == fields
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == f"{family}_drope"
    assert saved["auto_map"] == auto_map(family)


def test_rope_settings_of_the_source_stay_in_the_config(tmp_path):
    """https://github.com/vllm-project/vllm/pull/28542: dropping RoPE is a field of its own, never a null rope theta."""
    rope = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    config = drope_config_class("llama")(rope_parameters=rope, max_position_embeddings=64, drope_parameters={})
    for _ in range(2):
        config.save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
    assert config.rope_parameters.items() >= rope.items()
    assert config.max_position_embeddings == 64
    assert config.drope_parameters["rope_scale"] == 0.0


def test_a_wrong_setting_in_config_json_is_refused_on_load(tmp_path):
    drope_config_class("llama")().save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data["drope_parameters"]["rope_scal"] = 1
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="Did you mean 'rope_scale'"):
        AutoConfig.from_pretrained(tmp_path)


def test_entries_of_an_earlier_repository_do_not_survive():
    """https://github.com/huggingface/transformers/issues/34855"""
    config = drope_config_class("llama")(auto_map={"AutoConfig": "owner/repo--configuration_x.X"})
    assert config.auto_map == auto_map("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_map_names_every_class_the_family_has(family):
    """https://github.com/hiyouga/LlamaFactory/issues/904"""
    prefix = FAMILIES[family][0]
    entries = auto_map(family)
    causal = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    expected = {
        "AutoConfig": f"configuration_drope.DroPE{prefix}Config",
        "AutoModel": f"modeling_drope.DroPE{prefix}Model",
        "AutoModelForCausalLM": f"modeling_drope.DroPE{prefix}{causal}",
        "AutoModelForSequenceClassification": f"modeling_drope.DroPE{prefix}ForSequenceClassification",
        "AutoModelForTokenClassification": f"modeling_drope.DroPE{prefix}ForTokenClassification",
    }
    for auto, suffix in (("SequenceClassification", "ForSequenceClassification"), ("TokenClassification",) * 2):
        suffix = suffix if suffix.startswith("For") else f"For{suffix}"
        if not hasattr(transformers, prefix + suffix):
            del expected[f"AutoModelFor{auto}"]
    assert entries == expected


def test_auto_map_of_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match=r"Unknown model type 'lama'; .*Did you mean 'llama'"):
        auto_map("lama")


def test_the_families_held_up_by_the_tests_are_those_registered():
    assert set(FAMILIES) <= set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_classes_are_named_attributes_and_can_be_pickled(family):
    """https://github.com/huggingface/transformers/issues/34303"""
    config_class = drope_config_class(family)
    assert config_class is drope_config_class(config_class) is drope_config_class(type(tiny_config(family)))
    assert config_class.__name__ == f"DroPE{FAMILIES[family][0]}Config"
    config = config_class(drope_parameters={"rope_scale": 0.5})
    again = pickle.loads(pickle.dumps(config))
    assert type(again) is config_class
    assert again.to_dict() == config.to_dict()


def test_model_types_have_their_own_names():
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3134: a built-in name would load the stock class without a word."""
    for model_type in SUPPORTED_MODEL_TYPES:
        name = drope_model_type(model_type)
        assert re.fullmatch(r"[a-z0-9_-]+_drope", name)
        assert drope_model_type(name) == name
        assert base_model_type(name) == model_type


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = "import sys, hf_drope; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert run_python(code) == "[]"


@pytest.mark.parametrize("order", ["import hf_drope, transformers", "import transformers, hf_drope"])
def test_registration_does_not_depend_on_the_order_of_imports(order):
    code = f"""
        {order}
        config = transformers.AutoConfig.for_model("llama_drope", num_hidden_layers=1)
        print(type(config).__name__, config.drope_parameters["rope_scale"])
    """
    assert run_python(code) == "DroPELlamaConfig 0.0"


def test_reloading_the_package_changes_nothing():
    """https://github.com/huggingface/transformers/issues/25453 and https://github.com/BigData-KSU/RS-LLaVA/issues/5"""
    code = """
        import importlib, hf_drope, transformers
        before = transformers.AutoConfig.for_model("llama_drope")
        for module in (hf_drope, hf_drope):
            importlib.reload(module)
        after = transformers.AutoConfig.for_model("llama_drope")
        import hf_drope.configuration_drope as configuration
        importlib.reload(configuration)
        importlib.reload(hf_drope)
        config = transformers.AutoConfig.for_model("llama_drope", vocab_size=9, hidden_size=8, intermediate_size=8,
            num_hidden_layers=1, num_attention_heads=2)
        model = transformers.AutoModelForCausalLM.from_config(config)
        print(type(before) is type(after), type(config).__name__, type(model).__name__)
        spec = importlib.util.spec_from_file_location("other_name", hf_drope.__file__,
            submodule_search_locations=hf_drope.__path__)
        import sys
        sys.modules["other_name"] = other = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(other)
        again = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama_drope",
            **{key: value for key, value in config.to_dict().items() if key != "model_type"}))
        print(type(again).__name__, type(again).__module__)
        stock = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=9, hidden_size=8,
            intermediate_size=8, num_hidden_layers=1, num_attention_heads=2))
        print(type(other.apply_drope(stock, "simple")).__name__)
    """
    assert run_python(code).splitlines() == [
        "True DroPELlamaConfig DroPELlamaForCausalLM",
        "DroPELlamaForCausalLM other_name.modeling_drope",
        "DroPELlamaForCausalLM",
    ]


def test_a_foreign_class_that_holds_the_type_is_named():
    """https://github.com/sgl-project/sglang/pull/30935"""
    code = """
        import transformers
        class OtherConfig(transformers.LlamaConfig):
            model_type = "llama_drope"
        transformers.AutoConfig.register("llama_drope", OtherConfig)
        try:
            import hf_drope
        except ImportError as error:
            print(error)
    """
    message = run_python(code)
    assert "model type 'llama_drope' is already registered" in message
    assert "__main__" in message


def test_nested_settings_tables_have_valid_defaults():
    tables = ((BIAS_SETTINGS, "position_bias"), (POSITION_SCALINGS, "position_scaling"), (GATE_SETTINGS, "gate"))
    for table, where in tables:
        for kind, settings in table.items():
            for key, setting in settings.items():
                assert setting.is_valid(setting.default), f"{where}.{kind}.{key}"


def test_settings_may_be_a_preset_a_dict_or_settings():
    settings = {"position_bias": {"type": "log"}}
    assert DroPEParameters.of(settings) == DroPEParameters.from_dict(settings)
    assert DroPEParameters.of("drope") == DroPEParameters.of(DroPEParameters.preset("drope"))

"""Checkpoints where hf_drope is not installed and the network is off: one process loads them by every way, many tests look at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from checkpoints import edit_json, tiny_tokenizer, write_source
from datasets import Dataset
from model_types import TYPES
from reference import randomise_position
from test_saving import WITHOUT_PACKAGE, assert_complete, logits
from tiny import TRAINING, random_ids, tiny_model
from transformers import Trainer, TrainingArguments

from hf_drope import apply_drope, convert_checkpoint, drope_config_class, plan_conversion
from hf_drope.configuration_drope import auto_map
from hf_drope.drope_parameters import DroPEParameters

HOME = "smol-v1.5.drope"
TEXTS = [" ".join(f"w{(3 + 7 * k + i * i) % 97}" for i in range(k % 9 + 1)) + "w5 <eos> ü" * (k % 3) for k in range(50)]
PROBE = """
import io, logging, os, pickle, traceback
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaForCausalLM, pipeline
from transformers.dynamic_module_utils import get_class_from_dynamic_module
home, types = sys.argv[1:]
found = {}

def error_of(function, *args, **kwargs):
    try:
        return "none: " + type(function(*args, **kwargs)).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def load(folder, auto=AutoModelForCausalLM, **kwargs):
    return auto.from_pretrained(folder, trust_remote_code=True, **kwargs)

model = load(home)
config = model.config
pickle.dump(config, open("config.pickle", "wb"))
json.dump(config.to_dict(), open("config.json", "w"))
found["auto_map"] = config.auto_map

texts = json.load(open("texts.json"))
found["tokens"] = {
    f"{folder}, {trust}": AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)(texts).input_ids
    for folder in (home, "no tokenizer class") for trust in (True, False)
}

options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
write = pipeline("text-generation", model=home, trust_remote_code=True)
found["pipeline"] = write("w5 w9 w40", return_tensors=True, **options)[0]["generated_token_ids"]
direct = get_class_from_dynamic_module("modeling_drope.DroPELlamaForCausalLM", home)
prompt = torch.tensor([write.tokenizer("w5 w9 w40").input_ids])
mask = torch.ones_like(prompt)
for name, loaded in (("direct", direct.from_pretrained(home)), ("auto", model)):
    found[name] = loaded.generate(prompt, attention_mask=mask, **options)[0].tolist()

found["backends"], found["same"] = {}, {}
for folder in ("eager", "flex_attention", "trained/checkpoint-2"):
    loaded = load(folder)
    found["backends"][folder] = loaded.config._attn_implementation
    expected = torch.load(folder + "/logits.pt")
    found["same"][folder] = (logits(loaded) - expected).abs().max().item() / expected.abs().max().item()
found["flash"] = error_of(load, "eager", attn_implementation="flash_attention_2")
os.chdir(home)
found["same"]["."] = (logits(load(".")) - logits(model)).abs().max().item()
found["same"]["../a b/"] = (logits(load("../a b/")) - logits(model)).abs().max().item()
os.chdir("..")

found["unsupported"] = error_of(load, home, transformers.AutoModelForQuestionAnswering)
_, info = load(home, AutoModelForSequenceClassification, output_loading_info=True)
found["new"] = sorted(info["missing_keys"])

log = io.StringIO()
transformers.utils.logging.add_handler(logging.StreamHandler(log))
LlamaForCausalLM.from_pretrained(home)
found["stock class"] = log.getvalue()
auto = [AutoConfig, AutoModel, AutoModelForCausalLM]
found["untrusted"] = {
    name: [error_of(each.from_pretrained, "types/" + name, trust_remote_code=False) for each in auto[:: 1 if name == "llama" else 2]]
    for name in types.split()
}
found["ours"] = [name for name in sys.modules if name.split(".")[0] == "hf_drope"]
print(json.dumps(found))
"""
UNPICKLE = """
import json, pickle, sys
config = pickle.load(open("config.pickle", "rb"))
assert json.loads(json.dumps(config.to_dict())) == json.load(open("config.json"))
assert type(pickle.loads(pickle.dumps(config))) is type(config)
print(type(config).__module__)
"""


def python_without_package(code, cwd, *arguments):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cwd / "modules")}
    # Isolated: neither PYTHONPATH nor the current folder is looked at.
    command = [sys.executable, "-I", "-c", WITHOUT_PACKAGE + textwrap.dedent(code), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def save_trained(folder):
    """A checkpoint of the stock Trainer, in the middle of a run."""
    model = randomise_position(apply_drope(tiny_model("llama"), "simple"))
    rows = [{"input_ids": row, "labels": row} for row in random_ids(12, 9).tolist()]
    options = TrainingArguments(folder, **{**TRAINING, "max_steps": 3, "save_steps": 2, "logging_steps": 3})
    Trainer(model=model, args=options, train_dataset=Dataset.from_list(rows)).train()
    return type(model).from_pretrained(folder / "checkpoint-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints that other machines might get."""
    folder = tmp_path_factory.mktemp("remote")
    write_source(folder / "source")
    edit_json(folder / "source/config.json", auto_map={"AutoConfig": "owner/repo--modeling_other.OtherConfig"})
    for name in (HOME, "a b", "no tokenizer class"):
        convert_checkpoint(plan_conversion(folder / "source", "drope"), folder / name, progress=False)
    tokenizer = json.loads((folder / "no tokenizer class/tokenizer_config.json").read_text())
    tokenizer.pop("tokenizer_class")
    (folder / "no tokenizer class/tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "texts.json").write_text(json.dumps(TEXTS))
    for backend in ("eager", "flex_attention"):
        model = randomise_position(apply_drope(tiny_model("llama"), "simple"))
        expected = logits(model)
        model.set_attn_implementation(backend)
        model.save_pretrained(folder / backend)
        torch.save(expected, folder / backend / "logits.pt")
    trained = save_trained(folder / "trained")
    torch.save(logits(trained), folder / "trained/checkpoint-2/logits.pt")
    for model_type in TYPES:
        drope_config_class(model_type)().save_pretrained(folder / "types" / model_type)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return json.loads(python_without_package(PROBE, folder, HOME, " ".join(TYPES)))


def test_the_code_of_a_checkpoint_stands_alone(found):
    """https://github.com/huggingface/transformers/issues/36653 and https://github.com/huggingface/transformers/issues/29291"""
    assert found["ours"] == []


def test_no_auto_class_takes_a_converted_folder_for_a_stock_model(found):
    """https://github.com/unslothai/unsloth/pull/8229 and https://github.com/NVIDIA-NeMo/Automodel/pull/3134, for every type.

    Without trust the load stops. Naming a stock class outright only earns a warning from Transformers, as the README says.
    """
    assert set(found["untrusted"]) == set(TYPES)
    for name, errors in found["untrusted"].items():
        for error in errors:
            assert error.startswith("ValueError: "), (name, error)
            assert "trust_remote_code" in error, (name, error)
    assert "`llama_drope`" in found["stock class"] or "type llama_drope" in found["stock class"]


def test_a_trainer_checkpoint_brings_its_code_along(folder, found):
    """https://github.com/huggingface/transformers/issues/24737 and https://github.com/huggingface/transformers/pull/46455"""
    assert_complete(folder / "trained/checkpoint-2", "llama")
    assert found["same"]["trained/checkpoint-2"] == 0


def test_relative_paths_and_the_current_folder_load(found):
    """https://github.com/huggingface/transformers/issues/29251"""
    assert found["same"]["."] == found["same"]["../a b/"] == 0


def test_other_auto_classes_say_which_config_they_cannot_take(found):
    """https://github.com/SakanaAI/DroPE and https://github.com/hiyouga/LlamaFactory/issues/904"""
    assert found["new"] == ["score.weight"]
    assert found["unsupported"].startswith("ValueError: Unrecognized configuration class")
    assert "DroPELlamaConfig" in found["unsupported"]


def test_entries_of_another_repository_send_no_load_to_the_network(found):
    """https://github.com/huggingface/sentence-transformers/issues/2613: the source's `auto_map` named one."""
    assert found["auto_map"] == auto_map("llama", DroPEParameters.preset("drope"))


def test_pipelines_and_the_class_itself_generate(found):
    """https://github.com/meme-search/meme-search/issues/36 and https://github.com/huggingface/transformers/issues/46661"""
    assert len(found["direct"]) == 8
    assert found["pipeline"] == found["direct"] == found["auto"]


def test_a_trusted_config_can_be_unpickled_by_a_process_that_never_saw_it(folder, found):
    """https://github.com/huggingface/transformers/issues/34303 and https://github.com/vllm-project/vllm/issues/14925"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    command = [sys.executable, "-I", "-c", UNPICKLE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("transformers_modules.")


def test_tokens_are_those_of_the_source_with_and_without_a_tokenizer_class(found):
    """https://github.com/breezeblue-ai/breeze-tts/issues/16 and https://github.com/huggingface/transformers/pull/43219"""
    expected = tiny_tokenizer()(TEXTS).input_ids
    assert len(set(map(tuple, expected))) > 40
    assert len(found["tokens"]) == 4
    for name, tokens in found["tokens"].items():
        assert tokens == expected, name


def test_the_bias_is_there_whatever_backend_the_model_was_saved_under(found):
    """https://github.com/huggingface/transformers/issues/29067 and https://github.com/huggingface/transformers/pull/47014"""
    assert found["backends"] == {"eager": "sdpa", "flex_attention": "sdpa", "trained/checkpoint-2": "sdpa"}
    assert found["same"]["eager"] == found["same"]["flex_attention"] == 0


def test_flash_attention_is_refused_at_load_with_the_reason(found):
    """https://github.com/NVIDIA/TransformerEngine/issues/340: flash kernels have no place for such a bias."""
    assert "position bias 'table' cannot run on attn_implementation='flash_attention_2'" in found["flash"]
    assert "'eager', 'sdpa'" in found["flash"]

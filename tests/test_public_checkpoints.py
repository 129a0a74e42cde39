"""Folders in the layout of the public DroPE checkpoints (https://github.com/SakanaAI/DroPE), written by hand.

Their config names an `attention_type` and perhaps a `softmax_scale`, the whole factor on the scores; their optional norms are
RMSNorm over the concatenated heads of the projected queries and keys, `self_attn.q_norm.weight` and `self_attn.k_norm.weight`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_saving import run_without_package
from tiny import random_ids
from transformers import AutoModelForCausalLM

from hf_drope import convert_checkpoint, inspect_checkpoint, plan_conversion
from hf_drope.cli import main

HIDDEN, INNER, LAYERS, HEADS, GROUPS, HEAD_DIM, TOKENS = 32, 48, 2, 4, 2, 8, 97
EPS = 1e-3
KINDS = ["nope", "q_norm_nope", "k_norm_nope", "qk_norm_nope"]
IDS = random_ids(2, 11)


def write_public(folder: Path, model_type: str, kind: str, softmax_scale: float | None = None) -> dict[str, Any]:
    """Write config.json and model.safetensors; returns the weights."""
    generator = torch.Generator().manual_seed(len(kind))

    def random(*shape: int, size: float = 1.0, around: float = 0.0) -> torch.Tensor:
        return around + size * torch.randn(*shape, generator=generator)

    weights = {"model.embed_tokens.weight": random(TOKENS, HIDDEN), "model.norm.weight": random(HIDDEN, around=1)}
    weights["lm_head.weight"] = random(TOKENS, HIDDEN, size=0.2)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            weights[f"{at}self_attn.{name}_proj.weight"] = random(rows * HEAD_DIM, HIDDEN, size=0.3)
            if model_type == "qwen2_drope":
                weights[f"{at}self_attn.{name}_proj.bias"] = random(rows * HEAD_DIM, size=0.3)
        weights[f"{at}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM, size=0.3)
        for name, heads in (("q", HEADS), ("k", GROUPS)):
            if name in kind.partition("_norm")[0] and kind != "nope":
                weights[f"{at}self_attn.{name}_norm.weight"] = random(heads * HEAD_DIM, around=1, size=0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = random(HIDDEN, around=1, size=0.2)
        for name in ("gate_proj", "up_proj"):
            weights[f"{at}mlp.{name}.weight"] = random(INNER, HIDDEN, size=0.2)
        weights[f"{at}mlp.down_proj.weight"] = random(HIDDEN, INNER, size=0.2)
    prefix = {"llama_drope": "DroPELlama", "qwen2_drope": "DroPEQwen2"}[model_type]
    config = {
        "model_type": model_type,
        "architectures": [f"{prefix}ForCausalLM"],
        # Code that travels with such a checkpoint; nothing here may need it.
        "auto_map": {
            "AutoConfig": f"drope.{prefix}Config",
            "AutoModelForCausalLM": f"drope.{prefix}ForCausalLM",
        },
        "attention_type": kind,
        "vocab_size": TOKENS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    if softmax_scale is not None:
        config["softmax_scale"] = softmax_scale
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def reference(weights: dict[str, torch.Tensor], ids: list[int], scale: float) -> torch.Tensor:
    """Logits in float64, one query, head and key at a time; positions nowhere."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w[name]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ w[f"{name}_proj.weight"].T
        y = y + w[f"{name}_proj.bias"] if f"{name}_proj.bias" in w else y
        return norm(y, f"{name}_norm.weight") if f"{name}_norm.weight" in w else y

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        y = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (project(y, f"{at}self_attn.{name}").unflatten(-1, (-1, HEAD_DIM)) for name in "qkv")
        out = torch.zeros(len(ids), HEADS, HEAD_DIM, dtype=torch.float64)
        for i in range(len(ids)):
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                scores = torch.stack([q[i, head] @ k[j, group] * scale for j in range(i + 1)])
                out[i, head] = sum(p * v[j, group] for j, p in enumerate(scores.softmax(0)))
        x = x + out.flatten(1) @ w[f"{at}self_attn.o_proj.weight"].T
        y = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up = y @ w[f"{at}mlp.gate_proj.weight"].T, y @ w[f"{at}mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[f"{at}mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def load(folder: Path, **arguments: Any) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **arguments)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def check(model: Any, weights: dict[str, torch.Tensor], scale: float) -> None:
    logits = model(IDS).logits.double()
    for row, ids in enumerate(IDS.tolist()):
        expected = reference(weights, ids, scale)
        torch.testing.assert_close(logits[row], expected, atol=2e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("model_type", ["llama_drope", "qwen2_drope"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softmax_scale", [None, 0.5])
def test_loads_with_our_classes_as_its_formulas_say(model_type, kind, softmax_scale, tmp_path):
    weights = write_public(tmp_path / "src", model_type, kind, softmax_scale)
    model = load(tmp_path / "src")
    assert type(model).__module__ == "hf_drope.modeling_drope"
    check(model, weights, softmax_scale or HEAD_DIM**-0.5)


@pytest.mark.parametrize("model_type", ["llama_drope", "qwen2_drope"])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_fills_the_cache(model_type, kind, tmp_path):
    """The public code's own forward names a cache argument that newer Transformers no longer pass."""
    write_public(tmp_path / "src", model_type, kind, 0.5)
    model = load(tmp_path / "src")
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = model.generate(IDS, **asked)
    assert torch.equal(cached, model.generate(IDS, use_cache=False, **asked))
    with torch.no_grad():
        cache = model(IDS, use_cache=True).past_key_values
    assert cache.get_seq_length() == IDS.shape[1]


@pytest.mark.parametrize("model_type", ["llama_drope", "qwen2_drope"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ["save_pretrained", "convert"])
def test_saved_again_or_converted_it_has_our_settings_and_runs_anywhere(model_type, kind, route, tmp_path):
    weights = write_public(tmp_path / "src", model_type, kind, 0.5)
    out = tmp_path / "out"
    if route == "save_pretrained":
        load(tmp_path / "src").save_pretrained(out)
    else:
        assert main(["convert", str(tmp_path / "src"), str(out)]) == 0
        assert (out / "model.safetensors").read_bytes() == (tmp_path / "src/model.safetensors").read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert not {"attention_type", "softmax_scale"} & config.keys()
    qk_norm = {"nope": None, "q_norm_nope": "q", "k_norm_nope": "k", "qk_norm_nope": "qk"}[kind]
    assert config["drope_parameters"]["qk_norm"] == qk_norm
    assert config["drope_parameters"]["attention_scale"]["factor"] == pytest.approx(0.5 * HEAD_DIM**0.5)
    assert config["auto_map"]["AutoConfig"].startswith("configuration_drope.")
    check(load(out), weights, 0.5)
    load(out).save_pretrained(tmp_path / "again")
    check(load(tmp_path / "again"), weights, 0.5)
    keys = load_file(tmp_path / "again/model.safetensors").keys()
    assert len(keys) == len(weights)


def test_converted_it_loads_with_its_own_code_where_the_package_is_not(tmp_path):
    weights = write_public(tmp_path / "src", "qwen2_drope", "qk_norm_nope", 0.5)
    convert_checkpoint(plan_conversion(tmp_path / "src"), tmp_path / "out", progress=False)
    torch.save(IDS, tmp_path / "ids.pt")
    code = """
        ids = torch.load("ids.pt")
        model, info = AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True, output_loading_info=True)
        assert not any(info.values()), info
        torch.save(logits(model), "logits.pt")
    """
    run_without_package(code, tmp_path, tmp_path / "modules")
    logits = torch.load(tmp_path / "logits.pt").double()
    for row, ids in enumerate(IDS.tolist()):
        expected = reference(weights, ids, 0.5)
        torch.testing.assert_close(logits[row], expected, atol=2e-5 * expected.abs().max().item(), rtol=0)


def test_inspect_says_what_its_fields_mean(tmp_path):
    write_public(tmp_path / "src", "llama_drope", "q_norm_nope", 0.5)
    settings = inspect_checkpoint(tmp_path / "src")["drope_parameters"]
    assert (settings["rope_scale"], settings["qk_norm"]) == (0.0, "q")
    assert settings["attention_scale"]["factor"] == pytest.approx(0.5 * HEAD_DIM**0.5)


def test_other_settings_than_its_own_are_refused(tmp_path, capsys):
    write_public(tmp_path / "src", "llama_drope", "q_norm_nope")
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "out"), "--preset", "simple"]) == 2
    assert "public DroPE checkpoint (llama_drope, attention_type q_norm_nope)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_attention_type_is_refused_by_name(tmp_path):
    write_public(tmp_path / "src", "llama_drope", "nope")
    config = json.loads((tmp_path / "src/config.json").read_text())
    (tmp_path / "src/config.json").write_text(json.dumps({**config, "attention_type": "v_norm_nope"}))
    with pytest.raises(ValueError, match="attention_type is 'v_norm_nope'; it has to be one of 'nope', 'q_norm_nope'"):
        load(tmp_path / "src")

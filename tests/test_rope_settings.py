"""The source's RoPE settings: read in every style, kept whole, and without a word in whether RoPE is on."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from checkpoints import edit_json, logits
from model_types import small_model
from test_rotary import LAYOUTS, every_layout
from tiny import random_ids, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_drope
from hf_drope import apply_drope, convert_checkpoint, plan_conversion
from hf_drope.configuration_drope import TRAVELLING_FILES

BASE = {"rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.5, 2.0, 4.0],
    "long_factor": [2.0, 3.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
}
TYPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "longrope": LONGROPE,
    "llama3": LLAMA3,
}
every_rope_type = pytest.mark.parametrize("rope_type", TYPES)
IDS = random_ids(1, 30)


def convert(source: Path, target: Path, preset: str = "nope", **overrides) -> Path:
    return convert_checkpoint(plan_conversion(source, preset, overrides=overrides), target, progress=False)


def round_trips(folder: Path, count: int = 2) -> Path:
    """Loaded and saved again, so often."""
    for number in range(count):
        model = AutoModelForCausalLM.from_pretrained(folder)
        folder = folder.with_name(f"{folder.name}-{number}")
        model.save_pretrained(folder)
    return folder


def ignores_order(model, ids=None) -> bool:
    """Whether the last token of a one-layer model sees the others as a set."""
    ids = random_ids(1, 12) if ids is None else ids
    shuffled = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], 1)
    last, other = (logits(model, x)[:, -1] for x in (ids, shuffled))
    return bool((last - other).abs().max() <= 1e-6 * max(1.0, last.abs().max().item()))


@pytest.mark.parametrize("settings", [None, {}, {**BASE, "rope_type": "default"}, {**BASE, **YARN}], ids=str)
def test_a_field_of_its_own_says_that_rope_is_dropped_after_any_number_of_round_trips(settings, tmp_path):
    """https://github.com/vllm-project/vllm/pull/28542: settings that are null come back as a theta of 10000."""
    source = tiny_model("llama", num_hidden_layers=1)
    source.save_pretrained(tmp_path / "src")
    if settings != {}:
        edit_json(tmp_path / "src/config.json", rope_parameters=settings)
    assert not ignores_order(source)
    before = json.loads((tmp_path / "src/config.json").read_text())["rope_parameters"]
    folder = round_trips(convert(tmp_path / "src", tmp_path / "dst"))
    config = AutoConfig.from_pretrained(folder)
    assert config.drope_parameters["rope_scale"] == 0.0
    assert (config.rope_parameters or {}).items() >= (before or {}).items()
    assert ignores_order(AutoModelForCausalLM.from_pretrained(folder))
    config.rope_parameters = None
    config.save_pretrained(tmp_path / "null")
    assert AutoConfig.from_pretrained(tmp_path / "null").drope_parameters["rope_scale"] == 0.0


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("given", [TYPES["linear"], YARN, LLAMA3], ids=lambda given: given["rope_type"])
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
def test_another_scaling_keeps_theta_and_the_rotated_share(given, name, tmp_path):
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3077"""
    rope = {**BASE, "rope_type": "default", "partial_rotary_factor": 0.5}
    apply_drope(tiny_model("gpt_neox", rope_parameters=rope), "nope", rope_scale=1.0).save_pretrained(tmp_path)
    expected = tiny_model("gpt_neox", rope_parameters={**rope, **given})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **{name: dict(given)})
    assert loaded.config.rope_parameters.items() >= {**BASE, "partial_rotary_factor": 0.5, **given}.items()
    assert torch.equal(logits(loaded, IDS), logits(expected, IDS))
    config = AutoConfig.from_pretrained(tmp_path)
    setattr(config, name, {**given, "rope_theta": 7.0})
    assert config.rope_parameters["rope_theta"] == 7.0


def test_another_scaling_goes_to_the_type_of_layer_it_names(tmp_path):
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3077, where layers rotate differently by type."""
    apply_drope(gemma3(), "nope", rope_scale=1.0).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.rope_parameters = {"full_attention": {"rope_type": "linear", "factor": 2.0}}
    assert config.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    assert config.rope_parameters["sliding_attention"] == GEMMA["sliding_attention"]
    with pytest.raises(ValueError, match="some of 'full_attention', 'sliding_attention'"):
        config.rope_parameters = {"rope_type": "linear", "factor": 2.0}


OLD = {"rope_parameters": None, "rope_theta": 500000.0}
STYLES = {
    "v4": ("llama", OLD),
    "v4, type": ("llama", {**OLD, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "v4, type and rope_type": (
        "llama",
        {**OLD, "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}},
    ),
    "v4, longrope": ("llama", {**OLD, "rope_scaling": LONGROPE}),
    "v4, phi3": ("phi3", {**OLD, "partial_rotary_factor": 0.5}),
    "v4, gpt_neox": ("gpt_neox", {"rope_parameters": None, "rotary_emb_base": 500000, "rotary_pct": 0.5}),
    **{f"v5, {name}": ("llama", {"rope_parameters": {**BASE, **given}}) for name, given in TYPES.items()},
}


@pytest.mark.parametrize("preset", ["nope", "disentangled"])
@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_rope_settings_rotates_as_the_source_does(style, preset, tmp_path):
    """https://github.com/Open-Athena/MarinFold/pull/184, https://github.com/deepspeedai/DeepSpeed/pull/8345 and
    https://github.com/huggingface/transformers/issues/32166"""
    family, settings = STYLES[style]
    tiny_model(family).save_pretrained(tmp_path / "src")
    edit_json(tmp_path / "src/config.json", **settings)
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "src")
    expected = logits(source, IDS)
    assert not torch.allclose(expected, logits(tiny_model(family), IDS), atol=1e-3)
    model = AutoModelForCausalLM.from_pretrained(convert(tmp_path / "src", tmp_path / "dst", preset, rope_scale=1.0))
    if preset == "nope":
        assert torch.equal(logits(model, IDS), expected)
        again = AutoModelForCausalLM.from_pretrained(round_trips(tmp_path / "dst"))
        assert torch.equal(logits(again, IDS), expected)
    elif "dynamic" not in style and "longrope" not in style:
        # Those two change their frequencies with length, which a disentangled bias does not.
        torch.testing.assert_close(logits(model, IDS), expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("preset", ["nope", "simple", "disentangled"])
@every_rope_type
def test_models_build_with_every_rope_type(rope_type, preset, tmp_path):
    """https://github.com/allenai/molmo2/issues/22 and https://github.com/DreamLM/Dream/issues/83"""
    config = tiny_config("llama", rope_parameters={**BASE, **TYPES[rope_type]})
    config.save_pretrained(tmp_path)
    model = apply_drope(AutoModelForCausalLM.from_config(config), preset, rope_scale=0.5)
    assert logits(model.eval(), IDS).isfinite().all()
    model.save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"]["rope_type"]
    assert saved == rope_type
    assert saved in {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("file", TRAVELLING_FILES)
def test_nothing_asks_the_table_of_rope_types(file):
    """https://github.com/allenai/molmo2/issues/22: it has had no "default" since Transformers 5."""
    tree = ast.parse((Path(hf_drope.__file__).parent / file).read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if getattr(node, "id", None) == "ROPE_INIT_FUNCTIONS"]


@every_layout
def test_the_part_of_a_head_that_does_not_rotate_is_left_alone(layout, monkeypatch):
    """https://github.com/huggingface/transformers/issues/48630 and https://github.com/pie-project/pie/pull/603"""
    family, overrides = LAYOUTS[layout]
    one = {"n_layer": 1} if family == "gptj" else {"num_hidden_layers": 1}
    control = tiny_model(family, **overrides, **one)
    assert not ignores_order(control)
    model = apply_drope(tiny_model(family, **overrides, **one), "nope", rope_scale=1.0)
    assert torch.equal(logits(model, IDS), logits(control, IDS))
    seen = []
    attention = next(module for module in model.modules() if hasattr(module, "needs_position"))
    attention.observe = lambda module, query, key, *rest: seen.append((query, key))
    for scale in (1.0, 0.5, 0.0):
        model.set_rope_scale(scale)
        logits(model, IDS)
    rotated = {"gpt_neox_quarter": 4, "gpt_neox_half": 4, "phi3_half": 4, "gptj": 4}.get(layout, 8)
    for full, half, dropped in zip(*seen, strict=True):
        assert torch.equal(full[..., rotated:], dropped[..., rotated:])
        assert torch.equal(half[..., rotated:], dropped[..., rotated:])
        turned = (full[0, :, 1:, :rotated] - dropped[0, :, 1:, :rotated]).abs().amax((0, 1))
        assert (turned > 0).all()
        assert full.shape[-1] > rotated or layout in ("llama", "yarn")
    attention.observe = None
    assert ignores_order(model)


GEMMA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}


def gemma3(**overrides):
    """Six layers with a window of 4 and one without, which rotate differently."""
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    sizes = {"num_hidden_layers": 7, "layer_types": kinds, "sliding_window": 4}
    return small_model("gemma3_text", **{**sizes, "rope_parameters": json.loads(json.dumps(GEMMA)), **overrides})


def without_rotation(model, *kinds):
    """The stock model, these types of layer rotated by nothing."""
    rotary = model.model.rotary_emb
    stock_forward = rotary.forward

    def forward(hidden_states, position_ids, layer_type=None):
        cos, sin = stock_forward(hidden_states, position_ids, layer_type)
        return (torch.ones_like(cos), torch.zeros_like(sin)) if layer_type in kinds else (cos, sin)

    rotary.forward = forward
    return model


@pytest.mark.parametrize("dropped", [(), ("full_attention",), ("sliding_attention",), tuple(GEMMA)], ids=str)
def test_layers_that_rotate_by_type_are_dropped_by_type(dropped, tmp_path):
    """https://github.com/vllm-project/vllm/pull/29111 and https://github.com/lablup/mlxcel/issues/1340"""
    source = gemma3()
    source.save_pretrained(tmp_path / "src")
    kept = [index for index, kind in enumerate(source.config.layer_types) if kind not in dropped]
    settings = {"rope_scale": 1.0} if not dropped else {"rope_layers": kept or None}
    folder = round_trips(convert(tmp_path / "src", tmp_path / "dst", **settings))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == GEMMA
    expected = logits(without_rotation(source, *dropped), IDS)
    if dropped:
        torch.testing.assert_close(logits(model, IDS), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
        assert not torch.allclose(expected, logits(gemma3(), IDS), atol=1e-3)
    else:
        assert torch.equal(logits(model, IDS), expected)


def test_a_stretched_context_is_counted_once(tmp_path):
    """https://github.com/NVIDIA-NeMo/Safe-Synthesizer/pull/623"""
    rope = {**BASE, **YARN}
    source = tiny_model("llama", rope_parameters=rope, max_position_embeddings=128)
    source.save_pretrained(tmp_path / "src")
    folder = round_trips(convert(tmp_path / "src", tmp_path / "dst"))
    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == 128
    assert config.rope_parameters["original_max_position_embeddings"] == 32
    # YaRN also multiplies scores: nothing of that may be left.
    plain = apply_drope(tiny_model("llama", rope_parameters={**BASE, "rope_type": "default"}), "nope")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder), IDS), logits(plain, IDS))

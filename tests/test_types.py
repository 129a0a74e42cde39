"""Every model type that is called supported, through the one mechanism, with every kind of position.

Each type meets each mode and each backend, one pair with another: `HF_DROPE_ALL=1 pytest tests/test_types.py` takes all of them.
"""

from __future__ import annotations

import os
import re

import pytest
import torch
import transformers
from model_types import DECODER_TYPES, SPECIAL, TYPES, class_of, small_model
from packaging.version import Version
from reference import Recorder, randomise_position, reference_attention
from support_table import README, read_table, says
from tiny import random_ids
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from type_matrix import MODES, Refused, assert_near, backends_of, check, check_strengths, is_decoder, run

from hf_drope import apply_drope, convert_checkpoint, plan_conversion
from hf_drope.model_types import SUPPORTED_MODEL_TYPES

# The README's table is of this release.
IS_NEWEST = Version(transformers.__version__) >= Version("5.24")
TABLE = read_table(README.read_text(encoding="utf-8"))
ALL = os.environ.get("HF_DROPE_ALL") == "1"
# What a type may refuse, and what it then says. Where nothing else can be done, it is not supported.
MAY_REFUSE = {
    "disentangled": "this model has none|keeps keys compressed|attention sinks|rotary modules|cannot be run alone",
    "QK-norm": "never holds its queries and keys together|norms of its own|cannot be run alone",
    "RoPE in some layers": "needs rotary positions|is not given its rotations",
}

every_type = pytest.mark.parametrize("model_type", TYPES)


@every_type
def test_at_full_strength_it_is_the_source_and_it_fades_from_there(model_type):
    check_strengths(model_type)


@every_type
@pytest.mark.parametrize("mode", MODES)
def test_mode_acts_and_agrees_on_every_backend_with_and_without_a_cache(model_type, mode):
    backends = backends_of(model_type)
    turn = TYPES.index(model_type) + list(MODES).index(mode)
    for backend in backends if ALL else (backends[turn % len(backends)],):
        reason = None
        try:
            check(model_type, mode, backend)
        except Refused as refusal:
            reason = str(refusal)
        assert reason is None or re.search(MAY_REFUSE.get(mode, "never refused"), reason), reason
        if IS_NEWEST:
            assert says(TABLE, model_type, mode, backend) is (reason is None), (
                "tests/support_table.py writes the README"
            )


def test_the_table_of_support_has_every_type():
    assert tuple(sorted(TABLE)) == SUPPORTED_MODEL_TYPES


@every_type
@pytest.mark.parametrize("mode", MODES if ALL else ["score gate"])
def test_a_converted_folder_is_the_model_converted_in_memory(model_type, mode, tmp_path):
    ids = random_ids(2, 9)
    small_model(model_type, "eager").save_pretrained(tmp_path / "src")
    try:
        stock = class_of(model_type).from_pretrained(tmp_path / "src", attn_implementation="eager")
        expected = run(apply_drope(stock, MODES[mode]), ids)
    except ValueError as refusal:
        with pytest.raises(ValueError, match=MAY_REFUSE[mode]):
            raise refusal from None
        with pytest.raises(ValueError, match=MAY_REFUSE[mode]):
            plan_conversion(tmp_path / "src", MODES[mode])
        return
    convert_checkpoint(plan_conversion(tmp_path / "src", MODES[mode]), tmp_path / "dst", progress=False)
    home = AutoModelForCausalLM if is_decoder(model_type) else AutoModelForMaskedLM
    loaded, info = home.from_pretrained(tmp_path / "dst", attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_near(run(loaded.eval(), ids), expected, "not the model that was converted in memory")


# Cap their scores, have attention sinks or masks of their own, of which the reference knows nothing.
CAPPED = ("doge", "flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma")


@pytest.mark.parametrize("model_type", [name for name in DECODER_TYPES if name not in CAPPED])
def test_the_bias_goes_onto_the_scores_as_the_type_scales_them(model_type, monkeypatch):
    """https://github.com/NVIDIA/TensorRT-Model-Connect/pull/32, whatever a type multiplies its scores by."""
    model = randomise_position(apply_drope(small_model(model_type, "eager"), "simple", max_distance=4))
    recorder, ids = Recorder(monkeypatch), random_ids(1, 5)
    run(model, ids)
    assert recorder.calls
    for call in recorder.calls:
        visible = torch.ones(1, call.key.shape[2], dtype=torch.bool)
        settings, bias = model.config.drope_parameters, call.module.position_bias
        arguments = (call.query, call.key, call.value, call.query[:, 0], visible, call.scaling, bias, settings)
        expected, _ = reference_attention(*arguments)
        torch.testing.assert_close(call.output.double(), expected, atol=1e-5, rtol=1e-5)


# Of one layer they know the order without positions, or have none that rotates.
OF_MORE_LAYERS = ("hrm_text", "lara_mini", "modernbert-decoder", "olmo_hybrid")


@pytest.mark.parametrize("model_type", [name for name in DECODER_TYPES if name not in (*SPECIAL, *OF_MORE_LAYERS)])
def test_one_layer_without_position_sees_a_set(model_type):
    ids = random_ids(1, 12)
    shuffled = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], 1)
    last = {}
    for name in ("stock", "nope"):
        model = small_model(model_type, "eager", num_hidden_layers=1)
        model = model if name == "stock" else apply_drope(model, "nope")
        found, other = run(model, ids)[:, -1], run(model, shuffled)[:, -1]
        last[name] = ((found - other).abs().max() / found.abs().max()).item()
    assert last["nope"] <= 1e-5
    assert last["stock"] > 1e-3


SCALED = {
    "narrow heads": ("llama", {"head_dim": 8}),
    "wide heads": ("llama", {"head_dim": 64}),
    "a scalar of its own": ("gemma3_text", {"query_pre_attn_scalar": 100}),
    "a multiplier": ("granite", {"attention_multiplier": 0.7}),
    "by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "not at all": ("gpt2", {"scale_attn_weights": False}),
}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", SCALED)
def test_a_bias_is_the_same_on_scores_of_any_scale(name, backend, monkeypatch):
    """https://github.com/NVIDIA/TensorRT-Model-Connect/pull/32: it would be wrong by √head_dim."""
    model_type, overrides = SCALED[name]
    model = randomise_position(apply_drope(small_model(model_type, backend, **overrides), "simple", max_distance=4))
    recorder = Recorder(monkeypatch)
    run(model, random_ids(1, 6))
    for layer, call in enumerate(recorder.calls):
        scale = {"narrow heads": 8**-0.5, "wide heads": 0.125, "a scalar of its own": 0.1, "a multiplier": 0.7}.get(
            name
        )
        scale = scale or (8**-0.5 / (layer + 1) if name == "by layer" else 1.0)
        visible, bias = torch.ones(1, 6, dtype=torch.bool), call.module.position_bias
        arguments = (call.query, call.key, call.value, call.query[:, 0], visible, scale, bias)
        expected, _ = reference_attention(*arguments, model.config.drope_parameters)
        torch.testing.assert_close(call.output.double(), expected, atol=1e-5, rtol=1e-5)

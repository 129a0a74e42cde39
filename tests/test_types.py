"""Every model type that is called supported, through the one mechanism, with every kind of position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_types import small_model
from reference import randomise_position
from test_matrix import generate
from tiny import random_ids
from transformers import AutoModelForCausalLM

from hf_drope import apply_drope, convert_checkpoint, plan_conversion
from hf_drope.configuration_drope import SUPPORTED_MODEL_TYPES
from hf_drope.position_modules import rotary_places

every_type = pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)


def run(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@every_type
def test_at_full_strength_it_is_the_source_and_it_fades_from_there(model_type):
    """A rotation read as sine and cosine the wrong way round would jump."""
    ids = random_ids(2, 9)
    stock = small_model(model_type)
    expected = run(stock, ids)
    model = apply_drope(stock, "nope", rope_scale=1.0)
    assert torch.equal(run(model, ids), expected)
    for fade in ("angle", "blend") if rotary_places(model) else ("angle",):
        model = apply_drope(small_model(model_type), "nope", rope_scale=0.9999, rope_fade=fade)
        assert (run(model, ids) - expected).abs().max() < 0.05 * expected.abs().max()
    model.set_rope_scale(0.0)
    assert not torch.equal(run(model, ids), expected)


@every_type
@pytest.mark.parametrize("preset", ["nope", "simple", "drope"])
def test_backends_agree_and_cached_generation_is_the_same(model_type, preset):
    ids = random_ids(2, 9)
    model = randomise_position(apply_drope(small_model(model_type, "eager"), preset))
    expected = run(model, ids)
    if preset != "nope":
        assert not torch.equal(expected, run(apply_drope(small_model(model_type, "eager"), "nope"), ids))
    assert torch.equal(generate(model, ids, 4), generate(model, ids, 4, use_cache=False))
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(run(model, ids), expected, atol=2e-5 * expected.abs().max().item(), rtol=0)
    assert torch.equal(generate(model, ids, 4), generate(model, ids, 4, use_cache=False))


@every_type
def test_rope_taken_apart_and_put_back_is_the_source(model_type):
    ids = random_ids(2, 9)
    stock = small_model(model_type)
    expected = run(stock, ids)
    # Learned tables and compressed keys have no rotation that could be taken apart.
    if not rotary_places(stock) or hasattr(stock.config, "kv_lora_rank"):
        with pytest.raises(ValueError, match="use 'table', 'log', 'linear' or 'low_rank'"):
            apply_drope(stock, "disentangled")
        return
    model = randomise_position(apply_drope(stock, "disentangled"))
    dropped = run(model, ids)
    assert torch.equal(generate(model, ids, 4), generate(model, ids, 4, use_cache=False))
    model.set_rope_scale(1.0)
    torch.testing.assert_close(run(model, ids), expected, atol=2e-5 * expected.abs().max().item(), rtol=0)
    assert (dropped - expected).abs().max() > 1e-3 * expected.abs().max()


@every_type
@pytest.mark.parametrize("preset", ["nope", "drope"])
def test_a_converted_folder_is_the_model_converted_in_memory(model_type, preset, tmp_path):
    ids = random_ids(2, 9)
    stock = small_model(model_type)
    stock.save_pretrained(tmp_path / "src")
    convert_checkpoint(plan_conversion(tmp_path / "src", preset), tmp_path / "dst", progress=False)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = run(apply_drope(stock, preset), ids)
    torch.testing.assert_close(run(loaded.eval(), ids), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)

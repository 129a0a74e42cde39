"""Baselines beyond the window, stretched position terms, and where models end."""

from __future__ import annotations

import pytest
import torch
from model_types import TYPES, small_model
from tiny import random_ids, tiny_config, tiny_model

from hf_drope import apply_drope, drope_config_class
from hf_drope.context_scaling import (
    POSITION_SCALINGS,
    ROPE_SCALINGS,
    check_position_scaling,
    check_rope,
    has_position_terms,
    reach,
    rotated_channels,
    scaled_rope,
    scaled_terms,
    trained_window,
)

WINDOW, FACTOR = 64, 4.0


def rebuilt(model, config):
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def frequencies(model):
    return model.base_model.rotary_emb.inv_freq


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("pi", {"rope_type": "linear", "factor": FACTOR, "rope_theta": 10000.0}),
        # 8 channels a head rotate.
        ("ntk", {"rope_type": "default", "rope_theta": 10000.0 * FACTOR ** (8 / 6)}),
        ("dynamic", {"rope_type": "dynamic", "factor": FACTOR, "rope_theta": 10000.0}),
        (
            "yarn",
            {
                "rope_type": "yarn",
                "factor": FACTOR,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": WINDOW,
            },
        ),
    ],
)
def test_a_baseline_is_the_stock_model_with_those_rope_parameters(kind, parameters):
    source, ids = tiny_model("llama"), random_ids(1, int(WINDOW * FACTOR))
    scaled = rebuilt(source, scaled_rope(source.config, kind, FACTOR, rotated_channels(source)))
    expected = rebuilt(source, tiny_config("llama", rope_parameters=parameters))
    with torch.no_grad():
        logits = scaled(ids).logits
        assert torch.equal(logits, expected(ids).logits)
        assert not torch.allclose(logits, source(ids).logits, atol=1e-2)
    assert source.config.rope_parameters["rope_type"] == "default"


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_the_factor():
    for family, channels in (("llama", 8), ("gpt_neox", 4)):
        source = tiny_model(family)
        assert rotated_channels(source) == {None: channels if family == "llama" else 4}
        scaled = rebuilt(source, scaled_rope(source.config, "ntk", FACTOR, rotated_channels(source)))
        ratio = frequencies(source) / frequencies(scaled)
        assert ratio[0] == 1
        assert ratio[-1] == pytest.approx(FACTOR, rel=1e-5)


@pytest.mark.parametrize("kind", ROPE_SCALINGS)
def test_rotations_by_type_of_layer_are_all_scaled(kind):
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    source = small_model("gemma3_text", layer_types=list(rope), rope_parameters=rope)
    rotated = rotated_channels(source)
    assert set(rotated) == set(rope)
    check_rope(source, "a", [kind])
    config = scaled_rope(source.config, kind, FACTOR, rotated)
    rotary, before = rebuilt(source, config).base_model.rotary_emb, source.base_model.rotary_emb
    for layer_type in rope:
        group = config.rope_parameters[layer_type]
        if kind == "ntk":
            assert group["rope_theta"] == pytest.approx(rope[layer_type]["rope_theta"] * FACTOR ** (8 / 6))
        else:
            assert rotary.rope_type[layer_type] == {"pi": "linear"}.get(kind, kind)
        name = f"{layer_type}_inv_freq"
        # Dynamic NTK scales when it meets a longer sequence.
        assert torch.equal(getattr(rotary, name), getattr(before, name)) == (kind == "dynamic")


def test_what_cannot_be_scaled_is_refused_by_its_reason():
    def refused(model, *kinds):
        with pytest.raises(ValueError, match="--rope-scaling") as caught:
            check_rope(model, "a", kinds or ("pi",))
        return str(caught.value)

    assert "a has no RoPE" in refused(tiny_model("gpt2"))
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    assert "scaled already (rope_type 'yarn')" in refused(tiny_model("llama", rope_parameters=yarn))
    assert "no dynamic RoPE for a (ZeroDivisionError" in refused(small_model("gpt_neox"), "ntk", "dynamic")
    unknown = tiny_model("llama")
    unknown.config.max_position_embeddings = 0
    assert "does not say how long its window is" in refused(unknown)


# Those of these types that the installed Transformers has.
@pytest.mark.parametrize("model_type", sorted({"granite_swa", "granitemoe_swa"} & set(TYPES)))
def test_a_base_that_some_layers_take_from_elsewhere_is_not_changed_in_part(model_type):
    check_rope(small_model(model_type), "a", ["pi"])
    with pytest.raises(ValueError, match="from more than rope_parameters, so ntk would miss some of it"):
        check_rope(small_model(model_type), "a", ["ntk"])


def test_the_window_is_what_was_trained_and_not_what_it_was_stretched_to():
    def of(rope_type):
        rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
        extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
        return trained_window(tiny_config("llama", rope_parameters=rope | extra))

    assert trained_window(tiny_config("llama")) == 64
    assert trained_window(tiny_config("gpt2")) == 64
    assert (of("yarn"), of("dynamic"), of("llama3")) == (32, 32, 64)


@pytest.mark.parametrize("kind", POSITION_SCALINGS)
def test_position_terms_are_stretched_and_nothing_else(kind):
    model = apply_drope(tiny_model("llama"), "disentangled")
    assert has_position_terms(model.config)
    check_position_scaling(model.config, "a")
    config = scaled_terms(model.config, kind, FACTOR)
    scaling = config.drope_parameters["position_bias"].pop("position_scaling")
    assert scaling["type"] == kind
    assert scaling.get("factor", FACTOR) == FACTOR
    assert scaling.get("max_distance", WINDOW - 1) == WINDOW - 1
    assert scaling.get("original_max_position_embeddings", WINDOW) == WINDOW
    assert model.config.drope_parameters["position_bias"].pop("position_scaling") is None
    assert config.drope_parameters == model.config.drope_parameters


def test_terms_that_are_stretched_already_are_refused():
    model = apply_drope(tiny_model("llama"), "disentangled", position_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(ValueError, match="has a position_scaling already"):
        check_position_scaling(model.config, "a")
    assert not has_position_terms(tiny_config("llama"))
    assert not has_position_terms(drope_config_class("llama")())


def test_learned_tables_end_and_dropped_ones_do_not():
    assert reach(tiny_model("llama")) is None
    assert reach(tiny_model("gpt2")) == 64
    assert reach(apply_drope(tiny_model("gpt2"), "nope")) is None
    assert reach(apply_drope(tiny_model("gpt2"), "nope", rope_scale=1.0)) == 64
    for model_type in ("opt", "mpt"):
        model = small_model(model_type)
        end, ids = reach(model), random_ids(1, 70)
        with torch.no_grad():
            model(ids[:, :end])
            with pytest.raises((IndexError, RuntimeError)):
                model(random_ids(1, end + 1))


@pytest.mark.parametrize("model_type", ["gptj"])
def test_a_table_of_sines_ends_unless_it_is_dropped_in_every_layer(model_type):
    assert reach(small_model(model_type)) == 64
    assert reach(apply_drope(small_model(model_type), "nope")) is None
    assert reach(apply_drope(small_model(model_type), "nope", rope_layers=[0])) == 64

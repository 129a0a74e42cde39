"""The rotary seam and its twin for a learned table: full strength, the three fades, and nothing at all."""

from __future__ import annotations

import types

import pytest
import torch
from safetensors.torch import load_file
from tiny import FAMILIES, random_ids, tiny_config, tiny_model

from hf_drope import apply_drope, attention_drope
from hf_drope.rotary_drope import FadingRotaryEmbedding, RemovedPositionEmbedding

ROTARY = [family for family in FAMILIES if family != "gpt2"]
FADES = ["angle", "blend", "frequency"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

# Families and settings whose rotary layouts differ: all pairs, a part of each head, interleaved pairs, a scaled type.
LAYOUTS = {
    "llama": ("llama", {}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "gpt_neox_quarter": (
        "gpt_neox",
        {
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "gpt_neox_half": ("gpt_neox", {}),
    "phi3_half": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "gptj": ("gptj", {"rotary_dim": 4}),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_fade = pytest.mark.parametrize("fade", FADES)


def stock(layout: str):
    family, overrides = LAYOUTS[layout]
    return tiny_model(family, **overrides)


def cos_sin(model, scale: float | None = None, positions=range(9)) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, channels) of the model's rotary module, cos first whatever the family's order is."""
    if scale is not None:
        model.set_rope_scale(scale)
    rotary = model.base_model.rotary_emb
    name = type(getattr(rotary, "rotary", rotary)).__name__
    first, second = rotary(torch.zeros(1, 1, 1), torch.tensor([list(positions)]))
    return (second[0], first[0]) if name.startswith("GPTJ") else (first[0], second[0])


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@every_fade
@every_layout
def test_full_strength_is_the_stock_rotation_bit_for_bit(layout, fade):
    ids = random_ids(2, 9)
    model = apply_drope(stock(layout), "nope", rope_scale=1.0, rope_fade=fade)
    control = stock(layout)
    assert torch.equal(logits(model, ids), logits(control, ids))
    for ours, theirs in zip(cos_sin(model), cos_sin(control), strict=True):
        assert torch.equal(ours, theirs)


@every_fade
@every_layout
def test_fading_approaches_both_ends(layout, fade):
    ids = random_ids(2, 9)
    model = apply_drope(stock(layout), "nope", rope_scale=1.0, rope_fade=fade)
    full = logits(model, ids)
    model.set_rope_scale(0.0)
    dropped = logits(model, ids)
    assert (full - dropped).abs().max() > 0.1
    for scale, end in ((1e-6, dropped), (1 - 1e-6, full)):
        model.set_rope_scale(scale)
        torch.testing.assert_close(logits(model, ids), end, atol=1e-3, rtol=1e-3)
    model.set_rope_scale(0.5)
    assert (logits(model, ids) - full).abs().max() > 1e-3
    assert (logits(model, ids) - dropped).abs().max() > 1e-3
    model.set_rope_scale(1.0)
    assert torch.equal(logits(model, ids), full), "and back again"


@pytest.mark.parametrize("scale", [0.75, 0.5, 0.1])
@every_layout
def test_angle_fade_rotates_by_the_scaled_angle(layout, scale):
    control = stock(layout)
    amplitude = getattr(control.base_model.rotary_emb, "attention_scaling", 1.0)
    cos, sin = cos_sin(control, positions=[1])
    step = torch.atan2(sin.double(), cos.double())  # the angle of one position, at most one radian
    angle = step * torch.arange(9)[:, None] * scale
    strength = 1 + scale * (amplitude - 1)
    model = apply_drope(stock(layout), "nope", rope_fade="angle")
    faded_cos, faded_sin = cos_sin(model, scale)
    torch.testing.assert_close(faded_cos.double(), angle.cos() * strength, atol=1e-5, rtol=0)
    torch.testing.assert_close(faded_sin.double(), angle.sin() * strength, atol=1e-5, rtol=0)
    if layout == "yarn":
        assert amplitude > 1.01


# YaRN's amplitude fades as well.
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "yarn"])
def test_scaled_angle_equals_scaled_positions(layout):
    """With a whole number of positions per step the fade can be had from the stock model itself."""
    ids = random_ids(1, 9)
    positions = torch.arange(9)[None] * 4
    mask = torch.ones_like(ids)
    model = apply_drope(stock(layout), "nope", rope_scale=0.25, rope_fade="angle")
    faded = logits(model, ids, position_ids=positions, attention_mask=mask)
    torch.testing.assert_close(faded, logits(stock(layout), ids), atol=1e-3, rtol=1e-3)


@every_layout
def test_blend_fade_is_one_plus_scale_times_the_rest(layout):
    cos, sin = cos_sin(stock(layout))
    model = apply_drope(stock(layout), "nope", rope_fade="blend")
    faded_cos, faded_sin = cos_sin(model, 0.3)
    torch.testing.assert_close(faded_cos, 1 + 0.3 * (cos - 1), atol=1e-6, rtol=0)
    torch.testing.assert_close(faded_sin, 0.3 * sin, atol=1e-6, rtol=0)


@every_layout
def test_frequency_fade_drops_the_slowest_pairs_first(layout):
    control = stock(layout)
    cos, sin = cos_sin(control)
    amplitude = getattr(control.base_model.rotary_emb, "attention_scaling", 1.0)
    speed = cos_sin(control, positions=[1])[1][0].double() / amplitude
    order = speed.unique().flip(0)  # fastest first
    model = apply_drope(stock(layout), "nope", rope_fade="frequency")
    previous = torch.zeros_like(speed)
    for scale in torch.linspace(0.05, 0.95, 19).tolist():
        faded_cos, faded_sin = cos_sin(model, scale)
        weight = (faded_sin[1] / sin[1]).double()
        rank = torch.tensor([order.tolist().index(value) for value in speed.tolist()])
        expected = (scale * len(order) - rank.double()).clamp(0, 1)
        torch.testing.assert_close(weight, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(faded_cos, 1 + weight.float() * (cos - 1), atol=1e-4, rtol=0)
        assert (weight >= previous - 1e-6).all(), "a pair never comes back"
        previous = weight
    # The last pair to be left is the fastest one.
    weight = (cos_sin(model, 0.5 / len(order))[1][1] / sin[1]).double()
    assert weight[speed == order[0]].min() > 0.4
    assert (weight[speed < order[0]] == 0).all()


@pytest.mark.parametrize("family", ROTARY)
def test_dropped_model_never_calls_the_stock_rotation(family, monkeypatch):
    model = apply_drope(tiny_model(family), "nope", rope_scale=0.0)
    ids = random_ids(1, 5)
    expected = logits(model, ids)
    wrapper = model.base_model.rotary_emb
    assert isinstance(wrapper, FadingRotaryEmbedding)

    def fail(*args, **kwargs):
        raise AssertionError("the stock rotary module was called")

    monkeypatch.setattr(wrapper.rotary, "forward", fail)
    assert torch.equal(logits(model, ids), expected)
    model.set_rope_scale(1.0)
    with pytest.raises(AssertionError, match="was called"):
        model(ids)


@every_fade
@pytest.mark.parametrize("family", ROTARY)
def test_cached_decoding_equals_full_forward_while_fading(family, fade):
    model = apply_drope(tiny_model(family), "nope", rope_scale=0.4, rope_fade=fade)
    ids = random_ids(1, 8)
    full, cache, steps = logits(model, ids), None, []
    for t in range(8):
        with torch.no_grad():
            output = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), full, atol=1e-4, rtol=1e-4)


@every_fade
@pytest.mark.parametrize("cast", ["built", "cast later"])
def test_fading_in_half_precision_is_computed_in_full(cast, fade):
    """https://github.com/NVIDIA/TensorRT-Model-Connect/issues/667"""
    positions = range(600, 609)
    exact = cos_sin(apply_drope(tiny_model("llama"), "nope", rope_fade=fade), 0.3, positions)
    if cast == "built":
        stock_class = type(tiny_model("llama"))
        model = stock_class._from_config(tiny_config("llama"), dtype=torch.bfloat16)
        model = apply_drope(model, "nope", rope_fade=fade)
    else:
        model = apply_drope(tiny_model("llama"), "nope", rope_fade=fade)
        frequencies = model.model.rotary_emb.rotary.inv_freq
        model.to(torch.bfloat16)
        # The stock module's own buffer is the stock module's affair.
        model.model.rotary_emb.rotary.inv_freq = frequencies
    model.set_rope_scale(0.3)
    rounded = model.model.rotary_emb(torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.tensor([list(positions)]))
    for half, full in zip(rounded, exact, strict=True):
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half[0].float(), full, atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("scale", [0.0, 0.5])
@pytest.mark.parametrize("family", ROTARY)
def test_named_layers_keep_rope(family, scale):
    ids = random_ids(1, 9)
    shifted = {"position_ids": torch.arange(9)[None] * 2, "attention_mask": torch.ones_like(ids)}
    model = apply_drope(tiny_model(family), "nope", rope_scale=scale, rope_layers=[0, 1])
    for kwargs in ({}, shifted):
        assert torch.equal(logits(model, ids, **kwargs), logits(tiny_model(family), ids, **kwargs))


@pytest.mark.parametrize("kept", [0, 1])
def test_rope_stays_in_the_named_layer_only(kept):
    ids = random_ids(1, 9)
    odd = {"position_ids": torch.arange(9)[None] * 2, "attention_mask": torch.ones_like(ids)}
    model = apply_drope(tiny_model("llama"), "nope", rope_layers=[kept])
    attention = [layer.self_attn for layer in model.model.layers]
    seen = {}
    for index, module in enumerate(attention):
        module.register_forward_hook(lambda m, a, output, index=index: seen.setdefault(index, []).append(output[0]))
    logits(model, ids)
    logits(model, ids, **odd)
    assert not torch.equal(*seen[kept])
    if kept == 1:
        assert torch.equal(*seen[0])
    dropped = logits(apply_drope(tiny_model("llama"), "nope"), ids)
    assert (logits(model, ids) - dropped).abs().max() > 0.01
    assert (logits(model, ids) - logits(tiny_model("llama"), ids)).abs().max() > 0.01


def test_scale_is_stored_in_the_config():
    """https://github.com/allenai/OLMo-core/pull/622: the stage goes with the checkpoint."""
    model = apply_drope(tiny_model("llama"), "nope", rope_scale=1.0)
    model.set_rope_scale(0.35)
    assert model.config.drope_parameters["rope_scale"] == 0.35
    for scale in (-0.1, 1.1, True, "half"):
        with pytest.raises(ValueError, match="rope_scale"):
            model.set_rope_scale(scale)
    assert model.config.drope_parameters["rope_scale"] == 0.35


@pytest.mark.parametrize("family", ["llama", "gptj", "gpt2"])
def test_moving_scale_compiles_a_bounded_number_of_times(family):
    """https://github.com/pytorch/pytorch/issues/149405"""
    model = apply_drope(tiny_model(family), "nope", rope_scale=1.0)
    ids, graphs = random_ids(1, 6), []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counting)
    for step in range(20):
        model.set_rope_scale(1 - step / 19)
        with torch.no_grad():
            result = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(result, logits(model, ids), atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()
    # Full strength, everything between, dropped; the parts that do not see the scale may be shared.
    assert 1 <= len(graphs) <= 3


def test_learned_table_fades_and_goes():
    ids = random_ids(2, 9)
    control = tiny_model("gpt2")
    model = apply_drope(tiny_model("gpt2"), "nope", rope_scale=1.0)
    assert torch.equal(logits(model, ids), logits(control, ids))
    for scale in (0.5, 0.0):
        model.set_rope_scale(scale)
        with torch.no_grad():
            control.transformer.wpe.weight.copy_(tiny_model("gpt2").transformer.wpe.weight * scale)
        torch.testing.assert_close(logits(model, ids), logits(control, ids), atol=1e-4, rtol=1e-4)
    model.set_rope_scale(1.0)
    assert torch.equal(logits(model, ids), logits(tiny_model("gpt2"), ids)), "dropping does not destroy the table"


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_dropped_table_works_past_its_end(scale):
    model = apply_drope(tiny_model("gpt2"), "nope", rope_scale=scale)
    model.set_rope_scale(0.0)
    ids = random_ids(1, 100)
    assert model.config.n_positions == 64
    full = logits(model, ids)
    assert full.isfinite().all()
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4)
    assert generated.shape == (1, 104)


def test_dropped_table_is_not_saved_and_comes_back_with_its_scale(tmp_path):
    model = apply_drope(tiny_model("gpt2"), "nope", rope_scale=1.0)
    key = "transformer.wpe.weight"
    for scale, saved in ((1.0, True), (0.5, True), (0.0, False), (0.25, True)):
        model.set_rope_scale(scale)
        model.save_pretrained(tmp_path / str(scale))
        assert (key in load_file(tmp_path / str(scale) / "model.safetensors")) is saved
        loaded = type(model).from_pretrained(tmp_path / str(scale))
        assert torch.equal(logits(loaded, random_ids(1, 9)), logits(model, random_ids(1, 9)))
        if not saved:
            assert isinstance(loaded.transformer.wpe, RemovedPositionEmbedding)
            with pytest.raises(
                ValueError, match=r"rope_scale is 0\.5, but this checkpoint's position table was removed"
            ):
                loaded.set_rope_scale(0.5)
            assert loaded.config.drope_parameters["rope_scale"] == 0.0


def test_learned_table_has_no_layers_to_keep():
    with pytest.raises(ValueError, match="rope_layers needs rotary positions"):
        apply_drope(tiny_model("gpt2"), "nope", rope_layers=[0])


def test_wrapper_adds_nothing_to_the_checkpoint():
    for scale in (1.0, 0.5, 0.0):
        model = apply_drope(tiny_model("llama"), "nope", rope_scale=scale)
        assert model.state_dict().keys() == tiny_model("llama").state_dict().keys()


def test_a_rotation_gets_its_arguments_under_their_own_names():
    """A call may leave out one in the middle."""
    seen = {}

    def rotation(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        seen.update(position_ids=position_ids, unsqueeze_dim=unsqueeze_dim)
        return q, k

    home = types.SimpleNamespace(rotation=rotation)
    attention_drope._rotation_for(home, "rotation")(1, 2, 3, 4, unsqueeze_dim=2)
    assert seen == {"position_ids": None, "unsqueeze_dim": 2}

"""Calibration: known biases are found again, every bias comes closer to its source, and nothing else changes."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, logits, tiny_tokenizer, write_source
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, VOCAB, random_ids, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_drope import DroPEParameters, apply_drope, calibrate, calibrate_checkpoint, convert_checkpoint, plan_conversion
from hf_drope.adapters import lora_config
from hf_drope.cli import main
from hf_drope.distance_fit import fit_by_distance
from hf_drope.folder_calibration import checkpoint_windows
from hf_drope.layer_fit import LayerFit, LayerStates
from hf_drope.position_bias import LinearBias, LogBias, LowRankBias, PositionBias, TableBias

ROTARY = [family for family in FAMILIES if family != "gpt2"]
KINDS: dict[str, dict[str, Any]] = {
    "table": {"max_distance": 32},
    "log": {},
    "linear": {"learned": True},
    "low_rank": {"rank": 8},
    "disentangled": {},
}
GATES = (None, "head", "query", "score")
RECORD = "drope_conversion.json"
IDS = random_ids(2, 24)


def settings(kind: str, gate: str | None = None, top: dict[str, Any] | None = None, **bias: Any) -> DroPEParameters:
    return DroPEParameters(position_bias={"type": kind, **bias}, gate=gate and {"type": gate}, **(top or {}))


@torch.no_grad()
def positional_llama(**overrides: Any) -> Any:
    """A llama whose queries and keys have large means, so that its RoPE says much about distance alone."""
    model = tiny_model("llama", attention_bias=True, **{"attn_implementation": "eager", **overrides})
    generator = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.bias.normal_(generator=generator)
    return model


def run(model: Any, source: Any = None, ids: Any = IDS, **arguments: Any) -> Any:
    # The closed form and the descent a layer; the one that follows has tests of its own.
    return calibrate(model, source, ids, progress=False, **{"output_steps": 0, **arguments})


def biases(model: Any) -> list[PositionBias]:
    return list(model.position_biases())


def others(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if ".position_bias." not in name}


def assert_equal_states(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def r_squared(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Along the last axis and up to a constant."""
    got, wanted = got.double(), wanted.double()
    error, spread = (x - x.mean(-1, keepdim=True) for x in (wanted - got, wanted))
    return 1 - error.pow(2).sum(-1) / spread.pow(2).sum(-1)


# A source whose position signal is a known function of distance.

HEADS, WIDTH, TURNING, THETA = 4, 16, 4, 100.0
LONG = random_ids(4, 48)


@torch.no_grad()
def constant_rotation_model() -> Any:
    """A GPT-NeoX whose rotated channels hold constants: RoPE adds to its scores what distance and head decide alone."""
    rope = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}
    model = tiny_model("gpt_neox", hidden_size=HEADS * WIDTH, rope_parameters=rope)
    generator = torch.Generator().manual_seed(1)
    for layer in model.gpt_neox.layers:
        projection = layer.attention.query_key_value
        projection.weight.view(HEADS, 3, WIDTH, -1)[:, :2, : 2 * TURNING] = 0
        bias = projection.bias.view(HEADS, 3, WIDTH).normal_(generator=generator)
        bias[:, :2, : 2 * TURNING] *= 1.5
    return model


def known_bias(model: Any, layer: int, distance: torch.Tensor) -> torch.Tensor:
    """What RoPE adds in `constant_rotation_model` (heads, distances), by complex numbers."""
    bias = model.gpt_neox.layers[layer].attention.query_key_value.bias.detach().double().view(HEADS, 3, WIDTH)
    query, key = (torch.complex(bias[:, x, :TURNING], bias[:, x, TURNING : 2 * TURNING]) for x in (0, 1))
    frequencies = THETA ** (-torch.arange(TURNING).double() / TURNING)
    turn = torch.exp(1j * frequencies * distance.double()[:, None])
    return ((query * key.conj())[:, None] * turn).real.sum(-1) * WIDTH**-0.5


@torch.no_grad()
def model_bias(model: Any, layer: int, distance: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What the calibrated model adds at each distance, gate included: (windows, heads, queries, distances)."""
    attention = model.gpt_neox.layers[layer].attention
    seen: list[torch.Tensor] = []
    hook = attention.register_forward_pre_hook(lambda module, args, given: seen.append(args[0]), with_kwargs=True)
    model(ids)
    hook.remove()
    bias = attention.position_bias.bias
    if hasattr(bias, "terms"):
        zeros = torch.zeros(1, HEADS, int(distance.max()) + 1, WIDTH)
        values = bias.scores(zeros, zeros)[0, :, -1].flip(-1)[:, distance] * WIDTH**-0.5
    else:
        values = bias.values(-distance)
    factor = attention.position_bias.factor(None, seen[0])
    return values[None, :, None] * (1.0 if factor is None else factor)


@pytest.mark.parametrize("gate", [None, "head", "query"])
@pytest.mark.parametrize(
    ("kind", "bias"),
    [("table", {"max_distance": 48}), ("low_rank", {"rank": 2 * TURNING}), ("disentangled", {"terms": ["p2p"]})],
)
def test_a_known_bias_is_found_again(kind, bias, gate):
    source = constant_rotation_model()
    model = apply_drope(constant_rotation_model(), settings(kind, gate, **bias))
    run(model, source, LONG, steps=100)
    distance = torch.arange(48)
    for layer in range(2):
        got = model_bias(model, layer, distance, LONG)
        fit = r_squared(got, known_bias(source, layer, distance)[None, :, None].expand_as(got))
        assert fit.min() >= 0.99, (layer, fit.amin((0, 2)))
    ours, theirs = logits(model, LONG), logits(source, LONG)
    assert (ours - theirs).abs().max() < 0.01 * theirs.abs().max()


@pytest.mark.parametrize(
    ("kind", "gate", "bias"),
    [
        ("low_rank", None, {"rank": 2 * TURNING}),
        ("low_rank", "head", {"rank": 2 * TURNING}),
        ("low_rank", "query", {"rank": 2 * TURNING}),
        ("disentangled", None, {"terms": ["p2p"]}),
        ("disentangled", None, {"terms": ["p2p"], "rank": 2 * TURNING}),
        ("disentangled", None, {}),
        ("disentangled", "head", {}),
    ],
)
def test_the_closed_form_of_a_known_bias_is_exact(kind, gate, bias):
    source = constant_rotation_model()
    model = apply_drope(constant_rotation_model(), settings(kind, gate, **bias))
    report = run(model, source, LONG, steps=0)
    assert report.mean("dropped") > 0.1
    assert abs(report.mean("start")) < 1e-5
    ours, theirs = logits(model, LONG), logits(source, LONG)
    torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=0)


def test_the_least_squares_start_of_a_table_is_exact():
    """A table can hold what this source's encoding adds, so the divergence has nothing to leave."""
    source = constant_rotation_model()
    model = apply_drope(constant_rotation_model(), settings("table", max_distance=48))
    run(model, source, LONG, steps=0)
    distance = torch.arange(48)
    fit = r_squared(model_bias(model, 0, distance, LONG)[0, :, 0], known_bias(source, 0, distance))
    assert fit.min() >= 0.99, fit


def test_the_descent_leaves_a_perfect_start_alone():
    source = constant_rotation_model()
    model = apply_drope(constant_rotation_model(), settings("low_rank", rank=2 * TURNING))
    report = run(model, source, LONG, steps=16)
    for layer in report.layers:
        assert layer.end <= layer.start + 1e-6, layer


# Least squares by distance.


def instance(kind: str, groups: int, **arguments: Any) -> Any:
    classes: dict[str, Any] = {"table": TableBias, "linear": LinearBias, "log": LogBias, "low_rank": LowRankBias}
    return classes[kind](4, num_groups=groups, **arguments)


@torch.no_grad()
def known_instance(kind: str, groups: int, **arguments: Any) -> Any:
    torch.manual_seed(3)
    bias = instance(kind, groups, **arguments)
    for name, parameter in bias.named_parameters():
        if name == "a":
            # One slope of the grid a group.
            parameter.copy_((10.0 ** (torch.arange(groups) / 4 - 0.5)).expand_as(parameter))
        else:
            parameter.uniform_(0.2, 2.0)
    return bias


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("table", {"max_distance": 40}),
        ("table", {"max_distance": 40, "bidirectional": True}),
        ("table", {"max_distance": 32, "num_buckets": 8}),
        ("table", {"max_distance": 32, "num_buckets": 16, "bidirectional": True}),
        ("linear", {"learned": True}),
        ("linear", {"learned": True, "bidirectional": True}),
        ("log", {}),
        ("log", {"sign": 1, "bidirectional": True}),
        ("log", {"init": "kerple"}),
        ("low_rank", {"rank": 6, "max_distance": 16}),
    ],
)
@torch.no_grad()
def test_least_squares_find_the_parameters_of_their_own_kind(kind, arguments, groups):
    known = known_instance(kind, groups, **arguments)
    torch.manual_seed(9)
    bias = instance(kind, groups, **arguments)
    before = {name: parameter.clone() for name, parameter in bias.named_parameters()}
    distance = torch.arange(40)
    weight = torch.rand(4, 40) + 0.05
    constant = 0.0 if kind == "table" else 0.7
    r2 = fit_by_distance(bias, weight * (known.values(-distance) + constant), weight)
    assert r2 >= 0.9999
    assert r_squared(bias.values(-distance), known.values(-distance)).min() >= 0.9999
    for name, parameter in bias.named_parameters():
        wanted = dict(known.named_parameters())[name]
        if kind == "table":
            rows = torch.unique(known.rows(-distance))
            torch.testing.assert_close(parameter[rows], wanted[rows], atol=1e-4, rtol=1e-4)
            rest = torch.ones(len(parameter), dtype=torch.bool)
            rest[rows] = False
        elif kind == "low_rank":
            torch.testing.assert_close(parameter, wanted, atol=2e-3, rtol=1e-3)
            continue
        else:
            torch.testing.assert_close(parameter[0], wanted[0], atol=1e-3, rtol=1e-3)
            rest = torch.arange(len(parameter)) > 0
        # Causal attention says nothing about keys ahead.
        assert torch.equal(parameter[rest], before[name][rest])


@torch.no_grad()
def test_distances_without_weight_neither_count_nor_stay_as_they_were():
    bias, distance = TableBias(2, max_distance=20), torch.arange(12)
    value = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(2, 12)
    weight[:, 7:] = 0
    above = weight * value + torch.where(weight > 0, 0.0, 1e6) * weight
    fit_by_distance(bias, above, weight)
    torch.testing.assert_close(bias.values(-distance[:7]), value[:, :7])
    assert torch.equal(bias.values(-torch.arange(7, 30)), value[:, 6:7].expand(-1, 23))


@torch.no_grad()
def test_distances_that_no_window_reaches_are_as_the_nearest_that_one_does():
    bias, generator = TableBias(2, max_distance=4096), torch.Generator().manual_seed(0)
    before, value = bias.weight.clone(), torch.randn(2, 300, generator=generator)
    # Gaps of all sizes as well as all distances from 300 on.
    weight = (torch.rand(300, generator=generator) < 0.2).float().expand(2, -1)
    fit_by_distance(bias, weight * value, weight)
    reached = weight[0].nonzero()[:, 0].tolist()
    assert reached[-1] < 300
    for distance in range(4096):
        # Of two that are as near the further one.
        nearest = min(reached, key=lambda other, d=distance: (abs(other - d), -other))
        torch.testing.assert_close(bias.values(torch.tensor([-distance]))[:, 0], value[:, nearest])
    assert torch.equal(bias.weight[4096:], before[4096:])


@torch.no_grad()
def test_an_off_grid_slope_is_fitted_well_enough():
    known, bias, distance = LogBias(4), LogBias(4), torch.arange(64)
    known.a.copy_(torch.tensor([[0.07, 0.4, 1.9, 7.0]]))
    known.gamma.copy_(torch.tensor([[-0.5, 0.5, 1.0, 3.0]]))
    weight = torch.ones(4, 64)
    assert fit_by_distance(bias, weight * known.values(-distance), weight) >= 0.99


def test_a_kerple_bias_that_would_have_to_rise_stays_where_it_can_learn():
    bias, distance = LogBias(4, init="kerple"), torch.arange(40)
    fit_by_distance(bias, torch.log1p(distance).expand(4, -1), torch.ones(4, 40))
    assert (bias.gamma >= 0.01).all()
    bias.values(-distance).sum().backward()
    assert (bias.gamma.grad != 0).all()


@pytest.mark.parametrize(("steps", "output_steps"), [(0, 0), (8, 0), (0, 24)])
def test_a_calibrated_kerple_bias_goes_on_learning(steps, output_steps):
    model = apply_drope(tiny_model("llama"), settings("log", init="kerple"))
    run(model, steps=steps, output_steps=output_steps)
    model(IDS, labels=IDS).loss.backward()
    for bias in model.position_biases():
        assert (bias.bias.gamma >= 0.01).all(), bias.bias.gamma
        assert (bias.bias.gamma.grad != 0).all()
        assert (bias.bias.a.grad != 0).all()


@pytest.mark.parametrize("gate", ["head", "query", {"type": "head", "exponential": False}])
def test_a_gate_starts_open_where_the_terms_are_exact_in_full_strength(gate):
    gate = {"type": gate} if isinstance(gate, str) else gate
    model = apply_drope(positional_llama(), DroPEParameters(position_bias={"type": "disentangled"}, gate=gate))
    start, free = run(model, steps=0), run(apply_drope(positional_llama(), "disentangled"), steps=0)
    assert start.mean("start") == pytest.approx(free.mean("start"), rel=1e-5 if gate == {"type": "head"} else 0.1)
    assert any(p.grad.abs().max() > 0 for p in gate_parameters_after_backward(model))


def gate_parameters_after_backward(model: Any) -> list[torch.Tensor]:
    model(IDS, labels=IDS).loss.backward()
    return [p for bias in model.position_biases() for p in bias.gate.parameters()]


# Every bias and gate: closer to the source than dropped, and by the numbers that the report gives.


def attention_of_layer_0(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, output_attentions=True).attentions[0].double()


def divergence(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """KL(theirs ‖ ours) of attention weights (windows, heads, queries, keys), the mean over all but the keys."""
    terms = torch.where(theirs > 0, theirs * (theirs.clamp(min=1e-30).log() - ours.clamp(min=1e-30).log()), 0.0)
    return terms.sum(-1).mean().item()


@pytest.mark.parametrize("steps", [0, 8])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", KINDS)
def test_divergence_falls_to_what_the_model_then_does(kind, gate, steps):
    source = positional_llama()
    model = apply_drope(positional_llama(), settings(kind, gate, **KINDS[kind]))
    report = run(model, source, steps=steps)
    assert [layer.layer for layer in report.layers] == [0, 1]
    numbers = [x for layer in report.layers for x in layer if x is not None]
    assert all(map(math.isfinite, numbers))
    assert all((layer.r2 is None) == (kind in ("low_rank", "disentangled")) for layer in report.layers)
    if steps or (kind, gate) not in (("log", "score"), ("linear", "score")):
        assert report.mean("end") < report.mean("dropped")
    if (kind, gate) not in (("log", "score"), ("linear", "score")):
        # One slope for what a score gate turns on and off may fit the scores and not the attention.
        assert report.mean("start") < report.mean("dropped")
    if steps == 0:
        assert report.mean("end") == report.mean("start")
    theirs = attention_of_layer_0(source, IDS)
    dropped = attention_of_layer_0(apply_drope(positional_llama(), "nope"), IDS)
    assert report.layers[0].dropped == pytest.approx(divergence(theirs, dropped), rel=1e-3)
    assert report.layers[0].end == pytest.approx(divergence(theirs, attention_of_layer_0(model, IDS)), rel=1e-3)
    assert (report.bias, report.windows, report.length, report.steps) == (kind, 2, 24, steps)
    assert json.loads(json.dumps(report.to_dict()))["layers"][1]["layer"] == 1
    assert f"calibrated {kind} in 2 layers on 2 × 24 tokens" in report.describe()


@pytest.mark.parametrize("qk_norm", ["q", "k", "qk"])
@pytest.mark.parametrize("kind", ["table", "disentangled"])
def test_with_added_norms_the_target_is_the_attention_of_the_source_which_has_none(kind, qk_norm):
    top = {"qk_norm": qk_norm}
    model = apply_drope(positional_llama(), settings(kind, None, top, **KINDS[kind]))
    report = run(model, steps=0)
    theirs = attention_of_layer_0(positional_llama(), IDS)
    dropped = attention_of_layer_0(apply_drope(positional_llama(), "nope", **top), IDS)
    assert report.layers[0].dropped == pytest.approx(divergence(theirs, dropped), rel=1e-3)
    assert report.layers[0].start == pytest.approx(divergence(theirs, attention_of_layer_0(model, IDS)), rel=1e-3)


@pytest.mark.parametrize("kind", ["table", "low_rank", "disentangled"])
def test_the_descent_towards_the_outputs_brings_them_nearer(kind):
    source, ids = positional_llama(), random_ids(4, 24, seed=8)
    expected = source(ids).logits.log_softmax(-1)

    def distance(model: Any) -> float:
        with torch.no_grad():
            ours = model(ids).logits.log_softmax(-1)
        return (expected.exp() * (expected - ours)).sum(-1).mean().item()

    model = apply_drope(positional_llama(), settings(kind, **KINDS[kind])).train()
    frozen = next(parameter for name, parameter in model.named_parameters() if "mlp" in name).requires_grad_(False)
    before, closed = others(model), run(copy.deepcopy(model), steps=0)
    assert closed.output_divergence is None
    start = copy.deepcopy(model)
    run(start, ids=ids, steps=0)
    report = run(model, ids=ids, steps=0, output_steps=24)
    assert distance(model) < distance(start)
    assert report.output_divergence is not None
    assert report.output_divergence[1] < report.output_divergence[0]
    assert "in 24 steps" in report.describe()
    assert_equal_states(others(model), before)
    assert model.training
    assert not frozen.requires_grad
    assert all(parameter.requires_grad for parameter in model.position_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    again = apply_drope(positional_llama(), settings(kind, **KINDS[kind]))
    run(again, ids=ids, steps=0, output_steps=24)
    assert_equal_states(again.state_dict(), model.state_dict())


def test_a_descent_that_leads_away_from_the_outputs_is_undone():
    start, model = (apply_drope(positional_llama(), settings("table", **KINDS["table"])) for _ in range(2))
    run(start, steps=0)
    report = run(model, steps=0, output_steps=2, learning_rate=1e3)
    assert report.output_divergence is not None
    assert report.output_divergence[0] == report.output_divergence[1]
    assert_equal_states(model.state_dict(), start.state_dict())


def test_gpt2_descends_towards_the_outputs_of_its_source():
    model = apply_drope(gpt2(), settings("table", **KINDS["table"]))
    report = run(model, gpt2(), steps=0, output_steps=24)
    assert report.output_divergence is not None
    assert report.output_divergence[1] < report.output_divergence[0]


def test_descent_goes_further_than_the_closed_form_and_is_repeatable():
    reports = []
    for seed in (0, 0, 1):
        model = apply_drope(positional_llama(), settings("disentangled"))
        ids = random_ids(3, 64)
        report = run(model, None, ids, steps=24, seed=seed)
        assert report.mean("end") < report.mean("start")
        reports.append((report.layers, [parameter.detach().clone() for parameter in model.position_parameters()]))
    assert reports[0][0] == reports[1][0]
    assert all(map(torch.equal, reports[0][1], reports[1][1]))


@pytest.mark.parametrize(
    "scaling",
    [{"type": "linear", "factor": 4.0}, {"type": "ntk", "factor": 4.0}, {"type": "clip", "max_distance": 6}],
    ids=lambda scaling: scaling["type"],
)
def test_stretched_terms_are_calibrated_as_those_of_the_source_and_stay_stretched(scaling):
    plain = apply_drope(positional_llama(), settings("disentangled"))
    model = apply_drope(positional_llama(), settings("disentangled", position_scaling=scaling))
    frequencies = [bias.bias.frequencies.clone() for bias in model.position_biases()]
    stretched = [bias.bias.position_scaling for bias in model.position_biases()]
    reports = [run(each, steps=2, output_steps=2) for each in (plain, model)]
    assert reports[0].layers == reports[1].layers
    assert reports[0].output_divergence == reports[1].output_divergence
    assert_equal_states(model.state_dict(), plain.state_dict())
    assert [bias.bias.position_scaling for bias in model.position_biases()] == stretched
    assert None not in stretched
    assert all(torch.equal(b.bias.frequencies, f) for b, f in zip(model.position_biases(), frequencies, strict=True))
    assert (logits(model, IDS) - logits(plain, IDS)).abs().max() > 1e-2


def test_a_source_with_scaled_rotation_has_its_scale_in_the_content_as_well():
    """YaRN's factor on cos and sin is in the source's scores, so M has to carry it."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    model = apply_drope(tiny_model("llama", rope_parameters=rope), settings("disentangled"))
    amplitude = biases(model)[0].bias.source.amplitude
    assert amplitude > 1.1
    run(model, steps=0)
    states = layer_0_states(tiny_model("llama", rope_parameters=rope), IDS)
    expected = expected_gain(*states, biases(model)[0].bias.source.frequencies, amplitude)
    torch.testing.assert_close(biases(model)[0].bias.gain.double(), expected, atol=1e-3, rtol=0)


# The closed form of the disentangled bias, computed once more.


def layer_0_states(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Un-rotated queries (windows, 4, length, 8) and keys (windows, 2, length, 8) by hooks on a stock model."""
    attention, seen = model.model.layers[0].self_attn, {}
    homes = ("q_norm", "k_norm") if hasattr(attention, "q_norm") else ("q_proj", "k_proj")
    hooks = [
        getattr(attention, home).register_forward_hook(lambda module, args, out, home=home: seen.update({home: out}))
        for home in homes
    ]
    logits(model, ids)
    for hook in hooks:
        hook.remove()
    query, key = (seen[home].detach().double().view(*ids.shape, -1, 8).transpose(1, 2) for home in homes)
    return query, key


def expected_gain(
    query: torch.Tensor, key: torch.Tensor, frequencies: tuple[float, ...], amplitude: float = 1.0
) -> torch.Tensor:
    """M (heads, pairs, 2) one query and key at a time: the mean turn over what the source attends to, weighted with the

    energies of the centred query and key; pair r is the channels (r, r + n) as one complex number.
    """
    windows, heads, length, width = query.shape
    n, groups = width // 2, heads // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    q, k = (torch.complex(x[..., :n], x[..., n:]) for x in (query, key))
    q_mean, k_mean = (x.mean((0, 2)) for x in (q, k))
    speed = torch.tensor(frequencies, dtype=torch.float64)
    gain = torch.zeros(heads, n, 2, dtype=torch.float64)
    for h in range(heads):
        total, weights = torch.zeros(n, dtype=torch.complex128), torch.zeros(n, dtype=torch.float64)
        for w in range(windows):
            for i in range(length):
                turns = [torch.exp(1j * speed * (j - i)) for j in range(i + 1)]
                scores = [
                    amplitude**2 * (q[w, h, i].conj() * k[w, h, j] * turns[j]).real.sum() * width**-0.5
                    for j in range(i + 1)
                ]
                attention = torch.stack(scores).softmax(0)
                for j in range(i + 1):
                    energy = (q[w, h, i] - q_mean[h]).abs() ** 2 * (k[w, h, j] - k_mean[h]).abs() ** 2
                    total += attention[j] * energy * turns[j]
                    weights += attention[j] * energy
        gain[h] = torch.view_as_real(amplitude**2 * total / weights)
    return gain


def grouped(values: torch.Tensor, groups: int) -> torch.Tensor:
    return values.unflatten(0, (groups, -1)).mean(1)


@pytest.mark.parametrize("share", ["head", "kv_group", "layer"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_means_are_those_of_the_unrotated_queries_and_keys(family, share):
    query, key = layer_0_states(tiny_model(family), IDS)
    model = apply_drope(tiny_model(family), settings("disentangled", share=share))
    run(model, steps=0)
    bias = biases(model)[0].bias
    assert (len(bias.query_mean), len(bias.key_mean)) == {"head": (4, 2), "kv_group": (2, 2), "layer": (1, 1)}[share]
    wanted = grouped(query.mean((0, 2)), len(bias.query_mean)), grouped(key.mean((0, 2)), len(bias.key_mean))
    for got, mean in zip((bias.query_mean, bias.key_mean), wanted, strict=True):
        assert mean.abs().max() > 0.01
        torch.testing.assert_close(got.detach().double(), mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("source", [lambda: tiny_model("llama"), positional_llama])
def test_gain_is_the_mean_rotation_over_what_the_source_attends_to(source):
    """All rows of windows of at most 64 tokens are sampled, as often as each other."""
    ids = random_ids(2, 14)
    model = apply_drope(source(), settings("disentangled"))
    run(model, ids=ids, steps=0)
    bias = biases(model)[0].bias
    expected = expected_gain(*layer_0_states(source(), ids), bias.source.frequencies)
    assert (expected[..., 0] < 0.9).any()
    torch.testing.assert_close(bias.gain.detach().double(), expected, atol=1e-3, rtol=0)


# Families; what stays as it was.


def observers(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if "observe" in vars(module)]


@pytest.mark.parametrize("family", ROTARY)
def test_only_position_parameters_change_in_every_family(family):
    source = tiny_model(family)
    model = apply_drope(tiny_model(family), settings("disentangled"), rope_scale=0.25).train()
    frozen = list(model.parameters())[::2]
    for parameter in frozen:
        parameter.requires_grad_(False)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    before, config = others(model), copy.deepcopy(model.config.to_dict())
    theirs, source_config = copy.deepcopy(source.state_dict()), copy.deepcopy(source.config.to_dict())
    classes = {name: type(module) for name, module in source.named_modules()}
    report = run(model, source, steps=6)
    for layer in report.layers:
        assert layer.end < layer.dropped
        assert layer.start < layer.dropped
    assert all(bias.bias.query_mean.abs().max() > 0 for bias in model.position_biases())
    assert_equal_states(others(model), before)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert all(module.training for module in model.modules())
    assert model.config.to_dict() == config | {"drope_calibrated": True}
    assert {m._initial for m in model.modules() if hasattr(type(m), "_init_scale")} == {0.25}
    assert observers(model) == []
    assert_equal_states(source.state_dict(), theirs)
    assert source.config.to_dict() == source_config
    assert {name: type(module) for name, module in source.named_modules()} == classes
    assert not source.training


def test_calibration_does_not_depend_on_the_strength_of_rope_or_the_mode():
    states = []
    for rope_scale, training in ((0.0, False), (1.0, True)):
        model = apply_drope(tiny_model("llama", attention_dropout=0.5), settings("disentangled"), rope_scale=rope_scale)
        run(model.train(training), steps=3)
        states.append(model.state_dict())
    assert_equal_states(*states)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_calibration_that_stops_at_the_second_layer_leaves_everything_as_it_was(error, monkeypatch):
    model = apply_drope(tiny_model("llama"), settings("disentangled", rank=4), rope_scale=0.5).train()
    before, config, fit = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config.to_dict()), LayerFit.run

    def stop(self: Any, *arguments: Any) -> Any:
        if self.layer.module.layer_idx == 1:
            assert biases(model)[0].bias.query_mean.any()
            raise error
        return fit(self, *arguments)

    monkeypatch.setattr(LayerFit, "run", stop)
    with pytest.raises(error):
        run(model)
    assert_equal_states(model.state_dict(), before)
    assert model.config.to_dict() == config
    assert observers(model) == []
    assert model.training
    assert model.model.rotary_emb._initial == 0.5


@pytest.mark.parametrize(
    "place", ["model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_is_not_finite_is_refused_and_nothing_changes(kind, place):
    model = apply_drope(tiny_model("llama"), settings(kind, **KINDS[kind]))
    with torch.no_grad():
        model.get_submodule(place).weight[IDS[0, 3] if "embed" in place else 0, 0] = math.nan
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".position_bias." in name}
    with pytest.raises(ValueError, match=r"^The .* not finite on this text; look at the source's weights\.$"):
        run(model, output_steps=2)
    after = model.state_dict()
    assert_equal_states({name: after[name] for name in before}, before)
    assert "drope_calibrated" not in model.config.to_dict()


def test_a_model_in_bf16_keeps_its_dtypes():
    model = apply_drope(tiny_model("llama"), settings("disentangled")).to(torch.bfloat16)
    report = run(model, steps=4)
    assert report.mean("end") < report.mean("dropped")
    assert biases(model)[0].bias.query_mean.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_from_the_copy_of_the_code_in_its_folder_is_calibrated_to_the_same(kind, tmp_path):
    """None of its classes is one of this package."""
    ours = apply_drope(tiny_model("llama"), settings(kind, **KINDS[kind]))
    ours.save_pretrained(tmp_path)
    remote = get_class_from_dynamic_module("modeling_drope.DroPELlamaForCausalLM", str(tmp_path))
    theirs = remote.from_pretrained(tmp_path)
    for mine, other in zip(ours.position_biases(), theirs.position_biases(), strict=True):
        assert not isinstance(other.bias, type(mine.bias))
    before = copy.deepcopy(ours.state_dict())
    reports = [run(model, steps=2, output_steps=2) for model in (ours, theirs)]
    assert reports[0].layers == reports[1].layers
    assert reports[0].output_divergence == reports[1].output_divergence
    assert_equal_states(theirs.state_dict(), ours.state_dict())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


# GPT-2: a learned table has no rotation, so the source runs.


@torch.no_grad()
def gpt2() -> Any:
    model = tiny_model("gpt2", attn_implementation="eager")
    model.transformer.wpe.weight.mul_(3)
    return model


@pytest.mark.parametrize(("kind", "steps"), [("table", 0), ("table", 8), ("log", 0), ("log", 8)])
def test_gpt2_is_calibrated_against_the_scores_of_its_source(kind, steps):
    source = gpt2()
    model = apply_drope(gpt2(), settings(kind, **KINDS[kind]))
    before, theirs, classes = others(model), copy.deepcopy(source.state_dict()), [type(m) for m in source.modules()]
    report = run(model, source, steps=steps)
    assert report.mean("start") < report.mean("dropped")
    assert report.mean("end") < report.mean("dropped")
    expected = attention_of_layer_0(source, IDS)
    dropped = attention_of_layer_0(apply_drope(gpt2(), "nope"), IDS)
    assert report.layers[0].dropped == pytest.approx(divergence(expected, dropped), rel=1e-3)
    assert report.layers[0].end == pytest.approx(divergence(expected, attention_of_layer_0(model, IDS)), rel=1e-3)
    assert_equal_states(others(model), before)
    assert_equal_states(source.state_dict(), theirs)
    assert [type(m) for m in source.modules()] == classes
    assert observers(source) == []
    assert "drope_parameters" not in source.config.to_dict()


def test_gpt2_without_its_source_is_refused():
    model = apply_drope(gpt2(), settings("table"))
    with pytest.raises(ValueError, match=r"source has a learned position table; give the source model as well\.$"):
        run(model)


def test_a_gpt2_whose_source_has_another_output_head_is_refused():
    """The weights of the body are the same."""
    sources = [tiny_model("gpt2", tie_word_embeddings=False) for _ in range(2)]
    sources[1].lm_head.weight.data[-1, -1] += 1e-3
    model = apply_drope(tiny_model("gpt2", tie_word_embeddings=False), settings("table", **KINDS["table"]))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"source is not this model's: the weights of its output head differ\.$"):
        run(model, sources[1])
    assert_equal_states(model.state_dict(), before)
    run(model, sources[0], steps=0)


@pytest.mark.parametrize(
    "kind",
    ["table", "log", "linear", "low_rank"],
)
def test_the_descent_never_ends_further_away_than_it_began(kind):
    report = run(apply_drope(gpt2(), settings(kind, **KINDS[kind])), gpt2(), steps=8)
    for layer in report.layers:
        assert layer.end <= layer.start, layer


# Rank: which pairs are kept.


@torch.no_grad()
def concentrated_llama(pairs: list[list[int]]) -> Any:
    """A llama whose mean queries and keys lie in the given pairs of each key/value head."""
    rope = {"rope_type": "default", "rope_theta": 10.0}
    model = tiny_model("llama", attention_bias=True, scale=1.0, rope_parameters=rope)
    generator = torch.Generator().manual_seed(2)
    for layer in model.model.layers:
        for projection, heads in ((layer.self_attn.q_proj, 4), (layer.self_attn.k_proj, 2)):
            bias = projection.bias.view(heads, 8).zero_()
            for head in range(heads):
                for pair in pairs[head * 2 // heads]:
                    bias[head, [pair, pair + 4]] = 1 + torch.rand(2, generator=generator)
    return model


@pytest.mark.parametrize("chosen", [[[1, 3], [0, 2]], [[2, 3], [0, 1]]])
def test_rank_keeps_the_pairs_with_the_most_energy_of_each_key_value_head(chosen):
    model = apply_drope(concentrated_llama(chosen), settings("disentangled", rank=4))
    report = run(model, steps=0)
    for bias in model.position_biases():
        assert bias.bias.pairs.dtype == torch.float32
        assert bias.bias.pairs.tolist() == chosen
    assert report.mean("start") < 0.1 * report.mean("dropped")
    # Pairs without energy in their place would be as good as no bias.
    unlucky = apply_drope(concentrated_llama(chosen), settings("disentangled", rank=4))
    unlucky.load_state_dict(model.state_dict())
    for bias in unlucky.position_biases():
        bias.bias.pairs.copy_(bias.bias.pairs.flip(0))
    stock, ids = concentrated_llama(chosen), random_ids(2, 24)
    good, bad = ((logits(m, ids) - logits(stock, ids)).abs().max() for m in (model, unlucky))
    assert good < 0.2 * bad


def test_low_rank_takes_the_source_frequencies_with_the_most_energy():
    model = apply_drope(concentrated_llama([[1, 2], [1, 2]]), settings("low_rank", rank=4))
    report = run(model, steps=0)
    for bias in model.position_biases():
        assert bias.bias.frequencies.tolist() == pytest.approx([10**-0.25, 10**-0.5])
    assert report.mean("start") < 0.1 * report.mean("dropped")


def test_a_rank_beyond_the_sources_frequencies_leaves_the_rest_at_zero():
    model = apply_drope(positional_llama(), settings("low_rank", rank=16))
    run(model, steps=0)
    bias = biases(model)[0].bias
    assert (bias.alpha[:, 4:] == 0).all()
    assert (bias.alpha[:, :4].abs().amax(0) > 0).all()
    assert bias.frequencies[:4].tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])


# Keys that a layer does not see.


def table_by_distance(model: Any, layer: int) -> torch.Tensor:
    return biases(model)[layer].bias.values(-torch.arange(24)).detach()


def test_keys_outside_a_sliding_window_carry_no_weight():
    states = {}
    for steps in (0, 8):
        model = apply_drope(tiny_model("mistral", sliding_window=6), settings("table", max_distance=24))
        report = run(model, steps=steps)
        assert report.mean("end") < report.mean("dropped")
        states[steps] = [table_by_distance(model, layer) for layer in range(2)]
    for tables in states.values():
        for table in tables:
            assert table[:, :6].std(-1).min() > 1e-3
            # No query sees as far: all have the value of the furthest that one does see, and no gradient.
            assert torch.equal(table[:, 6:], table[:, 6:7].expand(-1, 18))
    assert torch.equal(states[0][0][:, 6:], states[0][0][:, 5:6].expand(-1, 18))
    assert torch.equal(states[8][0][:, 6:], states[0][0][:, 6:])
    if report.layers[0].end < report.layers[0].start:
        assert not torch.equal(states[8][0][:, :6], states[0][0][:, :6])
    full = apply_drope(tiny_model("mistral"), settings("table", max_distance=24))
    run(full, steps=0)
    assert table_by_distance(full, 0)[:, 6:].std(-1).min() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_hidden_keys_change_nothing(dtype):
    """A window of 6, and the first eight keys hidden from all but themselves: what they hold does not matter."""
    rows, columns = torch.arange(24)[:, None], torch.arange(24)
    visible = (columns <= rows) & (columns > rows - 6) & ((columns >= 8) | (columns == rows))
    mask = visible if dtype == torch.bool else torch.where(visible, 0.0, torch.finfo(dtype).min)
    torch.manual_seed(0)
    query, key, far = torch.randn(2, 4, 24, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 2, 8, 8)
    changed = torch.cat([9 * far, key[:, :, 8:]], 2)

    def table(key: torch.Tensor, mask: Any, steps: int) -> tuple[Any, torch.Tensor]:
        model = apply_drope(tiny_model("llama"), settings("table", max_distance=24))
        attention = model.model.layers[0].self_attn
        torch.nn.init.zeros_(attention.position_bias.bias.weight)
        pairs = apply_drope(tiny_model("llama"), "disentangled").model.rotary_emb.pairs[None]
        fit = LayerFit(
            LayerStates(attention, attention.position_bias, None, query, key, query, mask, None, 8**-0.5),
            pairs,
            None,
            torch.Generator(),
        )
        with torch.no_grad():
            return fit.run(steps, 0.1), attention.position_bias.bias.weight

    for steps in (0, 3):
        (report, weight), (other, same) = (table(k, mask[None, None], steps) for k in (key, changed))
        assert report.dropped > 0.01
        torch.testing.assert_close(other[1:4], report[1:4], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(same, weight, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(table(key, None, steps)[1], table(changed, None, steps)[1], atol=1e-2)


def test_keys_outside_the_models_own_window_carry_no_weight():
    model = apply_drope(tiny_model("llama"), settings("table", None, {"window": 6}, max_distance=24))
    run(model, steps=0)
    table = table_by_distance(model, 0)
    assert torch.equal(table[:, 6:], table[:, 5:6].expand(-1, 18))


@pytest.mark.parametrize("kind", ["table", "disentangled"])
def test_the_report_counts_an_attention_scale(kind):
    model = apply_drope(positional_llama(), settings(kind, None, {"attention_scale": {"factor": 1.5}}, **KINDS[kind]))
    report = run(model, steps=4)
    theirs, ours = (attention_of_layer_0(m, IDS) for m in (positional_llama(), model))
    assert report.layers[0].end == pytest.approx(divergence(theirs, ours), rel=1e-3)


def test_layers_that_keep_rope_get_no_bias_on_top_of_it():
    model = apply_drope(positional_llama(), settings("low_rank", None, {"rope_layers": [0]}, rank=8))
    run(model, steps=0)
    bias = biases(model)[0].bias
    assert bias.values(-torch.arange(24)).std(-1).max() < 1e-4


# Texts and refusals.


def words(count: int, seed: int = 0) -> str:
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(3, VOCAB)}" for _ in range(count))


def test_strings_are_cut_into_whole_windows():
    texts = [words(50, 1), words(7, 2), words(20, 3)]
    model = apply_drope(tiny_model("llama"), settings("disentangled"))
    report = run(model, ids=texts, tokenizer=tiny_tokenizer(), length=16, steps=2)
    assert (report.windows, report.length) == (4, 16)
    ids = [[int(word[1:]) for word in text.split()] for text in texts]
    rows = torch.tensor([ids[0][:16], ids[0][16:32], ids[0][32:48], ids[2][:16]])
    same = apply_drope(tiny_model("llama"), settings("disentangled"))
    run(same, ids=rows, steps=2)
    assert_equal_states(model.state_dict(), same.state_dict())


def test_strings_make_windows_of_the_context_length_by_default():
    model = apply_drope(tiny_model("llama"), settings("disentangled"))
    assert run(model, ids=[words(70)], tokenizer=tiny_tokenizer(), steps=0).length == 64


def test_windows_of_a_longrope_source_end_where_it_turns_to_other_frequencies(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    stock = tiny_model("phi3", original_max_position_embeddings=16, rope_parameters=rope)
    model = apply_drope(copy.deepcopy(stock), settings("disentangled"))
    before, strings = copy.deepcopy(model.state_dict()), {"ids": [words(40)], "tokenizer": tiny_tokenizer()}
    for given in ({"ids": random_ids(1, 17)}, {**strings, "length": 17}):
        with pytest.raises(ValueError, match=r"^Windows of 17 tokens are longer than 16, the source's context\.$"):
            run(model, **given)
    assert_equal_states(model.state_dict(), before)
    assert run(model, **strings, steps=0).length == 16
    older = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    older["rope_scaling"] = {**rope, "type": rope["rope_type"]}
    for config in (stock.config.to_dict(), model.config.to_dict(), older):
        assert checkpoint_windows(tiny_tokenizer(), config, [write_text(tmp_path)], 128, None).shape == (8, 16)
        with pytest.raises(ValueError, match=r"length is 17; it has to be from 2 to 16, the source's context"):
            checkpoint_windows(tiny_tokenizer(), config, [write_text(tmp_path)], 64, 17)


@pytest.mark.parametrize(
    ("texts", "arguments", "sentence"),
    [
        (torch.zeros(8, dtype=torch.long), {}, r"texts has shape \(8,\); token ids have to be \(windows, length\)\."),
        (torch.zeros(2, 1, dtype=torch.long), {}, r"texts has shape \(2, 1\)"),
        (torch.zeros(0, 8, dtype=torch.long), {}, r"shape \(0, 8\)"),
        (random_ids(1, 65), {}, r"Windows of 65 tokens are longer than 64, the source's context\."),
        (torch.full((1, 8), VOCAB), {}, rf"The text holds token {VOCAB}, but the model knows only {VOCAB}\."),
        (torch.full((1, 8), -1), {}, r"token -1"),
        (["w3 w4"], {}, r"texts are strings and there is no tokenizer; pass tokenizer=, or token ids\."),
        (
            ["w3 w4", "w5"],
            {"tokenizer": tiny_tokenizer(), "length": 8},
            r"No text is as long as one window of 8 tokens; the longest has 2\.",
        ),
        ([], {"tokenizer": tiny_tokenizer(), "length": 8}, r"the longest has 0\."),
        ([words(80)], {"tokenizer": tiny_tokenizer(), "length": 65}, r"Windows of 65 tokens are longer"),
        ([words(80)], {"tokenizer": tiny_tokenizer(), "length": 0}, r"length is 0; it has to be"),
        (IDS, {"steps": -1}, r"steps is -1; it has to be at least 0\."),
    ],
)
def test_unusable_texts_are_refused_and_nothing_changes(texts, arguments, sentence):
    model = apply_drope(tiny_model("llama"), settings("disentangled"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=sentence):
        run(model, None, texts, **arguments)
    assert_equal_states(model.state_dict(), before)


def test_models_without_anything_to_calibrate_are_refused():
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not a converted model; convert it with apply_drope"):
        run(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"has no position bias to calibrate; convert it with one, such as 'disent"):
        run(apply_drope(tiny_model("llama"), "nope"))
    with pytest.raises(ValueError, match=r"bias has no parameters to calibrate; set learned=True or choose another"):
        run(apply_drope(tiny_model("llama"), "alibi"))


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_a_model_that_predicts_no_tokens_is_calibrated_towards_attention_alone(head):
    model, causal = (apply_drope(tiny_model("llama", kind), settings("disentangled")) for kind in (head, "ForCausalLM"))
    before, config = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config.to_dict())
    for given in ({}, {"output_steps": 2}):
        with pytest.raises(ValueError, match=r"predicts no next tokens to calibrate on; give output_steps=0, or"):
            calibrate(model, None, IDS, progress=False, **given)
    assert_equal_states(model.state_dict(), before)
    assert model.config.to_dict() == config
    assert run(model, steps=2).layers == run(causal, steps=2).layers
    assert_equal_states(model.base_model.state_dict(), causal.base_model.state_dict())


def test_a_model_with_adapters_is_refused():
    peft = pytest.importorskip("peft")
    model = apply_drope(tiny_model("llama"), settings("disentangled"))
    adapted = peft.get_peft_model(model, lora_config(model, 2))
    before = copy.deepcopy(adapted.state_dict())
    for each in (adapted, model):
        with pytest.raises(ValueError, match=r"^This model has adapters; calibrate it before they are added\.$"):
            run(each)
    assert_equal_states(adapted.state_dict(), before)


def test_a_source_that_is_not_the_models_is_refused():
    model = apply_drope(tiny_model("llama"), settings("disentangled"))
    before = copy.deepcopy(model.state_dict())
    trained = tiny_model("llama")
    trained.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3
    shorter = tiny_model("llama", num_hidden_layers=1)
    shorter.load_state_dict(tiny_model("llama").state_dict(), strict=False)
    for source, sentence in (
        (tiny_model("mistral"), r"The source is a mistral model, which does not convert to llama_drope\."),
        (model, r"The source is a llama_drope model, which does not convert to llama_drope\."),
        (tiny_model("llama", vocab_size=99), r"embed_tokens.weight is \(99, 32\) there and \(97, 32\) here\."),
        (shorter, r"layers\.1\..* is absent there and \(.*\) here\."),
        (tiny_model("llama", seed=1), r"the weights of embed_tokens\.weight differ; calibrate before training"),
        (trained, r"the weights of layers\.1\.mlp\.up_proj\.weight differ"),
    ):
        with pytest.raises(ValueError, match=sentence) as raised:
            run(model, source)
        assert str(raised.value).count("\n") == 0
    assert_equal_states(model.state_dict(), before)


# Checkpoint folders.

SIZES: dict[str, Any] = {"tokens": 96, "length": 24, "steps": 3, "output_steps": 0, "progress": False}


def convert(folder: Path, preset: str = "disentangled", family: str = "llama", **overrides: Any) -> tuple[Path, Path]:
    """A source folder and what it was converted to."""
    write_source(folder / "src", family, **overrides)
    convert_checkpoint(plan_conversion(folder / "src", preset), folder / "dst")
    return folder / "src", folder / "dst"


def write_text(folder: Path, count: int = 400, name: str = "text.txt") -> Path:
    (folder / name).write_text(words(count))
    return folder / name


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def assert_only_position_changed(before: dict[str, bytes], old: dict[str, torch.Tensor], folder: Path) -> None:
    after, new = contents(folder), tensors(folder)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    home = {name for name in changed if name.endswith(".safetensors")}
    assert changed - home == {RECORD, "README.md"}
    assert home
    assert set(new) == set(old)
    for name, tensor in old.items():
        assert new[name].dtype == tensor.dtype
        if ".position_bias." not in name:
            assert torch.equal(new[name], tensor), name
    assert any(not torch.equal(new[name], tensor) for name, tensor in old.items())


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        ("llama", "disentangled"),
        ("llama", "gated"),
        ("gpt_neox", "gated"),
        ("gptj", "disentangled"),
        ("gpt2", "simple"),
    ],
)
def test_a_folder_is_calibrated_in_place_to_what_calibration_in_memory_gives(family, preset, tmp_path):
    src, dst = convert(tmp_path, preset, family)
    text = write_text(tmp_path)
    before, old, sources = contents(dst), tensors(dst), contents(src)
    model = AutoModelForCausalLM.from_pretrained(dst)
    ids = checkpoint_windows(AutoTokenizer.from_pretrained(dst), model.config.to_dict(), [text], 96, 24)
    assert ids.shape == (4, 24)
    source = AutoModelForCausalLM.from_pretrained(src) if family == "gpt2" else None
    in_memory = run(model, source, ids, steps=3)
    report = calibrate_checkpoint(dst, src, [text], **SIZES)
    assert report.layers == in_memory.layers
    assert report.mean("end") < report.mean("dropped")
    assert_equal_states(AutoModelForCausalLM.from_pretrained(dst).state_dict(), model.state_dict())
    assert_only_position_changed(before, old, dst)
    assert contents(src) == sources
    record = json.loads((dst / RECORD).read_text())
    assert {**record, "calibration": None} == {**json.loads(before[RECORD]), "calibration": None}
    kept = record["calibration"]
    assert kept["text_sha256"] == {"text.txt": hashlib.sha256(text.read_bytes()).hexdigest()}
    assert (kept["windows"], kept["length"], kept["steps"], len(kept["layers"])) == (4, 24, 3, 2)


def test_a_calibrated_folder_is_calibrated_again_to_the_same(tmp_path):
    src, dst = convert(tmp_path)
    text = write_text(tmp_path)
    calibrate_checkpoint(dst, src, [text], **SIZES)
    once = tensors(dst)
    calibrate_checkpoint(dst, src, [text], **SIZES)
    assert_equal_states(tensors(dst), once)


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_folders_saved_anew_and_sharded_sources_are_calibrated(shard, tmp_path):
    """A model saved by Transformers has its position tensors among the others."""
    src, dst = convert(tmp_path, max_shard_size=shard)
    again = tmp_path / "again"
    AutoModelForCausalLM.from_pretrained(dst).save_pretrained(again, max_shard_size=shard)
    tiny_tokenizer().save_pretrained(again)
    text = write_text(tmp_path)
    for folder in (dst, again):
        before, old = contents(folder), tensors(folder)
        calibrate_checkpoint(folder, src, [text], **SIZES)
        assert_only_position_changed(before, old, folder)
    assert_equal_states(tensors(again), tensors(dst))
    assert "calibration" in json.loads((again / RECORD).read_text())


def bin_source(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_a_bin_source_gives_the_same_as_safetensors(tmp_path):
    text, results = write_text(tmp_path), []
    for kind in ("safetensors", "bin"):
        (tmp_path / kind).mkdir()
        write_source(tmp_path / kind / "src")
        if kind == "bin":
            bin_source(tmp_path / kind / "src")
        dst = tmp_path / kind / "dst"
        convert_checkpoint(plan_conversion(tmp_path / kind / "src", "disentangled"), dst)
        before, old = contents(dst), tensors(dst)
        calibrate_checkpoint(dst, tmp_path / kind / "src", [text], **SIZES)
        assert_only_position_changed(before, old, dst)
        results.append(tensors(dst))
    assert_equal_states(*results)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"seed": 1}, r"src2 is not the source of .*dst: its weights are not those that the conversion recorded\."),
        ({"intermediate_size": 40}, r"is not the source of .*: .*proj\.weight is \[.*40.*\] there and \[.*48.*\] here"),
        ({"family": "mistral"}, r"src2 is a mistral, which does not convert to llama_drope\."),
    ],
)
def test_another_source_folder_is_refused_and_nothing_is_written(other, sentence, tmp_path):
    _, dst = convert(tmp_path)
    write_source(tmp_path / "src2", **other)
    text, before = write_text(tmp_path), contents(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        calibrate_checkpoint(dst, tmp_path / "src2", [text], **SIZES)
    assert contents(tmp_path) == before


def test_another_source_is_noticed_without_a_record(tmp_path):
    _, dst = convert(tmp_path)
    (dst / RECORD).unlink()
    write_source(tmp_path / "src2", seed=1)
    text, before = write_text(tmp_path), contents(tmp_path)
    with pytest.raises(ValueError, match=r"weights of .*dst are not those of .*src2 any more"):
        calibrate_checkpoint(dst, tmp_path / "src2", [text], **SIZES)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "weights",
    ["safetensors", "bin"],
)
def test_a_folder_that_was_trained_since_is_refused(weights, tmp_path):
    write_source(tmp_path / "src")
    if weights == "bin":
        bin_source(tmp_path / "src")
    convert_checkpoint(plan_conversion(tmp_path / "src", "disentangled"), tmp_path / "dst")
    path = next(path for path in (tmp_path / "dst").glob("*.safetensors") if "model.norm.weight" in load_file(path))
    state = load_file(path)
    state["model.norm.weight"][-1] += 1e-3
    save_file(state, path, metadata={"format": "pt"})
    text, before = write_text(tmp_path), contents(tmp_path)
    with pytest.raises(
        ValueError, match=r"are not those of .*src any more; calibrate before training, or convert anew"
    ):
        calibrate_checkpoint(tmp_path / "dst", tmp_path / "src", [text], **SIZES)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tokens": 1}, r"tokens is 1; it has to be at least 2\."),
        (
            {"length": 65, "tokens": 128},
            r"length is 65; it has to be from 2 to 64, the source's context or all the tok",
        ),
        ({"length": 1}, r"length is 1; it has to be from 2 to 64"),
        ({"length": 24, "tokens": 20}, r"length is 24; it has to be from 2 to 20"),
        ({"tokens": 4800}, r"The text has 400 tokens, too few for 200 windows of 24; give more text"),
        ({"steps": -1}, r"steps is -1"),
    ],
)
def test_unusable_arguments_for_a_folder_are_refused(arguments, sentence, tmp_path):
    src, dst = convert(tmp_path)
    text, before = write_text(tmp_path), contents(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        calibrate_checkpoint(dst, src, [text], **{**SIZES, **arguments})
    assert contents(tmp_path) == before


def test_unusable_folders_are_refused(tmp_path):
    src, dst = convert(tmp_path, "nope")
    text = write_text(tmp_path)
    with pytest.raises(ValueError, match=r"dst has no position bias to calibrate; convert its source with one"):
        calibrate_checkpoint(dst, src, [text], **SIZES)
    with pytest.raises(ValueError, match=r"src is not a converted checkpoint; convert it first: hf-drope convert"):
        calibrate_checkpoint(src, src, [text], **SIZES)
    with pytest.raises(ValueError, match=r"is not a local folder"):
        calibrate_checkpoint(tmp_path / "none", src, [text], **SIZES)
    edit_json(dst / "config.json", drope_parameters=DroPEParameters.preset("disentangled").to_dict())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (dst / name).unlink()
    with pytest.raises(ValueError, match=r"dst has no tokenizer that loads: "):
        calibrate_checkpoint(dst, src, [text], **SIZES)


def failing_replace(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """os.replace fails for files whose name ends in `name`."""
    replace = os.replace

    def fail(source: Any, target: Any, **arguments: Any) -> None:
        if str(target).endswith(name):
            raise OSError("no space left")
        replace(source, target, **arguments)

    monkeypatch.setattr(os, "replace", fail)


def test_a_failure_while_weights_are_written_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    src, dst = convert(tmp_path)
    text, before = write_text(tmp_path), contents(tmp_path)
    failing_replace(monkeypatch, ".safetensors")
    with pytest.raises(OSError, match="no space left"):
        calibrate_checkpoint(dst, src, [text], **SIZES)
    assert contents(tmp_path) == before


def test_a_failure_while_the_record_is_written_leaves_a_folder_that_loads(tmp_path, monkeypatch):
    src, dst = convert(tmp_path)
    text, before = write_text(tmp_path), contents(dst)
    failing_replace(monkeypatch, RECORD)
    with pytest.raises(OSError, match="no space left"):
        calibrate_checkpoint(dst, src, [text], **SIZES)
    assert (dst / RECORD).read_bytes() == before[RECORD]
    AutoModelForCausalLM.from_pretrained(dst)
    assert set(contents(dst)) == set(before)


# The command line.

FLAGS = ("--tokens", "96", "--length", "24", "--output-steps", "0", "--steps", "2")


def cli(capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_calibrate_command(capsys, tmp_path):
    src, dst = convert(tmp_path)
    text, old = write_text(tmp_path), tensors(dst)
    code, out, err = cli(capsys, "calibrate", dst, "--source", src, "--text", text, *FLAGS, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["bias"], found["windows"], found["length"], found["steps"]) == ("disentangled", 4, 24, 2)
    assert found["layers"][0]["end"] < found["layers"][0]["dropped"]
    assert any(not torch.equal(old[name], tensor) for name, tensor in tensors(dst).items())
    code, out, _ = cli(capsys, "calibrate", dst, "--source", src, "--text", text, *FLAGS)
    assert code == 0
    assert "calibrated disentangled in 2 layers on 4 × 24 tokens" in out
    assert "after 2 descent steps" in out


@pytest.mark.parametrize("as_json", [True, False])
def test_convert_and_calibrate_in_one_go_is_both_after_each_other(as_json, capsys, tmp_path):
    write_source(tmp_path / "src")
    text = write_text(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    preset = ("--preset", "disentangled")
    flags = [*FLAGS, *(["--json"] if as_json else [])]
    code, out, err = cli(capsys, "convert", tmp_path / "src", one, *preset, "--calibrate", "--text", text, *flags)
    assert code == 0, err
    if as_json:
        found = json.loads(out)
        assert found["calibration"]["windows"] == 4
        assert found["drope_parameters"]["position_bias"]["type"] == "disentangled"
    else:
        assert "calibrated disentangled in 2 layers" in out
        assert f"written to {one}" in out
    cli(capsys, "convert", tmp_path / "src", two, *preset)
    cli(capsys, "calibrate", two, "--source", tmp_path / "src", "--text", text, *FLAGS)
    assert_equal_states(tensors(one), tensors(two))
    assert set(contents(one)) == set(contents(two))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--preset", "disentangled", "--calibrate"], "Calibration needs text; give it with --text FILE."),
        (["--preset", "disentangled", "--calibrate", *FLAGS], "Calibration needs text"),
        (["--calibrate", "--text", "{short}"], "There is no position bias to calibrate; convert with one"),
        (
            ["--preset", "alibi", "--calibrate", "--text", "{long}", *FLAGS],
            "This bias has no parameters to calibrate; set learned",
        ),
        (
            ["--preset", "simple", "--calibrate", "--text", "{short}", *FLAGS],
            "too few for 4 windows of 24; give more text, or fewer tokens.",
        ),
        (["--preset", "simple", "--calibrate", "--text", "{missing}"], "There is no text file"),
        (["--preset", "simple", "--calibrate", "--text", "{long}", "--length", "65"], "length is 65"),
        (["--preset", "simple", "--calibrate", "--text", "{long}", *FLAGS[:-1], "-1"], "steps is -1"),
        (["--preset", "simple", "--text", "{long}"], "belong to --calibrate; give that as well."),
        (["--preset", "simple", "--steps", "0"], "belong to --calibrate; give that as well."),
    ],
)
def test_a_conversion_that_cannot_be_calibrated_writes_nothing(arguments, sentence, capsys, tmp_path):
    write_source(tmp_path / "src")
    files = {"{short}": write_text(tmp_path, 90, "short.txt"), "{long}": write_text(tmp_path, 400, "long.txt")}
    files["{missing}"] = tmp_path / "missing.txt"
    before = contents(tmp_path)
    given = [files.get(argument, argument) for argument in arguments]
    code, out, err = cli(capsys, "convert", tmp_path / "src", tmp_path / "dst", *given)
    assert code == 2
    message = err.splitlines()[-1]
    assert message.startswith("hf-drope convert: ")
    assert sentence in message
    assert "Traceback" not in out + err
    assert contents(tmp_path) == before
    assert not (tmp_path / "dst").exists()


def test_a_dry_run_checks_the_calibration_and_writes_nothing(capsys, tmp_path):
    write_source(tmp_path / "src")
    text, before = write_text(tmp_path), contents(tmp_path)
    convert_flags = ("convert", tmp_path / "src", tmp_path / "dst", "--preset", "simple", "--calibrate", "--dry-run")
    code, out, _ = cli(capsys, *convert_flags, "--text", text, *FLAGS)
    assert (code, contents(tmp_path)) == (0, before)
    assert "nothing written" in out
    code, _, err = cli(capsys, *convert_flags, "--text", text, "--length", "65")
    assert code == 2
    assert "length is 65" in err


def test_errors_of_the_calibrate_command_exit_with_two(capsys, tmp_path):
    src, dst = convert(tmp_path)
    write_source(tmp_path / "src2", seed=1)
    text, before = write_text(tmp_path), contents(tmp_path)
    for arguments, sentence in (
        ((dst, "--source", tmp_path / "src2", "--text", text, *FLAGS), "is not the source of"),
        ((src, "--source", src, "--text", text, *FLAGS), "is not a converted checkpoint"),
        ((dst, "--source", src, "--text", tmp_path / "none.txt"), "There is no text file"),
    ):
        code, _, err = cli(capsys, "calibrate", *arguments)
        assert code == 2
        assert sentence in err
        assert err.splitlines()[-1].startswith("hf-drope calibrate: ")
    assert contents(tmp_path) == before

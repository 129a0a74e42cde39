"""The near and far field of a bias by distance against dense attention in float64, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attention import build, logits, stepwise
from tiny import random_ids
from torch.profiler import profile

from hf_drope import biased_attention
from hf_drope.near_far_attention import chebyshev_nodes, fields_of, interpolation, near_far_attention
from hf_drope.position_bias import LinearBias, LogBias, TableBias

HEADS, KEY_HEADS, WIDTH, BLOCK, SCALING = 4, 2, 16, 32, 0.25
BIASES = {
    "table": lambda: TableBias(HEADS, max_distance=24, init_range=1.0),
    "table of one distance": lambda: TableBias(HEADS, max_distance=1, init_range=1.0),
    "shared table": lambda: TableBias(HEADS, max_distance=50, init_range=1.0, num_groups=2),
    "buckets": lambda: TableBias(HEADS, max_distance=40, num_buckets=8, init_range=1.0),
    "log": lambda: LogBias(HEADS, init="kerple"),
    "log upwards": lambda: LogBias(HEADS, sign=1, num_groups=1),
    "linear": lambda: LinearBias(HEADS, learned=True),
}
FACTORS: dict[str, Any] = {"no gate": None, "head": (1, HEADS, 1, 1), "query": (2, HEADS, None, 1)}


def reference(bias: Any, query: Any, key: Any, value: Any, factor: Any) -> torch.Tensor:
    """softmax(q·k·scaling + factor · R(j − i)) v, causal, the queries the last of the positions."""
    queries, keys = query.shape[2], key.shape[2]
    offset = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    values = bias.values(offset.flatten()).unflatten(-1, offset.shape)[None]
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * SCALING + (values if factor is None else values * factor)
    return scores.masked_fill(offset > 0, -torch.inf).softmax(-1) @ value


def inputs(queries: int, keys: int, factor: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    shapes: list[Any] = [(2, HEADS, queries, WIDTH), (2, KEY_HEADS, keys, WIDTH), (2, KEY_HEADS, keys, WIDTH)]
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    if factor is None:
        return [*made, None]
    shape = [queries if size is None else size for size in factor]
    return [*made, torch.rand(shape, generator=generator).requires_grad_()]


def gradients(output: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    return list(torch.autograd.grad((output * weight.to(output.dtype)).sum(), tensors))


def assert_equal(bias: Any, given: list[Any], tolerance: float) -> None:
    *states, factor = given
    moving = [x for x in given if x is not None]
    output = near_far_attention(
        *states, fields_of(bias, states[1].shape[2], BLOCK, torch.device("cpu")), factor, SCALING
    )
    got = gradients(output, [*moving, *bias.parameters()])
    double = [None if x is None else x.detach().double().requires_grad_() for x in given]
    expected = reference(bias.double(), *double)
    wanted = gradients(expected, [*(x for x in double if x is not None), *bias.parameters()])
    for ours, theirs in zip([output, *got], [expected, *wanted], strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("kind", BIASES)
def test_both_fields_together_are_dense_attention(kind, factor):
    torch.manual_seed(0)
    assert_equal(BIASES[kind](), inputs(150, 150, FACTORS[factor]), 1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (32, 32), (33, 33), (64, 150), (40, 41), (150, 300)])
@pytest.mark.parametrize("kind", ["table", "log"])
def test_lengths_and_offsets_that_fill_no_block(kind, queries, keys):
    torch.manual_seed(0)
    assert_equal(BIASES[kind](), inputs(queries, keys, None), 1e-5)


@pytest.mark.parametrize("kind", ["table", "log"])
def test_half_precision_is_near_dense_attention(kind):
    torch.manual_seed(0)
    assert_equal(BIASES[kind](), inputs(150, 150, None, torch.bfloat16), 2e-2)


@pytest.mark.parametrize("slope", [1e-2, 1.0, 1e3])
def test_interpolation_of_a_logarithm_is_exact_to_rounding(slope):
    nodes = chebyshev_nodes(8, 128)
    places, start = torch.arange(128).double(), torch.arange(128, 100_000, 997).double()[:, None]
    exact = torch.log1p(slope * (start + places))
    found = torch.log1p(slope * (start + nodes)) @ interpolation(nodes, 128).double().T
    assert (found - exact).abs().max() < 3e-6


@pytest.mark.parametrize("gate", [None, "head", "query"])
@pytest.mark.parametrize("kind", ["table", "log", "linear"])
def test_a_model_takes_this_way_and_agrees_with_eager(kind, gate, monkeypatch):
    monkeypatch.setattr(biased_attention, "NEAR_FAR_BLOCK", 16)
    settings = {"position_bias": {"type": kind}, "gate": gate and {"type": gate}}
    settings["position_bias"] |= {"max_distance": 12} if kind == "table" else {}
    settings["position_bias"] |= {"learned": True} if kind == "linear" else {}
    ids, results = random_ids(2, 50), {}
    for backend in ("sdpa", "eager"):
        model = build(settings, backend=backend)
        with profile() as trace:
            loss = model(ids, labels=ids).loss
        taken = {event.key for event in trace.key_averages()}
        assert ("_NearFar" in taken) == (backend == "sdpa")
        results[backend] = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    for ours, theirs in zip(results["sdpa"], results["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["table", "log"])
def test_chunked_prefill_equals_full_forward(kind, monkeypatch):
    monkeypatch.setattr(biased_attention, "NEAR_FAR_BLOCK", 8)
    model, ids = build({"position_bias": {"type": kind}}), random_ids(1, 60)
    torch.testing.assert_close(stepwise(model, ids, (20, 37)), logits(model, ids), atol=1e-5, rtol=1e-4)


def test_autocast_takes_this_way(monkeypatch):
    monkeypatch.setattr(biased_attention, "NEAR_FAR_BLOCK", 16)
    model, ids = build({"position_bias": {"type": "log"}}), random_ids(2, 50)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - model(ids, labels=ids).loss) < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters())

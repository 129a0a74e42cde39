"""The kernel for biases and wide heads on the CPU against dense attention in float64, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attention import build, logits, stepwise
from tiny import random_ids
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from hf_drope import biased_attention, streamed_attention

HEADS, KEY_HEADS, WIDTH, SCALING, TEMPERATURE = 4, 2, 16, 0.25, 0.7
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture
def several_blocks(monkeypatch):
    monkeypatch.setattr(streamed_attention, "_ROWS", 16)
    monkeypatch.setattr(streamed_attention, "_SCORES", 1 << 8)
    monkeypatch.setattr(streamed_attention, "_MOST", 1 << 10)
    monkeypatch.setattr(streamed_attention, "_LEAST", 4)
    monkeypatch.setattr(streamed_attention, "_SHAPES", 4)
    monkeypatch.setattr(streamed_attention, "_SMALL", 1)
    monkeypatch.setattr(streamed_attention, "_LARGE", 1)


def make_mask(kind: str | None, queries: int, keys: int) -> Any:
    if kind is None:
        return None
    seen = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(5)) > 0.3
    seen[..., 0] = True
    return seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, LOWEST)


def reference(query: Any, key: Any, value: Any, row: Any, factor: Any, gate: Any, mask: Any, causal: bool) -> Any:
    queries, keys = query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * SCALING
    offset = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    bias = row[:, offset + keys - 1][None]
    if gate == "score":
        bias = bias * (scores / TEMPERATURE).sigmoid()
    elif factor is not None:
        bias = bias * factor
    hidden = offset > 0 if causal else torch.zeros_like(offset, dtype=torch.bool)
    if mask is not None:
        hidden = hidden | ~(mask if mask.dtype == torch.bool else mask == 0)
    return (scores + bias).masked_fill(hidden, -torch.inf).softmax(-1) @ value


def check(
    queries: int, keys: int, gate: str | None, kind: str | None, causal: bool, dtype: Any, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes: list[Any] = [(2, HEADS, queries, WIDTH), (2, KEY_HEADS, keys, WIDTH), (2, KEY_HEADS, keys, WIDTH)]
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    given.append(torch.randn(HEADS, queries + keys - 1, generator=generator))
    if gate in ("head", "query"):
        shape = (1, HEADS, 1, 1) if gate == "head" else (2, HEADS, queries, 1)
        given.append(torch.rand(shape, generator=generator))
    given = [x.requires_grad_() for x in given]
    mask = make_mask(kind, queries, keys)
    output = streamed_attention.streamed_attention(
        *given[:3],
        scaling=SCALING,
        row=given[3],
        factor=given[4] if len(given) > 4 else None,
        temperature=torch.tensor(TEMPERATURE) if gate == "score" else None,
        mask=mask,
        causal=causal,
    )
    double = [x.detach().double().requires_grad_() for x in given]
    expected = reference(*double[:4], double[4] if len(given) > 4 else None, gate, mask, causal)
    weight = torch.randn(expected.shape, generator=generator)
    got = [output, *torch.autograd.grad((output * weight.to(dtype)).sum(), given)]
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), double)]
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0)


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("mask", [None, "bool"])
@pytest.mark.parametrize("temperature", [None, TEMPERATURE])
def test_a_bias_may_be_a_product_and_values_narrow(temperature, mask):
    generator = torch.Generator().manual_seed(3)
    shapes = [
        (2, HEADS, 70, 24),
        (2, KEY_HEADS, 70, 24),
        (2, KEY_HEADS, 70, 8),
        (2, HEADS, 70, 5),
        (2, KEY_HEADS, 70, 5),
    ]
    given = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    gate = None if temperature is None else torch.tensor(temperature)
    seen = make_mask(mask, 70, 70)
    query, key, value, a, b = given
    output = streamed_attention.streamed_attention(
        query, key, value, scaling=SCALING, product=(a, b), temperature=gate, mask=seen
    )
    double = [x.detach().double().requires_grad_() for x in given]
    query, key, value, a, b = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in double)
    scores, bias = query @ key.transpose(-1, -2) * SCALING, a @ b.transpose(-1, -2)
    scores = scores + (bias if temperature is None else bias * (scores / temperature).sigmoid())
    hidden = torch.ones(70, 70, dtype=torch.bool).triu(1)
    hidden = hidden if seen is None else hidden | ~seen
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    weight = torch.randn(expected.shape, generator=generator)
    got = [output, *torch.autograd.grad((output * weight).sum(), given)]
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), double)]
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1.0)


def test_without_the_products_of_onednn_it_is_the_same(monkeypatch):
    monkeypatch.setattr(streamed_attention, "_linear", None)
    check(70, 90, "score", "bool", True, torch.float32, 1e-5)


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("half", [True, False])
def test_half_precision_with_and_without_instructions_for_it(half, monkeypatch):
    monkeypatch.setattr(streamed_attention, "cpu_multiplies_bf16", lambda: half)
    check(70, 70, "query", None, True, torch.bfloat16, 2e-2)


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("mask", [None, "bool", "additive"])
@pytest.mark.parametrize("gate", [None, "head", "query", "score"])
def test_the_stream_is_dense_attention(gate, mask):
    check(70, 70, gate, mask, True, torch.float32, 1e-5)


def cut(query: Any, key: Any, mask: Any = None) -> Any:
    """The stream of plain attention, its output, and how many keys each part of it has."""
    stream = streamed_attention._Stream(query, key, key, None, None, None, None, None, mask, mask is None, SCALING)
    parts = [[part.keys for part in block.parts(stream.part)] for block in stream.blocks()]
    return stream.output(), parts


@pytest.mark.parametrize("kind", [None, "bool", "additive"])
def test_keys_are_cut_and_queries_that_see_nothing_see_all_alike(kind, request):
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(2, heads, 70, WIDTH, generator=generator) for heads in (HEADS, KEY_HEADS))
    mask = make_mask(kind, 70, 70)
    if mask is not None:
        mask[1, :, 5] = False if kind == "bool" else LOWEST
    whole, parts = cut(query, key, mask)
    assert {len(keys) for keys in parts} == {1}
    request.getfixturevalue("several_blocks")
    output, parts = cut(query, key, mask)
    assert max(map(len, parts)) > 2
    for keys in parts:
        assert [part.start for part in keys] == [0, *(part.stop for part in keys[:-1])]
    torch.testing.assert_close(output, whole, atol=1e-6, rtol=1e-5)
    if mask is not None:
        average = key.repeat_interleave(HEADS // KEY_HEADS, 1).mean(2)
        torch.testing.assert_close(output[1, :, 5], average[1], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (30, 70), (8, 8), (9, 9)])
def test_lengths_and_offsets_that_fill_no_block(queries, keys):
    check(queries, keys, "score", None, True, torch.float32, 1e-5)


@pytest.mark.parametrize("pairs", [1, 3, 4, 9])
@pytest.mark.parametrize(("gate", "mask"), [("score", None), ("query", "bool"), (None, "additive")])
def test_key_heads_and_texts_together_or_apart(gate, mask, pairs, monkeypatch):
    monkeypatch.setattr(streamed_attention, "_ROWS", 16)
    monkeypatch.setattr(streamed_attention, "_SMALL", pairs * 16 * 40)
    check(30, 40, gate, mask, True, torch.float32, 1e-5)


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("gate", [None, "score"])
def test_a_mask_alone_may_show_the_future(gate):
    check(70, 70, gate, "bool", False, torch.float32, 1e-5)


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("gate", ["query", "score"])
def test_half_precision_is_near_dense_attention(gate):
    check(70, 70, gate, None, True, torch.bfloat16, 2e-2)


SETTINGS: dict[str, Any] = {
    "table": {"position_bias": {"type": "table", "max_distance": 12}},
    "buckets": {"position_bias": {"type": "table", "max_distance": 12, "num_buckets": 6}, "gate": {"type": "head"}},
    "log": {"position_bias": {"type": "log"}, "gate": {"type": "query"}},
    "linear": {"position_bias": {"type": "linear", "learned": True, "share": "kv_group"}},
    "low rank": {"position_bias": {"type": "low_rank", "rank": 4}, "gate": {"type": "query"}},
    "disentangled": {"position_bias": {"type": "disentangled"}, "gate": {"type": "head"}},
    "disentangled, RoPE left": {"position_bias": {"type": "disentangled", "rank": 4}, "rope_scale": 0.5},
    "disentangled score": {"position_bias": {"type": "disentangled"}, "gate": {"type": "score"}},
    "disentangled score, RoPE left": {
        "position_bias": {"type": "disentangled", "rank": 4, "terms": ["p2c"]},
        "gate": {"type": "score"},
        "rope_scale": 0.5,
    },
    "score": {"position_bias": {"type": "log"}, "gate": {"type": "score"}},
    "low rank score": {"position_bias": {"type": "low_rank", "rank": 4}, "gate": {"type": "score"}},
    "window": {"position_bias": {"type": "table", "max_distance": 12}, "window": 9},
}


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_agrees_with_eager(name, padding):
    ids, results = random_ids(2, 50), {}
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    labels = ids.masked_fill(mask == 0, -100)
    for backend in ("sdpa", "eager"):
        model = build(SETTINGS[name], backend=backend)
        with profile() as trace:
            output = model(ids, attention_mask=mask if padding else None, labels=labels)
        assert ("_Streamed" in {event.key for event in trace.key_averages()}) == (backend == "sdpa")
        results[backend] = [
            output.logits[mask.bool()],
            *torch.autograd.grad(output.loss, [p for p in model.parameters() if p.requires_grad]),
        ]
    for ours, theirs in zip(results["sdpa"], results["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_in_half_precision_is_near_eager_in_fp32(name, tmp_path):
    build(SETTINGS[name]).save_pretrained(tmp_path)
    ids, results = random_ids(2, 50), []
    for backend, dtype in (("sdpa", torch.bfloat16), ("eager", torch.bfloat16), ("eager", torch.float32)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=backend, dtype=dtype)
        output = model(ids, labels=ids)
        assert output.logits.dtype == dtype
        moving = [p for p in model.position_parameters() if p.requires_grad]
        results.append([output.logits, *torch.autograd.grad(output.loss, moving)])
    for ours, rounded, exact in zip(*results, strict=True):
        # What half precision costs: eager attention in bf16.
        assert (ours - exact).norm() <= 2 * (rounded - exact).norm() + 0.02 * exact.norm()


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("name", SETTINGS)
def test_no_matrix_of_queries_by_keys_is_made(name, padding, monkeypatch):
    monkeypatch.setattr(streamed_attention, "_ROWS", 32)
    length = 1024
    model, ids = build(SETTINGS[name], max_position_embeddings=length), random_ids(1, length)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        model(ids, attention_mask=mask if padding else None, labels=ids).loss.backward()
    # A mask is one byte a pair and head of 1.
    assert max(event.cpu_memory_usage for event in trace.events()) < 2 * length * length


@pytest.mark.parametrize("kind", ["log", "low_rank", "disentangled"])
def test_chunked_prefill_equals_full_forward(kind):
    model, ids = build({"position_bias": {"type": kind}}), random_ids(1, 80)
    torch.testing.assert_close(stepwise(model, ids, (37, 40)), logits(model, ids), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["table", "window", "low rank", "disentangled"])
def test_one_row_of_a_mask_for_all_queries(name):
    """Every query sees every key but two, later ones as well."""
    ids, mask = random_ids(1, 50), torch.zeros(1, 1, 1, 50)
    mask[..., 3:5] = LOWEST
    sdpa, eager = (build(SETTINGS[name], backend=backend) for backend in ("sdpa", "eager"))
    expected = logits(eager, ids, attention_mask=mask.expand(-1, -1, 50, -1))
    torch.testing.assert_close(logits(sdpa, ids, attention_mask=mask), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_onednn_gets_rows_without_gaps(name, cache, several_blocks, monkeypatch):
    """Without a cache a model's keys are views of its projections."""
    seen, linear = [], streamed_attention._linear
    monkeypatch.setattr(
        streamed_attention, "_linear", lambda a, b, *rest: (seen.extend([a, b]), linear(a, b, *rest))[1]
    )
    ids = random_ids(1, 64)
    build(SETTINGS[name])(ids, labels=ids, use_cache=cache).loss.backward()
    assert seen
    assert all(x.is_contiguous() for x in seen)


def test_a_model_in_double_precision_is_left_to_the_fused_kernel(monkeypatch):
    """Scores in fp32 would be a silent loss."""
    monkeypatch.setattr(biased_attention, "streamed_attention", None)
    sdpa, eager = (build(SETTINGS["score"], backend=backend).double() for backend in ("sdpa", "eager"))
    ids = random_ids(1, 50)
    torch.testing.assert_close(logits(sdpa, ids), logits(eager, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["log", "disentangled"])
def test_autocast_takes_this_way(kind):
    model, ids = build({"position_bias": {"type": kind}}), random_ids(2, 50)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - model(ids, labels=ids).loss) < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters())

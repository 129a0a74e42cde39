"""The disentangled bias: RoPE taken apart, put back, stretched, pruned, cast, saved and compiled."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers
from checkpoints import logits, write_source
from reference import Recorder, randomise_position, reference_attention
from safetensors.torch import load_file
from test_saving import IDS, run_without_package
from tiny import FAMILIES, random_ids, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_drope import (
    DroPEParameters,
    apply_drope,
    block_bias_attention,
    convert_checkpoint,
    disentangled_decoding,
    drope_class,
    plan_conversion,
)
from hf_drope.configuration_drope import auto_map
from hf_drope.disentangled_bias import DisentangledBias
from hf_drope.gates import HeadGate
from hf_drope.position_bias import PositionBias
from hf_drope.rotary_pairs import RotaryPairs, scaled_frequencies
from hf_drope.stock_attention import rotary_pairs

PRESET = DroPEParameters.preset("disentangled")
ROTARY = [family for family in FAMILIES if family != "gpt2"]
BACKENDS = ("eager", "sdpa")
FADES = ("angle", "blend", "frequency")
SUBSETS = ([], ["p2p"], ["c2p"], ["p2c"], ["p2p", "c2p"], ["p2p", "p2c"], ["c2p", "p2c"], ["p2p", "c2p", "p2c"])
SOURCES = {
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
LAYOUTS = {
    "halves": RotaryPairs((1.0, 0.3, 0.05, 0.01)),
    "neighbours": RotaryPairs((1.0, 0.3, 0.05, 0.01), interleaved=True),
    "some_channels": RotaryPairs((0.9, 0.2), amplitude=1.3),
    "some_neighbours": RotaryPairs((0.9, 0.2), interleaved=True),
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_fade = pytest.mark.parametrize("fade", FADES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def build(family="llama", backend="sdpa", source=None, **overrides):
    """A converted tiny model with means and gains of order one; `source`: overrides for the stock model."""
    model = tiny_model(family, attn_implementation=backend, **(source or {}))
    return randomise_position(apply_drope(model, PRESET, **overrides))


def layer_bias(layout="halves", seed=0, **settings):
    """The bias of one layer on its own, and queries (2, 4, 9, 8) and keys (2, 2, 9, 8) for it."""
    torch.manual_seed(seed)
    bias = DisentangledBias(4, 2, 8, LAYOUTS[layout], **settings)
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    if bias.pairs is not None:
        for head, row in enumerate(bias.pairs):
            row.copy_(torch.randperm(bias.frequencies.numel())[: len(row)] if head else row)
    return bias, torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)


def products(query, key):
    return query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)


def from_first_key(scores):
    """Scores up to the term constant along the keys that softmax cancels."""
    return scores.double() - scores[..., :1].double()


def rotation(delta, pairs, width):
    """R_Δ (width, width) in float64, one block of a pair at a time."""
    matrix, count = torch.eye(width, dtype=torch.float64), len(pairs.frequencies)
    for r, frequency in enumerate(pairs.frequencies):
        x, y = (2 * r, 2 * r + 1) if pairs.interleaved else (r, r + count)
        cos, sin = math.cos(frequency * delta), math.sin(frequency * delta)
        block = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64) * pairs.amplitude**2
        matrix[torch.tensor([[x], [y]]), torch.tensor([[x, y]])] = block
    return matrix


def stepwise(model, ids, chunks=(4,)):
    cache, results, done = DynamicCache(config=model.config), [], 0
    for size in [*chunks, *[1] * (ids.shape[1] - sum(chunks))]:
        with torch.no_grad():
            results.append(model(ids[:, done : done + size], past_key_values=cache).logits)
        done += size
    return torch.cat(results, 1)


def assert_close(ours, theirs, relative=2e-5):
    """Equal to rounding, measured by the largest value."""
    torch.testing.assert_close(ours, theirs, atol=relative * theirs.abs().max().item(), rtol=0)


# RoPE put back: the decomposition leaves nothing out.


@every_backend
@pytest.mark.parametrize("family", ROTARY)
def test_rope_put_back_on_the_content_is_the_stock_model(family, backend):
    """For any means, gains and groups of heads: what the terms hold and what the content holds add up to RoPE."""
    ids, mask = random_ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    stock = tiny_model(family, attn_implementation=backend)
    expected = logits(stock, ids)
    with torch.no_grad():
        padded = stock(ids, attention_mask=mask).logits
    for content, share in (("mean_rotation", "head"), ("identity", "kv_group"), ("mean_rotation", "layer")):
        for fade in FADES:
            model = build(family, backend, rope_scale=1.0, rope_fade=fade, content=content, share=share)
            assert_close(logits(model, ids), expected)
        with torch.no_grad():
            assert_close(model(ids, attention_mask=mask).logits[mask.bool()], padded[mask.bool()])
        assert_close(stepwise(model, ids), expected)
        model.set_rope_scale(0.0)
        assert (logits(model, ids) - expected).abs().max() > 0.05 * expected.abs().max()


@every_backend
@pytest.mark.parametrize("source", SOURCES)
def test_rope_put_back_equals_a_source_with_stretched_rope(source, backend):
    """https://github.com/vllm-project/vllm/pull/44158: frequencies and amplitude are those of the source's own module."""
    ids, overrides = random_ids(2, 30), {"rope_parameters": SOURCES[source]}
    stock = tiny_model("llama", attn_implementation=backend, **overrides)
    expected = logits(stock, ids)
    amplitude = stock.model.rotary_emb.attention_scaling
    assert (amplitude != 1.0) is (source == "yarn")
    assert (expected - logits(tiny_model("llama", attn_implementation=backend), ids)).abs().max() > 0.1
    for fade in FADES:
        model = build("llama", backend, overrides, rope_scale=1.0, rope_fade=fade)
        assert_close(logits(model, ids), expected)
        assert next(model.position_biases()).bias.source.amplitude == pytest.approx(amplitude)
    assert_close(stepwise(model, ids, (13, 9)), expected)


@every_fade
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gptj"])
def test_content_fades_as_the_whole_model_does_without_terms(family, fade):
    """With means of 0 there is nothing but content, so the model is one whose RoPE has that strength."""
    ids, source = random_ids(2, 11), {"rope_parameters": SOURCES["yarn"]} if family == "llama" else {}
    for scale in (0.9, 0.55, 0.2):
        plain = apply_drope(tiny_model(family, **source), "nope", rope_scale=scale, rope_fade=fade)
        model = apply_drope(tiny_model(family, **source), PRESET, rope_scale=scale, rope_fade=fade)
        assert_close(logits(model, ids), logits(plain, ids))
    assert (logits(plain, ids) - logits(tiny_model(family, **source), ids)).abs().max() > 0.05


@every_backend
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gptj"])
def test_without_terms_and_with_plain_content_it_is_the_dropped_model(family, backend):
    ids = random_ids(2, 11)
    dropped = apply_drope(tiny_model(family, attn_implementation=backend), "nope")
    expected = logits(dropped, ids)
    for settings in ({"terms_scale": 0.0}, {"terms": []}):
        assert_close(logits(build(family, backend, content="identity", **settings), ids), expected)
    model = build(family, backend, content="identity")
    assert (logits(model, ids) - expected).abs().max() > 0.05 * expected.abs().max()
    model.set_terms_scale(0.0)
    assert_close(logits(model, ids), expected)
    assert_close(stepwise(model, ids), expected)


def test_fresh_conversion_is_the_dropped_model():
    ids = random_ids(2, 11)
    fresh, dropped = (apply_drope(tiny_model("llama"), preset) for preset in ("disentangled", "nope"))
    assert_close(logits(fresh, ids), logits(dropped, ids), 1e-6)


# The parts of the score.


@every_layout
@pytest.mark.parametrize("terms", SUBSETS, ids=lambda terms: "+".join(terms) or "none")
def test_each_set_of_terms_is_its_part_of_the_rotated_score(terms, layout):
    """Score = q·k + Σ over the chosen terms of (R_Δ − 1), with R_Δ as a matrix: M = 1 and RoPE off."""
    bias, query, key = layer_bias(layout, terms=terms, content="identity")
    wide = products(*bias(query, key))
    pairs, one = LAYOUTS[layout], torch.eye(8, dtype=torch.float64)
    q, k = query.double(), key.double().repeat_interleave(2, 1)
    query_mean, key_mean = bias.query_mean.detach().double(), bias.key_mean.detach().double().repeat_interleave(2, 0)
    for i in range(9):
        for j in range(9):
            turned = rotation(j - i, pairs, 8) - one
            a, b = q[:, :, i], k[:, :, j]
            sides = {
                "p2p": (query_mean, key_mean),
                "c2p": (a - query_mean, key_mean),
                "p2c": (query_mean, b - key_mean),
            }
            expected = (a * b).sum(-1) + sum((x @ turned * y).sum(-1) for x, y in (sides[term] for term in terms))
            if j == 0:
                first = expected
            torch.testing.assert_close(wide[..., i, j] - wide[..., i, 0], expected - first, atol=2e-5, rtol=0)


def test_sets_of_terms_are_the_scores_of_the_specification():
    """G1 q·k + μ'Rμ; G2 q·k + q'Rμ; G3 (q−μ)·k + μ'Rk; G4 (q−μ)·(k−μ) + q'Rμ + μ'Rk − μ'Rμ."""
    deltas, pairs = torch.arange(9)[None] - torch.arange(9)[:, None], LAYOUTS["halves"]
    turn = torch.stack([torch.stack([rotation(d, pairs, 8) for d in row]) for row in deltas.tolist()])
    for name, terms in (("G1", SUBSETS[1]), ("G2", SUBSETS[4]), ("G3", SUBSETS[5]), ("G4", SUBSETS[7])):
        bias, query, key = layer_bias(terms=terms, content="identity")
        q, k = query.double(), key.double().repeat_interleave(2, 1)
        m = bias.query_mean.detach().double()[None, :, None].expand_as(q)
        n = bias.key_mean.detach().double().repeat_interleave(2, 0)[None, :, None].expand_as(k)

        def rotated(a, b):
            return torch.einsum("bhix,ijxy,bhjy->bhij", a, turn, b)

        def plain(a, b):
            return a @ b.transpose(-1, -2)

        expected = {
            "G1": lambda q, k, m, n: plain(q, k) + rotated(m, n),
            "G2": lambda q, k, m, n: plain(q, k) + rotated(q, n),
            "G3": lambda q, k, m, n: plain(q - m, k) + rotated(m, k),
            "G4": lambda q, k, m, n: plain(q - m, k - n) + rotated(q, n) + rotated(m, k) - rotated(m, n),
        }[name](q, k, m, n)
        ours = from_first_key(products(*bias(query, key)))
        torch.testing.assert_close(ours, from_first_key(expected), atol=2e-5, rtol=0, msg=name)


@every_layout
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("rope_scale", [0.0, 0.5, 1.0])
def test_wide_heads_give_the_dense_scores_up_to_a_term_constant_along_the_keys(rope_scale, rank, layout):
    """With a gate, a strength and an offset; for every fade, where the strength is between the ends."""
    gate = HeadGate(4)
    torch.nn.init.normal_(gate.g)
    torch.nn.init.normal_(gate.t)
    for fade in FADES:
        for terms in SUBSETS if fade == "angle" else SUBSETS[-1:]:
            settings = {"terms": terms, "rank": rank, "terms_scale": 0.4, "rope_scale": rope_scale, "rope_fade": fade}
            bias, query, key = layer_bias(layout, **settings)
            query = query[:, :, 5:]
            wide = products(*bias(query, key, 5, gate()))
            dense = bias.content_scores(query, key, 5) + gate() * bias.scores(query, key, 5)
            torch.testing.assert_close(from_first_key(wide), from_first_key(dense), atol=5e-5, rtol=0)
            if terms:
                without = from_first_key(bias.content_scores(query, key, 5))
                assert (from_first_key(dense) - without).abs().max() > 0.05
            # Position arrives as a tensor with a static cache.
            torch.testing.assert_close(products(*bias(query, key, torch.tensor(5), gate())), wide)


@every_layout
@pytest.mark.parametrize("rope_scale", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("content", ["mean_rotation", "identity"])
def test_content_scores_are_complete_for_gates_that_read_them(content, rope_scale, layout):
    """q̃'M k̃ + μ_q'k̃ + q̃'μ_k + μ_q'μ_k; RoPE at a strength takes M's place, and at 1 there is no M left."""
    bias, query, key = layer_bias(layout, content=content, rope_scale=rope_scale)
    pairs, gain = LAYOUTS[layout], torch.eye(8, dtype=torch.float64).repeat(4, 1, 1)
    for h in range(4 if content == "mean_rotation" else 0):
        for r, (cos, sin) in enumerate(bias.gain[h].tolist()):
            x, y = (2 * r, 2 * r + 1) if pairs.interleaved else (r, r + len(pairs.frequencies))
            gain[h, x, x] = gain[h, y, y] = 1 + (1 - rope_scale) * (cos - 1)
            gain[h, y, x] = (1 - rope_scale) * sin
            gain[h, x, y] = -gain[h, y, x]
    query_mean = bias.query_mean.detach().double()[None, :, None]
    key_mean = bias.key_mean.detach().double().repeat_interleave(2, 0)[None, :, None]
    q, k = query.double() - query_mean, key.double().repeat_interleave(2, 1) - key_mean
    faded = pairs._replace(amplitude=1 + rope_scale * (pairs.amplitude - 1))
    scores = bias.content_scores(query[:, :, 4:], key, 4)
    assert scores.dtype == torch.float32
    for i in range(4, 9):
        for j in range(9):
            turned = gain @ rotation((j - i) * rope_scale, faded, 8)
            expected = torch.einsum("bhx,hxy,bhy->bh", q[:, :, i], turned, k[:, :, j])
            expected += ((q[:, :, i] + query_mean[:, :, 0]) * key_mean[:, :, 0]).sum(-1)
            expected += (query_mean[:, :, 0] * k[:, :, j]).sum(-1)
            torch.testing.assert_close(scores[:, :, i - 4, j].double(), expected, atol=2e-5, rtol=0)


def test_wide_heads_are_no_wider_than_they_have_to_be():
    """Whatever is concatenated costs time in every kernel: dropped, one block of content and at most two of terms."""
    for terms, blocks in zip(SUBSETS, (0, 1, 1, 1, 1, 1, 2, 2), strict=True):
        for layout, rotated in (("halves", 8), ("some_channels", 4)):
            for rank in (None, 2):
                bias, query, key = layer_bias(layout, terms=terms, rank=rank)
                wide = [x.shape[-1] for x in bias(query, key)]
                assert wide == [8 + blocks * (rank or rotated)] * 2
    bias.set_terms_scale(0.0)
    assert [x.shape[-1] for x in bias(query, key)] == [8, 8]


@every_backend
def test_pairs_of_other_heads_do_not_matter(backend, monkeypatch):
    """Each key/value head has pairs of its own, and the query heads of its group use them."""
    recorder = Recorder(monkeypatch)
    model, ids = build(backend=backend, rank=2), random_ids(1, 8)
    first, outputs = model.model.layers[0].self_attn, []
    for pairs in ([[0], [1]], [[0], [3]]):
        first.position_bias.bias.pairs.copy_(torch.tensor(pairs))
        recorder.calls.clear()
        logits(model, ids)
        outputs.append(recorder.calls[0].output)
    changed = (outputs[0] - outputs[1]).abs().amax((0, 1, 3)) > 1e-6
    assert changed.tolist() == [False, False, True, True]


# Gradients.


@pytest.mark.parametrize("layout", ["halves", "neighbours"])
@pytest.mark.parametrize("rank", [None, 2])
def test_gradients_equal_finite_differences_of_the_nested_loop_reference(rank, layout):
    settings = PRESET.replace(rank=rank, terms_scale=0.6, gate={"type": "head"}).to_dict()
    bias, query, key = layer_bias(layout, rank=rank, terms_scale=0.6)
    position = PositionBias(bias, HeadGate(4))
    query, key, value = query[:1, :, :5], key[:1, :, :5], torch.randn(1, 2, 5, 8)
    target = torch.randn(1, 5, 4, 8)
    hidden, visible, scaling = torch.zeros(1, 5, 1), torch.ones(1, 5, dtype=torch.bool), 8**-0.5

    def reference():
        arguments = (query, key, value, hidden, visible, scaling, position, settings)
        return (reference_attention(*arguments)[0] * target).sum().item()

    wide_query, wide_key = bias(query, key, 0, position.factor())
    scores = wide_query @ wide_key.repeat_interleave(2, 1).transpose(-1, -2) * scaling
    weights = (scores + torch.full((5, 5), -math.inf).triu(1)).softmax(-1)
    output = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    (output * target).sum().backward()
    assert (output * target).sum().item() == pytest.approx(reference(), abs=1e-4)
    for name, parameter in position.named_parameters():
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for index in torch.randperm(len(flat))[:4].tolist():
            before, ends = flat[index].item(), []
            for step in (-1e-3, 1e-3):
                flat[index] = before + step
                ends.append((flat[index].item(), reference()))
            flat[index] = before
            slope = (ends[1][1] - ends[0][1]) / (ends[1][0] - ends[0][0])
            assert gradient[index].item() == pytest.approx(slope, abs=1e-4, rel=1e-3), (name, index)
        assert gradient.abs().max() > 1e-3, name


@pytest.mark.parametrize(
    "settings",
    [
        {"gate": {"type": "head"}},
        {"gate": {"type": "query"}, "rank": 2, "share": "kv_group"},
        {"gate": {"type": "score"}, "rope_scale": 0.5},
        {"rope_scale": 0.5, "rope_fade": "blend"},
        {"position_scaling": {"type": "clip", "max_distance": 3}, "content": "identity"},
    ],
    ids=str,
)
def test_gradients_agree_between_backends_blocks_and_checkpointing(settings, monkeypatch):
    """https://github.com/huggingface/transformers/pull/11353"""
    ids, results = random_ids(2, 9), []
    for backend, block, checkpointing in (("eager", 256, False), ("sdpa", 256, False), ("sdpa", 4, True)):
        monkeypatch.setattr(block_bias_attention, "QUERY_BLOCK", block)
        model = build(backend=backend, **settings).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids, use_cache=False).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    positions = [name for name in results[0] if "position_bias" in name]
    assert len(positions) >= 4
    for name, gradient in results[0].items():
        scale = max(gradient.abs().max().item(), 1e-3)
        for other in results[1:]:
            torch.testing.assert_close(other[name], gradient, atol=1e-4 * scale, rtol=1e-3, msg=name)
        if name in positions:
            assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("gate", [None, "head", "query", "score"])
@pytest.mark.parametrize("given", [{"terms_scale": 0.0}, {"terms": []}, {"terms": ["p2p", "p2c"]}])
def test_no_position_parameter_is_left_without_a_gradient(given, gate, monkeypatch):
    """https://github.com/pytorch/pytorch/issues/41324"""
    ids, model = random_ids(2, 9), build(**given, gate=gate and {"type": gate}).train()
    output = model(ids, labels=ids)
    output.loss.backward()
    for name, parameter in model.named_parameters():
        if "position_bias" in name:
            assert parameter.grad is not None, name
            # A score gate reads the content, of which mean keys are a part.
            gated = bool(given.get("terms")) and ("gate" in name or gate == "score")
            used = name.endswith(("query_mean", "gain")) or gated
            assert parameter.grad.any() == used, name
    monkeypatch.setattr(DisentangledBias, "_unused", lambda *_: torch.zeros(()))
    # Other kernels run without gradients.
    assert torch.equal(model.eval()(ids, labels=ids).logits, output.logits)


# Stretching the position terms.

THETA, WIDTH = 1e4, 32
DEFAULT = RotaryPairs(tuple(THETA ** (-2 * r / WIDTH) for r in range(WIDTH // 2)))


def stretched(**scaling):
    settings = PRESET.replace(position_scaling=scaling).position_bias["position_scaling"]
    return scaled_frequencies(DEFAULT, settings)


def test_linear_and_ntk_frequencies_follow_their_formulas():
    assert scaled_frequencies(DEFAULT, None) == list(DEFAULT.frequencies)
    assert stretched(type="linear", factor=3) == pytest.approx([f / 3 for f in DEFAULT.frequencies])
    base = THETA * 8 ** (WIDTH / (WIDTH - 2))
    ntk = stretched(type="ntk", factor=8)
    assert ntk == pytest.approx([base ** (-2 * r / WIDTH) for r in range(WIDTH // 2)])
    assert ntk[0] == DEFAULT.frequencies[0]
    assert ntk[-1] == pytest.approx(DEFAULT.frequencies[-1] / 8)
    assert stretched(type="clip", max_distance=5) == list(DEFAULT.frequencies)


@pytest.mark.parametrize("betas", [{}, {"beta_fast": 20.0, "beta_slow": 2.0}], ids=["default", "other"])
def test_yarn_frequencies_are_those_of_transformers(betas):
    length, factor = 2048, 4.0
    ours = stretched(type="yarn", factor=factor, original_max_position_embeddings=length, **betas)
    assert ours[0] == DEFAULT.frequencies[0]
    assert ours[-1] == pytest.approx(DEFAULT.frequencies[-1] / factor)
    turns = [length * f / (2 * math.pi) for f in DEFAULT.frequencies]
    fast, slow = betas.get("beta_fast", 32.0), betas.get("beta_slow", 1.0)
    between = 0
    for number, new, old in zip(turns, ours, DEFAULT.frequencies, strict=True):
        if number >= fast or number <= slow:
            assert new == pytest.approx(old if number >= fast else old / factor)
        else:
            between += 1
            assert old / factor < new < old
    assert between >= 3
    rope = {"rope_type": "yarn", "rope_theta": THETA, "factor": factor, "original_max_position_embeddings": length}
    config = tiny_config(
        "llama",
        hidden_size=WIDTH * 4,
        max_position_embeddings=int(length * factor),
        # Without `truncate` the ends of the ramp are rounded to whole pairs, which the paper does not do.
        rope_parameters={**rope, "truncate": False, **betas},
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_stretching_changes_the_terms_and_leaves_the_content(kind):
    scaling = PRESET.replace(position_scaling={"type": kind, "factor": 4.0}).position_bias["position_scaling"]
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 16
    plain, query, key = layer_bias(rope_scale=0.5)
    stretch, _, _ = layer_bias(rope_scale=0.5, position_scaling=scaling)
    assert torch.equal(stretch.content_scores(query, key), plain.content_scores(query, key))
    assert (stretch.scores(query, key) - plain.scores(query, key)).abs().max() > 0.1
    slower = RotaryPairs(tuple(scaled_frequencies(LAYOUTS["halves"], scaling)))
    other = DisentangledBias(4, 2, 8, slower)
    other.load_state_dict(stretch.state_dict())
    assert torch.equal(stretch.scores(query, key), other.scores(query, key))


@pytest.mark.parametrize("offset", [0, 4])
def test_clipped_distances_below_the_limit_are_untouched_and_those_beyond_equal_it(offset):
    limit = 3
    plain, query, key = layer_bias(terms=["p2p"])
    clipped, _, _ = layer_bias(terms=["p2p"], position_scaling={"type": "clip", "max_distance": limit})
    query = query[:, :, : 9 - offset]
    distance = torch.arange(query.shape[2])[:, None] + offset - torch.arange(9)
    exact, ours = plain.scores(query, key, offset), clipped.scores(query, key, offset)
    near = distance <= limit
    torch.testing.assert_close(ours[..., near], exact[..., near])
    # p2p depends on the distance alone, so that every far one has the value of the limit.
    value = exact[..., distance == limit][..., :1]
    torch.testing.assert_close(ours[..., ~near], value.expand_as(ours[..., ~near]), atol=1e-5, rtol=0)
    assert (exact[..., ~near] - ours[..., ~near]).abs().max() > 0.1


def test_clipping_beyond_the_text_changes_nothing():
    ids = random_ids(2, 11)
    clip = {"type": "clip", "max_distance": 11}
    assert_close(logits(build(position_scaling=clip), ids), logits(build(), ids))
    near = logits(build(position_scaling={"type": "clip", "max_distance": 2}), ids)
    expected = logits(build(), ids)
    assert_close(near[:, :3], expected[:, :3])
    assert (near[:, 3:] - expected[:, 3:]).abs().max() > 0.05


# Strength of the terms.


def test_strength_of_the_terms_is_stored_and_survives_a_folder(tmp_path):
    """https://github.com/allenai/OLMo-core/pull/622: the stage goes with the checkpoint."""
    model, ids = build(gate={"type": "head"}), random_ids(1, 9)
    seen = []
    for strength in (1.0, 0.3, 0.0):
        model.set_terms_scale(strength)
        assert model.config.drope_parameters["position_bias"]["terms_scale"] == strength
        model.save_pretrained(tmp_path / str(strength))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / str(strength))
        assert loaded.config.drope_parameters == model.config.drope_parameters
        assert torch.equal(logits(loaded, ids), logits(model, ids))
        seen.append(logits(model, ids))
        if strength == 0.3:
            assert torch.equal(seen[-1], logits(build(gate={"type": "head"}, terms_scale=0.3), ids))
    assert (seen[0] - seen[1]).abs().max() > 0.05
    assert (seen[1] - seen[2]).abs().max() > 0.05
    loaded.set_terms_scale(1.0)
    assert torch.equal(logits(loaded, ids), seen[0])
    for wrong in (-0.1, 1.5, True, "half"):
        with pytest.raises(ValueError, match="terms_scale is"):
            model.set_terms_scale(wrong)
    assert model.config.drope_parameters["position_bias"]["terms_scale"] == 0.0


@pytest.mark.parametrize("preset", ["nope", "simple"])
def test_a_model_without_the_bias_has_no_terms_to_scale(preset):
    model = apply_drope(tiny_model("llama"), preset)
    with pytest.raises(ValueError, match="This model has no disentangled bias; convert its source with the preset"):
        model.set_terms_scale(0.5)


# Precision.


@pytest.mark.parametrize("settings", [{"rank": 2}, {"gate": {"type": "query"}}, {"rope_scale": 0.5}], ids=str)
def test_position_parameters_of_a_half_precision_model_stay_in_full_precision(settings, tmp_path):
    """https://github.com/Dao-AILab/flash-attention/pull/846"""
    ids, exact = random_ids(2, 20), build(**settings)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    before = {name: value for name, value in exact.state_dict().items() if "position_bias" in name}
    assert {name.rpartition(".")[2] for name in before} >= {"query_mean", "key_mean", "gain"}
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, value in before.items():
        for tensor in (stored[name], model.state_dict()[name], loaded.state_dict()[name]):
            assert tensor.dtype == value.dtype, name
            assert torch.equal(tensor, value), name
    for candidate in (model, loaded):
        assert candidate.model.embed_tokens.weight.dtype == torch.bfloat16
        for ours, theirs in zip(candidate.position_biases(), exact.position_biases(), strict=True):
            for (name, buffer), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
                assert buffer.dtype == other.dtype, name
                assert torch.equal(buffer, other), name
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@every_backend
def test_half_precision_output_is_close_to_full_precision(backend):
    """Measured against the error of a stock model of the same dtype: weights this large make any bf16 model rough."""
    ids, errors = random_ids(2, 24), []
    for make in (
        lambda: tiny_model("llama", attn_implementation=backend, scale=2.0),
        lambda: randomise_position(
            apply_drope(tiny_model("llama", attn_implementation=backend, scale=2.0), PRESET, rope_scale=0.5)
        ),
    ):
        expected = logits(make(), ids)
        ours = logits(make().to(torch.bfloat16), ids)
        assert ours.dtype == torch.bfloat16
        errors.append(((ours - expected).abs().mean() / expected.abs().mean()).item())
    assert errors[1] < max(3 * errors[0], 0.02), errors


@every_layout
def test_far_positions_are_as_exact_in_half_precision_as_they_are_near(layout):
    """https://github.com/Dao-AILab/flash-attention/pull/846: in bf16, positions 30000 to 30008 would be one."""
    bias, query, key = layer_bias(layout)
    bias.to(torch.bfloat16)
    query, key = query.bfloat16(), key.bfloat16()
    start = 30_000
    keys = torch.cat([key[:, :, :1].expand(-1, -1, start, -1), key], 2)
    # Keys near the queries, at far and at near positions: scores depend on the distance alone.
    far_query, far_key = bias(query, keys, start)
    near_query, near_key = bias(query, key, 0)
    assert far_query.dtype == far_key.dtype == torch.bfloat16
    far = from_first_key(products(far_query, far_key[:, :, start:]))
    near = from_first_key(products(near_query, near_key))
    exact = layer_bias(layout)[0]
    expected = from_first_key(exact.content_scores(query, key) + exact.scores(query, key))
    scale = expected.abs().max()
    assert (near - expected).abs().max() < 0.03 * scale
    assert (far - expected).abs().max() < 0.03 * scale


# Layers.


@every_backend
@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_a_layer_that_keeps_rope_has_no_bias_and_the_others_do(family, backend, monkeypatch):
    recorder, ids = Recorder(monkeypatch), random_ids(2, 8)
    model = build(family, backend, rope_layers=[0])
    keeping, dropped = (m for m in model.modules() if hasattr(m, "needs_position"))
    assert keeping.position_bias is None
    assert keeping.keeps_rope
    assert dropped.position_bias is not None
    assert not any(name.split("position_bias")[0].endswith("0.self_attn.") for name, _ in model.named_parameters())
    ours = logits(model, ids)
    first, second = recorder.calls[0], recorder.calls[1]
    assert torch.equal(first.output, stock_first_layer(family, backend, ids))
    expected, _ = reference_attention(
        second.query,
        second.key,
        second.value,
        second.hidden_states,
        torch.ones_like(ids).bool(),
        second.scaling,
        dropped.position_bias,
        model.config.drope_parameters,
    )
    torch.testing.assert_close(second.output.double(), expected, atol=1e-5, rtol=1e-5)
    assert_close(stepwise(model, ids), ours)
    model.set_rope_scale(1.0)
    assert_close(logits(model, ids), logits(tiny_model(family, attn_implementation=backend), ids))


def stock_first_layer(family, backend, ids):
    """What the attention function of the first layer gives in the source."""
    model = apply_drope(tiny_model(family, attn_implementation=backend), "nope", rope_scale=1.0)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        logits(model, ids)
    return recorder.calls[0].output


@every_backend
@pytest.mark.parametrize("gate", [None, {"type": "query"}, {"type": "score"}], ids=str)
@pytest.mark.parametrize(
    "other",
    [
        {"window": [3, None]},
        {"attention_scale": {"factor": 1.4}},
        {"attention_scale": {"coefficient": 0.6, "original_max_position_embeddings": 4}},
        {"qk_norm": "qk"},
    ],
    ids=str,
)
def test_windows_scales_and_norms_are_the_same_with_and_without_a_cache(other, gate, backend):
    model, ids = build(backend=backend, gate=gate, **other), random_ids(2, 12)
    full = logits(model, ids)
    assert_close(stepwise(model, ids), full)
    assert (full - logits(build(backend=backend, gate=gate), ids)).abs().max() > 0.05
    unlike = build(backend=BACKENDS[1 - BACKENDS.index(backend)], gate=gate, **other)
    assert_close(logits(unlike, ids), full)
    count = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    uncached = model.generate(ids, use_cache=False, **count)
    assert torch.equal(model.generate(ids, cache_implementation="static", **count), uncached)


@every_backend
@pytest.mark.parametrize("gate", [None, {"type": "query"}, {"type": "score"}], ids=str)
def test_fading_content_is_the_same_with_caches_padding_and_blocks(gate, backend, monkeypatch):
    settings = {"gate": gate, "rope_scale": 0.5, "terms_scale": 0.4}
    model, ids = build(backend=backend, **settings), random_ids(1, 12)
    full = logits(model, ids)
    monkeypatch.setattr(block_bias_attention, "QUERY_BLOCK", 4)
    assert_close(logits(model, ids), full)
    assert_close(stepwise(model, ids, (6,)), full)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    with torch.no_grad():
        alone = model(padded, attention_mask=(torch.arange(15) >= 3).long()[None]).logits[:, 3:]
    assert_close(alone, full)


@every_backend
def test_sliding_window_architecture_is_the_same_with_and_without_a_cache(backend):
    """https://github.com/fla-org/flash-linear-attention/issues/431: the cache forgets keys, so positions are relative."""
    model, ids = build("mistral", backend, {"sliding_window": 5}), random_ids(2, 16)
    assert_close(stepwise(model, ids, (7, 3)), logits(model, ids))


# Folders.


@pytest.mark.parametrize("family", ROTARY)
def test_converted_folder_has_the_frequencies_of_its_source(family, tmp_path):
    """https://github.com/huggingface/transformers/issues/48892: buffers that no file holds must not be raw memory."""
    source = write_source(tmp_path / "src", family)
    convert_checkpoint(plan_conversion(tmp_path / "src", "disentangled", overrides={"rank": 2}), tmp_path / "dst")
    if family == "gptj":
        frequencies = torch.tensor([1e4 ** (-2 * r / 4) for r in range(2)])
    else:
        frequencies = source.base_model.rotary_emb.inv_freq
    for dtype in (torch.float32, torch.bfloat16):
        dirt = [torch.full((size,), 1e27) for size in (2, 4, 8, 128)]
        del dirt
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", dtype=dtype, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        biases = list(model.position_biases())
        assert len(biases) == 2
        for position in biases:
            bias = position.bias
            torch.testing.assert_close(bias.frequencies, frequencies, rtol=1e-6, atol=0)
            torch.testing.assert_close(torch.tensor(bias.source.frequencies), frequencies, rtol=1e-6, atol=0)
            assert bias.source.interleaved is (family == "gptj")
            assert bias.terms_scale.item() == 1.0
            assert bias.content_rotation.scale.item() == 0.0
            assert not bias.query_mean.any()
            assert not bias.key_mean.any()
            assert (bias.gain == torch.tensor([1.0, 0.0])).all()
            assert (bias.pairs == 0).all()
        assert logits(model, random_ids(1, 9)).isfinite().all()


def test_plain_checkpoint_gets_initialised_position_parameters(tmp_path):
    """A config with settings on weights that know nothing of them: every parameter and buffer is made on loading."""
    tiny_model("llama").save_pretrained(tmp_path)
    settings = PRESET.replace(rank=4, gate={"type": "query"}, terms_scale=0.7)
    config = apply_drope(tiny_model("llama"), settings).config
    fresh = apply_drope(tiny_model("llama"), settings)
    for _ in range(2):
        dirt = [torch.full((size,), 1e27) for size in (1, 4, 8, 32, 128)]
        del dirt
        model = drope_class(transformers.LlamaForCausalLM).from_pretrained(tmp_path, config=copy.deepcopy(config))
        for ours, theirs in zip(model.position_biases(), fresh.position_biases(), strict=True):
            tensors = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
            expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, expected[name]), name


def test_checkpoints_load_where_the_package_is_not_installed(tmp_path):
    """https://github.com/huggingface/transformers/issues/15224; the pairs of each head come back as they were chosen."""
    models = {
        "pruned": build(ROTARY[-1], rank=2),
        "gated": build("llama", gate={"type": "query"}, terms_scale=0.4, rope_scale=0.3, rope_layers=[0]),
        "stretched": build("gpt_neox", position_scaling={"type": "yarn", "original_max_position_embeddings": 16}),
    }
    assert any(bias.bias.pairs.any() for bias in models["pruned"].position_biases())
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        torch.save(logits(model, IDS), tmp_path / f"{name}.pt")
    output = run_without_package(
        f"""
        for name in {list(models)!r}:
            for folder in (name, name + "-again"):
                model, info = AutoModelForCausalLM.from_pretrained(
                    folder, trust_remote_code=True, output_loading_info=True)
                assert not info["missing_keys"] and not info["unexpected_keys"], (folder, info)
                assert type(model).__module__.startswith("transformers_modules.")
                assert torch.equal(logits(model), torch.load(name + ".pt")), folder
                model.save_pretrained(name + "-again")
            model.set_terms_scale(0.5)
            model.set_rope_scale(1.0)
        assert "hf_drope" not in sys.modules
        print("done")
        """,
        tmp_path,
        tmp_path / "modules",
    )
    assert output.strip() == "done"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned-again")
    for ours, theirs in zip(again.position_biases(), models["pruned"].position_biases(), strict=True):
        assert torch.equal(ours.bias.pairs, theirs.bias.pairs)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gptj"])
def test_classification_models_have_the_bias_too(family, tmp_path):
    """https://github.com/hiyouga/LlamaFactory/issues/904"""
    model = tiny_model(family, "ForSequenceClassification", num_labels=3)
    converted = randomise_position(apply_drope(model, PRESET))
    assert type(converted).__name__ == auto_map(family)["AutoModelForSequenceClassification"].rpartition(".")[2]
    assert len(list(converted.position_biases())) == 2
    ids = random_ids(2, 9)
    converted.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(converted, ids))
    converted.set_rope_scale(1.0)
    stock = tiny_model(family, "ForSequenceClassification", num_labels=3)
    assert_close(logits(converted, ids), logits(stock, ids))


CHANGES = {
    "terms_scale": lambda model, biases: model.set_terms_scale(0.5),
    "query_mean": lambda model, biases: [bias.query_mean.mul_(1.5) for bias in biases],
    "key_mean": lambda model, biases: [bias.key_mean.mul_(1.5) for bias in biases],
    "gain": lambda model, biases: [bias.gain.mul_(1.5) for bias in biases],
    "pairs": lambda model, biases: [bias.pairs.copy_(1 - bias.pairs.clamp(max=1)) for bias in biases],
    "another tensor": lambda model, biases: [
        setattr(b, "key_mean", torch.nn.Parameter(2 * b.key_mean)) for b in biases
    ],
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_generation_keeps_of_parameters_follows_them(change, monkeypatch):
    made = []
    work_out = disentangled_decoding._terms
    monkeypatch.setattr(disentangled_decoding, "_terms", lambda *args: made.append(1) or work_out(*args))
    model, ids = build("llama", rank=4), random_ids(1, 9)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)

    def step(cache):
        return model(ids[:, :1], past_key_values=cache).logits

    step(cache)
    step(cache)
    # Once a layer in the prompt, which is short, and not again.
    assert len(made) == 2
    unchanged = step(copy.deepcopy(cache))
    CHANGES[change](model, [bias.bias for bias in model.position_biases()])
    # A copy keeps nothing.
    expected = step(copy.deepcopy(cache))
    made.clear()
    assert torch.equal(step(cache), expected)
    assert len(made) == 2
    assert not torch.equal(expected, unchanged)


@torch.no_grad()
def test_a_prompt_works_out_anew_what_was_kept():
    """Writes through `.data` leave no trace on a parameter."""
    model, ids = build("llama"), random_ids(1, 9)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    for bias in model.position_biases():
        bias.bias.query_mean.data.mul_(2.0)
    cache.crop(-5)
    kept = model(ids[:, :2], past_key_values=copy.deepcopy(cache)).logits
    assert torch.equal(model(ids[:, :2], past_key_values=cache).logits, kept)


@every_layout
@pytest.mark.parametrize("terms", [["p2p", "c2p", "p2c"], ["c2p", "p2c"], ["p2p", "p2c"], ["p2c"]], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"rank": 2}, {"share": "layer"}, {"share": "kv_group", "content": "identity"}], ids=str
)
@torch.no_grad()
def test_few_queries_get_the_scores_of_wide_heads(settings, terms, layout):
    bias, query, key = layer_bias(layout, terms=terms, terms_scale=0.7, **settings)
    gate = torch.rand(1, 4, 3, 1, generator=torch.Generator().manual_seed(2))
    for key_offset in (0, 5):
        rotated = bias.rotated_keys(key, key_offset)
        ours = disentangled_decoding.rotated_keys(bias, key[:, :, -3:], key_offset + 6, 9, {})
        torch.testing.assert_close(ours, rotated[:, :, -3:], atol=1e-5, rtol=1e-5)
        for factor in (None, gate):
            wide = products(*bias(query[:, :, -3:], key, 6, factor, rotated, key_offset))
            content, added = disentangled_decoding.decoded_scores(
                bias, query[:, :, -3:], rotated, 6, key_offset, factor, 0.5, {}
            )
            scores = 0.5 * products(content, key) + added
            torch.testing.assert_close(from_first_key(scores), 0.5 * from_first_key(wide), atol=1e-5, rtol=1e-5)


# Compiling.


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {"gate": {"type": "head"}}), ("gptj", {"rank": 2})], ids=str
)
def test_compiled_model_is_one_graph_that_moving_strengths_do_not_recompile(family, settings):
    """https://github.com/pytorch/pytorch/issues/149405"""
    model, ids, graphs = build(family, rope_scale=0.9, **settings), random_ids(1, 6), []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    seen = []
    for rope, terms in ((0.9, 1.0), (0.6, 1.0), (0.6, 0.7), (0.3, 0.2), (0.1, 0.9)):
        model.set_rope_scale(rope)
        model.set_terms_scale(terms)
        with torch.no_grad():
            seen.append(compiled(ids, use_cache=False).logits)
        assert_close(seen[-1], logits(model, ids))
    assert len(graphs) == 1
    assert all((seen[0] - other).abs().max() > 1e-3 for other in seen[1:])
    # The ends are graphs of their own, and nothing else is.
    for rope, terms in ((0.0, 1.0), (0.0, 0.5), (0.0, 0.0), (0.5, 0.5), (0.0, 0.0)):
        model.set_rope_scale(rope)
        model.set_terms_scale(terms)
        with torch.no_grad():
            assert_close(compiled(ids, use_cache=False).logits, logits(model, ids))
    torch._dynamo.reset()
    assert len(graphs) == 3


# Refusals.


def test_what_cannot_be_taken_apart_is_refused_in_one_sentence():
    gpt2, ids = tiny_model("gpt2"), random_ids(1, 9)
    expected = logits(gpt2, ids)
    with pytest.raises(ValueError, match=r"position_bias.type 'disentangled' takes RoPE apart and this model has none"):
        apply_drope(gpt2, PRESET)
    assert type(gpt2) is transformers.GPT2LMHeadModel
    assert torch.equal(logits(gpt2, ids), expected)
    for family, rotated in (("llama", 8), ("gpt_neox", 4)):
        with pytest.raises(ValueError, match=f"rank is {rotated + 2}; it has to be at most {rotated}, the channels"):
            apply_drope(tiny_model(family), PRESET, rank=rotated + 2)
        build(family, rank=rotated)
    with pytest.raises(ValueError, match="needs queries and keys, not scores"):
        PositionBias(layer_bias()[0])(torch.zeros(2, 4, 9, 9))


def test_an_unknown_pairing_of_channels_is_refused(monkeypatch):
    """A rotation that is read off wrongly would be a model that is wrong without a word."""
    attention = transformers.models.llama.modeling_llama.LlamaAttention

    def backwards(q, k, cos, sin, unsqueeze_dim=1):
        return q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin

    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", backwards)
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="LlamaAttention pairs channel 0 with channel 7, which is not known here"):
        rotary_pairs(model.model.rotary_emb, model.config, attention)

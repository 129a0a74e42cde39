"""The attention seam: windows, scales, norms, backends, long sequences, training, compilation, and what it leaves alone."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import math

import pytest
import torch
import transformers
from reference import Recorder, randomise_position
from tiny import FAMILIES, random_ids, tiny_config, tiny_model
from transformers import DynamicCache, StaticCache

from hf_drope import (
    DroPEParameters,
    apply_drope,
    attention_drope,
    biased_attention,
    block_bias_attention,
    drope_class,
    drope_config_class,
)

BACKENDS = ("eager", "sdpa")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
BIASES = {
    "table": {"position_bias": {"type": "table", "max_distance": 6}},
    "table_score": {"position_bias": {"type": "table", "max_distance": 6}, "gate": {"type": "score"}},
    "table_query": {"position_bias": {"type": "table", "max_distance": 6}, "gate": {"type": "query"}},
    "low_rank": {"position_bias": {"type": "low_rank", "rank": 4}},
    "low_rank_score": {"position_bias": {"type": "low_rank", "rank": 4}, "gate": {"type": "score"}},
}
every_bias = pytest.mark.parametrize("bias", BIASES)


def build(settings, family="llama", backend="sdpa", **overrides):
    model = tiny_model(family, attn_implementation=backend, **overrides)
    return randomise_position(apply_drope(model, DroPEParameters.from_dict(settings)))


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def hidden_states(model, ids):
    with torch.no_grad():
        return model(ids, output_hidden_states=True).hidden_states


def stepwise(model, ids, chunks=(5,)):
    """Logits of a prefill in chunks followed by single steps."""
    cache, results, done = DynamicCache(config=model.config), [], 0
    for size in [*chunks, *[1] * (ids.shape[1] - sum(chunks))]:
        results.append(logits(model, ids[:, done : done + size], past_key_values=cache))
        done += size
    return torch.cat(results, 1)


def generate(model, ids, count=8, **kwargs):
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, **kwargs}
    return model.generate(ids, max_new_tokens=count, min_new_tokens=count, **kwargs)[:, ids.shape[1] :]


def weights_of(model, ids):
    """Each layer's attention weights, as the modules of an eager model return them."""
    seen = []
    attention = [module for module in model.modules() if hasattr(module, "needs_position")]
    hooks = [module.register_forward_hook(lambda m, a, output: seen.append(output[1])) for module in attention]
    logits(model, ids)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(block_bias_attention, "QUERY_BLOCK", 4)


@every_backend
@pytest.mark.parametrize("settings", [{}, BIASES["table"], BIASES["table_score"], BIASES["low_rank"]], ids=str)
def test_window_hides_keys_further_back_in_its_layers(settings, backend):
    model = build({**settings, "window": [3, None]}, backend=backend)
    ids = random_ids(1, 10)
    eager = model if backend == "eager" else build({**settings, "window": [3, None]}, backend="eager")
    local, full = weights_of(eager, ids)
    i, j = torch.arange(10)[:, None], torch.arange(10)
    assert (local[..., (j > i) | (j <= i - 3)] == 0).all()
    assert (local[..., (j <= i) & (j > i - 3)] > 0).all()
    assert (full[..., j <= i] > 0).all()
    torch.testing.assert_close(logits(model, ids), logits(eager, ids), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stepwise(model, ids), logits(model, ids), atol=1e-4, rtol=1e-4)
    assert torch.equal(generate(model, ids, cache_implementation="static"), generate(model, ids, use_cache=False))


WINDOWED = {
    "no bias": {},
    **BIASES,
    "disentangled": {"position_bias": {"type": "disentangled"}, "gate": {"type": "query"}},
    "disentangled, clipped": {
        "position_bias": {"type": "disentangled", "position_scaling": {"type": "clip", "max_distance": 4}}
    },
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_reads_its_keys_only(name, padded, monkeypatch):
    monkeypatch.setattr(biased_attention, "WINDOW_BLOCK", 40)
    settings = {**WINDOWED[name], "window": 24}
    ids, mask = random_ids(2, 130), torch.ones(2, 130, dtype=torch.long)
    mask[1, :30] = 0
    given = {"attention_mask": mask} if padded else {}
    widths = []
    run = biased_attention._attend
    monkeypatch.setattr(biased_attention, "_attend", lambda call: (widths.append(call.key.shape[2]), run(call))[1])
    eager, sdpa = (build(settings, backend=backend) for backend in BACKENDS)
    seen = mask.bool() if padded else torch.ones(2, 130, dtype=torch.bool)
    expected = eager(ids, **given).logits[seen]
    widths.clear()
    found = sdpa(ids, **given).logits[seen]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert widths == [40, 63, 63, 33] * 2
    for output in (expected, found):
        (output * torch.linspace(-1, 1, output.shape[-1])).sum().backward()
    for (parameter_name, expected), found in zip(eager.named_parameters(), sdpa.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(
                found.grad, expected.grad, atol=1e-3 * expected.grad.abs().max().item(), rtol=1e-3, msg=parameter_name
            )
    widths.clear()
    assert torch.equal(generate(sdpa, ids, 3, **given), generate(eager, ids, 3, **given))
    # The prompt, then 24 keys a step; eager reads them all.
    assert sorted(widths[8:12]) == [24] * 4


@every_backend
def test_window_with_left_padding(backend):
    model = build({**BIASES["table"], "window": 3}, backend=backend)
    short = random_ids(1, 6, seed=3)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1)
    mask = (torch.arange(11) >= 5).long()[None]
    alone = logits(model, short)
    torch.testing.assert_close(logits(model, padded, attention_mask=mask)[:, 5:], alone, atol=1e-4, rtol=1e-4)
    assert torch.equal(generate(model, padded, attention_mask=mask), generate(model, short))


@every_backend
@pytest.mark.parametrize("settings", [{}, BIASES["table"], BIASES["table_score"], BIASES["low_rank"]], ids=str)
def test_sliding_window_architecture_generates_alike_with_and_without_cache(settings, backend):
    """https://github.com/fla-org/flash-linear-attention/issues/431: the cache keeps the window only."""
    model = build(settings, "mistral", backend, sliding_window=6)
    ids = random_ids(2, 20)
    uncached = generate(model, ids, 12, use_cache=False)
    assert torch.equal(generate(model, ids, 12), uncached)
    assert torch.equal(generate(model, ids, 12, cache_implementation="static"), uncached)
    torch.testing.assert_close(stepwise(model, ids, (9, 4)), logits(model, ids), atol=1e-4, rtol=1e-4)
    eager = model if backend == "eager" else build(settings, "mistral", "eager", sliding_window=6)
    i, j = torch.arange(20)[:, None], torch.arange(20)
    for weights in weights_of(eager, ids):
        assert (weights[..., (j > i) | (j <= i - 6)] == 0).all()


@every_backend
@pytest.mark.parametrize("settings", [{}, BIASES["table_score"], BIASES["low_rank"]], ids=str)
def test_constant_attention_scale_multiplies_the_scores(settings, backend, monkeypatch):
    recorder = Recorder(monkeypatch)
    model = build({**settings, "attention_scale": {"factor": 1.4}}, backend=backend)
    ids = random_ids(1, 8)
    scaled = logits(model, ids)
    calls, recorder.calls = recorder.calls, []
    for call in calls:
        # The same layer without a scale, on queries that are 1.4 times as long.
        plain = copy.deepcopy(call.module)
        plain.attention_scale = None
        stock = call.module.config._attn_implementation
        function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface(
            stock, transformers.models.llama.modeling_llama.eager_attention_forward
        )
        position = attention_drope.Position(0, 0, call.hidden_states)
        with torch.no_grad():
            output, _ = attention_drope.attend(
                function,
                stock,
                plain,
                call.query * 1.4,
                call.key,
                call.value,
                call.mask,
                position,
                scaling=call.scaling,
            )
        torch.testing.assert_close(output, call.output, atol=1e-5, rtol=1e-5)
    assert (scaled - logits(build(settings, backend=backend), ids)).abs().max() > 0.01


@every_backend
def test_growing_attention_scale_follows_its_formula(backend, monkeypatch):
    """β_i = 1 + c·ln(max(1, (i + 1) / L)), by hand from the projected queries and keys."""
    recorder = Recorder(monkeypatch)
    scale = {"coefficient": 0.6, "original_max_position_embeddings": 4}
    model = build({"attention_scale": scale}, backend=backend)
    logits(model, random_ids(1, 11))
    for call in recorder.calls:
        for h in range(4):
            for i in range(11):
                beta = 1 + 0.6 * math.log(max(1, (i + 1) / 4))
                keys, values = call.key[0, h // 2, : i + 1].double(), call.value[0, h // 2, : i + 1].double()
                weights = (beta * call.scaling * keys @ call.query[0, h, i].double()).softmax(-1)
                torch.testing.assert_close(call.output[0, i, h].double(), weights @ values, atol=1e-5, rtol=1e-5)


@every_backend
@pytest.mark.parametrize("settings", [{}, BIASES["table_score"], BIASES["low_rank"]], ids=str)
def test_growing_attention_scale_is_exact_with_caches_and_padding(settings, backend):
    scale = {"coefficient": 0.6, "original_max_position_embeddings": 4}
    model = build({**settings, "attention_scale": scale}, backend=backend)
    ids = random_ids(1, 11)
    full = logits(model, ids)
    torch.testing.assert_close(stepwise(model, ids), full, atol=1e-4, rtol=1e-4)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    mask = (torch.arange(15) >= 4).long()[None]
    torch.testing.assert_close(logits(model, padded, attention_mask=mask)[:, 4:], full, atol=1e-4, rtol=1e-4)
    uncached = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids), uncached)
    assert torch.equal(generate(model, ids, cache_implementation="static"), uncached)
    assert torch.equal(generate(model, padded, attention_mask=mask), uncached)


def test_attention_scale_that_changes_nothing_is_no_scale():
    for scale in ({"factor": 1.0}, {"coefficient": 0.0, "original_max_position_embeddings": 4}):
        model = build({"attention_scale": scale})
        assert torch.equal(logits(model, random_ids(1, 9)), logits(build({}), random_ids(1, 9)))
        assert not model.model.layers[0].self_attn.needs_position


@pytest.mark.parametrize("which", ["q", "k", "qk"])
@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_neox"])
def test_norm_over_all_heads_of_the_projections(family, scale, which, monkeypatch):
    recorder = Recorder(monkeypatch)
    plain = apply_drope(tiny_model(family), "nope")
    model = apply_drope(tiny_model(family), "nope", qk_norm=which)
    for module in model.modules():
        if isinstance(module, attention_drope.ProjectionNorm):
            torch.nn.init.uniform_(module.weight, 0.5, 2.0)
    ids = random_ids(2, 7)
    logits(plain, ids)
    without = recorder.calls[0]
    logits(model, ids)
    normed = recorder.calls[plain.config.num_hidden_layers]
    for name, before, after in (("q", without.query, normed.query), ("k", without.key, normed.key)):
        expected = before.double()
        if name in which:
            norm = getattr(normed.module.qk_norm, f"{name}_norm")
            flat = expected.transpose(1, 2).flatten(2)
            eps = getattr(model.config, "rms_norm_eps", 1e-6)
            flat = flat / (flat.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()
            expected = flat.unflatten(2, (before.shape[1], before.shape[3])).transpose(1, 2)
        torch.testing.assert_close(after.double(), expected, atol=1e-5, rtol=1e-5)
    model.set_rope_scale(scale)
    torch.testing.assert_close(stepwise(model, ids), logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_norm_is_refused_where_queries_and_keys_never_meet(family):
    with pytest.raises(ValueError, match="qk_norm is not possible for"):
        apply_drope(tiny_model(family), "nope", qk_norm="qk")


SCALED = {"attention_scale": {"coefficient": 0.5, "original_max_position_embeddings": 4}}
SCORED = {"position_bias": {"type": "disentangled"}, "gate": {"type": "score"}}
MASKED = "'eager', 'sdpa'"


@pytest.mark.parametrize(
    ("settings", "backend", "what", "instead"),
    [
        (BIASES["table"], "flash_attention_2", "position bias 'table'", f"{MASKED}, 'flex_attention'"),
        (BIASES["table"], "no_such_backend", "position bias 'table'", f"{MASKED}, 'flex_attention'"),
        ({"window": 3}, "flash_attention_3", "window 3", f"{MASKED}, 'flex_attention'"),
        (BIASES["low_rank_score"], "flash_attention_2", "position bias 'low_rank', gate 'score'", MASKED),
        (BIASES["low_rank"], "no_such_backend", "position bias 'low_rank'", f"{MASKED}, 'flex_attention', 'flash_"),
        (SCORED, "flex_attention", "position bias 'disentangled', gate 'score'", f"{MASKED}."),
        (SCALED, "flex_attention", "attention scale .*", f"{MASKED}."),
        (
            {"attention_scale": {"coefficient": 0.2, "original_max_position_embeddings": 4}},
            "no_such_backend",
            "attention scale .*",
            MASKED,
        ),
    ],
)
def test_backends_that_would_leave_the_bias_out_are_refused(settings, backend, what, instead, tmp_path):
    """https://github.com/huggingface/transformers/issues/29067"""
    expected = f"A model with {what} cannot run on attn_implementation='{backend}'.*load it with one of {instead}"
    model = build(settings)
    with pytest.raises(ValueError, match=expected):
        model.set_attn_implementation(backend)
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=expected):
        type(model).from_pretrained(tmp_path, attn_implementation=backend)
    with pytest.raises(ValueError, match=expected):
        type(model)._from_config(copy.deepcopy(model.config), attn_implementation=backend)
    stock = tiny_model("llama")
    stock.config._attn_implementation = backend
    with pytest.raises(ValueError, match=expected):
        apply_drope(stock, DroPEParameters.from_dict(settings))
    assert type(stock) is transformers.LlamaForCausalLM
    assert type(stock.config) is transformers.LlamaConfig


def test_backends_may_be_switched_between_those_that_add_the_bias():
    model, ids = build(BIASES["table_score"]), random_ids(1, 9)
    fused = logits(model, ids)
    model.set_attn_implementation("eager")
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"
    torch.testing.assert_close(logits(model, ids), fused, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
def test_no_bias_leaves_every_backend_to_the_stock_code(scale, monkeypatch):
    """A function that someone else registered gets what the stock model would hand it, and nothing more."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    arguments = []

    def other_backend(module, query, key, value, attention_mask, **kwargs):
        arguments.append(set(kwargs))
        return functions["sdpa"](module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(functions._global_mapping, "other_backend", other_backend)
    model = apply_drope(tiny_model("llama"), "nope", rope_scale=scale)
    ids = random_ids(1, 9)
    expected = logits(model, ids)
    model.set_attn_implementation("other_backend")
    assert torch.equal(logits(model, ids), expected)
    stock = tiny_model("llama")
    stock.set_attn_implementation("other_backend")
    logits(stock, ids)
    assert len(arguments) == 4
    assert all(names == arguments[-1] for names in arguments)
    model.set_attn_implementation("flex_attention")
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize(("rank", "width"), [(None, 384), (96, 320)])
def test_heads_too_wide_for_flash_kernels_are_refused(rank, width):
    model = build({"position_bias": {"type": "disentangled", "rank": rank}}, head_dim=128)
    with pytest.raises(
        ValueError, match=f"heads of {width} channels for it .*256; a lower rank.*'eager', 'sdpa', 'flex_attention'"
    ):
        model.set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize("bias", ["low_rank", "disentangled", "scale"])
def test_flash_kernels_get_wider_heads_and_no_mask(bias, monkeypatch):
    """A stand-in: flash kernels run on GPUs only. They take no mask but that of padding, which is two-dimensional."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    widths = []

    def flash(module, query, key, value, attention_mask, **kwargs):
        assert attention_mask is None
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        widths.append(query.shape[-1])
        return functions["sdpa"](module, query, key, value, None, **kwargs)

    monkeypatch.setitem(functions._global_mapping, "flash_attention_stand_in", flash)
    settings = {"scale": {"attention_scale": {"factor": 1.2}}, "low_rank": BIASES["low_rank"]}
    model = build(settings.get(bias, {"position_bias": {"type": "disentangled", "rank": 4}}))
    ids = random_ids(2, 12)
    expected = logits(model, ids)
    model.config._attn_implementation = "flash_attention_stand_in"
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=1e-4)
    assert widths == [{"scale": 8, "low_rank": 12, "disentangled": 16}[bias]] * 2


def test_reordered_and_upcast_attention_is_refused():
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        apply_drope(tiny_model("gpt2", reorder_and_upcast_attn=True), "simple")


@every_bias
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attention_weights_are_returned_with_bias_and_mask(family, bias):
    """https://github.com/huggingface/transformers/issues/31990"""
    model = build(BIASES[bias], family, "eager")
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    with torch.no_grad():
        with_bias = model(ids, attention_mask=mask, output_attentions=True).attentions
        stock = tiny_model(family, attn_implementation="eager")
        without = stock(ids, attention_mask=mask, output_attentions=True).attentions
    assert len(with_bias) == 2
    for layer, plain in zip(with_bias, without, strict=True):
        assert layer.shape == (2, 4, 9, 9)
        real = layer[:, :, 3:]
        torch.testing.assert_close(real.sum(-1), torch.ones(2, 4, 6))
        assert (real * torch.ones(9, 9).triu(1)[3:] == 0).all()
        assert (real[1, ..., :3] == 0).all()
        assert (layer - plain).abs().max() > 0.01


@pytest.mark.parametrize("settings", [{}, BIASES["table"], BIASES["table_score"]], ids=str)
def test_attention_weights_that_a_backend_does_not_have_are_warned_of(settings):
    """https://github.com/huggingface/transformers/pull/30652: nothing is returned rather than weights without bias or mask."""
    model, log = build(settings), io.StringIO()
    handler = logging.StreamHandler(log)
    transformers.utils.logging.add_handler(handler)
    transformers.utils.logging.warning_once.cache_clear()
    with torch.no_grad():
        weights = model(random_ids(1, 9), output_attentions=True).attentions
    transformers.utils.logging.remove_handler(handler)
    assert not weights or all(layer is None for layer in weights)
    assert "does not support `output_attentions=True`" in log.getvalue()
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for layer in model(random_ids(1, 9), output_attentions=True).attentions:
            torch.testing.assert_close(layer.sum(-1), torch.ones(1, 4, 9))
            assert (layer * torch.ones(9, 9).triu(1) == 0).all()


@every_backend
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gptj", "gpt2"])
def test_hidden_states_are_returned_as_by_the_stock_model(family, backend):
    ids = random_ids(1, 7)
    for kind in ("ForCausalLM", "Model"):
        stock = tiny_model(family, kind, attn_implementation=backend)
        expected = hidden_states(stock, ids)
        converted = apply_drope(tiny_model(family, kind, attn_implementation=backend), "nope", rope_scale=1.0)
        states = hidden_states(converted, ids)
        assert len(states) == len(expected) == 3
        for ours, theirs in zip(states, expected, strict=True):
            assert torch.equal(ours, theirs)


@every_backend
@pytest.mark.parametrize("head", range(4))
def test_a_heads_bias_reaches_that_head_only(head, backend, monkeypatch):
    """https://github.com/vllm-project/vllm/pull/1938 and https://github.com/ekzhang/jax-js/pull/180

    Query heads share keys by repetition, not by tiling.
    """
    recorder = Recorder(monkeypatch)
    model = build(BIASES["table"], backend=backend)
    for bias in model.position_biases():
        bias.bias.weight.data.zero_()
    ids, outputs = random_ids(1, 7), []
    for value in (0.0, 3.0):
        bias = next(model.position_biases())
        bias.bias.weight.data[:5, head] = value
        recorder.calls.clear()
        stepwise(model, ids, (6,))
        # The first layer's input is the same for both.
        outputs.append([call.output for call in recorder.calls if call.module is model.model.layers[0].self_attn])
    for plain, moved in zip(*outputs, strict=True):
        changed = (plain - moved).abs().amax((0, 1, 3)) > 1e-6
        assert changed.tolist() == [h == head for h in range(4)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("distance", [0, 1])
@pytest.mark.parametrize(
    ("family", "backend"), [*itertools.product(("llama", "gpt2"), BACKENDS), ("llama", "flex_attention")]
)
def test_a_strong_bias_for_one_distance_copies_that_tokens_value(family, distance, backend, monkeypatch):
    """https://github.com/mosaicml/llm-foundry/issues/186 and https://github.com/vllm-project/vllm/pull/945"""
    recorder = Recorder(monkeypatch)
    model = build(BIASES["table"], family, "eager")
    model.set_attn_implementation(backend)
    for bias in model.position_biases():
        bias.bias.weight.data.zero_()
        bias.bias.weight.data[5 - distance] = 2000.0
    with torch.compiler.set_stance("force_eager"):
        stepwise(model, random_ids(1, 7), (5,))
    assert recorder.calls
    for call in recorder.calls:
        value = call.value.repeat_interleave(4 // call.value.shape[1], 1).transpose(1, 2)
        for i in range(call.query.shape[2]):
            position = i + call.query_offset
            if position >= distance:
                torch.testing.assert_close(call.output[:, i], value[:, position - distance], atol=1e-6, rtol=1e-6)


LARGE = {
    "table": {"position_bias": {"type": "table", "max_distance": 6}},
    "table, head gate": {"position_bias": {"type": "table", "max_distance": 6}, "gate": {"type": "head"}},
    "log": {"position_bias": {"type": "log"}},
    "far log, score gate": {"position_bias": {"type": "log", "sign": 1}, "gate": {"type": "score"}},
    "linear": {"position_bias": {"type": "linear", "learned": True}},
    "low rank": {"position_bias": {"type": "low_rank", "rank": 4}},
    "disentangled": {"position_bias": {"type": "disentangled"}},
}


@pytest.mark.parametrize("size", [50.0, -50.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LARGE)
def test_masked_weights_are_exactly_zero_for_any_kind_of_bias(name, dtype, size):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2658: padding and the future are both masked, on top of a large bias."""
    model = build(LARGE[name], backend="eager").to(dtype)
    for bias in model.position_biases():
        for parameter in bias.bias.parameters():
            # Queries times keys of a disentangled bias would not fit half precision.
            parameter.data.mul_(max(min(size, 50.0), -50.0) if name == "disentangled" else size)
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    with torch.no_grad():
        output = model(ids, attention_mask=mask, output_attentions=True)
    assert output.logits[mask.bool()].isfinite().all()
    for layer in output.attentions:
        real = layer[mask[:, None].expand(-1, 4, -1).bool()]
        assert real.isfinite().all()
        torch.testing.assert_close(real.float().sum(-1), torch.ones(len(real)), atol=2e-2, rtol=0)
        assert (layer[0] * torch.ones(9, 9).triu(1) == 0).all()
        assert (layer[1, :, 3:] * torch.ones(9, 9).triu(1)[3:] == 0).all()
        assert (layer[1, :, 3:, :3] == 0).all()


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [50.0, 1e4, -1e4])
def test_masked_keys_stay_masked_for_any_bias(size, dtype, backend):
    """https://github.com/huggingface/transformers/pull/18185"""
    model = build(BIASES["table"], backend=backend).to(dtype)
    for bias in model.position_biases():
        bias.bias.weight.data = torch.where(torch.arange(11)[:, None] % 2 == 0, size, -size).expand(-1, 4).clone()
        assert bias.bias.weight.dtype == torch.float32
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    result = logits(model, ids, attention_mask=mask)
    assert result[mask.bool()].isfinite().all()
    changed = ids.clone()
    changed[1, :3] = 50
    changed[:, -1] = 60
    again = logits(model, changed, attention_mask=mask)
    assert torch.equal(again[0, :-1], result[0, :-1])
    assert torch.equal(again[1, 3:-1], result[1, 3:-1])


def check_rows_that_see_nothing(model):
    """A row of padding alone and one that begins with it: all is finite, and what is no padding is as it is alone."""
    ids, mask = random_ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1] = 0
    mask[2, :6] = 0
    output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    assert output.logits.isfinite().all()
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    alone = logits(model, ids[2:, 6:])
    torch.testing.assert_close(output.logits[2:, 6:].detach(), alone, atol=1e-4, rtol=1e-4)


@every_backend
@every_bias
def test_rows_that_see_nothing_give_no_nan(bias, backend):
    """https://github.com/unslothai/unsloth/pull/9848"""
    check_rows_that_see_nothing(build(BIASES[bias], backend=backend))


@every_backend
@every_bias
def test_packed_documents_see_only_themselves(bias, backend):
    """https://github.com/huggingface/nanoVLM/pull/204"""
    model = build(BIASES[bias], backend=backend)
    ids = random_ids(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = logits(model, ids, position_ids=positions, use_cache=False)
    torch.testing.assert_close(packed[:, :4], logits(model, ids[:, :4]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed[:, 4:], logits(model, ids[:, 4:]), atol=1e-4, rtol=1e-4)


@every_bias
@pytest.mark.parametrize("padding", [0, 3])
def test_blocks_of_queries_equal_one_block_gradients_included(bias, padding, monkeypatch):
    ids, mask = random_ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[1, :padding] = 0
    results = []
    for block in (64, 4):
        monkeypatch.setattr(block_bias_attention, "QUERY_BLOCK", block)
        model = build(BIASES[bias])
        output = model(ids, attention_mask=mask if padding else None, labels=ids)
        output.loss.backward()
        quiet = logits(model, ids, attention_mask=mask if padding else None)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append((output.logits.detach(), quiet, gradients))
    (one, one_quiet, one_grads), (many, many_quiet, many_grads) = results
    real = mask.bool()
    torch.testing.assert_close(many[real], one[real], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(many_quiet[real], one_quiet[real], atol=1e-4, rtol=1e-4)
    for name, gradient in one_grads.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(many_grads[name], gradient, atol=1e-4 * max(scale, 1e-3), rtol=1e-3, msg=name)
        if "position_bias" in name:
            assert scale > 0, name


@every_bias
@pytest.mark.usefixtures("small_blocks")
def test_chunked_prefill_in_blocks_equals_full_forward(bias):
    model, ids = build(BIASES[bias]), random_ids(2, 17)
    torch.testing.assert_close(stepwise(model, ids, (6, 7)), logits(model, ids), atol=1e-4, rtol=1e-4)
    eager = build(BIASES[bias], backend="eager")
    torch.testing.assert_close(logits(eager, ids), logits(model, ids), atol=1e-4, rtol=1e-4)
    uncached = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids, cache_implementation="static"), uncached)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_never_see_the_whole_score_matrix(monkeypatch):
    """A long sequence must not make (heads, L, L) of anything."""
    shapes = []
    original = block_bias_attention.unfold_rows
    monkeypatch.setattr(
        block_bias_attention, "unfold_rows", lambda row, n, m: (shapes.append((n, m)), original(row, n, m))[1]
    )
    logits(build(BIASES["table_score"]), random_ids(1, 16))
    assert shapes
    assert max(queries for queries, _ in shapes) == 4
    # Without a mask the future is not even looked at.
    assert min(keys for _, keys in shapes) == 4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bias", ["table", "table_query", "low_rank_score"])
@pytest.mark.usefixtures("small_blocks")
def test_gradient_checkpointing_gives_the_same_gradients(bias, reentrant):
    """https://github.com/huggingface/transformers/pull/11353"""
    ids, gradients = random_ids(2, 9), []
    for checkpointing in (False, True):
        model = build(BIASES[bias]).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@every_bias
def test_beams_and_prompt_lookup_agree_with_uncached_decoding(bias):
    """https://github.com/huggingface/transformers/pull/30311"""
    model = build(BIASES[bias])
    ids = random_ids(1, 6).repeat(1, 2)
    greedy = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), greedy)
    beams = generate(model, ids, num_beams=3, use_cache=False)
    assert torch.equal(generate(model, ids, num_beams=3), beams)


COMPILED = {
    **BIASES,
    "log": {"position_bias": {"type": "log"}},
    "window": {**BIASES["table"], "window": 5},
    "disentangled": {"position_bias": {"type": "disentangled"}},
    "scale": {"attention_scale": {"coefficient": 0.5, "original_max_position_embeddings": 4}},
}


@pytest.fixture
def graphs():
    """The graphs that `torch.compile(backend=graphs.compile)` makes."""

    class Graphs(list):
        def compile(self, graph, inputs):
            self.append(graph)
            return graph.forward

    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_decoding_with_a_static_cache_is_one_graph(name, graphs):
    model, ids = build(COMPILED[name]), random_ids(2, 16)
    expected = logits(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=24)
    found = [logits(model, ids[:, :8], past_key_values=cache)]
    compiled = torch.compile(model, fullgraph=True, backend=graphs.compile)
    for step in range(8, 16):
        with torch.no_grad():
            found.append(compiled(ids[:, step : step + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["table_score", "table_query", "low_rank"])
def test_fading_and_cooling_do_not_recompile(name, graphs):
    """https://github.com/pytorch/pytorch/issues/171320: between the two ends no value is looked at."""
    model, ids = build(COMPILED[name]), random_ids(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend=graphs.compile)
    for rope_scale, temperature in ((0.9, 1.0), (0.6, 0.5), (0.2, 0.2)):
        model.set_rope_scale(rope_scale)
        if "gate" in COMPILED[name]:
            model.set_gate_temperature(temperature)
        with torch.no_grad():
            found = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(found, logits(model, ids), atol=1e-4, rtol=1e-4)
    assert len(graphs) == 1


@pytest.mark.parametrize("settings", [{}, BIASES["low_rank"], BIASES["table"]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_model_is_one_graph(family, settings):
    model = build(settings, family)
    ids = random_ids(1, 9)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        result = compiled(ids, use_cache=False).logits
    torch._dynamo.reset()
    torch.testing.assert_close(result, logits(model, ids), atol=1e-4, rtol=1e-4)


def test_models_built_from_the_same_config_object_stay_stock():
    config = tiny_config("llama")
    first, second = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    before, ids = copy.deepcopy(config.to_dict()), random_ids(1, 9)
    expected = logits(second, ids)
    assert apply_drope(first, "simple", rope_scale=0.5) is first
    assert type(config) is transformers.LlamaConfig
    assert config.to_dict() == before
    assert second.config is config
    assert first.config is not config
    assert torch.equal(logits(second, ids), expected)
    assert all(module.config is first.config for module in first.modules() if hasattr(module, "config"))


def test_weights_are_untouched_and_shared_with_nothing():
    model = tiny_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    apply_drope(model, "gated")
    after = model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    added = set(after) - set(before)
    assert added == {
        f"model.layers.{layer}.self_attn.position_bias.{name}"
        for layer in (0, 1)
        for name in ("bias.weight", "gate.g", "gate.t")
    }


def test_dropped_model_runs_when_another_tool_replaces_the_rotation(monkeypatch):
    """https://github.com/linkedin/Liger-Kernel/pull/170"""

    def fail(*args, **kwargs):
        raise AssertionError("rotated")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", fail)
    model = apply_drope(tiny_model("llama"), "nope")
    assert logits(model, random_ids(1, 9)).isfinite().all()
    with pytest.raises(AssertionError, match="rotated"):
        tiny_model("llama")(random_ids(1, 9))


def test_converting_twice_is_refused():
    model = apply_drope(tiny_model("llama"), "nope")
    with pytest.raises(ValueError, match="DroPELlamaForCausalLM is converted already; use set_rope_scale"):
        apply_drope(model, "simple")


@pytest.mark.parametrize(
    ("overrides", "match"),
    [({"rope_layers": [5]}, "rope_layers"), ({"window": [3]}, "window"), ({"rope_scale": 2}, "rope_scale")],
)
def test_a_refused_conversion_leaves_the_model_as_it_was(overrides, match):
    model, ids = tiny_model("llama"), random_ids(1, 9)
    expected = logits(model, ids)
    with pytest.raises(ValueError, match=match):
        apply_drope(model, "nope", **overrides)
    assert type(model) is transformers.LlamaForCausalLM
    assert not any(type(module).__name__.startswith("DroPE") for module in model.modules())
    assert torch.equal(logits(model, ids), expected)


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(ValueError, match="apply_drope takes a Transformers model, not Linear"):
        apply_drope(torch.nn.Linear(2, 2), "nope")


def test_a_model_without_position_encoding_to_take_out_is_refused():
    config = transformers.BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="no position encoding here that hf_drope could take out"):
        apply_drope(transformers.BloomModel(config), "nope")


def test_gate_temperature_moves_every_gate_and_is_stored():
    model, ids = build(BIASES["table_score"]), random_ids(1, 9)
    before = logits(model, ids)
    model.set_gate_temperature(0.2)
    assert model.config.drope_parameters["gate"]["temperature"] == 0.2
    assert (logits(model, ids) - before).abs().max() > 1e-3
    fresh = build({**BIASES["table_score"], "gate": {"type": "score", "temperature": 0.2}})
    assert torch.equal(logits(model, ids), logits(fresh, ids))
    with pytest.raises(ValueError, match=r"gate\.temperature is 0"):
        model.set_gate_temperature(0)
    with pytest.raises(ValueError, match="no gate with a temperature"):
        build(BIASES["table"]).set_gate_temperature(0.5)


def test_class_and_in_memory_conversion_are_one_thing():
    converted = apply_drope(tiny_model("llama"), "simple")
    config = drope_config_class("llama")(**tiny_config("llama").to_dict() | converted.config.to_dict())
    built = drope_class(transformers.LlamaForCausalLM)(config).eval()
    assert type(built) is type(converted)
    built.load_state_dict(converted.state_dict())
    ids = random_ids(1, 9)
    assert torch.equal(logits(built, ids), logits(converted, ids))


def test_a_loaded_model_converted_in_memory_has_its_own_type(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    loaded = apply_drope(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), "simple")
    assert loaded.config.model_type == "llama_drope"


def test_attention_runs_once_a_layer(monkeypatch):
    """https://github.com/datamllab/LongLM/issues/23: a patch that is never called must not go unnoticed."""
    recorder = Recorder(monkeypatch)
    for family in FAMILIES:
        recorder.calls.clear()
        logits(build(BIASES["table"], family), random_ids(1, 5))
        assert len(recorder.calls) == 2
        assert all(call.weights is None for call in recorder.calls)

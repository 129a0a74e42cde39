"""What has to hold for every family, every kind of bias and gate and every backend, one row each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import Recorder, randomise_position, reference_attention
from tiny import FAMILIES, random_ids, tiny_model
from transformers import DynamicCache

from hf_drope import DroPEParameters, apply_drope

# A new preset or combination costs one line; a new family one line in tiny.py.
DISENTANGLED = DroPEParameters.preset("disentangled")
PRUNED = {"rank": 2, "content": "identity", "terms": ["p2p", "p2c"]}
LOW_RANK = {"position_bias": {"type": "low_rank", "rank": 8, "max_distance": 64}}
POSITIONS: dict[str, DroPEParameters] = {
    "nope": DroPEParameters.preset("nope"),
    "simple": DroPEParameters.preset("simple", max_distance=6),
    "gated": DroPEParameters.preset("gated", max_distance=6),
    "drope": DroPEParameters.preset("drope", temperature=0.7),
    "t5": DroPEParameters.preset("t5", num_buckets=6, max_distance=9),
    "alibi": DroPEParameters.preset("alibi"),
    "kerple": DroPEParameters.preset("kerple"),
    "low_rank": DroPEParameters.from_dict(LOW_RANK),
    "low_rank_head": DroPEParameters.from_dict({**LOW_RANK, "gate": {"type": "head"}}),
    "low_rank_query": DroPEParameters.from_dict({**LOW_RANK, "gate": {"type": "query", "temperature": 0.8}}),
    "disentangled": DISENTANGLED,
    "disentangled_rank": DISENTANGLED.replace(**PRUNED, share="kv_group"),
    "disentangled_query": DISENTANGLED.replace(gate={"type": "query", "temperature": 0.8}, terms_scale=0.7),
    "disentangled_score": DISENTANGLED.replace(gate={"type": "score"}),
    "disentangled_clip": DISENTANGLED.replace(position_scaling={"type": "clip", "max_distance": 3}, share="layer"),
}
BACKENDS = ("eager", "sdpa")

every_family = pytest.mark.parametrize("family", FAMILIES)
# A learned table has no rotation to take apart.
CASES = [(f, p) for f in FAMILIES for p in POSITIONS if f != "gpt2" or not p.startswith("disentangled")]
every_family_and_position = pytest.mark.parametrize(("family", "position"), CASES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def build(family: str, position: str, backend: str, **overrides: Any) -> Any:
    model = tiny_model(family, attn_implementation=backend, **overrides)
    return randomise_position(apply_drope(model, POSITIONS[position]))


def generate(model: Any, ids: torch.Tensor, count: int = 6, **kwargs: Any) -> torch.Tensor:
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, **kwargs)[:, ids.shape[1] :]


@every_backend
@every_family_and_position
def test_cached_decoding_equals_full_forward(family, position, backend):
    """https://github.com/keras-team/keras-hub/pull/2977 and https://github.com/adapter-hub/adapters/issues/824"""
    model = build(family, position, backend)
    ids = random_ids(2, 9)
    with torch.no_grad():
        full = model(ids).logits
        cache = DynamicCache(config=model.config)
        # A chunked prefill, then single steps.
        chunks = [ids[:, :4], ids[:, 4:7], ids[:, 7:8], ids[:, 8:]]
        steps = torch.cat([model(chunk, past_key_values=cache).logits for chunk in chunks], dim=1)
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(steps, full, atol=1e-4, rtol=1e-5)


@every_backend
@every_family_and_position
def test_greedy_generation_is_the_same_with_every_cache(family, position, backend):
    """https://github.com/keras-team/keras-hub/pull/2932: distances must not come from the length of a static cache."""
    model = build(family, position, backend)
    ids = random_ids(2, 7)
    uncached = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids), uncached), "dynamic cache"
    assert torch.equal(generate(model, ids, cache_implementation="static"), uncached), "static cache"


@every_backend
@every_family_and_position
def test_left_padded_row_equals_the_row_alone(family, position, backend):
    """https://github.com/unslothai/unsloth/issues/3699"""
    model = build(family, position, backend)
    long, short = random_ids(1, 9), random_ids(1, 6, seed=1)
    padded = torch.cat([long, torch.cat([torch.zeros(1, 3, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(padded)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(short).logits
        for position_ids in (positions, None):
            batched = model(padded, attention_mask=mask, position_ids=position_ids).logits
            torch.testing.assert_close(batched[1:, 3:], alone, atol=1e-5 * alone.abs().max().item(), rtol=0)
    together = generate(model, padded, attention_mask=mask)
    assert torch.equal(together[1:], generate(model, short)), "generated after the padded row"
    assert torch.equal(together[:1], generate(model, long)), "generated after the full row"


@every_backend
@every_family_and_position
def test_last_token_changes_no_earlier_logit(family, position, backend):
    """https://github.com/huggingface/transformers/issues/48748: a bias handed to SDPA must bring its own causality."""
    model = build(family, position, backend)
    ids = random_ids(1, 9)
    other = ids.clone()
    other[0, -1] = 3 + (ids[0, -1] - 2) % 90
    pad = torch.ones_like(ids)
    pad[0, :2] = 0
    for mask in (None, torch.ones_like(ids), pad):
        with torch.no_grad():
            before, after = (model(x, attention_mask=mask).logits for x in (ids, other))
        assert (before[:, -1] - after[:, -1]).abs().max() > 1e-3
        # The rows of the padding itself see nothing, which the stock code turns into an even look at everything.
        real = slice(2 if mask is pad else 0, -1)
        leak = (before[:, real] - after[:, real]).abs().max().item()
        assert leak <= (0.0 if backend == "eager" else 1e-6)


@every_backend
@every_family_and_position
def test_every_layer_agrees_with_the_nested_loop_reference(family, position, backend, monkeypatch):
    """https://github.com/NVIDIA/TensorRT-Model-Connect/pull/32: the bias goes onto the scaled scores, in every layer."""
    model = build(family, position, backend)
    recorder = Recorder(monkeypatch)
    ids, mask = random_ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    settings = model.config.drope_parameters
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache)
        model(ids[:, 6:], attention_mask=mask, past_key_values=cache)
        model(ids)
    assert len(recorder.calls) == 3 * model.config.num_hidden_layers
    for index, call in enumerate(recorder.calls):
        padded = index < 2 * model.config.num_hidden_layers
        visible = (mask if padded else torch.ones_like(mask))[:, : call.key.shape[2]].bool()
        hidden = call.hidden_states if call.hidden_states is not None else torch.zeros(2, call.query.shape[2], 1)
        offset = 6 if index // model.config.num_hidden_layers == 1 else 0
        expected, weights = reference_attention(
            call.query,
            call.key,
            call.value,
            hidden,
            visible,
            call.scaling,
            call.module.position_bias,
            settings,
            offset,
        )
        seen = weights.sum(-1).transpose(1, 2) > 0
        torch.testing.assert_close(call.output[seen].double(), expected[seen], atol=1e-5, rtol=1e-5)
        if call.weights is not None:
            torch.testing.assert_close(
                call.weights.transpose(1, 2)[seen].double(), weights.transpose(1, 2)[seen], atol=1e-5, rtol=0
            )


@every_backend
@every_family_and_position
def test_dropped_position_encoding_ignores_position_ids(family, position, backend):
    model = build(family, position, backend)
    ids = random_ids(2, 9)
    mask = torch.ones_like(ids)
    odd = torch.arange(9)[None].expand(2, -1) * 3 + 5
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask, position_ids=odd).logits, model(ids).logits)


@every_backend
@every_family
def test_full_strength_without_a_bias_is_the_stock_model(family, backend):
    ids = random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    stock = tiny_model(family, attn_implementation=backend)
    converted = apply_drope(tiny_model(family, attn_implementation=backend), "nope", rope_scale=1.0)
    with torch.no_grad():
        for kwargs in ({}, {"attention_mask": mask}):
            assert torch.equal(converted(ids, **kwargs).logits, stock(ids, **kwargs).logits)
    assert torch.equal(generate(converted, ids), generate(stock, ids))


@every_backend
@every_family
def test_stock_models_in_the_same_process_are_untouched(family, backend):
    """https://github.com/linkedin/Liger-Kernel/issues/242: nothing changes for the process as a whole."""
    ids = random_ids(2, 9)
    early = tiny_model(family, attn_implementation=backend)
    with torch.no_grad():
        expected = early(ids).logits
        assert not torch.equal(build(family, "simple", backend)(ids).logits, expected)
        assert torch.equal(early(ids).logits, expected)
        late = tiny_model(family, attn_implementation=backend)
        assert type(late) is type(early)
        assert torch.equal(late(ids).logits, expected)


@every_family
def test_one_layer_without_position_ignores_the_order_of_tokens(family):
    layers = {"n_layer": 1} if family in ("gpt2", "gptj") else {"num_hidden_layers": 1}
    ids = random_ids(1, 12)
    shuffled = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], dim=1)
    control = tiny_model(family, **layers)
    model = apply_drope(tiny_model(family, **layers), "nope")
    with torch.no_grad():
        scale = model(ids).logits[:, -1].abs().max().item()
        assert (model(ids).logits[:, -1] - model(shuffled).logits[:, -1]).abs().max() <= 1e-6 * max(scale, 1)
        assert (control(ids).logits[:, -1] - control(shuffled).logits[:, -1]).abs().max() > 1e-2

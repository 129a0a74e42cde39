"""No key after a query counts, and no padding: on every backend, whatever the mask, the cache and the parts of the prompt."""

from __future__ import annotations

import pytest
import torch
from reference import randomise_position
from tiny import random_ids, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_drope import DroPEParameters, apply_drope

BACKENDS = ("eager", "sdpa", "flex_attention")
SETTINGS = {
    "no bias": {},
    "RoPE": {"rope_scale": 1.0},
    "table": {"position_bias": {"type": "table", "max_distance": 6}},
    "log, score gate": {"position_bias": {"type": "log"}, "gate": {"type": "score"}},
    "low rank": {"position_bias": {"type": "low_rank", "rank": 4}},
    "disentangled": {"position_bias": {"type": "disentangled"}},
    "table, window": {"position_bias": {"type": "table", "max_distance": 6}, "window": 3},
}
# How a prompt of nine tokens comes in: at once, or in parts that a cache joins.
PARTS = {"no cache": None, "dynamic": (9,), "dynamic in parts": (4, 3, 1, 1), "static in parts": (4, 3, 1, 1)}
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_setting = pytest.mark.parametrize("settings", SETTINGS)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _uncompiled():
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def build(settings, backend, **overrides):
    model = randomise_position(apply_drope(tiny_model("llama", **overrides), DroPEParameters.from_dict(settings)))
    model.set_attn_implementation(backend)
    return model


@torch.no_grad()
def logits(model, ids, mask=None, parts=None, static=False):
    if parts is None:
        return model(ids, attention_mask=mask, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    found, done = [], 0
    for count in parts:
        seen = None if mask is None else mask[:, : done + count]
        part = ids[:, done : done + count]
        found.append(model(part, attention_mask=seen, past_key_values=cache, use_cache=True).logits)
        done += count
    return torch.cat(found, 1)


def masks(ids):
    padded = torch.ones_like(ids)
    padded[0, :2] = 0
    return {"none": None, "ones": torch.ones_like(ids), "left padding": padded}


# The stock code's flex attention goes wrong with a static cache: see the last test.
@pytest.mark.parametrize(
    ("backend", "parts"),
    [(b, p) for b in BACKENDS for p in PARTS if b != "flex_attention" or not p.startswith("static")],
)
@every_setting
def test_the_last_token_changes_nothing_before_it(settings, backend, parts):
    """https://github.com/huggingface/transformers/issues/48748 and https://github.com/huggingface/transformers/pull/48821"""
    model, reference = build(SETTINGS[settings], backend), build(SETTINGS[settings], "eager")
    ids = random_ids(1, 9)
    other = ids.clone()
    other[0, -1] = 3 + (ids[0, -1] - 2) % 90
    for name, mask in masks(ids).items():
        given = {"mask": mask, "parts": PARTS[parts], "static": parts.startswith("static")}
        before, after = logits(model, ids, **given), logits(model, other, **given)
        real = slice(2 if name == "left padding" else 0, -1)
        bound = 0.0 if backend == "eager" else 1e-6
        assert (before[:, real] - after[:, real]).abs().max() <= bound, name
        assert (before[:, -1] - after[:, -1]).abs().max() > 1e-3, name
        expected = logits(reference, ids, mask)[:, real]
        torch.testing.assert_close(before[:, real], expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


def test_no_attention_function_is_registered_and_each_that_runs_has_its_mask():
    """https://github.com/huggingface/transformers/pull/45811 and https://github.com/huggingface/transformers/issues/46132

    A name without a mask function gets no mask, so that the model sees the future and the padding.
    """
    before = [set(registry.valid_keys()) for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    for backend in BACKENDS:
        logits(build(SETTINGS["table"], backend), random_ids(1, 9))
    after = [set(registry.valid_keys()) for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    assert after == before
    assert set(BACKENDS) - {"eager"} <= before[0]
    assert set(BACKENDS) <= before[1]
    assert issubclass(type(ALL_ATTENTION_FUNCTIONS), AttentionInterface)
    assert issubclass(type(ALL_MASK_ATTENTION_FUNCTIONS), AttentionMaskInterface)


@pytest.mark.parametrize("settings", ["table", "log, score gate", "low rank", "disentangled", "table, window"])
def test_a_function_that_someone_registers_without_a_mask_never_runs_a_bias(settings, monkeypatch):
    """https://github.com/huggingface/transformers/pull/45811"""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", ALL_ATTENTION_FUNCTIONS["sdpa"])
    with pytest.raises(ValueError, match="cannot run on attn_implementation='mine'"):
        build(SETTINGS[settings], "mine")


@every_backend
@every_setting
def test_a_padded_row_is_the_row_alone_on_every_backend(settings, backend):
    """https://github.com/huggingface/transformers/issues/46132, with a static cache as well"""
    model = build(SETTINGS[settings], backend)
    short = random_ids(1, 6, seed=1)
    ids = torch.cat([random_ids(1, 9), torch.cat([torch.zeros(1, 3, dtype=torch.long), short], 1)])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = logits(model, short)
    for parts, static in ((None, False), ((5, 3, 1), False), ((5, 3, 1), backend != "flex_attention")):
        found = logits(model, ids, mask, parts, static)[1:, 3:]
        torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("settings", ["table", "log, score gate", "low rank", "disentangled", "table, window"])
def test_flex_attention_with_a_bias_refuses_the_cache_whose_counter_it_would_read_too_late(settings):
    """https://github.com/huggingface/transformers/issues/46132: the first part of a prompt is right, all others are not."""
    model, ids = build(SETTINGS[settings], "flex_attention"), random_ids(1, 9)
    expected = logits(model, ids)
    found = logits(model, ids, None, (9,), static=True)
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    with pytest.raises(ValueError, match="use a dynamic cache, or sdpa"):
        logits(model, ids, None, (5, 4), static=True)

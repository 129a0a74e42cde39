"""Rows that are more than one text: packed documents, padding on either side, rows with nothing in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import randomise_position
from test_attention import check_rows_that_see_nothing
from test_matrix import BACKENDS, POSITIONS, build, generate
from tiny import random_ids, tiny_model
from transformers import DynamicCache

from hf_drope import apply_drope

PRESETS = ("nope", "simple", "drope", "low_rank", "disentangled", "disentangled_score")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_preset = pytest.mark.parametrize("preset", PRESETS)
# Two documents of four; two with one token, whose positions do not restart but stand still.
PACKED = {"two": [4, 4], "single tokens": [2, 1, 2], "one each": [1, 1, 1]}
RESTART = "position_ids restart within a row.*leave attention_mask out and pass use_cache=False"


def logits(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def positions_of(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@every_backend
@every_preset
@pytest.mark.parametrize("packed", PACKED)
def test_packed_documents_are_as_alone_and_do_not_see_each_other(packed, preset, backend):
    """https://github.com/huggingface/transformers/pull/46634 and https://github.com/modelscope/ms-swift/pull/9904"""
    model, lengths = build("llama", preset, backend), PACKED[packed]
    ids = random_ids(1, sum(lengths))
    given = {"position_ids": positions_of(lengths), "use_cache": False}
    found = logits(model, ids, **given)
    for part, alone in zip(found.split(lengths, 1), ids.split(lengths, 1), strict=True):
        assert_close(part, logits(model, alone, use_cache=False))
    changed = ids.clone()
    changed[:, : lengths[0]] = random_ids(1, lengths[0], seed=5)
    assert torch.equal(logits(model, changed, **given)[:, lengths[0] :], found[:, lengths[0] :])


@every_backend
@pytest.mark.parametrize("preset", ["nope", "simple", "disentangled"])
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize(
    ("masked", "use_cache"), [(True, False), (True, True), (False, True), (True, None), (False, None)]
)
def test_packed_documents_that_would_see_each_other_are_refused(masked, use_cache, packed, preset, backend):
    """https://github.com/huggingface/nanoVLM/pull/204: Transformers looks at positions only without a mask and a cache."""
    model, lengths = build("llama", preset, backend), PACKED[packed]
    ids = random_ids(2, sum(lengths))
    mask = torch.ones_like(ids) if masked else None
    for network in (model, model.model):
        with pytest.raises(ValueError, match=RESTART), torch.no_grad():
            network(ids, position_ids=positions_of(lengths), attention_mask=mask, use_cache=use_cache)


def test_packed_documents_are_refused_with_a_cache_that_is_given():
    model, lengths = build("llama", "simple", "sdpa"), PACKED["two"]
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match=RESTART):
        logits(model, random_ids(1, 8), position_ids=positions_of(lengths), past_key_values=cache, use_cache=False)


def test_training_with_checkpointing_keeps_packed_documents_apart():
    """Transformers then leaves the cache out by itself."""
    model, lengths = build("llama", "simple", "sdpa").train(), PACKED["two"]
    model.gradient_checkpointing_enable()
    ids = random_ids(1, 8)
    found = model(ids, position_ids=positions_of(lengths)).logits
    assert_close(found[:, 4:].detach(), logits(model.eval(), ids[:, 4:]))


@every_backend
@pytest.mark.parametrize("preset", ["simple", "low_rank", "disentangled"])
def test_a_mask_of_ones_own_may_part_documents(preset, backend):
    model, ids = build("llama", preset, backend), random_ids(1, 8)
    document = torch.arange(8) // 4
    seen = (document[:, None] == document) & torch.ones(8, 8, dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, 8, 8).masked_fill(~seen, torch.finfo(torch.float32).min)
    found = logits(model, ids, attention_mask=mask, position_ids=positions_of([4, 4]))
    for part, alone in zip(found.split(4, 1), ids.split(4, 1), strict=True):
        assert_close(part, logits(model, alone))


WINDOWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "none": ("llama", {}, {}),
    "the architecture's": ("mistral", {"sliding_window": 3}, {}),
    "ours": ("llama", {}, {"window": 3}),
}


@every_backend
@every_preset
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_padded_row_is_the_row_alone_with_more_padding_than_window(window, side, preset, backend):
    """https://github.com/huggingface/transformers/issues/22161 and https://github.com/ndif-team/nnsight/pull/673"""
    family, stock, settings = WINDOWS[window]
    model = tiny_model(family, attn_implementation=backend, **stock)
    model = randomise_position(apply_drope(model, POSITIONS[preset], **settings))
    long, short = random_ids(1, 11), random_ids(1, 6, seed=1)
    padding = torch.zeros(1, 5, dtype=torch.long)
    ids = torch.cat([long, torch.cat([padding, short] if side == "left" else [short, padding], 1)])
    mask = torch.ones_like(ids)
    real = slice(5, None) if side == "left" else slice(None, 6)
    mask[1] = 0
    mask[1, real] = 1
    alone = logits(model, short)
    for positions in (None, (mask.cumsum(-1) - 1).clamp(min=0), torch.arange(11)[None]):
        found = logits(model, ids, attention_mask=mask, position_ids=positions)
        assert_close(found[1:, real], alone)
    if side == "left":
        together = generate(model, ids, 10, attention_mask=mask)
        assert torch.equal(together[1:], generate(model, short, 10))
        assert torch.equal(together[:1], generate(model, long, 10))


@every_backend
@every_preset
def test_rows_that_see_nothing_give_no_nan_with_any_preset(preset, backend):
    """https://github.com/pytorch/pytorch/issues/103749"""
    check_rows_that_see_nothing(build("llama", preset, backend))

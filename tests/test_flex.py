"""Flex attention against eager attention: biases, gates, windows, padding, caches.

On the CPU it is compiled for a whole prompt without padding only. Elsewhere PyTorch 2.13 writes C++ that does not compile, with
stock models as well (it replaces the name of one size within that of another), so those tests run it uncompiled.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import randomise_position
from test_attention import build, generate, logits
from tiny import random_ids
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_drope import apply_drope

GATES: tuple[dict[str, Any] | None, ...] = (None, {"type": "head"}, {"type": "query"}, {"type": "score"})
BIASES: dict[str, dict[str, Any]] = {
    "table": {"type": "table", "max_distance": 12},
    "log": {"type": "log"},
    "linear": {"type": "linear", "learned": True},
    "low rank": {"type": "low_rank", "rank": 4},
}
SETTINGS: dict[str, dict[str, Any]] = {
    f"{name}, {gate['type'] if gate else 'no'} gate": {"position_bias": bias, "gate": gate}
    for name, bias in BIASES.items()
    for gate in GATES
}
SETTINGS["log, score gate, window"] = {**SETTINGS["log, score gate"], "window": 9}
SETTINGS["low rank, windows of their own"] = {**SETTINGS["low rank, no gate"], "window": [9, 5]}
SETTINGS["no bias, window"] = {"window": 9}
SETTINGS["disentangled"] = {"position_bias": {"type": "disentangled"}, "gate": {"type": "query"}}
SETTINGS["disentangled, rank 4"] = {"position_bias": {"type": "disentangled", "rank": 4}}
COMPILED = ("table, query gate", "log, score gate, window", "disentangled, rank 4")


@pytest.fixture
def uncompiled():
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def with_flex(settings: dict[str, Any], **overrides: Any) -> tuple[Any, Any]:
    """The same model with eager and with flex attention."""
    eager = build(settings, backend="eager", **overrides)
    flex = build(settings, backend="eager", **overrides)
    flex.set_attn_implementation("flex_attention")
    return eager, flex


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SETTINGS)
def test_flex_attention_is_eager_attention_with_padding_and_a_cache(name, uncompiled):
    ids, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :7] = 0
    eager, flex = with_flex(SETTINGS[name])
    expected, found = (logits(model, ids, attention_mask=mask)[mask.bool()] for model in (eager, flex))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    texts = [generate(model, ids, 4, attention_mask=mask) for model in (eager, flex)]
    assert torch.equal(*texts)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_three_heads_share_a_key_head(uncompiled):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    eager, flex = with_flex(SETTINGS["table, score gate"], family="qwen3", **heads)
    ids = random_ids(2, 30)
    torch.testing.assert_close(logits(flex, ids), logits(eager, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_scores_are_capped_before_the_bias(uncompiled):
    """As Gemma 2 does: its eager attention adds masks to capped scores."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Gemma2Config(vocab_size=97, intermediate_size=48, attn_logit_softcapping=2.0, **sizes)
    config._attn_implementation = "eager"
    eager = randomise_position(apply_drope(Gemma2ForCausalLM(config).eval(), "simple"))
    flex = copy.deepcopy(eager)
    flex.set_attn_implementation("flex_attention")
    ids = random_ids(2, 30)
    torch.testing.assert_close(logits(flex, ids), logits(eager, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_flex_attention_is_eager_attention_in_fp32(name, dtype):
    ids = random_ids(2, 40)
    eager, flex = with_flex(SETTINGS[name])
    expected, found = logits(eager, ids), logits(flex.to(dtype), ids).float()
    bound = 1e-4 if dtype == torch.float32 else 0.03
    assert (found - expected).norm() <= bound * expected.norm()


def test_training_on_the_cpu_is_refused_and_says_what_can():
    _, model = with_flex(SETTINGS["table, query gate"])
    with pytest.raises(ValueError, match="flex_attention has no backward pass on the CPU; train with sdpa"):
        model(random_ids(1, 40))


@pytest.mark.parametrize("window", [None, 9])
def test_a_mask_of_ones_own_is_refused(window):
    _, model = with_flex({**SETTINGS["table, query gate"], "window": window})
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    with (
        torch.no_grad(),
        pytest.raises(
            ValueError, match="takes a block mask, which Transformers makes; for a mask of your own use sdpa"
        ),
    ):
        model(random_ids(1, 8), attention_mask=mask)


def test_attention_sinks_are_refused():
    _, model = with_flex(SETTINGS["table, query gate"])
    with torch.no_grad(), pytest.raises(ValueError, match="no attention sinks; use eager"):
        model(random_ids(1, 8), s_aux=torch.ones(4))


def test_dropout_is_refused():
    _, model = with_flex(SETTINGS["table, query gate"], attention_dropout=0.1)
    with torch.no_grad(), pytest.raises(ValueError, match="no dropout; set the config's attention_dropout to 0"):
        model.train()(random_ids(1, 8))

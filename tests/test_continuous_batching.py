"""Continuous batching: a model without a bias generates what it does alone, one that needs distances refuses at once."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from model_types import small_model
from reference import randomise_position
from test_matrix import POSITIONS, generate
from tiny import random_ids
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_drope import DroPEParameters, apply_drope

GROWING = {"attention_scale": {"coefficient": 0.5, "original_max_position_embeddings": 4}}


def batched(model: Any, prompts: list[list[int]], count: int = 6) -> list[Any]:
    """The output for each prompt, with pages so small that a prompt needs several."""
    settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    known = inspect.signature(ContinuousBatchingConfig).parameters
    size = "page_size" if "page_size" in known else "block_size"
    wanted = {size: 4, "num_blocks": 64, "max_batch_tokens": 32, "auto_switch_to_flash": False}
    pages = ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})
    outputs = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=pages)
    # Requests come back in the order in which they were done.
    by_prompt = {tuple(output.prompt_ids): output for output in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


WITHOUT_DISTANCES: dict[str, dict[str, Any]] = {
    "dropped": {},
    "RoPE at full strength": {"rope_scale": 1.0},
    "RoPE fading": {"rope_scale": 0.4},
    "RoPE in one layer": {"rope_layers": [0]},
    "norms": {"qk_norm": "qk"},
    "constant scale": {"attention_scale": {"factor": 1.3}},
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "sdpa") for name in WITHOUT_DISTANCES), ("dropped", "eager"), ("constant scale", "eager")],
)
def test_a_model_without_a_bias_generates_what_it_does_alone(name, backend):
    model = apply_drope(small_model("llama", backend), "nope", **WITHOUT_DISTANCES[name])
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (5, 20, 9)]
    for prompt, output in zip(prompts, batched(model, prompts), strict=True):
        assert output.error is None
        assert output.generated_tokens == generate(model, torch.tensor([prompt]), 6)[0].tolist()
    assert model.config._attn_implementation == backend


def test_windows_of_the_architecture_are_left_to_the_stock_code():
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (5, 20)]
    stock = small_model("mistral", sliding_window=6)
    expected = [output.generated_tokens for output in batched(stock, prompts)]
    full = apply_drope(stock, "nope", rope_scale=1.0)
    assert [output.generated_tokens for output in batched(full, prompts)] == expected
    full.set_rope_scale(0.0)
    assert [output.generated_tokens for output in batched(full, prompts)] != expected


NEEDS_DISTANCES = {
    "simple": (POSITIONS["simple"], "position bias 'table'"),
    "drope": (POSITIONS["drope"], "position bias 'log'"),
    "low_rank": (POSITIONS["low_rank"], "position bias 'low_rank'"),
    "disentangled": (POSITIONS["disentangled"], "position bias 'disentangled'"),
    "window": (DroPEParameters.from_dict({"window": 4}), "window 4"),
    "growing scale": (DroPEParameters.from_dict(GROWING), "attention scale "),
}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NEEDS_DISTANCES)
def test_a_model_that_needs_distances_refuses_before_it_begins(name, backend):
    settings, what = NEEDS_DISTANCES[name]
    model = randomise_position(apply_drope(small_model("llama", backend), settings))
    with pytest.raises(
        ValueError, match=f"^A model with {what}.* cannot generate by continuous batching, .*; use generate"
    ):
        batched(model, [[5, 6, 7]])
    assert model.config._attn_implementation == backend


@pytest.mark.parametrize("name", NEEDS_DISTANCES)
def test_a_manager_that_asks_nobody_gets_an_error_and_no_tokens(name, monkeypatch):
    """An engine may build its own; what holds the keys of many requests in one row must not meet a bias."""
    model = randomise_position(apply_drope(small_model("llama"), NEEDS_DISTANCES[name][0]))
    monkeypatch.delattr(type(model), "init_continuous_batching")
    try:
        (output,) = batched(model, [[5, 6, 7]])
        tokens, said = output.generated_tokens, output.error
    except ValueError as error:
        # Older releases change to backends of their own first.
        tokens, said = [], str(error)
    assert not tokens
    assert "does not say where its keys stand" in said or "cannot run on attn_implementation='paged|sdpa'" in said


def test_models_that_do_not_generate_have_no_such_method():
    model = apply_drope(small_model("llama"), "nope")
    assert hasattr(model, "init_continuous_batching")
    assert not hasattr(model.model, "init_continuous_batching")

"""Perplexity by position: against plain loops in float64, and against logits made at once."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from model_types import small_model
from tiny import VOCAB, random_ids, tiny_model
from torch.nn.functional import cross_entropy

from hf_drope.perplexity import (
    half_width,
    measure_perplexity,
    position_edges,
    student_t,
    token_losses,
    window_starts,
)


def whole_losses(model, ids):
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].float()
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def loop_losses(model, row):
    """What each token after the first costs, from the logits of the whole row, in Python's floats."""
    with torch.no_grad():
        logits = model(row[None]).logits[0].double().tolist()
    losses = []
    for scores, token in zip(logits[:-1], row[1:].tolist(), strict=True):
        top = max(scores)
        losses.append(math.log(sum(math.exp(score - top) for score in scores)) + top - scores[token])
    return losses


# Their heads scale or cap logits, or scale states; the inner module that they call is not always the base model.
@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma2", "cohere", "granite", "falcon_h1", "opt", "gpt2", "gpt_neox", "nanochat", "biogpt"],
)
def test_losses_in_parts_are_those_of_all_logits_at_once(model_type):
    model, ids = small_model(model_type).eval(), random_ids(2, 40)
    torch.testing.assert_close(token_losses(model, ids, chunk=14), whole_losses(model, ids), atol=2e-5, rtol=1e-5)


def test_the_head_sees_no_more_tokens_at_a_time_than_asked_for_and_is_left_as_it_was():
    model, seen = tiny_model("llama"), []
    hook = model.lm_head.register_forward_hook(lambda _, given, made: seen.append(made.shape[:2].numel()))
    token_losses(model, random_ids(2, 40), chunk=14)
    hook.remove()
    assert max(seen) == 14
    assert not model.lm_head._forward_pre_hooks


def test_a_model_without_a_head_or_with_one_that_is_called_twice_is_refused():
    with pytest.raises(ValueError, match="LlamaModel has no output head"):
        token_losses(tiny_model("llama", "Model"), random_ids(1, 8))
    model = tiny_model("llama")
    stock = model.forward
    model.forward = lambda *args, **kwargs: (stock(*args, **kwargs), stock(*args, **kwargs))[0]
    with pytest.raises(ValueError, match="does not make its logits by one call of its head"):
        token_losses(model, random_ids(1, 8))


@pytest.mark.parametrize("beginning", [[], [1]])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_figures_are_those_of_plain_loops_in_float64(batch_size, beginning):
    model, text = tiny_model("llama", scale=3.0), random_ids(1, 100)[0]
    length, advanced = 24, []
    found = measure_perplexity(
        model, text, length, 24, beginning=beginning, batch_size=batch_size, advance=advanced.append
    )

    half, start, means, by_place = length // 2, 0, [], [[] for _ in range(length)]
    while start + length <= len(text):
        row = text[start : start + length].clone()
        row[: len(beginning)] = torch.tensor(beginning)
        losses = loop_losses(model, row)
        for place, loss in enumerate(losses, start=1):
            by_place[place].append(loss)
        means.append(sum(losses[-half:]) / half)
        start += half
    mean = sum(means) / len(means)
    spread = student_t(len(means) - 1) * (sum((m - mean) ** 2 for m in means) / (len(means) - 1)) ** 0.5
    spread /= len(means) ** 0.5
    assert found["windows"] == len(means) == 7
    assert found["tokens"] == len(means) * half
    assert sum(advanced) == len(means) * length
    for key, value in (("perplexity", mean), ("low", mean - spread), ("high", mean + spread)):
        assert found[key] == pytest.approx(math.exp(value), rel=1e-4)
    assert found["edges"] == list(range(0, 25, 3))
    for first, last, value in zip(found["edges"], found["edges"][1:], found["by_position"], strict=False):
        there = [loss for place in by_place[max(first, 1) : last] for loss in place]
        assert value == pytest.approx(sum(there) / len(there), rel=1e-4)


@pytest.mark.parametrize("tokens", [64, 100, 257, 1000])
def test_every_length_scores_the_same_tokens_once_with_half_a_window_before_each(tokens):
    scored = {}
    for length in (8, 16, 32, 64):
        starts = window_starts(tokens, length, 64)
        assert starts[0] >= 0
        assert starts[-1] + length <= tokens
        scored[length] = [place for start in starts for place in range(start + length // 2, start + length)]
    assert scored[8] == scored[16] == scored[32] == scored[64] == list(range(32, scored[64][-1] + 1))
    assert tokens - len(scored[64]) - 32 < 32


def test_odd_lengths_stay_within_the_text_and_score_nothing_twice():
    for length in (5, 7, 33):
        starts = window_starts(100, length, 33)
        scored = [place for start in starts for place in range(start + length - length // 2, start + length)]
        assert len(scored) == len(set(scored)) > 0
        assert min(starts) >= 0
        assert max(scored) < 100


def test_a_text_shorter_than_the_longest_length_is_refused():
    assert window_starts(64, 64, 64) == [0]
    with pytest.raises(ValueError, match="The text has 63 tokens, fewer than the longest length of 64"):
        window_starts(63, 8, 64)


def test_bins_go_from_nothing_to_the_length():
    assert position_edges(512)[:3] == [0, 64, 128]
    for length in (2, 3, 8, 100, 512, 8192, 16384, 10000):
        edges = position_edges(length)
        assert edges[0] == 0
        assert edges[-1] == length
        assert edges == sorted(set(edges))
        assert len(edges) <= 65


def test_one_window_has_no_interval_and_a_model_of_nonsense_no_number():
    text = random_ids(1, 16)[0]
    found = measure_perplexity(tiny_model("llama"), text, 16, 16)
    assert (found["windows"], found["low"], found["high"]) == (1, None, None)
    assert found["perplexity"] > 1
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    for length in (16, 8):
        found = measure_perplexity(broken, text, length, length)
        assert found["windows"] == 32 // length - 1
        assert (found["perplexity"], found["low"], found["high"]) == (None, None, None)
        assert set(found["by_position"]) == {None}


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = measure_perplexity(model, random_ids(1, 64)[0], 16, 16)
    assert found["perplexity"] == found["low"] == found["high"] == pytest.approx(VOCAB, rel=1e-4)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (30, 2.04227), (1000, 1.96234)],
)
def test_students_t_is_that_of_the_tables(freedom, quantile):
    assert student_t(freedom) == pytest.approx(quantile, rel=4e-3)


def test_the_interval_of_a_mean_is_that_of_student():
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30265 / 3**0.5, rel=1e-4)
    assert all(math.isnan(half_width(values)) for values in ([1.0], [1.0, math.nan], [1.0, math.inf, 2.0]))


def test_bins_that_hold_only_the_beginning_have_no_number():
    class Uniform(torch.nn.Module):
        """Two channels, a head of zeros."""

        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(2, 8)
            self.device = torch.device("cpu")

        def get_output_embeddings(self):
            return self.head

        def forward(self, input_ids, use_cache):
            return SimpleNamespace(logits=self.head(torch.zeros(*input_ids.shape, 2)) * 0)

    found = measure_perplexity(Uniform(), random_ids(1, 16)[0] % 8, 16, 16, beginning=[1, 2])
    assert found["edges"][:3] == [0, 2, 4]
    assert found["by_position"][0] is None
    assert found["by_position"][1:] == [pytest.approx(math.log(8), rel=1e-4)] * 7

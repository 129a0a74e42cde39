"""Prompts of the retrieval tasks, and how their answers are scored."""

from __future__ import annotations

import itertools
import re

import pytest
from checkpoints import save_byte_tokenizer
from transformers import AutoTokenizer

from hf_drope.retrieval_tasks import HOPS, NEEDLES, TASKS, encode_prompt, haystack, make_sample


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [900, 901, 2500])
def test_a_prompt_has_exactly_the_tokens_asked_for_and_all_its_needles(task, tokens, tokenizer):
    for index in (0, 3, 7):
        sample = make_sample(task, seed=1, index=index, trials=8)
        ids = encode_prompt(sample, tokenizer, tokens)
        text = tokenizer.decode(ids)
        assert len(ids) == tokens
        assert all(text.count(needle.sentence) == 1 for needle in sample.needles)
        assert text.endswith(sample.question)
        assert sample.instruction in text


@pytest.mark.parametrize("task", TASKS)
def test_needles_lie_where_their_depths_say(task, tokenizer):
    sample = make_sample(task, seed=2, index=5, trials=8)
    text = tokenizer.decode(encode_prompt(sample, tokenizer, 6000))
    length = len(text) - len(sample.instruction) - len(sample.question)
    for needle in sample.needles:
        assert (text.index(needle.sentence) - len(sample.instruction)) / length == pytest.approx(needle.depth, abs=0.05)
    assert set(sample.answer_depths) <= {needle.depth for needle in sample.needles}


def test_depths_of_the_first_needle_go_evenly_over_the_trials():
    depths = [make_sample("passkey", seed=0, index=index, trials=10).answer_depths[0] for index in range(10)]
    assert [int(10 * depth) for depth in depths] == list(range(10))


@pytest.mark.parametrize("task", TASKS)
def test_a_perfect_answer_scores_fully_and_only_as_many_as_asked_for_count(task):
    sample = make_sample(task, seed=0, index=0, trials=1)
    assert len(sample.expected) == {"passkey": 1, "multikey": 1, "variable-tracking": HOPS + 1}.get(task, NEEDLES)
    assert all(sample.score(sample.answer + " Whatever comes then."))
    assert not any(sample.score(""))
    first, *others = sample.expected
    assert sample.score(first) == [True, *(False for _ in others)]
    noise = "ZZZ" if task == "variable-tracking" else "1"
    assert not any(sample.score(f" {noise}" * len(sample.expected) + sample.answer))
    # A longer number or name that holds the right one is another one.
    assert not any(sample.score(re.sub(r"(\w+)", rf"\g<1>{noise}", sample.answer)))


def test_a_chain_leads_from_the_value_through_all_boxes():
    sample = make_sample("variable-tracking", seed=4, index=1, trials=3)
    sentences = [needle.sentence for needle in sorted(sample.needles, key=lambda needle: needle.depth)]
    assert re.fullmatch(rf"Box {sample.expected[0]} holds \d{{7}}\.", sentences[0])
    for sentence, (before, name) in zip(sentences[1:], itertools.pairwise(sample.expected), strict=True):
        assert sentence == f"Box {name} holds what box {before} holds."


def test_samples_depend_on_seed_and_index_alone():
    def draw(seed, index):
        return make_sample("multikey", seed=seed, index=index, trials=5)

    assert draw(0, 1) == draw(0, 1)
    assert len({draw(seed, index).needles for seed in range(3) for index in range(3)}) == 9
    assert draw(0, 0).text(20) != draw(0, 1).text(20)


def test_the_haystack_says_nothing_that_is_asked_for():
    text = " ".join(itertools.islice(haystack("0"), 500))
    assert not re.search(r"\d|secret|number|box|[A-Z]{2}", text)
    assert len(set(text.split(". "))) > 495


def test_a_length_that_holds_no_prompt_is_refused_and_the_smallest_that_does_is_named(tokenizer):
    sample = make_sample("multiquery", seed=0, index=0, trials=1)
    with pytest.raises(ValueError, match=r"multiquery takes at least \d+ tokens, and there are 100"):
        encode_prompt(sample, tokenizer, 100)
    smallest = int(re.search(r"least (\d+)", str(_error(sample, tokenizer))).group(1))
    assert len(encode_prompt(sample, tokenizer, smallest)) == smallest
    with pytest.raises(ValueError, match="at least"):
        encode_prompt(sample, tokenizer, smallest - 1)


def _error(sample, tokenizer):
    with pytest.raises(ValueError, match="at least") as caught:
        encode_prompt(sample, tokenizer, 100)
    return caught.value


def test_an_unknown_task_and_no_digits_are_refused():
    with pytest.raises(ValueError, match="no task 'pass-key'"):
        make_sample("pass-key", seed=0, index=0, trials=1)
    with pytest.raises(ValueError, match="digits is 0"):
        make_sample("passkey", seed=0, index=0, trials=1, digits=0)

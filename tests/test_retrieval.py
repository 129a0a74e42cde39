"""Retrieval: what is generated, how it is counted, and which tokenizers and lengths will do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoints import save_byte_tokenizer, tiny_tokenizer
from tiny import tiny_model
from transformers import AutoTokenizer, GenerationConfig

from hf_drope.retrieval import (
    answer_room,
    check_tokenizer,
    draw_samples,
    measure_retrieval,
    settle,
    smallest_length,
    wilson,
)
from hf_drope.retrieval_tasks import TASKS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def samples_of(task, trials=5, digits=4):
    return draw_samples(task, trials=trials, digits=digits, seed=0)


class Answering:
    """Gives the answers one after another; keeps the prompts and the generation config it was asked with."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, answers):
        self.generation_config = GenerationConfig(repetition_penalty=3.0, do_sample=True, eos_token_id=None)
        self.tokenizer, self.answers = tokenizer, list(answers)
        self.prompts, self.configs = [], []

    def generate(self, ids, attention_mask):
        assert attention_mask.shape == ids.shape
        self.configs.append(self.generation_config)
        rows = []
        for prompt in ids.tolist():
            self.prompts.append(prompt)
            answer = self.tokenizer(self.answers.pop(0), add_special_tokens=False)["input_ids"]
            room = self.generation_config.max_new_tokens
            rows.append(
                [*prompt, *answer, *[self.generation_config.pad_token_id] * (room - len(answer))][: len(prompt) + room]
            )
        return torch.tensor(rows)


@pytest.mark.parametrize("task", TASKS)
def test_a_model_that_answers_scores_one_and_prompt_and_answer_fill_the_length(task, tokenizer):
    samples, done = samples_of(task), []
    model = Answering(tokenizer, [sample.answer for sample in samples])
    found = measure_retrieval(model, tokenizer, samples, 700, batch_size=2, advance=done.append)
    assert (found["trials"], found["rate"], found["high"]) == (5, 1.0, 1.0)
    assert found["low"] == pytest.approx(0.5655, abs=1e-4)
    assert sum(done) == 5 * 700
    assert {len(prompt) for prompt in model.prompts} == {700 - answer_room(samples, tokenizer)}
    assert sum(part["values"] for part in found["by_depth"]) == sum(len(sample.expected) for sample in samples)
    assert all(part["rate"] == 1.0 for part in found["by_depth"] if part["values"])
    assert [example["expected"] for example in found["examples"]] == [list(s.expected) for s in samples[:3]]
    assert found["examples"][0]["answer"] == samples[0].answer


def test_rates_are_shares_of_the_answers_and_depths_those_of_each_answer(tokenizer):
    samples = samples_of("multiquery", trials=4)
    answers = [sample.answer if index < 2 else f" {sample.expected[0]}." for index, sample in enumerate(samples)]
    found = measure_retrieval(Answering(tokenizer, answers), tokenizer, samples, 700)
    assert found["rate"] == pytest.approx((1 + 1 + 0.25 + 0.25) / 4)
    assert (found["low"], found["high"]) == pytest.approx(wilson(0.625, 4), abs=1e-4)
    for number, part in enumerate(found["by_depth"]):
        assert (part["from"], part["to"]) == (number / 5, (number + 1) / 5)
        there = [
            index < 2 or place == 0
            for index, sample in enumerate(samples)
            for place, depth in enumerate(sample.answer_depths)
            if part["from"] <= depth < part["to"]
        ]
        assert part["values"] == len(there)
        assert part["rate"] == (round(sum(there) / len(there), 4) if there else None)


def test_a_wrong_answer_scores_nothing(tokenizer):
    samples = samples_of("passkey")
    found = measure_retrieval(Answering(tokenizer, [" 12."] * 5), tokenizer, samples, 600)
    assert (found["rate"], found["low"]) == (0.0, 0.0)


def test_generation_is_greedy_whatever_the_model_is_set_to_and_its_own_setting_comes_back(tokenizer):
    samples = samples_of("passkey", trials=1)
    model = Answering(tokenizer, [samples[0].answer])
    own = model.generation_config
    measure_retrieval(model, tokenizer, samples, 600)
    (used,) = model.configs
    assert used.do_sample is False
    assert used.repetition_penalty in (None, 1.0)
    assert used.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config is own


def test_batches_answer_as_single_prompts_do_and_as_a_loop_without_cache(tokenizer):
    model = tiny_model("llama", vocab_size=300, max_position_embeddings=700)
    samples = samples_of("passkey", trials=3)
    single = measure_retrieval(model, tokenizer, samples, 350)
    assert measure_retrieval(model, tokenizer, samples, 350, batch_size=3) == single
    recorder = Answering(tokenizer, [""] * 3)
    measure_retrieval(recorder, tokenizer, samples, 350)
    room = answer_room(samples, tokenizer)
    ids, end = list(recorder.prompts[0]), tokenizer.eos_token_id
    for _ in range(room):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == end:
            break
    assert tokenizer.decode(ids[350 - room :], skip_special_tokens=True) == single["examples"][0]["answer"]


def test_the_shortest_length_that_is_named_works_and_one_less_does_not(tokenizer):
    for task in TASKS:
        samples = samples_of(task)
        length = smallest_length(samples, tokenizer)
        measure_retrieval(Answering(tokenizer, [""] * 5), tokenizer, samples, length)
        with pytest.raises(ValueError, match=f"{task} takes at least"):
            measure_retrieval(Answering(tokenizer, [""] * 5), tokenizer, samples, length - 1)


def test_tokenizers_that_cannot_write_what_is_asked_are_refused(tokenizer):
    for task in TASKS:
        check_tokenizer(samples_of(task), tokenizer, "a")
    with pytest.raises(
        ValueError, match=r"The tokenizer of tiny cannot write the answers of passkey: '\d{4}\.' comes back as"
    ):
        check_tokenizer(samples_of("passkey"), tiny_tokenizer(), "tiny")

    class NoLetters:
        """Writes what is in an answer and no word of a question."""

        def __call__(self, text, **_):
            return {"input_ids": [ord(letter) for letter in text if not letter.islower()]}

        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    with pytest.raises(ValueError, match="cannot write the prompts of passkey"):
        check_tokenizer(samples_of("passkey"), NoLetters(), "no letters")

    class Uncased:
        def __call__(self, text, **_):
            return {"input_ids": [ord(letter) for letter in text.lower()]}

        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    check_tokenizer(samples_of("passkey"), Uncased(), "uncased")
    with pytest.raises(ValueError, match="cannot write the answers of variable-tracking"):
        check_tokenizer(samples_of("variable-tracking"), Uncased(), "uncased")


def test_frequencies_that_follow_the_longest_sequence_begin_anew():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope)
    ids = torch.randint(3, 90, (1, 100))
    with torch.no_grad():
        fresh = model(ids[:, :80]).logits
        model(ids)
        assert not torch.equal(model(ids[:, :80]).logits, fresh)
        settle(model)
        assert torch.equal(model(ids[:, :80]).logits, fresh)
    settle(SimpleNamespace())


def test_answers_do_not_depend_on_what_was_run_before(tokenizer):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_model("llama", vocab_size=300, rope_parameters=rope)
    samples = samples_of("passkey", trials=3)
    before = measure_retrieval(model, tokenizer, samples, 350)
    with torch.no_grad():
        model(torch.randint(3, 90, (1, 600)))
    assert measure_retrieval(model, tokenizer, samples, 350) == before
    reordered = measure_retrieval(model, tokenizer, samples[::-1], 350)
    assert reordered["examples"] == before["examples"][::-1]


@pytest.mark.parametrize(
    ("rate", "trials", "interval"),
    [(0.0, 20, (0.0, 0.1611)), (1.0, 20, (0.8389, 1.0)), (0.5, 20, (0.2993, 0.7007)), (0.9, 10, (0.5958, 0.9821))],
)
def test_wilsons_interval_is_that_of_the_tables(rate, trials, interval):
    assert wilson(rate, trials) == pytest.approx(interval, abs=1e-4)

"""The rows of the reference experiment: what they ask for was said before, and is all that is asked."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_drope import retrieval_tasks as tasks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import reference_rows


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return reference_rows.make_tokenizer(["def add(first, second):\n    return first + second\n"])


def make_rows(tokenizer: Any, kind: str) -> reference_rows.Rows:
    return reference_rows.Rows(tokenizer, torch.arange(1000) % 100, 0, {kind: 1.0})


def asked(row: dict[str, torch.Tensor]) -> list[int]:
    return torch.nonzero(row["labels"] != -100).flatten().tolist()


def test_a_word_is_one_token_and_two_digits_are(tokenizer: Any) -> None:
    for key in tasks.draw_keys(random.Random(0), 300):
        assert len(tokenizer(f" {key}")["input_ids"]) == 2
    assert len(tokenizer(" 1234")["input_ids"]) == 2


@pytest.mark.parametrize(("kind", "length"), [("words", 64), ("facts", 64), ("prompt", 256)])
def test_labels_are_tokens_of_the_row_that_were_said_before(tokenizer: Any, kind: str, length: int) -> None:
    rows = make_rows(tokenizer, kind)
    some = [rows.row(length) for _ in range(20)]
    for row in some:
        assert row["input_ids"].shape == row["labels"].shape == (length,)
        for place in asked(row):
            token = row["labels"][place]
            assert token == row["input_ids"][place]
            # All but what stands between answers.
            assert token in row["input_ids"][:place] or tokenizer.decode(token) in (",", " and")
    assert sum(map(len, map(asked, some))) > 20


def test_a_fact_is_the_same_both_times(tokenizer: Any) -> None:
    row = make_rows(tokenizer, "facts").row(64)
    said = row["input_ids"].tolist()
    for place in asked(row):
        # With the token before its number, or with the first half of the number, a fact is said twice.
        pair = said[place - 1 : place + 1]
        assert any(said[i : i + 2] == pair for i in range(place - 1))


def test_a_prompt_is_that_of_the_tasks_and_asks_for_all_answers(tokenizer: Any) -> None:
    rows = make_rows(tokenizer, "prompt")
    instruction = tasks.make_sample("passkey", seed=0, index=0, trials=1).instruction
    for _ in range(20):
        row = rows.row(256)
        text = tokenizer.decode(row["input_ids"])
        assert text.startswith(tokenizer.bos_token + instruction)
        answers = tokenizer.decode(row["input_ids"][asked(row)])
        questions = text[text.index("\nQuestion:") :]
        for number in re.findall(r"\d+", questions):
            assert number in answers.replace(" and", ",")


def test_prose_is_all_labels(tokenizer: Any) -> None:
    row = make_rows(tokenizer, "prose").row(256)
    assert torch.equal(row["input_ids"], row["labels"])
    assert torch.equal(row["input_ids"].diff() % 100, torch.ones(255, dtype=torch.long))

"""What the reference experiment reads: prose of Python's standard library, and rows that ask for numbers said before.

Nothing is downloaded. Every tenth source file is held out.
"""

from __future__ import annotations

import itertools
import random
import re
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hf_drope import retrieval_tasks as tasks

WINDOW = 256
DIGITS = 4
VOCABULARY = 2048
# Share of the first training without prose; after twice that, prompts come in.
EASY = 0.2
_NOT_ASKED = -100
_ANSWERS = re.compile(r"Answer: [^\n]*? (?:is|are)( [^\n]*)|number of the \w+ \w+ is( \d+\.)")


def standard_library() -> tuple[list[str], list[str]]:
    """Source files for training, and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [file for file in files if not {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts)]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [text for number, text in enumerate(texts) if number % 10], texts[::10]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a token for two digits and for each word of the haystack, a space before them included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\d{1,2}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    haystack = " ".join(itertools.islice(tasks.haystack("tokenizer"), 20_000))
    # Often enough to come before what the prose has: a name in pieces is far harder to find again.
    words = " ".join(sorted(set(re.findall(r"[a-z]+", haystack)))) + " "
    numbers = "".join(f" {number}{number}" for number in range(10, 100))
    samples = (tasks.make_sample(task, seed=0, index=i, trials=300) for task in tasks.TASKS for i in range(300))
    asked = "".join(sample.instruction + sample.text(2) + sample.answer for sample in samples)
    tokenizer.train_from_iterator(
        [*(text[:20_000] for text in texts), haystack, asked, *[" " + words + numbers] * 3000], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def prose_tokens(tokenizer: Any, texts: list[str]) -> Tensor:
    end = tokenizer.eos_token_id
    return torch.tensor([i for text in texts for i in [*tokenizer(text, verbose=False)["input_ids"], end]])


class Rows:
    """Batches of rows: prose, and rows that ask, which have labels for their answers alone.

    Recall is learned from easy to hard: first from rows that say things twice (copies, and facts asked for at once), then from
    prompts with a haystack, as the tasks have them, with a few of the easy ones between.
    """

    def __init__(self, tokenizer: Any, prose: Tensor, seed: int) -> None:
        self.tokenizer, self.prose = tokenizer, prose
        self.draw = random.Random(seed)
        # A prompt of the tasks begins with the same words.
        instruction = tasks.make_sample("passkey", seed=0, index=0, trials=1).instruction
        self.begin = [tokenizer.bos_token_id, *self._ids(instruction)]

    def batch(self, size: int, done: float, length: int = WINDOW) -> list[dict[str, Tensor]]:
        """Rows of {"input_ids", "labels"}, both (length,), for a run of which `done` (0 to 1) is over."""
        prose = 0.0 if done < EASY else 0.5
        easy = min(1.0, max(0.2, 1 - (done - 2 * EASY) / EASY))
        rows = []
        for _ in range(size):
            if self.draw.random() < prose:
                start = self.draw.randrange(len(self.prose) - length)
                ids = self.prose[start : start + length]
                rows.append({"input_ids": ids, "labels": ids})
            elif self.draw.random() < easy:
                rows.append(self.draw.choice((self._copy, self._drill))(length))
            else:
                rows.append(self._asking(length))
        return rows

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _asked(self, text: str, start: int = 0) -> tuple[list[int], list[int]]:
        """Tokens of `text`, and labels for those of its answers that begin at or after the character `start`."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = [match.span(match.lastindex) for match in _ANSWERS.finditer(text) if match.start() >= start]
        inside = [any(a <= first and last <= b for a, b in spans) for first, last in encoded["offset_mapping"]]
        ids = encoded["input_ids"]
        return ids, [token if asked else _NOT_ASKED for token, asked in zip(ids, inside, strict=True)]

    def _pairs(self, count: int) -> list[tuple[str, str]]:
        return list(zip(tasks.draw_keys(self.draw, count), tasks.draw_numbers(self.draw, count, DIGITS), strict=True))

    def _copy(self, length: int) -> dict[str, Tensor]:
        """A few sentences of the haystack and the same again, over and over with new ones."""
        sentences = tasks.haystack(str(self.draw.random()))
        ids, labels = [self.tokenizer.bos_token_id], [_NOT_ASKED]
        while len(ids) < length:
            part = self._ids(" " + " ".join(itertools.islice(sentences, self.draw.randint(1, 4))))
            ids, labels = ids + part + part, labels + [_NOT_ASKED] * len(part) + part
        return self._row(ids, labels, length)

    def _drill(self, length: int) -> dict[str, Tensor]:
        """Two to four facts and the same facts again in another order, over and over with new ones."""
        ids, labels = [self.tokenizer.bos_token_id], [_NOT_ASKED]
        while len(ids) < length:
            pairs = self._pairs(self.draw.randint(2, 4))
            facts = " ".join(tasks.fact(*pair) for pair in pairs)
            again = self.draw.sample(pairs, len(pairs))
            if self.draw.random() < 0.5:
                text = f" {facts} " + " ".join(tasks.fact(*pair) for pair in again)
            else:
                text = f" {facts}" + "".join(f"{tasks.ask(key)} {value}." for key, value in again)
            more, asked = self._asked(text, start=len(facts) + 1)
            ids, labels = ids + more, labels + asked
        return self._row(ids, labels, length)

    def _asking(self, length: int) -> dict[str, Tensor]:
        """Facts among a haystack, and questions: one for each of some names, one for several at once, or for all of one name's."""
        pairs = self._pairs(self.draw.randint(1, 6))
        kind = self.draw.random()
        if kind < 0.15 and len(pairs) > 1:
            pairs = [(pairs[0][0], value) for _, value in pairs[:4]]
            question = f"{tasks.ask_all(pairs[0][0])} {_listing(pairs)}."
        elif kind < 0.35 and len(pairs) > 1:
            asked = self.draw.sample(pairs, min(len(pairs), 4))
            question = f"{tasks.ask(*(key for key, _ in asked))} {_listing(asked)}."
            self.draw.shuffle(pairs)
        else:
            asked = self.draw.sample(pairs, min(len(pairs), 4))
            question = "".join(f"{tasks.ask(key)} {value}." for key, value in asked)
        answers, labels = self._asked(question)
        lines = [tasks.fact(*pair) for pair in pairs]
        room = length - len(self.begin) - len(answers)
        for sentence in tasks.haystack(str(self.draw.random())):
            longer = list(lines)
            # Anywhere but among one name's numbers' order, which an answer keeps: inserting keeps it.
            longer.insert(self.draw.randint(0, len(lines)), sentence)
            if len(self._ids(" ".join(longer))) > room:
                break
            lines = longer
        body = self._ids(" ".join(lines))
        if len(body) > room:
            return self._asking(length)
        ids = self.begin + body + answers
        return self._row(ids, [_NOT_ASKED] * (len(ids) - len(answers)) + labels, length)

    def _row(self, ids: list[int], labels: list[int], length: int) -> dict[str, Tensor]:
        missing = length - len(ids)
        ids, labels = ids + [self.tokenizer.eos_token_id] * missing, labels + [_NOT_ASKED] * missing
        return {"input_ids": torch.tensor(ids[:length]), "labels": torch.tensor(labels[:length])}


def _listing(pairs: list[tuple[str, str]]) -> str:
    *first, last = (value for _, value in pairs)
    return f"{', '.join(first)} and {last}" if first else last

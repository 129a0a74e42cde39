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
# What comes before: rows that teach to find again what was said, in short contexts.
SHORT = 64
DIGITS = 4
VOCABULARY = 2048
_NOT_ASKED = -100
_ANSWERS = re.compile(r"Answer: [^\n]*? (?:is|are)( [^\n]*)")
# Kinds of rows and their shares, in the short rows and in those of the window.
SHORT_ROWS = {"prose": 0.2, "words": 0.4, "facts": 0.4}
WINDOW_ROWS = {"prose": 0.5, "words": 0.05, "facts": 0.1, "prompt": 0.35}


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
    """Rows of {"input_ids", "labels"}, both (length,): prose, and rows that ask, which have labels for their answers alone.

    Args:
        shares: of each kind: `prose`; `words`, drawn at random and said twice; `facts`, some at a time, said again in another
            order; `prompt`, with a haystack and questions, as the tasks have them.
    """

    def __init__(self, tokenizer: Any, prose: Tensor, seed: int, shares: dict[str, float] = WINDOW_ROWS) -> None:
        self.tokenizer, self.prose = tokenizer, prose
        self.draw = random.Random(seed)
        self.kinds, self.shares = [getattr(self, f"_{kind}") for kind in shares], list(shares.values())
        self.names = [key.split() for key in tasks.draw_keys(self.draw, 2000)]
        words = [*itertools.chain(*self.names), *map(str, range(10, 100))]
        self.said = self._ids(" " + " ".join(words))
        # A prompt of the tasks begins with the same words.
        instruction = tasks.make_sample("passkey", seed=0, index=0, trials=1).instruction
        self.begin = [tokenizer.bos_token_id, *self._ids(instruction)]

    def row(self, length: int) -> dict[str, Tensor]:
        return self.draw.choices(self.kinds, self.shares)[0](length)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _prose(self, length: int) -> dict[str, Tensor]:
        start = self.draw.randrange(len(self.prose) - length)
        ids = self.prose[start : start + length]
        return {"input_ids": ids, "labels": ids}

    def _words(self, length: int) -> dict[str, Tensor]:
        ids, labels = [self.tokenizer.bos_token_id], [_NOT_ASKED]
        while len(ids) < length:
            part = self.draw.choices(self.said, k=self.draw.randint(4, 24))
            # The first word of the second time cannot be known.
            ids, labels = ids + part + part, labels + [_NOT_ASKED] * (len(part) + 1) + part[1:]
        return self._row(ids, labels, length)

    def _facts(self, length: int) -> dict[str, Tensor]:
        """From a noun and its number to the sentence that the tasks have; one of these in a row."""
        before, after, digits = self.draw.choices(
            [
                ("{noun}", "", 2),
                ("{key}", ".", 2),
                ("{key} is", ".", 2),
                ("{sentence}", ".", self.draw.choice((2, DIGITS))),
            ],
            [0.4, 0.3, 0.15, 0.15],
        )[0]
        ids, labels = [self.tokenizer.bos_token_id], [_NOT_ASKED]
        while len(ids) < length:
            count = self.draw.randint(2, 4)
            names = {noun: adjective for adjective, noun in self.draw.sample(self.names, count)}
            parts = []
            for (noun, adjective), value in zip(
                names.items(), tasks.draw_numbers(self.draw, count, digits), strict=False
            ):
                key = f"{adjective} {noun}"
                sentence = tasks.fact(key, value).removesuffix(f" {value}.")
                name = self._ids(" " + before.format(noun=noun, key=key, sentence=sentence))
                parts.append((name, self._ids(f" {value}"), self._ids(after)))
            for name, value, end in parts:
                ids, labels = ids + name + value + end, labels + [_NOT_ASKED] * len(name + value + end)
            for name, value, end in self.draw.sample(parts, len(parts)):
                ids += name + value + end
                labels += [_NOT_ASKED] * len(name) + value + [_NOT_ASKED] * len(end)
        return self._row(ids, labels, length)

    def _prompt(self, length: int) -> dict[str, Tensor]:
        """Facts among a haystack, and questions: one for each of some names, one for several at once, or for all of one name's."""
        count = self.draw.randint(1, 6)
        pairs = list(zip(tasks.draw_keys(self.draw, count), tasks.draw_numbers(self.draw, count, DIGITS), strict=True))
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
        lines = [self._ids(" " + tasks.fact(*pair)) for pair in pairs]
        room = length - len(self.begin) - len(answers) - sum(map(len, lines))
        if room < 0:
            return self._prompt(length)
        for sentence in tasks.haystack(str(self.draw.random())):
            line = self._ids(" " + sentence)
            room -= len(line)
            if room < 0:
                break
            # Anywhere: one name's numbers keep the order in which an answer has them.
            lines.insert(self.draw.randint(0, len(lines)), line)
        ids = [*self.begin, *itertools.chain(*lines), *answers]
        return self._row(ids, [_NOT_ASKED] * (len(ids) - len(answers)) + labels, length)

    def _asked(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of questions with their answers, and labels for those of the answers."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = [match.span(match.lastindex) for match in _ANSWERS.finditer(text)]
        inside = [any(a <= first and last <= b for a, b in spans) for first, last in encoded["offset_mapping"]]
        ids = encoded["input_ids"]
        return ids, [token if asked else _NOT_ASKED for token, asked in zip(ids, inside, strict=True)]

    def _row(self, ids: list[int], labels: list[int], length: int) -> dict[str, Tensor]:
        missing = length - len(ids)
        ids, labels = ids + [self.tokenizer.eos_token_id] * missing, labels + [_NOT_ASKED] * missing
        return {"input_ids": torch.tensor(ids[:length]), "labels": torch.tensor(labels[:length])}


def _listing(pairs: list[tuple[str, str]]) -> str:
    *first, last = (value for _, value in pairs)
    return f"{', '.join(first)} and {last}" if first else last

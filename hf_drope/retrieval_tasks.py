"""Retrieval tasks over a synthetic haystack, in the form of RULER (https://arxiv.org/abs/2404.06654).

Sentences that say something worth asking for ("needles") stand among others that do not; the prompt ends where the answer
begins, so that a model without chat template continues it. Words, sentences and numbers are drawn from a seed.

- `passkey`: one number under one name.
- `multikey`: four names with a number each, one of which is asked for.
- `multiquery`: four names with a number each, all asked for.
- `multivalue`: one name with four numbers, all asked for.
- `variable-tracking`: a value that is handed on through five boxes, all of whose names are asked for.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def _words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


TASKS = ("passkey", "multikey", "multiquery", "multivalue", "variable-tracking")
DIGITS = 7
NEEDLES = 4
HOPS = 4

_ADJECTIVES = _words(
    "amber ancient bitter blue brave bright broken calm clever cold copper crooked dark eager early empty faint fierce gentle "
    "golden green grey happy heavy hidden hollow honest humble icy iron kind lazy little lonely loud lucky merry misty modest "
    "narrow noble odd old pale patient plain proud purple quick quiet rapid rare red rough round royal rusty sharp shy silent "
    "silver simple slow small soft solemn stern strange strong sudden sunny tall tame tender thin tidy tiny vast warm wide "
    "wild wise wooden yellow young"
)
_NOUNS = _words(
    "anchor apple badger barrel basket beacon bell boat bottle bridge bucket candle canyon carpet castle chair cherry chimney "
    "cloud coat crow curtain door dragon drum eagle falcon feather fence ferry fiddle field forest fountain fox garden gate "
    "goose hammer harbor hawk hedge helmet heron hill horse island jacket kettle kitchen ladder lake lamp lantern lemon "
    "lion lizard market meadow mirror moon mountain needle oak orchard otter owl paddle paper parrot pebble piano pigeon "
    "pillow planet plum pocket pony rabbit raven ribbon river road robin rope saddle sailor salmon shadow shell ship shoe "
    "sparrow spoon squirrel stable star stone stove table teapot tiger tower tractor trumpet turtle valley violin wagon "
    "wall whale wheel whistle window wolf"
)
_VERBS = _words(
    "admired avoided borrowed carried caught cleaned counted covered crossed described drew dropped finished followed found "
    "guarded heard helped hid ignored joined kept lifted liked lost measured mended missed moved noticed opened "
    "painted passed praised pulled pushed raised reached remembered repaired sold stopped touched traded trusted visited "
    "washed watched wanted"
)
_TIMES = _words(
    "at dawn|after dinner|at midnight|before the rain|by the shore|during the feast|every evening|in autumn|in spring|in "
    "the morning|in the snow|in winter|near the mill|on Monday|on Sunday|once again|on the way home|that night|under the "
    "trees|with great care|without a word|after the storm|at the fair|behind the house|for a while|last summer",
    "|",
)

_INSTRUCTION = "Some facts are hidden in the text below. A question about them follows the text.\n\n"
# A model that was never told how to answer sees once how it is done.
_EXAMPLE = (
    "Box QAA holds 111. Box QBB holds what box QAA holds.\n"
    "Question: Which boxes hold 111?\nAnswer: The boxes that hold 111 are QAA and QBB.\n\n"
)


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, and how deep: 0 is the beginning of the text and 1 its end."""

    sentence: str
    depth: float


@dataclass(frozen=True)
class Sample:
    """One trial. `expected` are the answers, and `answer_depths` where in the text each of them is said."""

    task: str
    needles: tuple[Needle, ...]
    question: str
    expected: tuple[str, ...]
    answer_depths: tuple[float, ...]
    haystack_seed: str

    @property
    def instruction(self) -> str:
        return (_EXAMPLE if self.task == "variable-tracking" else "") + _INSTRUCTION

    @property
    def answer(self) -> str:
        """What a perfect model continues the prompt with."""
        return f" {_listing(self.expected)}."

    def text(self, sentences: int) -> str:
        """The haystack of that many sentences with the needles in it, and the question."""
        lines = list(itertools.islice(haystack(self.haystack_seed), sentences))
        for needle in sorted(self.needles, key=lambda needle: needle.depth, reverse=True):
            # After the first sentence, from whose beginning a prompt is cut to size.
            lines.insert(1 + round(needle.depth * (sentences - 1)), needle.sentence)
        return " ".join(lines) + self.question

    def score(self, answer: str) -> list[bool]:
        """Whether each expected answer is among the first as many that `answer` gives; whole and exact."""
        pattern = r"\b[A-Z]{3}\b" if self.task == "variable-tracking" else r"\d+"
        given = re.findall(pattern, answer)[: len(self.expected)]
        return [value in given for value in self.expected]


def make_sample(task: str, *, seed: int, index: int, trials: int, digits: int = DIGITS) -> Sample:
    """The trial `index` of `trials`; the first needle's depth goes evenly from 0 to 1 over them, others lie anywhere.

    Raises:
        ValueError: no such task, or fewer than 1 digit.
    """
    if task not in TASKS:
        raise ValueError(f"There is no task {task!r}; the tasks are {', '.join(TASKS)}.")
    if digits < 1:
        raise ValueError(f"digits is {digits}; it has to be at least 1.")
    place = f"{seed}/{task}/{index}"
    draw = random.Random(place)
    depths = [(index + draw.random()) / trials, *(draw.random() for _ in range(HOPS))]
    if task == "variable-tracking":
        return _chain(draw, depths, digits, place)
    keys, values = draw_keys(draw, NEEDLES), draw_numbers(draw, NEEDLES, digits)
    if task == "passkey":
        keys, values = keys[:1], values[:1]
    elif task == "multivalue":
        keys = keys[:1] * NEEDLES
    needles = tuple(Needle(fact(key, value), depth) for key, value, depth in zip(keys, values, depths, strict=False))
    asked = 1 if task in ("passkey", "multikey") else NEEDLES
    question = ask_all(keys[0]) if task == "multivalue" else ask(*keys[:asked])
    return Sample(task, needles, question, tuple(values[:asked]), tuple(depths[:asked]), place)


def _chain(draw: random.Random, depths: list[float], digits: int, place: str) -> Sample:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(draw.choices(string.ascii_uppercase, k=3))
        # Q begins the names of the example.
        if name not in names and not name.startswith("Q"):
            names.append(name)
    value = draw_numbers(draw, 1, digits)[0]
    sentences = [f"Box {names[0]} holds {value}."]
    sentences += [f"Box {name} holds what box {before} holds." for before, name in itertools.pairwise(names)]
    # Whoever reads on meets a box before another is filled from it.
    depths = sorted(depths)
    needles = tuple(Needle(sentence, depth) for sentence, depth in zip(sentences, depths, strict=True))
    question = f"\nQuestion: Which boxes hold {value}?\nAnswer: The boxes that hold {value} are"
    return Sample("variable-tracking", needles, question, tuple(names), tuple(depths), place)


def haystack(seed: str) -> Iterator[str]:
    """Sentences without end, of words that no needle's frame has."""
    draw = random.Random(f"haystack {seed}")
    while True:
        subject, thing = (f"the {draw.choice(_ADJECTIVES)} {draw.choice(_NOUNS)}" for _ in range(2))
        yield f"{subject.capitalize()} {draw.choice(_VERBS)} {thing} {draw.choice(_TIMES)}."


def draw_keys(draw: random.Random, count: int) -> list[str]:
    """Different names of two words."""
    keys: list[str] = []
    while len(keys) < count:
        key = f"{draw.choice(_ADJECTIVES)} {draw.choice(_NOUNS)}"
        if key not in keys:
            keys.append(key)
    return keys


def draw_numbers(draw: random.Random, count: int, digits: int) -> list[str]:
    """Numbers of that many digits, different where there are as many."""
    low, high = 10 ** (digits - 1), 10**digits - 1
    if high - low + 1 < count:
        return [str(draw.randint(low, high)) for _ in range(count)]
    return [str(number) for number in draw.sample(range(low, high + 1), count)]


def fact(key: str, value: str) -> str:
    return f"The secret number of the {key} is {value}."


def ask(*keys: str) -> str:
    names = _listing([f"the {key}" for key in keys])
    if len(keys) == 1:
        return f"\nQuestion: What is the secret number of {names}?\nAnswer: The secret number of {names} is"
    return f"\nQuestion: What are the secret numbers of {names}?\nAnswer: The secret numbers of {names} are"


def ask_all(key: str) -> str:
    return f"\nQuestion: What are all the secret numbers of the {key}?\nAnswer: The secret numbers of the {key} are"


def _listing(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else str(last)


def encode_prompt(sample: Sample, tokenizer: Any, tokens: int) -> list[int]:
    """The sample's prompt in exactly `tokens` tokens, the tokenizer's own first ones included.

    The haystack is as long as it takes; what is too much is cut from the beginning of its first sentence.

    Raises:
        ValueError: even one sentence of haystack is too much; says how many tokens it takes.
    """
    begin = first_tokens(tokenizer, sample.instruction)
    room = tokens - len(begin)

    def encode(sentences: int) -> list[int]:
        return list(tokenizer(sample.text(sentences), add_special_tokens=False, verbose=False)["input_ids"])

    # At one sentence all needles follow it.
    smallest, several = encode(1), encode(33)
    if len(smallest) > room:
        raise ValueError(
            f"A prompt of {sample.task} takes at least {len(smallest) + len(begin)} tokens, and there are {tokens}."
        )
    each = (len(several) - len(smallest)) / 32
    count = max(1, round((room - len(smallest)) / each))
    body = encode(count)
    while len(body) < room:
        count += max(1, int((room - len(body)) / each))
        body = encode(count)
    while count > 1 and len(shorter := encode(count - 1)) >= room:
        count, body = count - 1, shorter
    return begin + body[len(body) - room :]


def smallest_prompt(sample: Sample, tokenizer: Any) -> int:
    """Tokens of the shortest prompt that `encode_prompt` can make of a sample."""
    body = tokenizer(sample.text(1), add_special_tokens=False, verbose=False)["input_ids"]
    return len(body) + len(first_tokens(tokenizer, sample.instruction))


def first_tokens(tokenizer: Any, text: str) -> list[int]:
    """`text` after the tokens that the tokenizer begins a sequence with, without those that it ends one with."""
    plain = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    whole = list(tokenizer(text, verbose=False)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[: start + len(plain)]
    return plain

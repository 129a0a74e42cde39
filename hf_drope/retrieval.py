"""How many of the facts hidden in a long prompt a model finds: greedy, from a cache, scored exactly."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from .position_modules import rotary_places
from .retrieval_tasks import Sample, encode_prompt, make_sample, smallest_prompt

DEPTHS = 5
_EXAMPLES = 3
# A model may begin with a line break, or cut a number into smaller tokens.
_SPARE_TOKENS = 4


def wilson(rate: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate seen in that many trials."""
    z = statistics.NormalDist().inv_cdf(0.975)
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = z / (1 + z * z / trials) * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials**2))
    return max(0.0, centre - spread), min(1.0, centre + spread)


def draw_samples(task: str, *, trials: int, digits: int, seed: int) -> list[Sample]:
    return [make_sample(task, seed=seed, index=index, trials=trials, digits=digits) for index in range(trials)]


def answer_room(samples: Sequence[Sample], tokenizer: Any) -> int:
    """Tokens that the longest of the expected answers can take."""
    longest = max(len(_encode(tokenizer, sample.answer)) for sample in samples)
    return longest + _SPARE_TOKENS


def smallest_length(samples: Sequence[Sample], tokenizer: Any) -> int:
    """The shortest length that holds each of the prompts and its answer."""
    return max(smallest_prompt(sample, tokenizer) for sample in samples) + answer_room(samples, tokenizer)


def check_tokenizer(samples: Sequence[Sample], tokenizer: Any, name: str) -> None:
    """Raise ValueError where the tokenizer cannot write a prompt's facts or its answer."""
    for sample in samples:
        said = tokenizer.decode(_encode(tokenizer, sample.answer), skip_special_tokens=True)
        if not all(sample.score(said)):
            raise ValueError(
                f"The tokenizer of {name} cannot write the answers of {sample.task}: {sample.answer.strip()!r} comes back as "
                f"{said.strip()!r}; leave the task out."
            )
        for sentence in (*(needle.sentence for needle in sample.needles), sample.question):
            said = tokenizer.decode(_encode(tokenizer, sentence), skip_special_tokens=True)
            if _letters(said) != _letters(sentence):
                raise ValueError(
                    f"The tokenizer of {name} cannot write the prompts of {sample.task}: {sentence.strip()!r} comes back as "
                    f"{said.strip()!r}; leave the task out."
                )


def _letters(text: str) -> str:
    """What is left of a text for a tokenizer that knows neither case nor spaces."""
    return "".join(text.split()).casefold()


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@torch.no_grad()
def settle(model: Any) -> None:
    """Bring a model whose frequencies follow the longest sequence so far (dynamic NTK) back to where it began."""
    rotaries = [place.module for place in rotary_places(model)] if isinstance(model, torch.nn.Module) else []
    if any("dynamic" in str(getattr(rotary, "rope_type", "")) for rotary in rotaries):
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


@torch.no_grad()
def measure_retrieval(
    model: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    length: int,
    *,
    batch_size: int = 1,
    advance: Callable[[int], Any] = lambda tokens: None,
) -> dict[str, Any]:
    """Share of the expected answers that a model gives when prompt and answer fill `length` tokens.

    Args:
        samples: of one task.
        advance: called with the number of tokens done.

    Returns:
        "trials", "rate", "low", "high" (Wilson's 95 % interval), "by_depth" (what was said in each fifth of the text) and
        "examples" (the first three).

    Raises:
        ValueError: a prompt does not fit.
    """
    room = answer_room(samples, tokenizer)
    answers: list[str] = []
    for at in range(0, len(samples), batch_size):
        prompts = [encode_prompt(sample, tokenizer, length - room) for sample in samples[at : at + batch_size]]
        ids = torch.tensor(prompts, device=model.device)
        settle(model)
        with _greedy(model, tokenizer, room):
            given = model.generate(ids, attention_mask=torch.ones_like(ids))
        answers += [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in given]
        advance(len(prompts) * length)
    found = [sample.score(answer) for sample, answer in zip(samples, answers, strict=True)]
    rate = statistics.fmean(sum(values) / len(values) for values in found)
    return {
        "trials": len(samples),
        **_with_interval(rate, len(samples)),
        "by_depth": _by_depth(samples, found),
        "examples": [
            {"question": sample.question.strip(), "expected": list(sample.expected), "answer": answer}
            for sample, answer in list(zip(samples, answers, strict=True))[:_EXAMPLES]
        ],
    }


@contextmanager
def _greedy(model: Any, tokenizer: Any, new_tokens: int) -> Iterator[None]:
    """Plain greedy generation, whatever the model's own generation config says, but for where an answer ends."""
    own = model.generation_config
    end = tokenizer.eos_token_id if own.eos_token_id is None else own.eos_token_id
    first = end[0] if isinstance(end, list) else end
    # A config given to `generate` would take what it leaves out from the model's own.
    model.generation_config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=end, pad_token_id=first or 0
    )
    try:
        yield
    finally:
        model.generation_config = own


def _by_depth(samples: Sequence[Sample], found: Sequence[Sequence[bool]]) -> list[dict[str, Any]]:
    bins: list[list[bool]] = [[] for _ in range(DEPTHS)]
    for sample, values in zip(samples, found, strict=True):
        for depth, value in zip(sample.answer_depths, values, strict=True):
            bins[min(int(depth * DEPTHS), DEPTHS - 1)].append(value)
    rows = []
    for number, values in enumerate(bins):
        row: dict[str, Any] = {"from": number / DEPTHS, "to": (number + 1) / DEPTHS, "values": len(values)}
        none = {"rate": None, "low": None, "high": None}
        rows.append(row | (_with_interval(statistics.fmean(values), len(values)) if values else none))
    return rows


def _with_interval(rate: float, trials: int) -> dict[str, float]:
    low, high = wilson(rate, trials)
    return {"rate": round(rate, 4), "low": round(low, 4), "high": round(high, 4)}

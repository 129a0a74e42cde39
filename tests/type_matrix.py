"""What one model type has to do in one mode of position on one backend; the tests and the table of support both ask here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from model_types import class_of, is_decoder, small_config, small_model
from reference import randomise_position
from tiny import random_ids

from hf_drope import DroPEParameters, apply_drope
from hf_drope.position_modules import rotary_places

MODES: dict[str, DroPEParameters] = {
    "dropped": DroPEParameters.preset("nope"),
    "bias": DroPEParameters.preset("simple"),
    "score gate": DroPEParameters.preset("drope"),
    "low rank": DroPEParameters.from_dict(
        {"position_bias": {"type": "low_rank", "rank": 4}, "gate": {"type": "query"}}
    ),
    "disentangled": DroPEParameters.preset("disentangled"),
    "QK-norm": DroPEParameters.preset("nope", qk_norm="qk"),
    "RoPE in some layers": DroPEParameters.preset("simple", rope_layers=[0]),
}
BACKENDS = ("eager", "sdpa", "flex_attention")


class Refused(Exception):
    """hf_drope or the model's own class says in a sentence that it cannot do this."""


@functools.cache
def backends_of(model_type: str) -> tuple[str, ...]:
    """What the stock class runs on with the same result; a few promise more."""
    stock, ids = class_of(model_type), random_ids(2, 9)
    has = {"sdpa": stock._supports_sdpa, "flex_attention": stock._supports_flex_attn}
    model = small_model(model_type, "eager")
    expected, found = run(model, ids), ["eager"]
    with uncompiled():
        for name in (name for name in BACKENDS if has.get(name)):
            model.set_attn_implementation(name)
            with contextlib.suppress(ValueError, RuntimeError):
                if (run(model, ids) - expected).abs().max() <= 2e-5 * expected.abs().max():
                    found.append(name)
    return tuple(found)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """PyTorch 2.13 writes C++ for flex attention on the CPU that does not compile with a cache."""
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


def run(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **({"use_cache": False} if model.can_generate() else {})).logits


def generate(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    settled = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **settled, **kwargs)


def convert(model_type: str, mode: str) -> Any:
    try:
        return randomise_position(apply_drope(small_model(model_type, "eager"), MODES[mode]))
    except ValueError as error:
        raise Refused(str(error)) from error


def check_strengths(model_type: str) -> None:
    """Full strength is the source bit for bit, a little less is near it, and none is something else.

    A rotation read as sine and cosine the wrong way round would jump.
    """
    ids = random_ids(2, 9)
    stock = small_model(model_type, "eager")
    expected = run(stock, ids)
    try:
        model = apply_drope(stock, "nope", rope_scale=1.0)
    except ValueError as error:
        raise Refused(str(error)) from error
    assert torch.equal(run(model, ids), expected), "not the source at full strength"
    for fade in ("angle", "blend") if rotary_places(model) else ("angle",):
        model = apply_drope(small_model(model_type, "eager"), "nope", rope_scale=0.9999, rope_fade=fade)
        assert (run(model, ids) - expected).abs().max() < 0.05 * expected.abs().max(), f"jumps when it fades by {fade}"
    model.set_rope_scale(0.0)
    assert not torch.equal(run(model, ids), expected), "dropping changes nothing"


def check(model_type: str, mode: str, backend: str) -> None:
    """The mode acts, gives on `backend` what it gives on eager, and generates the same with a cache and without.

    Raises:
        Refused: with the reason.
        AssertionError: a wrong answer.
    """
    ids = random_ids(2, 9)
    model = convert(model_type, mode)
    expected = run(model, ids)
    if mode != "dropped":
        assert not torch.equal(expected, run(convert(model_type, "dropped"), ids)), "has no effect"
    if mode == "disentangled":
        stock = run(small_model(model_type, "eager"), ids)
        model.set_rope_scale(1.0)
        assert_near(run(model, ids), stock, "taken apart and put back it is not the source")
        model.set_rope_scale(0.0)
    if backend != "eager":
        try:
            model.set_attn_implementation(backend)
        except ValueError as error:
            raise Refused(str(error)) from error
    with uncompiled():
        assert_near(run(model, ids), expected, f"{backend} is not eager")
        if is_decoder(model_type):
            assert torch.equal(generate(model, ids), generate(model, ids, use_cache=False)), "cached is not uncached"


def assert_near(actual: torch.Tensor, expected: torch.Tensor, message: str) -> None:
    scale = expected.abs().max()
    assert (actual - expected).abs().max() <= 2e-5 * scale, message


def parameters_of(model_type: str) -> int:
    """How large the small model is: a few configs have sizes of their own."""
    with torch.device("meta"):
        return sum(p.numel() for p in class_of(model_type)(small_config(model_type)).parameters())

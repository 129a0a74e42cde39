"""The attention scale β(i) = 1 + c·ln(i / L₀) of queries past the trained context L₀, fitted to held-out text.

The method is DroPE's (arXiv 2512.12167, appendix C.2, after arXiv 2404.12224): at each length the constant factor on the scores
with the lowest perplexity, then c by least squares of β − 1 on ln(length / L₀). From there c is brought to the lowest mean loss over
the lengths with the growing scale itself, and that one is kept: a constant factor acts on the queries within L₀ as well and suits the
mean of those that are scored, where β(i) leaves the first alone and reaches its value at the last only.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .attention_backends import refuse_backend
from .attention_masks import check_scale
from .configuration_drope import auto_map
from .context_scaling import reach, trained_window
from .drope_parameters import DroPEParameters
from .lowest import find_lowest
from .packed_documents import is_causal
from .perplexity import half_width, window_losses, window_starts
from .stock_attention import head_dim_of
from .text import beginning as beginning_of
from .top_k_logits import evaluating

MULTIPLES = (2, 4, 8)
_FIRST = 0.1
_SMALLEST_START = 0.05
_WEAKEST, _STRONGEST = 0.1, 4.0
# A length is run this often, as a rule: constants, coefficients and without.
_TRIALS = 9
_BATCH_TOKENS = 8192
# Neighbouring tokens are not independent; the means of so many are taken to be.
_BLOCK = 512


@dataclass
class AttentionScaleReport:
    """What a fit found.

    Attributes:
        coefficient: c as it is set in the model; None where there is to be no scale, and `reason` says why.
        original_max_position_embeddings: L₀, tokens.
        tokens: of the text.
        best: the coefficient with the lowest mean loss over the lengths past L₀.
        least_squares: c from the best constant factors.
        gain, noise: nats a token that `best` gains there against no scale, and half the 95 % interval of that.
        curve: by length "length", "factor" (β of its last query), perplexity "without" and "with" the scale that is set,
            "best_factor" (the constant that fits best) and "best_factor_perplexity".
        tried: "coefficient" and "loss" (mean nats a token over the lengths past L₀).
    """

    coefficient: float | None
    original_max_position_embeddings: int
    tokens: int
    best: float = 0.0
    least_squares: float = 0.0
    gain: float = 0.0
    noise: float | None = None
    reason: str | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    tried: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def attention_scale(self) -> dict[str, Any] | None:
        """The setting."""
        if self.coefficient is None:
            return None
        length = self.original_max_position_embeddings
        return {"coefficient": self.coefficient, "original_max_position_embeddings": length}

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, with five digits."""
        return _rounded(dataclasses.asdict(self))

    def describe(self) -> str:
        """A few lines and a table for a person."""
        window = self.original_max_position_embeddings
        if self.coefficient is None:
            lines = [f"no attention scale: {self.reason}"]
        else:
            lines = [f"attention scale 1 + {self.coefficient:g}·ln(i / {window}) for queries past {window} tokens"]
        lines.append(f"{'length':>8}  {'factor':>7}  {'without':>9}  {'with':>9}  best constant")
        lines += [
            f"{at['length']:8}  {at['factor']:7.3f}  {at['without']:9.5g}  {at['with']:9.5g}  "
            f"{at['best_factor']:.3f} ({at['best_factor_perplexity']:.5g})"
            for at in self.curve
        ]
        noise = "" if self.noise is None else f" ± {self.noise:.4f}"
        lines.append(
            f"best coefficient {self.best:g} (least squares through the constants {self.least_squares:.3f}): "
            f"{self.gain:+.4f}{noise} nats a token better past the window"
        )
        lines.append(f"fitted on {self.tokens} tokens in {self.seconds:.0f} s")
        return "\n".join(lines)


def fit_attention_scale(
    model: Any,
    text: Tensor | Sequence[str],
    *,
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
    original_length: int | None = None,
    progress: bool = True,
) -> AttentionScaleReport:
    """Fit the coefficient of the growing attention scale to held-out text, and set it in `model`.

    What is set is nowhere worse than no scale, at any of the lengths, and better by more than the 95 % interval of the gain, in
    blocks of 512 tokens or half the window; otherwise the model is left without a scale. A growing scale that it had is replaced.

    Args:
        model: a converted causal language model, in memory.
        text: token ids (tokens,), or strings, which `tokenizer` turns into them.
        lengths: tokens, past the window; default 2, 4 and 8 times the window, those that fit into the text twice. At each, windows
            begin every half length and their second halves count.
        original_length: the window L₀, where the scale begins; default the context that the config says the model was trained on.
            After a training on shorter sequences, their length may be the better one.
        progress: show a bar by tokens where standard error is a terminal.

    Raises:
        ValueError: one sentence on why this model, text or these lengths cannot be used; the model is unchanged.
    """
    check_model(model)
    window = fitting_window(model.config, original_length)
    ids, beginning = _token_ids(text, tokenizer)
    lengths = fitting_lengths(len(ids), window, lengths)
    check_reach(model, max(lengths), int(ids.max()))
    scale = {"coefficient": 1.0, "original_max_position_embeddings": window}
    settings = DroPEParameters.from_dict(model.config.drope_parameters).replace(attention_scale=scale)
    refuse_backend(settings, model.config._attn_implementation, head_dim_of(model.config))
    started = time.monotonic()
    with evaluating(model), _scale_restored(model):
        report = _Fit(model, ids, beginning, window, lengths, progress).run()
    report.seconds = round(time.monotonic() - started, 1)
    settings = settings.replace(attention_scale=report.attention_scale)
    _set(model, report.attention_scale)
    model.config.drope_parameters = settings.to_dict()
    model.config.auto_map = auto_map(model.config.model_type, settings)
    return report


def check_model(model: Any) -> None:
    """Raise ValueError for a model that has no place for a growing scale."""
    if not hasattr(model, "set_rope_scale"):
        raise ValueError(f"{type(model).__name__} is not a converted model; convert it with apply_drope.")
    if not is_causal(model):
        raise ValueError(
            f"{type(model).__name__} sees both sides of a token; an attention scale is fitted to the loss of next tokens."
        )
    scale = model.config.drope_parameters["attention_scale"] or {}
    if "factor" in scale:
        raise ValueError(
            f"The model has a constant attention scale of {scale['factor']:g}, whose place a growing one would take; set "
            "attention_scale to null first."
        )


def check_reach(model: Any, longest: int, largest: int) -> None:
    """Raise ValueError where a model, which may be without weights, does not reach a length or know a token."""
    end = reach(model)
    if end is not None and end < longest:
        raise ValueError(
            f"The model cannot reach a length of {longest}: its table of positions ends at {end}, and it is not dropped "
            f"(rope_scale {model.config.drope_parameters['rope_scale']:g})."
        )
    if largest >= model.config.vocab_size:
        raise ValueError(f"The text holds token {largest}, but the model knows only {model.config.vocab_size}.")


def fitting_window(config: Any, original_length: int | None) -> int:
    """Where the scale begins; errors as in `fit_attention_scale`."""
    window = trained_window(config) if original_length is None else original_length
    if window is None:
        raise ValueError("The config does not say how long the window is; give original_length.")
    if window < 2:
        raise ValueError(f"original_length is {window}; it has to be at least 2.")
    return window


def fitting_lengths(tokens: int, window: int, lengths: Sequence[int] | None) -> list[int]:
    """The lengths to fit at, ascending, for a text of so many tokens; errors as in `fit_attention_scale`."""
    if lengths is None:
        lengths = [window * many for many in MULTIPLES if many == MULTIPLES[0] or 2 * window * many <= tokens]
    for length in lengths:
        if length <= window:
            raise ValueError(
                f"lengths has {length}, and the scale begins past the window of {window} tokens; give longer ones."
            )
    if not lengths:
        raise ValueError("There are no lengths; give at least one.")
    longest = max(lengths)
    if tokens < longest:
        raise ValueError(
            f"The text has {tokens} tokens, fewer than the length of {longest}; give more text, or shorter lengths."
        )
    return sorted(set(lengths))


def _token_ids(text: Tensor | Sequence[str], tokenizer: Any) -> tuple[Tensor, list[int]]:
    """The text's ids (tokens,), and what each window begins with."""
    if isinstance(text, Tensor):
        if text.dim() != 1 or text.is_floating_point():
            raise ValueError(
                f"text has shape {tuple(text.shape)} in {text.dtype}; it has to be whole numbers (tokens,)."
            )
        return text.long().cpu(), [] if tokenizer is None else beginning_of(tokenizer)
    if isinstance(text, str) or tokenizer is None:
        raise ValueError("text has to be a list of strings with their tokenizer, or token ids.")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = [tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] + end for part in text]
    return torch.tensor([token for part in parts for token in part], dtype=torch.long), beginning_of(tokenizer)


def _set(model: Any, scale: dict[str, Any] | None) -> None:
    for module in model.modules():
        if hasattr(type(module), "needs_position"):
            module.attention_scale = check_scale(scale)


@contextmanager
def _scale_restored(model: Any) -> Iterator[None]:
    modules = [module for module in model.modules() if hasattr(type(module), "needs_position")]
    before = [module.attention_scale for module in modules]
    try:
        yield
    finally:
        for module, scale in zip(modules, before, strict=True):
            module.attention_scale = scale


class _Fit:
    """Losses of one text with one scale or another, and what follows from them."""

    def __init__(
        self, model: Any, ids: Tensor, beginning: list[int], window: int, lengths: list[int], progress: bool
    ) -> None:
        self.model, self.ids, self.beginning, self.window, self.lengths = model, ids, beginning, window, lengths
        self.longest = lengths[-1]
        windows = {length: len(window_starts(len(ids), length, self.longest)) for length in (window, *lengths)}
        # Halves that do not divide each other leave ends of their own.
        self.scored = min(count * (length // 2) for length, count in windows.items())
        self.grown: dict[float, dict[int, Tensor]] = {}
        self.bar = tqdm(
            total=_TRIALS * sum(length * count for length, count in windows.items()),
            desc="attention scale",
            unit="token",
            unit_scale=True,
            file=sys.stderr,
            disable=None if progress else True,
        )

    def run(self) -> AttentionScaleReport:
        report = AttentionScaleReport(None, self.window, len(self.ids))
        with self.bar:
            without = {length: self.losses(length, None) for length in (self.window, *self.lengths)}
            for length, losses in without.items():
                if not losses.isfinite().all():
                    raise ValueError(f"The losses at length {length} are not finite; look at the model's weights.")
            self.grown[0.0] = {length: without[length] for length in self.lengths}
            constants = self.best_constants(without)
            report.least_squares = self.least_squares(constants)
            self.choose(report)
            self.bar.total = self.bar.n
        kept = self.grown[report.coefficient or 0.0]
        for length, losses in without.items():
            factor, best = constants[length]
            report.curve.append(
                {
                    "length": length,
                    "factor": 1 + (report.coefficient or 0.0) * math.log(length / self.window),
                    "without": _perplexity(losses),
                    # No query of the window is past it.
                    "with": _perplexity(kept.get(length, losses)),
                    "best_factor": factor,
                    "best_factor_perplexity": math.exp(best),
                }
            )
        report.tried = [{"coefficient": c, "loss": self.loss(c)} for c in sorted(self.grown)]
        return report

    def losses(self, length: int, scale: dict[str, Any] | None) -> Tensor:
        """Nats of the scored tokens (tokens,), the same at every length."""
        _set(self.model, scale)
        rows = max(1, _BATCH_TOKENS // length)
        parts = window_losses(
            self.model,
            self.ids,
            length,
            self.longest,
            beginning=self.beginning,
            batch_size=rows,
            advance=self.bar.update,
        )
        return torch.cat([part[:, -(length // 2) :].flatten() for part in parts])[: self.scored]

    def loss(self, coefficient: float) -> float:
        """Mean nats a token over the lengths past the window, with the growing scale."""
        if coefficient not in self.grown:
            scale = {"coefficient": coefficient, "original_max_position_embeddings": self.window}
            self.grown[coefficient] = {length: self.losses(length, scale) for length in self.lengths}
        return self.mean(coefficient).mean().item()

    def mean(self, coefficient: float) -> Tensor:
        """Nats of each token, the mean over the lengths past the window."""
        return torch.stack(list(self.grown[coefficient].values())).mean(0)

    def best_constants(self, without: dict[int, Tensor]) -> dict[int, tuple[float, float]]:
        """By length the constant factor with the lowest loss, and that loss."""
        found, first = {}, _FIRST
        for length, losses in without.items():
            tried = find_lowest(
                lambda more, length=length: self.losses(length, {"factor": 1 + more}).mean().item(),  # type: ignore[misc]
                first,
                _WEAKEST - 1,
                _STRONGEST - 1,
                {0.0: losses.mean().item()},
            )
            best = min(tried, key=tried.__getitem__)
            found[length] = (1 + best, tried[best])
            # At the next length it is not far from there.
            first = best if abs(best) >= _SMALLEST_START else _FIRST
        return found

    def least_squares(self, constants: dict[int, tuple[float, float]]) -> float:
        logs = {length: math.log(length / self.window) for length in self.lengths}
        return sum((constants[length][0] - 1) * logs[length] for length in self.lengths) / sum(
            log**2 for log in logs.values()
        )

    def choose(self, report: AttentionScaleReport) -> None:
        """Set the report's coefficient, or the reason for none."""
        bound = math.log(self.longest / self.window)
        first = report.least_squares if abs(report.least_squares) >= _SMALLEST_START else _FIRST
        none = {0.0: self.loss(0.0)}
        tried = find_lowest(self.loss, first, (_WEAKEST - 1) / bound, (_STRONGEST - 1) / bound, none)
        best = min(tried, key=tried.__getitem__)
        report.best = best
        report.gain, report.noise = self.gain(best)
        if best <= 0:
            report.reason = f"attention wants no sharpening past {self.window} tokens (best coefficient {best:g})"
            return
        if not report.gain > (math.inf if report.noise is None else report.noise):
            noise = "more text is needed to tell its noise" if report.noise is None else f"± {report.noise:.4f}"
            report.reason = f"what {best:g} gains, {report.gain:.4f} nats a token, is within noise ({noise})"
            return
        # The lengths may want different ones: then less than the best of their mean.
        for part in (1.0, 0.5, 0.25):
            coefficient = round(best * part, 4)
            self.loss(coefficient)
            if not (worse := self.worse(coefficient)):
                gain, noise_of = self.gain(coefficient)
                if gain > (noise_of or 0.0):
                    report.coefficient = coefficient
                    return
        report.reason = (
            f"{best:g} is best on the mean and makes length {worse[0]} worse; give the lengths that matter alone"
            if worse
            else "what helps at every length gains less than its noise"
        )

    def worse(self, coefficient: float) -> list[int]:
        """Lengths with a higher perplexity than without a scale."""
        grown, none = self.grown[coefficient], self.grown[0.0]
        return [length for length in self.lengths if grown[length].mean() > none[length].mean()]

    def gain(self, coefficient: float) -> tuple[float, float | None]:
        """Nats a token gained over no scale, and half the 95 % interval, by blocks of tokens; None for one block."""
        gains = self.mean(0.0) - self.mean(coefficient)
        size = min(_BLOCK, max(1, self.window // 2))
        blocks = [block.mean().item() for block in gains.split(size) if len(block) == size]
        noise = half_width(blocks)
        return gains.mean().item(), noise if math.isfinite(noise) else None


def _perplexity(losses: Tensor) -> float:
    return math.exp(min(losses.mean().item(), 700.0))


def _rounded(content: Any) -> Any:
    if isinstance(content, float):
        return float(f"{content:.5g}") if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    return [_rounded(value) for value in content] if isinstance(content, list) else content

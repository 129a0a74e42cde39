"""`evaluate`: perplexity by position and retrieval of models at several lengths, beside what people would do instead."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .checkpoint import read_json
from .context_scaling import ROPE_SCALINGS
from .evaluation_plan import (
    PERPLEXITY,
    TEXT_TOKENS,
    Settings,
    Subject,
    Unit,
    find_subjects,
    load_tokenizers,
    units,
)
from .evaluation_results import ResultsFile
from .folder_calibration import load_model
from .model_facts import model_facts
from .perplexity import measure_perplexity, window_starts
from .provenance import sha256
from .report import write_report
from .retrieval import check_tokenizer, draw_samples, measure_retrieval, smallest_length
from .retrieval_tasks import DIGITS
from .text import beginning, leading_tokens
from .verify import quiet_transformers


def evaluate(
    models: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    against: str | Path | None = None,
    lengths: Sequence[int] = (512, 1024, 2048),
    tasks: Sequence[str] | None = None,
    text_files: Sequence[str | Path] = (),
    trials: int = 20,
    rope_scaling: Sequence[str] | None = None,
    position_scaling: Sequence[str] = (),
    digits: int = DIGITS,
    seed: int = 0,
    dtype: str = "float32",
    text_tokens: int | None = None,
    batch_size: int | None = None,
    bench: str | Path | None = None,
    report: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure causal language models at several lengths and write what was found, and a report, to a folder.

    Args:
        models: folders of converted or stock models.
        out: `results.json` is written there anew after each model, length and task; a run that was stopped goes on there.
        against: the folder of their source, which is measured as well, and whose tokenizer is that of models without one.
        lengths: tokens of a window, and of a prompt with its answer.
        tasks: some of "perplexity", "passkey", "multikey", "multiquery", "multivalue", "variable-tracking"; default
            "passkey", and with text "perplexity" before it.
        text_files: `.txt` or `.jsonl` (field "text"), for perplexity.
        trials: prompts a retrieval task and length.
        rope_scaling: baselines, some of "pi", "ntk", "dynamic", "yarn": the source, or without one each stock model, with its
            RoPE scaled by length / window. Within the window they are that model, and its figures are repeated. Default all
            for a source and none without one.
        position_scaling: some of "linear", "ntk", "yarn", "clip": models with a disentangled bias once more with their
            position terms stretched so.
        digits: of the numbers to be found.
        seed: of the prompts.
        dtype: "float32", "bfloat16" or "float16".
        text_tokens: at most so many of the text, from its beginning; default 32,768, or twice the longest length.
        batch_size: sequences at a time; default up to 8,192 tokens.
        bench: a file of `hf-drope bench --json`, for the report's table of costs.
        report: whether to write `report.html` and its figures at the end, or where a model fails.

    Returns:
        What `results.json` holds.

    Raises:
        ValueError: one sentence on an argument, a model, the text or the folder; what was finished is kept.
    """
    given_text = bool(text_files)
    if tasks is None:
        tasks = (PERPLEXITY, "passkey") if given_text else ("passkey",)
    if rope_scaling is None:
        rope_scaling = () if against is None else ROPE_SCALINGS
    longest = max(lengths, default=0)
    settings = Settings(
        lengths=tuple(sorted(lengths)),
        tasks=tuple(tasks),
        trials=trials,
        seed=seed,
        digits=digits,
        dtype=dtype,
        text_tokens=max(TEXT_TOKENS, 2 * longest) if text_tokens is None else text_tokens,
        rope_scaling=tuple(rope_scaling),
        position_scaling=tuple(position_scaling),
        batch_size=batch_size,
    )
    settings.check()
    if PERPLEXITY in settings.tasks and not given_text:
        raise ValueError("perplexity needs text; give it with --text FILE, or leave the task out.")
    if bench is not None and "rows" not in read_json(Path(bench)):
        raise ValueError(f"{bench} is no file of costs; hf-drope bench --json FILE writes one.")
    models = [models] if isinstance(models, str | Path) else list(models)
    with quiet_transformers():
        run = _Run(find_subjects(models, against, settings), settings, text_files, Path(out), progress)
        try:
            run.all()
        except ValueError:
            # Of what is there; the page says that it is not finished.
            if report and run.results.done():
                write_report(out, bench)
            raise
    if report:
        write_report(out, bench)
    return run.results.content


class _Run:
    def __init__(
        self, subjects: list[Subject], settings: Settings, text_files: Sequence[str | Path], out: Path, progress: bool
    ) -> None:
        self.subjects, self.settings, self.progress = subjects, settings, progress
        self.longest = max(settings.lengths)
        self.tokenizers = load_tokenizers(subjects)
        self.samples = {
            task: draw_samples(task, trials=settings.trials, digits=settings.digits, seed=settings.seed)
            for task in settings.retrieval_tasks
        }
        self._check_prompts()
        self.text, told = None, None
        if PERPLEXITY in settings.tasks:
            self.text = self._read_text(text_files)
            names = [Path(file).name for file in text_files]
            told = {"files": names, "sha256": sha256(text_files), "tokens": len(self.text)}
        models = [subject.to_dict() for subject in subjects]
        self.results = ResultsFile(out, settings.to_dict(), told, models)
        self._loaded: tuple[Any, Any] = (None, None)

    def _one_a_folder(self) -> list[Subject]:
        return list({subject.folder: subject for subject in reversed(self.subjects)}.values())[::-1]

    def _check_prompts(self) -> None:
        shortest = min(self.settings.lengths)
        for subject in self._one_a_folder():
            tokenizer = self.tokenizers[subject.folder]
            for task, samples in self.samples.items():
                check_tokenizer(samples, tokenizer, subject.name)
                smallest = smallest_length(samples, tokenizer)
                if shortest < smallest:
                    raise ValueError(
                        f"A prompt of {task} with its answer takes up to {smallest} tokens of {subject.name}, and the shortest "
                        f"length is {shortest}; give lengths from {smallest} on, or leave the task out."
                    )

    def _read_text(self, files: Sequence[str | Path]) -> torch.Tensor:
        """The text as token ids, the same for every model."""
        first, found = self.subjects[0], None
        for subject in self._one_a_folder():
            ids = leading_tokens(files, self.tokenizers[subject.folder], self.settings.text_tokens)
            if found is None:
                found = ids
            if not torch.equal(ids, found):
                raise ValueError(
                    f"{first.name} and {subject.name} have different tokenizers, so their perplexities say nothing about each "
                    "other; evaluate them apart, or leave perplexity out."
                )
            known = subject.config.get_text_config().vocab_size
            if int(ids.max()) >= known:
                raise ValueError(
                    f"The tokenizer of {subject.name} gives token {int(ids.max())}, but the model knows only {known}."
                )
        # Says whether there is enough of it.
        window_starts(len(ids), self.longest, self.longest)
        return ids

    def all(self) -> None:
        started = time.monotonic()
        done = self.results.done()
        plan = list(units(self.subjects, self.settings))
        tokens = {unit.key: self._tokens(unit) for unit in plan}
        bar = tqdm(
            total=sum(tokens.values()),
            initial=sum(tokens[key] for key in done),
            unit="token",
            unit_scale=True,
            file=sys.stderr,
            disable=None if self.progress else True,
        )
        with bar:
            for unit in plan:
                if unit.key in done:
                    continue
                bar.set_description(f"{unit.subject.name} {unit.length} {unit.task}")
                if unit.subject.is_base(unit.length):
                    base = str(unit.subject.base)
                    figures = {**self.results.figures(base, unit.length, unit.task), "same_as": base}
                else:
                    figures = self._measure(unit, bar.update)
                self.results.add(unit, figures)
                self.results.write(time.monotonic() - started)
        self.results.write(time.monotonic() - started, finished=True)

    def _tokens(self, unit: Unit) -> int:
        """Tokens that a unit runs through a model."""
        if unit.subject.is_base(unit.length):
            return 0
        if self.text is None or unit.task != PERPLEXITY:
            return self.settings.trials * unit.length
        return len(window_starts(len(self.text), unit.length, self.longest)) * unit.length

    def _measure(self, unit: Unit, advance: Callable[[int], Any]) -> dict[str, Any]:
        try:
            model, tokenizer = self._model(unit), self.tokenizers[unit.subject.folder]
            rows = self.settings.rows(unit.length)
            if self.text is not None and unit.task == PERPLEXITY:
                return measure_perplexity(
                    model,
                    self.text,
                    unit.length,
                    self.longest,
                    beginning=beginning(tokenizer),
                    batch_size=rows,
                    advance=advance,
                )
            samples = self.samples[unit.task]
            return measure_retrieval(model, tokenizer, samples, unit.length, batch_size=rows, advance=advance)
        except (IndexError, KeyError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{unit.subject.name} stops at {unit.task} at length {unit.length}: {reason}") from error

    def _model(self, unit: Unit) -> Any:
        """The model of a unit, loaded unless the last one was the same."""
        subject = unit.subject
        key = subject.name, None if subject.base is None else unit.length
        if self._loaded[0] != key:
            # The one before goes first: two may not fit.
            self._loaded = (None, None)
            config = subject.config_at(unit.length)
            self._loaded = (key, load_model(subject.folder, self.settings.dtype, config))
            if subject.base is None:
                self.results.set_facts(subject.name, model_facts(self._loaded[1], subject.folder, self.longest))
        return self._loaded[1]

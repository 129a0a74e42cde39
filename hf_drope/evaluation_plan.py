"""What an evaluation measures: its settings, its models with their variants, and the units of work, checked before any of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hf_drope  # noqa: F401  (registers the classes)

from .checkpoint import RUN_DTYPES
from .context_scaling import (
    POSITION_SCALINGS,
    ROPE_SCALINGS,
    check_position_scaling,
    check_rope,
    has_position_terms,
    reach,
    rotated_channels,
    scaled_rope,
    scaled_terms,
    trained_window,
)
from .conversion_plan import read_source
from .drope_parameters import unknown
from .folder_calibration import load_tokenizer, predicts_next_tokens
from .model_facts import FACTS
from .provenance import model_files, sha256
from .retrieval_tasks import TASKS

PERPLEXITY = "perplexity"
TEXT_TOKENS = 32768
# What the files of a tokenizer are called: those that make one, and those that go with them.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_PARTS = ("merges.txt", "added_tokens.json", "special_tokens_map.json")
# Without a batch size: as many rows as make this many tokens, at most so many.
_BATCH_TOKENS, _BATCH_ROWS = 8192, 8


@dataclass(frozen=True)
class Settings:
    """The numbers of an evaluation; `evaluate` says what they are."""

    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    trials: int
    seed: int
    digits: int
    dtype: str
    text_tokens: int
    rope_scaling: tuple[str, ...]
    position_scaling: tuple[str, ...]
    batch_size: int | None

    def check(self) -> None:
        """Raise ValueError for the first that cannot be."""
        names: Any = (
            ("task", self.tasks, (PERPLEXITY, *TASKS)),
            ("RoPE scaling", self.rope_scaling, ROPE_SCALINGS),
            ("position scaling", self.position_scaling, POSITION_SCALINGS),
            ("dtype", (self.dtype,), RUN_DTYPES),
        )
        for name, values, known in names:
            for value in values:
                if value not in known:
                    raise unknown(name, value, known)
        lists: Any = (("lengths", self.lengths), ("tasks", self.tasks))
        for name, values in lists:
            if not values:
                raise ValueError(f"There are no {name}; give at least one.")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} are {', '.join(map(str, values))}; give each once.")
        counts = (
            ("length", min(self.lengths), 2),
            ("trials", self.trials, 1),
            ("digits", self.digits, 1),
            ("text_tokens", self.text_tokens, 2),
            ("batch_size", 1 if self.batch_size is None else self.batch_size, 1),
        )
        for name, value, least in counts:
            if value < least:
                raise ValueError(f"{name} is {value}; it has to be at least {least}.")

    @property
    def retrieval_tasks(self) -> list[str]:
        return [task for task in self.tasks if task != PERPLEXITY]

    def rows(self, length: int) -> int:
        """Sequences of that length in a batch."""
        return self.batch_size or max(1, min(_BATCH_ROWS, _BATCH_TOKENS // length))

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))


@dataclass
class Subject:
    """A model, or one of its scalings, that is measured at every length."""

    name: str
    folder: Path
    given: str
    role: str
    config: Any
    sha256: str
    scaling: str | None = None
    position_scaling: str | None = None
    # Whose figures these are within the window, where there is nothing to scale.
    base: str | None = None
    rotated: dict[str | None, int] | None = None
    # Of the files of the tokenizer that it is read with.
    tokenizer_sha256: str | None = None

    @property
    def window(self) -> int | None:
        return trained_window(self.config)

    def is_base(self, length: int) -> bool:
        return self.base is not None and length <= (self.window or 0)

    def config_at(self, length: int) -> Any:
        """The config that the model is loaded with for a length."""
        if self.base is None or self.is_base(length):
            return self.config
        factor = length / (self.window or length)
        if self.scaling is not None:
            return scaled_rope(self.config, self.scaling, factor, self.rotated or {})
        return scaled_terms(self.config, str(self.position_scaling), factor)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": self.given,
            "sha256": self.sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "model_type": self.config.model_type,
            "window": self.window,
            "scaling": self.scaling,
            "position_scaling": self.position_scaling,
            "role": self.role,
            "drope_parameters": getattr(self.config, "drope_parameters", None),
            **dict.fromkeys(FACTS),
        }


@dataclass(frozen=True)
class Unit:
    """One model at one length on one task."""

    subject: Subject
    length: int
    task: str

    @property
    def key(self) -> tuple[str, int, str]:
        return self.subject.name, self.length, self.task


def units(subjects: Sequence[Subject], settings: Settings) -> Iterator[Unit]:
    for subject in subjects:
        for length in settings.lengths:
            for task in settings.tasks:
                yield Unit(subject, length, task)


def find_subjects(models: Sequence[str | Path], against: str | Path | None, settings: Settings) -> list[Subject]:
    """The models with their baselines and stretched variants, the source first.

    Raises:
        ValueError: a folder is no causal language model, a model does not reach the longest length, or cannot be scaled.
    """
    given = [str(path) for path in ([] if against is None else [against]) + list(models)]
    if not given:
        raise ValueError("There is no model to evaluate; give its folder.")
    folders: dict[Path, str] = {}
    for path in given:
        folder, _ = read_source(path)
        folders.setdefault(folder.resolve(), path)
    names = unique_names(list(folders))
    source = None if against is None else Path(against).resolve()
    subjects: list[Subject] = []
    for folder, path in folders.items():
        subject, model = _read_subject(folder, path, names[folder], folder == source, max(settings.lengths))
        is_base = subject.role == ("stock" if source is None else "source")
        subjects += [subject, *_scalings(subject, model, settings, is_base)]
    if settings.rope_scaling and not any(subject.scaling for subject in subjects):
        raise ValueError("There is no stock model whose RoPE could be scaled; give the source with --against.")
    if settings.position_scaling and not any(subject.position_scaling for subject in subjects):
        raise ValueError(
            "No model has a disentangled bias whose positions could be scaled; leave --position-scaling out."
        )
    return subjects


def _scalings(subject: Subject, model: Any, settings: Settings, is_base: bool) -> list[Subject]:
    """The baselines of a stock model, or the stretched variants of a converted one."""
    name = subject.name
    if is_base and settings.rope_scaling:
        check_rope(model, name, settings.rope_scaling)
        base = dataclasses.replace(subject, base=name, role="baseline", rotated=rotated_channels(model))
        return [dataclasses.replace(base, name=f"{name} + {kind}", scaling=kind) for kind in settings.rope_scaling]
    if settings.position_scaling and has_position_terms(subject.config):
        check_position_scaling(subject.config, name)
        return [
            dataclasses.replace(subject, base=name, name=f"{name}, {kind} positions", position_scaling=kind)
            for kind in settings.position_scaling
        ]
    return []


def unique_names(folders: Sequence[Path]) -> dict[Path, str]:
    """A short name for each folder: its own, with as many of those above it as tell it from others of the same name."""
    names = {}
    for folder in folders:
        for depth in range(1, len(folder.parts) + 1):
            tail = folder.parts[-depth:]
            if sum(other.parts[-depth:] == tail for other in folders) == 1:
                break
        names[folder] = "/".join(tail)
    return names


def _read_subject(folder: Path, given: str, name: str, is_source: bool, longest: int) -> tuple[Subject, Any]:
    """The subject and its model without weights."""
    import transformers

    _, content = read_source(folder)
    model_type = str(content.get("model_type"))
    is_converted = model_type.endswith("_drope") or "attention_type" in content
    if is_source and is_converted:
        raise ValueError(f"{given} is a converted model; give its source with --against.")
    if not predicts_next_tokens(content):
        raise ValueError(
            f"{given} is a {model_type} that predicts no next tokens; evaluate takes causal language models."
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    end = reach(model)
    if end is not None and end < longest:
        raise ValueError(
            f"{name} cannot reach a length of {longest}: its table of positions ends at {end}; give lengths up to that, or drop "
            "the table with hf-drope convert."
        )
    role = "source" if is_source else "converted" if is_converted else "stock"
    files = model_files(folder)
    if len(files) == 1:
        raise ValueError(f"{given} holds no weights.")
    return Subject(name, folder, given, role, config, sha256(files)), model


def load_tokenizers(subjects: Sequence[Subject]) -> dict[Path, Any]:
    """The tokenizer of each folder; where one has none, the source's. Each subject is told the hash of its own.

    Raises:
        ValueError: there is none.
    """
    source = next((subject.folder for subject in subjects if subject.role == "source"), None)
    tokenizers: dict[Path, Any] = {}
    hashes: dict[Path, str] = {}
    for subject in subjects:
        home = subject.folder if _has_tokenizer(subject.folder) or source is None else source
        if not _has_tokenizer(home):
            raise ValueError(f"{subject.given} has no tokenizer; save one there, as tokenizer.save_pretrained does.")
        if home not in tokenizers:
            tokenizers[home] = load_tokenizer(home)
            hashes[home] = sha256(_tokenizer_files(home))
        tokenizers[subject.folder], subject.tokenizer_sha256 = tokenizers[home], hashes[home]
    return tokenizers


def _tokenizer_files(folder: Path) -> list[Path]:
    return [file for name in (*_TOKENIZERS, *_TOKENIZER_PARTS) if (file := folder / name).is_file()]


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def identity(settings: dict[str, Any], text: dict[str, Any] | None, models: Sequence[dict[str, Any]]) -> str:
    """A hash of what makes two evaluations the same."""
    content = json.dumps([comparable(settings), text and text["sha256"], [fixed(model) for model in models]])
    return hashlib.sha256(content.encode()).hexdigest()


def comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings on which figures depend."""
    return {key: value for key, value in settings.items() if key != "batch_size"}


def fixed(model: dict[str, Any]) -> list[Any]:
    return [model[key] for key in ("name", "sha256", "scaling", "position_scaling")]

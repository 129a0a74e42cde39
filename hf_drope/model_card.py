"""`README.md` of a converted folder as its model card, refilled from the records that lie beside it.

Ours is the front matter and what stands between two marks; text of the user's outside them stays as it is. The source's own card
speaks of another model, so a conversion keeps it byte for byte under another name, `SOURCE_README.md`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import checkpoint
from .card_text import Records, auto_class, card_text
from .configuration_drope import public_settings
from .drope_parameters import DroPEParameters
from .provenance import model_files, sha256
from .whole_file import json_text, write_whole

CARD = "README.md"
SOURCE_CARD = "SOURCE_README.md"
RECORD = "drope_conversion.json"
TRAINING_RECORD = "drope_training.json"
EVALUATION_RECORD = "drope_evaluation.json"
BEGIN, END = "<!-- hf_drope -->", "<!-- /hf_drope -->"
_PICTURE = "convergence.png"
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
_PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModel": "feature-extraction",
}
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_REVISION = re.compile(r"[0-9a-f]{40}")


def update_card(folder: str | Path, results: dict[str, Any] | None = None) -> Path:
    """Refill the card of a converted folder from its records; nothing changes if they have not changed.

    Args:
        folder: a converted checkpoint folder.
        results: of `hf-drope evaluate` (its `results.json`), in which the folder is one of the models: what was measured of it,
            of the source, of the baselines and of stock models is kept in `drope_evaluation.json` with a fingerprint of weights and settings,
            and is in the card until these change.

    Returns:
        The card, `README.md` in the folder.

    Raises:
        ValueError: one sentence: no converted folder, a card that cannot be read, or results of other models or other weights;
            nothing changed.
    """
    path = Path(folder)
    text = card_with(path, results)
    if results is not None:
        write_whole(path / EVALUATION_RECORD, json_text(summarise(results, path)))
    write_whole(path / CARD, text)
    return path / CARD


def update_cards(results: dict[str, Any]) -> list[Path]:
    """`update_card` for every converted folder among the models of an evaluation; returns the cards."""
    return [update_card(model["path"], results) for model in _converted(results)]


def _converted(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The converted models as they are; with its position terms stretched, one lies in the same folder."""
    return [
        model for model in results["models"] if model.get("role") == "converted" and not model.get("position_scaling")
    ]


def card_with(folder: str | Path, results: dict[str, Any] | None = None) -> str:
    """The text that `update_card` would write; arguments and errors as there."""
    path = Path(folder)
    return filled(_read_text(path / CARD), _records_with(path, results))


def write_card(folder: str | Path, file: str | Path, results: dict[str, Any] | None = None) -> None:
    """Write or refill the card of a converted folder elsewhere; nothing in the folder changes.

    Args:
        file: a new one, or a card that this function wrote: text outside our marks stays as it is.
        folder, results: as in `update_card`, with its errors.

    Raises:
        ValueError: `file` is there and is no card of ours.
    """
    path, target = Path(folder), Path(file)
    # Their files are in the folder.
    records = dataclasses.replace(_records_with(path, results), picture=None, source_card_file=None)
    present = _read_text(target)
    if present.strip() and BEGIN not in present:
        raise ValueError(f"{target} is there and holds no model card of ours; give another file.")
    write_whole(target, filled(present, records))


def _records_with(folder: Path, results: dict[str, Any] | None) -> Records:
    records = read_records(folder)
    return records if results is None else dataclasses.replace(records, evaluation=summarise(results, folder))


def card_of_export(source: Path, target: Path) -> None:
    """Refill the card that came along from a converted folder into a folder that runs without our code."""
    card = _read_text(target / CARD)
    if BEGIN in card:
        write_whole(target / CARD, filled(card, read_records(source, is_stock=True)))


def read_records(folder: Path, *, is_stock: bool = False) -> Records:
    """What the files of a converted folder say about it; an evaluation of other weights is not among it.

    Raises:
        ValueError: it is no converted folder, or a record is no JSON.
    """
    config = checkpoint.read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    settings = config.get("drope_parameters") or (public_settings(config) if is_stock else None)
    if not str(config.get("model_type", "")).endswith("_drope") or settings is None:
        raise ValueError(f"{folder} is not a converted checkpoint folder, so it has no model card of ours to fill.")
    evaluation = _record(folder / EVALUATION_RECORD)
    if evaluation and evaluation.get("fingerprint") != _fingerprint(folder):
        evaluation = {}
    source_card = max(folder.glob("SOURCE_README*.md"), default=None)
    return Records(
        config={**config, "drope_parameters": DroPEParameters.from_dict(settings).to_dict()},
        conversion=_record(folder / RECORD),
        trainings=_record(folder / TRAINING_RECORD).get("runs", []),
        evaluation=evaluation,
        source_card=_lenient_front_matter(source_card),
        source_card_file=source_card.name if source_card else None,
        license_file=next((name for name in _LICENSES if (folder / name).is_file()), None),
        picture=_PICTURE if (folder / _PICTURE).is_file() else None,
        has_tokenizer=any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")),
        is_stock=is_stock,
    )


def filled(card: str, records: Records) -> str:
    """A card's whole text with our part of it made anew; an empty text becomes a card.

    Raises:
        ValueError: its front matter is no YAML mapping, or our marks are not one pair.
    """
    front, text = split_card(card)
    ours = f"{BEGIN}\n{card_text(records)}\n{END}"
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if begin and (not end or BEGIN in inside + after or END in before + after):
        raise ValueError(f"{CARD} has {BEGIN} without one {END} after it; mend the marks, or delete both.")
    if not begin:
        if END in text:
            raise ValueError(f"{CARD} has {END} without {BEGIN} before it; mend the marks, or delete both.")
        before, after = (f"{text.rstrip()}\n\n" if text.strip() else "\n"), "\n"
    return f"---\n{_front_matter(front, records)}\n---\n{before}{ours}{after}"


def split_card(card: str) -> tuple[dict[str, Any], str]:
    """The front matter of a card, empty where there is none, and the text below it."""
    if not card.lstrip().startswith("---"):
        return {}, card
    import yaml
    from huggingface_hub import RepoCard

    try:
        read = RepoCard(card)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"The front matter of {CARD} is no YAML mapping ({reason}); mend it first.") from error
    return read.data.to_dict(), read.text


def _front_matter(present: dict[str, Any], records: Records) -> str:
    """As YAML: what the card has stays, but for what is recorded or measured."""
    from huggingface_hub import ModelCardData

    ours: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": _PIPELINES.get(auto_class(records.config)),
        **{
            key: records.source_card.get(key)
            for key in ("license", "license_name", "license_link", "language")
            if key in records.source_card
        },
    }
    if "license" not in ours and records.license_file:
        ours |= {"license": "other", "license_link": records.license_file}
    kept = {key: value for key, value in present.items() if key not in ("model-index", "eval_results", "model_name")}
    data = {**ours, **kept}
    known = (records.conversion.get("base_model") or {}).get("name")
    if known:
        data["base_model"] = known
    tags = kept.get("tags") or []
    data["tags"] = [*([tags] if isinstance(tags, str) else tags), "hf_drope", records.kind]
    measured = _eval_results(records.evaluation)
    if measured:
        data |= {"eval_results": measured, "model_name": records.title}
    return ModelCardData(**data).to_yaml(line_break="\n").strip()


def _eval_results(evaluation: dict[str, Any]) -> list[Any]:
    """What was measured of this model, in the form of the Hub's model index."""
    from huggingface_hub import EvalResult

    results: list[Any] = []
    mine = [row for row in evaluation.get("perplexity", ()) if row["model"] == evaluation["name"]]
    for row in (row for row in mine if row["perplexity"] is not None):
        text = evaluation.get("text") or {}
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type="text",
                dataset_name=", ".join(text.get("files", ["text"])),
                metric_type="perplexity",
                metric_name=f"perplexity at {row['length']} tokens",
                metric_value=row["perplexity"],
                metric_args={"low": row["low"], "high": row["high"], "tokens": row["tokens"]},
            )
        )
    for row in (row for row in evaluation.get("retrieval", ()) if row["model"] == evaluation["name"]):
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=row["task"],
                dataset_name=f"{row['task']}, synthetic",
                metric_type="accuracy",
                metric_name=f"retrieval at {row['length']} tokens",
                metric_value=row["rate"],
                metric_args={"low": row["low"], "high": row["high"], "trials": row["trials"]},
            )
        )
    return results


def summarise(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The part of an evaluation's results that belongs into a folder: its own numbers and those of all that is not converted.

    Raises:
        ValueError: the folder is not among the models, or has changed since.
    """
    here = folder.resolve()
    models = _converted(results)
    mine = next((model for model in models if Path(model["path"]).resolve() == here), None)
    mine = mine or next((model for model in models if model["name"] == here.name), None)
    if mine is None:
        names = ", ".join(model["name"] for model in models) or "none"
        raise ValueError(f"{folder} is not among the evaluated models ({names}); evaluate it first.")
    if mine["sha256"] != sha256(model_files(folder)):
        raise ValueError(
            f"{folder} is not the model that was evaluated: its weights or config changed; evaluate it again."
        )
    # With this model those of its path, its position terms stretched; beside it the source, what scales its RoPE, and stock
    # models, such as the source after the same training.
    kept = [
        model
        for model in results["models"]
        if model["path"] == mine["path"] or model.get("role") in ("source", "baseline", "stock")
    ]
    kept_names = {model["name"] for model in kept}
    provenance = dict(results["provenance"])
    if provenance.get("command"):
        provenance["command"] = shown_command(provenance["command"])

    def rows(name: str, keys: Sequence[str]) -> list[dict[str, Any]]:
        return [{key: row[key] for key in keys} for row in results[name] if row["model"] in kept_names]

    return {
        "format": 1,
        "fingerprint": _fingerprint(folder),
        "name": mine["name"],
        "provenance": provenance,
        "settings": results["settings"],
        "text": results.get("text"),
        "models": [
            {key: model.get(key) for key in ("name", "role", "scaling", "position_scaling", "window")} for model in kept
        ],
        "perplexity": rows("perplexity", ("model", "length", "perplexity", "low", "high", "tokens", "windows")),
        "retrieval": rows("retrieval", ("model", "task", "length", "trials", "rate", "low", "high")),
    }


def record_training(folder: Path, before: Path, run: dict[str, Any]) -> None:
    """Add a training run to the record of `folder`, after those in the record of the folder `before` that it began from."""
    runs = _record(before / TRAINING_RECORD).get("runs", [])
    write_whole(folder / TRAINING_RECORD, json_text({"runs": [*runs, run]}))


def hub_origin(folder: Path, given: str | None = None) -> dict[str, str]:
    """`name` and `revision` of the repository that a folder was downloaded from, as far as they are known.

    Args:
        given: the name, or name@revision, from the user; without it the places where huggingface_hub keeps them are read.
    """
    found: dict[str, str] = {}
    snapshot = _SNAPSHOT.search(folder.resolve().as_posix())
    downloaded = folder / ".cache/huggingface/download/config.json.metadata"
    if snapshot:
        found = {"name": f"{snapshot[1]}/{snapshot[2]}", "revision": snapshot[3]}
    elif downloaded.is_file():
        revision = downloaded.read_text(encoding="utf-8").partition("\n")[0].strip()
        found = {"revision": revision} if _REVISION.fullmatch(revision) else {}
    if given is not None:
        name, _, revision = given.partition("@")
        found = {**({} if found.get("name", name) != name else found), "name": name}
        found |= {"revision": revision} if revision else {}
    return found


def shown_command(arguments: Sequence[str]) -> list[str]:
    """A command line for a record: paths that say where things lie on this machine become their last name."""

    def shown(argument: str) -> str:
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        path = Path(value)
        is_home = value.startswith(("~", "./", "../")) or path.is_absolute()
        return f"{option}{equals}{path.resolve().name if value in ('.', '..') else path.name}" if is_home else argument

    return [Path(arguments[0]).name, *map(shown, arguments[1:])]


def free_source_card(names: set[str]) -> str:
    """A name for the source's card that no other file of the source has."""
    number = 1
    name = SOURCE_CARD
    while name in names:
        number += 1
        name = f"SOURCE_README_{number}.md"
    return name


def _read_text(path: Path) -> str:
    if not path.is_file():
        return ""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8; save it as that, or move it away.") from error


def _lenient_front_matter(path: Path | None) -> dict[str, Any]:
    """Of the source's card, which is not ours to judge: what cannot be read says nothing."""
    try:
        return split_card(_read_text(path))[0] if path is not None else {}
    except ValueError:
        return {}


def _record(path: Path) -> dict[str, Any]:
    return checkpoint.read_json(path) if path.is_file() else {}


def _fingerprint(folder: Path) -> str:
    """Of weights and settings: what was measured of others does not hold."""
    settings = checkpoint.read_json(folder / "config.json")["drope_parameters"]
    weights = checkpoint.fingerprint(checkpoint.read_checkpoint(folder))
    return hashlib.sha256(f"{weights} {json.dumps(settings, sort_keys=True)}".encode()).hexdigest()

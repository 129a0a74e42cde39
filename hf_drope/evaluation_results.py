"""`results.json`: what an evaluation has found so far, with where it comes from; whole at every moment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .evaluation_plan import PERPLEXITY, Unit, comparable, fixed, identity
from .provenance import provenance
from .report import FORMAT, RESULTS
from .whole_file import write_whole


class ResultsFile:
    """The results in a folder: those of an earlier run of the same evaluation, or none; the file is there at once.

    Args:
        out: made if it is not there.
        settings, text, models: as in `results.json`.

    Raises:
        ValueError: the folder holds something else, or another evaluation; the sentence names what differs.
    """

    def __init__(
        self, out: Path, settings: dict[str, Any], text: dict[str, Any] | None, models: Sequence[dict[str, Any]]
    ) -> None:
        self.path = out / RESULTS
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.content: dict[str, Any] = {
            "format": FORMAT,
            "identity": identity(settings, text, models),
            "provenance": {**provenance(), "started": now, "finished": None, "seconds": 0.0},
            "settings": settings,
            "text": text,
            "models": list(models),
            "perplexity": [],
            "retrieval": [],
        }
        earlier = _earlier(out)
        if earlier is not None:
            _check_same(out, earlier, self.content)
            _note_changes(earlier["provenance"], self.content["provenance"])
            self.content = earlier
        self._before = float(self.content["provenance"]["seconds"])
        # A folder that cannot be written to is found out before the work.
        self.write(0.0)

    def done(self) -> set[tuple[str, int, str]]:
        """The keys of the units that are there."""
        found = {(row["model"], row["length"], PERPLEXITY) for row in self.content["perplexity"]}
        return found | {(row["model"], row["length"], row["task"]) for row in self.content["retrieval"]}

    def add(self, unit: Unit, figures: dict[str, Any]) -> None:
        row = {"model": unit.subject.name, "length": unit.length}
        if unit.task == PERPLEXITY:
            self.content["perplexity"].append({**row, **figures})
        else:
            self.content["retrieval"].append(
                {"model": row["model"], "task": unit.task, "length": unit.length, **figures}
            )

    def figures(self, name: str, length: int, task: str) -> dict[str, Any]:
        """What was found for one unit, without its key."""
        rows = self.content["perplexity" if task == PERPLEXITY else "retrieval"]
        row = next(
            row for row in rows if (row["model"], row["length"], row.get("task", PERPLEXITY)) == (name, length, task)
        )
        return {key: value for key, value in row.items() if key not in ("model", "length", "task")}

    def set_facts(self, name: str, facts: dict[str, Any]) -> None:
        next(model for model in self.content["models"] if model["name"] == name).update(facts)

    def write(self, seconds: float, finished: bool = False) -> None:
        """Replace the file; `seconds` are those of this run."""
        told = self.content["provenance"]
        told["seconds"] = round(self._before + seconds, 1)
        if finished and told["finished"] is None:
            told["finished"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self.content, ensure_ascii=False, allow_nan=False) + "\n")


def _earlier(out: Path) -> dict[str, Any] | None:
    if not out.exists():
        return None
    if not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder with --out.")
    if not (out / RESULTS).is_file():
        if any(path for path in out.iterdir() if path.name != f".{RESULTS}.part"):
            raise ValueError(f"{out} is not empty and holds no evaluation; give another folder with --out.")
        return None
    try:
        content = json.loads((out / RESULTS).read_text(encoding="utf-8"))
        content["identity"], content["provenance"]["seconds"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out / RESULTS} is not an evaluation's; give another folder with --out.") from error
    # Before its first figure there is nothing to keep.
    return content if content.get("perplexity") or content.get("retrieval") else None


def _check_same(out: Path, earlier: dict[str, Any], now: dict[str, Any]) -> None:
    if earlier["identity"] == now["identity"] and earlier.get("format") == FORMAT:
        for mine, theirs in zip(earlier["models"], now["models"], strict=True):
            if mine.get("tokenizer_sha256", theirs["tokenizer_sha256"]) != theirs["tokenizer_sha256"]:
                raise ValueError(
                    f"{out} holds an evaluation of {mine['name']} with another tokenizer; give another folder with --out."
                )
        return
    raise ValueError(f"{out} holds another evaluation ({_difference(earlier, now)}); give another folder with --out.")


def _note_changes(earlier: dict[str, Any], now: dict[str, Any]) -> None:
    """Keep, in an unfinished evaluation that goes on, what is another version or machine than the one before."""
    if earlier.get("finished") is not None:
        return
    keys = ("hf_drope", "git_revision", "torch", "transformers", "python", "cpu", "threads")
    changed = {key: now[key] for key in keys if now[key] != earlier.get(key)}
    last = earlier.get("continued_with") or []
    if changed and changed not in last:
        earlier["continued_with"] = [*last, changed]


def _difference(earlier: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing in which an earlier evaluation differs."""
    if earlier.get("format") != FORMAT:
        return f"its format is {earlier.get('format')}, and this version writes {FORMAT}"
    before, wanted = comparable(earlier["settings"]), comparable(now["settings"])
    for key in wanted:
        if before.get(key) != wanted[key]:
            value = before.get(key)
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            return f"its {key.replace('_', ' ')} {'are' if key.endswith('s') else 'is'} {'none' if shown in ('', None) else shown}"
    names = [[model["name"] for model in content["models"]] for content in (earlier, now)]
    if names[0] != names[1]:
        return f"its models are {', '.join(names[0])}"
    for mine, theirs in zip(earlier["models"], now["models"], strict=True):
        if fixed(mine) != fixed(theirs):
            return f"its {mine['name']} has other weights or another config"
    return "its text is another"

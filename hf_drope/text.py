"""Text files as blocks of tokens for language-model training."""

from __future__ import annotations

import codecs
import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

_SUFFIXES = (".txt", ".jsonl")
# A tokenizer needs many times a text's size in memory, so a long document goes through it in pieces of this many characters.
_PIECE = 1 << 20
_CHARACTERS = 12
_LONGEST_WORD = 200


def read_documents(files: Iterable[str | Path]) -> Iterator[str]:
    """The documents of `.txt` files (one each, UTF-8) and `.jsonl` files (one a line, field "text"), in order.

    Documents that are blank are left out.

    Raises:
        ValueError: one sentence naming the file, and the line or byte, that cannot be used.
    """
    for file in map(Path, files):
        if not file.is_file():
            raise ValueError(f"There is no text file {file}.")
        suffix = file.suffix.lower()
        if suffix not in _SUFFIXES:
            nearest = difflib.get_close_matches(suffix, _SUFFIXES, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"{file} ends in {file.suffix!r}; text files end in .txt or .jsonl.{hint}")
        found = False
        for document in _whole(file) if suffix == ".txt" else _rows(file):
            if document.strip():
                found = True
                yield document
        if not found:
            raise ValueError(f"{file} is empty.")


def _whole(file: Path) -> Iterator[str]:
    yield _decode(file, file.read_bytes(), 0)


def _rows(file: Path) -> Iterator[str]:
    """The `text` of each line; lines end at a line feed only, since JSON may hold every other separator unescaped."""
    start = 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            line = _decode(file, raw, start)
            start += len(raw)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}, is not JSON: {error}.") from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise ValueError(f"{file}, line {number}, has no field 'text' that holds a string.")
            yield row["text"]


def _decode(file: Path, raw: bytes, start: int) -> str:
    """`raw`, which begins at byte `start` of `file`, as text without a byte order mark."""
    skipped = len(codecs.BOM_UTF8) if start == 0 and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return raw[skipped:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = start + skipped + error.start
        raise ValueError(f"{file} is not UTF-8: byte {at} cannot be decoded.") from error


def _pieces(document: str) -> Iterator[str]:
    """The document cut at line ends into pieces of about `_PIECE` characters."""
    start = 0
    while len(document) - start > _PIECE:
        end = document.rfind("\n", start, start + _PIECE) + 1
        # Without a line end in reach, at the next one: cutting inside a word would make tokens that no text has.
        end = end or document.find("\n", start + _PIECE) + 1 or len(document)
        yield document[start:end]
        start = end
    if start < len(document):
        yield document[start:]


def text_windows(files: Iterable[str | Path], tokenizer: Any, length: int, count: int) -> torch.Tensor:
    """`count` windows of `length` tokens, taken evenly from all of the text: (count, length).

    Only the text around each window is tokenized. Windows begin at a word; they may run from one document into the next.

    Raises:
        ValueError: a file cannot be used, or the text is too short for that many windows without overlap.
    """
    text = "\n\n".join(read_documents(files))
    places = [round(index * len(text) / count) for index in range(count)]
    windows = []
    for start, stop in zip(places, [*places[1:], len(text)], strict=True):
        # A first guess of a few characters a token, then whatever there is.
        for end in (min(stop, start + _CHARACTERS * length), stop):
            ids = tokenizer(_from_word(text, start, end), add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= length:
                break
        if len(ids) < length:
            total = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            raise ValueError(
                f"The text has {total} tokens, too few for {count} windows of {length}; give more text, or fewer tokens."
            )
        windows.append(torch.tensor(ids[:length]))
    return torch.stack(windows)


def _from_word(text: str, start: int, end: int) -> str:
    """The text from the first word that begins at or after `start`."""
    begin, last = start, min(end, start + _LONGEST_WORD)
    while 0 < begin < last and not text[begin - 1].isspace():
        begin += 1
    # Not every script has spaces.
    return text[begin if begin < last else start : end]


def leading_tokens(files: Iterable[str | Path], tokenizer: Any, count: int) -> torch.Tensor:
    """The first `count` tokens of the documents, or all there are, each followed by the tokenizer's end-of-text token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for document in read_documents(files):
        for piece in _pieces(document):
            ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= count:
                return torch.tensor(ids[:count])
        ids += end
    return torch.tensor(ids[:count])


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer begins every text with."""
    plain, whole = (
        list(tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"]) for special in (False, True)
    )
    starts = [start for start in range(len(whole)) if whole[start : start + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


class PackedText(Dataset[dict[str, torch.Tensor]]):
    """Blocks of `sequence_length` tokens cut from the documents, each followed by the tokenizer's end-of-text token.

    A block may hold several documents; attention is not kept from crossing them, as in pretraining. All tokens are held in
    memory at 4 bytes each; their order is that of the files.

    Args:
        files: see `read_documents`.
        tokenizer: a Transformers tokenizer; documents follow each other directly where it has no end-of-text token.
        sequence_length: tokens a block; the remainder at the end is left out.

    Raises:
        ValueError: a file cannot be used, or there is not one full block.
    """

    def __init__(self, files: Iterable[str | Path], tokenizer: Any, sequence_length: int) -> None:
        if sequence_length < 2:
            raise ValueError(f"sequence_length is {sequence_length}; it has to be at least 2.")
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        parts = []
        for document in read_documents(files):
            for piece in _pieces(document):
                # Packing cuts to size: the tokenizer's warning about texts longer than the model is beside the point.
                ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
                parts.append(torch.tensor(ids, dtype=torch.int32))
            parts.append(torch.tensor(end, dtype=torch.int32))
        tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
        count = len(tokens) // sequence_length
        if count == 0:
            raise ValueError(f"The text has {len(tokens)} tokens, too few for one sequence of {sequence_length}.")
        self.blocks = tokens[: count * sequence_length].view(count, sequence_length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """{"input_ids", "labels"}, both (sequence_length,); the model shifts the labels."""
        ids = self.blocks[index].long()
        return {"input_ids": ids, "labels": ids.clone()}

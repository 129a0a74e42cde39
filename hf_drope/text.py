"""Text files as blocks of tokens for language-model training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset


def read_documents(files: Iterable[str | Path]) -> Iterator[str]:
    """The documents of `.txt` files (one each, UTF-8) and `.jsonl` files (one a line, field "text"), in order.

    Raises:
        ValueError: one sentence naming the file, and the line or byte, that cannot be used.
    """
    for file in map(Path, files):
        if not file.is_file():
            raise ValueError(f"There is no text file {file}.")
        if file.suffix not in (".txt", ".jsonl"):
            raise ValueError(f"{file} ends in {file.suffix!r}; text files end in .txt or .jsonl.")
        try:
            content = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8: byte {error.start} cannot be decoded.") from error
        if not content.strip():
            raise ValueError(f"{file} is empty.")
        if file.suffix == ".txt":
            yield content
            continue
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                yield _text_field(file, number, line)


def _text_field(file: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{file}, line {number}, is not JSON: {error}.") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError(f"{file}, line {number}, has no field 'text' that holds a string.")
    return row["text"]


class PackedText(Dataset[dict[str, torch.Tensor]]):
    """Blocks of `sequence_length` tokens cut from the documents, which follow each other with an end-of-text token between.

    Args:
        files: see `read_documents`.
        tokenizer: a Transformers tokenizer.
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
            # Packing cuts to size, so the tokenizer's warning about a document longer than the model is beside the point.
            ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
            parts.append(torch.tensor([*ids, *end], dtype=torch.int32))
        tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
        count = len(tokens) // sequence_length
        if count == 0:
            raise ValueError(f"The text has {len(tokens)} tokens, too few for one sequence of {sequence_length}.")
        self.blocks = tokens[: count * sequence_length].view(count, sequence_length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.blocks[index].long()
        return {"input_ids": ids, "labels": ids}

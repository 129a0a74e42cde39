"""A teacher's predictions cut to its likeliest tokens, in memory (`top_k_logits`) and stored in a folder (`TopKLogits`)."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from .new_folder import new_folder, remove_leftovers

# Tokens whose probabilities over the whole vocabulary are in memory at once, in fp32.
CHUNK = 512
# A logarithm of zero that can be multiplied by zero.
LOWEST = -1e30
_FILES = {
    "values": ("float16", ("count", "length", "top_k")),
    "indices": ("int32", ("count", "length", "top_k")),
    "rest": ("float32", ("count", "length")),
    "keys": ("uint64", ("count",)),
}
_SETTINGS = "top_k_logits.json"


class TopK(NamedTuple):
    """A teacher's predictions cut to its k likeliest tokens: `values` (..., k) log-probabilities, `indices` (..., k)
    token ids, `rest` (...) the logsumexp of all others, which rounding cannot lose as it would a difference of sums.
    """

    values: Tensor
    indices: Tensor
    rest: Tensor


def top_k_logits(logits: Tensor, k: int) -> TopK:
    """(..., vocabulary) logits → the k largest a token, largest first, in fp32."""
    parts = []
    for chunk in logits.flatten(0, -2).split(CHUNK):
        log_probs = chunk.float().log_softmax(-1)
        values, indices = log_probs.topk(k)
        parts.append((values, indices, logsumexp_of_others(log_probs, indices)))
    return TopK(*(torch.cat(part).unflatten(0, logits.shape[:-1]) for part in zip(*parts, strict=True)))


def logsumexp_of_others(logits: Tensor, indices: Tensor) -> Tensor:
    return logits.scatter(-1, indices, LOWEST).logsumexp(-1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode comes back."""
    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        yield


def vocabulary_size(model: Any) -> int:
    return model.vocab_size if isinstance(model, TopKLogits) else model.config.get_text_config().vocab_size


class TopKLogits:
    """A teacher's `TopK` predictions for a text, in a folder that is read as needed; about 6 bytes a token and k.

    Args:
        folder: from `write`. Attributes: `vocab_size`, `top_k`, `length` (tokens a sequence), `count` (sequences).

    Raises:
        ValueError: not such a folder, or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            settings = json.loads((self.folder / _SETTINGS).read_text(encoding="utf-8"))
            names = ("vocab_size", "top_k", "length", "count")
            self.vocab_size, self.top_k, self.length, self.count = (int(settings[name]) for name in names)
            self._arrays = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in _FILES}
            for name, (dtype, shape) in _FILES.items():
                if self._arrays[name].dtype != dtype or self._arrays[name].shape != tuple(settings[s] for s in shape):
                    raise ValueError(name)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.folder} holds no complete top-k logits; write them with TopKLogits.write."
            ) from error
        self._order = np.argsort(self._arrays["keys"], kind="stable")
        self._sorted = self._arrays["keys"][self._order]

    def lookup(self, input_ids: Tensor) -> TopK:
        """(batch, length) token ids, the rows in any order → their predictions in fp32, on the same device.

        Raises:
            ValueError: other rows or another length than those written.
        """
        if input_ids.shape[-1] != self.length:
            raise ValueError(
                f"A sequence has {input_ids.shape[-1]} tokens, but those in {self.folder} have {self.length}."
            )
        keys = _keys(input_ids)
        found = np.minimum(np.searchsorted(self._sorted, keys), self.count - 1)
        for number in np.flatnonzero(self._sorted[found] != keys):
            raise ValueError(f"Sequence {number} of the batch is not in {self.folder}; write it anew from this text.")
        values, indices, rest = (
            torch.from_numpy(self._arrays[name][self._order[found]]).to(input_ids.device) for name in TopK._fields
        )
        return TopK(values.float(), indices.long(), rest)

    @classmethod
    def write(
        cls, folder: str | Path, teacher_model: Any, dataset: Any, top_k: int = 64, batch_size: int = 8
    ) -> TopKLogits:
        """Run the teacher over a dataset once, where it is and in its dtype; the folder appears when all is written.

        Args:
            folder: new or empty.
            dataset: items with "input_ids" of one length, such as `PackedText`.
            top_k: log-probabilities kept a token, in fp16.
            batch_size: sequences at once.

        Raises:
            ValueError: one sentence on a wrong argument; nothing was written.
        """
        target, vocabulary, count = Path(folder), vocabulary_size(teacher_model), len(dataset)
        if not 1 <= top_k <= vocabulary:
            raise ValueError(f"top_k is {top_k}; it has to be from 1 to {vocabulary}, the vocabulary.")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it has to be at least 1.")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target} is not empty; choose another folder.")
        if count == 0:
            raise ValueError("The dataset is empty; it has to have at least one sequence.")
        length = len(dataset[0]["input_ids"])
        settings = {"vocab_size": vocabulary, "top_k": top_k, "length": length, "count": count}
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        bar = tqdm(desc="teacher", total=count * length, unit="token", unit_scale=True, file=sys.stderr, disable=None)
        with new_folder(target) as work, bar, evaluating(teacher_model):
            arrays = {
                name: np.lib.format.open_memmap(work / f"{name}.npy", "w+", dtype, tuple(settings[s] for s in shape))
                for name, (dtype, shape) in _FILES.items()
            }
            for start in range(0, count, batch_size):
                part = slice(start, min(start + batch_size, count))
                rows = [torch.as_tensor(dataset[index]["input_ids"]) for index in range(part.start, part.stop)]
                if any(len(row) != length for row in rows):
                    raise ValueError(
                        f"The sequences have to have {length} tokens, as the first; cut the text to blocks."
                    )
                ids = torch.stack(rows)
                device = next(teacher_model.parameters()).device
                kept = top_k_logits(teacher_model(input_ids=ids.to(device), use_cache=False)["logits"], top_k)
                for name, array in {**kept._asdict(), "keys": _keys(ids)}.items():
                    arrays[name][part] = array.cpu().numpy() if isinstance(array, Tensor) else array
                bar.update(ids.numel())
            for name in _FILES:
                arrays.pop(name).flush()
            (work / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return cls(target)


def _keys(input_ids: Tensor) -> Any:
    """The first 8 bytes of the SHA-256 of each row of token ids, as little-endian int32."""
    rows = input_ids.cpu().numpy().astype("<i4")
    return np.array(
        [int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8], "little") for row in rows], dtype="uint64"
    )

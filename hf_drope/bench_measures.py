"""What `bench` measures of one model: seconds of a prefill, a step, a training step or an attention module, and peaks of memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from .cache_argument import cache_argument
from .stock_attention import is_attention

# "memory" is the peak of a prefill with the weights, "train-memory" that of a training step, "attention-memory" what one
# attention layer adds by itself.
MEASURES = ("prefill", "memory", "decode", "train", "train-memory", "attention", "attention-memory")
PEAKS = {"memory": "prefill", "train-memory": "train", "attention-memory": "attention"}
STATUS = Path("/proc/self/status")
_DECODED = 8


def measurement(model: Any, measure: str, length: int, batch: int) -> Callable[[], float]:
    """A function that runs once and returns seconds, or bytes."""
    device = model.device
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1)).to(
        device
    )

    def prefill() -> None:
        with torch.no_grad():
            model(ids, logits_to_keep=1)

    def train() -> None:
        model(ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    if measure == "decode":
        return lambda: _time_decoding(model, ids)
    kind = PEAKS.get(measure, measure)
    run = {"prefill": prefill, "train": train}.get(kind) or _attention_of(model, ids)
    if measure not in PEAKS:
        return lambda: _timed(run, device)
    weights = 0 if kind == "attention" else sum(p.numel() * p.element_size() for p in model.parameters())
    return lambda: weights + _peak_growth(run, device)


def _timed(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


@torch.no_grad()
def _time_decoding(model: Any, ids: Any) -> float:
    """Seconds a step, with a cache of random keys and values, which cost what real ones do."""
    batch, length = ids.shape
    probe: Any = DynamicCache(config=model.config)
    cache = DynamicCache(config=model.config)
    model(ids[:, :1], **cache_argument(model, probe))
    for index, layer in enumerate(probe.layers):
        key, value = (
            torch.randn(batch, x.shape[1], length, x.shape[3], dtype=model.dtype, device=model.device)
            for x in (layer.keys, layer.values)
        )
        cache.update(key, value, index)

    cached = cache_argument(model, cache)
    model(ids[:, :1], **cached)

    def decode() -> None:
        for step in range(_DECODED):
            model(ids[:, step : step + 1], **cached)

    return _timed(decode, model.device) / _DECODED


class _CapturedError(Exception):
    """The attention module was reached, with these arguments."""


def _attention_of(model: Any, ids: Any) -> Callable[[], None]:
    """One attention module as the model calls it, by itself."""
    module = next(m for m in model.modules() if is_attention(m))

    def capture(module: Any, args: Any, kwargs: Any) -> None:
        raise _CapturedError(args, kwargs)

    hook = module.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    except _CapturedError as captured:
        args, kwargs = captured.args
    finally:
        hook.remove()

    def attention() -> None:
        with torch.no_grad():
            module(*args, **kwargs)

    return attention


def _peak_growth(run: Callable[[], None], device: torch.device) -> float:
    """Bytes that a run adds at its peak, at least one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return max(1, torch.cuda.max_memory_allocated(device) - before)
    with _growth() as grown:
        run()
    return max(1, grown[0])


@contextmanager
def _growth() -> Iterator[list[int]]:
    """How many bytes the process grew by at its peak, by the kernel's own counter."""

    def field(name: str) -> int:
        lines = STATUS.read_text(encoding="utf-8").split("\n")
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    # Freed memory that the allocator keeps would hide what the run takes again.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before, grown = field("VmRSS"), [0]
    yield grown
    grown[0] = field("VmHWM") - before

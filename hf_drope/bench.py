"""The cost of a position mode as a ratio to the stock RoPE model, both measured alternately in one process."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .bench_measures import MEASURES, PEAKS, STATUS, measurement
from .bench_report import Row
from .bench_variants import STOCK, Variant, build, too_large, variants
from .checkpoint import RUN_DTYPES
from .modeling_drope import apply_drope
from .provenance import cpu_name

USUAL_MEASURES = ("prefill", "memory", "decode", "train")
_FLASH = {"flash_attention_2": "flash_attn_2", "flash_attention_3": "flash_attn_3", "flash_attention_4": "flash_attn_4"}
# Variants measured between two runs of the stock model, so that both see the same machine.
_GROUP = 3


def default_config() -> Any:
    """A 12-layer Llama of hidden size 576 with 9 heads over 3: the shape of SmolLM2-135M, less deep."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    )


def load_config(model: str | Path | None) -> Any:
    """The config in a file or folder, of the model that is measured with random weights.

    Raises:
        ValueError: no config is there, or that of a converted model.
    """
    if model is None:
        return default_config()
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is no model: there is no config.json; give a folder with one, or the file itself.")
    try:
        config = AutoConfig.from_pretrained(file)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{file} is not the config of a model that Transformers knows: {error}") from error
    if config.model_type.endswith("_drope"):
        raise ValueError(
            f"{path} is a converted model; give the source, which is what the variants are measured against."
        )
    return config


def bench(
    model: str | Path | None = None,
    *,
    lengths: Sequence[int] = (1024, 4096, 16384),
    measures: Sequence[str] = USUAL_MEASURES,
    only: Sequence[str] | None = None,
    every: bool = False,
    backends: Sequence[str] = ("sdpa",),
    stock_backend: str = "sdpa",
    dtype: str = "bfloat16",
    device: str = "cpu",
    rounds: int = 5,
    seconds: float = 60.0,
    longest_training: int = 4096,
    batch_size: int = 1,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure variants against the stock model.

    Args:
        model: a folder with a `config.json`, or the file; default a small Llama. Weights are random.
        lengths: tokens: of a prefill, in the cache while decoding, of a training sequence.
        measures: some of "prefill", "decode" (a step with a cache of that length), "train" (forward and backward), "attention"
            (one attention module by itself), and "memory", "train-memory", "attention-memory", the peaks in bytes of a
            prefill and a training step, weights included, and of the attention module.
        only: variant names, or where no variant has that name, beginnings of names; default one of each kind, or with
            `every` all.
        backends: attention implementations of ours to measure.
        stock_backend: attention implementation of the model that they are measured against.
        rounds: ratios whose median is reported; fewer, but two, where they take more than `seconds` for a few variants.
        longest_training: lengths above are not trained.

    Returns:
        "machine", "settings", "rows" (`Row` as dicts) and "skipped" (variant → why).

    Raises:
        ValueError: no model or none that converts, an unknown measure, variant, dtype, device or backend, or a length that
            does not fit in memory; nothing was run.
    """
    _check(lengths, measures, dtype, device, rounds, batch_size)
    _check_backends((*backends, stock_backend))
    config = load_config(model)
    _check_family(config)
    chosen = _choose(variants(tuple(backends)), only, every)
    place, kind = torch.device(device), getattr(torch, dtype)
    _check_memory(config, lengths, measures, kind, place, batch_size, longest_training)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation=stock_backend).to(place).eval()
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    # Memory first: its pass warms the other up.
    plan = [
        (length, measure)
        for length in lengths
        for measure in sorted(measures, key=lambda name: name not in PEAKS)
        if not measure.startswith("train") or length <= longest_training
    ]
    bar = tqdm(total=len(plan) * len(chosen), file=sys.stderr, disable=None if progress else True)
    with bar:
        # What a first run keeps for good is nobody's peak.
        measurement(stock, "prefill", lengths[0], batch_size)()
        for group in _groups(chosen):
            models = _build_group(stock, group, skipped)
            # Each compiled attention function counts towards a limit above which PyTorch compiles no more.
            torch.compiler.reset()
            for length, measure in plan:
                bar.set_description(f"{measure} {length}")
                is_warm = any(PEAKS.get(other) == measure for other in measures)
                rows += _measure_group(models, measure, length, batch_size, rounds, seconds, is_warm, skipped)
                bar.update(len(group))
    return {
        "machine": machine(place),
        "settings": {
            "model": "default" if model is None else str(model),
            "config": config.to_dict(),
            "dtype": dtype,
            "device": device,
            "threads": torch.get_num_threads(),
            "rounds": rounds,
            "seconds": seconds,
            "stock_backend": stock_backend,
            "batch_size": batch_size,
        },
        "rows": [row._asdict() for row in rows],
        "skipped": skipped,
    }


def machine(device: torch.device) -> dict[str, str]:
    found = {"cpu": cpu_name(), "torch": torch.__version__, "transformers": transformers.__version__}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _check(
    lengths: Sequence[int], measures: Sequence[str], dtype: str, device: str, rounds: int, batch_size: int
) -> None:
    for name in measures:
        if name not in MEASURES:
            raise ValueError(f"measure is {name!r}; known are {', '.join(MEASURES)}.")
    if dtype not in RUN_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; known are {', '.join(RUN_DTYPES)}.")
    for name, numbers in (("length", lengths), ("rounds", [rounds]), ("batch_size", [batch_size])):
        for number in numbers:
            if number < (2 if name == "length" else 1):
                raise ValueError(f"{name} is {number}; it has to be at least {2 if name == 'length' else 1}.")
    try:
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not here: {str(error).splitlines()[0]}") from error
    if set(PEAKS) & set(measures) and torch.device(device).type == "cpu" and not STATUS.is_file():
        raise ValueError("Peak memory on the CPU is read from /proc, which only Linux has; leave 'memory' out.")
    try:
        one = torch.ones(1, 1, 2, 2, dtype=getattr(torch, dtype), device=device)
        torch.nn.functional.scaled_dot_product_attention(one @ one, one, one, is_causal=True)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{device} cannot compute in {dtype}: {str(error).splitlines()[0]}") from error


def _check_backends(backends: Sequence[str]) -> None:
    known = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    for name in backends:
        if name not in known:
            raise ValueError(f"backend is {name!r}; known are {', '.join(sorted(known))}.")
        if name.startswith("flash_attention") and not getattr(transformers.utils, f"is_{_FLASH[name]}_available")():
            raise ValueError(f"backend {name!r} is not installed here; use one of 'eager', 'sdpa', 'flex_attention'.")


def _check_family(config: Any) -> None:
    """Refuse a model that has no converted form before anything is measured."""
    with torch.device("meta"):
        apply_drope(AutoModelForCausalLM.from_config(config))


def _check_memory(
    config: Any,
    lengths: Sequence[int],
    measures: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    batch: int,
    longest_training: int,
) -> None:
    size, hidden, layers = dtype.itemsize, config.hidden_size, config.num_hidden_layers
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    weights = (config.vocab_size * hidden + layers * (4 * hidden**2 + 3 * hidden * wide)) * size
    free = _free_memory(device)
    for length in lengths:
        tokens = length * batch
        needed = 3 * weights + tokens * (12 * hidden + 3 * wide) * size
        if {"train", "train-memory"} & set(measures) and length <= longest_training:
            needed += tokens * (layers * (16 * hidden + 4 * wide) * size + 3 * 4 * config.vocab_size)
        if needed > free:
            raise ValueError(
                f"length {length} needs about {needed / 1e9:.1f} GB for {', '.join(measures)}, and {device} has "
                f"{free / 1e9:.1f} GB free; give shorter lengths or leave out 'train'."
            )


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").split("\n")
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):
        return sys.maxsize


def _choose(found: list[Variant], only: Sequence[str] | None, every: bool) -> list[Variant]:
    if only is None:
        return [variant for variant in found if every or variant.is_chosen]
    names = {variant.name for variant in found}
    chosen = [v for v in found if any(v.name == x or (x not in names and v.name.startswith(x)) for x in only)]
    if not chosen:
        raise ValueError(
            f"No variant begins with {' or '.join(map(repr, only))}; there are {', '.join(map(repr, sorted(names)))}."
        )
    return chosen


def _groups(chosen: list[Variant]) -> Iterator[list[Variant]]:
    for start in range(0, len(chosen), _GROUP):
        yield chosen[start : start + _GROUP]


def _build_group(stock: Any, group: list[Variant], skipped: dict[str, str]) -> dict[str, Any]:
    models = {STOCK: stock}
    for variant in group:
        try:
            models[variant.name] = build(variant, stock)
        except (ValueError, ImportError) as error:
            skipped[variant.name] = _sentence(error)
    return models


def _measure_group(
    models: dict[str, Any],
    measure: str,
    length: int,
    batch: int,
    rounds: int,
    seconds: float,
    is_warm: bool,
    skipped: dict[str, str],
) -> list[Row]:
    """One group beside the stock model, round by round."""
    values: dict[str, list[float]] = {}
    runs: dict[str, Callable[[], float]] = {}
    is_peak = measure in PEAKS
    for name, model in models.items():
        refusal = too_large(name, model.config, length, model.dtype.itemsize)
        if refusal is not None:
            skipped[f"{name}, {measure} {length}"] = refusal
            continue
        try:
            runs[name] = measurement(model, measure, length, batch)
            # The first run compiles, fills the allocator, and says what does not go.
            values[name] = [runs[name]()] if is_peak else []
            if not is_peak and not is_warm:
                runs[name]()
        except (ValueError, ImportError, RuntimeError, MemoryError) as error:
            skipped[f"{name}, {measure} {length}"] = _sentence(error)
            runs.pop(name, None)
            values.pop(name, None)
    started = time.perf_counter()
    for done in range(0 if is_peak else rounds):
        if done > 1 and time.perf_counter() - started > seconds:
            break
        for name, run in runs.items():
            values[name].append(run())
    base = values.pop(STOCK, None)
    found: list[Row] = []
    if base is None:
        return found
    for name, taken in values.items():
        ratios = sorted(a / b for a, b in zip(taken, base, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        median = statistics.median
        found.append(Row(name, measure, length, median(ratios), low, high, median(taken), median(base), len(ratios)))
    return found


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

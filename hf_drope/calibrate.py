"""Calibration: the position parameters of a converted model computed from what its source already knows, before training.

One forward pass over a few windows of text goes through the layers in order; at each layer, with its un-rotated queries and
keys at hand, the bias gets a closed-form start:

    disentangled      mean queries and keys, and M as the mean rotation over attended distances
    low_rank          the source's frequencies with the most energy; α, β from mean queries and keys
    table, log, ...   weighted least squares on what the source's encoding adds to the score, by distance

A disentangled bias, which keeps most of RoPE, then descends towards the attention probabilities that the source's encoding gives
on the same queries and keys, and only then the pass goes on: later layers are fitted on the states that the converted earlier
ones really produce. Every other bias takes the states of the source, since its own are soon too far away. Last, the position
parameters of all layers descend together towards the source's next-token distribution.

A learned absolute table (GPT-2) acts on the states, so there the source runs first and its scores are the target.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from . import checkpoint
from .attention_drope import rotary_pairs, scale_queries
from .configuration_drope import DroPEParameters
from .convert import RECORD, read_source
from .disentangled_bias import RotaryPairs
from .distill import as_source, distillation_loss
from .hardware import multiplies_bf16
from .layer_fit import LayerFit, LayerReport, LayerStates, parameter_groups, unrotate
from .modeling_drope import apply_drope
from .position_bias import PositionBias
from .text import text_windows
from .top_k_logits import evaluating, top_k_logits

logger = logging.getLogger(__name__)

TOKENS = 16384
LONGEST = 8192
OUTPUT_STEPS = 8
_TOP_K = 64


@dataclass
class CalibrationReport:
    """What a calibration did."""

    bias: str
    windows: int
    length: int
    steps: int
    output_steps: int = 0
    seconds: float = 0.0
    output_divergence: tuple[float, float] | None = None
    layers: list[LayerReport] = field(default_factory=list)

    def mean(self, name: str) -> float:
        return sum(getattr(layer, name) for layer in self.layers) / max(len(self.layers), 1)

    def to_dict(self) -> dict[str, Any]:
        content = dataclasses.asdict(self)
        content["layers"] = [layer._asdict() for layer in self.layers]
        return content

    def describe(self) -> str:
        first, last = self.output_divergence or (None, None)
        return (
            f"calibrated {self.bias} in {len(self.layers)} layers on {self.windows} × {self.length} tokens in {self.seconds:.0f} s\n"
            f"divergence from the source's attention, mean over layers (nats a query): dropped {self.mean('dropped'):.3f}, "
            f"closed form {self.mean('start'):.3f}, after {self.steps} descent steps {self.mean('end'):.3f}"
            + (
                f"\ndivergence from its next tokens (nats): {first:.3f} → {last:.3f} in {self.output_steps} steps"
                if last is not None
                else ""
            )
        )


def calibrate(
    model: Any,
    source: Any,
    texts: Tensor | Sequence[str],
    *,
    tokenizer: Any = None,
    length: int | None = None,
    steps: int | None = None,
    output_steps: int | None = None,
    learning_rate: float = 0.1,
    states: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> CalibrationReport:
    """Set the position parameters of `model` from its source's position encoding; its other weights stay as they are.

    Args:
        model: a converted model with a position bias, in memory.
        source: the stock model it was converted from; may be None where the source has RoPE, which is then known from the
            config.
        texts: token ids (windows, length), or strings, which `tokenizer` turns into windows of `length` tokens.
        length: tokens a window, for strings; default the model's context length, at most 8192.
        steps: of the descent a layer towards the source's attention; 0 leaves the closed form. Default 32 for a disentangled
            bias with p2c and 0 for every other, which can match attention only at the expense of what comes out of it.
        output_steps: of the descent of all layers together that follows, one window each, towards the source's next-token
            distribution; default 8.
        learning_rate: of the descent a layer, in units of each parameter's root mean square; half of it for the outputs.
        states: what the layers are fitted on: "own", the states that the converted earlier layers produce, or "source", those
            of the source. Default "own" for a disentangled bias with p2c, which stays close to its source, for a source with
            a learned table and with `qk_norm`; "source" for every other, whose own states are soon too far away.
        seed: of the choice of queries.
        progress: show a bar by layers where standard error is a terminal.

    Raises:
        ValueError: one sentence on why this model, source or text cannot be used; the model is unchanged.
    """
    biases = _check_model(model)
    _check_source(model, source)
    ids = _windows(model, texts, tokenizer, length).to(model.device)
    for name, count in (("steps", steps), ("output_steps", output_steps)):
        if count is not None and count < 0:
            raise ValueError(f"{name} is {count}; it has to be at least 0.")
    kind = model.config.drope_parameters["position_bias"]["type"]
    # With p2c most of RoPE is there, and a layer can come close to its source.
    close = "p2c" in model.config.drope_parameters["position_bias"].get("terms", ())
    steps = (32 if close else 0) if steps is None else steps
    output_steps = OUTPUT_STEPS if output_steps is None else output_steps
    report = CalibrationReport(kind, windows=len(ids), length=ids.shape[1], steps=steps, output_steps=output_steps)
    started = time.monotonic()
    pairs = _pairs(model, next(iter(biases)))
    if states not in (None, "own", "source"):
        raise ValueError(f"states is {states!r}; it has to be 'own' or 'source'.")
    if states == "source" and pairs is None:
        raise ValueError("states is 'source', but this source has a learned position table; use 'own'.")
    # Added norms are no part of the source, and what they do is fitted as well.
    own = states == "own" or pairs is None or (states is None and (close or model.config.drope_parameters["qk_norm"]))
    settings = {module: (module.attention_scale, module.window) for module in biases}
    targets = _source_states(source, ids) if pairs is None else {}
    bar = tqdm(total=len(biases), desc="calibrate", unit="layer", file=sys.stderr, disable=None if progress else True)

    def observe(module: Any, query: Tensor, key: Tensor, mask: Any, position: Any, scaling: float | None) -> None:
        attention_scale, window = settings[module]
        if not own and not module.keeps_rope:
            # The source has rotated them.
            query, key = (unrotate(part, pairs) for part in (query, key))
        scaled = query
        if attention_scale is not None:
            scaled = scale_queries(attention_scale, query, key, mask, 0)
        layer = LayerStates(
            module=module,
            position_bias=biases[module],
            window=window,
            query=scaled.float(),
            key=key.float(),
            source_query=query.float(),
            mask=mask,
            hidden_states=None if position is None else position.hidden_states.float(),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        )
        # A layer of `rope_layers` is handed rotated states: what its source sees.
        rotation = None if module.keeps_rope else pairs
        target = (layer.source_query, layer.key) if module.keeps_rope else targets.get(module.layer_idx)
        fit = LayerFit(layer, rotation, target, torch.Generator().manual_seed(seed + module.layer_idx))
        report.layers.append(fit.run(steps, learning_rate))
        bar.update()

    as_it_is = _at_rest(model) if own else as_source(model)
    with bar, torch.no_grad(), evaluating(model), as_it_is, _observed(biases, observe):
        model.base_model(ids, use_cache=False)
    if output_steps:
        with evaluating(model), _at_rest(model), _checkpointed(model):
            report.output_divergence = _descend_to_outputs(
                model, source if pairs is None else None, ids, output_steps, learning_rate, progress
            )
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _descend_to_outputs(
    model: Any, source: Any, ids: Tensor, steps: int, learning_rate: float, progress: bool
) -> tuple[float, float]:
    """Adam on the position parameters towards the source's likeliest next tokens; a descent that ends further away is undone.

    Returns:
        The divergence on the first window in nats, before and after.
    """
    parameters = [parameter for bias in model.position_biases() for parameter in bias.parameters()]
    everything = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    bar = tqdm(total=steps, desc="descend", unit="window", file=sys.stderr, disable=None if progress else True)
    optimizer = torch.optim.Adam(parameter_groups(parameters, learning_rate / 2), betas=(0.9, 0.95))
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    autocast = torch.autocast(ids.device.type, torch.bfloat16, enabled=multiplies_bf16())

    def divergence(row: Tensor) -> Tensor:
        with torch.no_grad(), autocast, as_source(model) if source is None else nullcontext():
            logits = (model if source is None else source)(row, use_cache=False).logits
            expected = top_k_logits(logits, min(_TOP_K, logits.shape[-1]))
            del logits
        with autocast:
            return distillation_loss(model(row, use_cache=False).logits, expected, row)

    try:
        for parameter, _ in everything:
            parameter.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.no_grad():
            start = divergence(ids[:1]).item()
        for step in range(steps):
            with torch.enable_grad():
                loss = divergence(ids[step % len(ids)][None])
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            decay.step()
            bar.update()
        with torch.no_grad():
            end = divergence(ids[:1]).item()
            if not end < start:
                end = start
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
    finally:
        bar.close()
        for parameter, flag in everything:
            parameter.grad = None
            parameter.requires_grad_(flag)
    return start, end


def _check_model(model: Any) -> dict[Any, PositionBias]:
    if not hasattr(model, "set_rope_scale"):
        raise ValueError(f"{type(model).__name__} is not a converted model; convert it with apply_drope first.")
    biases = {m: m.position_bias for m in model.modules() if getattr(m, "position_bias", None) is not None}
    if not biases:
        raise ValueError("This model has no position bias to calibrate; convert it with one, such as 'disentangled'.")
    if not any(True for bias in biases.values() for _ in bias.parameters()):
        raise ValueError("This model's bias has no parameters to calibrate; set learned=True or choose another type.")
    return biases


def _check_source(model: Any, source: Any) -> None:
    """Refuse a source whose weights are not the model's."""
    if source is None:
        if not hasattr(model.base_model, "rotary_emb"):
            raise ValueError("This model's source has a learned position table; give the source model as well.")
        return
    base = getattr(source.config, "model_type", None)
    if f"{base}_drope" != model.config.model_type:
        raise ValueError(f"The source is a {base} model, which does not convert to {model.config.model_type}.")
    mine, theirs = model.base_model.state_dict(), source.base_model.state_dict()
    for name, tensor in mine.items():
        if "position_bias" in name or "qk_norm" in name:
            continue
        other = theirs.get(name)
        if other is None or other.shape != tensor.shape:
            raise ValueError(
                f"The source is not this model's: {name} is {_shape(other)} there and {_shape(tensor)} here."
            )
        if not torch.equal(other.to(tensor), tensor):
            raise ValueError(
                f"The source is not this model's: the weights of {name} differ; calibrate before training, against the "
                "model that was converted."
            )


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def _windows(model: Any, texts: Any, tokenizer: Any, length: int | None) -> Tensor:
    """(windows, length) token ids."""
    config = model.config
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048
    if isinstance(texts, Tensor):
        if texts.dim() != 2 or texts.shape[1] < 2 or len(texts) == 0:
            raise ValueError(f"texts has shape {tuple(texts.shape)}; token ids have to be (windows, length).")
        ids = texts.long()
    else:
        if tokenizer is None:
            raise ValueError("texts are strings and there is no tokenizer; pass tokenizer=, or token ids.")
        length = min(context, LONGEST) if length is None else length
        if length < 2:
            raise ValueError(f"length is {length}; it has to be at least 2.")
        parts = [torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]
        rows = [row for part in parts for row in part.split(length) if len(row) == length]
        if not rows:
            longest = max(map(len, parts), default=0)
            raise ValueError(f"No text is as long as one window of {length} tokens; the longest has {longest}.")
        ids = torch.stack(rows).long()
    if ids.shape[1] > context:
        raise ValueError(f"Windows of {ids.shape[1]} tokens are longer than the source's context of {context}.")
    unknown = ids[(ids < 0) | (ids >= config.vocab_size)]
    if len(unknown):
        raise ValueError(f"The text holds token {int(unknown[0])}, but the model knows only {config.vocab_size}.")
    return ids


def _pairs(model: Any, attention: Any) -> RotaryPairs | None:
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return None
    return rotary.pairs or rotary_pairs(rotary.rotary, model.config, type(attention).__mro__[1])


@contextmanager
def _at_rest(model: Any) -> Iterator[None]:
    """Dropped for the length of the block."""
    encodings = [m for m in model.modules() if hasattr(type(m), "_init_scale")]
    before = [(m, m._initial) for m in encodings]
    try:
        for module in encodings:
            module.set_rope_scale(0.0)
        yield
    finally:
        for module, rope_scale in before:
            module.set_rope_scale(rope_scale)


@contextmanager
def _checkpointed(model: Any) -> Iterator[None]:
    """Each layer's inside is computed again in the backward pass: a long window would not fit otherwise."""
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    before = any(layer.gradient_checkpointing for layer in layers)
    with warnings.catch_warnings():
        # Renamed in newer releases; the older ones know this name alone.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        # Of the layer alone, which asks for it; dropout and the like inside stay as they are.
        layer.training = True
    try:
        yield
    finally:
        if not before:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_disable()


@contextmanager
def _observed(modules: Any, observe: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.callback(delattr, module, "observe")
            object.__setattr__(module, "observe", observe)
        yield


@torch.no_grad()
def _source_states(source: Any, ids: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries and keys of every layer of a source with a learned table, by layer."""
    # A copy of its modules around the same tensors.
    twin = copy.deepcopy(source, {id(t): t for t in (*source.parameters(), *source.buffers())})
    twin = apply_drope(twin, "nope", rope_scale=1.0).eval()
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(module: Any, query: Tensor, key: Tensor, *rest: Any) -> None:
        found[module.layer_idx] = (query.float(), key.float())

    attentions = [module for module in twin.modules() if hasattr(type(module), "needs_position")]
    with _observed(attentions, observe):
        twin.base_model(ids, use_cache=False)
    return found


def calibrate_checkpoint(
    model_path: str | Path,
    source_path: str | Path,
    text_files: Sequence[str | Path],
    *,
    tokens: int = TOKENS,
    length: int | None = None,
    steps: int | None = None,
    output_steps: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> CalibrationReport:
    """Calibrate a converted checkpoint folder in place: its position tensors change and nothing else.

    Args:
        model_path: a folder that `convert_checkpoint` wrote.
        source_path: the folder it was converted from.
        text_files: `.txt` or `.jsonl` (field "text"); windows are taken evenly from all of it.
        tokens: in all, rounded down to whole windows.
        length: tokens a window; default the source's context length, at most 8192 and at most half of `tokens`.
        steps, output_steps, seed, progress: as in `calibrate`.

    Raises:
        ValueError: one sentence on why the folders, the text or the arguments cannot be used; nothing was written.
    """
    folder, config = read_source(model_path)
    source_folder, source_config = read_source(source_path)
    if not str(config.get("model_type", "")).endswith("_drope"):
        raise ValueError(f"{folder} is not a converted checkpoint; convert it first: hf-drope convert {folder} DST.")
    if (config.get("drope_parameters") or {}).get("position_bias") is None:
        raise ValueError(
            f"{folder} has no position bias to calibrate; convert its source with one, such as 'disentangled'."
        )
    _check_folders(folder, config, source_folder, source_config)
    import transformers

    import hf_drope  # noqa: F401  (registers the classes)

    tokenizer = load_tokenizer(folder)
    ids = checkpoint_windows(tokenizer, source_config, text_files, tokens, length)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    source = None
    if not hasattr(model.base_model, "rotary_emb"):
        source = transformers.AutoModelForCausalLM.from_pretrained(source_folder, dtype=torch.float32)
    report = calibrate(model, source, ids, steps=steps, output_steps=output_steps, seed=seed, progress=progress)
    changed = {name: tensor for name, tensor in model.state_dict().items() if ".position_bias." in name}
    checkpoint.replace_tensors(folder, changed)
    _write_record(folder, report, text_files)
    return report


def check_calibration(
    source: Path,
    parameters: DroPEParameters,
    text_files: Sequence[str | Path],
    *,
    tokens: int = TOKENS,
    length: int | None = None,
    steps: int | None = None,
    output_steps: int | None = None,
) -> None:
    """Raise what `calibrate_checkpoint` would, before the conversion whose result it is to calibrate."""
    if parameters.position_bias is None:
        raise ValueError("There is no position bias to calibrate; convert with one, such as --preset disentangled.")
    if not text_files:
        raise ValueError("Calibration needs text; give it with --text FILE.")
    _, config = read_source(source)
    for name, count in (("steps", steps), ("output_steps", output_steps)):
        if count is not None and count < 0:
            raise ValueError(f"{name} is {count}; it has to be at least 0.")
    checkpoint_windows(load_tokenizer(source), config, text_files, tokens, length)


def load_tokenizer(folder: Path) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no tokenizer that loads: {str(error).splitlines()[0]}") from error


def checkpoint_windows(
    tokenizer: Any, config: dict[str, Any], text_files: Sequence[str | Path], tokens: int, length: int | None
) -> Tensor:
    """The windows (n, length) that `calibrate_checkpoint` takes from text files; arguments and errors as there."""
    context = config.get("max_position_embeddings") or config.get("n_positions") or 2048
    if tokens < 2:
        raise ValueError(f"tokens is {tokens}; it has to be at least 2.")
    if length is None:
        length = min(context, LONGEST, max(tokens // 2, 2))
    if not 2 <= length <= min(context, tokens):
        raise ValueError(
            f"length is {length}; it has to be from 2 to {min(context, tokens)}, the source's context or all the tokens."
        )
    return text_windows(text_files, tokenizer, length, tokens // length)


def _check_folders(folder: Path, config: dict[str, Any], source: Path, source_config: dict[str, Any]) -> None:
    """Refuse a source that is not the one `folder` was converted from, by what the conversion recorded and by weights."""
    if f"{source_config.get('model_type')}_drope" != config["model_type"]:
        raise ValueError(
            f"{source} is a {source_config.get('model_type')}, which does not convert to {config['model_type']}."
        )
    mine, theirs = checkpoint.read_checkpoint(folder), checkpoint.read_checkpoint(source)
    for name, info in mine.tensors.items():
        other = theirs.tensors.get(name)
        if other is not None and other.shape != info.shape:
            raise ValueError(
                f"{source} is not the source of {folder}: {name} is {list(other.shape)} there and {list(info.shape)} here."
            )
    names = sorted(set(mine.tensors) & set(theirs.tensors))
    recorded = json.loads((folder / RECORD).read_text()) if (folder / RECORD).is_file() else {}
    if "source_fingerprint" in recorded and recorded["source_fingerprint"] != checkpoint.fingerprint(theirs):
        raise ValueError(
            f"{source} is not the source of {folder}: its weights are not those that the conversion recorded."
        )
    if checkpoint.fingerprint(mine, names) != checkpoint.fingerprint(theirs, names):
        raise ValueError(
            f"The weights of {folder} are not those of {source} any more; calibrate before training, or convert anew."
        )


def _write_record(folder: Path, report: CalibrationReport, text_files: Sequence[str | Path]) -> None:
    path = folder / RECORD
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    texts = {Path(file).name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in text_files}
    record["calibration"] = {**report.to_dict(), "text_sha256": texts}
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)

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
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .attention_masks import scale_queries
from .distill import as_source
from .installation import rotary_pairs_of
from .layer_fit import LayerFit, LayerReport, LayerStates, unrotate
from .modeling_drope import apply_drope
from .output_descent import at_rest, descend_to_outputs
from .position_bias import PositionBias
from .position_modules import rotary_places
from .rotary_pairs import RotaryPairs
from .top_k_logits import evaluating

LONGEST = 8192


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
    learning_rate: float = 0.2,
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
        output_steps: of the descent of all layers together that follows, 512 tokens each, towards the source's next-token
            distribution; default 24 for a disentangled bias with p2c and 40 for every other.
        learning_rate: of both descents, in units of each number's size (see `descend`); an eighth of it towards the outputs
            where the start is close to the source, as with p2c.
        states: what the layers are fitted on: "own", the states that the converted earlier layers produce, or "source", those
            of the source. Default "own" for a disentangled bias with p2c, which stays close to its source, and always for a
            source with a learned table and with `qk_norm`; "source" for every other, whose own states are soon too far away.
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
    parameters = model.config.drope_parameters
    # With p2c most of RoPE is there, and a layer can come close to its source.
    close = "p2c" in parameters["position_bias"].get("terms", ())
    steps = (32 if close else 0) if steps is None else steps
    output_steps = (24 if close else 40) if output_steps is None else output_steps
    if output_steps and model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} predicts no next tokens to calibrate on; give output_steps=0, or calibrate the causal "
            "language model."
        )
    has_rope = bool(rotary_places(model))
    pairs = {module: rotary_pairs_of(model, module, type(module).__mro__[1]) for module in biases}
    own = _takes_own_states(states, has_rope, parameters["qk_norm"], close)
    report = CalibrationReport(
        parameters["position_bias"]["type"],
        windows=len(ids),
        length=ids.shape[1],
        steps=steps,
        output_steps=output_steps,
    )
    started = time.monotonic()
    with _restored_on_error(model), _unstretched(biases.values()):
        _fit_layers(model, source, ids, biases, pairs, own, learning_rate, seed, progress, report)
        if output_steps:
            # A start that is close to its source wants smaller steps.
            rate = learning_rate / 8 if close else learning_rate
            teacher, generator = None if has_rope else source, torch.Generator().manual_seed(seed)
            report.output_divergence = descend_to_outputs(model, teacher, ids, output_steps, rate, generator, progress)
    report.seconds = round(time.monotonic() - started, 1)
    model.config.drope_calibrated = True
    return report


def _takes_own_states(states: str | None, has_rope: bool, qk_norm: str | None, close: bool) -> bool:
    if states not in (None, "own", "source"):
        raise ValueError(f"states is {states!r}; it has to be 'own' or 'source'.")
    if states == "source" and not has_rope:
        raise ValueError("states is 'source', but this source has a learned position table; use 'own'.")
    if states == "source" and qk_norm:
        raise ValueError("states is 'source', but the source has none of the norms of qk_norm; use 'own'.")
    return states == "own" or not has_rope or bool(qk_norm) or (states is None and close)


def _fit_layers(
    model: Any,
    source: Any,
    ids: Tensor,
    biases: dict[Any, PositionBias],
    pairs: dict[Any, RotaryPairs | None],
    own: bool,
    learning_rate: float,
    seed: int,
    progress: bool,
    report: CalibrationReport,
) -> None:
    """One forward pass in which each layer is fitted as it is reached."""
    settings = {module: (module.attention_scale, module.window) for module in biases}
    targets: dict[int, tuple[Tensor, Tensor]] = {}
    if not rotary_places(model):
        found = _table_states(source, ids.to(source.device))
        targets = {layer: (query.to(ids.device), key.to(ids.device)) for layer, (query, key) in found.items()}
    elif model.config.drope_parameters["qk_norm"]:
        # Only without the added norms are queries and keys those of the source.
        with torch.no_grad(), evaluating(model), as_source(model):
            targets = _states(model, ids)
    bar = tqdm(total=len(biases), desc="calibrate", unit="layer", file=sys.stderr, disable=None if progress else True)

    def observe(module: Any, query: Tensor, key: Tensor, mask: Any, position: Any, scaling: float | None) -> None:
        attention_scale, window = settings[module]
        rotation = None if module.keeps_rope else pairs[module]
        if not own and rotation is not None:
            # The source has rotated them.
            query, key = (unrotate(part, rotation) for part in (query, key))
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
        target = targets.get(module.layer_idx)
        # A layer of `rope_layers` is handed what its source sees, and so is one that never rotates.
        if target is None and rotation is None:
            target = (layer.source_query, layer.key)
        fit = LayerFit(layer, rotation, target, torch.Generator().manual_seed(seed + module.layer_idx))
        layer_report = fit.run(report.steps, learning_rate)
        if not math.isfinite(layer_report.start + layer_report.end):
            raise ValueError(
                f"The attention of layer {module.layer_idx} is not finite on this text; look at the source's weights."
            )
        report.layers.append(layer_report)
        bar.update()

    as_it_is = at_rest(model) if own else as_source(model)
    with bar, torch.no_grad(), evaluating(model), as_it_is, _observed(biases, observe):
        model.base_model(ids, use_cache=False)


def _check_model(model: Any) -> dict[Any, PositionBias]:
    if not hasattr(model, "set_rope_scale"):
        raise ValueError(f"{type(model).__name__} is not a converted model; convert it with apply_drope first.")
    if hasattr(model, "peft_config"):
        raise ValueError("This model has adapters; calibrate it before they are added.")
    biases = {m: m.position_bias for m in model.modules() if getattr(m, "position_bias", None) is not None}
    if not biases:
        raise ValueError("This model has no position bias to calibrate; convert it with one, such as 'disentangled'.")
    if not any(True for bias in biases.values() for _ in bias.parameters()):
        raise ValueError("This model's bias has no parameters to calibrate; set learned=True or choose another type.")
    return biases


def _check_source(model: Any, source: Any) -> None:
    """Refuse a source whose weights are not the model's."""
    if source is None:
        if not rotary_places(model):
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
    heads = [m.get_output_embeddings() for m in (model, source)]
    if None not in heads and not torch.equal(heads[1].weight.to(heads[0].weight), heads[0].weight):
        raise ValueError("The source is not this model's: the weights of its output head differ.")


def context_length(config: dict[str, Any]) -> int:
    """Tokens within which the source's position encoding is one and the same, by its config."""
    context = config.get("max_position_embeddings") or config.get("n_positions") or 2048
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if {"longrope", "su"} & {rope.get("rope_type"), rope.get("type")}:
        # Beyond this it rotates by other frequencies.
        shorter = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        return min(context, shorter or context)
    return context


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def _windows(model: Any, texts: Any, tokenizer: Any, length: int | None) -> Tensor:
    """(windows, length) token ids."""
    config = model.config
    context = context_length(config.to_dict())
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
        raise ValueError(f"Windows of {ids.shape[1]} tokens are longer than {context}, the source's context.")
    unknown = ids[(ids < 0) | (ids >= config.vocab_size)]
    if len(unknown):
        raise ValueError(f"The text holds token {int(unknown[0])}, but the model knows only {config.vocab_size}.")
    return ids


@contextmanager
def _observed(modules: Any, observe: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.callback(delattr, module, "observe")
            object.__setattr__(module, "observe", observe)
        yield


@contextmanager
def _restored_on_error(model: Any) -> Iterator[None]:
    """All position parameters as they were, where the block fails."""
    before = [(tensor, tensor.detach().clone()) for bias in model.position_biases() for tensor in _tensors(bias)]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        raise


def _tensors(module: Any) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@contextmanager
def _unstretched(biases: Any) -> Iterator[None]:
    """Disentangled biases without their `position_scaling`, which is not to be learned away again."""
    stretched = [b.bias for b in biases if getattr(b.bias, "position_scaling", None) is not None]
    before = [(bias, bias.position_scaling, bias.frequencies.clone()) for bias in stretched]
    try:
        for bias in stretched:
            bias.position_scaling = None
            bias.frequencies.copy_(torch.tensor(bias.source.frequencies))
        yield
    finally:
        for bias, scaling, frequencies in before:
            bias.position_scaling = scaling
            bias.frequencies.copy_(frequencies)


def _table_states(source: Any, ids: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries and keys of every layer of a source with a learned table, by layer."""
    # A copy of its modules around the same tensors.
    twin = copy.deepcopy(source, {id(t): t for t in (*source.parameters(), *source.buffers())})
    return _states(apply_drope(twin, "nope", rope_scale=1.0).eval(), ids)


@torch.no_grad()
def _states(model: Any, ids: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries and keys of every layer as attention gets them, rotated or not."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(module: Any, query: Tensor, key: Tensor, *rest: Any) -> None:
        found[module.layer_idx] = (query.float(), key.float())

    attentions = [module for module in model.modules() if hasattr(type(module), "needs_position")]
    with _observed(attentions, observe):
        model.base_model(ids, use_cache=False)
    return found

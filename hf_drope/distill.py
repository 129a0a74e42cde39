"""Distillation: the converted model learns from what its source predicts for the same text, beside the text itself.

`Distillation` says how, `DistillationMixin` does it in any Trainer of a causal language model. The source is a second
model, a folder of its predictions (`TopKLogits`), or the model in training itself (`as_source`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .stock_attention import is_attention
from .top_k_logits import (
    CHUNK,
    LOWEST,
    TopK,
    TopKLogits,
    evaluating,
    logsumexp_of_others,
    top_k_logits,
    vocabulary_size,
)

_IGNORED = -100
_ADDED = ("position_bias", "attention_scale", "window")
_NOT_FOR_TEACHER = ("labels", "shift_labels", "num_items_in_batch")


@dataclass(frozen=True)
class Distillation:
    """loss = (1 - weight) · ordinary loss + weight · T² · KL(teacher ‖ student) + hidden_weight · E.

    Args:
        teacher: "self" for the model in training with its adapters off and its source's position encoding on, without a
            second copy; a model, which is frozen; or a `TopKLogits`.
        temperature: T, divides the logits of both.
        weight: 0.0 (ordinary loss) to 1.0 (teacher alone).
        top_k: compare the teacher's k likeliest tokens and the sum of all others, which at T = 1 bounds the full
            divergence from below; T divides the logarithms of the k probabilities and of that sum. Default: the whole
            vocabulary, or what the `TopKLogits` has.
        hidden_weight: weight of E, the mean over layers and tokens of the squared error of the attention modules' outputs,
            each token's divided by the square of the teacher's; not with a `TopKLogits`.

    Raises:
        ValueError: one sentence with the value and what is allowed.
    """

    teacher: Any = "self"
    temperature: float = 1.0
    weight: float = 0.5
    top_k: int | None = None
    hidden_weight: float = 0.0

    def __post_init__(self) -> None:
        stored = isinstance(self.teacher, TopKLogits)
        if not isinstance(self.teacher, nn.Module | TopKLogits) and self.teacher != "self":
            shown = repr(self.teacher) if isinstance(self.teacher, str) else f"of type {type(self.teacher).__name__}"
            raise ValueError(f"teacher is {shown}; it has to be 'self', a Transformers model or a TopKLogits.")
        limits: tuple[tuple[str, float, float, Any, str], ...] = (
            ("temperature", math.ulp(0.0), sys.float_info.max, int | float, "a number above 0"),
            ("weight", 0.0, 1.0, int | float, "a number from 0.0 to 1.0"),
            ("hidden_weight", 0.0, sys.float_info.max, int | float, "a number of at least 0"),
            ("top_k", 1, math.inf, int, "a whole number of at least 1, or None"),
        )
        for name, least, most, kind, allowed in limits:
            value = getattr(self, name)
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if (name != "top_k" or value is not None) and not (is_number and least <= value <= most):
                raise ValueError(f"{name} is {value!r}; it has to be {allowed}.")
        if stored and self.top_k not in (None, self.teacher.top_k):
            raise ValueError(f"top_k is {self.top_k}; it has to be None or {self.teacher.top_k}, as in the TopKLogits.")
        if stored and self.hidden_weight:
            raise ValueError(f"hidden_weight is {self.hidden_weight!r}; it has to be 0 with a TopKLogits as teacher.")


@contextmanager
def as_source(model: Any) -> Iterator[None]:
    """Within the block a converted model, bare or wrapped, computes what its source did; after it all is as before.

    The position encoding has its full strength; biases, norms, scales and windows from the conversion are off, and
    so are the adapters of a `PeftModel`. `config.drope_parameters` stays as it is.

    Raises:
        ValueError: not a converted model, its position table was removed, or its adapters cannot be turned off.
    """
    modules = list(model.modules())
    # By name and attribute: a model loaded with `trust_remote_code` comes from another copy of the code.
    encodings = [module for module in modules if hasattr(type(module), "_init_scale")]
    attentions = [module for module in modules if hasattr(type(module), "needs_position")]
    if not encodings or not attentions:
        raise ValueError(f"{type(model).__name__} is not a converted model; convert it with apply_drope first.")
    if any(type(module).__name__ == "RemovedPositionEmbedding" for module in encodings):
        raise ValueError("This model's position table was removed; give a copy of the source as the teacher.")
    if any(getattr(module, "merged", False) is True for module in modules):
        raise ValueError("This model's adapters are merged into its weights; unmerge them first.")
    # Not by set_rope_scale, which writes into a buffer that a backward pass may still need.
    changes: list[tuple[nn.Module, str, Any]] = [(module, "state", "stock") for module in encodings]
    changes += [(module, "deferred", False) for module in encodings if hasattr(module, "deferred")]
    changes += [(m, name, None) for m in attentions for name in _ADDED if getattr(m, name) is not None]
    changes += [(module, "adds_qk_norm", False) for module in attentions if module.adds_qk_norm]
    with ExitStack() as stack:
        # PEFT trains whatever it turns on again, frozen before or not.
        for parameter in model.parameters():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
        for module in modules:
            if hasattr(type(module), "disable_adapter"):
                stack.enter_context(module.disable_adapter())
        if any(getattr(module, "disable_adapters", True) is False for module in modules):
            raise ValueError(f"{type(model).__name__} has adapters inside; give the PeftModel around it.")
        for module, name, value in changes:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def distillation_loss(
    student_logits: Tensor,
    teacher: Tensor | TopK,
    labels: Tensor,
    temperature: float = 1.0,
    num_items_in_batch: Tensor | int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """KL(teacher ‖ student) in nats a token, averaged over tokens whose next label is not -100, without the factor T².

    Args:
        student_logits: (batch, length, vocabulary).
        teacher: logits or log-probabilities of that shape, or a `TopK` with (batch, length) in front.
        labels: (batch, length), shifted here.
        temperature: divides the logits of both.
        num_items_in_batch: tokens to divide by, of all batches that are accumulated; default those of this batch.
        chunk: tokens computed at once, in the forward pass and again in the backward pass.

    Raises:
        ValueError: teacher and student differ in vocabulary.
    """
    targets = _shifted(labels)
    total = _divergence(student_logits, teacher, targets, temperature, chunk)
    return total / (_count(targets) if num_items_in_batch is None else num_items_in_batch)


def _shifted(labels: Tensor) -> Tensor:
    return nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


def _count(targets: Tensor) -> Tensor:
    return (targets != _IGNORED).sum().clamp(min=1)


def _divergence(student: Tensor, teacher: Tensor | TopK, targets: Tensor, temperature: float, chunk: int) -> Tensor:
    """The sum of KL(teacher ‖ student) over all tokens with a target."""

    def part(counts: Tensor, logits: Tensor, expected: Tensor, *top: Tensor) -> Tensor:
        logits, expected = logits.float(), expected.float()
        if top:
            logits = torch.cat([logits.gather(-1, top[0]), logsumexp_of_others(logits, top[0])[:, None]], dim=-1)
            expected = torch.cat([expected, top[1][:, None]], dim=-1)
        ours, theirs = ((x / temperature).log_softmax(-1).clamp(min=LOWEST) for x in (logits, expected))
        return torch.where(counts, (theirs.exp() * (theirs - ours)).sum(-1), 0.0).sum()

    given = (teacher,) if isinstance(teacher, Tensor) else tuple(teacher)
    if len(given) == 1:
        _check_vocabulary_size(student.shape[-1], given[0].shape[-1])
    rows = [x.to(student.device).flatten(0, targets.dim() - 1) for x in (targets != _IGNORED, student, *given)]
    # By split and not by slices, each of which would have a gradient of the size of the whole.
    sums = [
        checkpoint(part, *pieces, use_reentrant=False, preserve_rng_state=False)
        for pieces in zip(*(row.split(chunk) for row in rows), strict=True)
    ]
    return torch.stack(sums).sum()


def _check_vocabulary_size(student: int, teacher: int) -> None:
    if student != teacher:
        raise ValueError(
            f"The student's vocabulary is {student} and the teacher's {teacher}; they have to be the same."
        )


@contextmanager
def _attention_outputs(model: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """A list that fills with each attention module's output, (batch, length, hidden size), when the model runs."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as stack:
        for module in model.modules() if wanted else ():
            if is_attention(module):
                stack.callback(module.register_forward_hook(keep).remove)
        yield outputs


def _hidden_error(student: list[Tensor], teacher: list[Tensor], targets: Tensor) -> Tensor:
    """The sum over all tokens with a target of their squared error, relative to the square of the teacher's."""
    errors = []
    for ours, theirs in zip(student, teacher, strict=True):
        counts, theirs = (targets != _IGNORED).to(ours.device), theirs.to(ours.device).float()
        size = theirs.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        relative = (ours.float() - theirs).square().sum(-1) / size
        errors.append(torch.where(counts, relative, 0.0).sum().to(targets.device))
    return torch.stack(errors).mean()


class DistillationMixin:
    """Adds distillation to a Trainer, for example `class MyTrainer(DistillationMixin, SFTTrainer)`.

    `loss` in the log is the whole loss, `distill/kl` the mean divergence a token since the last log, without T².
    Evaluation has the ordinary loss.

    Args:
        distill: default none.

    Raises:
        ValueError: at construction, where teacher and student do not fit, or "self" would train its own teacher.
    """

    def __init__(self, *args: Any, distill: Distillation | None = None, **kwargs: Any) -> None:
        self.distill = distill
        # Divergence and number of tokens since the last log.
        self._tally: Tensor | None = None
        super().__init__(*args, **kwargs)
        if distill is not None:
            trainer: Any = self
            if trainer.args.n_gpu > 1:
                raise ValueError("Distillation cannot run on several GPUs from one process; start it with torchrun.")
            check_teacher(trainer.model, distill)
            if isinstance(distill.teacher, nn.Module):
                distill.teacher.requires_grad_(False).eval()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        ordinary: Any = super().compute_loss  # type: ignore[misc]
        if self.distill is None or not model.training:
            kwargs |= {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
            return ordinary(model, inputs, **kwargs)
        trainer, distill = self, self.distill  # type: Any, Distillation
        # Before the Trainer takes them out for label smoothing.
        targets = inputs["shift_labels"] if "shift_labels" in inputs else _shifted(inputs["labels"])
        # The teacher first, so that `as_source` changes nothing under a live graph.
        expected, theirs = self._teach(model, inputs)
        with _attention_outputs(model, distill.hidden_weight > 0) as ours:
            kwargs |= {"return_outputs": True, "num_items_in_batch": num_items_in_batch}
            loss, outputs = ordinary(model, inputs, **kwargs)
            if not outputs["logits"].requires_grad:
                # TRL computes its loss without them and logits once more without a gradient.
                ours.clear()
                given = {name: value for name, value in inputs.items() if name not in _NOT_FOR_TEACHER}
                outputs = model(**given)
        total = _divergence(outputs["logits"], expected, targets, distill.temperature, CHUNK)
        count = _count(targets).to(total)
        tally = torch.stack([total.detach(), count])
        self._tally = tally if self._tally is None else self._tally + tally
        added = distill.weight * distill.temperature**2 * total
        if distill.hidden_weight:
            added = added + distill.hidden_weight * _hidden_error(ours, theirs, targets).to(added.device)
        # As the Trainer does with the ordinary loss.
        accumulates = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        if num_items_in_batch is None or not accumulates or getattr(trainer, "loss_is_scaled_for_ga", None) is False:
            added = added / count
        else:
            added = added / torch.as_tensor(num_items_in_batch).to(added.device)
            if trainer.args.average_tokens_across_devices:
                added = added * (trainer.accelerator.num_processes // trainer.get_tp_size())
        loss = (1.0 - distill.weight) * loss + added.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    def _teach(self, model: Any, inputs: Any) -> tuple[Tensor | TopK, list[Tensor]]:
        """What the teacher predicts for the batch, and the outputs of its attention modules where they are wanted."""
        distill, trainer = self.distill, self  # type: Any, Any
        if isinstance(distill.teacher, TopKLogits):
            return distill.teacher.lookup(inputs["input_ids"]), []
        own = isinstance(distill.teacher, str)
        teacher, device = model if own else distill.teacher, inputs["input_ids"].device
        if not own and next(teacher.parameters()).device != device:
            teacher.to(device)
        inputs = {name: value for name, value in inputs.items() if name not in _NOT_FOR_TEACHER}
        with evaluating(teacher), as_source(teacher) if own else nullcontext(), trainer.accelerator.autocast():
            with _attention_outputs(teacher, distill.hidden_weight > 0) as outputs:
                logits = teacher(**inputs, use_cache=False)["logits"]
            return logits if distill.top_k is None else top_k_logits(logits, distill.top_k), outputs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        trainer: Any = self
        if "loss" in logs and self._tally is not None:
            total, count = trainer.accelerator.reduce(self._tally, reduction="sum").tolist()
            logs["distill/kl"], self._tally = total / count, None
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def check_teacher(student: Any, distill: Distillation) -> None:
    """Raise ValueError where teacher and student do not fit, or "self" would train its own teacher."""
    teacher = student if isinstance(distill.teacher, str) else distill.teacher
    vocabulary = vocabulary_size(student)
    _check_vocabulary_size(vocabulary, vocabulary_size(teacher))
    if distill.top_k is not None and distill.top_k > vocabulary:
        raise ValueError(f"top_k is {distill.top_k}; it has to be at most {vocabulary}, the vocabulary.")
    if teacher is distill.teacher and isinstance(teacher, nn.Module):
        if {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}:
            raise ValueError("The teacher has weights in common with the student; load or copy the source for it.")
        pair: tuple[Any, Any] = (student, teacher)
        layers, others = ([m.config.hidden_size] * sum(map(is_attention, m.modules())) for m in pair)
        if distill.hidden_weight and layers != others:
            raise ValueError("hidden_weight needs a teacher with as many layers as the student, and of the same size.")
    if teacher is student:
        trained = {id(parameter) for parameter in student.parameters() if parameter.requires_grad}
        with as_source(student):
            # Biases are out of the model here, and PEFT freezes adapters that it turns off.
            moving = [name for name, p in student.named_parameters() if p.requires_grad and id(p) in trained]
        if moving:
            raise ValueError(
                f"teacher is 'self', but training moves its weights, such as {moving[0]}; "
                "give the source model as the teacher, or train with LoRA."
            )

"""An auxiliary loss for the early stages: a linear head tells each token's position from the last hidden state.

It asks a model that loses RoPE to keep track of order by itself. The head belongs to the trainer, not to the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer_utils import get_last_checkpoint

from .schedule import STAGES, DroPESchedule

HEAD_FILE = "position_prediction.safetensors"
_EXACT = 16


def bucket_boundaries(max_positions: int) -> list[int]:
    """The first position of each bucket but the first: all up to 16, then the powers of two below `max_positions`."""
    boundaries = list(range(1, min(_EXACT, max_positions)))
    power = _EXACT
    while power < max_positions:
        boundaries.append(power)
        power *= 2
    return boundaries


def position_buckets(positions: torch.Tensor, max_positions: int) -> torch.Tensor:
    """The bucket of each position: 0 to 15 have their own, then each octave shares one (16-31, 32-63, ...).

    Args:
        positions: whole numbers of at least 0, any shape; those past `max_positions` fall into the last bucket.
        max_positions: positions that the model knows.

    Returns:
        Bucket indices (int64) of the same shape, below `len(bucket_boundaries(max_positions)) + 1`.
    """
    boundaries = torch.tensor(bucket_boundaries(max_positions), dtype=positions.dtype, device=positions.device)
    return torch.bucketize(positions, boundaries, right=True)


class PositionPredictionMixin:
    """Adds `position_prediction` times the cross-entropy of the predicted position to a Trainer's training loss.

    A position is a token's index in its row, counted over the 2D attention mask, so padding has none on either side; a
    packed row is counted through. The loss is the mean over all tokens of an optimizer step, however it is split into
    batches and processes, in nats; it is logged, without the weight and for this process, as `drope/position_loss`,
    while `loss` includes it. Evaluation is not changed.

    The head starts at zero, is trained with `learning_rate` without weight decay, and is not clipped. It is in no saved
    model; a checkpoint from which training can be resumed has it in `position_prediction.safetensors`.

    Mix it into any Trainer, ahead of it: `class MyTrainer(PositionPredictionMixin, Trainer)`.

    Args:
        position_prediction: weight of the loss; 0.0, the default, is off.
        position_prediction_stages: stages of `DroPECallback`'s schedule in which it is on; without the callback it
            always is.

    Raises:
        ValueError: one sentence on a wrong weight or stage, a model without `hidden_size` or `max_position_embeddings`,
            or a setting that the head cannot follow (FSDP, DeepSpeed, DataParallel, torch_compile); from `train`, on a
            checkpoint of a run with another choice.
    """

    def __init__(
        self,
        *args: Any,
        position_prediction: float = 0.0,
        position_prediction_stages: Sequence[str] = ("warmup", "transition"),
        **kwargs: Any,
    ) -> None:
        if not 0.0 <= position_prediction < math.inf:
            raise ValueError(f"position_prediction is {position_prediction}; it has to be a number of at least 0.")
        if isinstance(position_prediction_stages, str) or not set(position_prediction_stages) <= set(STAGES):
            raise ValueError(
                f"position_prediction_stages is {position_prediction_stages!r}; it has to be a list of some of "
                f"{', '.join(STAGES)}."
            )
        self.position_prediction = position_prediction
        self.position_prediction_stages = tuple(position_prediction_stages)
        self.position_head: nn.Linear | None = None
        self._tokens: torch.Tensor | None = None
        self._logged_loss: torch.Tensor | float = 0.0
        self._logged_steps: set[int] = set()
        super().__init__(*args, **kwargs)
        if position_prediction > 0:
            self._make_head()

    def _make_head(self) -> None:
        trainer: Any = self
        args = trainer.args
        # torch.compile ignores a hook that comes and goes; the others would need the head inside the model.
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or args.n_gpu > 1 or args.torch_compile:
            raise ValueError("position_prediction does not work with FSDP, DeepSpeed, DataParallel or torch_compile.")
        config = trainer.model.config.get_text_config()
        hidden_size: Any = getattr(config, "hidden_size", None)
        self._max_positions: Any = getattr(config, "max_position_embeddings", None)
        if hidden_size is None or self._max_positions is None:
            raise ValueError(
                f"position_prediction needs hidden_size and max_position_embeddings; {type(config).__name__} lacks one."
            )
        buckets = len(bucket_boundaries(self._max_positions)) + 1
        # Not initialised at random: that would move the random numbers of the run.
        head: nn.Linear = nn.utils.skip_init(nn.Linear, hidden_size, buckets)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        self.position_head = head.to(args.device)

    def _is_active(self) -> bool:
        if self.position_head is None:
            return False
        callbacks: list[Any] = self.callback_handler.callbacks  # type: ignore[attr-defined]
        # DroPECallback, which cannot be imported here.
        staged = [callback for callback in callbacks if isinstance(getattr(callback, "schedule", None), DroPESchedule)]
        return not staged or staged[0].state is None or staged[0].state.stage in self.position_prediction_stages

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self.position_head is not None:
            parameters = list(self.position_head.parameters())
            if not any(p is parameters[0] for group in optimizer.param_groups for p in group["params"]):
                rate = self.args.learning_rate  # type: ignore[attr-defined]
                optimizer.add_param_group({"params": parameters, "lr": rate, "weight_decay": 0.0})
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, *rest = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if self.position_head is not None and samples:
            trainer: Any = self
            count = torch.as_tensor(sum(map(_token_count, samples)), device=trainer.args.device)
            self._tokens = trainer.accelerator.gather(count).sum()
            # A new optimizer step; the Trainer clears only the model's gradients.
            self.position_head.zero_grad()
        return (samples, *rest)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        trainer: Any = self
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self.position_head is not None and trainer.args.world_size > 1 and trainer.accelerator.sync_gradients:
            # DDP averages only the model's gradients.
            for parameter in self.position_head.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(trainer.accelerator.reduce(parameter.grad, "mean"))
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        compute = super().compute_loss  # type: ignore[misc]
        kwargs |= {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        if not (model.training and torch.is_grad_enabled() and self._is_active()):
            return compute(model, inputs, **kwargs)
        mask = inputs.get("attention_mask")
        with _last_hidden_state(self.model) as seen:  # type: ignore[attr-defined]
            result = compute(model, inputs, **kwargs)
        loss = result[0] if return_outputs else result
        extra = self._position_loss(seen[-1], mask, num_items_in_batch).to(loss.device)
        loss = loss + self.position_prediction * extra
        return (loss, *result[1:]) if return_outputs else loss

    def _position_loss(self, hidden: torch.Tensor, mask: torch.Tensor | None, num_items_in_batch: Any) -> torch.Tensor:
        """The share of this batch in the mean over the optimizer step, as the Trainer wants the model's own loss."""
        trainer: Any = self
        head: Any = self.position_head
        hidden = hidden.to(head.weight)
        if mask is None or mask.dim() != 2:
            mask = torch.ones(hidden.shape[:2], dtype=torch.long)
        real = mask.to(hidden.device) != 0
        buckets = position_buckets((real.cumsum(-1) - 1).clamp(min=0), self._max_positions)
        total = cross_entropy(head(hidden).float()[real], buckets[real], reduction="sum")
        tokens = real.sum() if self._tokens is None else self._tokens
        # DDP averages over the processes.
        share = total * (trainer.args.world_size / tokens.to(total))
        self._logged_loss = self._logged_loss + share.detach()
        self._logged_steps.add(trainer.state.global_step)
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = scaled or trainer.compute_loss_func is not None
        # Otherwise the Trainer takes it for a batch's mean and divides.
        return share if scaled else share * trainer.current_gradient_accumulation_steps

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._logged_steps:
            logs["drope/position_loss"] = float(self._logged_loss) / len(self._logged_steps)
            self._logged_loss, self._logged_steps = 0.0, set()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        args = self.args  # type: ignore[attr-defined]
        # The Trainer's own call is for a checkpoint; a model that the user saves goes without.
        if self.position_head is not None and _internal_call and args.should_save and not args.save_only_model:
            save_file(self.position_head.state_dict(), Path(output_dir or args.output_dir) / HEAD_FILE)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        checkpoint: Any = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(trainer.args.output_dir)
        if checkpoint:
            self._load_head(Path(checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _load_head(self, checkpoint: Path) -> None:
        file = checkpoint / HEAD_FILE
        if self.position_head is None:
            if file.is_file():
                raise ValueError(f"{checkpoint} was trained with position_prediction; resume it with the same weight.")
        elif file.is_file():
            self.position_head.load_state_dict(load_file(file))
        elif (checkpoint / OPTIMIZER_NAME).is_file():
            raise ValueError(f"{checkpoint} was trained without position_prediction; resume it without.")


def _token_count(batch: Any) -> Any:
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return (mask != 0).sum()
    ids = batch.get("input_ids")
    return ids.numel() if ids is not None else batch["inputs_embeds"].shape[:2].numel()


@contextmanager
def _last_hidden_state(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects what the transformer below the model's head returns, where gradients flow: not from a teacher's pass."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    seen: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            seen[:] = [output[0] if isinstance(output, tuple) else output.last_hidden_state]

    handle = model.base_model.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()

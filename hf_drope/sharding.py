"""Training with sharded weights: FSDP2 units in which position parameters stay fp32, and a model put together again.

FSDP2 wants one dtype a unit, and its mixed precision rounds what a unit holds. What conversion added is fp32 in a layer of any
dtype and is read from inside the attention layer, so it gets units of its own, gathered whenever that layer runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def shard_position_parameters(model: Any, **fully_shard_kwargs: Any) -> Any:
    """Give the position parameters (and added QK-norms) of each attention layer an fp32 FSDP2 unit of their own.

    Call it before `fully_shard` wraps the layers, on every process. `DroPETrainer` does so itself.

    Args:
        model: a converted model, with or without adapters; one that is sharded already is left as it is.
        fully_shard_kwargs: for `torch.distributed.fsdp.fully_shard`, such as `mesh` and `offload_policy`.

    Returns:
        The same model.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if isinstance(model, FSDPModule):
        return model
    for attention in list(model.modules()):
        if hasattr(type(attention), "needs_position"):
            added = (attention.position_bias, attention.qk_norm if attention.adds_qk_norm else None)
            units = [part for part in added if part is not None and next(part.parameters(), None) is not None]
            for unit in units:
                if not isinstance(unit, FSDPModule):
                    # They are small and read in pieces: gathered once a forward pass, and let go by the backward pass.
                    fully_shard(unit, reshard_after_forward=False, **fully_shard_kwargs)
            if units:
                attention.register_forward_pre_hook(_Gather(units))
    return model


def keep_class_name(model: Any) -> None:
    """Give the class that FSDP2 makes of a model's the name and home of the model's own, which checkpoints are saved by."""
    from torch.distributed.fsdp import FSDPModule

    sharded = type(model)
    if not issubclass(sharded, FSDPModule):
        return
    own = next(base for base in sharded.__mro__[1:] if base is not FSDPModule)
    sharded.__name__, sharded.__qualname__, sharded.__module__ = own.__name__, own.__qualname__, own.__module__


class _Gather:
    def __init__(self, units: list[Any]) -> None:
        self.units = units

    def __call__(self, module: nn.Module, args: Any) -> None:
        for unit in self.units:
            unit.unshard()


def whole_weights(trainer: Any) -> dict[str, Tensor] | None:
    """The weights that a Trainer's processes hold in pieces, put together on the first process; None where each has all.

    Every process has to call it.
    """
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        return None
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_deepspeed_enabled:
        # Or Transformers would share out the next model it loads as well, for which it needs every process.
        unset_hf_deepspeed_config()
    return weights


def load_whole(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load what `whole_weights` returned into a model with the same names.

    Raises:
        ValueError: a trained parameter is not among the weights.
    """
    found = model.load_state_dict(weights, strict=False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    lost = sorted(trained.intersection(found.missing_keys)) + found.unexpected_keys
    if lost:
        raise ValueError(f"The trained weights lack {lost[0]} or have it under another name; the checkpoints have it.")

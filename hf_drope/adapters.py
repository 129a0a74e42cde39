"""LoRA on a converted model: the `LoraConfig` that adapts its attention and trains and saves what conversion added.

PEFT takes modules into `modules_to_save`, never bare parameters, and leaves out without a word what is not named there.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from .training import unwrap

# The end of a model class's name -> PEFT's name of its task.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def lora_config(model: Any, rank: int = 16, **lora_kwargs: Any) -> Any:
    """A PEFT `LoraConfig` for a converted model of any architecture.

    Adapters sit on the projections inside the attention layers, found on the model itself; the `position_bias` modules and,
    where conversion added them, the `qk_norm` modules are trained in full and saved beside the adapters.

    Args:
        model: a converted model, of which nothing is changed.
        rank: of the adapters, at least 1; PEFT calls it `r`.
        lora_kwargs: any argument of `LoraConfig`, `lora_alpha` (default twice the rank), `lora_dropout`, `use_dora` and the
            like. `target_modules` replaces the projections; `modules_to_save` comes on top of ours.

    Returns:
        A `LoraConfig` for `get_peft_model` or TRL's `peft_config`. After `merge_and_unload` the model is an ordinary converted
        one: it saves, loads, exports and verifies like any other.

    Raises:
        ValueError: the model is not converted, the rank is below 1, or no attention layer has a projection that LoRA takes.
    """
    from peft import LoraConfig

    converted = unwrap(model)
    if rank < 1 or "r" in lora_kwargs:
        raise ValueError(f"rank is {rank if rank < 1 else lora_kwargs['r']}; give it as rank, of at least 1.")
    added = {"position_bias"} if next(converted.position_biases(), None) is not None else set()
    added |= {"qk_norm"} if any(getattr(module, "adds_qk_norm", False) for module in converted.modules()) else set()
    projections = attention_projections(converted)
    if not projections and "target_modules" not in lora_kwargs:
        raise ValueError(
            f"No attention layer of {type(converted).__name__} has an nn.Linear or Conv1D that LoRA could adapt; "
            "name what to adapt in target_modules."
        )
    settings = {
        "lora_alpha": 2 * rank,
        # Whole names: GPT-2 calls a projection of its MLP as it calls one of its attention.
        "target_modules": sorted(projections),
        "fan_in_fan_out": any(isinstance(projection, Conv1D) for projection in projections.values()),
        "task_type": next((task for end, task in _TASKS.items() if type(converted).__name__.endswith(end)), None),
        **lora_kwargs,
    }
    settings["modules_to_save"] = sorted(added.union(lora_kwargs.get("modules_to_save") or ())) or None
    return LoraConfig(r=rank, **settings)


def attention_projections(model: Any) -> dict[str, nn.Module]:
    """The linear layers inside the attention layers of a converted model by name, without those that conversion added."""
    found: dict[str, nn.Module] = {}
    for name, attention in unwrap(model).named_modules():
        if hasattr(type(attention), "needs_position"):
            added = {id(part) for part in (attention.position_bias, _added_norm(attention)) if part is not None}
            found |= {
                f"{name}.{inner}": module
                for child_name, child in attention.named_children()
                if id(child) not in added
                for inner, module in child.named_modules(prefix=child_name)
                if isinstance(module, nn.Linear | Conv1D)
            }
    return found


def _added_norm(attention: Any) -> nn.Module | None:
    return attention.qk_norm if attention.adds_qk_norm else None

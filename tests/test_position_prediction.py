"""The auxiliary loss that predicts positions: its buckets, its head's life, and what it leaves alone."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import TRAINING, random_ids, tiny_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedConfig, Trainer, TrainingArguments

from hf_drope import DroPECallback, DroPESchedule, apply_drope
from hf_drope.adapters import lora_config
from hf_drope.position_prediction import HEAD_FILE, PositionPredictionMixin, bucket_boundaries, position_buckets
from hf_drope.training import PositionGroupsMixin

SCHEDULE = DroPESchedule(warmup=2, transition=2)
ROWS = [{"input_ids": row, "labels": row} for row in random_ids(24, 12)]


class PositionTrainer(PositionPredictionMixin, Trainer):
    pass


def model(preset: str = "drope", family: str = "llama") -> Any:
    return apply_drope(tiny_model(family, scale=2.0), preset, rope_scale=1.0)


def make(
    folder: Path, weight: float = 0.5, trained: Any = None, trainer: Any = PositionTrainer, **overrides: Any
) -> Any:
    settings = {**TRAINING, "max_steps": 6, "learning_rate": 1e-2, "save_strategy": "no"}
    named = ("position_prediction_stages", "callbacks", "train_dataset", "data_collator", "eval_dataset")
    keywords = {name: overrides.pop(name) for name in named if name in overrides}
    if weight:
        keywords["position_prediction"] = weight
    return trainer(
        model=trained or model(),
        args=TrainingArguments(output_dir=str(folder), **{**settings, **overrides}),
        **{"train_dataset": ROWS, "callbacks": [DroPECallback(SCHEDULE)], **keywords},
    )


def logged(run: Any, name: str = "drope/position_loss") -> list[float | None]:
    return [entry.get(name) for entry in run.state.log_history if "loss" in entry]


def head_weights(run: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.position_head.parameters()])


def test_buckets_follow_the_table():
    positions = [0, 1, 2, 15, 16, 17, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 4096, 10**6]
    expected = [0, 1, 2, 15, 16, 16, 16, 17, 17, 18, 18, 19, 19, 20, 20, 20, 20, 20]
    assert position_buckets(torch.tensor(positions), 512).tolist() == expected
    # 300 positions: the last octave is cut; 8 positions: all of them exact.
    assert bucket_boundaries(300) == [*range(1, 16), 16, 32, 64, 128, 256]
    assert position_buckets(torch.tensor([[6, 7], [8, 99]]), 8).tolist() == [[6, 7], [7, 7]]
    for longest in (1, 2, 15, 16, 17, 32, 33, 131072):
        buckets = position_buckets(torch.arange(longest), longest)
        assert buckets.unique().tolist() == list(range(len(bucket_boundaries(longest)) + 1))


def test_the_head_learns_on_a_model_with_rope(tmp_path):
    run = make(tmp_path, 5.0, trained=tiny_model("llama", scale=2.0), callbacks=[], max_steps=80)
    run.train()
    losses = logged(run)
    # 64 positions are 18 buckets, and a head of zeros knows nothing.
    assert losses[0] == pytest.approx(math.log(18), rel=1e-5)
    # All that its bias could learn of rows of 12 is log(12), 2.5.
    assert losses[-1] < 1.5


def test_the_loss_is_the_weighted_cross_entropy_of_the_last_hidden_state(tmp_path):
    trained = tiny_model("llama", scale=2.0)
    run = make(tmp_path, 0.25, trained=trained, callbacks=[])
    torch.nn.init.normal_(run.position_head.weight)
    ids = random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, 17:] = 0
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    trained.train()
    loss, outputs = run.compute_loss(trained, inputs, return_outputs=True, num_items_in_batch=torch.tensor(38))
    plain = trained(**inputs, num_items_in_batch=torch.tensor(38), output_hidden_states=True)
    torch.testing.assert_close(outputs.logits, plain.logits)
    logits = run.position_head(plain.hidden_states[-1])
    # Left padding has no position, right padding none either: 0 to 14, and 0 to 16.
    targets = torch.tensor([*range(15), *range(16), 16])
    expected = plain.loss + 0.25 * cross_entropy(torch.cat([logits[0, 5:], logits[1, :17]]), targets)
    torch.testing.assert_close(loss, expected)
    assert not trained.model._forward_hooks
    trained.eval()
    assert run.compute_loss(trained, inputs) == trained(**inputs).loss


def test_the_head_is_in_no_model_and_no_weights(tmp_path):
    run = make(tmp_path, save_strategy="steps", save_steps=2)
    run.train()
    run.save_model(str(tmp_path / "final"))
    assert head_weights(run).abs().max() > 0
    stock = set(model().state_dict())
    assert set(run.model.state_dict()) == stock
    assert not (tmp_path / "final" / HEAD_FILE).exists()
    for folder in (tmp_path / "checkpoint-4", tmp_path / "final"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert set(file.keys()) <= stock
        _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
    with safe_open(tmp_path / "checkpoint-4" / HEAD_FILE, "pt") as file:
        assert set(file.keys()) == {"weight", "bias"}
    bare = make(tmp_path / "bare", save_strategy="steps", save_only_model=True)
    bare.train()
    assert not (tmp_path / "bare/checkpoint-6" / HEAD_FILE).exists()


@pytest.mark.parametrize("adapters", [False, True])
def test_resumed_run_equals_the_uninterrupted_one(adapters, tmp_path):
    from peft import get_peft_model

    class Grouped(PositionPredictionMixin, PositionGroupsMixin, Trainer):
        pass

    def run(folder: Path, resume: bool) -> Any:
        trained = model("gated")
        if adapters:
            torch.manual_seed(0)
            trained = get_peft_model(trained, lora_config(trained, 2))
        # Three steps before and one after the checkpoint at which the head is on.
        schedule = DroPECallback(DroPESchedule(warmup=2, transition=2))
        settings = {"save_strategy": "steps", "save_steps": 3, "callbacks": [schedule], "trainer": Grouped}
        started = make(folder, trained=trained, **settings)
        started.train(resume_from_checkpoint=resume)
        return started

    whole = run(tmp_path / "whole", False)
    shutil.copytree(tmp_path / "whole/checkpoint-3", tmp_path / "part/checkpoint-3")
    resumed = run(tmp_path / "part", True)
    assert logged(resumed) == logged(whole)
    assert logged(whole)[4:] == [None, None]
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert torch.equal(head_weights(resumed), head_weights(whole))
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_checkpoint_of_another_choice_is_refused(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3}
    make(tmp_path / "with", **settings).train()
    make(tmp_path / "without", 0.0, **settings).train()
    with pytest.raises(ValueError, match="checkpoint-6 was trained with position_prediction"):
        make(tmp_path / "with", 0.0).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="checkpoint-6 was trained without position_prediction"):
        make(tmp_path / "without").train(resume_from_checkpoint=str(tmp_path / "without/checkpoint-6"))


@pytest.mark.parametrize(
    ("stages", "expected"),
    [(("warmup", "transition"), 4), (("warmup",), 2), (["finetune"], 2), ((), 0)],
)
def test_it_is_on_in_its_stages_only(stages, expected, tmp_path):
    run = make(tmp_path, position_prediction_stages=stages, weight_decay=0.1)
    run.train()
    on = [value is not None for value in logged(run)]
    assert sum(on) == expected
    assert on == [("warmup", "transition", "finetune")[stage] in stages for stage in logged(run, "drope/stage")]
    if not stages:
        plain = make(tmp_path, 0.0, trainer=Trainer, weight_decay=0.1)
        plain.train()
        assert logged(run, "loss") == logged(plain, "loss")
        assert head_weights(run).count_nonzero() == 0


def test_the_head_rests_once_its_stages_are_over(tmp_path):
    seen = []

    class Watched(PositionTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(head_weights(self))
            return super().training_step(*args, **kwargs)

    run = make(tmp_path, trainer=Watched)
    run.train()
    moved = [not torch.equal(a, b) for a, b in zip(seen, [*seen[1:], head_weights(run)], strict=True)]
    assert moved == [True, True, True, True, False, False]


def padded_rows() -> list[dict[str, torch.Tensor]]:
    """Rows of different lengths, padded on alternate sides, some with a prompt that is not trained on."""
    rows = []
    for index, ids in enumerate(random_ids(8, 20)):
        mask = torch.ones_like(ids)
        padding = slice(0, 2 * index) if index % 2 else slice(20 - 2 * index, 20)
        mask[padding] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[: 3 * (index % 3)] = -100
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return rows


@pytest.mark.parametrize("counted", [True, False])
def test_one_batch_of_eight_equals_eight_of_one(counted, tmp_path):
    # Where the Trainer divides by the batches, the model's own loss depends on the split, and with it a second step.
    results, steps = [], 3 if counted else 1
    for size, count in ((8, 1), (1, 8), (2, 4)):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": count, "max_steps": steps}
        run = make(tmp_path, train_dataset=padded_rows(), callbacks=[], optim="sgd", max_grad_norm=0.0, **settings)
        run.model_accepts_loss_kwargs = counted
        run.train()
        results.append((logged(run), head_weights(run)))
    for losses, weights in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-5)
        torch.testing.assert_close(weights, results[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_it_adds_to_another_mixins_loss(order, tmp_path):
    class Distilling:
        """Runs the model once more without gradients, as a teacher, and adds 3."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
            with torch.no_grad():
                model(input_ids=inputs["input_ids"].flip(-1))
            return (loss + 3, outputs) if return_outputs else loss + 3

    bases = (PositionPredictionMixin, Distilling) if order == "outside" else (Distilling, PositionPredictionMixin)
    run = make(tmp_path, trainer=type("Both", (*bases, Trainer), {}))
    run.train()
    alone = make(tmp_path)
    alone.train()
    assert logged(run, "loss") == pytest.approx([loss + 3 for loss in logged(alone, "loss")], rel=1e-5)
    # The hidden state is the student's, not the teacher's.
    assert logged(run)[:4] == pytest.approx(logged(alone)[:4], rel=1e-5)
    assert torch.equal(head_weights(run), head_weights(alone))


@pytest.mark.parametrize(
    ("family", "adapters"), [("llama", True), ("gpt2", False), ("gpt2", True), ("gpt_neox", False)]
)
def test_families_adapters_bf16_and_gradient_checkpointing(family, adapters, tmp_path):
    from peft import get_peft_model

    trained = model("drope", family)
    if adapters:
        trained = get_peft_model(trained, lora_config(trained, 2))
    run = make(tmp_path, trained=trained, max_steps=4, bf16=True, gradient_checkpointing=True)
    run.train()
    assert min(logged(run)) < math.log(18)
    assert head_weights(run).isfinite().all()
    assert run.position_head.weight.dtype == torch.float32


def test_without_a_weight_nothing_changes(tmp_path):
    run, plain = make(tmp_path, 0.0), make(tmp_path, 0.0, trainer=Trainer)
    for started in (run, plain):
        started.train()
    assert run.position_head is None
    assert logged(run, "loss") == logged(plain, "loss")
    assert len(run.optimizer.param_groups) == len(plain.optimizer.param_groups)


def test_a_second_training_keeps_one_group_for_the_head(tmp_path):
    run = make(tmp_path, callbacks=[], max_steps=1)
    run.train()
    run.train()
    parameters = [id(p) for group in run.optimizer.param_groups for p in group["params"]]
    assert len(parameters) == len(set(parameters))
    assert id(run.position_head.weight) in parameters


def test_wrong_settings_are_refused(tmp_path, monkeypatch):
    for weight in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"position_prediction is {weight}"):
            make(tmp_path, weight)
    for stages in ("warmup", ["warmup", "late"]):
        with pytest.raises(ValueError, match="it has to be a list of some of warmup, transition, finetune"):
            make(tmp_path, position_prediction_stages=stages)
    with pytest.raises(ValueError, match="does not work with FSDP"):
        make(tmp_path, torch_compile=True)
    boundless = model()
    monkeypatch.setattr(type(boundless.config), "get_text_config", lambda self: PreTrainedConfig())
    with pytest.raises(ValueError, match="PreTrainedConfig lacks one"):
        make(tmp_path, trained=boundless)


TWO_PROCESSES = """
import os, sys
from pathlib import Path
import torch
from test_position_prediction import head_weights, make, padded_rows

torch.set_num_threads(1)
settings = {"train_dataset": padded_rows(), "callbacks": [], "optim": "sgd", "max_grad_norm": 0.0, "max_steps": 3}
run = make(Path(sys.argv[1]), per_device_train_batch_size=2, gradient_accumulation_steps=2, **settings)
run.train()
assert run.args.world_size == 2
torch.save(head_weights(run), f"{sys.argv[1]}/{run.args.process_index}.pt")
torch.distributed.barrier()
os._exit(0)
"""


def test_two_processes_train_the_same_head_as_one(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one = make(
        tmp_path,
        train_dataset=padded_rows(),
        callbacks=[],
        optim="sgd",
        max_grad_norm=0.0,
        max_steps=3,
        per_device_train_batch_size=8,
    )
    one.train()
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), head_weights(one), rtol=1e-4, atol=1e-6)

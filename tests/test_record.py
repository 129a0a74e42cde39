"""The record of a run, its picture, and the stop at a loss that is not finite."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny import TRAINING, random_ids, tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_drope import DroPECallback, DroPESchedule, apply_drope
from hf_drope.record import ConvergenceRecord, FiniteLossMixin, NonFiniteLossError, draw_record, read_record

SCHEDULE = DroPESchedule(warmup=2, transition=2)
ROWS = [{"input_ids": row, "labels": row} for row in random_ids(24, 12)]


class GuardedTrainer(FiniteLossMixin, Trainer):
    pass


def model(preset: str = "drope") -> Any:
    return apply_drope(tiny_model("llama", scale=2.0), preset, rope_scale=1.0)


def make(folder: Path, *callbacks: Any, trainer: Any = GuardedTrainer, trained: Any = None, **overrides: Any) -> Any:
    settings = {**TRAINING, "max_steps": 6, "save_steps": 2}
    return trainer(
        model=trained or model(),
        args=TrainingArguments(output_dir=str(folder), **{**settings, **overrides}),
        train_dataset=ROWS,
        eval_dataset=ROWS[:4],
        callbacks=[DroPECallback(SCHEDULE), *callbacks],
    )


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


class RaiseAt(StopAt):
    """Stands for a kill between two checkpoints: no event follows."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def untimed(folder: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "runtime", "per_second")
    entries = read_record(folder / "metrics.jsonl")
    return [{key: value for key, value in entry.items() if not key.endswith(timed)} for entry in entries]


def test_each_log_entry_is_one_line_with_tokens_seconds_and_stage(tmp_path):
    make(tmp_path, ConvergenceRecord(48), eval_strategy="steps", eval_steps=3).train()
    entries = read_record(tmp_path / "metrics.jsonl")
    trained = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in trained] == [1, 2, 3, 4, 5, 6]
    assert [entry["tokens"] for entry in trained] == [48, 96, 144, 192, 240, 288]
    assert [entry["drope/stage"] for entry in trained] == [0, 0, 1, 1, 2, 2]
    names = {"learning_rate", "grad_norm", "drope/rope_scale", "drope/temperature", "drope/bias_norm"}
    assert all(names <= set(entry) for entry in trained)
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [3, 6]
    assert "train_runtime" in entries[-1]
    seconds = [entry["seconds"] for entry in entries]
    assert seconds == sorted(seconds)
    with pytest.raises(ValueError, match="tokens_per_step is 0"):
        ConvergenceRecord(0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make(folder, ConvergenceRecord(48), eval_strategy="steps", eval_steps=2).train()
    return folder


@pytest.mark.parametrize(("stop", "kept"), [(StopAt(5), 4), (StopAt(4), 4), (RaiseAt(5), 4), (RaiseAt(3), 2)])
def test_an_interrupted_and_resumed_run_has_each_step_once(stop, kept, whole, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    try:
        make(tmp_path, ConvergenceRecord(48), stop, **settings).train()
    except KeyboardInterrupt:
        assert read_record(tmp_path / "metrics.jsonl")[-1]["step"] == stop.step
    before = read_record(tmp_path / "metrics.jsonl")
    make(tmp_path, ConvergenceRecord(48), **settings).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{kept}"))
    resumed = untimed(tmp_path)
    # The Trainer sums up only its own steps.
    summary, expected = resumed.pop(), untimed(whole)
    assert summary["step"] == 6
    assert resumed == expected[:-1]
    # Not timed anew: the lines before the checkpoint are the earlier run's, and the clock goes on from there.
    after = read_record(tmp_path / "metrics.jsonl")
    count = sum(entry["step"] <= kept for entry in before if "train_runtime" not in entry)
    assert after[:count] == before[:count]
    assert after[count]["seconds"] >= before[count - 1]["seconds"]
    assert not (tmp_path / "metrics.jsonl.part").exists()


@pytest.mark.parametrize("damage", ["lost", "broken", "shortened"])
def test_what_the_file_lacks_comes_from_the_checkpoint(damage, whole, tmp_path, caplog):
    shutil.copytree(whole / "checkpoint-4", tmp_path / "checkpoint-4")
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    if damage == "broken":
        (tmp_path / "metrics.jsonl").write_text("".join([lines[0], "\0\0\n", *lines[1:]]))
    elif damage == "shortened":
        (tmp_path / "metrics.jsonl").write_text(lines[0] + lines[1][:20])
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    make(tmp_path, ConvergenceRecord(48), **settings).train(resume_from_checkpoint=True)
    assert untimed(tmp_path)[:-1] == untimed(whole)[:-1]
    assert ("line 2, is not a JSON object" in caplog.text) == (damage == "broken")


def test_a_new_run_begins_a_new_file_and_only_training_is_recorded(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 7.0}\n')
    run = make(tmp_path, ConvergenceRecord(), max_steps=4, save_strategy="no")
    run.evaluate()
    assert len(read_record(tmp_path / "metrics.jsonl")) == 1
    run.train()
    entries = read_record(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 4]
    assert not any(entry.get("loss") == 7.0 or "tokens" in entry for entry in entries)


def test_tensors_and_numpy_numbers_are_written_as_numbers(tmp_path):
    run = make(tmp_path, ConvergenceRecord(), max_steps=4, save_strategy="no")
    run.train()
    run.log({"a": torch.tensor(1.5), "b": numpy.float32(2.5), "c": float("inf")})
    entry = read_record(tmp_path / "metrics.jsonl")[-1]
    assert (entry["a"], entry["b"], entry["c"], entry["step"]) == (1.5, 2.5, float("inf"), 4)


def test_a_cut_last_line_is_left_out_and_any_other_bad_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps({"step": 1, "loss": 2.0})
    for text, count in (
        (f"{good}\n{good[:9]}", 1),
        (f"{good}\n{good}", 2),
        (f"{good}\n", 1),
        ("", 0),
    ):
        path.write_text(text)
        assert read_record(path) == [{"step": 1, "loss": 2.0}] * count
    for text, line in ((f"{good[:9]}\n{good}\n", 1), (f"{good}\n{good[:9]}\n", 2), (f"{good}\n[1]\n", 2)):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"metrics\.jsonl, line {line}, is not a JSON object"):
            read_record(path)
    path.write_bytes(b"\xff\xfe\n" + good.encode() + b"\n")
    with pytest.raises(ValueError, match="line 1,"):
        read_record(path)


def write(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def check_picture(path: Path, panels: int) -> Any:
    image = pytest.importorskip("matplotlib.image").imread(path)
    assert image.shape[:2] == (round(150 * (1 + 2.2 * panels)), 1200)
    assert image[..., :3].std() > 0.01
    return image


def test_the_picture_has_a_panel_for_what_was_recorded(tmp_path):
    pytest.importorskip("matplotlib")
    make(tmp_path, ConvergenceRecord(48), eval_strategy="steps", eval_steps=3).train()
    picture = tmp_path / "record.png"
    assert draw_record(tmp_path / "metrics.jsonl", picture) == picture
    image = check_picture(picture, panels=3)

    def colours(image: Any) -> int:
        return len(numpy.unique((image[::4, ::4, :3] * 255).astype(int) @ (65536, 256, 1)))

    # Without stages nothing is shaded.
    entries = [entry for entry in read_record(tmp_path / "metrics.jsonl") if "loss" in entry]
    plain = [{"step": entry["step"], "loss": entry["loss"]} for entry in entries]
    draw_record(write(tmp_path / "plain.jsonl", plain), picture)
    assert colours(check_picture(picture, panels=1)) < colours(image)


@pytest.mark.parametrize(
    ("entries", "panels"),
    [
        ([{"step": 1, "loss": 2.0, "drope/stage": 0, "drope/rope_scale": 1.0}], 2),
        ([{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}, {"loss": 1.0}, {"step": 3, "loss": None}], 1),
        ([{"step": 1, "tokens": 9, "loss": 2.0, "distill/kl": 0.1}, {"step": 1, "eval_loss": 2.0}], 1),
        ([{"step": 1, "loss": 2.0, "drope/stage": 7}, {"step": 2, "drope/bias_norm": 0.5, "drope/stage": None}], 2),
    ],
)
def test_the_picture_copes_with_missing_keys(entries, panels, tmp_path):
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "metrics.jsonl", entries)
    check_picture(draw_record(path, tmp_path / "record.png"), panels)


def test_a_file_without_a_loss_is_refused(tmp_path):
    path = write(tmp_path / "metrics.jsonl", [{"step": 1, "eval_loss": 2.0}, {"step": 1, "loss": None}])
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no entry with a loss"):
        draw_record(path, tmp_path / "record.png")
    assert not (tmp_path / "record.png").exists()


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.patches"):
        monkeypatch.setitem(sys.modules, name, None)
    path = write(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    assert draw_record(path, tmp_path / "record.png") is None


class Spoil(TrainerCallback):
    """After `step` finished steps a parameter becomes `value`; with `gradient`, only its gradient does."""

    def __init__(self, step: int, value: float, gradient: bool = False) -> None:
        self.step, self.value, self.gradient = step, value, gradient
        self.weights: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step and not self.weights:
            weight = model.model.layers[0].mlp.up_proj.weight
            if self.gradient:
                weight.register_hook(lambda grad: torch.full_like(grad, self.value))
            else:
                weight[0, 0] = self.value
            self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("value", "gradient", "clip"),
    [(float("nan"), False, 1.0), (float("inf"), False, 0.0), (float("nan"), True, 0.0), (float("inf"), True, 1.0)],
)
def test_a_value_that_is_not_finite_stops_training_before_it_is_used_or_saved(value, gradient, clip, tmp_path):
    spoil = Spoil(3, value, gradient)
    run = make(tmp_path, ConvergenceRecord(), spoil, max_grad_norm=clip, eval_strategy="steps", eval_steps=1)
    run.save_model()
    before = (tmp_path / "model.safetensors").read_bytes()
    what = "gradient norm" if gradient else "loss"
    sentence = rf"^The {what} is (nan|inf) at step 4; .* up to .*checkpoint-2 are kept; begin anew in another folder with a learning rate below 0\.001\.$"
    with pytest.raises(NonFiniteLossError, match=sentence):
        run.train()
    assert run.state.global_step == 3
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter.nan_to_num(), spoil.weights[name].nan_to_num()), name
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert all(parameter.isfinite().all() for parameter in last.parameters())
    assert read_record(tmp_path / "metrics.jsonl")[-1]["step"] == 3
    if not gradient:
        with pytest.raises(NonFiniteLossError, match=r"up_proj\.weight is not finite after step 3"):
            run.save_model()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    # The same trainer goes on from there.
    if not gradient:
        run.train(resume_from_checkpoint=True)
        assert run.state.global_step == 6


def test_a_huge_learning_rate_never_gets_into_a_checkpoint(tmp_path):
    run = make(tmp_path, learning_rate=1e38, lr_scheduler_type="constant", save_steps=1, max_grad_norm=0.0)
    with pytest.raises(NonFiniteLossError, match="begin anew in another folder with a learning rate below 1e\\+38"):
        run.train()
    for folder in tmp_path.glob("checkpoint-*"):
        saved = AutoModelForCausalLM.from_pretrained(folder)
        assert all(parameter.isfinite().all() for parameter in saved.parameters())


def test_an_update_that_overflows_is_not_saved(tmp_path):
    class Overflow(TrainerCallback):
        @torch.no_grad()
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                model.model.norm.weight[0] = float("inf")

    with pytest.raises(
        NonFiniteLossError, match=r"norm\.weight is not finite after step 2; .* no checkpoint was saved"
    ):
        make(tmp_path, Overflow()).train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_checkpoints_that_are_incomplete_or_of_another_run_are_not_named(tmp_path):
    for step in (3, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-9/trainer_state.json").write_text("{}")
    with pytest.raises(NonFiniteLossError, match="checkpoint-2 are kept"):
        make(tmp_path, Spoil(3, float("nan"))).train()


@pytest.mark.parametrize("where", ["cpu", "accelerator"])
def test_one_bad_batch_of_many_is_enough(where, tmp_path, monkeypatch):
    class OneBadLoss(Trainer):
        calls = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            loss = super().compute_loss(*args, **kwargs)
            # The first of four batches of the second step.
            return loss * float("nan") if self.calls == 5 else loss

    class Guarded(FiniteLossMixin, OneBadLoss):
        pass

    run = make(tmp_path, trainer=Guarded, gradient_accumulation_steps=4, per_device_train_batch_size=1)
    if where == "accelerator":
        monkeypatch.setattr(type(run.args), "world_size", 2)
    with pytest.raises(NonFiniteLossError, match="The loss is nan at step 2"):
        run.train()
    # On an accelerator once a step.
    assert Guarded.calls == (5 if where == "cpu" else 8)


def test_a_guarded_run_equals_an_unguarded_one(whole, tmp_path):
    run = make(tmp_path, ConvergenceRecord(48), trainer=Trainer, eval_strategy="steps", eval_steps=2)
    run.train()
    assert untimed(tmp_path) == untimed(whole)

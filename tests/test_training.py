"""Staged training with the Trainer: stages, checkpoints, resumption, parameter groups, adapters."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import logits, run_python, tiny_tokenizer, write_source
from tiny import TRAINING, VOCAB, random_ids, tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_drope import (
    DroPECallback,
    DroPEParameters,
    DroPESchedule,
    DroPETrainer,
    apply_drope,
    convert_checkpoint,
    plan_conversion,
)
from hf_drope.adapters import lora_config
from hf_drope.recalibrate import recalibrate
from hf_drope.training import (
    PositionGroupsMixin,
    freeze_all_but_position,
    position_logs,
    position_parameters,
    restore_stage,
    unwrap,
)

SCHEDULE = DroPESchedule(warmup=3, transition=3)
ROWS = [{"input_ids": row, "labels": row} for row in random_ids(24, 12)]


class Watch(TrainerCallback):
    """Notes the model's state at every step, and its logits whenever a checkpoint is saved."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.saved: dict[int, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        settings = unwrap(model).config.drope_parameters
        self.steps.append((settings["rope_scale"], settings["gate"]["temperature"]))

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.saved[state.global_step] = logits(model, random_ids(1, 9))


def model(preset: str = "drope", family: str = "llama") -> Any:
    # At strength 1, as the schedule starts: a learned table that is dropped at once could not fade.
    return apply_drope(tiny_model(family, scale=2.0), preset, rope_scale=1.0)


def arguments(folder: Path, **overrides: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), **{**TRAINING, "max_steps": 9, "save_steps": 2, **overrides})


def train(folder: Path, trained: Any = None, resume: Any = None, trainer: Any = DroPETrainer, **overrides: Any) -> Any:
    watch = Watch()
    run = trainer(
        model=trained or model(),
        args=arguments(folder, **overrides),
        train_dataset=ROWS,
        eval_dataset=ROWS[:4],
        callbacks=[DroPECallback(SCHEDULE), watch],
    )
    run.train(resume_from_checkpoint=resume)
    run.watch = watch
    return run


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_every_step_trains_in_its_own_stage(tmp_path):
    run = train(tmp_path)
    expected = [(state.rope_scale, state.temperature) for state in (SCHEDULE.at(step, 9) for step in range(9))]
    assert run.watch.steps == expected
    final = run.model.config.drope_parameters
    assert (final["rope_scale"], final["gate"]["temperature"]) == (0.0, 0.1)


@pytest.mark.parametrize("trainer", [Trainer, DroPETrainer])
def test_stage_scale_temperature_and_bias_norm_are_logged(trainer, tmp_path):
    run = train(tmp_path, trainer=trainer)
    rows = [entry for entry in run.state.log_history if "loss" in entry]
    assert [row["drope/stage"] for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [row["drope/rope_scale"] for row in rows[:4]] == [1.0, pytest.approx(2 / 3), pytest.approx(1 / 3), 0.0]
    assert rows[-1]["drope/temperature"] == 0.1
    norm = torch.cat([p.flatten() for p in run.model.position_parameters()]).norm().item()
    assert rows[-1]["drope/bias_norm"] == pytest.approx(norm, rel=1e-5)


def test_how_far_gates_are_open_is_logged_where_no_score_decides_it():
    def logged(preset: str, **overrides: Any) -> tuple[dict[str, float], list[Any]]:
        converted = apply_drope(tiny_model("llama"), preset, **overrides)
        with torch.no_grad():
            for parameter in converted.position_parameters():
                parameter.uniform_(-1.0, 1.0)
        gates = [bias.gate for bias in converted.position_biases()]
        return position_logs(converted, SCHEDULE.at(0, 9)), gates

    logs, gates = logged("gated")
    values = [
        math.exp(t) / (1 + math.exp(-g))
        for gate in gates
        for g, t in zip(gate.g.tolist(), gate.t.tolist(), strict=True)
    ]
    assert logs["drope/gate"] == pytest.approx(sum(values) / len(values), rel=1e-5)
    logs, gates = logged("simple", gate={"type": "query", "temperature": 0.5})
    values = [1 / (1 + math.exp(-b / 0.5)) for gate in gates for b in gate.bias.tolist()]
    assert logs["drope/gate"] == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert "drope/gate" not in logged("drope")[0]
    assert "drope/gate" not in logged("simple")[0]


def test_trackers_ahead_in_the_list_see_the_stage_too(tmp_path):
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    run = DroPETrainer(
        model=model(),
        args=arguments(tmp_path, save_strategy="no"),
        train_dataset=ROWS,
        callbacks=[Tracker(), DroPECallback(SCHEDULE)],
    )
    run.train()
    assert [logs["drope/stage"] for logs in seen if "loss" in logs] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all("drope/bias_norm" in logs for logs in seen if "loss" in logs)


def test_supervised_fine_tuning_with_trl_is_staged_logged_and_grouped(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    class StagedSFTTrainer(PositionGroupsMixin, trl.SFTTrainer):
        pass

    settings = {**TRAINING, "max_steps": 4, "bf16": False, "save_strategy": "no"}
    run = StagedSFTTrainer(
        model=model(),
        args=trl.SFTConfig(output_dir=str(tmp_path), **settings),
        train_dataset=datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in ROWS]),
        processing_class=tiny_tokenizer(),
        callbacks=[DroPECallback(DroPESchedule(warmup=2, transition=1))],
        position_learning_rate=0.5,
    )
    run.train()
    rows = [entry for entry in run.state.log_history if "loss" in entry]
    assert [row["drope/rope_scale"] for row in rows] == [1.0, 0.5, 0.0, 0.0]
    assert run.optimizer.param_groups[-1]["initial_lr"] == 0.5
    assert run.model.config.drope_parameters["rope_scale"] == 0.0


def test_every_checkpoint_reloads_to_the_model_that_was_saved(tmp_path):
    """https://github.com/allenai/OLMo-core/pull/622"""
    run = train(tmp_path)
    assert sorted(run.watch.saved) == [2, 4, 6, 8, 9]
    for step, expected in run.watch.saved.items():
        folder = tmp_path / f"checkpoint-{step}"
        reloaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        live = SCHEDULE.at(step - 1, 9)
        assert reloaded.config.drope_parameters["rope_scale"] == live.rope_scale
        assert (folder / "modeling_drope.py").is_file()
        torch.testing.assert_close(logits(reloaded, random_ids(1, 9)), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("step", [2, 4, 6])
def test_resumed_run_equals_the_uninterrupted_one(step, tmp_path):
    """https://github.com/huggingface/transformers/pull/29666: no flag, whatever stage it was stopped in."""
    whole = train(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / "part" / f"checkpoint-{step}")
    resumed = train(tmp_path / "part", resume=True)
    assert resumed.watch.steps == whole.watch.steps[step:]
    assert losses(resumed) == losses(whole)
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_run_resumed_with_another_batch_split_goes_through_the_same_stages(tmp_path):
    """https://github.com/huggingface/transformers/pull/43718"""
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = train(tmp_path / "whole", **split)
    shutil.copytree(tmp_path / "whole/checkpoint-4", tmp_path / "part/checkpoint-4")
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    resumed = train(tmp_path / "part", resume=True, **split)
    assert resumed.watch.steps == whole.watch.steps[4:]
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)


def test_an_evaluation_sees_the_stage_of_the_checkpoint_of_its_step(tmp_path):
    run = train(tmp_path, eval_strategy="steps", eval_steps=2)
    measured = {entry["step"]: entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry}
    ids = torch.stack([row["input_ids"] for row in ROWS[:4]])
    for step in (2, 4, 8):
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}").eval()
        assert reloaded(input_ids=ids, labels=ids).loss.item() == pytest.approx(measured[step], rel=1e-5)


def test_a_run_that_is_stopped_early_does_not_jump_to_the_last_stage(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    run = DroPETrainer(
        model=model(), args=arguments(tmp_path), train_dataset=ROWS, callbacks=[DroPECallback(SCHEDULE), Stop()]
    )
    run.train()
    assert run.model.config.drope_parameters["rope_scale"] == SCHEDULE.at(2, 9).rope_scale > 0


def test_a_model_that_cannot_fade_is_refused_with_its_own_sentence(tmp_path):
    trained = apply_drope(tiny_model("gpt2"), "simple")
    with pytest.raises(ValueError, match="position table was removed"):
        train(tmp_path, trained=trained)


def test_steps_are_optimizer_steps_whatever_the_batches(tmp_path):
    """https://github.com/huggingface/transformers/issues/33671: accumulation, epochs and steps agree."""
    by_steps = train(tmp_path / "a", max_steps=8, save_strategy="no")
    by_epochs = train(
        tmp_path / "b", max_steps=-1, num_train_epochs=4, gradient_accumulation_steps=3, save_strategy="no"
    )
    assert by_epochs.state.max_steps == by_epochs.state.global_step == 8
    assert by_epochs.watch.steps == by_steps.watch.steps


@pytest.mark.parametrize("adapters", [False, True])
def test_best_model_of_an_earlier_stage_gets_its_own_stage_back(adapters, tmp_path):
    """https://github.com/huggingface/transformers/issues/29128"""
    from peft import get_peft_model

    class Worse(DroPETrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            metrics = {"eval_loss": float(self.state.global_step)}
            self.log(metrics)
            return metrics

    trained = model()
    if adapters:
        trained = get_peft_model(trained, lora_config(trained, 2))
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    run = train(tmp_path, trained=trained, trainer=Worse, **settings)
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")
    assert unwrap(run.model).config.drope_parameters["rope_scale"] == SCHEDULE.at(1, 9).rope_scale
    torch.testing.assert_close(logits(run.model, random_ids(1, 9)), run.watch.saved[2], atol=1e-6, rtol=1e-6)


def test_position_parameters_have_their_own_group_from_the_first_step(tmp_path):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/6891 and https://github.com/pytorch/pytorch/issues/1402"""
    run = DroPETrainer(model=model("gated"), args=arguments(tmp_path, weight_decay=0.1), position_learning_rate=0.5)
    groups = run.create_optimizer().param_groups
    assert groups[-1]["lr"] == 0.5
    assert groups[-1]["weight_decay"] == 0.0
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in run.model.position_parameters()}
    everything = [id(p) for group in groups for p in group["params"]]
    assert len(everything) == len(set(everything)) == len(list(run.model.parameters()))
    assert "model.layers.0.mlp.up_proj.weight" in run.get_decay_parameter_names(run.model)
    default = DroPETrainer(model=model("gated"), args=arguments(tmp_path))
    assert default.create_optimizer().param_groups[-1]["lr"] == pytest.approx(1e-2)


def test_position_only_training_moves_nothing_else(tmp_path):
    trained = model("gated")
    freeze_all_but_position(trained)
    before = {name: p.detach().clone() for name, p in trained.named_parameters()}
    train_gated(tmp_path, trained)
    moved = {name for name, p in trained.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, _ in position_parameters(trained)}
    with pytest.raises(ValueError, match="no position parameters"):
        freeze_all_but_position(model("nope"))


def train_gated(folder: Path, trained: Any) -> Any:
    run = DroPETrainer(
        model=trained,
        args=arguments(folder, max_steps=3, save_strategy="no"),
        train_dataset=ROWS,
        callbacks=[DroPECallback(DroPESchedule(warmup=1, transition=1))],
    )
    run.train()
    return run


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox", "phi3"])
def test_adapters_train_save_and_merge_the_bias(family, tmp_path):
    """https://github.com/huggingface/peft/issues/2099"""
    from peft import PeftModel, get_peft_model

    plain = model("gated", family)
    bare = {name: p.detach().clone() for name, p in position_parameters(plain)}
    adapted = get_peft_model(plain, lora_config(plain, 2))
    train_gated(tmp_path, adapted)
    adapted.eval()
    expected = logits(adapted, random_ids(1, 9))
    adapted.save_pretrained(tmp_path / "adapter")
    fresh = PeftModel.from_pretrained(model("gated", family), tmp_path / "adapter").eval()
    fresh.get_base_model().set_rope_scale(0.0)
    torch.testing.assert_close(logits(fresh, random_ids(1, 9)), expected, atol=1e-5, rtol=1e-5)
    merged = adapted.merge_and_unload().eval()
    torch.testing.assert_close(logits(merged, random_ids(1, 9)), expected, atol=1e-4, rtol=1e-4)
    assert all(not torch.equal(p, bare[name]) for name, p in position_parameters(merged))
    assert {name for name, _ in position_parameters(merged)} == set(bare)


def test_adapters_sit_on_attention_and_train_what_the_conversion_added():
    from peft import get_peft_model

    plain = apply_drope(tiny_model("gpt2"), "gated", rope_scale=1.0)
    adapted = get_peft_model(plain, lora_config(plain, 2))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert {name.split(".")[5] for name in trained} == {"attn"}
    plain = apply_drope(tiny_model("llama"), "gated", qk_norm="qk")
    adapted = get_peft_model(plain, lora_config(plain, 2))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert sum("qk_norm" in name for name in trained) == 4
    assert sum("position_bias" in name for name in trained) == len(list(position_parameters(adapted)))


def test_adapter_checkpoints_carry_their_stage(tmp_path):
    from peft import PeftModel, get_peft_model

    plain = model()
    run = train(tmp_path, trained=get_peft_model(plain, lora_config(plain, 2)))
    for step in (2, 8):
        settings = json.loads((tmp_path / f"checkpoint-{step}" / "drope_parameters.json").read_text())
        assert settings["rope_scale"] == SCHEDULE.at(step - 1, 9).rope_scale
        reloaded = PeftModel.from_pretrained(model(), tmp_path / f"checkpoint-{step}").eval()
        restore_stage(reloaded, tmp_path / f"checkpoint-{step}")
        torch.testing.assert_close(logits(reloaded, random_ids(1, 9)), run.watch.saved[step], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("gate", ["query", "score"])
def test_adapters_take_and_merge_the_temperature(gate, tmp_path):
    from peft import get_peft_model

    settings = DroPEParameters(rope_scale=1.0, position_bias={"type": "log"}, gate={"type": gate})
    plain = apply_drope(tiny_model("llama"), settings)
    adapted = get_peft_model(plain, lora_config(plain, 2))
    train_gated(tmp_path, adapted)
    expected = logits(adapted.eval(), random_ids(1, 9))
    merged = adapted.merge_and_unload().eval()
    assert merged.config.drope_parameters["gate"]["temperature"] == 0.1
    torch.testing.assert_close(logits(merged, random_ids(1, 9)), expected, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(logits(reloaded, random_ids(1, 9)), logits(merged, random_ids(1, 9)))


def test_adapters_that_leave_the_bias_out_are_warned_about(tmp_path, caplog):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model("gated"), LoraConfig(r=2, target_modules=["q_proj"]))
    train_gated(tmp_path, adapted)
    assert "None of the 6 position parameters is trained" in caplog.text
    caplog.clear()
    train_gated(tmp_path, model("gated"))
    assert "position parameters" not in caplog.text


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    words = [f"w{random.Random(0).choice(range(3, VOCAB))}" for _ in range(4)]
    generator = random.Random(1)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"w{generator.randrange(3, VOCAB)}" for _ in range(600)) + " " + " ".join(words))
    return path


def converted(folder: Path, preset: str | DroPEParameters = "drope", family: str = "llama") -> Path:
    write_source(folder / "src", family)
    return convert_checkpoint(plan_conversion(folder / "src", preset), folder / "converted", progress=False)


def run_recalibrate(source: Path, out: Path, text: Path, **overrides: Any) -> dict[str, Any]:
    settings = {"max_steps": 6, "sequence_length": 16, "batch_size": 4, "save_steps": 2, "logging_steps": 1}
    return recalibrate(source, out, [text], **{**settings, **overrides})


def metrics(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_recalibration_resumes_exactly_and_saves_a_loadable_folder(lora_rank, text, tmp_path):
    source = converted(tmp_path, "gated")
    summary = run_recalibrate(source, tmp_path / "whole", text, lora_rank=lora_rank)
    assert summary["tokens"] == 6 * 4 * 16
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert model.config.drope_parameters["rope_scale"] == 0.0
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "special.txt",
        "generation_config.json",
        "drope_conversion.json",
    ):
        assert (tmp_path / "whole" / name).read_bytes() == (source / name).read_bytes()
    # A run that was killed after its step 4 and left a checkpoint half-written.
    shutil.copytree(tmp_path / "whole/checkpoint-4", tmp_path / "part/checkpoint-4")
    (tmp_path / "part/checkpoint-6").mkdir()
    run_recalibrate(source, tmp_path / "part", text, lora_rank=lora_rank, resume=True)
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "part")
    assert torch.equal(logits(again, random_ids(1, 9)), logits(model, random_ids(1, 9)))


def test_a_run_stopped_between_two_logs_resumes_exactly(text, tmp_path):
    source = converted(tmp_path)
    run_recalibrate(source, tmp_path / "whole", text, logging_steps=3)
    shutil.copytree(tmp_path / "whole/checkpoint-4", tmp_path / "part/checkpoint-4")
    run_recalibrate(source, tmp_path / "part", text, logging_steps=3, resume=True)
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")


def test_recalibration_autocasts_to_bf16_on_any_device(text, tmp_path):
    run_recalibrate(converted(tmp_path), tmp_path / "out", text, max_steps=2, bf16=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(text, tmp_path):
    write_source(tmp_path / "src", vocab_size=50)
    source = convert_checkpoint(plan_conversion(tmp_path / "src"), tmp_path / "converted", progress=False)
    with pytest.raises(ValueError, match=r"token 96, but the model knows only 50"):
        run_recalibrate(source, tmp_path / "out", text)
    assert not (tmp_path / "out").exists()


TWO_PROCESSES = """
import os
import sys
import torch
from hf_drope import DroPECallback, DroPETrainer
from test_training import ROWS, SCHEDULE, arguments, model

torch.set_num_threads(1)
settings = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
for family, preset in (("llama", "drope"), ("gpt2", "gated")):
    trainer = DroPETrainer(
        model=model(preset, family),
        args=arguments(sys.argv[1], ddp_find_unused_parameters=False, **settings),
        train_dataset=ROWS,
        callbacks=[DroPECallback(SCHEDULE)],
    )
    trainer.train()
    assert trainer.args.world_size == 2
    weights = torch.cat([parameter.flatten() for parameter in trainer.model.parameters()]).detach()
    both = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(both, weights)
    assert torch.equal(*both)
    stages = [entry["drope/stage"] for entry in trainer.state.log_history if "loss" in entry]
    assert stages == [0, 0, 0, 1, 1, 1, 2, 2, 2]
torch.distributed.barrier()
# Past every assertion; gloo's threads may abort an interpreter that tears itself down around them.
sys.stdout.flush()
os._exit(0)
"""


def test_two_processes_train_through_every_stage_without_unused_parameters(tmp_path):
    """https://github.com/pytorch/pytorch/issues/41324"""
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [*launch, str(script), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from transformers import TrainerState
from hf_drope.recalibrate import recalibrate

torch.set_num_threads(1)
write = TrainerState.save_to_json

def write_or_die(self, path):
    if self.global_step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, path)

TrainerState.save_to_json = write_or_die
source, out, text = sys.argv[1:]
recalibrate(source, out, [text], max_steps=8, sequence_length=16, batch_size=4, save_steps=2, logging_steps=1)
"""


def test_a_run_killed_while_it_saved_resumes_from_the_checkpoint_before(text, tmp_path):
    source = converted(tmp_path)
    whole = run_recalibrate(source, tmp_path / "whole", text, max_steps=8)
    done = run_python(KILLED, source, tmp_path / "part", text, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = {path.name for path in (tmp_path / "part").iterdir()}
    assert names == {"metrics.jsonl", "recalibration.json", *(f"checkpoint-{step}" for step in (2, 4, 6))}
    resumed = run_recalibrate(source, tmp_path / "part", text, max_steps=8, resume=True)
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")
    assert resumed["last_loss"] == whole["last_loss"]


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_resuming_a_finished_run_changes_nothing(lora_rank, text, tmp_path):
    source = converted(tmp_path, "gated", "gpt2")
    settings: dict[str, Any] = {"max_steps": 9, "save_steps": 1, "lora_rank": lora_rank}
    run_recalibrate(source, tmp_path / "out", text, **settings)
    before, weights = metrics(tmp_path / "out"), (tmp_path / "out/model.safetensors").read_bytes()
    run_recalibrate(source, tmp_path / "out", text, resume=True, **settings)
    assert metrics(tmp_path / "out") == before
    assert (tmp_path / "out/model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match=r"max_steps is 12, but .* belongs to a run of 9 steps"):
        run_recalibrate(source, tmp_path / "out", text, resume=True, **{**settings, "max_steps": 12})


def test_recalibration_prints_nothing(text, tmp_path, capsys):
    run_recalibrate(converted(tmp_path), tmp_path / "out", text, max_steps=2)
    assert capsys.readouterr().out == ""


def test_no_steps_save_and_train_nothing(text, tmp_path):
    source = converted(tmp_path)
    summary = run_recalibrate(source, tmp_path / "out", text, max_steps=0)
    assert summary["last_loss"] is None
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    assert torch.equal(logits(before, random_ids(1, 9)), logits(after, random_ids(1, 9)))


def test_rope_fades_by_default_only_where_it_is_still_there(text, tmp_path):
    for scale, expected in ((1.0, 1.0), (0.0, 0.0)):
        source = converted(tmp_path / f"{scale}", DroPEParameters.preset("drope", rope_scale=scale))
        run_recalibrate(source, tmp_path / f"out-{scale}", text, max_steps=4)
        rows = [json.loads(line) for line in (tmp_path / f"out-{scale}/metrics.jsonl").read_text().splitlines()]
        assert rows[0]["drope/rope_scale"] == expected


def test_a_removed_table_is_not_faded_unless_asked_for(text, tmp_path):
    source = converted(tmp_path, "simple", "gpt2")
    run_recalibrate(source, tmp_path / "out", text, max_steps=2)
    with pytest.raises(ValueError, match="position table was removed"):
        run_recalibrate(source, tmp_path / "out2", text, schedule=DroPESchedule(warmup=1))
    assert not (tmp_path / "out2").exists()


def test_wrong_input_is_refused_before_anything_is_written(text, tmp_path):
    source = converted(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"source": tmp_path / "src"}, "is not a converted checkpoint"),
        ({"max_steps": -1}, "max_steps is -1"),
        ({"lora_rank": 0}, "lora_rank is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"train_only": "gates"}, "train_only is 'gates'"),
        ({"train_only": "position", "lora_rank": 2}, "adapters would stay untrained"),
        ({"out": tmp_path / "full"}, "is not empty"),
        ({"resume": True}, "no complete checkpoint"),
        ({"schedule": DroPESchedule(warmup=9, transition=9)}, "ask for 18 steps"),
        ({"sequence_length": 10_000}, "too few for one sequence"),
    ]
    table = converted(tmp_path / "gpt2", DroPEParameters.preset("simple", rope_scale=1.0), "gpt2")
    cases.append(({"source": table, "sequence_length": 65}, "at most 64, the positions in this model's table"))
    for settings, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            run_recalibrate(settings.pop("source", source), settings.pop("out", tmp_path / "out"), text, **settings)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]

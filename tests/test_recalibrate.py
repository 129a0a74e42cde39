"""`recalibrate` as a whole: what it plans, what it trains, what it learns from, and what it leaves when something breaks."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import math
import shutil
from collections import namedtuple
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import write_source
from safetensors import SafetensorError
from test_examples import write_words
from tiny import random_ids
from transformers import AutoModelForCausalLM, Trainer

import hf_drope.recalibrate as module
from hf_drope import (
    DroPESchedule,
    apply_drope,
    calibrate,
    calibrate_checkpoint,
    convert_checkpoint,
    plan_conversion,
)
from hf_drope.cli import main
from hf_drope.recalibrate import recalibrate
from hf_drope.record import NonFiniteLossError, draw_record
from hf_drope.text import PackedText
from hf_drope.top_k_logits import TopKLogits

LENGTH = 16
BATCH = 4
SMALL: dict[str, Any] = {
    "max_steps": 6,
    "sequence_length": LENGTH,
    "batch_size": BATCH,
    "save_steps": 2,
    "logging_steps": 1,
    "bf16": False,
}
Usage = namedtuple("Usage", "total used free")


class Place(NamedTuple):
    """Folders to read only: a source, what was made of it, a text of 100 blocks, and the source's predictions for it."""

    source: Path
    text: Path
    predictions: Path
    disentangled: Path  # calibrated
    drope: Path  # calibrated, with a gate at temperature 0.7
    fresh: Path  # the same gate, not calibrated
    gated: Path  # a table per distance, not calibrated


def convert(source: Path, target: Path, preset: str, **settings: Any) -> Path:
    return convert_checkpoint(plan_conversion(source, preset, overrides=settings), target, progress=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("place")
    teacher = write_source(folder / "src", attention_dropout=0.2)
    text = write_words(folder / "text.txt", 100 * LENGTH, seed=1)
    made = {
        "disentangled": convert(folder / "src", folder / "disentangled", "disentangled"),
        "drope": convert(folder / "src", folder / "drope", "drope", temperature=0.7),
        "fresh": convert(folder / "src", folder / "fresh", "drope", temperature=0.7),
        "gated": convert(folder / "src", folder / "gated", "gated", max_distance=8),
    }
    for name in ("disentangled", "drope"):
        settings: dict[str, Any] = {"tokens": 128, "length": LENGTH, "steps": 2, "progress": False}
        calibrate_checkpoint(made[name], folder / "src", [text], **settings)
    tokenizer = module.load_tokenizer(folder / "src")
    TopKLogits.write(folder / "predictions", teacher, PackedText([text], tokenizer, LENGTH), top_k=8)
    return Place(folder / "src", text, folder / "predictions", **made)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """Drawing takes longer than these runs; the one test of the picture draws."""
    monkeypatch.setattr(module, "draw_record", lambda *_: None)


def run(place: Place, out: Path, model: Path | None = None, **overrides: Any) -> dict[str, Any]:
    return recalibrate(model or place.disentangled, out, [place.text], **{**SMALL, **overrides})


def metrics(folder: Path, name: str = "loss") -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if "loss" in row]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def moved(before: Path, after: Path) -> set[str]:
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["drope_parameters"]


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def equal_weights(one: Path, other: Path) -> bool:
    return not moved(one, other)


# The plan.


def test_defaults_fit_a_calibrated_and_an_uncalibrated_folder(place, tmp_path):
    long = write_words(tmp_path / "long.txt", 110_000, seed=2)
    blocks = 110_001 // 64
    plans = {
        name: recalibrate(folder, tmp_path / "out", [long], sequence_length=64, dry_run=True)
        for name, folder in (("calibrated", place.drope), ("fresh", place.fresh))
    }
    steady, fresh = plans["calibrated"], plans["fresh"]
    assert (steady["calibrated"], fresh["calibrated"]) == (True, False)
    assert abs(steady["tokens"] - 100_000) <= 128
    assert fresh["steps"] == blocks  # 500,000 tokens, but one pass over the text
    assert fresh["tokens"] == fresh["steps"] * 64 <= 110_001
    assert (steady["learning_rate"], fresh["learning_rate"]) == (1e-4, 1e-3)
    assert steady["train"] == fresh["train"] == "attention"
    assert steady["distill"] == fresh["distill"] == 0.0
    assert [line.split(":")[0] for line in steady["stages"]] == ["finetune"]
    assert "temperature 0.7" in steady["stages"][0]
    assert [line.split(":")[0] for line in fresh["stages"]] == ["transition", "finetune"]


@pytest.mark.parametrize("temperature", [0.7, 0.05])
def test_calibration_leaves_no_stages_and_the_temperature_alone(temperature, place, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(place.drope, model)
    config = json.loads((model / "config.json").read_text())
    config["drope_parameters"]["gate"]["temperature"] = temperature
    (model / "config.json").write_text(json.dumps(config))
    run(place, tmp_path / "out", model, max_steps=3)
    assert metrics(tmp_path / "out", "drope/stage") == [2, 2, 2]
    assert metrics(tmp_path / "out", "drope/temperature") == [temperature] * 3
    assert settings_of(tmp_path / "out") == settings_of(model)


def test_a_run_with_nothing_given_is_one_pass_over_a_short_text(place, tmp_path):
    summary = recalibrate(place.disentangled, tmp_path / "out", [place.text], sequence_length=64)
    assert summary["steps"] == 1601 // 64 // 2
    assert summary["tokens"] <= 1601
    assert settings_of(tmp_path / "out")["position_bias"]["terms_scale"] == 1.0
    # The plan reaches the run.
    assert max(metrics(tmp_path / "out", "learning_rate")) == pytest.approx(1e-4)
    assert all("self_attn" in name for name in moved(place.disentangled, tmp_path / "out"))


@pytest.mark.parametrize("given", [None, 0.4])
def test_stages_of_ones_own_begin_at_the_temperature_of_the_gate_unless_they_say_another(given, place, tmp_path):
    schedule = DroPESchedule(warmup=0, transition=3, initial_temperature=given)
    plan = run(place, tmp_path / "plan", place.fresh, schedule=schedule, dry_run=True)
    run(place, tmp_path / "out", place.fresh, schedule=schedule)
    start = given or 0.7
    assert metrics(tmp_path / "out", "drope/temperature") == pytest.approx(
        [start, start * 2 / 3, start / 3, 0.1, 0.1, 0.1]
    )
    assert f"temperature {start} → 0.1" in plan["stages"][0]


def test_a_model_calibrated_in_memory_counts_as_calibrated_when_it_is_saved(place, tmp_path):
    model = apply_drope(AutoModelForCausalLM.from_pretrained(place.source), "disentangled")
    folders = [tmp_path / "before", tmp_path / "after"]
    model.save_pretrained(folders[0])
    calibrate(model, None, random_ids(1, LENGTH), steps=0, output_steps=0, progress=False)
    model.save_pretrained(folders[1])
    for folder in folders:
        module.load_tokenizer(place.source).save_pretrained(folder)
    plans = [run(place, tmp_path / "out", folder, dry_run=True) for folder in folders]
    assert [plan["calibrated"] for plan in plans] == [False, True]
    assert [plan["learning_rate"] for plan in plans] == [1e-3, 1e-4]


def test_a_text_shorter_than_a_step_is_one_step(place, tmp_path):
    text = write_words(tmp_path / "short.txt", 40, seed=3)
    plan = recalibrate(place.disentangled, tmp_path / "out", [text], sequence_length=LENGTH, dry_run=True)
    assert plan["steps"] == 1


def test_a_dry_run_writes_nothing(place, tmp_path):
    before = contents(place.disentangled)
    told: list[str] = []
    plan = run(place, tmp_path / "out", dry_run=True, announce=told.append)
    assert plan["steps"] == 6
    assert plan["estimated_seconds"] >= 0
    assert len(told) == 1
    assert list(tmp_path.iterdir()) == []
    assert contents(place.disentangled) == before


@pytest.mark.parametrize("teaching", [{}, {"distill": 0.5, "lora_rank": 2}, {"distill": 0.5, "source": "source"}])
def test_the_plan_is_told_before_training_and_changes_no_loss(teaching, place, tmp_path):
    """With dropout, so that a random number drawn for the plan would be seen."""
    told: list[tuple[str, bool]] = []
    given = {**teaching, **({"source": place.source} if "source" in teaching else {})}
    run(place, tmp_path / "silent", max_steps=3, **given)
    run(
        place,
        tmp_path / "told",
        max_steps=3,
        announce=lambda text: told.append((text, (tmp_path / "told/metrics.jsonl").exists())),
        **given,
    )
    ((text, begun),) = told
    assert not begun
    rate = "learning rate 0.0005" if "lora_rank" in teaching else "learning rate 0.0001"
    parts = ("192 tokens in 3 steps", rate, "nothing fades", " GB ", " minutes", "training ")
    assert [part for part in parts if part not in text] == []
    assert ("no distillation" in text) == (not teaching)
    assert metrics(tmp_path / "told") == metrics(tmp_path / "silent")
    assert equal_weights(tmp_path / "told", tmp_path / "silent")


# What is trained.


@pytest.mark.parametrize("model", ["disentangled", "drope"])
@pytest.mark.parametrize("train_only", ["attention", "position", "all", None])
def test_only_what_is_asked_for_moves(train_only, model, place, tmp_path):
    folder = getattr(place, model)
    run(place, tmp_path / "out", folder, train_only=train_only, max_steps=3, learning_rate=1e-2)
    changed, everything = moved(folder, tmp_path / "out"), set(weights(folder))
    position = {name for name in everything if "position_bias" in name}
    attention = {name for name in everything if "self_attn" in name}
    expected = {"position": position, "attention": attention, None: attention, "all": everything}[train_only]
    # A gate that has no effect on so small a model may stay.
    assert changed <= expected
    assert changed & position
    assert expected - position <= changed


# Distillation.


TEACHINGS: dict[str, dict[str, Any]] = {
    "source": {"source": "source"},
    "self": {"lora_rank": 2},
    "source and adapters": {"source": "source", "lora_rank": 2},
    "predictions": {"source": "predictions"},
    "top k": {"source": "source", "distill_top_k": 4, "distill_temperature": 2.0, "distill_hidden": 0.1},
}


def teaching_of(name: str, place: Place) -> dict[str, Any]:
    given = dict(TEACHINGS[name])
    if "source" in given:
        given["source"] = getattr(place, given["source"])
    return {"distill": 0.5, **given}


@pytest.mark.parametrize("name", TEACHINGS)
def test_distillation_resumes_exactly(name, place, tmp_path):
    given = teaching_of(name, place)
    run(place, tmp_path / "whole", learning_rate=1e-2, **given)
    divergence = metrics(tmp_path / "whole", "distill/kl")
    assert len(divergence) == 6
    assert all(0 < value < 20 for value in divergence)
    shutil.copytree(tmp_path / "whole/checkpoint-4", tmp_path / "part/checkpoint-4")
    run(place, tmp_path / "part", learning_rate=1e-2, resume=True, **given)
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")
    assert metrics(tmp_path / "part", "distill/kl")[-2:] == divergence[-2:]
    assert equal_weights(tmp_path / "part", tmp_path / "whole")
    assert moved(place.disentangled, tmp_path / "whole")


def test_distillation_stopped_between_two_logs_resumes_exactly(place, tmp_path):
    given = {**teaching_of("self", place), "logging_steps": 3, "learning_rate": 1e-2}
    run(place, tmp_path / "whole", **given)
    shutil.copytree(tmp_path / "whole/checkpoint-4", tmp_path / "part/checkpoint-4")
    run(place, tmp_path / "part", resume=True, **given)
    for key in ("loss", "distill/kl"):
        assert metrics(tmp_path / "part", key) == metrics(tmp_path / "whole", key)


def test_every_teacher_says_the_same_of_the_first_step(place, tmp_path):
    """The source in its folder, the model with its adapters off, and the stored predictions are one teacher."""
    first = {}
    for name in ("source", "self", "source and adapters", "predictions"):
        # Dropout would differ with the number of draws before it.
        model = no_dropout(place.disentangled, tmp_path / f"{name} model")
        run(place, tmp_path / name, model, max_steps=1, **teaching_of(name, place))
        (first[name],) = metrics(tmp_path / name, "distill/kl")
    assert first["self"] == pytest.approx(first["source"], rel=1e-4)
    assert first["source and adapters"] == pytest.approx(first["source"], rel=1e-4)
    # k predictions and the rest bound it from below.
    assert 0.1 * first["source"] < first["predictions"] < first["source"]


def no_dropout(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    return copy


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"sequence_length": 4}, "sequence_length is 4, but the run in .* began with 16"),
        ({"distill": 0.5, "source": "src"}, r"distill is \[0.5, 1.0, None, 0.0\], but the run in .* began with 0.0"),
        ({"seed": 1}, "seed is 1, but the run in .* began with 0"),
        ({"text": "other"}, "text is '.*', but the run in .* began with '.*'; resume with that, or begin a new run"),
    ],
)
def test_a_run_is_resumed_as_it_was_begun(changed, sentence, place, tmp_path):
    run(place, tmp_path / "out", save_steps=1)
    texts = [place.text]
    if changed.pop("text", None):
        texts.append(write_words(tmp_path / "other.txt", 100 * LENGTH, seed=3))
    if "source" in changed:
        changed["source"] = place.source
    with pytest.raises(ValueError, match=sentence):
        recalibrate(
            place.disentangled, tmp_path / "out", texts, **{**SMALL, "save_steps": 1, **changed, "resume": True}
        )


def test_a_run_that_was_stopped_before_its_first_checkpoint_can_begin_anew(place, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("metrics.jsonl", "recalibration.json"):
        (tmp_path / "out" / name).write_text("")
    assert run(place, tmp_path / "out")["steps"] == SMALL["max_steps"]


def test_a_tokenizer_without_a_token_to_pad_with_will_do(place, tmp_path):
    shutil.copytree(place.disentangled, tmp_path / "model")
    tokenizer = module.load_tokenizer(place.disentangled)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    assert module.load_tokenizer(tmp_path / "model").pad_token is None
    assert run(place, tmp_path / "out", tmp_path / "model")["steps"] == SMALL["max_steps"]


def test_sequences_are_as_long_as_the_context_at_most_by_default(place, tmp_path):
    context = json.loads((place.disentangled / "config.json").read_text())["max_position_embeddings"]
    plan = recalibrate(place.disentangled, tmp_path / "out", [place.text], dry_run=True)
    assert plan["sequences"] == f"2 of {min(512, context)} tokens a step"


@pytest.mark.parametrize("name", ["source", "self", "predictions"])
def test_accumulated_batches_give_the_same_losses(name, place, tmp_path):
    model = no_dropout(place.disentangled, tmp_path / "model")
    given = teaching_of(name, place)
    for batch, accumulate in ((8, 1), (1, 8)):
        split = {"batch_size": batch, "gradient_accumulation_steps": accumulate, "max_steps": 4}
        summary = run(place, tmp_path / f"{batch}", model, learning_rate=1e-3, **split, **given)
        assert summary["tokens"] == 4 * 8 * LENGTH
    for key in ("loss", "distill/kl"):
        assert metrics(tmp_path / "1", key) == pytest.approx(metrics(tmp_path / "8", key), rel=2e-5)


def test_teachers_that_cannot_teach_are_refused_before_anything_is_written(place, tmp_path):
    write_source(tmp_path / "larger", vocab_size=113)
    write_source(tmp_path / "other", seed=1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "Distillation needs the source as its teacher"),
        ({"source": tmp_path / "larger"}, "vocabulary of 113 tokens and the model one of 97"),
        ({"source": tmp_path / "other"}, r"other is not the source of .*disentangled: its weights are not those that"),
        ({"source": place.gated}, "is a converted checkpoint; the teacher has to be its source"),
        ({"source": tmp_path / "nowhere"}, "nowhere"),
        ({"source": place.source, "distill": 1.5}, r"weight is 1\.5"),
        ({"source": place.source, "distill_temperature": 0.0}, r"temperature is 0\.0"),
        ({"source": place.predictions, "distill_hidden": 1.0}, "hidden_weight is 1.0"),
        ({"source": place.predictions, "distill_top_k": 3}, "top_k is 3"),
    ]
    for settings, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            run(place, tmp_path / "out", **{"distill": 0.5, **settings})
    assert not (tmp_path / "out").exists()


def test_adapters_that_teach_themselves_keep_no_second_copy(place, tmp_path, monkeypatch):
    """Live tensors of the MLPs' shapes, by storage, when a step is done: what is frozen has no gradients or moments."""

    def count() -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
        return len({x.data_ptr() for x in tensors if tuple(x.shape) in ((48, 32), (32, 48))})

    seen: list[int] = []
    end = module._Progress.on_train_end

    def watch(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(count())
        end(self, *args, **kwargs)

    monkeypatch.setattr(module._Progress, "on_train_end", watch)
    counts = {}
    for name in ("none", "self", "source and adapters"):
        before = count()
        run(place, tmp_path / name, max_steps=2, **({"lora_rank": 2} if name == "none" else teaching_of(name, place)))
        counts[name] = seen.pop() - before
    # Two layers of three matrices each.
    assert counts == {"none": 6, "self": 6, "source and adapters": 12}


# The terms of a disentangled bias as a scaffold.


FADE = DroPESchedule(warmup=0, transition=0.5, fade_terms=True)


def test_position_terms_fade_and_leave_no_position_behind(place, tmp_path):
    write_source(tmp_path / "src", num_hidden_layers=1)
    source = convert(tmp_path / "src", tmp_path / "one", "disentangled")
    calibrate_checkpoint(source, tmp_path / "src", [place.text], tokens=128, length=LENGTH, steps=2, progress=False)
    run(place, tmp_path / "whole", source, max_steps=8, save_steps=1, schedule=FADE)
    strengths = metrics(tmp_path / "whole", "drope/terms_scale")
    assert strengths == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]
    assert settings_of(tmp_path / "whole")["position_bias"]["terms_scale"] == 0.0
    ids = random_ids(1, 12)
    odd = torch.arange(12)[None] * 3 + 5
    shuffled = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], dim=1)
    before, after = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (source, tmp_path / "whole"))
    with torch.no_grad():
        # With a mask: without one Transformers takes gaps in position ids for the ends of packed texts.
        mask = torch.ones_like(ids)
        assert torch.equal(after(ids, attention_mask=mask, position_ids=odd).logits, after(ids).logits)
        scale = after(ids).logits[:, -1].abs().max().item()
        assert (after(ids).logits[:, -1] - after(shuffled).logits[:, -1]).abs().max() <= 1e-6 * max(scale, 1)
        assert (before(ids).logits[:, -1] - before(shuffled).logits[:, -1]).abs().max() > 1e-2


def test_faded_terms_are_in_each_checkpoint_and_resume_exactly(place, tmp_path):
    schedule = DroPESchedule(warmup=0, transition=7, fade_terms=True)
    settings: dict[str, Any] = {"max_steps": 8, "schedule": schedule, "learning_rate": 1e-2}
    run(place, tmp_path / "whole", **settings)
    for step in (6, 8):
        saved = settings_of(tmp_path / f"whole/checkpoint-{step}")["position_bias"]["terms_scale"]
        assert saved == schedule.at(step - 1, 8).terms_scale
    shutil.copytree(tmp_path / "whole/checkpoint-6", tmp_path / "part/checkpoint-6")
    run(place, tmp_path / "part", resume=True, **settings)
    for key in ("loss", "drope/terms_scale"):
        assert metrics(tmp_path / "part", key) == metrics(tmp_path / "whole", key)
    assert equal_weights(tmp_path / "part", tmp_path / "whole")
    # A finished run that is resumed is set to its end, not to the stage of its checkpoint.
    run(place, tmp_path / "part", resume=True, **settings)
    assert settings_of(tmp_path / "part")["position_bias"]["terms_scale"] == 0.0


def test_adapters_carry_the_strength_of_the_terms_too(place, tmp_path):
    run(place, tmp_path / "whole", schedule=FADE, lora_rank=2, distill=0.5, learning_rate=1e-2)
    stage = json.loads((tmp_path / "whole/checkpoint-4/drope_parameters.json").read_text())
    assert stage["position_bias"]["terms_scale"] == FADE.at(3, 6).terms_scale
    shutil.copytree(tmp_path / "whole/checkpoint-4", tmp_path / "part/checkpoint-4")
    run(place, tmp_path / "part", schedule=FADE, lora_rank=2, distill=0.5, learning_rate=1e-2, resume=True)
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")
    assert settings_of(tmp_path / "part")["position_bias"]["terms_scale"] == 0.0
    assert equal_weights(tmp_path / "part", tmp_path / "whole")


def test_terms_fall_in_the_transition_alone():
    schedule = DroPESchedule(warmup=2, transition=4, fade_terms=True)
    assert [schedule.at(step, 8).terms_scale for step in range(9)] == [1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    assert schedule.final() == ("finetune", 0.0, 0.1, 0.0)
    assert schedule.at(0, 0).terms_scale == 0.0
    unmoved = DroPESchedule(warmup=2, transition=4)
    assert {unmoved.at(step, 8).terms_scale for step in range(9)} == {None}
    # No transition: gone at once.
    assert DroPESchedule(warmup=2, transition=0, fade_terms=True).at(2, 8).terms_scale == 0.0


@pytest.mark.parametrize("curve", ["linear", "cosine", "exponential", lambda p: 1 - p * p])
def test_every_curve_of_the_terms_falls_all_the_way(curve):
    schedule = DroPESchedule(warmup=0, transition=40, fade_terms=True, terms_curve=curve)
    values = [schedule.at(step, 50).terms_scale for step in range(51)]
    assert values[0] == 1.0
    assert values[40:] == [0.0] * 11
    assert values[39] < 0.1
    assert all(a > b for a, b in pairwise(values[:41]))
    # Its own curve and no other's, which are linear here.
    alike = DroPESchedule(warmup=40, transition=0, rope_curve=curve)
    assert values == [alike.at(step, 50).rope_scale for step in range(51)]
    assert schedule.at(20, 50).temperature == 0.5


def test_a_schedule_with_terms_is_described_stored_and_checked():
    schedule = DroPESchedule(warmup=2, transition=4, fade_terms=True, terms_curve="cosine")
    assert (
        schedule.describe(8)[1]
        == "transition: steps 2 to 6, temperature 1 → 0.1 (linear), position terms 1 → 0 (cosine)"
    )
    assert "terms" not in "".join(DroPESchedule(warmup=2, transition=4).describe(8))
    stored = json.loads(json.dumps(schedule.to_dict()))
    assert (stored["fade_terms"], stored["terms_curve"]) == (True, "cosine")
    assert DroPESchedule.from_dict(stored) == schedule
    # Of an earlier version.
    del stored["fade_terms"], stored["terms_curve"]
    assert DroPESchedule.from_dict(stored) == DroPESchedule(warmup=2, transition=4)
    with pytest.raises(ValueError, match="terms_curve is a callable and cannot be stored"):
        DroPESchedule(terms_curve=lambda p: 1 - p).to_dict()
    with pytest.raises(ValueError, match=r"terms_curve is 'cosin'.*Did you mean 'cosine'"):
        DroPESchedule(terms_curve="cosin")
    with pytest.raises(ValueError, match="terms_curve is 'constant'"):
        DroPESchedule(terms_curve="constant")
    with pytest.raises(ValueError, match="fade_terms is 1"):
        DroPESchedule(fade_terms=1)
    with pytest.raises(ValueError, match=r"terms_curve gives -0\.5 at progress 0\.5"):
        DroPESchedule(warmup=0, transition=2, fade_terms=True, terms_curve=lambda p: -p).at(1, 4)


# A loss that is not finite.


def test_an_absurd_learning_rate_is_one_sentence_and_exit_code_one(place, tmp_path, capsys):
    arguments = ["recalibrate", str(place.disentangled), str(tmp_path / "out"), "--text", str(place.text)]
    arguments += [
        "--max-steps",
        "8",
        "--length",
        str(LENGTH),
        "--save-steps",
        "1",
        "--no-bf16",
        "--learning-rate",
        "1e35",
    ]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    sentence = captured.err.strip().splitlines()[-1]
    assert sentence.startswith("hf-drope recalibrate: ")
    assert "at step" in sentence or "after step" in sentence
    assert "checkpoint" in sentence
    assert "begin anew in another folder with a learning rate below 1e+35" in sentence
    assert "Traceback" not in captured.out + captured.err
    assert not (tmp_path / "out/config.json").exists()


@pytest.fixture
def poisoned(monkeypatch):
    """After step 3 a weight is NaN, so the loss of step 4 is."""
    end = module._Progress.on_step_end

    def poison(self: Any, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        end(self, args, state, control, **kwargs)
        if state.global_step == 3:
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).view(-1)[0] = math.nan

    with monkeypatch.context() as patch:
        patch.setattr(module._Progress, "on_step_end", poison)
        yield patch


@pytest.mark.parametrize("given", [{}, {"distill": 0.5, "lora_rank": 2}])
def test_after_a_loss_that_is_nan_the_last_checkpoint_is_good(given, place, tmp_path, poisoned):
    with pytest.raises(NonFiniteLossError) as error:
        run(place, tmp_path / "out", **given)
    assert "The loss is nan at step 4" in str(error.value)
    assert f"the checkpoints up to {tmp_path / 'out/checkpoint-2'} are kept" in str(error.value)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"metrics.jsonl", "recalibration.json", "checkpoint-2"}
    assert len(metrics(tmp_path / "out")) == 3
    assert all(map(math.isfinite, metrics(tmp_path / "out")))
    if not given:
        assert all(p.isfinite().all() for p in weights(tmp_path / "out/checkpoint-2").values())
    poisoned.undo()
    run(place, tmp_path / "out", resume=True, **given)
    run(place, tmp_path / "whole", **given)
    assert metrics(tmp_path / "out") == metrics(tmp_path / "whole")
    assert equal_weights(tmp_path / "out", tmp_path / "whole")


def test_a_model_that_is_nan_already_stops_at_the_first_step(place, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(place.disentangled)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    shutil.copytree(place.disentangled, tmp_path / "model")
    (tmp_path / "model/model-position.safetensors").unlink(missing_ok=True)
    (tmp_path / "model/model.safetensors.index.json").unlink(missing_ok=True)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(NonFiniteLossError, match=r"The loss is nan at step 1; .*no checkpoint was saved before"):
        run(place, tmp_path / "out", tmp_path / "model")
    assert not list((tmp_path / "out").glob("checkpoint-*"))


# A full disk.


def space_error(kind: type[Exception]) -> Exception:
    if kind is OSError:
        return OSError(errno.ENOSPC, "No space left on device")
    return kind("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("kind", "number", "given"),
    [(OSError, 2, {}), (SafetensorError, 3, {}), (SafetensorError, 2, {"distill": 0.5, "lora_rank": 2})],
)
def test_a_full_disk_costs_the_checkpoint_being_written_and_no_other(kind, number, given, place, tmp_path, monkeypatch):
    run(place, tmp_path / "whole", **given)
    save, seen = Trainer._save_optimizer_and_scheduler, []

    def fail(self: Any, folder: Any) -> None:
        seen.append(folder)
        if len(seen) == number:
            raise space_error(kind)
        save(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_optimizer_and_scheduler", fail)
        with pytest.raises(OSError, match="is full") as error:
            run(place, tmp_path / "out", **given)
    sentence = str(error.value)
    assert f"checkpoint-{2 * number} could not be written and was removed" in sentence
    assert f"{tmp_path / 'out'}/checkpoint-{2 * number - 2} is the last good one" in sentence
    assert "--resume" in sentence
    kept = {f"checkpoint-{step}" for step in range(2, 2 * number, 2)}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"metrics.jsonl", "recalibration.json", *kept}
    run(place, tmp_path / "out", resume=True, **given)
    assert metrics(tmp_path / "out") == metrics(tmp_path / "whole")
    assert equal_weights(tmp_path / "out", tmp_path / "whole")


def test_a_disk_that_is_full_at_the_first_checkpoint_says_there_is_none(place, tmp_path, monkeypatch):
    def fail(self: Any, folder: Any) -> None:
        raise space_error(OSError)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", fail)
    with pytest.raises(OSError, match="checkpoint-2 could not be written and was removed, there is none before it"):
        run(place, tmp_path / "out")


def test_an_error_with_room_on_the_disk_is_not_called_a_full_disk(place, tmp_path, monkeypatch):
    def fail(self: Any, folder: Any) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", fail)
    with pytest.raises(PermissionError, match=r"^no$"):
        run(place, tmp_path / "out")


def test_too_little_room_is_refused_before_training(place, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ValueError, match="has 1000 bytes free, and this run's checkpoints need about"):
        run(place, tmp_path / "out")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []
    # A dry run writes nothing and needs no room.
    assert run(place, tmp_path / "out", dry_run=True)["steps"] == 6


# What is left behind, and what becomes of it.


def test_the_record_and_its_picture_belong_to_the_run_that_wrote_them(place, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(module, "draw_record", draw_record)
    summary = run(place, tmp_path / "first", max_steps=5)
    assert summary["picture"] == str(tmp_path / "first/convergence.png")
    assert (tmp_path / "first/convergence.png").read_bytes().startswith(b"\x89PNG")
    assert len(metrics(tmp_path / "first")) == 5
    assert metrics(tmp_path / "first")[-1] == summary["last_loss"]
    run(place, tmp_path / "second", tmp_path / "first", max_steps=3)
    assert len(metrics(tmp_path / "second")) == 3
    first, second = ((tmp_path / name / "convergence.png").read_bytes() for name in ("first", "second"))
    assert first != second
    assert not list((tmp_path / "second").glob("checkpoint-[45]"))
    # The record of the conversion, calibration included, does go along.
    assert module.is_calibrated(tmp_path / "second")
    assert (tmp_path / "second/special.txt").is_file()


# The command line.


FLAGS: dict[str, tuple[list[str], Any]] = {
    "max_steps": (["--max-steps", "7"], 7),
    "sequence_length": (["--length", "32"], 32),
    "batch_size": (["--batch-size", "3"], 3),
    "gradient_accumulation_steps": (["--accumulate", "5"], 5),
    "learning_rate": (["--learning-rate", "0.5"], 0.5),
    "position_learning_rate": (["--position-learning-rate", "0.25"], 0.25),
    "lora_rank": (["--lora-rank", "8"], 8),
    "distill": (["--distill", "0.75"], 0.75),
    "distill_temperature": (["--distill-temperature", "2.5"], 2.5),
    "distill_top_k": (["--distill-top-k", "9"], 9),
    "distill_hidden": (["--distill-hidden", "0.125"], 0.125),
    "source": (["--source", "SRC"], "SRC"),
    "position_prediction": (["--position-prediction", "0.3"], 0.3),
    "train_only": (["--train", "all"], "all"),
    "save_steps": (["--save-steps", "11"], 11),
    "seed": (["--seed", "4"], 4),
    "bf16": (["--bf16"], True),
    "dry_run": (["--dry-run"], True),
    "resume": (["--resume"], True),
}


@pytest.fixture
def received(monkeypatch):
    calls: list[dict[str, Any]] = []

    def take(model: Any, out: Any, texts: Any, **kwargs: Any) -> dict[str, Any]:
        calls.append({"model": model, "out": out, "texts": texts, **kwargs})
        return {"steps": 1}

    monkeypatch.setattr(module, "recalibrate", take)

    def parse(*flags: str) -> dict[str, Any]:
        assert main(["recalibrate", "MODEL", "OUT", *flags, "--text", "a.txt", "b.jsonl"]) == 0
        return calls.pop()

    return parse


def test_every_flag_reaches_its_parameter(received):
    default = received()
    assert (default["model"], default["out"], default["texts"]) == ("MODEL", "OUT", ["a.txt", "b.jsonl"])
    for name, (flags, value) in FLAGS.items():
        given = received(*flags)
        assert given[name] == value != default[name], name
        rest = {key: given[key] for key in given if key not in (name, "announce", "command")}
        assert rest == {key: default[key] for key in rest}, name
    # Nothing given is the function's own default, and this has no flag.
    known = recalibrate.__kwdefaults__ or {}
    assert set(known) - set(FLAGS) == {"schedule", "announce", "command", "logging_steps"}
    assert {name: default[name] for name in FLAGS} == {name: known[name] for name in FLAGS}
    assert default["schedule"] is None


def test_flags_that_stand_for_several_settings(received):
    assert received("--distill")["distill"] == 0.5
    assert received("--position-only")["train_only"] == "position"
    assert received("--position-only", "--train", "position")["train_only"] == "position"
    assert received("--no-bf16")["bf16"] is False
    assert received("--warmup", "3", "--transition", "0.5")["schedule"] == DroPESchedule(warmup=3, transition=0.5)
    assert received("--fade-terms")["schedule"] == DroPESchedule(warmup=0, transition=0.7, fade_terms=True)
    faded = received("--fade-terms", "--transition", "0.4")["schedule"]
    assert faded == DroPESchedule(warmup=0, transition=0.4, fade_terms=True)


def test_two_words_on_what_to_train_are_refused(capsys, received):
    for train in ("all", "attention"):
        assert main(["recalibrate", "M", "O", "--text", "a.txt", "--position-only", "--train", train]) == 2
        assert f"--position-only and --train {train} contradict each other" in capsys.readouterr().err


def test_the_plan_and_the_summary_do_not_mix(place, tmp_path, capsys):
    arguments = ["recalibrate", str(place.disentangled), str(tmp_path / "out"), "--text", str(place.text)]
    arguments += ["--max-steps", "2", "--length", str(LENGTH), "--no-bf16", "--json"]
    assert main([*arguments, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 2
    assert "plan for " in captured.err
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["out"] == str(tmp_path / "out")
    assert main([*arguments[:-1], "--dry-run"]) == 2  # not empty any more
    shutil.rmtree(tmp_path / "out")
    capsys.readouterr()
    assert main([*arguments[:-1], "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan for ")
    assert out.rstrip().endswith("nothing written (dry run)")


# The auxiliary loss.


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_predicting_positions_adds_a_loss_in_its_stages_and_resumes_exactly(lora_rank, place, tmp_path):
    schedule = DroPESchedule(warmup=0, transition=4)
    given: dict[str, Any] = {"position_prediction": 0.5, "schedule": schedule, "lora_rank": lora_rank}
    run(place, tmp_path / "with", place.fresh, **given)
    run(place, tmp_path / "without", place.fresh, **{**given, "position_prediction": 0.0})
    rows = [json.loads(line) for line in (tmp_path / "with/metrics.jsonl").read_text().splitlines()]
    predicted = [row.get("drope/position_loss") for row in rows if "loss" in row]
    assert all(value > 0 for value in predicted[:4])
    assert predicted[4:] == [None, None]
    expected = metrics(tmp_path / "without")[0] + 0.5 * predicted[0]
    assert metrics(tmp_path / "with")[0] == pytest.approx(expected, rel=1e-5)
    shutil.copytree(tmp_path / "with/checkpoint-4", tmp_path / "part/checkpoint-4")
    run(place, tmp_path / "part", place.fresh, resume=True, **given)
    assert metrics(tmp_path / "part") == metrics(tmp_path / "with")
    assert equal_weights(tmp_path / "part", tmp_path / "with")
    assert not (tmp_path / "with/position_prediction.safetensors").exists()


def test_predicting_positions_is_refused_where_there_is_no_stage_for_it(place, tmp_path):
    with pytest.raises(ValueError, match="position_prediction acts in the warm-up and the transition"):
        run(place, tmp_path / "out", max_steps=3, position_prediction=0.5)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_distillation_leaves_the_weight_of_the_position_loss_alone(weight, place, tmp_path):
    given: dict[str, Any] = {"distill": weight, "source": place.source, "max_steps": 1}
    given["schedule"] = DroPESchedule(warmup=0, transition=1)
    run(place, tmp_path / "with", place.fresh, position_prediction=0.5, **given)
    run(place, tmp_path / "without", place.fresh, **given)
    (predicted,) = metrics(tmp_path / "with", "drope/position_loss")
    expected = metrics(tmp_path / "without")[0] + 0.5 * predicted
    assert metrics(tmp_path / "with")[0] == pytest.approx(expected, rel=1e-5)


def test_another_learning_rate_is_used_or_refused_on_resumption(place, tmp_path):
    run(place, tmp_path / "whole", learning_rate=1e-3)
    shutil.copytree(tmp_path / "whole/checkpoint-4", tmp_path / "part/checkpoint-4")
    try:
        run(place, tmp_path / "part", learning_rate=1e-5, resume=True)
    except ValueError as error:
        assert "learning_rate" in str(error)  # noqa: PT017
    else:
        assert max(metrics(tmp_path / "part", "learning_rate")[4:]) <= 1e-5


def test_another_learning_rate_of_the_position_parameters_is_refused_on_resumption(place, tmp_path):
    given: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 2}
    run(place, tmp_path / "out", **given)
    before = contents(tmp_path / "out")
    sentence = (
        r"^position_learning_rate is 0\.001, but .*checkpoint-2 belongs to a run with 0\.01; resume with that, or"
    )
    with pytest.raises(ValueError, match=sentence):
        run(place, tmp_path / "out", resume=True, position_learning_rate=1e-3, **given)
    assert contents(tmp_path / "out") == before
    # Said or not, it is ten times the other.
    run(place, tmp_path / "out", resume=True, position_learning_rate=1e-2, **given)


def test_a_folder_with_incomplete_checkpoints_alone_is_not_resumed(place, tmp_path):
    run(place, tmp_path / "out")
    for state in (tmp_path / "out").glob("checkpoint-*/trainer_state.json"):
        state.unlink()
    with pytest.raises(
        ValueError, match=r"holds no complete checkpoint to resume from; begin anew without --resume\.$"
    ):
        run(place, tmp_path / "out", resume=True)


@pytest.mark.parametrize(
    "given", [{"position_prediction": -1.0}, {"distill": 0.5, "source": "source", "distill_top_k": 1000}]
)
def test_arguments_that_the_trainer_refuses_leave_nothing_behind(given, place, tmp_path):
    given = {**given, **({"source": place.source} if "source" in given else {})}
    with pytest.raises(ValueError, match="it has to be"):
        run(place, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_source_without_distillation_is_refused(place, tmp_path):
    with pytest.raises(ValueError, match="distill"):
        run(place, tmp_path / "out", source=place.source, dry_run=True)


def test_fading_terms_that_a_model_does_not_have_is_refused(place, tmp_path):
    with pytest.raises(ValueError, match="disentangled"):
        run(place, tmp_path / "out", place.gated, schedule=FADE, dry_run=True)


def test_a_picture_of_another_run_is_not_copied(place, tmp_path):
    run(place, tmp_path / "first", max_steps=1)
    (tmp_path / "first/convergence.png").write_bytes(b"picture")
    run(place, tmp_path / "second", tmp_path / "first", max_steps=0)
    assert not (tmp_path / "second/metrics.jsonl").exists()
    assert not (tmp_path / "second/convergence.png").exists()


def test_a_disk_that_is_full_at_the_result_is_one_sentence_too(place, tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise space_error(SafetensorError)

    monkeypatch.setattr(module, "_save", fail)
    with pytest.raises(OSError, match="is full"):
        run(place, tmp_path / "out")

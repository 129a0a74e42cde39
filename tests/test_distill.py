"""Distillation: a converted model as its own source, the divergence, the Trainer, predictions on disk."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import logits
from packaging.version import Version
from tiny import TRAINING, VOCAB, random_ids, scale_up, tiny_model
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_drope import DroPECallback, DroPEParameters, DroPESchedule, apply_drope
from hf_drope.adapters import lora_config
from hf_drope.distill import (
    Distillation,
    DistillationMixin,
    TopKLogits,
    as_source,
    distillation_loss,
    top_k_logits,
)
from hf_drope.training import PositionGroupsMixin, freeze_all_but_position

IDS = random_ids(2, 11, seed=5)
ROWS = [{"input_ids": row, "labels": row} for row in random_ids(16, 10)]
UNCLIPPED: dict[str, Any] = {**TRAINING, "max_steps": 3, "max_grad_norm": 0.0, "save_strategy": "no"}


class Distiller(DistillationMixin, PositionGroupsMixin, Trainer):
    pass


def converted(family: str = "llama", preset: Any = "gated", **overrides: Any) -> Any:
    return apply_drope(tiny_model(family, scale=2.0), preset, **overrides)


def with_adapters(model: Any) -> Any:
    """LoRA and trained copies of what the conversion added, moved away from where they started."""
    from peft import get_peft_model

    torch.manual_seed(3)
    adapted = get_peft_model(model, lora_config(model, 2)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
                assert "lora_B" not in name or parameter.any()
    return adapted


def trainer(
    folder: Path, model: Any, distill: Any = None, rows: Any = ROWS, schedule: Any = None, **overrides: Any
) -> Any:
    return Distiller(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**UNCLIPPED, **overrides}),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[DroPECallback(schedule or DroPESchedule(warmup=0, transition=1))],
        distill=distill,
    )


def train(folder: Path, model: Any, distill: Any = None, rows: Any = ROWS, resume: Any = None, **overrides: Any) -> Any:
    run = trainer(folder, model, distill, rows, **overrides)
    run.train(resume_from_checkpoint=resume)
    return run


def logged(run: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def snapshot(model: Any) -> Any:
    """All that `as_source` may change: attributes of modules, what is trained, modes, settings."""
    plain = (int, float, str, bool, dict, type(None))
    attributes = [
        {name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, plain)}
        for module in model.modules()
    ]
    children = [[(name, id(child)) for name, child in module._modules.items()] for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    return attributes, children, trained, copy.deepcopy(model.config.drope_parameters)


SETTINGS = {
    "llama": DroPEParameters.preset("gated", qk_norm="qk", attention_scale={"factor": 1.5}, window=4, rope_scale=0.4),
    "qwen3": DroPEParameters.preset("drope", rope_layers=[1]),
    "gpt_neox": DroPEParameters.preset("t5", rope_scale=0.5, rope_fade="blend"),
    "gpt2": DroPEParameters.preset("gated", rope_scale=0.5),
}


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", SETTINGS)
def test_a_converted_model_acts_as_its_source_to_the_bit_and_comes_back(family, adapters):
    stock = tiny_model(family, scale=2.0)
    model = apply_drope(copy.deepcopy(stock), SETTINGS[family])
    scale_up(nn.ModuleList(model.position_biases()), 3.0)
    if adapters:
        model = with_adapters(model)
    before, state = logits(model, IDS), snapshot(model)
    assert not torch.allclose(before, logits(stock, IDS), atol=1e-3)
    with as_source(model):
        assert torch.equal(logits(model, IDS), logits(stock, IDS))
        assert model.config.drope_parameters == state[-1]
    assert torch.equal(logits(model, IDS), before)
    assert snapshot(model) == state


def test_an_error_in_the_block_leaves_the_model_as_it_was():
    model = with_adapters(converted(qk_norm="q", window=3, rope_scale=0.25))
    # Frozen adapters must not wake up.
    freeze_all_but_position(model)
    before, state = logits(model, IDS), snapshot(model)
    with pytest.raises(RuntimeError, match="on purpose"), as_source(model):
        raise RuntimeError("on purpose")
    assert snapshot(model) == state
    assert torch.equal(logits(model, IDS), before)


def test_a_rotation_that_was_put_off_is_not_put_off_in_the_source():
    stock = tiny_model("llama")
    model = apply_drope(copy.deepcopy(stock), "nope")
    rotary = model.base_model.rotary_emb
    rotary.deferred = True
    with as_source(model):
        assert rotary.deferred is False
    assert rotary.deferred is True


def test_a_graph_from_before_survives_the_block():
    model = converted("gpt2", rope_scale=0.5).train()
    loss = model(IDS, labels=IDS).loss
    with as_source(model), torch.no_grad():
        model(IDS)
    loss.backward()
    assert model.transformer.wpe.weight.grad.any()


def test_models_that_cannot_act_as_their_source_say_why():
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a converted model"), as_source(tiny_model("llama")):
        pass
    removed = converted("gpt2", rope_scale=0.0)
    with pytest.raises(ValueError, match="give a copy of the source as the teacher"), as_source(removed):
        pass
    adapted = with_adapters(converted())
    state = snapshot(adapted)
    with pytest.raises(ValueError, match="give the PeftModel around it"), as_source(adapted.get_base_model()):
        pass
    assert snapshot(adapted) == state
    adapted.merge_adapter()
    with pytest.raises(ValueError, match="unmerge them first"), as_source(adapted):
        pass


def reference(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, t: float, k: int | None = None
) -> float:
    """Token by token in float64, from full softmaxes."""
    values = []
    for row in range(len(labels)):
        for position in range(labels.shape[1] - 1):
            if labels[row, position + 1] == -100:
                continue
            p, q = (x[row, position].double() for x in (teacher, student))
            if k is None:
                p, q = (p / t).softmax(-1), (q / t).softmax(-1)
            else:
                top = teacher[row, position].argsort(descending=True)[:k]
                others = torch.ones(len(p), dtype=torch.bool)
                others[top] = False
                p, q = (torch.cat([x.softmax(-1)[top], x.softmax(-1)[others].sum()[None]]) for x in (p, q))
                p, q = (x ** (1 / t) / (x ** (1 / t)).sum() for x in (p, q))
            values.append((p * (p / q).log()).sum())
    return float(torch.stack(values).mean())


def random_logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(3, 9, 41, generator=torch.Generator().manual_seed(seed))


def masked_labels() -> torch.Tensor:
    labels = torch.arange(27).view(3, 9)
    labels[0, :4] = labels[1, 6:] = labels[2, 3] = -100
    return labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("k", [None, 1, 5, 40])
def test_the_loss_is_the_divergence_from_full_softmaxes_in_float64(k, temperature):
    student, teacher, labels = random_logits(1), random_logits(2), masked_labels()
    given = teacher if k is None else top_k_logits(teacher, k)
    loss = distillation_loss(student, given, labels, temperature)
    assert float(loss) == pytest.approx(reference(student, teacher, labels, temperature, k), rel=1e-5)
    # Log-probabilities do as well as logits.
    if k is None:
        again = distillation_loss(student, teacher.log_softmax(-1), labels, temperature)
        assert float(again) == pytest.approx(float(loss), rel=1e-5)


def test_the_top_k_loss_grows_with_k_up_to_the_full_one():
    student, teacher, labels = random_logits(1), random_logits(2), masked_labels()
    full = float(distillation_loss(student, teacher, labels))
    cut = [float(distillation_loss(student, top_k_logits(teacher, k), labels)) for k in (1, 2, 4, 8, 16, 32, 40, 41)]
    assert all(a < b for a, b in itertools.pairwise(cut[:-1]))
    assert cut[0] < 0.9 * full
    assert cut[-1] == pytest.approx(full, rel=1e-6)
    # With nothing left over the sum of the others may not add to it, whatever the temperature.
    hot = float(distillation_loss(student, teacher, labels, 8.0))
    assert float(distillation_loss(student, top_k_logits(teacher, 41), labels, 8.0)) == pytest.approx(hot, rel=1e-5)


def test_the_k_predictions_and_the_rest_are_the_whole_distribution():
    # Far from zero, as GPT-2's are, and very sure of itself.
    teacher = random_logits(2, 8.0) - 130
    top = top_k_logits(teacher, 6)
    assert torch.equal(top.indices, teacher.topk(6).indices)
    expected = teacher.double().log_softmax(-1)
    torch.testing.assert_close(top.values.double(), expected.topk(6).values, atol=2e-5, rtol=1e-5)
    smallest = expected.sort(descending=True).values[..., 6:]
    torch.testing.assert_close(top.rest.double(), smallest.logsumexp(-1), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [None, 5, 41])
def test_chunks_change_neither_loss_nor_gradient_and_masked_tokens_have_none(k):
    teacher, labels = random_logits(2), masked_labels()
    given = teacher if k is None else top_k_logits(teacher, k)
    results = []
    for chunk in (1000, 27, 4, 1):
        student = random_logits(1).requires_grad_()
        loss = distillation_loss(student, given, labels, 2.0, chunk=chunk)
        loss.backward()
        results.append((loss.detach(), student.grad))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0], atol=0, rtol=1e-6)
        torch.testing.assert_close(gradient, results[0][1], atol=1e-9, rtol=1e-5)
    counts = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] != -100
    assert torch.equal(results[0][1].abs().sum(-1) > 0, counts)
    if k is None:
        p, q = (random_logits(seed).double().div(2.0).softmax(-1) for seed in (2, 1))
        expected = torch.where(counts[..., None], (q - p) / 2.0, 0.0) / counts.sum()
        torch.testing.assert_close(results[0][1].double(), expected, atol=1e-8, rtol=1e-4)


def test_the_loss_divides_by_the_items_it_is_given_and_is_finite_at_the_edges():
    student, teacher, labels = random_logits(1), random_logits(2), masked_labels()
    alone = distillation_loss(student, teacher, labels)
    count = int((labels[:, 1:] != -100).sum())
    for items in (100, torch.tensor(100)):
        given = distillation_loss(student, teacher, labels, num_items_in_batch=items)
        assert float(given) == pytest.approx(float(alone) * count / 100, rel=1e-6)
    assert float(distillation_loss(student, teacher, torch.full_like(labels, -100))) == 0.0
    # A token that neither may say, a token of which both are sure, and half precision.
    edge = random_logits(1)
    edge[..., 3], edge[..., 4] = -torch.inf, 300.0
    for target in (edge, top_k_logits(edge, 2), top_k_logits(edge, 41)):
        start = edge.clone().requires_grad_()
        loss = distillation_loss(start, target, labels)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
        assert start.grad.isfinite().all()
    half = distillation_loss(student.bfloat16(), teacher.bfloat16(), labels)
    assert half.dtype == torch.float32
    assert float(half) == pytest.approx(float(alone), rel=0.02)
    with pytest.raises(ValueError, match="vocabulary is 41 and the teacher's 40"):
        distillation_loss(student, teacher[..., :40], labels)


def ragged_rows() -> list[dict[str, torch.Tensor]]:
    """As many tokens that count in no row as in another."""
    rows = []
    for number, ids in enumerate(random_ids(8, 10, seed=2)):
        labels = ids.clone()
        labels[: 1 + number] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


# In older releases the Trainer adds up the smoothed losses of a step's batches, without distillation as well.
SMOOTHING = [] if Version(transformers.__version__) < Version("5.24") else [(0.1, 0.0)]


@pytest.mark.parametrize(("smoothing", "hidden"), [(0.0, 0.0), *SMOOTHING, (0.0, 0.5)])
def test_one_batch_of_eight_equals_eight_batches_of_one(smoothing, hidden, tmp_path):
    teacher = tiny_model("llama", seed=1, scale=2.0)
    runs = []
    for split in ((8, 1), (1, 8)):
        overrides = {"per_device_train_batch_size": split[0], "gradient_accumulation_steps": split[1]}
        overrides |= {"optim": "sgd", "learning_rate": 0.1, "label_smoothing_factor": smoothing, "max_steps": 2}
        distill = Distillation(teacher, temperature=2.0, weight=0.7, hidden_weight=hidden)
        runs.append(train(tmp_path, converted(), distill, ragged_rows(), **overrides))
    one, eight = runs
    assert logged(one) == pytest.approx(logged(eight), rel=1e-5)
    assert logged(one, "distill/kl") == pytest.approx(logged(eight, "distill/kl"), rel=1e-5)
    before, after = weights(converted()), weights(eight.model)
    for name, weight in weights(one.model).items():
        torch.testing.assert_close(weight, after[name], atol=1e-6, rtol=1e-5)
    assert any(not torch.allclose(before[name], after[name], atol=1e-4) for name in before)


def test_the_logged_loss_is_the_weighted_sum_and_the_teacher_is_untouched(tmp_path):
    teacher = tiny_model("llama", seed=1, scale=2.0, attention_dropout=0.3).train()
    before = weights(teacher)
    model = converted()
    plain = copy.deepcopy(model)
    settings = {"max_steps": 1, "per_device_train_batch_size": 8}
    run = train(tmp_path, model, Distillation(teacher, temperature=2.0, weight=0.25), ragged_rows(), **settings)
    ids, labels = (torch.stack([row[name] for row in ragged_rows()]) for name in ("input_ids", "labels"))
    expected = reference(logits(plain, ids), logits(teacher, ids), labels, 2.0)
    with torch.no_grad():
        ordinary = float(plain(ids, labels=labels).loss)
    assert logged(run, "distill/kl") == [pytest.approx(expected, rel=1e-4)]
    assert logged(run) == [pytest.approx(0.75 * ordinary + 0.25 * 4.0 * expected, rel=1e-4)]
    assert all(
        not p.requires_grad and p.grad is None and torch.equal(p, before[n]) for n, p in teacher.named_parameters()
    )
    assert not teacher.training
    assert "drope/stage" in run.state.log_history[0]


def test_without_distillation_and_in_evaluation_the_loss_is_the_ordinary_one(tmp_path):
    class Plain(PositionGroupsMixin, Trainer):
        pass

    plain = Plain(
        model=converted(),
        args=TrainingArguments(output_dir=str(tmp_path), **UNCLIPPED),
        train_dataset=ROWS,
        callbacks=[DroPECallback(DroPESchedule(warmup=0, transition=1))],
    )
    plain.train()
    run = train(tmp_path, converted())
    assert logged(run) == logged(plain)
    assert not logged(run, "distill/kl")
    teacher = tiny_model("llama", seed=1, scale=2.0)
    distilled = trainer(tmp_path, converted(), Distillation(teacher)).evaluate()
    assert distilled["eval_loss"] == trainer(tmp_path, converted()).evaluate()["eval_loss"]


@pytest.mark.parametrize("top_k", [None, 8])
def test_a_model_with_adapters_teaches_itself_as_a_copy_of_its_source_would(top_k, tmp_path):
    stock = tiny_model("llama", scale=2.0, attention_dropout=0.2)
    losses = []
    for teacher in ("self", copy.deepcopy(stock)):
        torch.manual_seed(0)
        model = with_adapters(apply_drope(copy.deepcopy(stock), "gated", qk_norm="qk", rope_scale=1.0))
        distill = Distillation(teacher, weight=0.8, top_k=top_k, hidden_weight=0.3)
        run = train(tmp_path, model, distill, schedule=DroPESchedule(warmup=2, transition=1))
        losses.append((logged(run), logged(run, "distill/kl")))
        assert model.config.drope_parameters["rope_scale"] == 0.0
    assert losses[0] == losses[1]
    assert min(losses[0][1]) > 1e-3


def test_position_only_training_may_teach_itself_and_learns(tmp_path):
    stock = tiny_model("llama", scale=2.0)
    model = apply_drope(copy.deepcopy(stock), "drope")
    freeze_all_but_position(model)
    settings = {
        "max_steps": 12,
        "learning_rate": 3e-2,
        "per_device_train_batch_size": 16,
        "lr_scheduler_type": "constant",
    }
    run = train(tmp_path, model, Distillation("self", weight=1.0), **settings)
    divergences = logged(run, "distill/kl")
    assert divergences[-1] < 0.9 * divergences[1]
    with as_source(model):
        assert torch.equal(logits(model, IDS), logits(stock, IDS))


def test_the_hidden_error_is_relative_to_the_teachers_output_token_by_token(tmp_path):
    teacher = tiny_model("llama", seed=1, scale=2.0)
    model = converted(window=3)
    ids, labels = (torch.stack([row[name] for row in ragged_rows()]) for name in ("input_ids", "labels"))
    caught: dict[int, list[torch.Tensor]] = {}
    for which, source in enumerate((model, teacher)):
        hooks = [
            layer.self_attn.register_forward_hook(lambda m, a, out, w=which: caught.setdefault(w, []).append(out[0]))
            for layer in source.model.layers
        ]
        logits(source, ids)
        [hook.remove() for hook in hooks]
    counts = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] != -100
    expected = [(((a - b) ** 2).sum(-1) / (b**2).sum(-1))[counts].mean() for a, b in zip(*caught.values(), strict=True)]
    runs = [
        train(tmp_path, copy.deepcopy(model), Distillation(teacher, hidden_weight=w), ragged_rows(), max_steps=1,
              per_device_train_batch_size=8)
        for w in (0.0, 0.5)
    ]  # fmt: skip
    added = logged(runs[1])[0] - logged(runs[0])[0]
    assert added == pytest.approx(0.5 * float(torch.stack(expected).mean()), rel=1e-3)
    first, second = (weights(run.model)["model.layers.0.self_attn.o_proj.weight"] for run in runs)
    assert not torch.equal(first, second)


def test_a_run_that_resumes_equals_the_uninterrupted_one(tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    schedule = DroPESchedule(warmup=3, transition=2)

    def fresh() -> Any:
        return with_adapters(converted(rope_scale=1.0))

    distill = Distillation("self", top_k=6)
    whole = train(tmp_path / "whole", fresh(), distill, schedule=schedule, **settings)
    shutil.copytree(tmp_path / "whole/checkpoint-2", tmp_path / "part/checkpoint-2")
    resumed = train(tmp_path / "part", fresh(), distill, resume=True, schedule=schedule, **settings)
    assert logged(resumed) == logged(whole)
    assert logged(resumed, "distill/kl") == logged(whole, "distill/kl")
    assert len(logged(whole, "distill/kl")) == 6
    for (name, a), b in zip(weights(whole.model).items(), weights(resumed.model).values(), strict=True):
        assert torch.equal(a, b), name


def test_predictions_on_disk_give_the_loss_of_the_teacher_that_made_them(tmp_path):
    teacher = tiny_model("llama", seed=1, scale=2.0, attention_dropout=0.3).train()
    stored = TopKLogits.write(tmp_path / "teacher", teacher, ROWS, top_k=7, batch_size=3)
    assert teacher.training
    assert (stored.vocab_size, stored.top_k, stored.length, stored.count) == (VOCAB, 7, 10, 16)
    assert {path.name for path in tmp_path.iterdir()} == {"teacher"}
    teacher.eval()
    ids = torch.stack([ROWS[number]["input_ids"] for number in (11, 2, 15, 2)])
    found, expected = TopKLogits(tmp_path / "teacher").lookup(ids), top_k_logits(logits(teacher, ids), 7)
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.values, expected.values, atol=0, rtol=1e-3)
    torch.testing.assert_close(found.rest, expected.rest, atol=1e-5, rtol=1e-5)
    assert (found.values.dtype, found.indices.dtype, found.rest.dtype) == (torch.float32, torch.int64, torch.float32)
    # The Trainer shuffles.
    online, offline = (
        train(tmp_path / "run", converted(), Distillation(source, top_k=7, temperature=2.0))
        for source in (teacher, TopKLogits(tmp_path / "teacher"))
    )
    assert logged(offline) == pytest.approx(logged(online), rel=1e-3)
    assert logged(offline, "distill/kl") == pytest.approx(logged(online, "distill/kl"), rel=1e-3)


def test_the_whole_vocabulary_on_disk_is_the_full_loss(tmp_path):
    teacher, student = tiny_model("gpt2", seed=1, scale=2.0), tiny_model("gpt2", scale=2.0)
    stored = TopKLogits.write(tmp_path / "teacher", teacher, ROWS[:2], top_k=VOCAB)
    ids = torch.stack([row["input_ids"] for row in ROWS[:2]])
    full = distillation_loss(logits(student, ids), logits(teacher, ids), ids)
    assert float(distillation_loss(logits(student, ids), stored.lookup(ids), ids)) == pytest.approx(
        float(full), rel=1e-3
    )


def test_unknown_rows_and_damaged_folders_are_refused(tmp_path):
    teacher = tiny_model("llama")
    folder = tmp_path / "teacher"
    stored = TopKLogits.write(folder, teacher, ROWS[:3], top_k=2)
    changed = ROWS[0]["input_ids"].clone()
    changed[4] += 1
    with pytest.raises(ValueError, match="Sequence 1 of the batch is not in"):
        stored.lookup(torch.stack([ROWS[0]["input_ids"], changed]))
    with pytest.raises(ValueError, match=r"has 9 tokens, but those in .* have 10"):
        stored.lookup(changed[None, :9])
    with pytest.raises(ValueError, match="is not empty"):
        TopKLogits.write(folder, teacher, ROWS, top_k=2)
    settings = json.loads((folder / "top_k_logits.json").read_text())
    for damage in (json.dumps({**settings, "count": 4}), json.dumps([]), "{", json.dumps({**settings, "top_k": None})):
        (folder / "top_k_logits.json").write_text(damage)
        with pytest.raises(ValueError, match="holds no complete top-k logits"):
            TopKLogits(folder)
    (folder / "top_k_logits.json").write_text(json.dumps(settings))
    (folder / "rest.npy").write_bytes((folder / "rest.npy").read_bytes()[:100])
    (folder / "keys.npy").write_bytes(b"")
    for path in (folder, tmp_path / "missing"):
        with pytest.raises(ValueError, match="holds no complete top-k logits"):
            TopKLogits(path)


def test_a_folder_that_is_not_finished_is_not_there(tmp_path):
    teacher = tiny_model("llama")
    cases = [
        ({"dataset": [*ROWS[:3], {"input_ids": IDS[0]}]}, "have to have 10 tokens"),
        ({"dataset": []}, "dataset is empty"),
        ({"top_k": 98}, "top_k is 98; it has to be from 1 to 97"),
        ({"batch_size": 0}, "batch_size is 0"),
    ]
    for settings, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            TopKLogits.write(tmp_path / "teacher", teacher, **{"dataset": ROWS, "batch_size": 2, **settings})
        assert not list(tmp_path.iterdir())


def test_wrong_settings_are_refused_in_one_sentence(tmp_path):
    stored = TopKLogits.write(tmp_path / "teacher", tiny_model("llama"), ROWS[:2], top_k=2)
    cases = [
        ({"teacher": "itself"}, "teacher is 'itself'; it has to be 'self', a Transformers model or a TopKLogits"),
        ({"teacher": 3}, "teacher is of type int"),
        ({"temperature": 0.0}, "temperature is 0.0; it has to be a number above 0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"weight": 1.5}, "weight is 1.5; it has to be a number from 0.0 to 1.0"),
        ({"weight": "half"}, "weight is 'half'"),
        ({"weight": None}, "weight is None"),
        ({"hidden_weight": -1.0}, "hidden_weight is -1.0; it has to be a number of at least 0"),
        ({"top_k": 0}, "top_k is 0; it has to be a whole number of at least 1, or None"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"teacher": stored, "top_k": 3}, "top_k is 3; it has to be None or 2"),
        ({"teacher": stored, "hidden_weight": 0.1}, "hidden_weight is 0.1; it has to be 0 with a TopKLogits"),
    ]
    for settings, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            Distillation(**settings)
    assert Distillation(stored, top_k=2).weight == 0.5


def test_pairs_that_do_not_fit_are_refused_at_construction(tmp_path):
    stored = TopKLogits.write(tmp_path / "teacher", tiny_model("llama", vocab_size=120), ROWS[:2], top_k=2)
    full, student = converted(), converted()
    cases = [
        (full, Distillation("self"), "give the source model as the teacher, or train with LoRA"),
        (full, Distillation(tiny_model("llama", vocab_size=120)), "vocabulary is 97 and the teacher's 120"),
        (full, Distillation(stored), "vocabulary is 97 and the teacher's 120"),
        (full, Distillation(full), "weights in common"),
        (full, Distillation(tiny_model("llama"), top_k=98), "top_k is 98; it has to be at most 97"),
        (full, Distillation(tiny_model("llama", num_hidden_layers=3), hidden_weight=1.0), "as many layers"),
        (full, Distillation(tiny_model("llama", hidden_size=64), hidden_weight=1.0), "as many layers"),
        (converted("gpt2"), Distillation("self"), "position table was removed"),
        (with_adapters(student), Distillation(student), "weights in common"),
        (tiny_model("llama"), Distillation("self"), "is not a converted model"),
    ]
    for model, distill, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            trainer(tmp_path / "run", model, distill)
    assert all(parameter.requires_grad for parameter in full.parameters())
    trainer(tmp_path / "run", full, Distillation(tiny_model("llama", num_hidden_layers=3)))


def test_adapters_that_train_weights_of_the_source_may_not_teach_themselves(tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapted(**settings: Any) -> Any:
        return get_peft_model(converted(), LoraConfig(r=2, target_modules=["q_proj"], **settings))

    trainer(tmp_path, adapted(modules_to_save=["lm_head"]), Distillation("self"))
    model = adapted()
    model.get_base_model().model.embed_tokens.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"such as .*embed_tokens"):
        trainer(tmp_path, model, Distillation("self"))

"""Beside other libraries' training code: TRL with packing, LoRA from training to serving, Liger's patches of stock modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama as stock
from checkpoints import logits, tiny_tokenizer, write_source
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import TRAINING, random_ids, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, TrainingArguments

from hf_drope import (
    DroPECallback,
    DroPEParameters,
    DroPESchedule,
    DroPETrainer,
    apply_drope,
    convert_checkpoint,
    lora_config,
    plan_conversion,
)
from hf_drope.adapters import attention_projections
from hf_drope.export import export_checkpoint, plan_export
from hf_drope.training import PositionGroupsMixin, freeze_all_but_position, position_parameters

PRESETS = ["nope", "simple", "drope", "disentangled"]
BACKENDS = ["eager", "sdpa"]
# Tokens of documents; one of them is a single token.
LENGTHS = [5, 1, 7, 3, 1, 6, 4, 9]


def documents() -> list[list[int]]:
    return [random_ids(1, length, seed=index)[0].tolist() for index, length in enumerate(LENGTHS)]


def sft(folder: Path, model: Any, **overrides: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    class DroPESFTTrainer(PositionGroupsMixin, trl.SFTTrainer):
        pass

    peft = {name: overrides.pop(name) for name in ("peft_config", "callbacks") if name in overrides}
    settings = {**TRAINING, "max_steps": 3, "max_length": 12, "bf16": False, "save_strategy": "no", **overrides}
    return DroPESFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(folder), **settings),
        train_dataset=datasets.Dataset.from_list([{"input_ids": document} for document in documents()]),
        processing_class=tiny_tokenizer(),
        **peft,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_documents_packed_by_trl_learn_as_if_each_were_alone(preset, backend, tmp_path):
    """https://github.com/huggingface/transformers/pull/46634 and https://github.com/huggingface/nanoVLM/pull/204"""
    model = apply_drope(tiny_model("llama", scale=2.0, attn_implementation=backend), preset)
    alone = copy.deepcopy(model)
    trainer = sft(tmp_path, model, packing=True, per_device_train_batch_size=2)
    batch = next(iter(trainer.get_train_dataloader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert "attention_mask" not in batch
    assert len(starts) > 2
    trainer.compute_loss(model.train(), dict(batch)).backward()
    packed = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ends = [*starts[1:], batch["input_ids"].shape[1]]
    pieces = [batch["input_ids"][:, start:end] for start, end in zip(starts, ends, strict=True)]
    count = sum(piece.shape[1] - 1 for piece in pieces)
    for piece in pieces:
        if piece.shape[1] > 1:
            output = alone.train()(piece, use_cache=False).logits[0, :-1]
            (nn.functional.cross_entropy(output, piece[0, 1:], reduction="sum") / count).backward()
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(packed[name], parameter.grad, atol=2e-5, rtol=1e-4, msg=name)
    # A change in the first document of the row reaches no other.
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    changed = {**given, "input_ids": given["input_ids"].clone()}
    changed["input_ids"][0, 0] = 3 + (changed["input_ids"][0, 0] + 1) % 90
    with torch.no_grad():
        before, after = (model.eval()(**inputs, use_cache=False).logits for inputs in (given, changed))
    assert not torch.equal(before[:, : starts[1]], after[:, : starts[1]])
    assert torch.equal(before[:, starts[1] :], after[:, starts[1] :])


@pytest.mark.parametrize("packing", [False, True])
def test_a_staged_run_of_trl_learns_the_same_whether_it_packs_or_not(packing, tmp_path):
    model = apply_drope(tiny_model("llama", scale=2.0), "drope", rope_scale=1.0)
    run = sft(
        tmp_path,
        model,
        packing=packing,
        max_steps=4,
        gradient_checkpointing=packing,
        callbacks=[DroPECallback(DroPESchedule(warmup=2, transition=1))],
    )
    before = [p.detach().clone() for _, p in position_parameters(model)]
    run.train()
    rows = [entry for entry in run.state.log_history if "loss" in entry]
    assert [row["drope/rope_scale"] for row in rows] == [1.0, 0.5, 0.0, 0.0]
    assert all(not torch.equal(p, old) for (_, p), old in zip(position_parameters(model), before, strict=True))


def test_lora_is_trained_saved_reloaded_merged_and_generates(tmp_path):
    """https://github.com/huggingface/peft/issues/2099"""
    write_source(tmp_path / "src")
    converted = convert_checkpoint(plan_conversion(tmp_path / "src", "gated"), tmp_path / "converted", progress=False)
    base = AutoModelForCausalLM.from_pretrained(converted)
    bare = {name: p.detach().clone() for name, p in position_parameters(base)}
    run = sft(
        tmp_path / "run", base, packing=True, learning_rate=1e-2, peft_config=lora_config(base, 2, lora_dropout=0.1)
    )
    run.train()
    trained = logits(run.model.eval(), random_ids(1, 9))
    run.save_model(str(tmp_path / "adapter"))
    # A fresh base, with nothing but what was saved.
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(converted), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(reloaded, random_ids(1, 9)), trained, atol=1e-5, rtol=1e-5)
    merged = reloaded.merge_and_unload().eval()
    assert not any("lora" in name or "modules_to_save" in name for name in merged.state_dict())
    assert all(not torch.equal(p, bare[name]) for name, p in position_parameters(merged))
    torch.testing.assert_close(logits(merged, random_ids(1, 9)), trained, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    tiny_tokenizer().save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(logits(again, random_ids(1, 9)), logits(merged, random_ids(1, 9)))
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "merged")("w3 w4 w5")["input_ids"]])
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    out, uncached = (again.generate(ids, use_cache=cached, **settings) for cached in (True, False))
    assert torch.equal(out, uncached)
    # It is converted: only its source can be converted anew.
    with pytest.raises(ValueError, match="converted already"):
        plan_conversion(tmp_path / "merged", "nope")


def test_a_merged_model_without_positions_is_exported_to_a_stock_one(tmp_path):
    write_source(tmp_path / "src")
    convert_checkpoint(plan_conversion(tmp_path / "src", "nope"), tmp_path / "converted", progress=False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    adapted = get_peft_model(base, lora_config(base, 2, init_lora_weights=False))
    merged = adapted.merge_and_unload().eval()
    assert not torch.equal(
        logits(merged, random_ids(1, 9)),
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval(), random_ids(1, 9)),
    )
    merged.save_pretrained(tmp_path / "merged")
    export_checkpoint(plan_export(tmp_path / "merged"), tmp_path / "stock", progress=False)
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert torch.equal(logits(plain, random_ids(1, 9)), logits(merged, random_ids(1, 9)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_of_a_stock_model_are_merged_and_then_converted(family, tmp_path):
    source = tiny_model(family)
    names = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}
    settings = {"target_modules": names[family], "init_lora_weights": False, "fan_in_fan_out": family == "gpt2"}
    adapted = get_peft_model(source, LoraConfig(r=2, **settings)).eval()
    expected = logits(adapted, random_ids(1, 9))
    with pytest.raises(ValueError, match="unwrap it first"):
        apply_drope(adapted, "gated")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    in_memory = apply_drope(merged, "nope", rope_scale=1.0)
    torch.testing.assert_close(logits(in_memory, random_ids(1, 9)), expected, atol=1e-4, rtol=1e-4)
    plan = plan_conversion(tmp_path / "merged", "nope", overrides={"rope_scale": 1.0})
    convert_checkpoint(plan, tmp_path / "converted", progress=False)
    from_folder = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    assert torch.equal(logits(from_folder, random_ids(1, 9)), logits(in_memory, random_ids(1, 9)))


def test_the_lora_config_takes_what_peft_takes_and_adds_to_what_is_saved():
    model = apply_drope(tiny_model("llama"), "simple", gate={"type": "query"}, qk_norm="qk")
    config = lora_config(model, 4, lora_dropout=0.1, use_dora=True, modules_to_save=["lm_head"])
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_dora) == (4, 8, 0.1, True)
    assert set(config.modules_to_save) == {"lm_head", "position_bias", "qk_norm"}
    assert lora_config(model, lora_alpha=3).lora_alpha == 3
    assert lora_config(model).r == 16
    assert lora_config(apply_drope(tiny_model("llama"), "nope")).modules_to_save is None
    every = get_peft_model(model, lora_config(model, 2, target_modules="all-linear"))
    trained = {name for name, p in every.named_parameters() if p.requires_grad}
    # Never both: what is trained in full gets no adapter.
    assert not any("position_bias" in name and "lora_" in name for name in trained)
    assert any("mlp" in name for name in trained)
    for kind, task in (
        ("ForSequenceClassification", "SEQ_CLS"),
        ("ForTokenClassification", "TOKEN_CLS"),
        ("Model", None),
    ):
        assert lora_config(apply_drope(tiny_model("qwen2", kind=kind), "simple")).task_type == task


def test_the_lora_config_refuses_in_one_sentence_what_it_cannot_do(monkeypatch):
    model = apply_drope(tiny_model("llama"), "simple")
    for given in ({"rank": 0}, {"r": 4}):
        with pytest.raises(ValueError, match="give it as rank"):
            lora_config(model, **given)
    with pytest.raises(ValueError, match="not a converted model"):
        lora_config(tiny_model("llama"))
    monkeypatch.setattr("hf_drope.adapters.attention_projections", lambda _: {})
    with pytest.raises(ValueError, match="name what to adapt in target_modules"):
        lora_config(model)
    assert lora_config(model, target_modules=["up_proj"]).target_modules == {"up_proj"}


@pytest.mark.parametrize("model_type", ["gpt_neox", "phi3", "deepseek_v3", "mixtral", "gemma3_text"])
def test_projections_are_found_on_the_model_whatever_they_are_called(model_type):
    from model_types import small_model

    settings = DroPEParameters(position_bias={"type": "table", "max_distance": 8}, gate={"type": "query"})
    model = apply_drope(small_model(model_type), settings)
    found = attention_projections(model)
    layers = {name.rpartition(".")[0] for name in found}
    attentions = {name for name, module in model.named_modules() if hasattr(type(module), "needs_position")}
    assert layers == attentions
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(name.startswith(f"{layer}.") for layer in layers)
    }
    assert set(found) == {name for name in linear if "position_bias" not in name}
    adapted = get_peft_model(model, lora_config(model, 2))
    adapted(random_ids(1, 9), labels=random_ids(1, 9)).loss.backward()
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert sum("position_bias" in name for name in trained) == len(list(position_parameters(adapted)))


def liger_like() -> dict[tuple[Any, str], Any]:
    """What Liger's patches of Llama replace in the process, with stand-ins that compute the same another way."""

    def rotary(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
        half = cos.shape[-1] // 2
        cos, sin = (x[..., :half].unsqueeze(unsqueeze_dim) for x in (cos, sin))
        return tuple(
            torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)
            for x in (q, k)
        )

    class RMSNorm(stock.LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            eps = self.variance_epsilon
            return nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, eps)

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def causal(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return stock.CausalLMOutputWithPast(loss=loss, logits=logits)

    return {
        (stock, "apply_rotary_pos_emb"): rotary,
        (stock, "LlamaRMSNorm"): RMSNorm,
        (stock.LlamaMLP, "forward"): mlp,
        (stock.LlamaForCausalLM, "forward"): causal,
    }


@pytest.fixture
def patch(monkeypatch) -> Iterator[Any]:
    def apply() -> None:
        for (place, name), replacement in liger_like().items():
            monkeypatch.setattr(place, name, replacement)

    apply.undo = monkeypatch.undo
    return apply


def results(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = random_ids(2, 12)
    model.zero_grad()
    output = model(ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("rope_scale", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("preset", PRESETS)
def test_patches_of_stock_modules_and_conversion_go_in_any_order(preset, rope_scale, patch):
    """https://github.com/linkedin/Liger-Kernel/issues/242 and https://github.com/linkedin/Liger-Kernel/pull/170"""
    expected = results(apply_drope(tiny_model("llama", scale=2.0), preset, rope_scale=rope_scale))
    before = apply_drope(tiny_model("llama", scale=2.0), preset, rope_scale=rope_scale)
    patch()
    after = apply_drope(tiny_model("llama", scale=2.0), preset, rope_scale=rope_scale)
    for model in (before, after):
        for found, wanted in zip(results(model), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    patch.undo()
    last = results(before)
    for found, wanted in zip(last, expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_stock_model_beside_ours_is_untouched_and_so_are_the_patches(patch):
    """https://github.com/unslothai/unsloth/issues/1713"""
    plain = tiny_model("llama")
    expected = logits(plain, random_ids(1, 9))
    held = {key: vars(key[0])[key[1]] for key in liger_like()}
    converted = apply_drope(tiny_model("llama"), "drope")
    logits(converted, random_ids(1, 9))
    assert torch.equal(logits(plain, random_ids(1, 9)), expected)
    assert torch.equal(logits(tiny_model("llama"), random_ids(1, 9)), expected)
    assert all(vars(place)[name] is value for (place, name), value in held.items())
    patch()
    patched = logits(tiny_model("llama"), random_ids(1, 9))
    apply_drope(tiny_model("llama"), "simple")
    assert torch.equal(logits(tiny_model("llama"), random_ids(1, 9)), patched)


def raiser(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the rotation was called")


@pytest.mark.parametrize("first", ["patch", "convert"])
def test_a_rotation_that_breaks_reaches_no_model_without_rope_and_every_one_with_it(first, monkeypatch):
    """https://github.com/hiyouga/LlamaFactory/pull/10703"""
    ids = random_ids(1, 9)
    expected = logits(apply_drope(tiny_model("llama"), "drope"), ids)
    model = None if first == "patch" else apply_drope(tiny_model("llama"), "drope")
    monkeypatch.setattr(stock, "apply_rotary_pos_emb", raiser)
    model = model or apply_drope(tiny_model("llama"), "drope")
    assert torch.equal(logits(model, ids), expected)
    model.set_rope_scale(1.0)
    with pytest.raises(RuntimeError, match="the rotation was called"):
        logits(model, ids)


def test_a_rotation_that_cannot_be_asked_is_refused_where_the_bias_is_made_of_it(monkeypatch):
    def kernel_of_another_device(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        raise RuntimeError("expected a tensor on the GPU")

    monkeypatch.setattr(stock, "apply_rotary_pos_emb", kernel_of_another_device)
    with pytest.raises(ValueError, match=r"kernel_of_another_device, by which .*LlamaAttention rotates, does not run"):
        apply_drope(tiny_model("llama"), "disentangled")
    monkeypatch.setattr(stock, "apply_rotary_pos_emb", raiser)
    with pytest.raises(ValueError, match=r"raiser is in the place of a rotation and takes neither cos and sin"):
        apply_drope(tiny_model("llama"), "disentangled")


def test_attention_that_another_library_has_rewritten_is_refused(monkeypatch):
    """https://github.com/hiyouga/LlamaFactory/pull/10703: no bias could go in, so it must not seem to."""

    def rewritten(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return self.o_proj(self.q_proj(hidden_states)), None

    monkeypatch.setattr(stock.LlamaAttention, "forward", rewritten)
    for scale in (0.0, 1.0):
        with pytest.raises(ValueError, match="convert the model first"):
            apply_drope(tiny_model("llama"), "drope", rope_scale=scale)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("trained", ["position", "lora"])
@pytest.mark.parametrize("preset", ["gated", "drope", "disentangled"])
def test_checkpointing_gives_the_same_gradients_where_the_base_is_frozen(preset, trained, reentrant, tmp_path):
    """https://github.com/huggingface/transformers/pull/11353: stages move between the steps of a run, never within one."""
    ends = []
    for checkpointing in (False, True):
        model = apply_drope(tiny_model("llama", scale=2.0), preset, rope_scale=1.0)
        if trained == "position":
            freeze_all_but_position(model)
        else:
            torch.manual_seed(0)
            model = get_peft_model(model, lora_config(model, 2))
        settings: dict[str, Any] = {**TRAINING, "gradient_accumulation_steps": 2, "max_steps": 4, "save_strategy": "no"}
        if checkpointing:
            settings |= {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
            }
        run = DroPETrainer(
            model=model,
            args=TrainingArguments(output_dir=str(tmp_path), **settings),
            train_dataset=[{"input_ids": row, "labels": row} for row in random_ids(32, 12)],
            callbacks=[DroPECallback(DroPESchedule(warmup=2, transition=1))],
        )
        run.train()
        ends.append([(e["loss"], e["grad_norm"]) for e in run.state.log_history if "loss" in e])
    assert all(norm > 0 for _, norm in ends[0])
    for plain, checkpointed in zip(*ends, strict=True):
        assert checkpointed == pytest.approx(plain, rel=1e-5)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"input_ids": row, "labels": row} for row in random_ids(64, 12))


def test_a_stream_of_unknown_length_goes_through_the_stages_of_max_steps(tmp_path):
    """https://github.com/huggingface/transformers/issues/31677"""
    run = DroPETrainer(
        model=apply_drope(tiny_model("llama", scale=2.0), "drope", rope_scale=1.0),
        args=TrainingArguments(
            output_dir=str(tmp_path),
            **{**TRAINING, "max_steps": 5, "gradient_accumulation_steps": 2},
            save_strategy="no",
        ),
        train_dataset=Stream(),
        callbacks=[DroPECallback(DroPESchedule(warmup=2, transition=2))],
    )
    run.train()
    rows = [entry["drope/rope_scale"] for entry in run.state.log_history if "loss" in entry]
    assert rows == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert run.model.config.drope_parameters["gate"]["temperature"] == 0.1

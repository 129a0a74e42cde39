"""Models that see both sides: biases tell the sides apart, on every backend, with padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_types import small_model
from reference import Recorder, randomise_position, reference_attention
from tiny import random_ids
from transformers import AutoModel, BartConfig, MPNetConfig
from type_matrix import assert_near, uncompiled

from hf_drope import (
    DroPEParameters,
    apply_drope,
    calibrate_checkpoint,
    convert_checkpoint,
    plan_conversion,
    verify_checkpoint,
)
from hf_drope.cli import main
from hf_drope.recalibrate import recalibrate

SIDED: dict[str, DroPEParameters] = {
    "table": DroPEParameters.preset("simple", max_distance=5),
    "buckets": DroPEParameters.preset("t5", num_buckets=8, max_distance=20, bidirectional=True),
    "log, score gate": DroPEParameters.preset("drope", bidirectional=True),
    "slopes": DroPEParameters.preset("alibi", learned=True, bidirectional=True),
    "low rank, query gate": DroPEParameters.from_dict(
        {"position_bias": {"type": "low_rank", "rank": 4}, "gate": {"type": "query"}}
    ),
    "disentangled": DroPEParameters.preset("disentangled"),
}
CASES = [(t, n) for t in ("eurobert", "modernbert", "bert") for n in SIDED if t != "bert" or n != "disentangled"]
every_case = pytest.mark.parametrize(("model_type", "name"), CASES)


def build(model_type: str, name: str, backend: str = "eager") -> Any:
    return randomise_position(apply_drope(small_model(model_type, backend), SIDED[name]))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return model(ids, attention_mask=mask).logits


@every_case
def test_every_layer_agrees_with_the_nested_loop_reference(model_type, name, monkeypatch):
    model, ids = build(model_type, name), random_ids(2, 6)
    recorder, settings = Recorder(monkeypatch), model.config.drope_parameters
    logits(model, ids)
    visible = torch.ones(2, 6, dtype=torch.bool)
    assert len(recorder.calls) == model.config.num_hidden_layers
    for call in recorder.calls:
        hidden = torch.zeros(2, 6, 1) if call.hidden_states is None else call.hidden_states
        states = (call.query, call.key, call.value, hidden, visible, call.scaling)
        expected, _ = reference_attention(*states, call.module.position_bias, settings, causal=False)
        torch.testing.assert_close(call.output.double(), expected, atol=1e-5, rtol=1e-5)


@every_case
def test_backends_agree_on_a_batch_with_padding(model_type, name):
    ids, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, 33:] = 0
    model = build(model_type, name)
    expected = logits(model, ids, mask)
    assert_near(expected[1:, :33], logits(model, ids[1:, :33]), "a padded row is not the row alone")
    for backend in ("sdpa", "flex_attention"):
        model.set_attn_implementation(backend)
        with uncompiled():
            assert_near(logits(model, ids, mask)[mask.bool()], expected[mask.bool()], f"{backend} is not eager")


@pytest.mark.parametrize("name", ["buckets", "log, score gate", "slopes"])
def test_later_tokens_have_parameters_of_their_own(name):
    """Of one layer the last token, which has none after it, stays as it was when they change."""
    stock, ids = small_model("eurobert", "eager", num_hidden_layers=1), random_ids(1, 6)
    model = randomise_position(apply_drope(stock, SIDED[name]))
    before = logits(model, ids)
    with torch.no_grad():
        for bias in model.position_biases():
            later = (
                bias.bias.weight[4:]
                if name == "buckets"
                else bias.bias.gamma[1]
                if "log" in name
                else bias.bias.slopes[1]
            )
            later.copy_(later.flip(0) + torch.linspace(0.5, 1.5, len(later)).view(-1, *[1] * (later.dim() - 1)))
    after = logits(model, ids)
    assert torch.equal(after[:, -1], before[:, -1])
    assert (after[:, 0] - before[:, 0]).abs().max() > 1e-3


def test_buckets_of_one_side_are_refused():
    with pytest.raises(ValueError, match=r"sees later tokens too, .* set bidirectional to true"):
        apply_drope(small_model("eurobert"), "t5")


def test_a_converted_folder_passes_verification(tmp_path):
    small_model("modernbert").save_pretrained(tmp_path / "src")
    plan = plan_conversion(tmp_path / "src", "drope", overrides={"bidirectional": True})
    convert_checkpoint(plan, tmp_path / "dst", progress=False)
    report = verify_checkpoint(tmp_path / "dst", tmp_path / "src", length=16, progress=False)
    assert report.passed, report.describe()
    assert report.describe().count("not applicable: ") == 2


def test_packed_documents_are_refused_whatever_else_is_given():
    """Stock encoders let them see each other: https://github.com/huggingface/transformers/pull/46634 parts causal ones."""
    model, ids = build("eurobert", "table"), random_ids(1, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for given in ({}, {"attention_mask": torch.ones_like(ids)}, {"use_cache": False}):
        with pytest.raises(ValueError, match="a model that sees both sides does not keep apart"):
            model(ids, position_ids=positions, **given)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=97), "is an encoder with a decoder"),
        (MPNetConfig(hidden_size=24, num_hidden_layers=1, vocab_size=97), "goes through the Transformers attention"),
    ],
    ids=["bart", "mpnet"],
)
def test_what_would_keep_a_position_encoding_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        apply_drope(AutoModel.from_config(config))


def test_commands_that_need_next_tokens_refuse_encoders(tmp_path):
    small_model("eurobert").save_pretrained(tmp_path / "src")
    (tmp_path / "text.txt").write_text("a few words\n" * 50)
    convert_checkpoint(plan_conversion(tmp_path / "src", "disentangled"), tmp_path / "dst", progress=False)
    with pytest.raises(ValueError, match="is for causal language models, and this is a eurobert_drope"):
        calibrate_checkpoint(tmp_path / "dst", tmp_path / "src", [tmp_path / "text.txt"])
    with pytest.raises(ValueError, match="recalibration is for causal language models"):
        recalibrate(tmp_path / "dst", tmp_path / "out", [tmp_path / "text.txt"])
    source = ["convert", str(tmp_path / "src"), str(tmp_path / "new"), "--preset", "disentangled"]
    assert main([*source, "--calibrate", "--text", str(tmp_path / "text.txt")]) == 2
    assert not (tmp_path / "new").exists()

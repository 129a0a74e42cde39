"""The coefficient of the attention scale: what is found, what is refused, what a folder holds afterwards."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, logits, run_python, write_source
from tiny import VOCAB, random_ids, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_drope.folder_attention_scale as folder_room
from hf_drope import (
    DroPEParameters,
    apply_drope,
    convert_checkpoint,
    fit_attention_scale,
    fit_checkpoint_attention_scale,
    plan_conversion,
    verify_checkpoint,
)
from hf_drope.cli import main
from hf_drope.configuration_drope import auto_map
from hf_drope.conversion_plan import RECORD
from hf_drope.export import plan_export
from hf_drope.lowest import find_lowest
from hf_drope.model_facts import attention_scale as recorded_scale
from hf_drope.perplexity import measure_perplexity

WINDOW = 64
GROWING = {"coefficient": 0.5, "original_max_position_embeddings": WINDOW}
# Random weights as large as here make attention that depends on its scale.
LARGE = 16.0
KINDS: dict[str, tuple[str, Any]] = {
    "nope": ("llama", "nope"),
    "learned table dropped": ("gpt2", "nope"),
    "table and gate": ("gpt_neox", "gated"),
    "log and score gate": ("llama", "drope"),
    "low rank": ("qwen3", {"position_bias": {"type": "low_rank", "rank": 4}}),
    "disentangled": ("llama", "disentangled"),
}


def converted(kind: str, **overrides: Any) -> Any:
    family, preset = KINDS[kind]
    model = apply_drope(tiny_model(family, scale=LARGE), preset, **overrides).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.position_parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def written_by(model: Any, tokens: int = 8 * WINDOW) -> torch.Tensor:
    """Text that the model itself writes: nothing predicts it better than the model as it is, its scale included."""
    torch.manual_seed(0)
    model.generation_config.eos_token_id = None
    return model.generate(
        torch.tensor([[5]]), attention_mask=torch.ones(1, 1), do_sample=True, top_k=0, max_new_tokens=tokens - 1
    )[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_coefficient_that_a_text_was_written_with_is_found(kind):
    model = converted(kind, attention_scale=GROWING)
    text = written_by(model)
    report = fit_attention_scale(model, text, lengths=[8 * WINDOW])
    assert report.coefficient == pytest.approx(0.5, abs=0.15)
    assert report.gain > report.noise > 0
    # A constant has to do for the second half of the text what grows along it.
    assert 0 < report.least_squares < report.coefficient
    assert model.config.drope_parameters["attention_scale"] == {**GROWING, "coefficient": report.coefficient}
    window, longest = report.curve
    assert (window["length"], window["factor"], window["with"]) == (WINDOW, 1.0, window["without"])
    assert longest["factor"] == pytest.approx(1 + report.coefficient * math.log(8))
    assert longest["with"] < longest["best_factor_perplexity"] < longest["without"]


def test_a_text_written_without_a_scale_gets_none():
    for kind in ("nope", "disentangled"):
        model = converted(kind, attention_scale=GROWING)
        plain = converted(kind)
        report = fit_attention_scale(model, written_by(plain), lengths=[8 * WINDOW])
        assert report.coefficient is None
        assert report.reason is not None
        assert "no attention scale: " + report.reason in report.describe()
        # The scale that was there is gone, with all that it asks of an engine.
        assert model.config.drope_parameters["attention_scale"] is None
        assert model.config.auto_map == plain.config.auto_map
        ids = random_ids(1, 2 * WINDOW)
        assert torch.equal(logits(model, ids), logits(plain, ids))
        assert all(at["with"] == at["without"] and at["factor"] == 1 for at in report.curve)


def one_key_among_many(strength: float, share: float, shown: float) -> Any:
    """A model that gives the token 1 the more the more it attends to the first token, and the first token's key alone has a score.

    Its attention there is 1 / (1 + (i − 1)·exp(−β·strength)), so that β has to grow as 1 + ln(i / L) / strength for it to stay as it
    is at i = L, where the token 1 then gets the probability `shown`.
    """
    config = LlamaConfig(
        vocab_size=3,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.zero_()
    large = 1000.0
    first, other = torch.eye(4)[:2]
    model.model.embed_tokens.weight.data[:] = large * torch.stack([first, other, other])
    layer = model.model.layers[0].self_attn
    # A normed unit vector is twice as long, on both sides, and the scores are halved.
    layer.q_proj.weight.data[0, 1], layer.k_proj.weight.data[0, 0] = strength / 2, 1.0
    layer.v_proj.weight.data[0, 0] = 0.5
    layer.o_proj.weight.data[2, 0] = 1.0
    logit = math.log(shown / (1 - shown))
    model.lm_head.weight.data[1, 2] = logit / share * large / 2
    model.lm_head.weight.data[0, 1] = -20.0
    return apply_drope(model, "nope")


class _Beginning:
    """A tokenizer that begins every text with the token 0."""

    eos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [1] * len(text)}


def rare_twos(tokens: int, every: int) -> torch.Tensor:
    """Ones with a two in each `every` tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.ones(tokens // every, every, dtype=torch.long)
    places = torch.randint(0, every, (len(ids), 1), generator=generator)
    return ids.scatter(1, places, 2).flatten()


@pytest.mark.parametrize("strength", [3.0, 5.0])
def test_attention_that_has_to_find_one_key_among_many_is_sharpened_by_the_logarithm(strength):
    share = 1 / (1 + 15 * math.exp(-strength))
    model = one_key_among_many(strength, share, shown=0.9)
    text = rare_twos(4000, every=10)
    report = fit_attention_scale(model, text, tokenizer=_Beginning(), progress=False)
    assert [at["length"] for at in report.curve] == [16, 32, 64, 128]
    assert report.coefficient == pytest.approx(1 / strength, rel=0.1)
    assert all(at["with"] < at["without"] for at in report.curve[1:])
    assert [at["best_factor"] for at in report.curve] == sorted(at["best_factor"] for at in report.curve)
    # What is reported is what evaluation finds with and without.
    for at in report.curve[1:]:
        found = measure_perplexity(model, text, at["length"], 128, beginning=[0])["perplexity"]
        assert found == pytest.approx(at["with"], rel=1e-4)


def test_attention_that_is_sharp_enough_is_not_flattened():
    """What the model gives at the window is too much already: past it less is right."""
    model = one_key_among_many(3.0, 1 / (1 + 15 * math.exp(-3.0)), shown=0.999)
    report = fit_attention_scale(model, rare_twos(4000, every=10), tokenizer=_Beginning(), lengths=[32])
    assert report.coefficient is None
    assert report.best < 0
    assert "no sharpening past 16 tokens" in report.reason


def test_a_gain_within_noise_is_not_taken():
    model = one_key_among_many(3.0, 1 / (1 + 15 * math.exp(-3.0)), shown=0.9)
    short = rare_twos(4000, every=10)[:64]
    report = fit_attention_scale(model, short, tokenizer=_Beginning(), lengths=[64])
    assert report.best > 0
    assert report.coefficient is None
    assert "within noise" in report.reason


def test_no_length_gets_worse():
    """The lengths want different coefficients: the best of the mean is not taken where it hurts one of them."""
    model = one_key_among_many(3.0, 1 / (1 + 15 * math.exp(-3.0)), shown=0.9)
    text = rare_twos(4000, every=10)
    from hf_drope import attention_scale_fit

    class Apart(attention_scale_fit._Fit):
        def losses(self, length: int, scale: dict[str, Any] | None) -> torch.Tensor:
            c = (scale or {}).get("coefficient", 0.0)
            best, weight = {16: (0.0, 1.0), 32: (0.08, 1.0), 128: (0.5, 3.0)}[length]
            return torch.full((2048,), 1 + weight * (c - best) ** 2, dtype=torch.float64)

    fit = Apart(model, text, [], 16, [32, 128], False)
    report = fit.run()
    assert report.best == pytest.approx(0.4, abs=0.01)
    # At 32 all beyond 0.16 is worse than none.
    assert report.coefficient == pytest.approx(0.1, abs=0.01)
    assert all(at["with"] <= at["without"] for at in report.curve)


@pytest.mark.parametrize("floor", [0.013, 0.1, 0.37, 1.9, -0.2, -0.8, 0.0, 9.0])
def test_the_lowest_point_is_found_in_few_steps(floor):
    asked: list[float] = []

    def curve(x: float) -> float:
        asked.append(x)
        return math.cosh(x - floor)

    tried = find_lowest(curve, 0.1, -0.9, 4.0)
    best = min(tried, key=tried.__getitem__)
    assert best == pytest.approx(min(floor, 4.0), abs=0.03)
    assert len(asked) == len(tried) <= 11


@pytest.mark.parametrize("value", [1.0, 2.0, math.nan, math.inf])
def test_a_curve_without_a_valley_stays_at_zero(value):
    tried = find_lowest(lambda x: value, 0.1, -0.9, 4.0, {0.0: 1.0})
    assert min(tried, key=tried.__getitem__) == 0.0


def test_the_model_is_unchanged_by_a_fit_that_fails(monkeypatch):
    model = converted("nope", attention_scale=GROWING)
    before = model.config.to_dict()
    text = random_ids(1, 8 * WINDOW)[0]
    monkeypatch.setattr("hf_drope.attention_scale_fit._Fit.choose", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit_attention_scale(model, text)
    assert model.config.to_dict() == before
    assert all(layer.self_attn.attention_scale == GROWING for layer in model.model.layers)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"lengths": [WINDOW, 128]}, r"lengths has 64, and the scale begins past the window of 64 tokens; give longer"),
        ({"lengths": []}, r"There are no lengths"),
        ({"lengths": [1024]}, r"The text has 512 tokens, fewer than the length of 1024; give more text, or shorter"),
        ({"original_length": 300}, r"The text has 512 tokens, fewer than the length of 600"),
        ({"original_length": 1}, r"original_length is 1; it has to be at least 2"),
    ],
)
def test_unusable_arguments_are_refused(arguments, sentence):
    model = converted("nope")
    with pytest.raises(ValueError, match=sentence):
        fit_attention_scale(model, random_ids(1, 512)[0], **arguments)
    assert model.config.drope_parameters["attention_scale"] is None


def test_unusable_models_and_texts_are_refused():
    ids = random_ids(1, 512)[0]
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a converted model"):
        fit_attention_scale(tiny_model("llama"), ids)
    with pytest.raises(
        ValueError, match=r"has a constant attention scale of 1\.3, whose place a growing one would take"
    ):
        fit_attention_scale(converted("nope", attention_scale={"factor": 1.3}), ids)
    with pytest.raises(
        ValueError, match=r"cannot reach a length of 128: its table of positions ends at 64.*rope_scale 1"
    ):
        fit_attention_scale(converted("learned table dropped", rope_scale=1.0), ids, lengths=[128])
    with pytest.raises(ValueError, match=f"holds token {VOCAB}, but the model knows only {VOCAB}"):
        fit_attention_scale(converted("nope"), torch.cat([ids, torch.tensor([VOCAB])]))
    with pytest.raises(ValueError, match=r"text has shape \(1, 512\)"):
        fit_attention_scale(converted("nope"), ids[None])
    flexible = apply_drope(tiny_model("llama", attn_implementation="flex_attention"), "simple")
    with pytest.raises(ValueError, match=r"attn_implementation='flex_attention'.*load it with one of 'eager', 'sdpa'"):
        fit_attention_scale(flexible, ids)


# Folders.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source, converted folders, and a text that they would write themselves with the growing scale."""
    home = tmp_path_factory.mktemp("made")
    write_source(home / "src", scale=LARGE)
    for preset in ("nope", "disentangled"):
        # Without calibration this bias is zero.
        convert_checkpoint(plan_conversion(home / "src", preset), home / preset)
    config = AutoConfig.from_pretrained(home / "nope")
    config.drope_parameters = {**config.drope_parameters, "attention_scale": GROWING}
    model = AutoModelForCausalLM.from_pretrained(home / "nope", config=config)
    special = {0: "<pad>", 1: "<bos>", 2: "<eos>"}
    (home / "text.txt").write_text(" ".join(special.get(token, f"w{token}") for token in written_by(model).tolist()))
    return home


@pytest.fixture
def place(made, tmp_path):
    """Folders `src`, `nope` and `disentangled` and the file `text.txt` for a test of its own."""
    return Path(shutil.copytree(made, tmp_path / "made"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


SIZES: dict[str, Any] = {"lengths": [8 * WINDOW], "progress": False}


@pytest.mark.parametrize("preset", ["nope", "disentangled"])
def test_a_folder_gets_the_setting_and_the_record_and_nothing_else_changes(preset, place):
    folder, text = place / preset, place / "text.txt"
    before = contents(folder)
    report = fit_checkpoint_attention_scale(folder, [text], **SIZES)
    assert report.coefficient == pytest.approx(0.5, abs=0.12)
    after = contents(folder)
    assert {name for name in after if after[name] != before.get(name)} == {"config.json", RECORD, "README.md"}
    assert after.keys() == before.keys()
    was, now = json.loads(before["config.json"]), json.loads(after["config.json"])
    scale = {"coefficient": report.coefficient, "original_max_position_embeddings": WINDOW}
    assert now["drope_parameters"] == {**was["drope_parameters"], "attention_scale": scale}
    assert {**now, "drope_parameters": None, "auto_map": None} == {**was, "drope_parameters": None, "auto_map": None}
    # Engines are told that their own attention would leave the scale out.
    assert now["auto_map"] == auto_map("llama_drope", DroPEParameters.from_dict(now["drope_parameters"]))
    old, new = json.loads(before[RECORD]), json.loads(after[RECORD])
    found = new.pop("attention_scale")
    assert new == old
    assert (found["coefficient"], found["tokens"], list(found["text_sha256"])) == (
        report.coefficient,
        513,
        ["text.txt"],
    )
    assert [set(at) for at in found["curve"]] == [
        {"length", "factor", "without", "with", "best_factor", "best_factor_perplexity"}
    ] * 2
    card = after["README.md"].decode()
    assert f"coefficient {report.coefficient:.4g}" in card
    # A fit anew replaces it by the same.
    again = fit_checkpoint_attention_scale(folder, [text], **SIZES)
    assert (again.coefficient, again.curve) == (report.coefficient, report.curve)
    # Without a gain the folder is what it was, but for the record and the card.
    text.write_text(" ".join(f"w{token}" for token in random_ids(1, 512)[0].tolist()))
    assert fit_checkpoint_attention_scale(folder, [text], **SIZES).coefficient is None
    assert json.loads((folder / "config.json").read_text()) == was
    assert "tried on held-out text and left out" in (folder / "README.md").read_text()


def test_a_scaled_folder_passes_verification_loads_anywhere_and_is_not_exported(place):
    folder, text = place / "nope", place / "text.txt"
    fit_checkpoint_attention_scale(folder, [text], **SIZES)
    # Beyond the window; it is loaded without this package, too.
    report = verify_checkpoint(folder, place / "src", length=2 * WINDOW, progress=False)
    assert report.passed, report.describe()
    code = (
        "import sys\nsys.modules['hf_drope'] = None\nfrom transformers import AutoModel\n"
        "model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(model.layers[0].self_attn.attention_scale['coefficient'])"
    )
    done = run_python(code, folder, cwd=place)
    assert float(done.stdout) == json.loads((folder / RECORD).read_text())["attention_scale"]["coefficient"], (
        done.stderr
    )
    with pytest.raises(ValueError, match="attention_scale is 'by length', which no stock architecture has"):
        plan_export(folder)


def test_verification_still_puts_rope_back_together_within_the_window(place):
    folder, text = place / "disentangled", place / "text.txt"
    fit_checkpoint_attention_scale(folder, [text], **SIZES)
    report = verify_checkpoint(folder, place / "src", progress=False)
    assert report.passed, report.describe()
    assert "source with RoPE back on the content" in [check.name for check in report.checks]


def test_what_was_recorded_is_not_told_of_other_weights(place):
    folder, text = place / "nope", place / "text.txt"
    report = fit_checkpoint_attention_scale(folder, [text], **SIZES)
    assert recorded_scale(folder)["coefficient"] == report.coefficient
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[0] += 1e-3
    model.save_pretrained(folder)
    assert recorded_scale(folder) is None


@pytest.mark.parametrize("number", [1, 2])
def test_what_fails_while_it_is_stored_leaves_the_old_folder(number, place, monkeypatch):
    folder, text = place / "nope", place / "text.txt"
    before = contents(folder)
    replace, calls = os.replace, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == number:
            raise OSError("the disk is full")
        replace(*arguments)

    monkeypatch.setattr(folder_room.os, "replace", failing)
    with pytest.raises(OSError, match="disk is full"):
        fit_checkpoint_attention_scale(folder, [text], **SIZES)
    assert contents(folder) == before


_TERMINATED = """
import os, signal, sys
import hf_drope.folder_attention_scale as room
from hf_drope import fit_checkpoint_attention_scale

replace = room.write_whole

def replace_and_end(*arguments):
    replace(*arguments)
    room.write_whole = replace
    os.kill(os.getpid(), signal.SIGTERM)

room.write_whole = replace_and_end
fit_checkpoint_attention_scale(sys.argv[1], [sys.argv[2]], lengths=[512], progress=False)
"""


def test_a_fit_that_is_ended_between_record_and_config_leaves_the_old_folder(place):
    folder, text = place / "nope", place / "text.txt"
    before = contents(folder)
    done = run_python(_TERMINATED, folder, text, cwd=place)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert contents(folder) == before


def test_unusable_folders_are_refused_and_left_alone(place):
    folder, text = place / "nope", place / "text.txt"
    before = contents(place)
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (place / "src", {}, r"src is a plain llama, which has no place for an attention scale by length"),
        (place / "none", {}, r"is not a local folder"),
        (folder, {"lengths": [64]}, r"lengths has 64, and the scale begins past the window of 64"),
        (folder, {"lengths": [4096]}, r"The text has 513 tokens, fewer than the length of 4096"),
        (folder, {"tokens": 1}, r"tokens is 1; it has to be at least 2"),
        (folder, {"tokens": 100}, r"The text has 100 tokens, fewer than the length of 512"),
        (folder, {"dtype": "float23"}, r"Unknown dtype 'float23'.*Did you mean 'float32'"),
    ]
    for path, arguments, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            fit_checkpoint_attention_scale(path, [text], **{**SIZES, **arguments})
    assert contents(place) == before
    edit_json(folder / "config.json", drope_parameters={"attention_scale": {"factor": 1.5}})
    with pytest.raises(ValueError, match=r"constant attention scale of 1\.5"):
        fit_checkpoint_attention_scale(folder, [text], **SIZES)


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    code = main(["calibrate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_fits_the_scale_alone_or_after_the_bias(place, capsys):
    folder, text = place / "nope", place / "text.txt"
    options = ("--text", text, "--attention-scale", "--lengths", "512")
    code, out, err = run(capsys, folder, *options)
    assert code == 0, err
    assert "attention scale 1 + " in out
    assert "without" in out
    code, out, _ = run(capsys, folder, *options, "--original-length", 32, "--scale-tokens", 512, "--json")
    assert code == 0
    assert json.loads(out)["original_max_position_embeddings"] == 32
    both = ("--source", place / "src", "--tokens", 96, "--length", 24, "--steps", 1, "--output-steps", 0)
    code, out, err = run(capsys, place / "disentangled", *options, *both, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["bias"], found["windows"], found["attention_scale"]["tokens"]) == ("disentangled", 4, 513)
    record = json.loads((place / "disentangled" / RECORD).read_text())
    assert {"calibration", "attention_scale"} <= record.keys()
    assert recorded_scale(place / "disentangled") is not None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            (),
            "There is nothing to do; give --source SRC to calibrate the bias, --attention-scale to fit the scale, or both.",
        ),
        (("--attention-scale", "--steps", 3), "--steps and --output-steps are of the bias"),
        (("--attention-scale", "--tokens", 300), "for the scale there are --scale-tokens and --lengths"),
        (("--source", "src", "--lengths", "512"), "are of the attention scale; give --attention-scale as well"),
        (("--source", "none", "--attention-scale", "--lengths", "32"), "lengths has 32, and the scale begins past"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, sentence, place, capsys):
    folder, text = place / "nope", place / "text.txt"
    before = contents(folder)
    code, out, err = run(capsys, folder, "--text", text, *options)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert contents(folder) == before

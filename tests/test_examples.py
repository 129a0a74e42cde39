"""The examples as their readers run them: scripts in processes of their own, on a tiny checkpoint and a little text."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import logits, run_python, tiny_tokenizer, write_source
from tiny import VOCAB, random_ids, tiny_model
from transformers import AutoModelForCausalLM

from hf_drope import Distillation, apply_drope, calibrate_checkpoint, convert_checkpoint, plan_conversion
from hf_drope.distill import DistillationMixin
from hf_drope.training import PositionGroupsMixin

EXAMPLES = Path(__file__).parents[1] / "examples"
START = "import runpy, sys, torch; torch.set_num_threads(1); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
LOAD = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_drope":
            raise ImportError("hf_drope is blocked")

sys.meta_path.insert(0, Block())

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, expected = sys.argv[1:]
model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
expected = torch.load(expected)
with torch.no_grad():
    torch.testing.assert_close(model.eval()(expected["ids"]).logits, expected["logits"], atol=1e-5, rtol=1e-5)
assert AutoTokenizer.from_pretrained(folder)("w3 w4")["input_ids"] == [3, 4]
assert "hf_drope" not in sys.modules
"""


def run_example(name: str, *arguments: Any, cwd: Path) -> str:
    home = {"HF_HOME": str(cwd / "home"), "PYTHONPATH": str(EXAMPLES.parent), "PYTHONWARNINGS": "ignore"}
    done = run_python(START, EXAMPLES / name, *arguments, cwd=cwd, **home)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def loads_without_the_package(folder: Path, cwd: Path) -> None:
    """Also with the logits that the folder has here."""
    ids = random_ids(1, 9)
    torch.save({"ids": ids, "logits": logits(AutoModelForCausalLM.from_pretrained(folder).eval(), ids)}, cwd / "it.pt")
    done = run_python(LOAD, folder, cwd / "it.pt", cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def write_words(path: Path, count: int, seed: int) -> Path:
    """Each word is one of three that may follow the one before, so there is something to learn."""
    generator, word, words = random.Random(seed), 3, []
    for _ in range(count):
        words.append(f"w{word}")
        word = 3 + (word * 7 + generator.randrange(3)) % (VOCAB - 3)
    path.write_text(" ".join(words))
    return path


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_source(folder / "src")
    text = write_words(folder / "text.txt", 600, seed=1)
    convert_checkpoint(plan_conversion(folder / "src", "disentangled"), folder / "converted", progress=False)
    calibrate_checkpoint(folder / "converted", folder / "src", [text], tokens=128, length=16, steps=2, progress=False)
    return folder


def test_a_model_from_scratch_prints_its_loss(tmp_path):
    out = run_example("from_scratch.py", cwd=tmp_path)
    loss = re.search(r"loss past the table's 64 distances: ([\d.]+)", out)
    assert loss is not None, out
    assert 3 < float(loss.group(1)) < 8


def test_backends_are_compared(tmp_path):
    given = ["--device", "cpu", "--biases", "table", "--backends", "sdpa", "--check-length", 48, "--lengths"]
    out = run_example("gpu_check.py", *given, cwd=tmp_path)
    assert "all agree: True" in out
    assert [line.split("  ")[0] for line in out.splitlines() if line.startswith("table")] == [
        *("table", "table, head gate", "table, query gate", "table, score gate", "table, window")
    ]


def test_the_trainer_converts_calibrates_and_distills(calibrated, tmp_path):
    out = run_example(
        "train_with_trainer.py",
        *(calibrated / "src", tmp_path / "out", calibrated / "text.txt"),
        *("--steps", 4, "--length", 16, "--tokens", 128),
        cwd=tmp_path,
    )
    assert "calibrated disentangled in 2 layers on 8 × 16 tokens" in out
    assert (tmp_path / "out/convergence.png").stat().st_size > 10_000
    lines = [json.loads(line) for line in (tmp_path / "out/training/metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "loss" in line]
    assert [row["tokens"] for row in rows] == [64, 128, 192, 256]
    assert all(row["distill/kl"] > 0 and row["drope/rope_scale"] == 0.0 for row in rows)
    loads_without_the_package(tmp_path / "out/recalibrated", tmp_path)


def test_lora_with_trl_is_merged_to_a_folder_that_loads(calibrated, tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    pairs = [{"prompt": f"w{n} w{n + 1} w{n + 2}", "completion": f" w{n + 3} w{n + 4}"} for n in range(3, 15)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = ("--steps", 3, "--length", 16, "--rank", 2, "--learning-rate", "1e-2", "--packing")
    out = run_example(
        *("sft_lora.py", calibrated / "converted", tmp_path / "out", tmp_path / "pairs.jsonl", *settings), cwd=tmp_path
    )
    assert f"merged model in {tmp_path / 'out'}/merged" in out
    before, after = weights(calibrated / "converted"), weights(tmp_path / "out/merged")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[3] for name in moved} == {"self_attn"}
    assert any("position_bias" in name for name in moved)
    assert any("q_proj" in name for name in moved)
    loads_without_the_package(tmp_path / "out/merged", tmp_path)


def test_position_parameters_alone_adapt_to_a_domain(calibrated, tmp_path):
    train, held_out = (write_words(tmp_path / f"{n}.txt", 700, seed=n) for n in (2, 3))
    out = run_example(
        *("domain_adaptation.py", calibrated / "converted", tmp_path / "out", "--train", train, "--held-out", held_out),
        *("--steps", 6, "--length", 16, "--learning-rate", "0.05"),
        cwd=tmp_path,
    )
    found = re.search(r"held-out perplexity: ([\d.]+) before, ([\d.]+) after", out)
    assert found is not None, out
    assert float(found.group(2)) < float(found.group(1))
    before, after = weights(calibrated / "converted"), weights(tmp_path / "out")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all("position_bias" in name for name in moved)
    loads_without_the_package(tmp_path / "out", tmp_path)


def test_the_comparison_measures_the_states_it_is_asked_for_and_each_once(tmp_path):
    write_source(tmp_path / "src", max_position_embeddings=2048)
    known = [("austen", "Persuasion"), ("sotu", "1981-Carter-1"), ("other", "Moby-Dick"), ("other", "King James Bible")]
    documents = [
        {"source": source, "id": name, "text": write_words(tmp_path / "words.txt", 5600, seed).read_text()}
        for seed, (source, name) in enumerate([*known, ("austen", "Sanditon"), ("sotu", "1790-Washington-1")])
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    given = ("smollm2_recalibration.py", tmp_path / "src", tmp_path / "corpus.jsonl", tmp_path / "out")
    states = ["dropped", "disentangled, closed form"]
    out = run_example(*given, "--only", *states, cwd=tmp_path)
    assert "calibrated disentangled in 2 layers on 2 × 2048 tokens" in out
    file = tmp_path / "out/results.json"
    results = json.loads(file.read_text())
    assert list(results) == states
    for row in results.values():
        assert list(row) == ["512", "2048", "other 2048", "seconds"]
        assert all(20 < row[key] < 1000 for key in ("512", "2048", "other 2048"))
    assert results[states[0]]["2048"] != results[states[1]]["2048"]
    file.write_text(json.dumps({states[0]: "known", states[1]: "known"}))
    assert run_example(*given, "--only", *states, cwd=tmp_path) == ""
    assert json.loads(file.read_text()) == {states[0]: "known", states[1]: "known"}


def test_distillation_composes_with_trl_or_is_refused(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    class Distiller(DistillationMixin, PositionGroupsMixin, trl.SFTTrainer):
        pass

    model = apply_drope(tiny_model("llama", scale=2.0), "gated")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = {"max_steps": 2, "learning_rate": 1e-2, "bf16": False, "use_cpu": True, "save_strategy": "no"}
    rows = [{"input_ids": row.tolist()} for row in random_ids(8, 12)]
    try:
        trainer = Distiller(
            model=model,
            args=trl.SFTConfig(output_dir=str(tmp_path), report_to=[], disable_tqdm=True, **settings),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tiny_tokenizer(),
            distill=Distillation(tiny_model("llama", scale=2.0), weight=1.0),
        )
        trainer.train()
    except ValueError:
        return
    assert any(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())

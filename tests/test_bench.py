"""The benchmark on a tiny model: what it reports and what it refuses, not how fast anything is."""

from __future__ import annotations

import json

import pytest
from tiny import tiny_config

from hf_drope.bench import bench
from hf_drope.bench_measures import MEASURES
from hf_drope.bench_report import describe
from hf_drope.bench_variants import too_large
from hf_drope.cli import main


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(tiny_config("llama").to_json_string(use_diff=False))
    return file


def test_every_measure_of_the_chosen_variants_is_reported(config):
    only = ("NoPE", "table", "low rank 16, h", "others")
    result = bench(config, lengths=[16], rounds=1, only=only, measures=MEASURES, dtype="float32", progress=False)
    assert not result["skipped"]
    names = {row["variant"] for row in result["rows"]}
    assert names == {"NoPE", "table", "low rank 16, head gate", "others: rotation by 1 and 0", "others: dense bias"}
    assert len(result["rows"]) == len(names) * len(MEASURES)
    assert all(row["ratio"] > 0 and row["length"] == 16 for row in result["rows"])
    assert all(name in describe(result) for name in names)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3"])
def test_other_families_are_measured_too(family, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(tiny_config(family).to_json_string(use_diff=False))
    measures = ("decode", "attention", "attention-memory")
    only = ("NoPE", "table", "others")
    result = bench(file, lengths=[16], rounds=1, only=only, measures=measures, dtype="float32", progress=False)
    skipped = {"others: rotation by 1 and 0": "GPT2LMHeadModel has no rotation."} if family == "gpt2" else {}
    assert result["skipped"] == skipped
    assert len(result["rows"]) == 3 * (4 - len(skipped))


def test_a_dense_bias_of_gigabytes_is_left_out(config):
    result = bench(config, lengths=[16], rounds=1, only=("others: d",), measures=("decode",), progress=False)
    assert result["rows"]
    assert "takes 2.1 GB" in too_large("others: dense bias", tiny_config("llama"), 1 << 14, 2)


def test_the_command_writes_json(config, tmp_path, capsys):
    given = ["--model", config, "--lengths", 8, "--rounds", 1, "--measures", "decode", "--only", "NoPE"]
    assert main(["bench", *map(str, given), "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["measure"] == "decode"
    assert "NoPE" in capsys.readouterr().out


def test_a_family_that_does_not_convert_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bloom", "hidden_size": 8, "n_head": 2}')
    with pytest.raises(ValueError, match="no position encoding here that hf_drope could take out"):
        bench(tmp_path, lengths=[8], progress=False)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--model", "/nowhere"], "is no model: there is no config.json"),
        (["--lengths", "1"], "length is 1; it has to be at least 2"),
        (["--lengths", "1000000000"], "length 1000000000 needs about"),
        (["--dtype", "int3"], "dtype is 'int3'; known are"),
        (["--only", "nothing"], "No variant begins with 'nothing'"),
        (["--device", "xyz"], "device 'xyz' is not here"),
        (["--backends", "sdpaa"], "backend is 'sdpaa'; known are"),
        (["--json", "/nowhere/out.json"], "/nowhere/out.json is in a folder that does not exist"),
        (["--lengths", "8", "--rounds", "1", "--measures", "decode", "--only", "NoPE", "--check"], "has a target"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, sentence, config, capsys):
    given = given if "--model" in given else ["--model", str(config), *given]
    assert main(["bench", *given]) == 2
    assert sentence in capsys.readouterr().err

"""The command line as its users see it: output, exit codes, one-sentence errors."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from checkpoints import write_source

from hf_drope.cli import main


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom hf_drope.cli import main\n"
        "try:\n    main(['convert', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--dry-run" in done.stdout


def test_inspect_convert_and_verify(capsys, tmp_path):
    write_source(tmp_path / "src")
    (tmp_path / "src/README.md").write_text("# The source's own card\n")
    code, out, _ = run(capsys, "inspect", tmp_path / "src", "--json")
    assert (code, json.loads(out)["model_type"]) == (0, "llama")
    convert = ("convert", tmp_path / "src", tmp_path / "dst", "--preset", "simple", "--set", "max_distance=16")
    code, out, _ = run(capsys, *convert, "--dry-run")
    assert code == 0
    assert "nothing written" in out
    assert not (tmp_path / "dst").exists()
    code, out, _ = run(capsys, *convert, "--json")
    assert (code, json.loads(out)["drope_parameters"]["position_bias"]["max_distance"]) == (0, 16)
    code, out, _ = run(capsys, "verify", tmp_path / "dst", "--against", tmp_path / "src")
    assert code == 0, out
    assert out.count("ok  ") == 8


def test_a_failed_check_exits_with_one(capsys, tmp_path):
    write_source(tmp_path / "src")
    run(capsys, "convert", tmp_path / "src", tmp_path / "dst")
    (tmp_path / "dst/special.txt").write_text("changed")
    code, out, _ = run(capsys, "verify", tmp_path / "dst", "--against", tmp_path / "src")
    assert code == 1
    assert "FAIL  other files: special.txt" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--preset", "drop"], "Did you mean 'drope'?"),
        (["--set", "rope_scal=1"], "Did you mean 'rope_scale'?"),
        (["--preset", "simple", "--set", "max_distance=0"], "max_distance is 0; it has to be"),
        (["--set", 'gate={"type": "head"}'], "no position_bias for it to act on"),
    ],
)
def test_wrong_settings_exit_with_two_and_one_sentence(arguments, sentence, capsys, tmp_path):
    write_source(tmp_path / "src")
    code, out, err = run(capsys, "convert", tmp_path / "src", tmp_path / "dst", *arguments)
    assert code == 2
    assert sentence in err
    message = err.splitlines()[-1]
    assert message.startswith("hf-drope convert: ")
    assert sentence in message
    assert "Traceback" not in out + err
    assert not (tmp_path / "dst").exists()


def test_errors_of_training_input_exit_with_two(capsys, tmp_path):
    write_source(tmp_path / "src")
    run(capsys, "convert", tmp_path / "src", tmp_path / "dst")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for file, sentence in (("empty.txt", "is empty"), ("latin.txt", "is not UTF-8")):
        code, _, err = run(
            capsys, "recalibrate", tmp_path / "dst", tmp_path / "out", "--text", tmp_path / file, "--max-steps", 2
        )
        assert code == 2
        assert sentence in err
    assert not (tmp_path / "out").exists()


def test_env_names_the_versions(capsys):
    code, out, _ = run(capsys, "env", "--json")
    assert code == 0
    assert {"hf-drope", "torch", "transformers", "python", "devices"} <= set(json.loads(out))


def test_too_old_transformers_is_one_sentence():
    code = (
        "import importlib.metadata as m, sys\nold = m.version\n"
        "m.version = lambda name: '5.2.0' if name == 'transformers' else old(name)\n"
        "import hf_drope"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("hf_drope needs transformers 5.14 or newer, found 5.2.0; upgrade transformers.")


def test_demo_tells_the_whole_story(capsys, tmp_path):
    code, out, _ = run(capsys, "demo", "--out", tmp_path / "demo", "--scale", "0.01")
    assert code == 0
    assert "converted, recalibrated" in out
    assert "train_runtime" not in out
    result = json.loads((tmp_path / "demo/demo.json").read_text())
    assert len(result["perplexity"]["RoPE"]) == len(result["lengths"]) == 4
    assert (tmp_path / "demo/demo.png").stat().st_size > 10_000
    assert (tmp_path / "demo/converted/modeling_drope.py").is_file()
    assert "steps, of the source code of Python" in (tmp_path / "demo/converted/README.md").read_text()
    text = (tmp_path / "demo/held_out.txt").read_text(encoding="utf-8")
    assert 390_000 < len(text.encode()) <= 400_000
    assert "\nimport " in text
    # What it advises at its end works as it stands; here on less of the text.
    program, *arguments = shlex.split(out.strip().split("\n")[-1])
    assert program == "hf-drope"
    code, out, err = run(capsys, *arguments, "--text-tokens", 2048)
    assert (code, err) == (0, "")
    assert out.split("\n")[0].split() == ["perplexity", "128", "256", "512", "1024"]
    assert {file.suffix for file in (tmp_path / "demo/evaluation").iterdir()} == {".json", ".html", ".png"}
    assert "| **this model** |" in (tmp_path / "demo/converted/README.md").read_text(encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("mine")
    code, _, err = run(capsys, "demo", "--out", tmp_path / "other")
    assert code == 2
    assert "holds no earlier demo" in err

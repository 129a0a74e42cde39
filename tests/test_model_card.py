"""Model cards: what they say, what they leave alone, and how they follow the records of the commands."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, write_source
from huggingface_hub import ModelCard
from test_examples import write_words

from hf_drope import convert_checkpoint, plan_conversion
from hf_drope.cli import main
from hf_drope.model_card import BEGIN, END, shown_command, update_card, update_cards
from hf_drope.provenance import model_files, sha256

SOURCE_CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\nbase_model: someone/older\n---\n# The source\nMMLU 99\n"


def run(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def card(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def front_matter(folder: Path) -> dict[str, Any]:
    return ModelCard(card(folder)).data.to_dict()


def section(folder: Path, title: str) -> str:
    """The text under a heading of the card."""
    return card(folder).split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0].split(END, 1)[0].strip()


def converted(tmp_path: Path, preset: str = "nope", **settings: Any) -> Path:
    if not (tmp_path / "src").exists():
        write_source(tmp_path / "src")
    plan = plan_conversion(tmp_path / "src", preset, overrides=settings)
    return convert_checkpoint(plan, tmp_path / f"dst-{preset}", progress=False)


def perplexity(model: str, length: int, value: float) -> dict[str, Any]:
    interval = {"low": value - 0.5, "high": value + 0.5}
    bins = {"edges": [0, length], "by_position": [1.0]}
    return {"model": model, "length": length, "perplexity": value, "tokens": 999, "windows": 9, **interval, **bins}


def retrieval(model: str, length: int, rate: float) -> dict[str, Any]:
    interval = {"low": max(0.0, rate - 0.1), "high": min(1.0, rate + 0.1)}
    return {"model": model, "task": "passkey", "length": length, "trials": 20, "rate": rate, **interval, "by_depth": []}


def results(folder: Path, source: Path) -> dict[str, Any]:
    """As `hf-drope evaluate` writes them: the source and its NTK, this model with stretched terms, and a stranger."""
    scaled = {"scaling": "ntk", "role": "baseline"}
    models = [
        {"name": "src", "path": str(source), "role": "source", "scaling": None, "window": 64},
        {"name": "src + ntk", "path": str(source), "window": 64, **scaled},
        {"name": "mine", "path": str(folder), "role": "converted", "scaling": None, "window": 64},
        {"name": "mine + yarn", "path": str(folder), "role": "converted", "position_scaling": "yarn", "window": 64},
        {"name": "same tokens", "path": "trained", "role": "stock", "scaling": None, "window": 64},
        {"name": "stranger", "path": "elsewhere", "role": "converted", "scaling": None, "window": 64},
    ]
    for model in models[:4]:
        model["sha256"] = sha256(model_files(Path(model["path"])))
    rates = {
        "src": (1.0, 0.0),
        "src + ntk": (1.0, 0.5),
        "mine": (0.6, 0.4),
        "mine + yarn": (0.6, 0.5),
        "same tokens": (0.9, 0.0),
        "stranger": (0.1, 0.1),
    }
    values = {
        "src": (10.0, 90.0),
        "src + ntk": (10.0, 12.0),
        "mine": (12.5, 11.25),
        "mine + yarn": (12.5, 11.0),
        "same tokens": (9.0, 80.0),
        "stranger": (7.0, 7.0),
    }
    return {
        "format": 1,
        "provenance": {"hf_drope": "9.8.7", "torch": "2", "transformers": "5", "command": ["/bin/hf-drope", "evaluate", str(folder)], "finished": "now"},
        "settings": {"seed": 3, "dtype": "float32"},
        "text": {"files": ["book.txt"], "sha256": "ab" * 32, "tokens": 4096},
        "models": models,
        "perplexity": [perplexity(n, length, v) for n, pair in values.items() for length, v in zip((64, 128), pair, strict=True)],
        "retrieval": [retrieval(n, length, r) for n, pair in rates.items() for length, r in zip((64, 128), pair, strict=True)],
    }  # fmt: skip


def test_a_conversion_says_what_it_did_and_what_is_not_known(tmp_path):
    folder = converted(tmp_path, "drope")
    record = json.loads((folder / "drope_conversion.json").read_text())
    done = section(folder, "What was done")
    assert "`src`" in done
    assert "its repository is not recorded" in done
    assert record["source_fingerprint"][:16] in done
    assert "dropped" in done
    assert json.loads(done.split("```json\n")[1].split("```")[0]) == record["drope_parameters"]
    assert section(folder, "Calibration") == "No calibration is recorded."
    assert section(folder, "Training") == "No training is recorded after the conversion."
    assert section(folder, "Measured").startswith("Not measured")
    assert "far worse than its source" in section(folder, "Limits")
    assert "trust_remote_code=True" in section(folder, "Use")
    assert "did not name" in section(folder, "Licence")
    assert "## Commands" not in card(folder)
    data = front_matter(folder)
    assert data["tags"] == ["hf_drope", "log"]
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert not {"license", "base_model", "model-index"} & data.keys()


def test_the_code_of_the_card_loads_the_model(tmp_path):
    """As it stands there, with the class that lies in the folder."""
    folder = converted(tmp_path, "simple")
    names: dict[str, Any] = {}
    exec(section(folder, "Use").split("```python\n")[1].split("```")[0].replace("PATH", str(folder)), names)
    assert type(names["model"]).__name__ == "DroPELlamaForCausalLM"
    assert names["tokenizer"]("w5").input_ids == [5]


@pytest.mark.parametrize(
    ("kind", "pipeline"), [("Model", "feature-extraction"), ("ForSequenceClassification", "text-classification")]
)
def test_the_pipeline_is_that_of_the_head(kind, pipeline, tmp_path):
    from tiny import tiny_model

    tiny_model("llama", kind).save_pretrained(tmp_path / "src")
    folder = converted(tmp_path)
    assert front_matter(folder)["pipeline_tag"] == pipeline
    assert "AutoTokenizer" not in section(folder, "Use")


def test_the_source_s_card_is_kept_byte_for_byte_and_gives_its_licence(tmp_path):
    write_source(tmp_path / "src")
    raw = SOURCE_CARD.replace("\n", "\r\n").encode()
    (tmp_path / "src/README.md").write_bytes(raw)
    (tmp_path / "src/SOURCE_README.md").write_text("of the source's own source")
    (tmp_path / "src/LICENSE").write_text("Do what you like.")
    folder = converted(tmp_path)
    assert (folder / "SOURCE_README_2.md").read_bytes() == raw
    assert (folder / "SOURCE_README.md").read_text() == "of the source's own source"
    assert front_matter(folder)["license"] == "apache-2.0"
    assert front_matter(folder)["language"] == ["en"]
    assert "base_model" not in front_matter(folder), "the source's own base is not the source"
    assert "MMLU" not in card(folder)
    assert all(
        text in section(folder, "Licence") for text in ("apache-2.0", "SOURCE_README_2.md", "[LICENSE](LICENSE)")
    )


@pytest.mark.parametrize("source_card", ["---\n: [\n---\nBroken", "---\n- a\n---\nA list", "No front matter"])
def test_a_source_s_card_that_cannot_be_read_says_nothing(source_card, tmp_path):
    write_source(tmp_path / "src")
    (tmp_path / "src/README.md").write_text(source_card)
    (tmp_path / "src/LICENSE").write_text("Do what you like.")
    folder = converted(tmp_path)
    assert (folder / "SOURCE_README.md").read_text() == source_card
    assert front_matter(folder)["license"] == "other"
    assert front_matter(folder)["license_link"] == "LICENSE"


def test_the_base_model_is_known_from_a_snapshot_or_from_the_user(tmp_path):
    revision = "0123456789abcdef" * 2 + "01234567"
    snapshot = tmp_path / "hub/models--owner--name/snapshots" / revision
    write_source(snapshot)
    convert_checkpoint(plan_conversion(snapshot), tmp_path / "a", progress=False)
    assert front_matter(tmp_path / "a")["base_model"] == "owner/name"
    assert f"huggingface.co/owner/name) at revision `{revision}`" in section(tmp_path / "a", "What was done")
    run("convert", snapshot, tmp_path / "b", "--base-model", "other/model@v2")
    assert front_matter(tmp_path / "b")["base_model"] == "other/model"
    assert "at revision `v2`" in section(tmp_path / "b", "What was done")
    run("convert", snapshot, tmp_path / "c", "--base-model", "other/model")
    assert "revision" not in section(tmp_path / "c", "What was done"), "that of another repository"
    local = tmp_path / "local"
    write_source(local)
    (local / ".cache/huggingface/download").mkdir(parents=True)
    (local / ".cache/huggingface/download/config.json.metadata").write_text(f"{revision}\netag\n1.0\n")
    run("convert", local, tmp_path / "d", "--base-model", "owner/name")
    assert f"at revision `{revision}`" in section(tmp_path / "d", "What was done")


def test_a_refill_keeps_the_user_s_words_and_changes_nothing_twice(tmp_path):
    write_source(tmp_path / "src")
    (tmp_path / "src/README.md").write_text(SOURCE_CARD)
    folder = converted(tmp_path)
    once = card(folder)
    update_card(folder)
    assert card(folder) == once
    mine = once.replace(BEGIN, "Mine, before.\n\n" + BEGIN).replace(END, END + "\n\nMine, after: \u00e4.\n")
    mine = mine.replace("library_name:", "datasets:\n- my/data\nlibrary_name:").replace("- nope", "- nope\n- my-tag")
    mine = mine.replace("license: apache-2.0", "license: mit")
    stale = mine.replace("No training is recorded", "Something stale")
    (folder / "README.md").write_text(stale, encoding="utf-8")
    update_card(folder, results(folder, tmp_path / "src"))
    text = card(folder)
    assert "stale" not in text
    assert text.index("Mine, before.") < text.index(BEGIN) < text.index(END) < text.index("Mine, after: ä.")
    data = front_matter(folder)
    assert (data["datasets"], data["license"]) == (["my/data"], "mit")
    assert sorted(data["tags"]) == ["hf_drope", "my-tag", "nope"]
    assert data["model-index"]
    update_card(folder)
    assert card(folder) == text


def test_a_card_without_our_marks_is_the_user_s_and_gets_ours_below(tmp_path):
    folder = converted(tmp_path)
    (folder / "README.md").write_text("---\nlicense: mit\nmodel-index: stale\n---\nMy own words.\n")
    update_card(folder)
    text = card(folder)
    assert text.index("My own words.") < text.index(BEGIN)
    assert front_matter(folder)["license"] == "mit"
    assert "model-index" not in front_matter(folder)
    update_card(folder)
    assert card(folder) == text
    (folder / "README.md").unlink()
    update_card(folder)
    assert card(folder).startswith("---\nlibrary_name")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"---\n: [\n---\n", "no YAML mapping"),
        (b"---\n- a\n---\n", "no YAML mapping"),
        (f"{BEGIN} and no end".encode(), "without one"),
        (f"{BEGIN}{END}{BEGIN}{END}".encode(), "without one"),
        (f"{END}".encode(), "before it"),
        (b"caf\xe9", "not UTF-8"),
    ],
)
def test_a_card_that_cannot_be_refilled_is_left_as_it_is(content, sentence, capsys, tmp_path):
    folder = converted(tmp_path)
    (folder / "README.md").write_bytes(content)
    (tmp_path / "results.json").write_text(json.dumps(results(folder, tmp_path / "src")))
    assert main(["card", str(folder), "--results", str(tmp_path / "results.json")]) == 2
    assert sentence in capsys.readouterr().err
    assert (folder / "README.md").read_bytes() == content
    assert not (folder / "drope_evaluation.json").exists()


def test_measured_numbers_stand_beside_the_source_and_the_baselines(tmp_path):
    folder = converted(tmp_path)
    update_card(folder, results(folder, tmp_path / "src"))
    text = section(folder, "Measured")
    assert "| src (the source) | 10 (9.5–10.5) | 90 (89.5–90.5) |" in text
    assert "| src + ntk (baseline) | 10 (9.5–10.5) | 12 (11.5–12.5) |" in text
    assert "| **this model** | 12.5 (12–13) | 11.25 (10.75–11.75) |" in text
    assert "| passkey | **this model** | 60 % (50–70) | 40 % (30–50) |" in text
    assert "| mine + yarn (this model, its position terms stretched) | 12.5 (12–13) | 11 (10.5–11.5) |" in text
    assert "| same tokens (a stock model) | 9 (8.5–9.5) | 80 (79.5–80.5) |" in text
    assert "stranger" not in card(folder)
    assert all(word in text for word in ("`book.txt`", "ab" * 8, "hf_drope 9.8.7", "seed 3", "20 trials"))
    limits = section(folder, "Limits")
    assert "higher than the source's at 64 tokens (+25.0 %)." in limits
    assert "less than the source: passkey at 64 (60 % against 100 %)." in limits
    assert "128 tokens, 2 times the window of 64" in limits
    assert "hf-drope evaluate dst-nope" in section(folder, "Commands")
    metrics = [metric for entry in front_matter(folder)["model-index"][0]["results"] for metric in entry["metrics"]]
    assert [metric["value"] for metric in metrics] == [12.5, 11.25, 0.6, 0.4]
    assert metrics[0]["args"]["low"] == 12.0
    kept = json.loads((folder / "drope_evaluation.json").read_text())
    assert not {"by_position", "by_depth"} & {
        key for rows in ("perplexity", "retrieval") for row in kept[rows] for key in row
    }
    assert str(tmp_path) not in json.dumps(kept["provenance"])


def test_a_part_that_was_not_measured_is_said_to_be_so(tmp_path):
    folder = converted(tmp_path)
    found = results(folder, tmp_path / "src")
    found["models"] = [model for model in found["models"] if model["name"] == "mine"]
    found["retrieval"] = []
    found["perplexity"] = [row for row in found["perplexity"] if row["model"] == "mine"]
    found["provenance"]["finished"] = None
    update_card(folder, found)
    assert "had not finished" in section(folder, "Measured")
    assert "The source was not measured" in section(folder, "Limits")
    assert "Retrieval was not measured." in section(folder, "Limits")


def test_nothing_behind_is_said_only_of_what_was_compared(tmp_path):
    folder = converted(tmp_path)
    found = results(folder, tmp_path / "src")
    for row in found["perplexity"]:
        row |= {"low": 0.0, "high": 100.0}
    for row in found["retrieval"]:
        row |= {"low": 0.0, "high": 1.0}
    update_card(folder, found)
    assert "no interval of its numbers lies behind" in section(folder, "Limits")


def test_numbers_of_other_weights_leave_the_card_and_are_not_taken_again(tmp_path):
    folder = converted(tmp_path, "simple")
    found = results(folder, tmp_path / "src")
    update_card(folder, found)
    assert "**this model**" in card(folder)
    from safetensors.torch import load_file, save_file

    shard = folder / "model-00002-of-00002.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    update_card(folder)
    assert section(folder, "Measured").startswith("Not measured")
    assert "model-index" not in front_matter(folder)
    before = card(folder)
    with pytest.raises(ValueError, match="is not the model that was evaluated: its weights or config changed"):
        update_card(folder, found)
    assert card(folder) == before


def test_perplexity_without_a_number_or_an_interval_is_told_as_that(tmp_path):
    folder = converted(tmp_path)
    found = results(folder, tmp_path / "src")
    found["retrieval"] = []
    for row in found["perplexity"]:
        # One window at 64 tokens, and at 128 a model that overflows.
        row |= {"low": None, "high": None}
        if (row["model"], row["length"]) == ("mine", 128):
            row["perplexity"] = None
    update_card(folder, found)
    assert "| **this model** | 12.5 | not a number |" in section(folder, "Measured")
    limits = section(folder, "Limits")
    assert "Its perplexity is no finite number at 128 tokens." in limits
    assert "too few windows of 64 tokens for an interval" in limits
    assert "behind the source's" not in limits
    metrics = [metric for entry in front_matter(folder)["model-index"][0]["results"] for metric in entry["metrics"]]
    assert [metric["value"] for metric in metrics] == [12.5]


def test_numbers_of_other_settings_leave_the_card(tmp_path):
    folder = converted(tmp_path)
    update_card(folder, results(folder, tmp_path / "src"))
    settings = json.loads((folder / "config.json").read_text())["drope_parameters"]
    edit_json(folder / "config.json", drope_parameters={**settings, "attention_scale": {"factor": 1.1}})
    update_card(folder)
    assert section(folder, "Measured").startswith("Not measured")


def test_every_converted_folder_of_an_evaluation_gets_its_numbers(tmp_path):
    first, second = converted(tmp_path), converted(tmp_path, "simple")
    found = results(first, tmp_path / "src")
    found["models"][5] |= {"path": str(second), "sha256": sha256(model_files(second))}
    # One whose position terms were stretched as well is one folder.
    assert update_cards(found) == [first / "README.md", second / "README.md"]
    assert "| **this model** | 12.5 (12–13) |" in card(first)
    assert "| **this model** | 7 (6.5–7.5) |" in card(second)


def test_a_fitted_attention_scale_is_told_with_its_curve(tmp_path):
    folder = converted(tmp_path)
    curve = [
        {"length": 64, "factor": 1.0, "without": 20.0, "with": 20.0},
        {"length": 128, "factor": 1.0416, "without": 30.0, "with": 25.0},
    ]
    edit_json(folder / "drope_conversion.json", attention_scale={"coefficient": 0.06, "curve": curve})
    update_card(folder)
    assert "coefficient 0.06" in section(folder, "Calibration")
    assert "| 128 | 1.042 | 30 | 25 |" in section(folder, "Calibration")


def test_results_of_other_models_and_other_folders_are_refused(capsys, tmp_path):
    folder = converted(tmp_path)
    before = card(folder)
    found = copy.deepcopy(results(folder, tmp_path / "src"))
    found["models"][2] |= {"path": "gone", "name": "gone"}
    files = {"others": found, "nothing": {"rows": []}}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    for name, sentence in (
        ("others", "not among the evaluated models (gone, stranger)"),
        ("nothing", "has no provenance"),
        ("none", "is no file"),
    ):
        assert main(["card", str(folder), "--results", str(tmp_path / f"{name}.json")]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["card", str(tmp_path / "src")]) == 2
    assert "not a converted checkpoint" in capsys.readouterr().err
    assert card(folder) == before


def test_a_card_can_be_written_elsewhere(tmp_path):
    folder = converted(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "results.json").write_text(json.dumps(results(folder, tmp_path / "src")))
    given = ("card", folder, "--results", tmp_path / "results.json", "--out")
    run(*given, tmp_path / "card.md")
    text = (tmp_path / "card.md").read_text()
    assert "**this model**" in text
    (tmp_path / "card.md").write_text(text + "\nMine.\n")
    run(*given, tmp_path / "card.md")
    assert (tmp_path / "card.md").read_text() == text + "\nMine.\n"
    (tmp_path / "notes.txt").write_text("Not a card.")
    assert main([str(argument) for argument in (*given, tmp_path / "notes.txt")]) == 2
    assert (tmp_path / "notes.txt").read_text() == "Not a card."
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_card_follows_a_model_through_all_commands(tmp_path):
    write_source(tmp_path / "src")
    (tmp_path / "src/README.md").write_text(SOURCE_CARD)
    text = write_words(tmp_path / "text.txt", 640, seed=1)
    dst, out = tmp_path / "dst", tmp_path / "out"
    steps = ("--tokens", 64, "--length", 16, "--steps", 1, "--output-steps", 1)
    run("convert", tmp_path / "src", dst, "--preset", "disentangled", "--calibrate", "--text", text, *steps)
    calibration = section(dst, "Calibration")
    assert "4 × 16 tokens of `text.txt`" in calibration
    assert "1 descent steps a layer and 1 steps" in calibration
    assert "far worse" not in section(dst, "Limits")
    convert = [line for line in section(dst, "Commands").splitlines() if line.startswith("hf-drope")]
    assert convert == [
        "hf-drope convert src dst --preset disentangled --calibrate --text text.txt " + " ".join(map(str, steps))
    ]
    update_card(dst, results(dst, tmp_path / "src"))
    (dst / "README.md").write_text(card(dst) + "\nMine.\n")

    training = ("--text", text, "--max-steps", 2, "--length", 16, "--no-bf16", "--train", "position")
    run("recalibrate", dst, out, *training)
    run("recalibrate", out, tmp_path / "again", *training, "--seed", 7)
    told = section(tmp_path / "again", "Training").splitlines()
    assert told[0].startswith("1. 64 tokens in 2 steps, 2 of 16 tokens a step, of `text.txt`")
    assert "seed 0" in told[0]
    assert "seed 7" in told[1]
    assert "trained: position; learning rate 0.0001 (position parameters 0.001)" in told[0]
    assert "no distillation; fp32" in told[0]
    record = json.loads((out / "drope_training.json").read_text())["runs"]
    assert len(record) == 1
    assert f"{record[0]['first_loss']:.3f} → {record[0]['last_loss']:.3f}" in told[0]
    commands = section(tmp_path / "again", "Commands")
    assert [line.split()[1] for line in commands.splitlines() if line.startswith("hf-drope")] == [
        "convert",
        "recalibrate",
        "recalibrate",
    ]
    assert section(out, "Measured").startswith("Not measured"), "those were other weights"
    assert not (out / "drope_evaluation.json").exists()
    assert section(out, "Calibration") == calibration
    assert card(tmp_path / "again").rstrip().endswith("Mine.")
    assert front_matter(tmp_path / "again")["license"] == "apache-2.0"
    assert "(convergence.png)" in section(out, "Training")


def test_an_exported_model_has_a_card_that_loads_it(tmp_path):
    folder = converted(tmp_path)
    update_card(folder, results(folder, tmp_path / "src"))
    run("export", folder, tmp_path / "out")
    use = section(tmp_path / "out", "Use")
    assert "trust_remote_code" not in use
    assert "**this model**" in section(tmp_path / "out", "Measured")
    assert not list((tmp_path / "out").glob("drope_*.json"))


def test_a_training_survives_a_card_that_cannot_be_refilled(caplog, tmp_path):
    folder = converted(tmp_path)
    (folder / "README.md").write_text(BEGIN)
    text = write_words(tmp_path / "text.txt", 320, seed=1)
    run("recalibrate", folder, tmp_path / "out", "--text", text, "--max-steps", 1, "--length", 16, "--no-bf16")
    assert "The model card was left as it is" in caplog.text
    assert (tmp_path / "out/README.md").read_text() == BEGIN
    assert (tmp_path / "out/model.safetensors").is_file()


def test_a_command_is_shown_without_the_places_of_this_machine(tmp_path):
    given = [
        "/usr/bin/hf-drope",
        "convert",
        "/data/me/src",
        "../dst",
        "models/x",
        "--text=/a/b.txt",
        "--set",
        "window=[1, 2]",
        "--length",
        "16",
    ]
    assert shown_command(given) == [
        "hf-drope",
        "convert",
        "src",
        "dst",
        "models/x",
        "--text=b.txt",
        "--set",
        "window=[1, 2]",
        "--length",
        "16",
    ]


def test_a_folder_of_a_model_in_memory_gets_a_card_without_a_conversion(tmp_path):
    from tiny import tiny_model

    from hf_drope import apply_drope

    apply_drope(tiny_model("llama"), "nope").save_pretrained(tmp_path / "saved")
    update_card(tmp_path / "saved")
    assert "an unrecorded source" in section(tmp_path / "saved", "What was done")
    edit_json(tmp_path / "saved/config.json", model_type="llama")
    with pytest.raises(ValueError, match="not a converted checkpoint"):
        update_card(tmp_path / "saved")

"""An evaluation as a whole: what it writes, going on where it stopped, and what it refuses."""

from __future__ import annotations

import copy
import importlib
import json
import shutil

import pytest
import torch
from checkpoints import save_byte_tokenizer, tiny_tokenizer
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_drope
from hf_drope import convert_checkpoint, evaluate, plan_conversion
from hf_drope.cli import main
from hf_drope.demo import byte_tokenizer
from hf_drope.evaluation_plan import unique_names
from hf_drope.evaluation_table import describe
from hf_drope.perplexity import measure_perplexity
from hf_drope.provenance import provenance
from hf_drope.report import write_report
from hf_drope.retrieval import check_tokenizer, draw_samples
from hf_drope.retrieval_tasks import TASKS
from hf_drope.text import leading_tokens

WINDOW = 300
LENGTHS = (WINDOW, 2 * WINDOW)
SCALED = ("source + pi", "source + ntk", "source + dynamic", "source + yarn")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A source with two conversions, `nope` and `taken-apart`, and a text."""
    root = tmp_path_factory.mktemp("evaluate")
    model = tiny_model("llama", vocab_size=300, max_position_embeddings=WINDOW, scale=2.0)
    model.save_pretrained(root / "source")
    save_byte_tokenizer(root / "source")
    for name, preset in (("nope", "nope"), ("taken-apart", "disentangled")):
        convert_checkpoint(plan_conversion(root / "source", preset), root / name, progress=False)
    apart = AutoModelForCausalLM.from_pretrained(root / "taken-apart", dtype=torch.float32)
    with torch.no_grad():
        for parameter in apart.position_parameters():
            parameter.uniform_(-1.0, 1.0)
    apart.save_pretrained(root / "taken-apart")
    lines = (f"Line {number} says that {number * number % 97} is the other thing.\n" for number in range(200))
    (root / "text.txt").write_text("".join(lines))
    return root


def run(folders, out, models=("nope",), **options):
    given = {"lengths": LENGTHS, "trials": 2, "digits": 3, "text_tokens": 1500, "progress": False}
    given |= {"report": False, **options}
    given.setdefault("text_files", [folders / "text.txt"])
    return evaluate([folders / name for name in models], out, **given)


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    options = {"against": folders / "source", "position_scaling": ["linear", "clip"]}
    return run(folders, out, ["nope", "taken-apart"], **options), out, options


def row_of(results, name, length, task="perplexity"):
    rows = results["perplexity"] if task == "perplexity" else results["retrieval"]
    (row,) = [r for r in rows if (r["model"], r["length"], r.get("task", "perplexity")) == (name, length, task)]
    return row


def test_the_function_is_had_by_its_name_whatever_was_imported_before():
    assert callable(evaluate)
    importlib.import_module("hf_drope.evaluation")
    assert hf_drope.evaluate is evaluate
    assert evaluate.__module__ == "hf_drope.evaluation"


def test_results_hold_every_model_length_and_task_and_where_they_come_from(whole, folders):
    results, out, _ = whole
    assert json.loads((out / "results.json").read_text()) == results
    names = [model["name"] for model in results["models"]]
    assert names == [
        "source",
        *SCALED,
        "nope",
        "taken-apart",
        "taken-apart, linear positions",
        "taken-apart, clip positions",
    ]
    keys = {(row["model"], row["length"]) for row in results["perplexity"]}
    assert keys == {(name, length) for name in names for length in LENGTHS}
    assert keys == {(row["model"], row["length"]) for row in results["retrieval"] if row["task"] == "passkey"}
    roles = {model["name"]: (model["role"], model["scaling"]) for model in results["models"]}
    assert roles["source"] == ("source", None)
    assert roles["source + yarn"] == ("baseline", "yarn")
    assert roles["taken-apart, clip positions"] == ("converted", None)
    assert {model["window"] for model in results["models"]} == {WINDOW}
    assert len({model["sha256"] for model in results["models"]}) == 3
    assert results["text"]["files"] == ["text.txt"]
    assert results["text"]["tokens"] == 1500
    told = results["provenance"]
    assert told["torch"] == torch.__version__
    assert told["finished"] is not None
    assert results["models"][6]["bias"]["kind"] == "disentangled"
    assert results["models"][5]["drope_parameters"]["rope_scale"] == 0.0
    assert "NaN" not in (out / "results.json").read_text()
    row = row_of(results, "nope", WINDOW, "passkey")
    assert (row["trials"], len(row["by_depth"]), len(row["examples"])) == (2, 5, 2)


def test_within_the_window_a_scaling_repeats_its_model_and_beyond_it_differs(whole):
    results, *_ = whole
    for base, variants in (
        ("source", SCALED),
        ("taken-apart", [f"taken-apart, {kind} positions" for kind in ("linear", "clip")]),
    ):
        for name in variants:
            for task in ("perplexity", "passkey"):
                row = dict(row_of(results, name, WINDOW, task))
                assert row.pop("same_as") == base
                assert {**row, "model": base} == row_of(results, base, WINDOW, task)
            beyond = row_of(results, name, 2 * WINDOW)
            assert "same_as" not in beyond
            assert beyond["by_position"] != row_of(results, base, 2 * WINDOW)["by_position"]


def test_figures_are_those_of_the_models_loaded_by_hand(whole, folders):
    results, *_ = whole
    text = leading_tokens([folders / "text.txt"], AutoTokenizer.from_pretrained(folders / "source"), 1500)

    def by_hand(name, **settings):
        model = AutoModelForCausalLM.from_pretrained(folders / name, dtype=torch.float32, **settings)
        return measure_perplexity(model, text, 2 * WINDOW, 2 * WINDOW)

    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": WINDOW}
    apart = AutoModelForCausalLM.from_pretrained(folders / "taken-apart").config.drope_parameters
    apart["position_bias"]["position_scaling"] = {"type": "linear", "factor": 2.0}
    for name, expected in (
        ("source", by_hand("source")),
        ("source + yarn", by_hand("source", rope_parameters=yarn)),
        ("nope", by_hand("nope")),
        ("taken-apart, linear positions", by_hand("taken-apart", drope_parameters=apart)),
    ):
        row = row_of(results, name, 2 * WINDOW)
        assert row["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)
        assert row["by_position"] == pytest.approx(expected["by_position"], rel=1e-4)


def test_a_scaling_has_the_factor_of_each_length(folders, tmp_path):
    lengths = [64, 400, 600]
    results = run(folders, tmp_path / "out", ["source"], tasks=["perplexity"], rope_scaling=["pi"], lengths=lengths)
    text = leading_tokens([folders / "text.txt"], AutoTokenizer.from_pretrained(folders / "source"), 1500)
    for length in lengths:
        rope = {"rope_type": "linear", "factor": max(1.0, length / WINDOW), "rope_theta": 10000.0}
        model = AutoModelForCausalLM.from_pretrained(folders / "source", dtype=torch.float32, rope_parameters=rope)
        expected = measure_perplexity(model, text, length, 600)["by_position"]
        assert row_of(results, "source + pi", length)["by_position"] == pytest.approx(expected, rel=1e-4)


def test_windows_begin_as_the_tokenizer_begins_a_text(folders, tmp_path):
    shutil.copytree(folders / "source", tmp_path / "begun")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "begun")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.save_pretrained(tmp_path / "begun")
    results = run(folders, tmp_path / "out", [tmp_path / "begun"], tasks=["perplexity"], lengths=[64])
    model = AutoModelForCausalLM.from_pretrained(folders / "source", dtype=torch.float32)
    text = leading_tokens([folders / "text.txt"], tokenizer, 1500)
    expected, without = (measure_perplexity(model, text, 64, 64, beginning=ids)["by_position"] for ids in ([0], []))
    assert row_of(results, "begun", 64)["by_position"] == pytest.approx(expected, rel=1e-4)
    assert expected[0] != pytest.approx(without[0], rel=1e-3)


def without_clock(results):
    results = copy.deepcopy(results)
    for key in ("started", "finished", "seconds", "command"):
        del results["provenance"][key]
    return results


def test_a_run_that_is_stopped_goes_on_and_equals_an_uninterrupted_one(whole, folders, tmp_path, monkeypatch, capsys):
    results, _, options = whole
    out = tmp_path / "out"
    import hf_drope.evaluation as evaluation

    measure, left = evaluation.measure_perplexity, [3]

    def stopping(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return measure(*args, **kwargs)

    monkeypatch.setattr(evaluation, "measure_perplexity", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(folders, out, ["nope", "taken-apart"], **options)
    kept = json.loads((out / "results.json").read_text())
    assert 0 < len(kept["perplexity"]) < len(results["perplexity"])
    assert kept["provenance"]["finished"] is None
    assert not list(out.glob(".*"))
    monkeypatch.setattr(evaluation, "measure_perplexity", measure)
    done = run(folders, out, ["nope", "taken-apart"], **options)
    assert without_clock(done) == without_clock(results)
    assert done["provenance"]["started"] == kept["provenance"]["started"]

    def never(*args, **kwargs):
        raise AssertionError("it was done")

    monkeypatch.setattr(evaluation, "measure_perplexity", never)
    monkeypatch.setattr(evaluation, "load_model", never)
    assert without_clock(run(folders, out, ["nope", "taken-apart"], **options)) == without_clock(results)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"trials": 3}, "its trials are 2"),
        ({"lengths": [WINDOW]}, f"its lengths are {WINDOW}, {2 * WINDOW}"),
        ({"seed": 1}, "its seed is 0"),
        ({"dtype": "bfloat16"}, "its dtype is float32"),
        ({"tasks": ["perplexity"]}, "its tasks are perplexity, passkey"),
        ({"rope_scaling": ["pi"]}, "its rope scaling is pi, ntk, dynamic, yarn"),
        ({"position_scaling": []}, "its position scaling is linear, clip"),
        ({"models": ["taken-apart"]}, "its models are source, source [+] pi"),
        ({"text": "another"}, "its text is another"),
    ],
)
def test_a_folder_of_another_evaluation_is_refused_and_left_as_it_was(changes, what, whole, folders, tmp_path):
    _, out, options = whole
    options = {**options, **changes}
    if "text" in options:
        (tmp_path / "text.txt").write_text(options.pop("text") + (folders / "text.txt").read_text())
        options["text_files"] = [tmp_path / "text.txt"]
    before = (out / "results.json").read_bytes()
    with pytest.raises(ValueError, match=f"holds another evaluation \\({what}"):
        run(folders, out, options.pop("models", ["nope", "taken-apart"]), **options)
    assert (out / "results.json").read_bytes() == before


def test_other_weights_under_the_same_name_are_another_evaluation(folders, tmp_path):
    shutil.copytree(folders / "source", tmp_path / "model")
    options = {"tasks": ["perplexity"], "lengths": [32], "text_files": [folders / "text.txt"], "report": False}
    evaluate(tmp_path / "model", tmp_path / "out", **options)
    tiny_model("llama", seed=1, vocab_size=300, max_position_embeddings=WINDOW).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="its model has other weights or another config"):
        evaluate(tmp_path / "model", tmp_path / "out", **options)


def test_another_tokenizer_in_the_same_folder_is_not_gone_on_with(folders, tmp_path):
    shutil.copytree(folders / "source", tmp_path / "model")
    options = {"tasks": ["perplexity"], "lengths": [32], "text_files": [folders / "text.txt"], "report": False}
    evaluate(tmp_path / "model", tmp_path / "out", **options)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["other"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="holds an evaluation of model with another tokenizer"):
        evaluate(tmp_path / "model", tmp_path / "out", **options)


def test_a_run_that_goes_on_under_other_versions_says_so(folders, tmp_path, monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr("hf_drope.evaluation.measure_retrieval", failing)
    with pytest.raises(ValueError, match="nope stops at passkey"):
        run(folders, tmp_path / "out")
    monkeypatch.undo()
    versions = provenance()
    monkeypatch.setattr("hf_drope.evaluation_results.provenance", lambda: {**versions, "torch": "99.0", "threads": 77})
    told = run(folders, tmp_path / "out")["provenance"]
    assert (told["torch"], told["continued_with"]) == (torch.__version__, [{"torch": "99.0", "threads": 77}])
    monkeypatch.setattr("hf_drope.evaluation_results.provenance", lambda: {**versions, "torch": "100.0"})
    again = run(folders, tmp_path / "out")["provenance"]
    assert (again["continued_with"], again["finished"]) == (told["continued_with"], told["finished"])
    page = write_report(tmp_path / "out")[0].read_text()
    assert "torch 99.0, threads 77" in page


def test_a_folder_that_cannot_be_written_is_found_out_before_the_work(folders, tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("it loaded a model")

    monkeypatch.setattr("hf_drope.evaluation.load_model", never)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run(folders, tmp_path / "file" / "out")


def test_a_folder_without_a_figure_may_become_another_evaluations(folders, tmp_path, monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr("hf_drope.evaluation.measure_perplexity", failing)
    with pytest.raises(ValueError, match="nope stops at perplexity"):
        run(folders, tmp_path / "out", seed=1)
    monkeypatch.undo()
    assert json.loads((tmp_path / "out" / "results.json").read_text())["perplexity"] == []
    assert run(folders, tmp_path / "out", tasks=["perplexity"])["settings"]["seed"] == 0


def test_the_table_shows_every_figure_with_its_interval(whole):
    results, *_ = whole
    text = describe(results)
    first, second = text.split("\n\n")
    assert first.split("\n")[0].split() == ["perplexity", "300", "600"]
    assert len(first.split("\n")) == 1 + len(results["models"])
    row = row_of(results, "nope", WINDOW)
    assert f"{row['perplexity']:.4g} ({row['low']:.4g} to {row['high']:.4g})" in first
    assert second.startswith("passkey, % of the answers, 2 trials")
    assert "0 (0 to 66)" in second


def test_the_command_prints_a_table_or_json_and_says_where_the_results_are(folders, tmp_path, capsys, monkeypatch):
    given = [
        "evaluate",
        folders / "nope",
        "--lengths",
        "32,64",
        "--tasks",
        "perplexity",
        "--text",
        folders / "text.txt",
    ]
    given = [*map(str, given), "--out", str(tmp_path / "out")]
    assert main(given) == 0
    out, err = capsys.readouterr()
    assert out.startswith("perplexity")
    assert "nope" in (tmp_path / "out" / "report.html").read_text()
    assert str(tmp_path / "out") in out
    assert err == ""
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["lengths"] == [32, 64]

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_drope.evaluation.measure_perplexity", interrupted)
    assert main([*given[:-1], str(tmp_path / "other")]) == 130
    assert f"interrupted; what is finished is in {tmp_path / 'other'}" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", [["32,64"], ["32", "64"], ["32,", "64"]])
def test_lists_are_given_with_commas_or_spaces(lengths, monkeypatch):
    asked = {}

    def noting(models, out, **options):
        asked.update(options, out=out)
        raise ValueError("enough")

    monkeypatch.setattr("hf_drope.evaluation.evaluate", noting)
    assert main(["evaluate", "a", "--lengths", *lengths, "--tasks", "passkey", "--rope-scaling", "none"]) == 2
    assert asked["out"] == "hf-drope-evaluation"
    assert (asked["lengths"], asked["tasks"], asked["rope_scaling"]) == ([32, 64], ["passkey"], [])


def test_a_length_that_is_no_number_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["evaluate", "a", "--out", "b", "--lengths", "1k"])
    assert caught.value.code == 2
    assert "'1k' is no list of whole numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trials": 0}, "trials is 0; it has to be at least 1"),
        ({"digits": 0}, "digits is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"lengths": [1]}, "length is 1; it has to be at least 2"),
        ({"lengths": []}, "There are no lengths"),
        ({"lengths": [300, 300]}, "lengths are 300, 300; give each once"),
        ({"tasks": ["pass-key"]}, "Unknown task 'pass-key'.*Did you mean 'passkey'"),
        ({"rope_scaling": ["yarm"]}, "Unknown RoPE scaling 'yarm'.*Did you mean 'yarn'"),
        ({"position_scaling": ["clipp"]}, "Unknown position scaling 'clipp'.*Did you mean 'clip'"),
        ({"dtype": "float23"}, "Unknown dtype 'float23'"),
        ({"text_files": []}, "perplexity needs text"),
        ({"text_files": [], "tasks": None, "lengths": [100]}, r"A prompt of passkey with its answer takes up to \d+ tokens of nope, and the shortest length is 100"),
        ({"tasks": ["perplexity"], "text_tokens": 500}, "The text has 500 tokens, fewer than the longest length of 600"),
        ({"bench": __file__}, "test_evaluate.py in .* is not readable JSON"),
        ({"bench": "config.json"}, "config.json is no file of costs"),
        ({"rope_scaling": ["pi"]}, "no stock model whose RoPE could be scaled"),
        ({"position_scaling": ["clip"]}, "No model has a disentangled bias"),
        ({"against": "nope"}, "is a converted model; give its source with --against"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_sentence_and_nothing_is_written(options, sentence, folders, tmp_path):
    options = {"tasks": ["perplexity", "passkey"], **options}
    if "against" in options:
        options["against"] = folders / options["against"]
    if "bench" in options:
        options["bench"] = folders / "nope" / options["bench"]
    with pytest.raises(ValueError, match=sentence) as caught:
        run(folders, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_models_that_will_not_do_are_refused(folders, tmp_path):
    def refused(model, sentence, **options):
        with pytest.raises(ValueError, match=sentence):
            run(folders, tmp_path / "out", [model], tasks=["perplexity"], **options)

    refused(tmp_path / "nowhere", "is not a local folder")
    shutil.copytree(folders / "source", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    refused(tmp_path / "bare", "bare has no tokenizer")
    shutil.copytree(folders / "source", tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    refused(tmp_path / "empty", "holds no weights")
    tiny_model("gpt2", vocab_size=300, n_positions=128).save_pretrained(tmp_path / "gpt2")
    save_byte_tokenizer(tmp_path / "gpt2")
    refused(tmp_path / "gpt2", "gpt2 cannot reach a length of 600: its table of positions ends at 128")
    refused(folders / "source", "bert that predicts no next tokens", against=_bert(tmp_path / "bert"))
    shutil.copytree(folders / "source", tmp_path / "words")
    for file in (tmp_path / "words").glob("tokenizer*"):
        file.unlink()
    tiny_tokenizer().save_pretrained(tmp_path / "words")
    refused(tmp_path / "words", "have different tokenizers", against=folders / "source")
    with pytest.raises(ValueError, match="tokenizer of words cannot write the answers of passkey"):
        run(folders, tmp_path / "out", [tmp_path / "words"], tasks=["passkey"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="is not empty and holds no evaluation"):
        run(folders, tmp_path / "full", ["nope"])
    assert not (tmp_path / "out").exists()


def test_a_dropped_table_ends_nowhere(folders, tmp_path):
    tiny_model("gpt2", vocab_size=300, n_positions=128).save_pretrained(tmp_path / "gpt2")
    save_byte_tokenizer(tmp_path / "gpt2")
    convert_checkpoint(plan_conversion(tmp_path / "gpt2", "nope"), tmp_path / "dropped", progress=False)
    results = run(folders, tmp_path / "out", [tmp_path / "dropped"], lengths=[400])
    assert results["models"][0]["window"] == 128
    assert row_of(results, "dropped", 400)["perplexity"] > 1
    assert row_of(results, "dropped", 400, "passkey")["trials"] == 2


def _bert(folder):
    folder.mkdir()
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_without_tokenizer_is_read_with_its_sources(folders, tmp_path):
    shutil.copytree(folders / "nope", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    options = {"tasks": ["perplexity"], "against": folders / "source", "rope_scaling": []}
    bare = run(folders, tmp_path / "one", [tmp_path / "bare"], **options)
    with_it = run(folders, tmp_path / "other", ["nope"], **options)
    assert row_of(bare, "bare", WINDOW)["perplexity"] == row_of(with_it, "nope", WINDOW)["perplexity"]


def test_a_failure_in_a_unit_is_a_sentence_and_what_was_finished_is_kept(folders, tmp_path, monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("out of memory\nat great length")

    monkeypatch.setattr("hf_drope.evaluation.measure_retrieval", failing)
    with pytest.raises(ValueError, match=f"nope stops at passkey at length {WINDOW}: out of memory$"):
        run(folders, tmp_path / "out", report=True)
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["perplexity"]) == 1
    assert "This evaluation is not finished: 1 of 4" in (tmp_path / "out" / "report.html").read_text()


def test_a_model_that_lacks_a_weight_is_not_measured_with_a_random_one(folders, tmp_path):
    shutil.copytree(folders / "source", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model holds no weights for model\.norm\.weight; save the whole"):
        run(folders, tmp_path / "out", [tmp_path / "model"])


def test_names_are_as_short_as_tells_folders_apart(tmp_path):
    folders = [tmp_path / "a" / "model", tmp_path / "b" / "model", tmp_path / "other"]
    assert list(unique_names(folders).values()) == ["a/model", "b/model", "other"]


def test_a_stock_model_without_a_source_gets_the_baselines_that_are_asked_for(folders, tmp_path):
    results = run(folders, tmp_path / "out", ["source"], tasks=["perplexity"], rope_scaling=["ntk"], lengths=[600])
    roles = {model["name"]: model["role"] for model in results["models"]}
    assert roles == {"source": "stock", "source + ntk": "baseline"}


def test_the_demos_tokens_are_bytes_and_write_all_that_is_asked(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(1, 0x500))) + "€ 🐍\n\ttwo  spaces "
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    for task in TASKS:
        check_tokenizer(draw_samples(task, trials=3, digits=7, seed=0), tokenizer, "bytes")

"""lm-evaluation-harness on converted folders, by the README's line: tasks of our own from files, nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import run_python, save_byte_tokenizer
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_drope import convert_checkpoint, plan_conversion

CONTEXT = 64
ROWS = [
    {"text": "the other thing", "choices": [" that they said", " then"], "answer": 0},
    {"text": "they said there and then", "choices": [" and there", " other", " thing that they said"], "answer": 2},
]
LONG = [{"text": "the other thing that they said " * 20 + "then", "choices": [" there", " and"], "answer": 1}]
COMMON = 'doc_to_text: "{{text}}"\ntarget_delimiter: ""\ntest_split: test\ndataset_path: json\n'
CHOICE = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n"
WRITE = (
    'output_type: generate_until\ndoc_to_target: "{{choices[answer]}}"\nmetric_list: [{metric: exact_match}]\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}\n'
)


class Place(NamedTuple):
    source: Path
    same: Path  # converted, with RoPE as it was
    dropped: Path
    biased: Path
    tasks: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("lm-eval")
    tiny_model("llama", vocab_size=300, max_position_embeddings=CONTEXT).save_pretrained(folder / "src")
    save_byte_tokenizer(folder / "src")
    for name, preset, settings in (
        ("same", "nope", {"rope_scale": 1.0}),
        ("dropped", "nope", {}),
        ("biased", "disentangled", {}),
    ):
        plan = plan_conversion(folder / "src", preset, overrides=settings)
        convert_checkpoint(plan, folder / name, progress=False)
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, rows, form in (("choose", ROWS, CHOICE), ("write", ROWS, WRITE), ("long", LONG, CHOICE)):
        data = tasks / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kwargs = f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}\n"
        (tasks / f"{name}.yaml").write_text(f"task: own_{name}\n{COMMON}{kwargs}{form}")
    return Place(folder / "src", folder / "same", folder / "dropped", folder / "biased", tasks)


def answers(folder: Path, place: Place, *tasks: str, **model_args: Any) -> dict[str, list[Any]]:
    """What lm-eval got from the model by task and document: log-likelihoods of the choices, or the text it wrote."""
    # Slow to import, and every worker reads this file.
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    arguments = {"pretrained": str(folder), "dtype": "float32", "trust_remote_code": True, **model_args}
    found = simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(place.tasks), include_defaults=False),
        device="cpu",
        batch_size=2,
        log_samples=True,
    )
    return {task: [in_numbers(sample) for sample in found["samples"][task]] for task in tasks}


def in_numbers(sample: dict[str, Any]) -> Any:
    replies = sample["filtered_resps"]
    return replies[0] if isinstance(replies[0], str) else [float(reply[0]) for reply in replies]


def log_likelihoods(folder: Path, rows: list[dict[str, Any]], longest: int | None = None) -> list[list[float]]:
    """The same from the model's own logits; `longest`: tokens of text and choice to keep, from the right."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    found = []
    for row in rows:
        found.append([])
        for choice in row["choices"]:
            begin = len(tokenizer(row["text"], add_special_tokens=False).input_ids)
            ids = torch.tensor([tokenizer(row["text"] + choice, add_special_tokens=False).input_ids])
            targets = ids[0, begin:]
            if longest is not None:
                ids = ids[:, -longest:]
            with torch.no_grad():
                scores = model(ids).logits[0].log_softmax(-1)[-len(targets) - 1 : -1]
            found[-1].append(float(scores.gather(1, targets[:, None]).sum()))
    return found


def test_the_one_liner_scores_and_writes_as_the_model_does_without_hf_drope(place, tmp_path):
    # As the command `lm_eval` does, where hf_drope is not installed.
    code = "import sys\nsys.modules['hf_drope'] = None\nfrom lm_eval.__main__ import cli_evaluate\ncli_evaluate()"
    model = f"pretrained={place.biased},trust_remote_code=True,dtype=float32,max_length=128"
    arguments = [
        "--model",
        "hf",
        "--model_args",
        model,
        "--tasks",
        "own_choose,own_write",
        "--include_path",
        place.tasks,
    ]
    arguments += ["--device", "cpu", "--batch_size", "2", "--output_path", tmp_path / "out", "--log_samples"]
    done = run_python(code, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "|own_choose|" in done.stdout
    samples = {}
    for task in ("choose", "write"):
        (file,) = (tmp_path / "out").rglob(f"samples_own_{task}_*.jsonl")
        lines = sorted(map(json.loads, file.read_text().splitlines()), key=lambda line: line["doc_id"])
        samples[task] = [in_numbers(line) for line in lines]
    assert_close(samples["choose"], log_likelihoods(place.biased, ROWS))

    model = AutoModelForCausalLM.from_pretrained(place.biased, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(place.biased, trust_remote_code=True)
    for row, text in zip(ROWS, samples["write"], strict=True):
        ids = torch.tensor([tokenizer(row["text"]).input_ids])
        written = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(written, skip_special_tokens=True).split("\n")[0] == text


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=2e-4)


def test_with_rope_on_a_converted_folder_scores_as_its_source(place):
    source = answers(place.source, place, "own_choose", "own_write")
    assert answers(place.same, place, "own_choose", "own_write") == source
    assert answers(place.same, place, "own_choose", backend="causal")["own_choose"] == source["own_choose"]
    dropped = answers(place.dropped, place, "own_choose", trust_remote_code=False)["own_choose"]
    assert_close(dropped, log_likelihoods(place.dropped, ROWS))
    apart = [
        abs(x - y)
        for one, other in zip(dropped, source["own_choose"], strict=True)
        for x, y in zip(one, other, strict=True)
    ]
    assert max(apart) > 0.1


def test_a_prompt_past_the_window_is_cut_from_the_left_unless_max_length_is_given(place):
    # The last token is only predicted, so that the window holds one more.
    whole, cut = log_likelihoods(place.biased, LONG), log_likelihoods(place.biased, LONG, longest=CONTEXT + 1)
    assert abs(whole[0][0] - cut[0][0]) > 0.01
    assert_close(answers(place.biased, place, "own_long")["own_long"], cut)
    assert_close(answers(place.biased, place, "own_long", max_length=256)["own_long"], whole)

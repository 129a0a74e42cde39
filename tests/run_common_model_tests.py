"""Run Transformers' own common model tests on stock and on converted classes, side by side.

    pip download --no-deps --no-binary transformers transformers==VERSION     # the installed one; unpack it
    pip install parameterized httpx                                           # which these tests import
    python tests/run_common_model_tests.py --source FOLDER

FOLDER is a checkout of Transformers at the installed version, or its unpacked source distribution with what that lacks put
in from a checkout: `tests/{__init__,causal_lm_tester}.py`, `tests/{generation,exporters,utils}`, `tests/models` and `utils`.
Nothing of it is copied here. Distributed, pipeline and slow tests are off, for both; nothing asks the network.

Every test that passes for a stock class has to pass for ours, or to be listed in `EXCEPTIONS`; otherwise the exit code is 1.
A preset takes two or three minutes a family on one core.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("llama", "qwen3", "gpt_neox", "gpt2")
PRESETS = ("nope", "simple", "drope")
STOCK = "stock"


class Excepted(NamedTuple):
    """A test that cannot pass on ours; `test` is a pattern, `families` and `presets` say where (empty: everywhere)."""

    test: str
    reason: str
    families: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()

    def covers(self, family: str, preset: str, test: str) -> bool:
        where = (not self.families or family in self.families) and (not self.presets or preset in self.presets)
        return where and fnmatch.fnmatchcase(test, self.test)


_BIASES = ("simple", "drope")
EXCEPTIONS: tuple[Excepted, ...] = (
    Excepted(
        "test_model_rope_scaling_from_config_*",
        "wants scaled RoPE to change what a model computes, and RoPE is dropped",
    ),
    Excepted(
        "test_can_set_attention_dynamically",
        "wants Transformers' own sentence for a backend that does not exist; ours names those that can add the bias",
        presets=_BIASES,
    ),
    Excepted(
        "test_*_padding_matches_padding_free_with_position_ids",
        "its mask has holes within a row; a bias counts the places between two tokens, and packed rows are without the holes",
        families=("gpt_neox",),
        presets=_BIASES,
    ),
    Excepted(
        "test_reverse_loading_mapping",
        "wants a type's renamings of keys to apply to every model; ours are for public checkpoints with norms of queries and keys",
        families=("llama",),
    ),
)


def run(source: Path, family: str, preset: str, pattern: str | None) -> dict[str, Any]:
    """Outcomes by test, and the reasons of failed and skipped ones, of one family with stock classes or with a preset."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "outcomes.json"
        command = [sys.executable, "-m", "pytest", f"tests/models/{family}/test_modeling_{family}.py"]
        command += ["-c", os.devnull, "--rootdir", str(source), "--noconftest", "-p", "common_model_plugin"]
        command += ["-p", "no:cacheprovider", "-q", "--tb=short", "-k"]
        command += [f"ModelTest and ({pattern})" if pattern else "ModelTest", "--drope-outcomes", str(target)]
        if preset != STOCK:
            command += ["--drope-preset", preset]
        path = [str(ROOT), str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        off = ("FSDP", "TENSOR_PARALLEL", "EXPERT_PARALLEL", "PIPELINE")
        environment = {
            **os.environ,
            **{f"RUN_{kind}_TESTS": "0" for kind in off},
            "PYTHONPATH": os.pathsep.join(part for part in path if part),
            "HF_DROPE_UNDER_TEST": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": folder,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
        if not target.is_file():
            raise RuntimeError(f"{family}, {preset}: pytest ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        if not found["outcomes"]:
            raise RuntimeError(f"{family}, {preset}: no test was run\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        found["log"] = done.stdout
        return found


def compare(family: str, preset: str, stock: dict[str, str], ours: dict[str, str]) -> dict[str, str | None]:
    """Tests that pass for stock and not for ours, with the reason for which they are excepted or None."""
    lost = sorted(test for test, outcome in stock.items() if outcome == "passed" and ours.get(test) != "passed")
    return {test: next((e.reason for e in EXCEPTIONS if e.covers(family, preset, test)), None) for test in lost}


def table(results: dict[str, dict[str, dict[str, Any]]], presets: list[str]) -> str:
    lines = ["| passed / failed / skipped / excepted | " + " | ".join([STOCK, *presets]) + " |"]
    lines.append("|---" * (len(presets) + 2) + "|")
    for family, by_preset in results.items():
        cells = []
        for preset in [STOCK, *presets]:
            outcomes = by_preset[preset]["outcomes"]
            excepted = {t for t, reason in by_preset[preset].get("lost", {}).items() if reason is not None}
            counted = [outcome for test, outcome in outcomes.items() if test not in excepted]
            counts = [counted.count(outcome) for outcome in ("passed", "failed", "skipped")]
            cells.append(" / ".join(map(str, counts if preset == STOCK else [*counts, len(excepted)])))
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="Transformers' sources, with a folder tests")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests that match, as in pytest")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every outcome to this file")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    options = parser.parse_args()
    source, presets = options.source.resolve(), list(options.presets)
    pairs = [(family, preset) for family in options.families for preset in [STOCK, *presets]]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda pair: run(source, *pair, options.k), pairs))
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for (family, preset), result in zip(pairs, found, strict=True):
        results.setdefault(family, {})[preset] = result
        if preset != STOCK:
            result["lost"] = compare(family, preset, results[family][STOCK]["outcomes"], result["outcomes"])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results, presets))
    unlisted = 0
    for family, by_preset in results.items():
        for preset in presets:
            result = by_preset[preset]
            for test, reason in result["lost"].items():
                unlisted += reason is None
                detail = result["reasons"].get(test, "")[-300:]
                what = f"excepted: {reason}" if reason else f"NOT LISTED: {result['outcomes'].get(test)}: {detail}"
                print(f"{family}, {preset}: {test}: {what}")
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main())

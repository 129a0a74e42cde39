"""The command line's arguments; what they are for is in `commands`.

Exit codes: 0 done, 1 a check failed, 2 wrong input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from . import __version__, commands
from .drope_parameters import PRESETS


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _length(text: str) -> int | float:
    """A stage length: whole steps, or a fraction of the run."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _words(text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if word]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None


class _Listed(argparse.Action):
    """Takes a list with commas, with spaces, or with both."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, [value for part in values for value in part])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-drope",
        description="Take position encoding out of pretrained language models, or replace it by a bias.",
    )
    parser.add_argument("--version", action="version", version=f"hf-drope {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    sub = command("inspect", commands.inspect, "Say what a checkpoint folder holds, from its JSON and weight headers.")
    sub.add_argument("path", metavar="PATH", help="a local checkpoint folder")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("convert", commands.convert, "Convert a checkpoint folder without loading the model.")
    sub.add_argument("source", metavar="SRC", help="a local checkpoint folder")
    sub.add_argument("target", metavar="DST", help="the folder to write; appears when it is complete")
    sub.add_argument("--preset", default="nope", help=f"one of {', '.join(PRESETS)} (default: nope)")
    _add_settings(sub)
    sub.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    sub.add_argument("--overwrite", action="store_true", help="replace a target that is not empty")
    sub.add_argument("--calibrate", action="store_true", help="calibrate the bias on --text in one go")
    _add_calibration(sub, required=False)
    sub.add_argument(
        "--base-model", metavar="REPO", help="the source's repository for the model card, as NAME or NAME@REVISION"
    )
    _add_push(sub)
    sub.add_argument("--json", action="store_true", help="print the plan as JSON")

    sub = command(
        "calibrate",
        commands.calibrate,
        "Compute a converted checkpoint's position parameters from its source, or fit its attention scale, in place.",
    )
    sub.add_argument("path", metavar="MODEL", help="a converted checkpoint folder")
    sub.add_argument("--source", metavar="SRC", help="the folder it was converted from: calibrates the position bias")
    _add_calibration(sub, required=True)
    _add_attention_scale(sub)
    sub.add_argument("--json", action="store_true", help="print the report as JSON")

    sub = command(
        "export",
        commands.export,
        "Write a model without position encoding as a plain checkpoint of its own architecture.",
    )
    sub.add_argument("source", metavar="MODEL", help="a converted checkpoint folder")
    sub.add_argument("target", metavar="OUT", help="the folder, or .gguf file, to write; appears when it is complete")
    sub.add_argument(
        "--format",
        choices=["stock", "gguf"],
        default="stock",
        help="a checkpoint folder, or one file for llama.cpp (default: stock)",
    )
    sub.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    sub.add_argument("--overwrite", action="store_true", help="replace a target that is not empty")
    sub.add_argument("--json", action="store_true", help="print the plan as JSON")

    sub = command("verify", commands.verify, "Check a converted checkpoint against its source.")
    sub.add_argument("path", metavar="DST", help="a converted checkpoint folder")
    sub.add_argument("--against", metavar="SRC", required=True, help="the folder it was converted from")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("recalibrate", commands.recalibrate, "Train a converted checkpoint through the staged schedule.")
    sub.add_argument("model", metavar="MODEL", help="a converted checkpoint folder")
    sub.add_argument("out", metavar="OUT", help="the folder for the result and its checkpoints")
    sub.add_argument(
        "--text", nargs="+", required=True, metavar="FILE", help=".txt files, or .jsonl with a field 'text'"
    )
    sub.add_argument(
        "--max-steps",
        type=int,
        metavar="N",
        help="optimizer steps (default: 100,000 tokens after calibration, else 500,000, at most one pass over the text)",
    )
    sub.add_argument("--length", type=int, help="tokens a sequence (default: 512, at most the context)")
    sub.add_argument("--batch-size", type=int, help="sequences a step and device (default: 2 if calibrated, else 1)")
    sub.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches a step (default: 1)")
    sub.add_argument("--learning-rate", type=float, help="(default: 1e-4 if calibrated, 5e-4 for LoRA, else 1e-3)")
    sub.add_argument("--position-learning-rate", type=float, help="of bias and gate (default: 10 times the other)")
    sub.add_argument("--warmup", type=_length, metavar="N", help="steps, or share below 1, in which RoPE fades")
    sub.add_argument("--transition", type=_length, metavar="N", help="steps, or share below 1, in which the gate cools")
    sub.add_argument("--fade-terms", action="store_true", help="fade a disentangled bias out in the transition")
    sub.add_argument("--position-prediction", type=float, default=0.0, metavar="W", help="weight of the auxiliary loss")
    sub.add_argument("--train", choices=("all", "attention", "position"), help="what to train (default: attention)")
    sub.add_argument("--position-only", action="store_true", help="the same as --train position")
    sub.add_argument("--lora-rank", type=int, metavar="R", help="train LoRA adapters of this rank and merge them")
    sub.add_argument(
        "--distill",
        type=float,
        nargs="?",
        const=0.5,
        default=0.0,
        metavar="W",
        help="weight of the source's predictions in the loss (0.5 if given alone)",
    )
    sub.add_argument("--source", metavar="SRC", help="the source's folder, or stored top-k logits, for --distill")
    sub.add_argument("--distill-temperature", type=float, default=1.0, metavar="T", help="(default: 1)")
    sub.add_argument(
        "--distill-top-k",
        type=int,
        metavar="K",
        help="compare the K likeliest tokens (default: 64; 0 for all)",
    )
    sub.add_argument("--distill-hidden", type=float, default=0.0, metavar="W", help="weight of the attention outputs")
    sub.add_argument("--save-steps", type=int, help="steps between checkpoints (default: a tenth of the run)")
    sub.add_argument("--seed", type=int, default=0, help="(default: 0)")
    sub.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, help="autocast to bf16 (default: where the hardware has it)"
    )
    sub.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    sub.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUT")
    _add_push(sub)
    sub.add_argument("--json", action="store_true", help="print the summary as JSON")

    sub = command("card", commands.card, "Refill a converted checkpoint's model card from its records.")
    sub.add_argument("path", metavar="MODEL", help="a converted checkpoint folder")
    sub.add_argument("--results", metavar="FILE", help="results.json of hf-drope evaluate, to keep in the folder")
    sub.add_argument("--out", metavar="FILE", help="write the card there and change nothing in the folder")
    _add_push(sub)

    sub = command(
        "demo", commands.demo, "The whole story on a small Llama: train with RoPE, convert, recalibrate, compare."
    )
    sub.add_argument(
        "--out", default="hf-drope-demo", help="folder for models, table and picture (default: %(default)s)"
    )
    sub.add_argument("--preset", default="drope", help=f"one of {', '.join(PRESETS)} (default: %(default)s)")
    _add_settings(sub)
    sub.add_argument("--scale", type=float, default=1.0, help="share of the usual training steps (default: 1)")

    sub = command(
        "evaluate",
        commands.evaluate,
        "Measure perplexity by position and retrieval of models at several lengths, beside scaled RoPE.",
    )
    sub.add_argument("models", nargs="+", metavar="MODEL", help="folders of converted or stock models")
    sub.add_argument(
        "--out",
        default="hf-drope-evaluation",
        metavar="DIR",
        help="for results and report; a stopped run goes on there (default: %(default)s)",
    )
    sub.add_argument("--against", metavar="SRC", help="the source's folder, which is measured as well")
    listed: dict[str, Any] = {"nargs": "+", "action": _Listed}
    sub.add_argument(
        "--lengths",
        type=_numbers,
        default=[512, 1024, 2048],
        metavar="L,L",
        help="tokens (default: 512,1024,2048)",
        **listed,
    )
    sub.add_argument(
        "--tasks",
        type=_words,
        metavar="NAME,NAME",
        help="of perplexity, passkey, multikey, multiquery, multivalue, variable-tracking (default: perplexity with --text, and passkey)",
        **listed,
    )
    sub.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="FILE",
        help=".txt files, or .jsonl with a field 'text', for perplexity",
    )
    sub.add_argument("--trials", type=int, default=20, metavar="N", help="prompts a task and length (default: 20)")
    sub.add_argument(
        "--rope-scaling",
        type=_words,
        metavar="NAME,NAME",
        help="baselines beyond the window, of pi, ntk, dynamic, yarn (default: all of the source), or none",
        **listed,
    )
    sub.add_argument(
        "--position-scaling",
        type=_words,
        default=[],
        metavar="NAME,NAME",
        help="of linear, ntk, yarn, clip: disentangled models with stretched position terms as well",
        **listed,
    )
    sub.add_argument("--digits", type=int, default=7, metavar="N", help="of the numbers to be found (default: 7)")
    sub.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    sub.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    sub.add_argument(
        "--text-tokens", type=int, metavar="N", help="at most so many (default: 32768, or twice the longest length)"
    )
    sub.add_argument("--batch-size", type=int, metavar="N", help="sequences at a time (default: up to 8192 tokens)")
    sub.add_argument(
        "--bench", metavar="FILE", help="what hf-drope bench --json wrote, for the report's table of costs"
    )
    sub.add_argument(
        "--update-card", action="store_true", help="put the numbers into each converted folder and its model card"
    )
    sub.add_argument("--json", action="store_true", help="print the results as JSON")

    sub = command("bench", commands.bench, "Measure what a position mode costs, as a ratio to the stock RoPE model.")
    sub.add_argument("--model", metavar="DIR", help="folder or file of a config (default: a 12-layer Llama)")
    sub.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1024, 4096, 16384],
        metavar="L",
        help="(default: 1024 4096 16384, 50 minutes on 2 cores; 1024 alone takes minutes)",
    )
    sub.add_argument(
        "--measures",
        nargs="+",
        metavar="NAME",
        help="of prefill, memory, decode, train (the default), train-memory, attention, attention-memory",
    )
    sub.add_argument(
        "--only", nargs="+", metavar="NAME", help="variants by name; where none has it, those whose names begin so"
    )
    sub.add_argument("--all", action="store_true", help="every bias and gate instead of one of each kind")
    sub.add_argument("--backends", nargs="+", default=["sdpa"], metavar="NAME", help="(default: sdpa)")
    sub.add_argument("--stock-backend", default="sdpa", metavar="NAME", help="that of the stock model (default: sdpa)")
    sub.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 or float16 (default: bfloat16)")
    sub.add_argument("--device", default="cpu", help="(default: cpu)")
    sub.add_argument("--rounds", type=int, default=5, help="ratios to take the median of (default: 5)")
    sub.add_argument("--json", metavar="FILE", help="write all figures there")
    sub.add_argument("--plot", metavar="FILE", help="draw cost against length there")
    sub.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its target")

    sub = command("env", commands.env, "Print the versions that matter in a bug report.")
    sub.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_calibration(parser: argparse.ArgumentParser, required: bool) -> None:
    text = ".txt files, or .jsonl with a field 'text'"
    parser.add_argument("--text", nargs="+", required=required, metavar="FILE", help=text)
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens in all (default: 16384)")
    parser.add_argument(
        "--length",
        type=int,
        metavar="L",
        help="tokens a window (default: the context, at most 8192 or an eighth of all tokens)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="descent steps a layer (default: 32 for a disentangled bias with p2c, else 0)",
    )
    parser.add_argument(
        "--output-steps",
        type=int,
        metavar="N",
        help="descent steps of all layers towards the source's output (default: 24 for a disentangled bias with p2c, else 40)",
    )


def _add_attention_scale(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("attention scale")
    group.add_argument(
        "--attention-scale",
        action="store_true",
        help="fit c of the factor 1 + c·ln(i / window) on the scores of queries past the window; after --source, or alone",
    )
    group.add_argument(
        "--lengths",
        type=_numbers,
        metavar="L,L",
        help="tokens to fit at (default: 2, 4 and 8 times the window, as far as the text allows)",
    )
    group.add_argument(
        "--original-length", type=int, metavar="L", help="the window, where the scale begins (default: the config's)"
    )
    group.add_argument(
        "--scale-tokens", type=int, metavar="N", help="tokens of text (default: 16384, or twice the longest length)"
    )
    group.add_argument("--dtype", help="float32, bfloat16 or float16, of the model in this fit (default: float32)")


def _add_push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--push-to-hub", metavar="REPO", help="upload the finished folder to this repository")
    parser.add_argument("--private", action="store_true", help="make the repository private if it is new")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        type=_setting,
        default=[],
        metavar="KEY=VALUE",
        help="change one setting, such as rope_scale=1 or max_distance=1024; may be repeated",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    arguments.argv = ["hf-drope", *(sys.argv[1:] if argv is None else argv)]
    try:
        return arguments.run(arguments)
    except (ValueError, OSError, ImportError) as error:
        print(f"hf-drope {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        # By name: importing the class would import torch for every command.
        if type(error).__name__ != "NonFiniteLossError":
            raise
        print(f"hf-drope {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"hf-drope {arguments.command}: interrupted", file=sys.stderr)
        return 130

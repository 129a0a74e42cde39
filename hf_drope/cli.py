"""The command line: a thin layer that parses, calls one function of the package and prints what it returns.

Exit codes: 0 done, 1 a check failed, 2 wrong input. Heavy imports stand inside the commands, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .drope_parameters import PRESETS, DroPEParameters


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-drope",
        description="Take position encoding out of pretrained language models, or replace it by a bias.",
    )
    parser.add_argument("--version", action="version", version=f"hf-drope {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    sub = command("inspect", _inspect, "Say what a checkpoint folder holds, from its JSON and weight headers.")
    sub.add_argument("path", metavar="PATH", help="a local checkpoint folder")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("convert", _convert, "Convert a checkpoint folder without loading the model.")
    sub.add_argument("source", metavar="SRC", help="a local checkpoint folder")
    sub.add_argument("target", metavar="DST", help="the folder to write; appears when it is complete")
    sub.add_argument("--preset", default="nope", help=f"one of {', '.join(PRESETS)} (default: nope)")
    _add_settings(sub)
    sub.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    sub.add_argument("--overwrite", action="store_true", help="replace a target that is not empty")
    sub.add_argument("--calibrate", action="store_true", help="calibrate the bias on --text in one go")
    _add_calibration(sub, required=False)
    sub.add_argument("--json", action="store_true", help="print the plan as JSON")

    sub = command(
        "calibrate", _calibrate, "Compute a converted checkpoint's position parameters from its source, in place."
    )
    sub.add_argument("path", metavar="MODEL", help="a converted checkpoint folder")
    sub.add_argument("--source", metavar="SRC", required=True, help="the folder it was converted from")
    _add_calibration(sub, required=True)
    sub.add_argument("--json", action="store_true", help="print the report as JSON")

    sub = command(
        "export", _export, "Write a model without position encoding as a plain checkpoint of its own architecture."
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

    sub = command("verify", _verify, "Check a converted checkpoint against its source.")
    sub.add_argument("path", metavar="DST", help="a converted checkpoint folder")
    sub.add_argument("--against", metavar="SRC", required=True, help="the folder it was converted from")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("recalibrate", _recalibrate, "Train a converted checkpoint through the staged schedule.")
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
    sub.add_argument("--json", action="store_true", help="print the summary as JSON")

    sub = command("demo", _demo, "The whole story on a small Llama: train with RoPE, convert, recalibrate, compare.")
    sub.add_argument(
        "--out", default="hf-drope-demo", help="folder for models, table and picture (default: %(default)s)"
    )
    sub.add_argument("--preset", default="drope", help=f"one of {', '.join(PRESETS)} (default: %(default)s)")
    _add_settings(sub)
    sub.add_argument("--scale", type=float, default=1.0, help="share of the usual training steps (default: 1)")

    sub = command("bench", _bench, "Measure what a position mode costs, as a ratio to the stock RoPE model.")
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

    sub = command("env", _env, "Print the versions that matter in a bug report.")
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
        help="tokens a window (default: the context, at most 8192 or half of all tokens)",
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


def _calibration(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("tokens", "length", "steps", "output_steps")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


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


def _parameters(arguments: argparse.Namespace) -> DroPEParameters:
    return DroPEParameters.preset(arguments.preset, **dict(arguments.settings))


def _no_bars_in_a_log() -> None:
    """Transformers draws its bars into files and pipes as well."""
    if not sys.stderr.isatty():
        import transformers

        transformers.logging.disable_progress_bar()


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


def _inspect(arguments: argparse.Namespace) -> int:
    from .convert import inspect_checkpoint

    found = inspect_checkpoint(arguments.path)
    if arguments.json:
        _print_json(found)
    else:
        width = max(map(len, found))
        for key, value in found.items():
            text = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{key:{width}}  {'–' if value in (None, {}) else text}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from .export import export_checkpoint, plan_export
    from .gguf_export import export_gguf, plan_gguf

    if arguments.format == "stock" and str(arguments.target).endswith(".gguf"):
        raise ValueError(
            f"{arguments.target} ends in .gguf and the format is stock, which is a folder; give --format gguf."
        )
    make_plan, write = (plan_gguf, export_gguf) if arguments.format == "gguf" else (plan_export, export_checkpoint)
    plan: Any = make_plan(arguments.source)
    if not arguments.dry_run:
        write(plan, arguments.target, overwrite=arguments.overwrite)
    if arguments.json:
        _print_json(plan.to_dict())
    else:
        print(plan.describe())
        print("nothing written (dry run)" if arguments.dry_run else f"written to {arguments.target}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from .conversion_plan import plan_conversion
    from .convert import convert_checkpoint

    plan = plan_conversion(arguments.source, _parameters(arguments))
    if not arguments.calibrate and (arguments.text or _calibration(arguments)):
        raise ValueError(
            "--text, --tokens, --length, --steps and --output-steps belong to --calibrate; give that as well."
        )
    report = None
    if arguments.calibrate:
        from .folder_calibration import calibrate_checkpoint, check_calibration

        check_calibration(plan.source, plan.parameters, arguments.text or (), **_calibration(arguments))
    if not arguments.dry_run:
        convert_checkpoint(plan, arguments.target, overwrite=arguments.overwrite)
        if arguments.calibrate:
            _no_bars_in_a_log()
            report = calibrate_checkpoint(arguments.target, arguments.source, arguments.text, **_calibration(arguments))
    if arguments.json:
        _print_json(plan.to_dict() | ({"calibration": report.to_dict()} if report else {}))
    else:
        print(plan.describe())
        if report:
            print(report.describe())
        print("nothing written (dry run)" if arguments.dry_run else f"written to {arguments.target}")
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from .folder_calibration import calibrate_checkpoint

    _no_bars_in_a_log()
    report = calibrate_checkpoint(arguments.path, arguments.source, arguments.text, **_calibration(arguments))
    if arguments.json:
        _print_json(report.to_dict())
    else:
        print(report.describe())
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from .verify import verify_checkpoint

    _no_bars_in_a_log()
    report = verify_checkpoint(arguments.path, arguments.against)
    if arguments.json:
        _print_json(report.to_dict())
    else:
        print(report.describe())
    return 0 if report.passed else 1


def _leave_processes() -> None:
    """Leave a launcher's group of processes: threads of it that live when Python ends would abort the process."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


def _recalibrate(arguments: argparse.Namespace) -> int:
    from .recalibrate import recalibrate
    from .schedule import DroPESchedule

    _no_bars_in_a_log()
    stages: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("warmup", "transition") if getattr(arguments, name) is not None
    }
    if arguments.fade_terms:
        # The bias is the scaffold here; RoPE on the content, where it is still there, fades before.
        stages = {"warmup": 0, "transition": 0.7, "fade_terms": True, **stages}
    if arguments.position_only and arguments.train not in (None, "position"):
        raise ValueError(f"--position-only and --train {arguments.train} contradict each other; give one of them.")
    summary = recalibrate(
        arguments.model,
        arguments.out,
        arguments.text,
        max_steps=arguments.max_steps,
        sequence_length=arguments.length,
        batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.accumulate,
        learning_rate=arguments.learning_rate,
        position_learning_rate=arguments.position_learning_rate,
        lora_rank=arguments.lora_rank,
        distill=arguments.distill,
        distill_temperature=arguments.distill_temperature,
        distill_top_k=arguments.distill_top_k,
        distill_hidden=arguments.distill_hidden,
        source=arguments.source,
        resume=arguments.resume,
        schedule=DroPESchedule(**stages) if stages else None,
        position_prediction=arguments.position_prediction,
        train_only="position" if arguments.position_only else arguments.train,
        seed=arguments.seed,
        save_steps=arguments.save_steps,
        bf16=arguments.bf16,
        dry_run=arguments.dry_run,
        announce=lambda plan: print(plan, file=sys.stderr if arguments.json else sys.stdout, flush=True),
    )
    _leave_processes()
    if not summary:
        # The first of several processes speaks for all.
        return 0
    if arguments.dry_run and not arguments.json:
        print("nothing written (dry run)")
        return 0
    if arguments.json:
        _print_json(summary)
    else:
        for key, value in summary.items():
            print(f"{key}: {value}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import run_demo

    _no_bars_in_a_log()
    print(run_demo(arguments.out, _parameters(arguments), scale=arguments.scale))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from .bench import USUAL_MEASURES, bench
    from .bench_report import describe, has_targets, missed, plot, write_json

    for name in (arguments.json, arguments.plot):
        if name is not None and not Path(name).absolute().parent.is_dir():
            raise ValueError(f"{name} is in a folder that does not exist; make it first.")
    result = bench(
        arguments.model,
        lengths=arguments.lengths,
        measures=arguments.measures or USUAL_MEASURES,
        only=arguments.only,
        every=arguments.all,
        backends=arguments.backends,
        stock_backend=arguments.stock_backend,
        dtype=arguments.dtype,
        device=arguments.device,
        rounds=arguments.rounds,
    )
    print(describe(result))
    if arguments.json:
        write_json(result, arguments.json)
    if arguments.plot:
        plot(result, arguments.plot)
    if not result["rows"]:
        raise ValueError("nothing could be measured; see above why.")
    if arguments.check and not has_targets(result):
        raise ValueError("nothing that was measured has a target; --check judges 1024, 4096 and 16384 tokens.")
    return 1 if arguments.check and missed(result) else 0


def _env(arguments: argparse.Namespace) -> int:
    from importlib import metadata

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    packages = ("torch", "transformers", "accelerate", "peft", "safetensors", "trl", "datasets", "matplotlib")
    found = {"hf-drope": __version__, **{name: version(name) for name in packages}}
    found |= {"python": platform.python_version(), "platform": platform.platform()}
    try:
        import torch

        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found["devices"] = ", ".join(devices) or f"CPU, {torch.get_num_threads()} threads"
    except ImportError:
        found["devices"] = "unknown without torch"
    if arguments.json:
        _print_json(found)
    else:
        for key, value in found.items():
            print(f"{key}: {value}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
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

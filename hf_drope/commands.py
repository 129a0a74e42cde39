"""What each command of the command line does with its arguments and prints; heavy imports are inside."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

from . import __version__
from .drope_parameters import DroPEParameters


def _calibration(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("tokens", "length", "steps", "output_steps")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _parameters(arguments: argparse.Namespace) -> DroPEParameters:
    return DroPEParameters.preset(arguments.preset, **dict(arguments.settings))


def _no_bars_in_a_log() -> None:
    """Transformers draws its bars into files and pipes as well."""
    if not sys.stderr.isatty():
        import transformers

        transformers.logging.disable_progress_bar()


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


def inspect(arguments: argparse.Namespace) -> int:
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


def export(arguments: argparse.Namespace) -> int:
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


def convert(arguments: argparse.Namespace) -> int:
    from .conversion_plan import plan_conversion
    from .convert import convert_checkpoint
    from .model_card import shown_command

    _check_push(arguments)
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
        command = shown_command(arguments.argv)
        convert_checkpoint(
            plan, arguments.target, overwrite=arguments.overwrite, base_model=arguments.base_model, command=command
        )
        if arguments.calibrate:
            _no_bars_in_a_log()
            try:
                report = calibrate_checkpoint(
                    arguments.target, arguments.source, arguments.text, **_calibration(arguments), command=command
                )
            except ValueError as error:
                target = arguments.target
                raise ValueError(
                    f"{error} ({target} is converted and not calibrated; hf-drope calibrate goes on)"
                ) from error
    if arguments.json:
        _print_json(plan.to_dict() | ({"calibration": report.to_dict()} if report else {}))
    else:
        print(plan.describe())
        if report:
            print(report.describe())
        print("nothing written (dry run)" if arguments.dry_run else f"written to {arguments.target}")
    _push(arguments, arguments.target)
    return 0


def calibrate(arguments: argparse.Namespace) -> int:
    if arguments.source is None and not arguments.attention_scale:
        raise ValueError(
            "There is nothing to do; give --source SRC to calibrate the bias, --attention-scale to fit the scale, or both."
        )
    scale = _attention_scale(arguments)
    if arguments.source is None and _calibration(arguments):
        raise ValueError(
            "--tokens, --length, --steps and --output-steps are of the bias, which is calibrated with --source SRC; for the "
            "scale there are --scale-tokens and --lengths."
        )
    from .folder_attention_scale import check_attention_scale, fit_checkpoint_attention_scale
    from .folder_calibration import calibrate_checkpoint
    from .model_card import shown_command

    _no_bars_in_a_log()
    command = shown_command(arguments.argv)
    reports: dict[str, Any] = {}
    if arguments.attention_scale:
        check_attention_scale(arguments.path, arguments.text, **scale)
    if arguments.source is not None:
        reports["bias"] = calibrate_checkpoint(
            arguments.path, arguments.source, arguments.text, **_calibration(arguments), command=command
        )
    if arguments.attention_scale:
        reports["attention_scale"] = fit_checkpoint_attention_scale(
            arguments.path, arguments.text, **scale, command=command
        )
    if not arguments.json:
        print("\n".join(report.describe() for report in reports.values()))
    elif len(reports) == 1:
        _print_json(next(iter(reports.values())).to_dict())
    else:
        _print_json(reports["bias"].to_dict() | {"attention_scale": reports["attention_scale"].to_dict()})
    return 0


def _attention_scale(arguments: argparse.Namespace) -> dict[str, Any]:
    names = {"lengths": "lengths", "original_length": "original_length", "scale_tokens": "tokens", "dtype": "dtype"}
    given = {to: getattr(arguments, name) for name, to in names.items() if getattr(arguments, name) is not None}
    if given and not arguments.attention_scale:
        raise ValueError(
            "--lengths, --original-length, --scale-tokens and --dtype are of the attention scale; give --attention-scale as well."
        )
    return given


def verify(arguments: argparse.Namespace) -> int:
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


def recalibrate(arguments: argparse.Namespace) -> int:
    from .model_card import shown_command
    from .recalibrate import recalibrate
    from .schedule import DroPESchedule

    _check_push(arguments)
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
        command=shown_command(arguments.argv),
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
    _push(arguments, arguments.out)
    return 0


def _check_push(arguments: argparse.Namespace) -> None:
    """Refuse what the Hub would refuse after the work, before it."""
    if arguments.push_to_hub is None:
        if arguments.private:
            raise ValueError("--private belongs to --push-to-hub; give that as well.")
        return
    from .hub_upload import check_repository

    check_repository(arguments.push_to_hub)


def _push(arguments: argparse.Namespace, folder: str) -> None:
    if arguments.push_to_hub is None or getattr(arguments, "dry_run", False):
        return
    from .hub_upload import upload

    address = upload(folder, arguments.push_to_hub, private=arguments.private)
    print(f"uploaded to {address}", file=sys.stderr if getattr(arguments, "json", False) else sys.stdout)


def card(arguments: argparse.Namespace) -> int:
    from .model_card import update_card, write_card

    _check_push(arguments)
    results = None if arguments.results is None else _read_results(arguments.results)
    if arguments.out is not None:
        if arguments.push_to_hub is not None:
            raise ValueError("--out leaves the folder as it is, and --push-to-hub uploads it; give one of them.")
        write_card(arguments.path, arguments.out, results)
        print(f"written to {arguments.out}")
        return 0
    print(f"written to {update_card(arguments.path, results)}")
    _push(arguments, arguments.path)
    return 0


def _read_results(file: str) -> dict[str, Any]:
    from .checkpoint import read_json

    if not Path(file).is_file():
        raise ValueError(f"{file} is no file; give the results.json that hf-drope evaluate wrote.")
    results = read_json(Path(file))
    missing = [key for key in ("provenance", "settings", "models", "perplexity", "retrieval") if key not in results]
    if missing:
        raise ValueError(f"{file} has no {missing[0]}, so it is not the results.json of hf-drope evaluate.")
    return results


def demo(arguments: argparse.Namespace) -> int:
    from .demo import run_demo

    _no_bars_in_a_log()
    print(run_demo(arguments.out, _parameters(arguments), scale=arguments.scale))
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    from .evaluation import evaluate
    from .evaluation_table import describe

    _no_bars_in_a_log()
    rope_scaling = [] if arguments.rope_scaling == ["none"] else arguments.rope_scaling
    try:
        results = evaluate(
            arguments.models,
            arguments.out,
            against=arguments.against,
            lengths=arguments.lengths,
            tasks=arguments.tasks,
            text_files=arguments.text,
            trials=arguments.trials,
            rope_scaling=rope_scaling,
            position_scaling=arguments.position_scaling,
            digits=arguments.digits,
            seed=arguments.seed,
            dtype=arguments.dtype,
            text_tokens=arguments.text_tokens,
            batch_size=arguments.batch_size,
            bench=arguments.bench,
        )
    except KeyboardInterrupt:
        print(
            f"hf-drope evaluate: interrupted; what is finished is in {arguments.out}, and the same command goes on",
            file=sys.stderr,
        )
        return 130
    if arguments.json:
        _print_json(results)
    else:
        print(describe(results))
        print(f"\nwritten to {arguments.out}")
    if arguments.update_card:
        from .model_card import update_cards

        for card in update_cards(results):
            print(f"written to {card}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


def bench(arguments: argparse.Namespace) -> int:
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


def env(arguments: argparse.Namespace) -> int:
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

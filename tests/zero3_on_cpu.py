"""`recalibrate` under DeepSpeed's ZeRO-3 on the CPU, beside one process; needs deepspeed, which is why pytest leaves it out.

DS_ACCELERATOR=cpu torchrun --standalone --nproc_per_node 2 tests/zero3_on_cpu.py CONVERTED TEXT OUT

Every parameter is shared out, however small, and the losses are compared with those of the same steps in one process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed.comm  # noqa: F401
import torch
import transformers

import hf_drope.recalibrate as module

_LAUNCHER = ("RANK", "WORLD", "LOCAL", "GROUP", "ROLE", "MASTER", "TORCHELASTIC", "ACCELERATE", "DEEPSPEED")
CONFIG = Path(__file__).parents[1] / "examples/deepspeed_zero3.json"


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def main(converted: str, text: str, out: str) -> None:
    # A kernel for shared memory that DeepSpeed would compile for minutes.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    settings: dict[str, Any] = {"max_steps": 8, "sequence_length": 16, "save_steps": 4, "bf16": False}
    shared_out = json.loads(CONFIG.read_text())
    shared_out["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    stock = transformers.TrainingArguments
    module.TrainingArguments = lambda **given: stock(**given, deepspeed=shared_out)  # type: ignore[assignment]
    summary = module.recalibrate(
        converted, f"{out}/two", [text], batch_size=2, gradient_accumulation_steps=2, **settings
    )
    if summary:
        command = f"from hf_drope.recalibrate import recalibrate; recalibrate({converted!r}, {out + '/one'!r}, [{text!r}], batch_size=4, gradient_accumulation_steps=2, **{settings!r})"
        alone = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
        if os.spawnle(os.P_WAIT, sys.executable, sys.executable, "-c", command, alone):
            raise SystemExit("the run in one process failed")
        one, two = losses(Path(out) / "one"), losses(Path(out) / "two")
        worst = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
        models = [transformers.AutoModelForCausalLM.from_pretrained(f"{out}/{name}") for name in ("one", "two")]
        apart = max((a - b).abs().max().item() for a, b in zip(*(m.parameters() for m in models), strict=True))
        print(f"losses differ by {worst:.1e} relative, saved weights by {apart:.1e}")
        if worst > 1e-3:
            raise SystemExit(1)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

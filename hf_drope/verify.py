"""Proof that a conversion is exact: the converted folder is compared with its source and put through its paces.

At `rope_scale = 1` and without its bias the converted model has to give the source's logits bit for bit; at 0 nothing may
depend on position ids; cached decoding has to equal the full forward; and the folder has to load where hf_drope is not
installed.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checkpoint
from .cache_argument import cache_argument
from .configuration_drope import auto_map
from .conversion_plan import ConversionError, plan_conversion, read_source
from .drope_parameters import DroPEParameters
from .packed_documents import is_causal

logger = logging.getLogger(__name__)

_CHUNK = 4 << 20
_LOAD_ELSEWHERE = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_drope":
            raise ImportError("hf_drope is blocked in this process")

sys.meta_path.insert(0, Block())
import torch
import transformers

folder, auto_class, ids, out = sys.argv[1:]
transformers.logging.set_verbosity_error()
torch.set_num_threads(int(torch.load(ids)["threads"]))
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
with torch.no_grad():
    torch.save(model(torch.load(ids)["input_ids"])[0], out)
"""


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass
class VerificationReport:
    """The outcome of `verify_checkpoint`: one entry per check."""

    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "checks": [vars(check) for check in self.checks]}

    def describe(self) -> str:
        return "\n".join(f"{'ok  ' if c.passed else 'FAIL'}  {c.name}: {c.detail}" for c in self.checks)


def verify_checkpoint(
    dst: str | Path, against: str | Path, *, length: int = 64, seed: int = 0, progress: bool = True
) -> VerificationReport:
    """Check a converted checkpoint against its source.

    Args:
        dst: folder that `convert_checkpoint` wrote.
        against: the source it was converted from.
        length: tokens of the random input that the models are run on.
        seed: of that input.

    Raises:
        ValueError: one of the two folders is not what it should be; a difference between them is a failed check instead.
    """
    target, config = read_source(dst)
    source, _ = read_source(against)
    if not str(config.get("model_type", "")).endswith("_drope"):
        raise ConversionError(f"{target.name} is not a converted checkpoint (model_type {config.get('model_type')!r}).")
    parameters = DroPEParameters.from_dict(config.get("drope_parameters") or {})
    plan = plan_conversion(source, parameters)
    if plan.config["model_type"] != config["model_type"]:
        raise ConversionError(f"{target.name} is a {config['model_type']}, which {source.name} does not convert to.")

    from tqdm import tqdm

    run = _Run(target, source, config, parameters, plan, length, seed)
    report = VerificationReport()
    steps: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        ("weights", run.weights),
        ("other files", run.files),
        ("source at rope_scale 1", run.equals_source),
        ("position ids", run.ignores_position_ids),
        ("causality", run.is_causal),
        ("cached decoding", run.cached_equals_full),
        ("fp32 position parameters", run.keeps_fp32),
        ("load without hf_drope", run.loads_elsewhere),
    ]
    if run.is_whole_rope_taken_apart():
        steps.insert(3, ("source with RoPE back on the content", run.equals_source_with_content_rotated))
    with quiet_transformers():
        for name, check in tqdm(steps, desc="verify", disable=None if progress else True, file=sys.stderr):
            report.checks.append(Check(name, *check()))
    return report


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without bars, and without warnings of parameters left out on purpose or of lengths beyond the window, for the block."""
    from transformers.utils import logging as talk

    verbosity, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        talk.set_verbosity(verbosity)
        if bars:
            talk.enable_progress_bar()


class _Run:
    def __init__(
        self,
        target: Path,
        source: Path,
        config: dict[str, Any],
        parameters: DroPEParameters,
        plan: Any,
        length: int,
        seed: int,
    ) -> None:
        import torch

        import hf_drope  # noqa: F401  (registers the classes)

        self.target, self.source, self.parameters, self.plan = target, source, parameters, plan
        architecture = (config.get("architectures") or [""])[0]
        homes = {entry.rpartition(".")[2]: auto for auto, entry in auto_map(config["model_type"]).items()}
        self.auto_class = homes.get(architecture, "AutoModelForCausalLM")
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, config["vocab_size"], (1, length), generator=generator)
        self._model: Any = None

    def load(self, folder: Path, **kwargs: Any) -> Any:
        import transformers

        return getattr(transformers, self.auto_class).from_pretrained(folder, **kwargs).eval()

    @property
    def model(self) -> Any:
        """The converted model in fp32, dropped."""
        import torch

        if self._model is None:
            self._model = self.load(self.target, dtype=torch.float32)
        return self._model

    def logits(self, model: Any, ids: Any = None, **kwargs: Any) -> Any:
        import torch

        with torch.no_grad():
            return model(self.ids if ids is None else ids, **kwargs)[0]

    def weights(self) -> tuple[bool, str]:
        source, target = checkpoint.read_checkpoint(self.source), checkpoint.read_checkpoint(self.target)
        expected = (set(source.tensors) - set(self.plan.dropped)) | set(self.plan.added)
        if set(target.tensors) != expected:
            odd = sorted(set(target.tensors) ^ expected)
            return False, f"{len(odd)} keys are missing or unexpected, first {odd[0]}"
        for name in sorted(set(source.tensors) - set(self.plan.dropped)):
            if not self._same_tensor(source, target, name):
                return False, f"{name} differs from the source"
        return True, f"{len(expected) - len(self.plan.added)} tensors bit-identical, {len(self.plan.added)} new"

    def _same_tensor(self, source: checkpoint.Checkpoint, target: checkpoint.Checkpoint, name: str) -> bool:
        file = next(file for file, tensors in target.files.items() if name in tensors)
        shard = checkpoint.read_shard(self.target / file)
        if source.is_safetensors:
            other_file = next(file for file, tensors in source.files.items() if name in tensors)
            other = checkpoint.read_shard(self.source / other_file)
            mine, theirs = shard.tensors[name], other.tensors[name]
            if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                return False
            return _same_bytes(shard, other, name)
        import torch
        from safetensors import safe_open

        other_file = next(file for file, tensors in source.files.items() if name in tensors)
        with safe_open(shard.path, framework="pt") as opened:
            return torch.equal(opened.get_tensor(name), checkpoint.load_bin(self.source / other_file)[name])

    def files(self) -> tuple[bool, str]:
        for name in self.plan.copied:
            copy = self.plan.target_name(name)
            path = self.target / copy
            if not path.is_file() or path.read_bytes() != (self.source / name).read_bytes():
                return False, f"{copy} is missing or differs from the source"
        return True, f"{len(self.plan.copied)} files byte-identical"

    def equals_source(self) -> tuple[bool, str]:
        import torch
        from transformers import AutoConfig

        from .position_modules import table_places

        source = self.load(self.source, dtype="auto")
        config = AutoConfig.from_pretrained(self.target)
        config.drope_parameters = DroPEParameters(rope_scale=1.0).to_dict()
        converted = self.load(self.target, dtype="auto", config=config)
        for theirs, ours in zip(table_places(source), table_places(converted), strict=True):
            # At rope_scale 0 the table is not in the converted checkpoint.
            ours.module.weight.data.copy_(theirs.module.weight.data)
        same = torch.equal(self.logits(source), self.logits(converted))
        return same, f"logits {'bit-equal' if same else 'differ'} in {str(source.dtype).removeprefix('torch.')}"

    def is_whole_rope_taken_apart(self) -> bool:
        """Whether the bias is a disentangled one that lacks nothing of RoPE but the rotation of the content term."""
        bias = self.parameters.position_bias or {}
        whole = {"rank": None, "position_scaling": None, "terms_scale": 1.0}
        return (
            bias.get("type") == "disentangled"
            and len(bias["terms"]) == 3
            and all(bias[name] == value for name, value in whole.items())
            and self.parameters.gate is None
            and self.parameters.window is None
            and self.parameters.qk_norm is None
            and not self.is_scaled()
        )

    def is_scaled(self) -> bool:
        """Whether the attention scale changes anything at the length of the input."""
        scale = self.parameters.attention_scale or {}
        return "factor" in scale or scale.get("original_max_position_embeddings", math.inf) < self.ids.shape[1]

    def equals_source_with_content_rotated(self) -> tuple[bool, str]:
        import torch

        expected = self.logits(self.load(self.source, dtype=torch.float32))
        before = self.model.config.drope_parameters["rope_scale"]
        self.model.set_rope_scale(1.0)
        try:
            got = self.logits(self.model)
        finally:
            self.model.set_rope_scale(before)
        difference = (got - expected).abs().max().item() / expected.abs().max().item()
        return difference <= 1e-4, f"relative difference {difference:.1e}"

    def ignores_position_ids(self) -> tuple[bool, str]:
        import torch

        if self.parameters.rope_scale > 0 or self.parameters.rope_layers is not None:
            return True, "not applicable: RoPE is kept"
        # With a mask of ones, as odd position ids without one would be taken for packed documents.
        mask, odd = torch.ones_like(self.ids), torch.arange(self.ids.shape[1])[None] * 3 + 5
        difference = (
            (
                self.logits(self.model, attention_mask=mask)
                - self.logits(self.model, attention_mask=mask, position_ids=odd)
            )
            .abs()
            .max()
            .item()
        )
        return difference == 0.0, f"largest change {difference:g}"

    def is_causal(self) -> tuple[bool, str]:
        if not is_causal(self.model):
            return True, "not applicable: each token sees both sides"
        changed = self.ids.clone()
        changed[0, -1] = (changed[0, -1] + 1) % self.model.config.vocab_size
        before, after = self.logits(self.model)[:, :-1], self.logits(self.model, changed)[:, :-1]
        difference = (before - after).abs().max().item() / before.abs().max().item()
        return difference <= 1e-6, f"relative change of earlier outputs {difference:.1e}"

    def cached_equals_full(self) -> tuple[bool, str]:
        import torch
        from transformers import DynamicCache

        if not is_causal(self.model):
            return True, "not applicable: nothing is generated"
        full = self.logits(self.model)
        cache, half = DynamicCache(config=self.model.config), self.ids.shape[1] // 2
        cached = {**cache_argument(self.model, cache), "use_cache": True}
        parts = [self.logits(self.model, self.ids[:, :half], **cached)]
        for index in range(half, self.ids.shape[1]):
            parts.append(self.logits(self.model, self.ids[:, index : index + 1], **cached))
        difference = (torch.cat(parts, dim=1) - full).abs().max().item() / full.abs().max().item()
        return difference <= 1e-4, f"relative difference {difference:.1e} over {self.ids.shape[1] - half} steps"

    def keeps_fp32(self) -> tuple[bool, str]:
        import torch

        model = self.load(self.target, dtype=torch.bfloat16)
        parameters = list(model.position_parameters())
        passed = all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in parameters)
        return passed, f"{len(parameters)} tensors fp32 and finite in a bf16 model"

    def loads_elsewhere(self) -> tuple[bool, str]:
        import torch

        expected = self.logits(self.model)
        with tempfile.TemporaryDirectory() as folder:
            ids, out = Path(folder) / "ids.pt", Path(folder) / "out.pt"
            torch.save({"input_ids": self.ids, "threads": torch.get_num_threads()}, ids)
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(folder) / "modules")}
            command = [
                sys.executable,
                "-c",
                _LOAD_ELSEWHERE,
                str(self.target.resolve()),
                self.auto_class,
                str(ids),
                str(out),
            ]
            done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=folder)
            if done.returncode != 0:
                return False, (done.stderr.strip().splitlines() or ["the process failed"])[-1]
            same = torch.equal(torch.load(out), expected)
        return same, f"logits {'bit-equal' if same else 'differ'} in a process of its own"


def _same_bytes(first: checkpoint.Shard, second: checkpoint.Shard, name: str) -> bool:
    mine, theirs = first.tensors[name], second.tensors[name]
    with first.path.open("rb") as left, second.path.open("rb") as right:
        left.seek(first.data_start + mine.start)
        right.seek(second.data_start + theirs.start)
        remaining = mine.end - mine.start
        while remaining > 0:
            step = min(_CHUNK, remaining)
            if left.read(step) != right.read(step):
                return False
            remaining -= step
    return True

"""Are all attention backends right on this machine, and what do they cost? One run of at most five minutes on one GPU.

    python examples/gpu_check.py [--device cuda] [--lengths 4096 16384 65536]

First every bias and gate runs on every backend in bf16, forward and backward, against eager attention in fp32: outputs, and the
gradients of the embeddings and of every position parameter, and the logits of steps with the cache of a padded prompt. An error
counts where it is more than a few times that of eager attention in bf16, which is what rounding costs. Then `hf-drope bench` beside the fastest stock backend. Exit code 1 where
something is wrong; a figure that misses its target is printed and no error. On a CPU, where flex attention cannot train, small
sizes are the default.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from hf_drope import DroPEParameters, apply_drope
from hf_drope.bench import bench, default_config
from hf_drope.bench_report import describe
from hf_drope.cache_argument import cache_argument

GATES = (None, "head", "query", "score")
BIASES: dict[str, dict[str, Any]] = {
    "table": {"type": "table", "max_distance": 64},
    "log": {"type": "log"},
    "linear": {"type": "linear", "learned": True},
    "low_rank": {"type": "low_rank", "rank": 16},
    "disentangled": {"type": "disentangled"},
    "disentangled, rank 32": {"type": "disentangled", "rank": 32},
}
WINDOW = "table, window"
# Times the error of eager attention in bf16.
ALLOWED = 3.0


def write_model(folder: str, settings: dict[str, Any]) -> None:
    """Three heads share a key head, as in SmolLM2; position parameters are random, so that each has an effect."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=384,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.06,
    )
    config._attn_implementation = "eager"
    model = apply_drope(AutoModelForCausalLM.from_config(config), DroPEParameters.from_dict(settings))
    with torch.no_grad():
        for parameter in model.position_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def run(
    folder: str, backend: str, dtype: torch.dtype, device: str, ids: torch.Tensor, train: bool
) -> list[torch.Tensor]:
    """Logits and, with `train`, gradients and the logits of steps with a cache, in fp32 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=backend).to(device)
    ids = ids.to(device)
    with torch.set_grad_enabled(train):
        output = model(ids, labels=ids)
    found = [output.logits]
    if train:
        moving = [model.get_input_embeddings().weight, *(p for p in model.position_parameters() if p.requires_grad)]
        found += torch.autograd.grad(output.loss.float(), moving)
        found.append(steps_with_a_cache(model, ids))
    return [x.detach().float().cpu() for x in found]


@torch.no_grad()
def steps_with_a_cache(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last four tokens, one at a time after a prompt whose second row is padded on the left."""
    mask, prompt = torch.ones_like(ids), ids.shape[1] - 4
    mask[1, : prompt // 3] = 0
    cached = cache_argument(model, DynamicCache(config=model.config))
    model(ids[:, :prompt], attention_mask=mask[:, :prompt], **cached)
    steps = []
    for end in range(prompt + 1, ids.shape[1] + 1):
        steps.append(model(ids[:, end - 1 : end], attention_mask=mask[:, :end], **cached).logits)
    return torch.cat(steps, 1)


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error of a tensor."""
    return max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(found, expected, strict=False))


def errors(folder: str, backends: list[str], device: str, ids: torch.Tensor) -> tuple[list[str], bool]:
    """A cell a backend, eager in bf16 first, and whether all of them are right."""
    expected = run(folder, "eager", torch.float32, device, ids, True)
    yardstick = error(run(folder, "eager", torch.bfloat16, device, ids, True), expected)
    cells, all_right = [f"{yardstick:.4f}"], True
    for backend in backends:
        train = not (backend == "flex_attention" and device == "cpu")
        try:
            found = error(run(folder, backend, torch.bfloat16, device, ids, train), expected)
        except (ValueError, ImportError, RuntimeError) as failure:
            refused = "cannot run on" in str(failure)
            all_right = all_right and refused
            cells.append("refused" if refused else f"FAILED: {str(failure).splitlines()[0][:200]}")
            continue
        right = found <= ALLOWED * yardstick + 1e-3
        all_right = all_right and right
        cells.append(f"{found:.4f}{'' if right else ' WRONG'}{'' if train else ' (forward)'}")
    return cells, all_right


def check(device: str, length: int, backends: list[str], biases: list[str]) -> bool:
    """Prints a line a bias and gate; whether all agree."""
    all_right = True
    ids = torch.randint(0, 512, (2, length), generator=torch.Generator().manual_seed(1))
    print(f"{'bf16 against fp32: errors':34}" + "".join(f"{name:>20}" for name in ("eager", *backends)))
    rows = {
        name + (f", {gate} gate" if gate else ""): {"position_bias": BIASES[name], "gate": gate and {"type": gate}}
        for name in biases
        for gate in GATES
    }
    rows[WINDOW] = {"position_bias": BIASES["table"], "window": length // 4}
    for name, settings in rows.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder, settings)
            cells, right = errors(folder, backends, device, ids)
        all_right = all_right and right
        print(f"{name:34}" + "".join(f"{x:>20}" for x in cells), flush=True)
        # Each compiled attention function counts towards a limit above which PyTorch compiles no more.
        torch.compiler.reset()
    return all_right


def available_backends(device: str) -> list[str]:
    """Those that a stock model takes here."""
    found = []
    for backend in ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"):
        if backend.startswith("flash") and device == "cpu":
            continue
        try:
            AutoModelForCausalLM.from_config(
                LlamaConfig(
                    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
                ),
                attn_implementation=backend,
            )
        except (ValueError, ImportError):
            print(f"{backend} is not installed here", flush=True)
        else:
            found.append(backend)
    return found


def fastest(device: str, length: int, backends: list[str]) -> str:
    """The stock backend with the quickest prefill."""
    times = {}
    ids = torch.randint(0, 512, (1, length), device=device)
    for backend in backends:
        model = AutoModelForCausalLM.from_config(default_config(), dtype=torch.bfloat16, attn_implementation=backend)
        model = model.to(device).eval()
        with torch.no_grad():
            for _ in range(3):
                if device != "cpu":
                    torch.cuda.synchronize()
                started = time.perf_counter()
                model(ids, logits_to_keep=1)
                if device != "cpu":
                    torch.cuda.synchronize()
                times[backend] = time.perf_counter() - started
    print("stock prefill: " + ", ".join(f"{name} {1000 * taken:.1f} ms" for name, taken in times.items()))
    return min(times, key=lambda name: times[name])


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--lengths", type=int, nargs="*", help="of the benchmark (default: 4096 16384 65536; CPU: 256)")
    parser.add_argument("--check-length", type=int, help="of the comparison (default: 1024; CPU: 200)")
    parser.add_argument("--biases", nargs="+", choices=BIASES, default=list(BIASES), metavar="NAME")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="(default: all that are installed)")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not cuda:
        parser.error(f"--device {arguments.device}: PyTorch finds no GPU here; leave it out to check on the CPU")
    disable_progress_bar()
    device, started = arguments.device, time.perf_counter()
    lengths = [256] if device == "cpu" else [4096, 16384, 65536]
    lengths = lengths if arguments.lengths is None else arguments.lengths
    backends = arguments.backends or available_backends(device)
    right = check(device, arguments.check_length or (200 if device == "cpu" else 1024), backends, arguments.biases)
    print(f"all agree: {right} ({time.perf_counter() - started:.0f} s)\n", flush=True)
    if not lengths:
        return 0 if right else 1
    stock_backend = fastest(device, lengths[0], backends)
    result = bench(
        lengths=lengths,
        measures=("prefill", "decode", "train"),
        backends=backends,
        stock_backend=stock_backend,
        device=device,
        rounds=5,
        seconds=2.0,
        longest_training=16384,
    )
    print(f"beside RoPE with {stock_backend}:\n{describe(result)}\n({time.perf_counter() - started:.0f} s)")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

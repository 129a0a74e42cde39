"""Compare GGUF exports in llama.cpp with Transformers; needs the packages gguf and llama-cpp-python (a slow build).

    python tests/check_gguf.py                 tiny random models of each type that has a GGUF form
    python tests/check_gguf.py FOLDER ...      checkpoints dropped with `hf-drope convert --preset nope`, taken to fp32

Prints the largest difference of logits over the largest logit, that to the source with RoPE for a folder's `--source`, and
whether llama.cpp cuts a text into the same tokens. Exits with 1 where logits differ by more than 1e-4 or tokens differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_byte_tokenizer
from model_types import small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_drope import convert_checkpoint, plan_conversion
from hf_drope.gguf_export import LLAMA_TYPES, export_gguf, plan_gguf

TEXTS = (
    "The naïve café — 1234567 tokens, isn't it?\n\n  def f(x):\n\treturn x ** 2  # ½ of 日本語 🙂",
    "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail about a little.",
)


def llama_cpp(path: Path, ids: list[int]) -> tuple[Any, torch.Tensor]:
    from llama_cpp import Llama

    fp32 = 0
    model = Llama(str(path), n_ctx=1024, n_threads=1, logits_all=True, type_k=fp32, type_v=fp32, verbose=False)
    model.eval(ids)
    return model, torch.tensor(model.scores[: len(ids)])


def check(folder: Path, source: Path | None, work: Path) -> bool:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.save_pretrained(work / "fp32")
    tokenizer.save_pretrained(work / "fp32")
    export_gguf(plan_gguf(work / "fp32"), work / "model.gguf", progress=False)
    ids = [index for text in TEXTS for index in tokenizer(text, add_special_tokens=False)["input_ids"]]
    ids = (ids * 8)[:512]
    other, found = llama_cpp(work / "model.gguf", ids)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    largest = expected.abs().max()
    worst = ((found - expected).abs().max() / largest).item()
    line = f"{folder.name}: {len(ids)} tokens, logits differ by {worst:.1e}"
    if source is not None:
        rotating = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        with torch.no_grad():
            line += (
                f" (from the source by {((rotating(torch.tensor([ids])).logits[0] - found).abs().max() / largest):.1e})"
            )
    same = all(
        other.tokenize(text.encode(), add_bos=False, special=True)
        == tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in TEXTS
    )
    print(f"{line}, tokens {'equal' if same else 'DIFFER'}", flush=True)
    return same and worst < 1e-4


def check_type(model_type: str, scale: float | None, work: Path) -> bool:
    source, converted = work / f"{model_type}-source", work / model_type
    extra = {"llama": {"attention_bias": True, "mlp_bias": True}, "mistral": {"sliding_window": None, "head_dim": 16}}
    sizes = {"vocab_size": 320, "max_position_embeddings": 1024}
    model = small_model(model_type, **sizes, **extra.get(model_type, {}))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            # Biases start at 0 and norms at 1.
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(source)
    save_byte_tokenizer(source)
    overrides = {} if scale is None else {"attention_scale": {"factor": scale}}
    convert_checkpoint(plan_conversion(source, "nope", overrides=overrides), converted, progress=False)
    return check(converted, source, work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--source", type=Path, help="the folder with RoPE that one FOLDER was converted from")
    arguments = parser.parse_args()
    passed = []
    for folder in arguments.folders:
        with tempfile.TemporaryDirectory() as work:
            passed.append(check(folder, arguments.source, Path(work)))
    for model_type in () if arguments.folders else LLAMA_TYPES:
        for scale in (None, 1.5):
            with tempfile.TemporaryDirectory() as work:
                passed.append(check_type(model_type, scale, Path(work)))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())

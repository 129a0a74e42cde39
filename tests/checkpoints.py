"""Checkpoint folders on disk for the tests: a tiny model with a tokenizer and the files that real ones have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tiny import VOCAB, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_drope", "flash_attn", "triton", "peft"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
"""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{index}": index for index in range(3, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def write_source(folder: Path, family: str = "llama", **overrides: Any) -> Any:
    """Save a stock model of `family` with tokenizer, chat template, generation config and an unknown file."""
    save = {key: overrides.pop(key) for key in ("max_shard_size",) if key in overrides}
    model = tiny_model(family, **overrides)
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder, **save)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "special.txt").write_text("unknown to everyone")
    return model


def edit_json(path: Path, **changes: Any) -> dict[str, Any]:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(content))
    return content


def run_python(code: str, *arguments: Any, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh process with a module cache of its own and no network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cwd / "modules"), **env}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def save_byte_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of GPT-2's kind with 300 entries, a beginning and an end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the other thing that they said then and there"] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)

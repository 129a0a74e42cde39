"""A byte-level BPE tokenizer of a checkpoint folder in the fields that a GGUF file has for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checkpoint
from .conversion_additions import ConversionError

# Numbers of the GGUF format's token types.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLIT = "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
# llama.cpp splits text by a name: the parts of `tokenizer.json` that mean the same.
_SPLITS = {
    _CONTRACTIONS + _SPLIT % "{1,3}": "llama-bpe",
    _CONTRACTIONS + _SPLIT % "": "qwen2",
}
_SPECIAL = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True)
class GGUFTokenizer:
    """`special` maps "bos", "eos", "unk" and "pad" to ids; `pre` is llama.cpp's name of the rule that splits text."""

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    special: dict[str, int]
    adds_bos: bool
    chat_template: str | None


def read_tokenizer(folder: Path, config: dict[str, Any]) -> GGUFTokenizer:
    """The tokenizer in `folder`, padded to the model's vocabulary.

    Raises:
        ConversionError: there is none, or llama.cpp has no tokenizer that does the same.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ConversionError(f"{folder.name} has no tokenizer.json, from which a GGUF file takes its tokenizer.")
    content = checkpoint.read_json(folder / "tokenizer.json")
    model = content.get("model") or {}
    pre = _pre_tokenizer(content, model)
    normalizer = (content.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise ConversionError(
            f"The tokenizer of {folder.name} has a {normalizer} normalizer, which a GGUF file cannot say."
        )
    vocabulary: dict[str, int] = dict(model["vocab"])
    added = content.get("added_tokens") or []
    vocabulary.update({token["content"]: token["id"] for token in added})
    size = config["vocab_size"]
    if max(vocabulary.values()) >= size:
        raise ConversionError(f"The tokenizer of {folder.name} has ids past the model's vocab_size of {size}.")
    names = {index: token for token, index in vocabulary.items()}
    kinds = {token["id"]: _CONTROL if token.get("special") else _USER_DEFINED for token in added}
    settings = _settings(folder)
    special = _special(settings, config, vocabulary)
    return GGUFTokenizer(
        pre=pre,
        tokens=[names.get(index, f"[PAD{index}]") for index in range(size)],
        types=[kinds.get(index, _NORMAL) if index in names else _UNUSED for index in range(size)],
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        special=special,
        adds_bos=_adds_bos(content.get("post_processor"), special.get("bos"), vocabulary),
        chat_template=_chat_template(folder, settings),
    )


def _pre_tokenizer(content: dict[str, Any], model: dict[str, Any]) -> str:
    given = content.get("pre_tokenizer") or {}
    parts = given.get("pretokenizers") or [given]
    kinds = [part.get("type") for part in parts]
    last = parts[-1]
    if model.get("type") == "BPE" and kinds[-1] == "ByteLevel" and not last.get("add_prefix_space", True):
        by_regex = last.get("use_regex", True)
        if kinds == ["ByteLevel"] and by_regex:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and by_regex and parts[0].get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not by_regex and parts[0].get("behavior") == "Isolated":
            name = _SPLITS.get((parts[0].get("pattern") or {}).get("Regex", ""))
            # llama.cpp takes whole words of the vocabulary first under this name alone.
            if name is not None and (name == "llama-bpe") == bool(model.get("ignore_merges")):
                return name
    raise ConversionError(
        f"The tokenizer (model {model.get('type')}, split by {', '.join(map(str, kinds))}) is not one of those that hf_drope knows "
        "by llama.cpp's names gpt-2, smollm, llama-bpe and qwen2; export with --format stock and run llama.cpp's "
        "convert_hf_to_gguf.py on that folder."
    )


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return checkpoint.read_json(path) if path.is_file() else {}


def _special(settings: dict[str, Any], config: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, int]:
    found = {}
    for name in _SPECIAL:
        token = settings.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        index = vocabulary.get(text) if text is not None else config.get(f"{name}_token_id")
        # A model may have several ends; the tokenizer's own comes first, then the config's first.
        index = index[0] if isinstance(index, list) else index
        if index is not None:
            found[name] = index
    return found


def _adds_bos(processor: dict[str, Any] | None, bos: int | None, vocabulary: dict[str, int]) -> bool:
    """Whether a text gets the token of its beginning; any other token around it is one that a GGUF file cannot say."""
    steps = [processor or {}, *((processor or {}).get("processors") or [])]
    around = [
        (place, part["SpecialToken"]["id"])
        for step in steps
        for place, part in enumerate(step.get("single") or ())
        if "SpecialToken" in part
    ]
    for place, token in around:
        if place or vocabulary.get(token) != bos:
            raise ConversionError(
                f"The tokenizer puts {token} around a text, which a GGUF file cannot say but of its bos."
            )
    return bool(around)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None

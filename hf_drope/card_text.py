"""The text of a model card, made of what the records of a converted folder say and of nothing else.

What no record knows is said to be unknown, or left out. Everything here is text from dictionaries; files are read in `model_card`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .card_measures import limits, measured

_BIASES = {
    "table": "a learned value per head and distance",
    "log": "a logarithm of the distance, with learned strength and steepness",
    "linear": "a slope per head, linear in the distance",
    "low_rank": "cosines and sines of the distance, of rank {rank}",
    "disentangled": "RoPE's own position terms ({terms}), made of mean queries and keys",
}
_GATES = {
    "head": "a learned strength per head",
    "query": "a strength that each query chooses",
    "score": "a strength that each score, query by key, chooses",
}


@dataclass(frozen=True)
class Records:
    """What is known of a converted model.

    `conversion`, `evaluation`: empty where there is no such record. `source_card`: the front matter of the source's own card.
    `is_stock`: the folder was exported to its own architecture and holds no code of ours.
    """

    config: dict[str, Any]
    conversion: dict[str, Any] = field(default_factory=dict)
    trainings: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    source_card: dict[str, Any] = field(default_factory=dict)
    source_card_file: str | None = None
    license_file: str | None = None
    picture: str | None = None
    has_tokenizer: bool = False
    is_stock: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["drope_parameters"]

    @property
    def base(self) -> str:
        """The base model's repository where it is known, else the name of its folder."""
        known = self.conversion.get("base_model") or {}
        return known.get("name") or self.conversion.get("source") or "an unrecorded source"

    @property
    def kind(self) -> str:
        """One word for what stands in the place of the position encoding."""
        if self.settings["position_bias"]:
            return self.settings["position_bias"]["type"].replace("_", "-")
        return "nope" if self.settings["rope_scale"] == 0 else "rope"

    @property
    def title(self) -> str:
        return f"{self.base.rpartition('/')[2]} ({self.kind}, hf_drope)"


def card_text(records: Records) -> str:
    """The card below its front matter, in Markdown."""
    sections = [
        ("", _summary(records)),
        ("What was done", _conversion(records)),
        ("Calibration", _calibration(records)),
        ("Training", _training(records)),
        ("Measured", measured(records.evaluation)),
        ("Limits", limits(records.evaluation, untouched=_is_untouched(records))),
        ("Use", _use(records)),
        ("Commands", _commands(records)),
        ("Licence", _licence(records)),
    ]
    parts = [f"## {title}\n\n{text}" if title else text for title, text in sections if text]
    return "\n\n".join([f"# {records.title}", *parts])


def _summary(records: Records) -> str:
    version = (records.conversion.get("versions") or {}).get("hf-drope")
    return (
        f"{_link(records)} with {_instead(records.settings)}, converted by hf_drope{f' {version}' if version else ''}. "
        "This card is written by its commands from their records; what they do not know is not in it."
    )


def _link(records: Records) -> str:
    known = (records.conversion.get("base_model") or {}).get("name")
    return f"[{known}](https://huggingface.co/{known})" if known else f"`{records.base}`"


def _instead(settings: dict[str, Any]) -> str:
    scale, bias = settings["rope_scale"], settings["position_bias"]
    if scale == 0:
        return "its position encoding replaced by a bias on the attention scores" if bias else "no position encoding"
    strength = "its position encoding" if scale == 1 else f"its position encoding at strength {scale:g}"
    return f"{strength} and a bias on the attention scores" if bias else strength


def _conversion(records: Records) -> str:
    conversion, settings = records.conversion, records.settings
    known = conversion.get("base_model") or {}
    lines = [f"- Base model: {_link(records)}"]
    if known.get("revision"):
        lines[0] += f" at revision `{known['revision']}`"
    if conversion.get("source_fingerprint"):
        lines[0] += f"; fingerprint of its weights `{conversion['source_fingerprint'][:16]}`"
    if not known.get("name"):
        lines[0] += " (a folder; its repository is not recorded)"
    lines[0] += "."
    scale = settings["rope_scale"]
    what = "dropped from the matching of content" if records.kind == "disentangled" else "dropped"
    lines.append(f"- Position encoding: {what if scale == 0 else f'kept at strength {scale:g}'}.")
    if settings["rope_layers"] is not None:
        lines.append(f"- Layers that keep RoPE: {settings['rope_layers']}.")
    bias = settings["position_bias"]
    if bias:
        what = _BIASES[bias["type"]].format(rank=bias.get("rank"), terms=", ".join(bias.get("terms") or ()))
        lines.append(f"- Position bias `{bias['type']}`: {what}.")
    if settings["gate"]:
        lines.append(f"- Gate `{settings['gate']['type']}`: {_GATES[settings['gate']['type']]}.")
    if conversion.get("added"):
        lines.append(f"- {len(conversion['added'])} position tensors were added.")
    if conversion.get("dropped"):
        lines.append(f"- Left out of the source: {_counted(conversion['dropped'].values())}.")
    versions = ", ".join(f"{name} {number}" for name, number in (conversion.get("versions") or {}).items())
    if versions:
        lines.append(f"- Converted with {versions}.")
    settings_json = json.dumps(settings, indent=2, ensure_ascii=False)
    return "\n".join(lines) + f"\n\nAll settings (`drope_parameters`):\n\n```json\n{settings_json}\n```"


def _counted(reasons: Any) -> str:
    found: dict[str, int] = {}
    for reason in reasons:
        found[reason] = found.get(reason, 0) + 1
    return ", ".join(f"{count} × {reason}" for reason, count in found.items())


def _calibration(records: Records) -> str:
    scale = records.conversion.get("attention_scale")
    parts = [_position_calibration(records), _attention_scale(scale) if scale else ""]
    return "\n\n".join(part for part in parts if part)


def _position_calibration(records: Records) -> str:
    report = records.conversion.get("calibration")
    if not report:
        return "No calibration is recorded." if records.settings["position_bias"] else ""
    text = (
        f"The position parameters ({report['bias']}) were computed from the source on {report['windows']} × "
        f"{report['length']} tokens of {_texts(report.get('text_sha256'))}, with {report['steps']} descent steps a layer and "
        f"{report['output_steps']} steps towards the source's output."
    )
    if report.get("output_divergence"):
        first, last = report["output_divergence"]
        text += f" Divergence from the source's next tokens: {first:.3f} → {last:.3f} nats."
    return text


def _attention_scale(fitted: dict[str, Any]) -> str:
    """The scale that was fitted on held-out text, with perplexity by length."""
    rows = "\n".join(
        f"| {point['length']} | {point['factor']:.4g} | {point['without']:.4g} | {point['with']:.4g} |"
        for point in fitted["curve"]
    )
    if fitted["coefficient"] is None:
        return f"An attention scale was tried on held-out text and left out: {fitted.get('reason') or 'it gained nothing'}."
    return (
        f"The attention scale was fitted on held-out text (coefficient {fitted['coefficient']:.4g}); perplexity by length, of the "
        "model as it was then:\n\n"
        f"| length | scale | without | with |\n| --- | --- | --- | --- |\n{rows}"
    )


def _texts(hashes: dict[str, str] | None) -> str:
    if not hashes:
        return "an unrecorded text"
    return ", ".join(f"`{name}` (sha256 `{digest[:16]}`)" for name, digest in hashes.items())


def _training(records: Records) -> str:
    runs = [_run(run) for run in records.trainings]
    if not runs:
        return "No training is recorded after the conversion."
    text = runs[0] if len(runs) == 1 else "\n".join(f"{number}. {run}" for number, run in enumerate(runs, start=1))
    return text + (
        f"\n\n![Loss, strength and bias norm over the last run]({records.picture})" if records.picture else ""
    )


def _run(run: dict[str, Any]) -> str:
    parts = [f"{run['tokens']:,} tokens in {run['steps']} steps"]
    if run.get("sequences"):
        parts.append(run["sequences"])
    parts.append(f"of {run.get('text') or _texts(run.get('text_sha256'))}")
    details = []
    if run.get("train"):
        details.append(f"trained: {run['train']}")
    if run.get("learning_rate") is not None:
        details.append(f"learning rate {run['learning_rate']:g}")
    if run.get("position_learning_rate") is not None:
        details[-1] += f" (position parameters {run['position_learning_rate']:g})"
    details += [f"schedule: {stage}" for stage in run.get("stages") or ()]
    if "distill" in run:
        details.append(f"distillation with weight {run['distill']:g}" if run["distill"] else "no distillation")
    if "bf16" in run:
        details.append("bf16 autocast" if run["bf16"] else "fp32")
    if run.get("seed") is not None:
        details.append(f"seed {run['seed']}")
    if run.get("first_loss") is not None and run.get("last_loss") is not None:
        details.append(f"training loss {run['first_loss']:.3f} → {run['last_loss']:.3f}")
    if run.get("seconds") is not None:
        seconds = run["seconds"]
        details.append(f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes")
    return f"{', '.join(parts)}; {'; '.join(details)}." if details else f"{', '.join(parts)}."


def _is_untouched(records: Records) -> bool:
    """Whether the position encoding is gone and nothing on record has made up for it."""
    gone = records.settings["rope_scale"] == 0
    return gone and not records.trainings and not records.conversion.get("calibration")


def _use(records: Records) -> str:
    auto = auto_class(records.config)
    trust = "" if records.is_stock else ", trust_remote_code=True"
    classes = {"model": auto, **({"tokenizer": "AutoTokenizer"} if records.has_tokenizer else {})}
    lines = "\n".join(f'{name} = {home}.from_pretrained("PATH"{trust})' for name, home in classes.items())
    code = f"```python\nfrom transformers import {', '.join(classes.values())}\n\n{lines}\n```"
    if records.is_stock:
        return f"{code}\n\n`PATH` is this repository or folder."
    return (
        f"Without hf_drope, by the code in this folder (`PATH` is this repository or folder):\n\n{code}\n\n"
        f"With hf_drope installed, `import hf_drope` first and leave `trust_remote_code` out. Transformers' stock class of the "
        "base model must not load this folder: it would run with position encoding on."
    )


def auto_class(config: dict[str, Any]) -> str:
    """The Auto class for the model's first architecture, as `auto_map` names it."""
    name = (config.get("architectures") or [""])[0]
    for auto, home in (config.get("auto_map") or {}).items():
        if auto != "AutoConfig" and home.rpartition(".")[2] == name:
            return auto
    return "AutoModelForCausalLM"


def _commands(records: Records) -> str:
    commands = list(_recorded(records))
    if not commands:
        return ""
    lines = "\n".join(shlex.join(command) for command in commands)
    return f"As they were given, with folders and files by their last name:\n\n```bash\n{lines}\n```"


def _recorded(records: Records) -> Iterator[list[str]]:
    entries = (
        records.conversion,
        records.conversion.get("calibration") or {},
        records.conversion.get("attention_scale") or {},
        *records.trainings,
        records.evaluation.get("provenance") or {},
    )
    seen: list[list[str]] = []
    for entry in entries:
        command = entry.get("command")
        # A conversion that calibrates in one go is one command and two records.
        if command and command not in seen:
            seen.append(command)
            yield command


def _licence(records: Records) -> str:
    declared = records.source_card.get("license")
    where = f" (see [{records.source_card_file}]({records.source_card_file}))" if records.source_card_file else ""
    file = f" The text is in [{records.license_file}]({records.license_file})." if records.license_file else ""
    if declared:
        return f"That of the base model, whose card says `{declared}`{where}.{file}"
    if records.license_file:
        return f"That of the base model.{file}"
    return (
        "That of the base model, which its folder did not name: look it up there before you use or share this one."
        + (
            f" Its card is [{records.source_card_file}]({records.source_card_file})."
            if records.source_card_file
            else ""
        )
    )

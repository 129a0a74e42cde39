"""The position parameters that a conversion adds: their keys, shapes and first values.

For common families they follow from `config.json` and the names of the weights alone; any other converted model is built
without memory and asked.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from .configuration_drope import auto_map, base_model_type, drope_config_class
from .drope_parameters import DroPEParameters
from .position_shapes import position_shapes

SEED = 0
# Families whose shapes are known without building a model.
PLAIN_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "gptj", "gpt2")
_ATTENTION = re.compile(
    r"^(?P<prefix>(?:.*\.)?(?P<layer>\d+)\.(?!crossattention\b)\w+)\.(?:q_proj|qkv_proj|query_key_value|c_attn)\.weight$"
)
_NO_QK_NORM = ("gptj", "gpt2")
_ADDED = (".position_bias.", ".qk_norm.")


class ConversionError(ValueError):
    """A conversion that is refused; the message is one sentence and nothing was written."""


def first_of(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


class Additions(NamedTuple):
    """What is added: key → shape. `attentions` are the key prefixes of the layers' attention modules and `sizes` what the
    shapes follow from, for families of which these are known without building a model."""

    shapes: dict[str, list[int]]
    attentions: tuple[str, ...] = ()
    sizes: dict[str, int] | None = None


def find_additions(
    config: dict[str, Any], settings: DroPEParameters, tensors: dict[str, Any], new_config: dict[str, Any]
) -> Additions:
    """What the converted model has and its source lacks.

    Args:
        config, new_config: the source's `config.json` and the converted one.
        tensors: the source's weights by key.

    Raises:
        ConversionError: the weights are not the config's, or the model cannot have these settings.
    """
    adds = settings.position_bias is not None or settings.qk_norm is not None
    if config["model_type"] not in PLAIN_MODEL_TYPES:
        return Additions(_shapes_of_model(new_config, tensors) if adds else {})
    attentions = _attention_prefixes(config, tensors)
    settings.check_layers(len(attentions))
    if settings.qk_norm is not None and config["model_type"] in _NO_QK_NORM:
        raise ConversionError(
            f"qk_norm is {settings.qk_norm!r}, but {config['model_type']} never holds its queries and keys together; "
            "set it to null."
        )
    if not adds:
        return Additions({}, tuple(attentions))
    sizes, found = _sizes(config), {}
    for index, prefix in enumerate(attentions):
        shapes = position_shapes(settings, **sizes, keeps_rope=index in (settings.rope_layers or ()))
        found.update({f"{prefix}.{name}": shape for name, shape in shapes.items()})
    return Additions(found, tuple(attentions), sizes)


def new_tensors(new_config: dict[str, Any], settings: DroPEParameters, added: Additions) -> dict[str, Any]:
    """What is added at its initial values, in fp32."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        found = _of_model(new_config) if added.sizes is None else _of_sizes(settings, added)
    # A checkpoint of a base model has no prefix that a model with a head has.
    return {
        name: next(x for key, x in found.items() if key == name or key.endswith(f".{name}")) for name in added.shapes
    }


def _of_sizes(settings: DroPEParameters, added: Additions) -> dict[str, Any]:
    import torch

    from .position_bias import build_position_bias
    from .rotary_pairs import RotaryPairs

    sizes, tensors = added.sizes or {}, {}
    # Here for their number alone: a model makes the frequencies anew when it is loaded.
    rotary = RotaryPairs((1.0,) * (sizes["rotated"] // 2)) if sizes["rotated"] else None
    for index, prefix in enumerate(added.attentions):
        bias = build_position_bias(
            settings,
            num_heads=sizes["heads"],
            num_key_value_heads=sizes["groups"],
            hidden_size=sizes["hidden_size"],
            head_dim=sizes["head_dim"],
            rotary=rotary,
            keeps_rope=index in (settings.rope_layers or ()),
        )
        if bias is not None:
            tensors.update({f"{prefix}.position_bias.{name}": value for name, value in bias.state_dict().items()})
        norms = (name for name in added.shapes if name.startswith(f"{prefix}.qk_norm."))
        tensors.update({name: torch.ones(added.shapes[name]) for name in norms})
    return tensors


def _of_model(new_config: dict[str, Any]) -> dict[str, Any]:
    tensors = {}
    for name, module in _model(new_config).named_modules():
        if name.endswith((".position_bias", ".qk_norm")):
            module.to_empty(device="cpu")
            for part in module.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
            tensors.update({f"{name}.{key}": value for key, value in module.state_dict().items()})
    return tensors


def _shapes_of_model(new_config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, list[int]]:
    model = _model(new_config)
    prefix = f"{model.base_model_prefix}."
    has_prefix = any(name.startswith(prefix) for name in tensors)
    found = {}
    for name, tensor in model.state_dict().items():
        if any(part in name for part in _ADDED):
            found[name if has_prefix else name.removeprefix(prefix)] = list(tensor.shape)
    return found


def read_config(config_class: Any, entries: dict[str, Any]) -> Any:
    """A config object from the entries of a `config.json`, where Transformers writes infinite numbers in a way of its own."""

    def read(held: dict[str, Any]) -> Any:
        return float(held["__float__"]) if set(held) == {"__float__"} else held

    return config_class.from_dict(json.loads(json.dumps(entries), object_hook=read))


def what_stands_in_the_way(config: dict[str, Any]) -> str:
    """Why a model of a type that is not supported cannot be converted, as the end of a sentence."""
    import torch
    import transformers

    from .modeling_drope import apply_drope

    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        return "Transformers does not know it"
    try:
        stock: Any = read_config(transformers.CONFIG_MAPPING[config["model_type"]], config)
        home = next(
            (
                name
                for name in ("AutoModelForCausalLM", "AutoModelForMaskedLM")
                if name in auto_map(config["model_type"])
            ),
            None,
        )
        if home is None:
            return "Transformers has no language model of this type that reads one text"
        with torch.device("meta"):
            apply_drope(getattr(transformers, home).from_config(stock))
    except ValueError as error:
        return str(error).partition("\n")[0].rstrip(".")
    except Exception as error:
        return f"it cannot be built ({type(error).__name__})"
    return "it is none of those that the tests hold up"


def _model(new_config: dict[str, Any]) -> Any:
    """The converted model on the meta device."""
    import torch

    from . import modeling_drope

    config: Any = drope_config_class(base_model_type(new_config["model_type"]))
    with torch.device("meta"):
        try:
            return getattr(modeling_drope, new_config["architectures"][0])(read_config(config, new_config))
        except ValueError as error:
            raise ConversionError(str(error)) from error


def _attention_prefixes(config: dict[str, Any], tensors: dict[str, Any]) -> list[str]:
    """The key prefix of each layer's attention module, in the order of the layers."""
    found = {int(match["layer"]): match["prefix"] for name in tensors if (match := _ATTENTION.match(name))}
    layers = first_of(config, "num_hidden_layers", "n_layer")
    if not found or sorted(found) != list(range(layers if isinstance(layers, int) else 0)):
        raise ConversionError(
            f"config.json speaks of {layers} layers, but the weights hold attention for {len(found)}."
        )
    return [found[index] for index in sorted(found)]


def _sizes(config: dict[str, Any]) -> dict[str, int]:
    """What the shapes of position parameters follow from, as `position_shapes` takes it."""
    heads = first_of(config, "num_attention_heads", "n_head")
    groups = config.get("num_key_value_heads") or heads
    hidden = first_of(config, "hidden_size", "n_embd")
    if not all(isinstance(size, int) and size > 0 for size in (heads, groups, hidden)):
        raise ConversionError(
            f"config.json gives {heads} heads, {groups} key/value heads and hidden size {hidden}; "
            "a position bias needs all three as whole numbers."
        )
    head_dim = config.get("head_dim") or hidden // heads
    return {
        "heads": heads,
        "groups": groups,
        "hidden_size": hidden,
        "head_dim": head_dim,
        "rotated": _rotated_channels(config, head_dim) // 2 * 2,
    }


def _rotated_channels(config: dict[str, Any], head_dim: int) -> int:
    """Channels of a head that the source rotates: all, the first few (GPT-NeoX, GPT-J), or none (a learned table)."""
    if config["model_type"] == "gpt2":
        return 0
    if config["model_type"] == "gptj":
        # The config class's own default, and what null means there: all channels of the model, refused when it is loaded.
        return config.get("rotary_dim", 64) or head_dim
    share = first_of(config.get("rope_parameters") or {}, "partial_rotary_factor")
    share = share or first_of(config, "partial_rotary_factor", "rotary_pct")
    return int(head_dim * (share or (0.25 if config["model_type"] == "gpt_neox" else 1.0)))

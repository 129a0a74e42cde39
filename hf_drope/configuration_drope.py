"""Settings of a converted model and the config class of each family.

A converted checkpoint differs from its source by one nested dict in `config.json`, `drope_parameters`, and by its
`model_type`, `<source type>_drope`, which no stock class will load by mistake. `DroPEParameters` is that dict, validated.
This file travels with every checkpoint: it imports nothing heavy at the top and needs no other file of the package.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# Families that the test matrix holds up; the mechanism itself asks no class for its name.
SUPPORTED_MODEL_TYPES: tuple[str, ...] = (
    "arcee",
    "aria_text",
    "axk1",
    "biogpt",
    "bitnet",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "diffllama",
    "doge",
    "dots1",
    "ernie4_5",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "jais2",
    "kolibri1",
    "laguna",
    "lara_mini",
    "lfm2",
    "llama",
    "llama4_text",
    "mellum",
    "minicpm3",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "ministral",
    "mistral",
    "mixtral",
    "modernbert-decoder",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "youtu",
)
TRAVELLING_FILES = (
    "configuration_drope.py",
    "modeling_drope.py",
    "attention_drope.py",
    "attention_backends.py",
    "attention_call.py",
    "attention_masks.py",
    "biased_attention.py",
    "block_bias_attention.py",
    "streamed_attention.py",
    "flex_attention_drope.py",
    "hardware.py",
    "position_bias.py",
    "position_modules.py",
    "position_shapes.py",
    "gates.py",
    "disentangled_bias.py",
    "disentangled_decoding.py",
    "rotary_drope.py",
    "rotary_pairs.py",
    "fp32_module.py",
)
_SUFFIX = "_drope"
_PREFIX = "DroPE"


class _Setting(NamedTuple):
    default: Any
    is_valid: Callable[[Any], bool]
    allowed: str


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _count(default: int, least: int = 1) -> _Setting:
    return _Setting(default, lambda value: _is_int(value) and value >= least, f"a whole number of at least {least}")


def _optional_count(least: int) -> _Setting:
    allowed = f"null or a whole number of at least {least}"
    return _Setting(None, lambda value: value is None or (_is_int(value) and value >= least), allowed)


def _choice(default: Any, *values: Any) -> _Setting:
    # `is` keeps True from passing for 1.
    return _Setting(
        default,
        lambda value: any(value == known and type(value) is type(known) for known in values),
        "one of " + ", ".join(map(repr, values)),
    )


def _flag(default: bool) -> _Setting:
    return _Setting(default, lambda value: isinstance(value, bool), "true or false")


def _number(default: float, least: float = float("-inf")) -> _Setting:
    allowed = "a number" if least == float("-inf") else f"a number above {least:g}"
    return _Setting(default, lambda value: _is_number(value) and value > least, allowed)


_SHARE = _choice("head", "head", "kv_group", "layer")
_TERMS = ("p2p", "c2p", "p2c")


def _is_terms(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(v in _TERMS for v in value) and len(set(value)) == len(value)


def _even_rank(default: int | None) -> _Setting:
    allowed = "an even whole number of at least 2" if default else "null or an even whole number of at least 2"
    return _Setting(default, lambda v: (v is None and not default) or (_is_int(v) and v >= 2 and v % 2 == 0), allowed)


BIAS_SETTINGS: dict[str, dict[str, _Setting]] = {
    "table": {
        "max_distance": _count(512),
        "num_buckets": _optional_count(2),
        "init_range": _number(0.1, -1e-12),
        "bidirectional": _flag(False),
        "share": _SHARE,
    },
    "log": {
        "sign": _choice(-1, -1, 1),
        "init": _choice("constant", "constant", "kerple"),
        "bidirectional": _flag(False),
        "share": _SHARE,
    },
    "linear": {"learned": _flag(False), "bidirectional": _flag(False), "share": _SHARE},
    "low_rank": {
        "rank": _even_rank(16),
        "max_distance": _count(2048, 2),
        "share": _SHARE,
    },
    "disentangled": {
        "terms": _Setting(list(_TERMS), _is_terms, f"a list of some of {', '.join(map(repr, _TERMS))}"),
        "rank": _even_rank(None),
        "content": _choice("mean_rotation", "mean_rotation", "identity"),
        "terms_scale": _Setting(1.0, lambda v: _is_number(v) and 0.0 <= v <= 1.0, "a number from 0.0 to 1.0"),
        "position_scaling": _Setting(None, lambda v: v is None or isinstance(v, dict), "null or a dict with a 'type'"),
        "share": _SHARE,
    },
}
_STRETCH: dict[str, _Setting] = {
    "factor": _Setting(2.0, lambda v: _is_number(v) and 1 <= v < float("inf"), "a number of at least 1")
}
POSITION_SCALINGS: dict[str, dict[str, _Setting]] = {
    "linear": _STRETCH,
    "ntk": _STRETCH,
    "yarn": {
        **_STRETCH,
        "original_max_position_embeddings": _count(8192),
        "beta_fast": _number(32.0, 0.0),
        "beta_slow": _number(1.0, 0.0),
    },
    "clip": {"max_distance": _count(8192)},
}
GATE_SETTINGS: dict[str, dict[str, _Setting]] = {
    "head": {"exponential": _flag(True)},
    "query": {"temperature": _number(1.0, 0.0)},
    "score": {"temperature": _number(1.0, 0.0)},
}

PRESETS: dict[str, dict[str, Any]] = {
    "nope": {},
    "simple": {"position_bias": {"type": "table"}},
    "gated": {"position_bias": {"type": "table"}, "gate": {"type": "head"}},
    "drope": {"position_bias": {"type": "log"}, "gate": {"type": "score"}},
    "t5": {"position_bias": {"type": "table", "num_buckets": 32, "max_distance": 128}},
    "alibi": {"position_bias": {"type": "linear"}},
    "kerple": {"position_bias": {"type": "log", "init": "kerple"}},
    "disentangled": {"position_bias": {"type": "disentangled"}},
}


def _unknown(what: str, name: Any, known: Iterable[str]) -> ValueError:
    known = sorted(known)
    nearest = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"Unknown {what} {name!r}; known are {', '.join(known)}.{hint}")


def _refuse(key: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"{key} is {value!r}; it has to be {allowed}.")


def _complete(where: str, given: Any, table: dict[str, dict[str, _Setting]]) -> dict[str, Any]:
    """Check one nested dict (`position_bias` or `gate`) against its table and fill in the defaults."""
    if not isinstance(given, dict):
        raise _refuse(where, given, "null or a dict with a 'type'")
    given = dict(given)
    kind = given.pop("type", None)
    if not isinstance(kind, str) or kind not in table:
        raise _unknown(f"{where} type", kind, table)
    settings = table[kind]
    for key, value in given.items():
        if key not in settings:
            raise _unknown(f"{where} setting", key, settings)
        if not settings[key].is_valid(value):
            raise _refuse(f"{where}.{key}", value, settings[key].allowed)
    return {"type": kind, **{key: given.get(key, setting.default) for key, setting in settings.items()}}


@dataclass(frozen=True)
class DroPEParameters:
    """How a model encodes position, as stored in `config.drope_parameters`.

    Args:
        rope_scale: strength of the source's own position encoding, 1.0 (unchanged) to 0.0 (dropped, nothing computed).
        rope_fade: what lies between the two: `"angle"` (θ·scale), `"blend"` (1 + scale·(R − 1)) or `"frequency"`
            (rotary pairs dropped one after another, the slowest first).
        rope_layers: indices of layers that keep RoPE whatever `rope_scale` is, or None.
        position_bias: None, or a dict with `type` "table", "log", "linear", "low_rank" or "disentangled" and that type's
            settings. With "disentangled", `rope_scale` is the strength of RoPE on the content term alone: at 1.0 the model
            is its source, and at 0.0 the position terms stay.
        gate: None, or a dict with `type` "head", "query" or "score" and that type's settings; needs a bias to gate.
        attention_scale: None, `{"factor": β}`, or `{"coefficient": c, "original_max_position_embeddings": L}` for
            β_i = 1 + c·ln(max(1, (i + 1) / L)), with i + 1 counted as the number of keys that query i may see.
        qk_norm: None, "q", "k" or "qk": RMSNorm over the concatenated heads of the projected queries and/or keys.
        window: None, the number of most recent keys a query sees, or a list with one such entry (or None) per layer.

    Raises:
        ValueError: one sentence with the setting, its value, what is allowed and the nearest match.
    """

    rope_scale: float = 0.0
    rope_fade: str = "angle"
    rope_layers: list[int] | None = None
    position_bias: dict[str, Any] | None = None
    gate: dict[str, Any] | None = None
    attention_scale: dict[str, Any] | None = None
    qk_norm: str | None = None
    window: int | list[int | None] | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.rope_scale) or not 0.0 <= self.rope_scale <= 1.0:
            raise _refuse("rope_scale", self.rope_scale, "a number from 0.0 (dropped) to 1.0 (RoPE)")
        object.__setattr__(self, "rope_scale", float(self.rope_scale))
        if self.rope_fade not in ("angle", "blend", "frequency"):
            raise _unknown("rope_fade", self.rope_fade, ("angle", "blend", "frequency"))
        if self.rope_layers is not None:
            if not isinstance(self.rope_layers, list | tuple) or not all(
                _is_int(i) and i >= 0 for i in self.rope_layers
            ):
                raise _refuse("rope_layers", self.rope_layers, "null or a list of layer indices")
            object.__setattr__(self, "rope_layers", sorted(set(self.rope_layers)) or None)
        if self.position_bias is not None:
            bias = _complete("position_bias", self.position_bias, BIAS_SETTINGS)
            buckets = bias.get("num_buckets")
            # Half of a side's buckets hold one distance each and the rest are logarithmic up to `max_distance`.
            if buckets is not None and bias["max_distance"] <= buckets // (4 if bias["bidirectional"] else 2):
                raise _refuse("position_bias.max_distance", bias["max_distance"], f"larger for {buckets} buckets")
            if bias.get("position_scaling") is not None:
                scaling = _complete("position_bias.position_scaling", bias["position_scaling"], POSITION_SCALINGS)
                if scaling["type"] == "yarn" and scaling["beta_fast"] <= scaling["beta_slow"]:
                    raise _refuse("position_scaling.beta_fast", scaling["beta_fast"], "larger than beta_slow")
                bias["position_scaling"] = scaling
            if "terms" in bias:
                bias["terms"] = [term for term in _TERMS if term in bias["terms"]]
            object.__setattr__(self, "position_bias", bias)
        if self.gate is not None:
            object.__setattr__(self, "gate", _complete("gate", self.gate, GATE_SETTINGS))
            if self.position_bias is None:
                raise ValueError(
                    f"gate is {self.gate!r} but there is no position_bias for it to act on; "
                    "set position_bias as well, or gate to null."
                )
        self._check_attention_scale()
        if self.qk_norm not in (None, "q", "k", "qk"):
            raise _refuse("qk_norm", self.qk_norm, "null, 'q', 'k' or 'qk'")
        windows = self.window if isinstance(self.window, list | tuple) else [self.window]
        if not windows or not all(w is None or (_is_int(w) and w >= 1) for w in windows):
            raise _refuse("window", self.window, "null, a whole number of at least 1, or a list of these per layer")

    def _check_attention_scale(self) -> None:
        if self.attention_scale is None:
            return
        known = ({"factor"}, {"coefficient", "original_max_position_embeddings"})
        allowed = "null, {'factor': β} or {'coefficient': c, 'original_max_position_embeddings': L}"
        scale = self.attention_scale
        if not isinstance(scale, dict) or set(scale) not in known or not all(map(_is_number, scale.values())):
            raise _refuse("attention_scale", scale, allowed)
        if scale.get("factor", 1.0) <= 0:
            raise _refuse("attention_scale.factor", scale["factor"], "a number above 0")
        length = scale.get("original_max_position_embeddings", 1)
        if not _is_int(length) or length < 1:
            raise _refuse("attention_scale.original_max_position_embeddings", length, "a whole number of at least 1")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> DroPEParameters:
        """The settings known as `name`, changed by `overrides`.

        An override names a top-level setting (`rope_scale=1.0`), a nested one with a dot or without
        (`**{"position_bias.max_distance": 1024}`, `max_distance=1024`).
        """
        if name not in PRESETS:
            raise _unknown("preset", name, PRESETS)
        return cls.from_dict(PRESETS[name]).replace(**overrides)

    def replace(self, **overrides: Any) -> DroPEParameters:
        """A copy with some settings changed; names as in `preset`."""
        settings = self.to_dict()
        top = {key: value for key, value in overrides.items() if key in settings}
        settings.update(top)
        for key, value in overrides.items():
            if key in top:
                continue
            group, _, name = key.rpartition(".")
            homes = [g for g in ("position_bias", "gate") if group in ("", g) and name in (settings[g] or {})]
            if not homes:
                nested = [k for g in ("position_bias", "gate") for k in (settings[g] or {})]
                raise _unknown("setting", key, [*settings, *nested])
            settings[homes[0]] = {**settings[homes[0]], name: value}
        return type(self).from_dict(settings)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> DroPEParameters:
        known = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                raise _unknown("drope_parameters setting", key, known)
        return cls(**copy.deepcopy(settings))

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON, with every default written out."""
        return dataclasses.asdict(self)

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError where a per-layer setting does not fit a model of `num_layers` layers."""
        if self.rope_layers is not None and self.rope_layers[-1] >= num_layers:
            raise _refuse("rope_layers", self.rope_layers, f"layer indices below {num_layers} for this model")
        if isinstance(self.window, list | tuple) and len(self.window) != num_layers:
            raise _refuse("window", self.window, f"a list of {num_layers} entries, one per layer of this model")


def drope_model_type(model_type: str) -> str:
    return model_type if model_type.endswith(_SUFFIX) else model_type + _SUFFIX


def base_model_type(model_type: str) -> str:
    return model_type.removesuffix(_SUFFIX)


def drope_class_name(name: str) -> str:
    return name if name.startswith(_PREFIX) else _PREFIX + name


def stock_class_name(name: str) -> str:
    return name.removeprefix(_PREFIX)


_AUTO_TABLES = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}


@functools.cache
def _stock_names() -> dict[str, dict[str, str]]:
    """Transformers' own tables from model type to class name, one per Auto class.

    Read from their source: importing that module would import torch, which a conversion can do without.
    """
    import transformers
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    source = Path(transformers.__file__).parent / "models" / "auto" / "modeling_auto.py"
    tables = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            name = node.targets[0].id
            if name in _AUTO_TABLES.values():
                tables[name] = dict(ast.literal_eval(node.value.args[0]))
    names = {auto: tables[table] for auto, table in _AUTO_TABLES.items()}
    return {"AutoConfig": dict(CONFIG_MAPPING_NAMES), **names}


def auto_map(model_type: str) -> dict[str, str]:
    """`auto_map` of a converted checkpoint: which class of the travelling files each Auto class loads."""
    base = base_model_type(model_type)
    tables = _stock_names()
    if base not in tables["AutoConfig"]:
        raise _unknown("model type", base, tables["AutoConfig"])
    entries = {}
    for auto_class, table in tables.items():
        if base in table:
            home = "configuration_drope" if auto_class == "AutoConfig" else "modeling_drope"
            # A few types list several classes; the first is the usual one.
            name = table[base] if isinstance(table[base], str) else table[base][0]
            entries[auto_class] = f"{home}.{drope_class_name(name)}"
    return entries


# `attention_type` of the public DroPE checkpoints (https://github.com/SakanaAI/DroPE), and which projections have a norm.
_PUBLIC_ATTENTION = {"nope": None, "q_norm_nope": "q", "k_norm_nope": "k", "qk_norm_nope": "qk"}


def _read_public_fields(config: Any) -> None:
    """Turn the fields of a public DroPE checkpoint into `drope_parameters`."""
    kind, scale = config.attention_type, getattr(config, "softmax_scale", None)
    if kind not in _PUBLIC_ATTENTION:
        raise ValueError(f"attention_type is {kind!r}; it has to be one of {', '.join(map(repr, _PUBLIC_ATTENTION))}.")
    settings: dict[str, Any] = {"rope_scale": 0.0, "qk_norm": _PUBLIC_ATTENTION[kind]}
    if scale is not None:
        # There the whole factor on the scores, here what 1 / √head_dim is multiplied by.
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        settings["attention_scale"] = {"factor": scale * head_dim**0.5}
        del config.softmax_scale
    del config.attention_type
    config.drope_parameters = settings


_config_classes: dict[type, type] = {}
# Called with each new config class; the installed package registers its model classes here, a checkpoint's code nothing.
config_class_listeners: list[Callable[[type], None]] = []


def drope_config_class(stock: Any) -> type:
    """The config class of a converted model.

    Args:
        stock: a Transformers config class, a model class, or a model type such as "llama".

    Returns:
        A subclass of the stock config class with `model_type` "<type>_drope" and the field `drope_parameters`.
    """
    if isinstance(stock, str):
        from transformers import CONFIG_MAPPING

        stock = CONFIG_MAPPING[base_model_type(stock)]
    stock = getattr(stock, "config_class", None) or stock
    if stock.model_type.endswith(_SUFFIX):
        return stock
    if stock not in _config_classes:
        _config_classes[stock] = _make_config_class(stock)
    return _config_classes[stock]


def _make_config_class(stock: Any) -> type:
    def __post_init__(self: Any, **kwargs: Any) -> None:
        super(config_class, self).__post_init__(**kwargs)
        if self.drope_parameters is None and hasattr(self, "attention_type"):
            _read_public_fields(self)
        self.drope_parameters = DroPEParameters.from_dict(self.drope_parameters or {}).to_dict()
        # Entries of an earlier home ("owner/repo--module.Class") would send a later load to the network.
        self.auto_map = auto_map(stock.model_type)
        for listener in config_class_listeners:
            listener(type(self))

    namespace = {
        "__module__": __name__,
        "__doc__": f"Config of a {stock.model_type} model converted by hf_drope: {stock.__name__} and `drope_parameters`.",
        "__annotations__": {"drope_parameters": dict | None},
        "__post_init__": __post_init__,
        "model_type": drope_model_type(stock.model_type),
        "drope_parameters": None,
    }
    config_class: Any = type(drope_class_name(stock.__name__), (stock,), namespace)
    config_class.register_for_auto_class("AutoConfig")
    return config_class


def __getattr__(name: str) -> Any:
    """`DroPELlamaConfig` and its like are made when first asked for."""
    if name.startswith(_PREFIX) and name.endswith("Config"):
        import transformers

        stock = getattr(transformers, stock_class_name(name), None)
        if stock is not None:
            return drope_config_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

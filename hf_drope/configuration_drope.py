"""Settings of a converted model and the config class of each family.

A converted checkpoint differs from its source by one nested dict in `config.json`, `drope_parameters`, and by its
`model_type`, `<source type>_drope`, which no stock class will load by mistake. `DroPEParameters` is that dict, validated.
This file travels with every checkpoint: it imports nothing heavy at the top.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .drope_parameters import DroPEParameters, unknown

TRAVELLING_FILES = (
    "configuration_drope.py",
    "drope_parameters.py",
    "modeling_drope.py",
    "installation.py",
    "attention_drope.py",
    "attention_backends.py",
    "attention_call.py",
    "attention_masks.py",
    "biased_attention.py",
    "block_bias_attention.py",
    "stock_attention.py",
    "streamed_attention.py",
    "flex_attention_drope.py",
    "hardware.py",
    "packed_documents.py",
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
# Ends the name of the class that tells engines to keep their attention out.
OWN_ATTENTION = "WithOwnAttention"
# What the rotation itself is made of; the rest of `rope_parameters` scales it.
_ROPE_BASE = ("rope_theta", "partial_rotary_factor")
# Where Transformers puts the code of checkpoints.
_REMOTE_CODE = "transformers_modules."


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
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
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


def auto_map(model_type: str, settings: DroPEParameters | None = None) -> dict[str, str]:
    """`auto_map` of a converted checkpoint: which class of the travelling files each Auto class loads.

    Engines ask the class of AutoModel, before there is a model, whether they may put their own attention in; so there is one
    class that says yes and, for `settings` with parts that such an attention would leave out, one that says no.
    """
    base = base_model_type(model_type)
    tables = _stock_names()
    if base not in tables["AutoConfig"]:
        raise unknown("model type", base, tables["AutoConfig"])
    entries = {}
    for auto_class, table in tables.items():
        if base in table:
            home = "configuration_drope" if auto_class == "AutoConfig" else "modeling_drope"
            # A few types list several classes; the first is the usual one.
            name = table[base] if isinstance(table[base], str) else table[base][0]
            entries[auto_class] = f"{home}.{drope_class_name(name)}"
    if "AutoModel" not in entries:
        raise ValueError(f"Transformers has no AutoModel for {base!r}, which a converted model is loaded by.")
    if settings is not None and settings.needs_own_attention:
        entries["AutoModel"] += OWN_ATTENTION
    return entries


# `attention_type` of the public DroPE checkpoints (https://github.com/SakanaAI/DroPE), and which projections have a norm.
PUBLIC_FIELDS = ("attention_type", "softmax_scale")
_PUBLIC_ATTENTION = {"nope": None, "q_norm_nope": "q", "k_norm_nope": "k", "qk_norm_nope": "qk"}


def public_settings(fields: dict[str, Any]) -> dict[str, Any] | None:
    """What the fields of a public DroPE checkpoint's config say as `drope_parameters`; None where there are none."""
    if "attention_type" not in fields or fields.get("drope_parameters") is not None:
        return None
    kind, scale = fields["attention_type"], fields.get("softmax_scale")
    if kind not in _PUBLIC_ATTENTION:
        raise ValueError(f"attention_type is {kind!r}; it has to be one of {', '.join(map(repr, _PUBLIC_ATTENTION))}.")
    settings: dict[str, Any] = {"rope_scale": 0.0, "qk_norm": _PUBLIC_ATTENTION[kind]}
    if scale is not None:
        # There the whole factor on the scores, here what 1 / √head_dim is multiplied by.
        head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        settings["attention_scale"] = {"factor": scale * head_dim**0.5}
    return settings


def _with_rope_base(held: Any, given: Any) -> Any:
    """New RoPE settings with what they leave out of the rotation itself, as when only a scaling is overridden.

    Raises:
        ValueError: the model rotates differently by type of layer, and the new settings name no type.
    """
    if not isinstance(held, dict) or not isinstance(given, dict) or not given:
        return given
    kinds = [key for key, value in held.items() if isinstance(value, dict)]
    if not kinds:
        return {**{key: held[key] for key in _ROPE_BASE if held.get(key) is not None and key not in given}, **given}
    if not set(given) & set(kinds):
        raise ValueError(
            f"rope_parameters is {given!r}; it has to give settings for some of {', '.join(map(repr, kinds))}, since this "
            "model rotates differently by type of layer."
        )
    return {**held, **{key: _with_rope_base(held.get(key), value) for key, value in given.items()}}


class _RemoteClass:
    """Stands for a config class of a checkpoint's own code in a pickle: a process that knows nothing of it can load it."""

    def __init__(self, config_class: type) -> None:
        self.config_class = config_class

    def __reduce__(self) -> Any:
        from transformers.dynamic_module_utils import get_class_in_module

        path = self.config_class.__module__.replace(".", "/") + ".py"
        return get_class_in_module, (self.config_class.__name__, _RemotePath(path))


class _RemotePath:
    """A path in a pickle that makes the folder of such code importable before it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return operator.getitem, ((_Importable(), self.path), 1)


class _Importable:
    def __reduce__(self) -> Any:
        from transformers.dynamic_module_utils import init_hf_modules

        return init_hf_modules, ()


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
        public = public_settings(vars(self))
        if public is not None:
            self.drope_parameters = public
            for name in set(PUBLIC_FIELDS) & vars(self).keys():
                delattr(self, name)
        self.drope_parameters = DroPEParameters.from_dict(self.drope_parameters or {}).to_dict()
        # Entries of an earlier home ("owner/repo--module.Class") would send a later load to the network.
        self.auto_map = auto_map(stock.model_type, DroPEParameters.from_dict(self.drope_parameters))
        for listener in config_class_listeners:
            listener(type(self))

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        home = type(self).__module__
        if not home.startswith(_REMOTE_CODE):
            return super(config_class, self).__reduce_ex__(protocol)
        return copyreg._reconstructor, (_RemoteClass(type(self)), object, None), vars(self)  # type: ignore[attr-defined]

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name == "rope_parameters":
            value = _with_rope_base(vars(self).get(name), value)
        super(config_class, self).__setattr__(name, value)

    namespace = {
        "__module__": __name__,
        "__doc__": f"Config of a {stock.model_type} model converted by hf_drope: {stock.__name__} and `drope_parameters`.",
        "__annotations__": {"drope_parameters": dict | None},
        "__post_init__": __post_init__,
        "__setattr__": __setattr__,
        "__reduce_ex__": __reduce_ex__,
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

"""`DroPEParameters`: the settings of a converted model, complete and checked. This file travels with every checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


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


def unknown(what: str, name: Any, known: Iterable[str]) -> ValueError:
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
        raise unknown(f"{where} type", kind, table)
    settings = table[kind]
    for key, value in given.items():
        if key not in settings:
            raise unknown(f"{where} setting", key, settings)
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
            raise unknown("rope_fade", self.rope_fade, ("angle", "blend", "frequency"))
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
            raise unknown("preset", name, PRESETS)
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
                raise unknown("setting", key, [*settings, *nested])
            settings[homes[0]] = {**settings[homes[0]], name: value}
        return type(self).from_dict(settings)

    @classmethod
    def of(cls, parameters: Any) -> DroPEParameters:
        """Settings from the name of a preset, a dict, or what are settings already, of whichever copy of this class."""
        if isinstance(parameters, str):
            return cls.preset(parameters)
        return cls.from_dict(parameters) if isinstance(parameters, dict) else parameters

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> DroPEParameters:
        known = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                raise unknown("drope_parameters setting", key, known)
        return cls(**copy.deepcopy(settings))

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, ready for JSON, with every default written out."""
        return dataclasses.asdict(self)

    @property
    def needs_own_attention(self) -> bool:
        """Whether another engine's attention would leave something out: a bias, a window, a scale by length, or a norm
        over all heads, which an engine that spreads heads over devices would take over its own alone."""
        by_length = bool((self.attention_scale or {}).get("coefficient"))
        return by_length or any(part is not None for part in (self.position_bias, self.window, self.qk_norm))

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError where a per-layer setting does not fit a model of `num_layers` layers."""
        if self.rope_layers is not None and self.rope_layers[-1] >= num_layers:
            raise _refuse("rope_layers", self.rope_layers, f"layer indices below {num_layers} for this model")
        if isinstance(self.window, list | tuple) and len(self.window) != num_layers:
            raise _refuse("window", self.window, f"a list of {num_layers} entries, one per layer of this model")

"""What position parameters a layer gets, by name and shape, without making them: a plan needs no torch.

This file travels with every checkpoint, where the refusals are needed.
"""

from __future__ import annotations

from typing import Any


def check_rotation(position_bias: dict[str, Any], rotated: int) -> None:
    """Raise ValueError where a disentangled bias asks for more than the `rotated` channels a head that RoPE turns."""
    if position_bias["type"] != "disentangled":
        return
    if not rotated:
        raise ValueError(
            "position_bias.type 'disentangled' takes RoPE apart and this model has none; use 'table', 'log', 'linear' "
            "or 'low_rank'."
        )
    rank = position_bias.get("rank")
    if rank is not None and rank > rotated:
        raise ValueError(f"rank is {rank}; it has to be at most {rotated}, the channels that RoPE rotates here.")


def position_shapes(
    settings: Any, *, heads: int, groups: int, hidden_size: int, head_dim: int, rotated: int, keeps_rope: bool = False
) -> dict[str, list[int]]:
    """Names below a layer's attention module, and shapes, of what `settings` (`DroPEParameters`) add to it.

    Args:
        groups: key/value heads.
        rotated: channels a head that RoPE turns.
        keeps_rope: the layer is one of `rope_layers`, where a disentangled bias has no place.
    """
    found: dict[str, list[int]] = {}
    bias = settings.position_bias
    if bias is not None:
        check_rotation(bias, rotated)
    if bias is not None and not (keeps_rope and bias["type"] == "disentangled"):
        shapes = _bias_shapes(bias, heads, groups, head_dim, rotated)
        found |= {f"position_bias.bias.{name}": shape for name, shape in shapes.items()}
        found |= {
            f"position_bias.gate.{name}": shape for name, shape in _gate_shapes(settings, heads, hidden_size).items()
        }
    for which, count in (("q", heads), ("k", groups)):
        if which in (settings.qk_norm or ""):
            found[f"qk_norm.{which}_norm.weight"] = [count * head_dim]
    return found


def _bias_shapes(bias: dict[str, Any], heads: int, groups: int, head_dim: int, rotated: int) -> dict[str, list[int]]:
    kind, sets = bias["type"], {"head": heads, "kv_group": groups, "layer": 1}[bias["share"]]
    sides = 1 + bool(bias.get("bidirectional"))
    if kind == "table":
        return {"weight": [bias["num_buckets"] or 2 * bias["max_distance"] - 1, sets]}
    if kind == "log":
        return {"gamma": [sides, sets], "a": [sides, sets]}
    if kind == "linear":
        return {"slopes": [sides, sets]} if bias["learned"] else {}
    if kind == "low_rank":
        half = bias["rank"] // 2
        return {"alpha": [sets, half], "beta": [sets, half], "frequencies": [half]}
    found = {"query_mean": [sets, head_dim], "key_mean": [1 if bias["share"] == "layer" else groups, head_dim]}
    if bias["content"] == "mean_rotation":
        found["gain"] = [sets, rotated // 2, 2]
    if bias["rank"] is not None:
        found["pairs"] = [groups, bias["rank"] // 2]
    return found


def _gate_shapes(settings: Any, heads: int, hidden_size: int) -> dict[str, list[int]]:
    gate = settings.gate or {}
    if gate.get("type") == "head":
        return {"g": [heads], "t": [heads]} if gate["exponential"] else {"g": [heads]}
    return {"weight": [heads, hidden_size], "bias": [heads]} if gate.get("type") == "query" else {}

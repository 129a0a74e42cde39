"""Which attention implementations can add what a model's settings ask for. This file travels with every checkpoint."""

from __future__ import annotations

from typing import Any

from .attention_masks import check_scale

_FLASH = "flash_attention_2"
_WIDEST_FLASH = 256


def width_of_heads(settings: Any, head_dim: int) -> int:
    """Channels of a head with what a bias that is a dot product adds, at most."""
    bias = settings.position_bias or {}
    if bias.get("type") == "low_rank":
        return head_dim + bias["rank"]
    if bias.get("type") == "disentangled":
        content = head_dim if settings.rope_scale == 0.0 else 2 * head_dim
        products = max(len(set(bias["terms"]) - {"p2p"}), len(bias["terms"]) > 0)
        return content + products * (bias["rank"] or head_dim)
    return head_dim


def supported_backends(settings: Any, head_dim: int = 0) -> tuple[str, ...]:
    """The attention implementations that can add what `settings` (`DroPEParameters`) ask for to heads of `head_dim` channels.

    "flash_attention_2" stands for every flash kernel: they take wider heads, but neither a bias nor a mask of ours.
    """
    bias = settings.position_bias or {}
    by_score = (settings.gate or {}).get("type") == "score"
    clipped = (bias.get("position_scaling") or {}).get("type") == "clip"
    is_product = bias.get("type") in ("low_rank", "disentangled") and not by_score and not clipped
    found = ["eager", "sdpa"]
    # Counting the keys that a query sees needs a mask that says so.
    if "coefficient" in (check_scale(settings.attention_scale) or {}):
        return tuple(found)
    if is_product or bias.get("type") != "disentangled":
        found.append("flex_attention")
    narrow = width_of_heads(settings, head_dim) <= _WIDEST_FLASH
    if (is_product or not bias) and settings.window is None and narrow:
        found.append(_FLASH)
    return tuple(found)


def refuse_backend(settings: Any, implementation: str | None, head_dim: int = 0) -> None:
    """Raise ValueError where an attention implementation would leave out a bias, gate, window or scale of `settings`."""
    scale = check_scale(settings.attention_scale) or {}
    added = {
        "position bias": settings.position_bias and settings.position_bias["type"],
        "gate": settings.gate and settings.gate["type"],
        "window": settings.window,
        # A constant one is in the queries before any backend sees them.
        "attention scale": scale if "coefficient" in scale else None,
    }
    what = [f"{name} {value!r}" for name, value in added.items() if value is not None]
    supported = supported_backends(settings, head_dim)
    kind = str(implementation)
    if not _needs_distances(settings):
        # The same backends with the keys of continuous batching.
        kind = kind.removeprefix("paged|")
    kind = _FLASH if kind.startswith("flash_attention") else kind
    wide = width_of_heads(settings, head_dim)
    if kind == _FLASH and wide > _WIDEST_FLASH:
        what.append(
            f"heads of {wide} channels for it (flash kernels take {_WIDEST_FLASH}; a lower rank makes them narrower)"
        )
    if what and kind not in supported:
        raise ValueError(
            f"A model with {', '.join(what)} cannot run on attn_implementation={implementation!r}, which would leave it out; "
            f"load it with one of {', '.join(map(repr, supported))}."
        )


def _needs_distances(settings: Any) -> list[str]:
    """What makes attention ask how far a key is from a query."""
    scale = check_scale(settings.attention_scale) or {}
    added = {
        "position bias": settings.position_bias and settings.position_bias["type"],
        "window": settings.window,
        "attention scale": scale if "coefficient" in scale else None,
    }
    return [f"{name} {value!r}" for name, value in added.items() if value is not None]


def refuse_continuous_batching(settings: Any) -> None:
    """Raise ValueError where attention needs distances, which continuous batching does not say."""
    what = _needs_distances(settings)
    if what:
        raise ValueError(
            f"A model with {', '.join(what)} cannot generate by continuous batching, which lays the keys of all requests in one "
            "row and does not say where each stands; use generate(), which takes a batch as well."
        )

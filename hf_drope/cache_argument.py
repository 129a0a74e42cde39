"""The name under which a model's `forward` takes its cache, which Transformers changed."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument that hands `cache` to the model."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}

"""A file that is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write or replace a file, in UTF-8 and with line ends as they are."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(text.encode("utf-8"))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def json_text(content: Any) -> str:
    """As our records and configs are written."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

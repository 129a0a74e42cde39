"""Where numbers come from: versions, machine, revision, hashes."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import __version__

_PIECE = 1 << 22


def provenance() -> dict[str, Any]:
    """Versions, git revision, machine and command of this process, ready for JSON."""
    import torch
    import transformers

    program = Path(sys.argv[0]).name
    return {
        "hf_drope": __version__,
        "git_revision": git_revision(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "command": ["hf-drope" if program == "__main__.py" else program, *sys.argv[1:]],
    }


def cpu_name() -> str:
    """As "2 × name" where Linux tells."""
    file = Path("/proc/cpuinfo")
    if file.is_file():
        lines = file.read_text(encoding="utf-8").split("\n")
        names = [line.split(":")[1].strip() for line in lines if "model name" in line]
        if names:
            return f"{len(names)} × {names[0]}"
    return platform.processor() or platform.machine()


def git_revision() -> str | None:
    """The commit that this package is run from, with a mark where files differ from it; None outside its repository."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", os.fspath(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Installed into an environment that lies within another project's repository, it is not that project's.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def model_files(folder: Path) -> list[Path]:
    """The config and the weights of a model's folder; the config alone where there are no weights."""
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    return [folder / "config.json", *weights]


def sha256(files: Iterable[str | Path]) -> str:
    """One hash of the names and contents of files."""
    digest = hashlib.sha256()
    for path in map(Path, files):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()

"""A folder that appears whole or not at all, however the process that fills it ends."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import CheckpointError


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target`, which becomes `target` if the block ends well and is removed if it does not.

    A folder that was at `target` when the block began is replaced: moved aside, and deleted when the new one stands. One
    that another process filled in the meantime is left alone.

    Raises:
        CheckpointError: `target` was filled by someone else in the meantime.
    """
    replaces = target.is_dir() and any(target.iterdir())
    # Renaming a folder takes the current one away from under this process's feet.
    is_current = target.is_dir() and target.samefile(".")
    token = uuid.uuid4().hex[:12]
    work, old = (target.with_name(f".{target.name}.{what}-{token}") for what in ("partial", "old"))
    work.mkdir()
    lock = _lock(work)
    try:
        yield work
        if replaces:
            target.rename(old)
        try:
            work.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(
                f"{target} was filled by someone else in the meantime; it was left as it is."
            ) from error
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    shutil.rmtree(old, ignore_errors=True)
    if is_current:
        os.chdir(target)


def remove_leftovers(target: Path) -> None:
    """Clean up after earlier runs of `new_folder` on `target` that were killed, and give back what they had moved aside."""
    for work in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        lock = _lock(work)
        if lock is not None:
            shutil.rmtree(work, ignore_errors=True)
            os.close(lock)
    for old in target.parent.glob(f".{glob.escape(target.name)}.old-*"):
        token = old.name.removeprefix(f".{target.name}.old-")
        if target.with_name(f".{target.name}.partial-{token}").exists():
            continue
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)


def _lock(folder: Path) -> int | None:
    """A lock that ends with this process, however it ends; None where another process holds it or locks do not work."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor

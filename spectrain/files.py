"""Atomic writes: a file or folder is complete or absent, after a kill, a full disk or a power failure."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import RunError, UserError

REPEAT_COMMAND = "give the same command again"
# Weight files that can run code when they are read.
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@contextmanager
def atomic_write(destination: Path, folder: bool = False, remedy: str = REPEAT_COMMAND) -> Iterator[Path]:
    """Yield a scratch path next to `destination`, which replaces it once it is complete and on disk.

    The path is that of a file or, with `folder`, of an empty folder. After any failure nothing of it is left, the earlier
    content is unchanged, and a UserError or RunError names the destination. For a file, every process has its own scratch
    path. A folder is written by one process, so what a kill has left of it is removed first.
    """
    scratch = destination.with_name(f"{destination.name}.part" if folder else f"{destination.name}.{secrets.token_hex(4)}.part")
    made = [above for above in scratch.parents if not above.exists()] if folder else []  # the innermost first
    _remove_path(scratch)
    try:
        with explain_full_disk(destination, remedy):
            if folder:
                scratch.mkdir(parents=True)
            yield scratch
            # Sync before the rename, or a power failure would leave an empty file.
            for path in [*scratch.rglob("*"), scratch]:
                _sync_to_disk(path)
            _replace_path(scratch, destination)
            _sync_to_disk(destination.parent)
    except (UserError, RunError) as error:
        if str(scratch) not in str(error):
            raise
        raise type(error)(str(error).replace(str(scratch), str(destination))) from error
    finally:
        _remove_path(scratch)
        for above in made:
            with suppress(OSError):  # it holds something
                above.rmdir()


def write_text(destination: Path, text: str, remedy: str = REPEAT_COMMAND) -> None:
    """Write or replace a text file atomically."""
    with atomic_write(destination, remedy=remedy) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def explain_full_disk(destination: Path, remedy: str = REPEAT_COMMAND) -> Iterator[None]:
    """Report a full disk in one sentence that names what could not be written; other errors pass unchanged."""
    try:
        yield
    except Exception as error:  # safetensors says so in an exception of its own
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not full and not any(sign in str(error) for sign in ("No space left", "File too large")):
            raise
        raise UserError(
            f"{destination}: the disk is full, so it was not saved and what was saved before is intact; free "
            f"some space and {remedy}"
        ) from error


def _replace_path(scratch: Path, destination: Path) -> None:
    """Move the scratch path to its destination. A folder cannot replace another, so an existing one is moved away first."""
    if not destination.is_dir():
        scratch.replace(destination)
        return
    old = destination.with_name(destination.name + ".old")
    _remove_path(old)
    destination.rename(old)
    scratch.rename(destination)
    _remove_path(old)


def _remove_path(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Files and folders that are there whole or not at all, whatever ends the program: a kill, a full disk, lost power."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UserError

REPEAT_COMMAND = "give the same command again"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")  # files of weights that reading could run code from


@contextmanager
def atomic_write(destination: Path, folder: bool = False, remedy: str = REPEAT_COMMAND) -> Iterator[Path]:
    """A scratch path beside `place`, of a file or, with `folder`, of an empty folder, which takes that name once it is complete
    and on the disk. On any failure nothing of it is left, and what was there before is as it was.

    Of a file every process has its own scratch. A folder is written by one process, so what a kill has left of it goes first.
    """
    scratch = destination.with_name(f"{destination.name}.part" if folder else f"{destination.name}.{secrets.token_hex(4)}.part")
    made = [above for above in scratch.parents if not above.exists()] if folder else []  # the innermost first
    _remove_path(scratch)
    try:
        with explain_full_disk(destination, remedy):
            if folder:
                scratch.mkdir(parents=True)
            yield scratch
            for path in [*scratch.rglob("*"), scratch]:  # before it has its name, or losing power would leave a husk
                _sync_to_disk(path)
            _replace_path(scratch, destination)
            _sync_to_disk(destination.parent)
    finally:
        _remove_path(scratch)
        for above in made:
            with suppress(OSError):  # it holds something
                above.rmdir()


def write_text(destination: Path, text: str, remedy: str = REPEAT_COMMAND) -> None:
    """Write or replace a text file as a whole."""
    with atomic_write(destination, remedy=remedy) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def explain_full_disk(destination: Path, remedy: str = REPEAT_COMMAND) -> Iterator[None]:
    """A full disk as one sentence that names what could not be written; other errors as they are."""
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
    """Put the scratch in its place. A folder takes no other's place, so one that is there steps aside first."""
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

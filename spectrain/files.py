"""Files and folders that are there whole or not at all, whatever ends the program: a kill, a full disk, lost power."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UserError

AGAIN = "give the same command again"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")  # files of weights that reading could run code from


@contextmanager
def written(place: Path, folder: bool = False, mend: str = AGAIN) -> Iterator[Path]:
    """A scratch path beside `place`, of a file or, with `folder`, of an empty folder, which takes that name once it is complete
    and on the disk. On any failure nothing of it is left, and what was there before is as it was.

    Of a file every process has its own scratch. A folder is written by one process, so what a kill has left of it goes first.
    """
    scratch = place.with_name(f"{place.name}.part" if folder else f"{place.name}.{secrets.token_hex(4)}.part")
    made = [above for above in scratch.parents if not above.exists()] if folder else []  # the innermost first
    _remove(scratch)
    try:
        with full_disk_named(place, mend):
            if folder:
                scratch.mkdir(parents=True)
            yield scratch
            for path in [*scratch.rglob("*"), scratch]:  # before it has its name, or losing power would leave a husk
                _sync(path)
            _rename(scratch, place)
            _sync(place.parent)
    finally:
        _remove(scratch)
        for above in made:
            with suppress(OSError):  # it holds something
                above.rmdir()


def write_text(place: Path, text: str, mend: str = AGAIN) -> None:
    """Write or replace a text file as a whole."""
    with written(place, mend=mend) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def full_disk_named(place: Path, mend: str = AGAIN) -> Iterator[None]:
    """A full disk as one sentence that names what could not be written; other errors as they are."""
    try:
        yield
    except Exception as error:  # safetensors says so in an exception of its own
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not full and not any(sign in str(error) for sign in ("No space left", "File too large")):
            raise
        raise UserError(
            f"{place}: the disk is full, so it was not saved and what was saved before is intact; free some space and {mend}"
        ) from error


def _rename(scratch: Path, place: Path) -> None:
    """Put the scratch in its place. A folder takes no other's place, so one that is there steps aside first."""
    if not place.is_dir():
        scratch.replace(place)
        return
    old = place.with_name(place.name + ".old")
    _remove(old)
    place.rename(old)
    scratch.rename(place)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Text files that users wrote; atomic writes: a file or folder is complete or absent, after a kill,
a full disk or a power failure; and locks, so that two processes of one kind never write to one
place at the same time."""

import codecs
import errno
import fcntl
import gzip
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, AnyStr, TextIO

from safetensors import SafetensorError

from .errors import RunError, UserError

REPEAT_COMMAND = "give the same command again"
SAVE_AS_UTF8 = "save it as UTF-8"
COPY_AGAIN = "copy the file again"
# Bytes of a text file that is read whole; the texts of a code base have far less.
MAX_TEXT_BYTES = 200_000_000
# Characters of a line; a row with images in it has some millions.
MAX_LINE_LENGTH = 100_000_000
# The mark of UTF-32 begins with that of UTF-16.
FOREIGN_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""The encodings that a byte-order mark names, besides UTF-8."""
# Weight files that can run code when they are read.
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# What the system says about a disk without space, and about a path where nothing can be written.
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PATH_ERRORS = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EEXIST,
    errno.ENXIO,
)
# Bytes that the name of a scratch file is longer than that of the file.
SCRATCH_NAME_BYTES = len(".12345678.part")
# Characters of a path in a message.
MAX_SHOWN_PATH = 300
# Attempts to lock a scratch folder that other processes move away meanwhile.
LOCK_ATTEMPTS = 100


@contextmanager
def atomic_write(
    destination: Path, folder: bool = False, remedy: str = REPEAT_COMMAND, is_new: bool = False
) -> Iterator[Path]:
    """Yield a scratch path next to `destination`, which replaces it once it is complete and on
    disk.

    The path is that of a file or, with `folder`, of an empty folder. After any failure nothing of
    it is left, the earlier content is unchanged, and a UserError or RunError names the destination.
    For a file, every process has its own scratch path. A folder is written by one process at a
    time, so what a kill has left of it is removed first; a second process raises `FolderBusy`. With
    `is_new` a folder is never replaced by another one: what a second process has written meanwhile
    raises a UserError.
    """
    scratch = destination.with_name(
        f"{destination.name}.part" if folder else f"{destination.name}.{secrets.token_hex(4)}.part"
    )
    if not folder and destination.is_dir():
        raise UserError(f"{shorten_path(destination)}: this is a folder; give the path of a file")
    # the innermost first
    made = [above for above in scratch.parents if not above.exists()] if folder else []
    handle: int | None = None
    try:
        with explain_failed_write(destination, remedy):
            if folder:
                handle = _lock_scratch(scratch, destination)
            yield scratch
            # Sync before the rename, or a power failure would leave an empty file.
            for path in [*scratch.rglob("*"), scratch]:
                _sync_to_disk(path)
            if is_new and destination.is_dir() and any(destination.iterdir()):
                raise UserError(
                    f"{destination}: another process has written it meanwhile; choose another "
                    "folder"
                )
            _replace_path(scratch, destination)
            _sync_to_disk(destination.parent)
    except (UserError, RunError) as error:
        if str(scratch) not in str(error):
            raise
        raise type(error)(str(error).replace(str(scratch), str(destination))) from error
    finally:
        if not folder or (handle is not None and is_open_file(handle, scratch)):
            _remove_path(scratch)
        if handle is not None:
            os.close(handle)
        for above in made:
            with suppress(OSError):  # it holds something
                above.rmdir()


class FolderBusy(UserError):
    """Another process writes the same folder."""


def _lock_scratch(scratch: Path, destination: Path) -> int:
    """Create the scratch folder, empty and locked, and return its open handle."""
    if scratch.is_symlink() or scratch.is_file():
        scratch.unlink()
    for _ in range(LOCK_ATTEMPTS):
        scratch.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            handle = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
            if try_lock(handle) is not None and is_open_file(handle, scratch):
                for left in scratch.iterdir():
                    _remove_path(left)
                return handle
            is_moved = not is_open_file(handle, scratch)
            os.close(handle)
            if not is_moved:
                break
    raise FolderBusy(
        f"{destination}: another process is writing it; let that finish, or name another folder"
    )


def make_folder_once(folder: Path, marker: str, write_content: Callable[[Path], object]) -> None:
    """Write a folder of a cache unless it holds the file `marker`; while another process writes
    it, wait for that.
    """
    is_told = False
    while not (folder / marker).exists():
        try:
            with atomic_write(folder, folder=True) as scratch:
                if (folder / marker).exists():
                    raise FolderBusy(f"{folder}: another process has just written it")
                write_content(scratch)
        except FolderBusy:
            if not is_told and not (folder / marker).exists():
                print(f"{folder}: another process is writing it; waiting for that", flush=True)
            is_told = True
            time.sleep(0.5)


def write_text(destination: Path, text: str, remedy: str = REPEAT_COMMAND) -> None:
    """Write or replace a text file atomically."""
    with atomic_write(destination, remedy=remedy) as scratch:
        scratch.write_text(text, encoding="utf-8")


def open_text(
    path: Path,
    is_compressed: bool = False,
    remedy: str = SAVE_AS_UTF8,
    newline: str | None = None,
) -> TextIO:
    """Open a text file that a user wrote: UTF-8, with or without a byte-order mark, compressed by
    gzip or not; with `newline=""` the ends of lines stay as they are.

    A UserError says what to do with a file in another encoding that a byte-order mark names, and
    with a pipe or a device, which may never end.
    """
    require_regular_file(path)
    opened = gzip.open if is_compressed else open
    with opened(path, "rb") as file:
        check_encoding(file.read(4), path, remedy)
    return opened(path, "rt", encoding="utf-8-sig", newline=newline)


def read_text(path: Path, remedy: str = SAVE_AS_UTF8) -> str:
    """Return the text of a file that a user wrote, without a byte-order mark; raise a UserError for
    a larger one than any text is, and with the `remedy` for one in another encoding.
    """
    if path.exists() and path.stat().st_size > MAX_TEXT_BYTES:
        raise UserError(
            f"{path}: it has more than {MAX_TEXT_BYTES // 1_000_000} MB, which no text needs; "
            "divide it"
        )
    with open_text(path, remedy=remedy) as file:
        return file.read()


def iterate_lines(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """Yield the lines of an open file; raise a UserError for one that is longer than any row is,
    before it fills the memory.
    """
    number = 0
    while line := file.readline(MAX_LINE_LENGTH):
        number += 1
        if len(line) == MAX_LINE_LENGTH:
            raise UserError(
                f"{path}, line {number}: it has {MAX_LINE_LENGTH} characters or more, which no row "
                "needs; write one row a line"
            )
        yield line


def require_regular_file(path: Path, remedy: str = COPY_AGAIN) -> None:
    """Raise a UserError where a path is a folder, a pipe, a device or a socket, which may never
    end.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: this is no file; {remedy}")


def refuse_link(path: Path | str) -> None:
    """Raise a UserError for a link, because a folder that somebody else made may hold one that
    leads to another file of this user.
    """
    if os.path.islink(path):
        raise UserError(f"{path}: this is a link, and what it leads to is not changed; delete it")


def open_in_place(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """Open a file that is changed where it is, and return its handle. A UserError is raised for a
    link, a pipe and a device.
    """
    try:
        # Opening a pipe would wait for somebody who reads it.
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        refuse_link(path)
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"{path}: this is no file; delete it") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path}: this is no file; delete it")
    return handle


def check_encoding(start: bytes, path: Path, remedy: str = SAVE_AS_UTF8) -> None:
    """Raise a UserError where the first bytes of a file are the byte-order mark of another
    encoding than UTF-8, or hold a zero, as those of such an encoding without a mark.
    """
    encoding = next((name for mark, name in FOREIGN_MARKS.items() if start.startswith(mark)), None)
    if encoding is not None:
        raise UserError(f"{path}: it is {encoding} text; {remedy}")
    if 0 in start:
        raise UserError(f"{path}: it has zero bytes, as UTF-16 and UTF-32 text has; {remedy}")


@contextmanager
def explain_failed_write(destination: Path, remedy: str = REPEAT_COMMAND) -> Iterator[None]:
    """Report a full disk, or a path where nothing can be written, in one sentence that names what
    could not be written; other errors pass unchanged."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # safetensors reports the system's errors in an exception of its own
        full = isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS
        if full or any(sign in str(error) for sign in ("No space left", "File too large")):
            raise UserError(
                f"{destination}: the disk is full, so it was not saved and what was saved before "
                f"is intact; free some space and {remedy}"
            ) from error
        reason = _find_path_error(error, destination)
        if reason is None:
            raise
        raise UserError(
            f"{shorten_path(destination)}: it cannot be written ({reason}); choose another place"
        ) from error


def _find_path_error(error: Exception, destination: Path) -> str | None:
    """Return what the system says of a destination, its scratch path, something in them, or a
    folder above; None of an error about anything else, such as a file that was read meanwhile."""
    if isinstance(error, SafetensorError):
        return next(
            (os.strerror(number) for number in PATH_ERRORS if os.strerror(number) in str(error)),
            None,
        )
    if not isinstance(error, OSError) or error.errno not in PATH_ERRORS or error.filename is None:
        return None
    path = os.path.abspath(os.fsdecode(error.filename))
    place = os.path.abspath(destination)
    is_about = path.startswith(place) or f"{place}{os.sep}".startswith(
        f"{path.rstrip(os.sep)}{os.sep}"
    )
    return os.strerror(error.errno) if is_about else None


def require_writable_file(destination: Path, key: str) -> None:
    """Raise a UserError where a file cannot be written, before anything slow runs; the folders
    above it are made.
    """
    require_writable(destination, key)
    if destination.is_dir():
        raise UserError(
            f"{key}={shorten_path(destination)}: this is a folder; give the path of a file"
        )
    with explain_failed_write(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)


def require_writable(destination: Path, key: str) -> None:
    """Raise a UserError where a file or a folder cannot be written, before anything slow runs;
    `key` names its setting.
    """
    place = f"{key}={shorten_path(destination)}"
    try:
        above = next(
            path for path in (destination, *destination.absolute().parents) if os.path.lexists(path)
        )
        name_bytes = os.pathconf(above, "PC_NAME_MAX")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{place}: it cannot be written ({reason}); choose another place"
        ) from error
    # A scratch file has a longer name.
    if any(len(os.fsencode(name)) + SCRATCH_NAME_BYTES > name_bytes for name in destination.parts):
        raise UserError(
            f"{place}: a name has at most {name_bytes - SCRATCH_NAME_BYTES} bytes here; choose a "
            "shorter one"
        )
    if not above.is_dir() and above != destination:
        raise UserError(f"{place}: {above} is a file; choose another place")
    folder = above if above.is_dir() else above.absolute().parent
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise UserError(
            f"{place}: it cannot be written ({os.strerror(errno.EROFS)}); choose another place"
        )
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"{place}: it cannot be written ({os.strerror(errno.EACCES)}); choose another place"
        )


def refuse_nonempty(out: Path) -> None:
    """Raise UserError where `out` is a link, already holds something, or cannot be written."""
    require_writable(out, "out")
    if out.is_symlink():
        raise UserError(
            f"{out}: it is a link and would be replaced; give the folder that it points to, or "
            "another"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: it already holds files; choose another folder")


def shorten_path(path: Path | str) -> str:
    """Return a path for a message, without the middle of a very long one."""
    text = str(path)
    return text if len(text) <= MAX_SHOWN_PATH else f"{text[:80]} ... {text[-80:]}"


def _replace_path(scratch: Path, destination: Path) -> None:
    """Move the scratch path to its destination. A folder cannot replace another, so an existing
    one is moved away first.
    """
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


# Locks


class LockTaken(UserError):
    """Another process holds a lock."""


@contextmanager
def lock_file(
    path: Path, taken: str, remedy: str, seconds: float = 0.0, is_temporary: bool = False
) -> Iterator[bool]:
    """Hold the lock of a file; if another process has it for longer than `seconds`, raise
    `LockTaken`, which says `taken`, names that process, and says the `remedy`.

    Yield whether the file system has locks. A temporary file is deleted at the end.
    """
    deadline = time.monotonic() + seconds
    flags = os.O_RDWR | os.O_CREAT
    handle = open_in_place(path, flags)
    try:
        while (is_guarded := try_lock(handle)) is None or not is_open_file(handle, path):
            if is_guarded is None and time.monotonic() >= deadline:
                holder = os.pread(handle, 300, 0).decode(errors="replace").strip()
                raise LockTaken(f"{taken} ({holder or 'another process'}); {remedy}")
            if is_guarded is None:
                time.sleep(min(1.0, seconds))
            # The process that held the lock may have deleted the file.
            os.close(handle)
            handle = open_in_place(path, flags)
        # The note is for messages alone; on a full disk the lock holds without it.
        with suppress(OSError):
            os.truncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield is_guarded
        finally:
            if is_temporary:
                path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def try_lock(handle: int) -> bool | None:
    """Lock an open file or folder until it is closed. Return None if another process has the lock,
    and False if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True


def is_open_file(handle: int, path: Path) -> bool:
    """Tell whether a path still leads to an open file or folder, which another process may have
    deleted or renamed.
    """
    try:
        current = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(current, os.fstat(handle))

"""Locks of run folders: a launch chooses, creates and locks its folder in one step, so that no
two launches share one.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spectrain.errors import UserError, first_line
from spectrain.files import LockTaken, lock_file

# Seconds to wait for a launch that is about to end: one whose network is cut ends itself within 30
# s.
LOCK_SECONDS = 45.0
LOCK_NAME = ".lock"
# Attempts to lock a folder that other launches delete meanwhile.
MAX_ATTEMPTS = 100


@contextmanager
def lock_run(run: Path, seconds: float = LOCK_SECONDS) -> Iterator[bool]:
    """Hold the lock of training in a run folder; raise `LockTaken` if another process has it for
    longer than `seconds`.

    Yield whether the file system has locks.
    """
    taken = "another launch trains in this folder"
    remedy = "let it finish or end it, then use the same command again"
    with lock_file(run / LOCK_NAME, f"run={run}: {taken}", remedy, seconds) as is_guarded:
        yield is_guarded


def require_folder(run: Path) -> None:
    """Raise a UserError where a run folder is a file or a device."""
    if run.exists() and not run.is_dir():
        raise UserError(f"run={run}: this is a file; choose a folder")


@dataclass(frozen=True)
class HeldFolder:
    """A folder whose lock this process holds."""

    path: Path
    # Whether this process has created it.
    is_created: bool
    # Whether the file system has locks, so that the lock keeps others out.
    is_guarded: bool


@contextmanager
def claim_folder(run: Path, seconds: float = 0.0) -> Iterator[HeldFolder]:
    """Create a folder where it is missing and hold its lock; a folder that is still unused at the
    end is removed.

    A launch that another process keeps out for longer than `seconds` raises `LockTaken`.
    """
    require_folder(run)
    above = [folder for folder in run.parents if not folder.exists()]  # the innermost first
    was_unused = not run.exists() or is_unused(run)
    with ExitStack() as stack:
        held = _lock_folder(run, seconds, stack)
        try:
            yield held
        finally:
            if is_unused(run):
                (run / LOCK_NAME).unlink()
                for folder in [run, *above] if was_unused else []:
                    with suppress(OSError):  # it holds something
                        folder.rmdir()


@contextmanager
def claim_new_folder(candidates: Iterable[Path]) -> Iterator[Path]:
    """Hold the lock of the first of these folders that no launch has used or uses."""
    with ExitStack() as stack:
        for run in candidates:
            if run.exists() and not is_unused(run):
                continue
            attempt = ExitStack()
            try:
                held = attempt.enter_context(claim_folder(run))
            except LockTaken:
                continue
            # Without locks nobody knows whether a launch uses the folder that it has just created.
            if is_unused(run) and (held.is_guarded or held.is_created):
                stack.push(attempt)
                yield run
                return
            attempt.close()


def is_unused(run: Path) -> bool:
    """Tell whether a folder holds nothing but the lock of a launch, which another process may
    still hold.
    """
    return run.is_dir() and [path.name for path in run.iterdir()] == [LOCK_NAME]


def _lock_folder(run: Path, seconds: float, stack: ExitStack) -> HeldFolder:
    try:
        for _ in range(MAX_ATTEMPTS):
            is_created = _create_folder(run)
            # A launch that failed deletes the folder that it has created.
            with suppress(FileNotFoundError):
                is_guarded = stack.enter_context(lock_run(run, seconds))
                if not is_guarded:
                    _report_no_locks(run)
                return HeldFolder(run, is_created, is_guarded)
    except OSError as error:
        raise UserError(
            f"run={run}: the folder cannot be written ({first_line(error)}); choose another"
        ) from error
    raise UserError(f"run={run}: other launches delete this folder again and again; choose another")


def _create_folder(run: Path) -> bool:
    """Create a folder; return False if it is there already."""
    run.parent.mkdir(parents=True, exist_ok=True)
    try:
        run.mkdir()
    except FileExistsError:
        return False
    return True


def _report_no_locks(run: Path) -> None:
    print(
        f"run={run}: this file system has no locks, so nothing keeps a second launch out of the "
        "folder",
        flush=True,
    )

"""Files and folders are written completely or not at all."""

import errno
import os
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain.files import (
    FolderBusy,
    atomic_write,
    explain_failed_write,
    lock_file,
    make_folder_once,
    require_writable,
    require_writable_file,
    write_text,
)


class ProcessKilled(BaseException):
    """Stands for what ends the writer."""


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_content(scratch: Path, folder: bool, text: str) -> None:
    (scratch / "inside" if folder else scratch).write_text(text)


def read_content(path: Path, folder: bool) -> str:
    return (path / "inside" if folder else path).read_text()


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("before", [None, "old"])
@pytest.mark.parametrize(
    "failure", [None, ProcessKilled(), OSError(errno.ENOSPC, "full"), ValueError("other")], ids=str
)
def test_what_is_written_is_complete_or_as_before(
    tmp_path: Path, folder: bool, before: str | None, failure: Any
) -> None:
    """Whatever ends the writing, there is the new content or the old, and no other file."""
    path = tmp_path / "place"
    if before is not None:
        with atomic_write(path, folder) as scratch:
            write_content(scratch, folder, before)
    try:
        with atomic_write(path, folder) as scratch:
            write_content(scratch, folder, "new")
            assert list_names(tmp_path) == sorted([*(["place"] if before else []), scratch.name])
            if failure is not None:
                raise failure
    except (ProcessKilled, UserError, ValueError) as error:
        assert isinstance(error, UserError) == isinstance(failure, OSError)
        assert not isinstance(error, UserError) or str(error).startswith(
            f"{path}: the disk is full"
        )
    expected = before if failure is not None else "new"
    assert list_names(tmp_path) == ([] if expected is None else ["place"])
    assert expected is None or read_content(path, folder) == expected


def test_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything in a folder, and the folder, is synchronised while the old content still has
    the name.
    """
    path = tmp_path / "place"
    synced = []
    sync = os.fsync

    def record_sync(handle: int) -> None:
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{handle}")), path.exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", record_sync)
    with atomic_write(path, folder=True) as scratch:
        write_content(scratch, True, "new")
    assert synced == [("inside", False), ("place.part", False), (tmp_path.name, True)]


def test_what_a_kill_left_is_overwritten(tmp_path: Path) -> None:
    """A folder's half and old names are taken away by the next writer."""
    for name in ("place.part", "place.old", "place"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "husk").write_text("half")
    with atomic_write(tmp_path / "place", folder=True) as scratch:
        write_content(scratch, True, "new")
    assert list_names(tmp_path) == ["place"] and list_names(tmp_path / "place") == ["inside"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_a_single_sentence(tmp_path: Path, number: int) -> None:
    """The error names the file and says what to do; another error stays as it is."""
    with (
        pytest.raises(UserError, match=r"here: the disk is full.*free some space and try"),
        explain_failed_write(Path("here"), "try"),
    ):
        raise OSError(number, "")
    with pytest.raises(PermissionError), explain_failed_write(Path("here")):
        raise PermissionError(errno.EACCES, "no")
    write_text(tmp_path / "text", "\u00e9")
    assert (tmp_path / "text").read_bytes() == b"\xc3\xa9"


def test_a_lock_holds_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has it is not written then."""

    def fail(handle: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", fail)
    with lock_file(tmp_path / "lock", "it is taken", "wait"):  # noqa: SIM117
        with (
            pytest.raises(UserError, match=r"it is taken \(another process\); wait"),
            lock_file(tmp_path / "lock", "it is taken", "wait"),
        ):
            pass


def test_folders_made_for_what_failed_are_gone(tmp_path: Path) -> None:
    """A refused folder leaves no empty ones above it; those that were there or hold something
    stay.
    """
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "run" / "eval" / "heldout", tmp_path / "there" / "eval" / "heldout"):
        with pytest.raises(ValueError), atomic_write(path, folder=True):
            raise ValueError
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    with (
        pytest.raises(ValueError),
        atomic_write(tmp_path / "run" / "eval" / "heldout", folder=True),
    ):
        (tmp_path / "run" / "log.txt").touch()
        raise ValueError
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["log.txt", "run", "there"]


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second writer is refused and leaves the first one's files alone; afterwards it may
    replace what was written.
    """
    path = tmp_path / "place"
    with atomic_write(path, folder=True) as scratch:
        write_content(scratch, True, "first")
        with (
            pytest.raises(FolderBusy, match="place: another process is writing it"),
            atomic_write(path, folder=True),
        ):
            raise AssertionError
    assert read_content(path, True) == "first" and list_names(tmp_path) == ["place"]
    with atomic_write(path, folder=True) as scratch:
        write_content(scratch, True, "second")
    assert read_content(path, True) == "second" and list_names(tmp_path) == ["place"]


def test_a_file_replaces_no_folder(tmp_path: Path) -> None:
    """What a folder holds is not deleted for a file of its name."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("kept")
    with pytest.raises(UserError, match="this is a folder"):
        write_text(tmp_path / "folder", "new")
    with pytest.raises(UserError, match="plan.out=.*: this is a folder"):
        require_writable_file(tmp_path / "folder", "plan.out")
    assert (tmp_path / "folder" / "kept").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_new_folder_replaces_nothing(tmp_path: Path) -> None:
    """What another process has written after the check that there is nothing is kept."""
    path = tmp_path / "place"
    with (
        pytest.raises(UserError, match="meanwhile"),
        atomic_write(path, folder=True, is_new=True) as scratch,
    ):
        write_content(scratch, True, "mine")
        path.mkdir()
        write_content(path, True, "other")
    assert read_content(path, True) == "other" and list_names(tmp_path) == ["place"]


def test_what_a_kill_has_left_is_removed(tmp_path: Path) -> None:
    """Files of a killed writer, or a link in the place of its folder, are no part of the new
    content.
    """
    path = tmp_path / "place"
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "place.part").mkdir()
    write_content(tmp_path / "place.part", True, "half")
    with atomic_write(path, folder=True) as scratch:
        assert not list_names(scratch)
    elsewhere.mkdir()
    (tmp_path / "place.part").symlink_to(elsewhere)
    with atomic_write(path, folder=True) as scratch:
        write_content(scratch, True, "new")
    assert read_content(path, True) == "new" and not list_names(elsewhere)


def test_a_cache_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes that need the same folder of a cache wait for the first of them, and write
    nothing again.
    """
    calls: list[int] = []

    def write_slowly(scratch: Path) -> None:
        calls.append(1)
        time.sleep(0.1)
        write_content(scratch, True, "content")

    threads = [
        Thread(target=make_folder_once, args=(tmp_path / "place", "inside", write_slowly))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        calls == [1]
        and read_content(tmp_path / "place", True) == "content"
        and list_names(tmp_path) == ["place"]
    )


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR]
)
def test_a_path_that_cannot_be_written_is_a_single_sentence(tmp_path: Path, number: int) -> None:
    """The error names the destination; one about another file stays as it is."""
    sentence = rf"place: it cannot be written \({os.strerror(number)}\); choose another place"
    with pytest.raises(UserError, match=sentence), explain_failed_write(tmp_path / "place"):
        raise OSError(number, os.strerror(number), str(tmp_path / "place.part" / "file"))
    with (
        pytest.raises(OSError, match=os.strerror(number)),
        explain_failed_write(tmp_path / "place"),
    ):
        raise OSError(number, os.strerror(number), str(tmp_path / "source"))


@pytest.mark.parametrize("kind", ["file", "nothing", "pipe", "folder"])
def test_a_file_that_is_changed_in_place_is_no_link_and_no_pipe(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    lock = tmp_path / "lock"
    make: dict[str, Any] = {
        "file": lambda: (outside.write_text("text"), lock.symlink_to(outside)),
        "nothing": lambda: lock.symlink_to(outside),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }
    make[kind]()
    before = list_names(tmp_path)
    with (
        pytest.raises(UserError, match=f"{lock}: this is .*delete it"),
        lock_file(lock, "taken", "wait"),
    ):
        pass
    assert list_names(tmp_path) == before
    assert not outside.exists() or outside.read_text() == "text"


def test_paths_are_refused_before_anything_slow_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that are too long, files on the way, and folders and file systems that nobody may
    write.
    """
    require_writable(tmp_path / "new" / "folder", "out")
    require_writable(Path("new") / "folder", "out")
    with pytest.raises(UserError, match=r"^out=.* \.\.\. .*: a name has at most 241 bytes here"):
        require_writable(tmp_path / ("a" * 300), "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/out: .*file is a file; choose another place"):
        require_writable(tmp_path / "file" / "out", "out")
    with (
        monkeypatch.context() as patched,
        pytest.raises(UserError, match=r"out: it cannot be written \(Permission denied\)"),
    ):
        patched.setattr("os.access", lambda path, mode: False)
        require_writable(tmp_path / "out", "out")
    with (
        monkeypatch.context() as patched,
        pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"),
    ):
        patched.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
        require_writable(tmp_path / "out", "out")

"""The files of `spectrain follow` in a run folder.

RUN/follow/lock              held while a process follows this run
RUN/follow/ledger.jsonl      every decision with its numbers
RUN/follow/serving.json      the active drafter, the one before it, and since when
RUN/follow/recorded.jsonl    recorded conversations, within their retention time
RUN/follow/clock.json        when that was, by the clock by which conversations age
RUN/follow/logs.json         how far request logs were read, with follow.requests=FOLDER
RUN/follow/old.jsonl         the fixed set of old conversations
RUN/follow/candidates/0001   a candidate: its data, drafter/ and proof.json
RUN/follow/status.json       what `spectrain follow status` prints, at most some seconds old
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from spectrain.errors import UserError
from spectrain.files import (
    lock_file,
    open_in_place,
    refuse_link,
    require_regular_file,
    write_text,
)

from .checked_json import read_json_as
from .clock import LATEST, FollowClock, read_date

Date = Annotated[float, Ge(0), Le(LATEST)]
"""Seconds since 1970."""
MAX_CANDIDATE_DIGITS = 9
"""Digits of the name of a candidate; a longer name is no candidate's."""


@dataclass(frozen=True)
class ActiveDrafter:
    """The drafter that serves. `digest` is of its weights."""

    path: str
    digest: str
    since: Date
    # The drafter before it, for a roll-back; None for the first one.
    previous: str | None = None


@dataclass(frozen=True)
class KindStatus:
    """What status.json says of a kind of traffic, as far as the status command shows it."""

    requests: int
    unmeasured: int
    accepted_per_draft: float | None
    reference: float | None
    alarm: bool


@dataclass(frozen=True)
class FollowStatus:
    """What status.json holds, as far as the status command shows it."""

    time: Date
    active: ActiveDrafter
    phase: str
    kinds: dict[str, KindStatus]
    conversations: int
    old: int


class FollowFolder:
    """The paths of a run's files, and the small ones read and written."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.root = run / "follow"
        self.ledger = self.root / "ledger.jsonl"
        self.serving = self.root / "serving.json"
        self.recorded = self.root / "recorded.jsonl"
        self.old = self.root / "old.jsonl"
        self.logs = self.root / "logs.json"
        self.candidates = self.root / "candidates"
        self.status = self.root / "status.json"
        self.clock = FollowClock(self.root / "clock.json")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the run; a UserError says that another process follows it."""
        lock = self.root / "lock"
        for path in (self.ledger, self.candidates):
            refuse_link(path)
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(open_in_place(lock, os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise UserError(
                f"{self.root}: it cannot be written ({error.strerror}); follow needs this folder"
            ) from error
        with lock_file(lock, f"run={self.run}: another process follows this run", "stop it first"):
            yield

    def next_candidate(self) -> Path:
        """Return the folder of the next candidate."""
        numbers = [
            int(path.name)
            for path in self.candidates.glob("[0-9]*")
            if path.name.isdecimal() and len(path.name) <= MAX_CANDIDATE_DIGITS
        ]
        return self.candidates / f"{max(numbers, default=0) + 1:04d}"

    def delete_conversations(self, seconds: float) -> None:
        """Delete the conversations in folders of candidates that are older; drafters and proofs
        stay.

        When a folder was first seen is written into it, because the dates of files come from a
        clock that may jump. Where that cannot be read, the folder counts as seen now.
        """
        now = self.clock.now()
        folders = {path.parent for path in self.candidates.glob("*/*.jsonl")}
        # A link may lead to other files of this user.
        for folder in (folder for folder in folders if not folder.is_symlink()):
            seen = folder / "seen.json"
            try:
                # One that is dated ahead would never expire.
                first_seen = min(now, read_json_as(seen, Date))
            except UserError:
                first_seen = now
                write_text(seen, json.dumps(now) + "\n")
            if now - first_seen > seconds:
                for path in folder.glob("*.jsonl"):
                    path.unlink()

    def read_active(self, first: Path) -> ActiveDrafter:
        """Return the active drafter: the saved one or, if there is none or its files are
        damaged, the run's own.
        """
        if self.serving.exists():
            active = read_json_as(
                self.serving, ActiveDrafter, "delete it; then the run's own drafter serves"
            )
            if (
                self.holds_drafter(active, first)
                and hash_weights(Path(active.path)) == active.digest
            ):
                return active
            print(
                f"{self.serving}: the files of {active.path} are not those that served; the run's "
                "own drafter serves",
                file=sys.stderr,
                flush=True,
            )
        return ActiveDrafter(str(first), hash_weights(first) or "", read_date())

    def read_status(self) -> FollowStatus | None:
        """Return what a process wrote into status.json; None if none has written it yet."""
        if not self.status.exists():
            return None
        return read_json_as(
            self.status, FollowStatus, "delete it; the process that follows this run writes it anew"
        )

    def holds_drafter(self, active: ActiveDrafter, first: Path) -> bool:
        """Tell whether a saved drafter and the one before it are the run's own; a file may name
        no others.
        """
        folders = (self.run.resolve(), first.resolve())
        named = [path for path in (active.path, active.previous) if path is not None]
        if any("\0" in path for path in named):
            return False
        paths = [Path(path).resolve() for path in named]
        return all(any(path.is_relative_to(folder) for folder in folders) for path in paths)

    def write_active(self, active: ActiveDrafter) -> None:
        """Save which drafter serves."""
        write_text(self.serving, json.dumps(asdict(active), indent=2) + "\n")


def hash_weights(folder: Path) -> str | None:
    """Return a hash of the files of a drafter, or None if there are none."""
    files = (
        sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
        if folder.is_dir()
        else []
    )
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        require_regular_file(path)
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()

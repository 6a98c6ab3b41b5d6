"""A set of conversations in shards, made in any order by any number of processes, and whole whenever one of them is killed.

DIR/manifest.json             the settings it was begun with, and of every finished shard its rows and checksum
DIR/part-00000.jsonl ..       the conversations
DIR/failed/part-00000.jsonl   those of a shard that could not be had, each with the reason
DIR/unfinished/               rows of shards that are being made
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from filelock import FileLock, Timeout

from spectrain.errors import UserError
from spectrain.files import write_text

from .chat import Message

MANIFEST = "manifest.json"
Kind = Literal["failed", "too_long", "cut"]


@dataclass(frozen=True)
class Row:
    """A conversation with answers of the target's own; `finish_reason` and `num_tokens` are of each answer that it gave."""

    id: int  # the conversation's number in the source
    messages: list[Message]
    finish_reason: list[str]  # "length" where max_new_tokens cut the answer
    num_tokens: list[int]


@dataclass(frozen=True)
class Lost:
    """A conversation that could not be had, and why; the messages are the source's."""

    id: int
    messages: list[Message]
    kind: Kind
    error: str


@dataclass(frozen=True)
class Wanted:
    """A conversation to be answered anew, up to its last assistant turn; `key` is that of its random draws."""

    id: int
    messages: list[Message]
    key: int


@dataclass
class Shard:
    """A shard while it is made: each row is on the disk as soon as it is there."""

    name: str
    wanted: list[Wanted]
    path: Path  # where finished rows are kept until all are there
    lock: FileLock
    rows: dict[int, Row] = field(default_factory=dict)
    lost: dict[int, Lost] = field(default_factory=dict)
    journal: TextIO | None = None

    def release(self) -> None:
        """Leave it, finished or not, to other processes."""
        if self.journal is not None:
            self.journal.close()
        self.lock.release()

    def begin(self, known: Iterable[Row]) -> None:
        """Take what is finished already: the rows of an earlier attempt, without a line that a kill has torn."""
        ids = {wanted.id for wanted in self.wanted}
        self.rows = {row.id: row for row in [*known, *read_rows(self.path)] if row.id in ids}
        write_text(self.path, lines(self.rows.values()))
        self.journal = self.path.open("a", encoding="utf-8")

    def add(self, outcome: Row | Lost) -> None:
        if isinstance(outcome, Row):
            assert self.journal is not None, "begin opens it"
            self.rows[outcome.id] = outcome
            self.journal.write(lines([outcome]))
            self.journal.flush()
        else:
            self.lost[outcome.id] = outcome

    @property
    def is_complete(self) -> bool:
        return len(self.rows) + len(self.lost) == len(self.wanted)

    @property
    def left(self) -> list[Wanted]:
        return [wanted for wanted in self.wanted if wanted.id not in self.rows and wanted.id not in self.lost]


class Shards:
    """The directory of such a set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.claimed: list[Shard] = []  # and not yet finished

    @property
    def is_begun(self) -> bool:
        return (self.folder / MANIFEST).exists()

    @property
    def manifest(self) -> dict[str, Any]:
        """What manifest.json says now."""
        path = self.folder / MANIFEST
        try:
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if not all(key in manifest for key in ("settings", "conversations", "shard_size", "shards")):
                raise ValueError("keys are missing")
            return manifest
        except FileNotFoundError as error:
            raise UserError(f"out={self.folder}: there is no {MANIFEST}, so no regenerated set; give its directory") from error
        except (ValueError, TypeError, OSError) as error:
            raise UserError(
                f"{path}: it cannot be read ({error!r}); put back a copy, or make the set anew in another folder"
            ) from error

    @property
    def names(self) -> list[str]:
        """Every shard there is to be, made or not."""
        manifest = self.manifest
        return [shard_name(number) for number in range(-(-manifest["conversations"] // manifest["shard_size"]))]

    def open(self, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        """Begin the set, or go on with it where it was begun with the same settings."""
        if not self.is_begun and (stray := next(self.folder.glob("*.jsonl*"), None)):
            raise UserError(f"out={self.folder}: it holds {stray.name} but no {MANIFEST}; choose an empty folder")
        try:
            for folder in (self.folder / "failed", self.folder / "unfinished", self.folder / ".locks"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out={self.folder}: it cannot be written ({error.strerror}); choose another folder") from error
        with self._alone():
            if not self.is_begun:
                write_text(self.folder / MANIFEST, text_of({**facts, "settings": settings, "shards": {}}))
            began = self.manifest["settings"]
        for key in (*began, *settings):
            if began.get(key) != settings.get(key):
                raise UserError(
                    f"{key}={settings.get(key)}: the set in {self.folder} was begun with {began.get(key)}; use that, or "
                    "another out"
                )

    def faults(self) -> dict[str, str]:
        """Shards that are not whole: unfinished, missing or corrupt, by name."""
        records = self.manifest["shards"]
        found = {name: self._fault(name, records.get(name)) for name in self.names}
        return {name: fault for name, fault in found.items() if fault is not None}

    def fault(self, name: str) -> str | None:
        """What is wrong with a shard now."""
        return self._fault(name, self.manifest["shards"].get(name))

    def _fault(self, name: str, record: dict[str, Any] | None) -> str | None:
        path = self.folder / name
        if record is None:
            return "unfinished"
        if not path.is_file():
            return "missing"
        return None if checksum(path.read_bytes()) == record["sha256"] else "corrupt"

    def claim(self, name: str, wanted: list[Wanted]) -> Shard | None:
        """A shard to make; None while another process is at it. It is freed when it is finished or this process ends."""
        lock = FileLock(self.folder / ".locks" / f"{name}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            return None
        self.claimed.append(Shard(name, wanted, self.folder / "unfinished" / name, lock))
        return self.claimed[-1]

    def release(self, shard: Shard) -> None:
        """Leave a shard to other processes."""
        self.claimed.remove(shard)
        shard.release()

    def finish(self, shard: Shard) -> None:
        """Write a shard whose rows are all there or lost, in the order of the source, and note it in the manifest."""
        text = lines(shard.rows[number] for number in sorted(shard.rows))
        failed = self.folder / "failed" / shard.name
        if shard.lost:
            write_text(failed, lines(shard.lost[number] for number in sorted(shard.lost)))
        else:
            failed.unlink(missing_ok=True)
        write_text(self.folder / shard.name, text)
        kinds = [lost.kind for lost in shard.lost.values()]
        record = {
            "rows": len(shard.rows),
            "tokens": sum(sum(row.num_tokens) for row in shard.rows.values()),
            "cut": sum("length" in row.finish_reason for row in shard.rows.values()),
            "lost": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "sha256": checksum(text.encode()),
        }
        with self._alone():
            manifest = self.manifest
            manifest["shards"] = dict(sorted({**manifest["shards"], shard.name: record}.items()))
            write_text(self.folder / MANIFEST, text_of(manifest))
        shard.path.unlink()
        self.release(shard)

    def tidy(self) -> None:
        """Remove what a kill between the last two steps of `finish` has left."""
        for path in (self.folder / "unfinished").glob("*.jsonl"):
            shard = self.claim(path.name, [])
            if shard is not None:
                if self.fault(path.name) is None:
                    path.unlink()
                self.release(shard)

    def read(self, name: str) -> list[Row]:
        """The rows of a finished shard."""
        return list(read_rows(self.folder / name))

    def whole(self) -> list[Path]:
        """The files of a set in which nothing is missing."""
        if faults := self.faults():
            name, fault = next(iter(faults.items()))
            more = f", and {len(faults) - 1} more are not whole" if len(faults) > 1 else ""
            raise UserError(
                f"{self.folder / name}: this shard is {fault}{more}; make it with the spectrain data regenerate command that "
                f"began the set, or read what is there by data.path='{self.folder}/part-*.jsonl'"
            )
        return [self.folder / name for name in self.names]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While this process reads and writes the manifest, no other does."""
        with FileLock(self.folder / ".locks" / "manifest.lock"):
            yield


def shard_name(number: int) -> str:
    return f"part-{number:05d}.jsonl"


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def lines(rows: Iterable[Row | Lost]) -> str:
    """A JSON object a line."""
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def text_of(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=2) + "\n"


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file that may be missing or end in mid-line; what is no row is left out."""
    if not path.is_file():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            yield Row(**json.loads(line))
        except (ValueError, TypeError):
            continue

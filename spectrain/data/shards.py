"""A set of conversations in shards, written in any order by any number of processes, and consistent
after a kill.

DIR/manifest.json             the settings of the set, and the rows and checksum of every finished
shard DIR/part-00000.jsonl ..       the conversations DIR/failed/part-00000.jsonl   the
conversations of a shard that failed, each with its reason DIR/unfinished/               rows of
shards in progress
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from filelock import FileLock, Timeout
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from spectrain.errors import UserError, describe_violation, first_line
from spectrain.files import write_text

from .chat_template import Message
from .messages import Conversation

MANIFEST = "manifest.json"
LATER_SETTINGS = ("target.weights", "target.chat_template")
"""Settings of our own engine that sets of earlier versions do not name."""
MAX_SHARDS = 1_000_000
FailureKind = Literal["failed", "too_long", "cut"]


@dataclass(frozen=True)
class Row:
    """A conversation with answers of the target; `finish_reason` and `num_tokens` hold one entry
    per generated answer.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: int  # the conversation's number in the source
    messages: list[Message]
    finish_reason: list[str]  # "length" where max_new_tokens cut the answer
    num_tokens: list[int]
    # The generated token ids of each assistant turn; null where they are not known.
    answer_ids: list[list[int] | None] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Why the conversation ends before its source; null where it does not.
    ended: str | None = None


ROW = TypeAdapter(Row)


@dataclass(frozen=True)
class FailedRow:
    """A conversation that could not be answered, and why; the messages are those of the source."""

    id: int
    messages: list[Message]
    kind: FailureKind
    error: str


@dataclass(frozen=True)
class PendingRow:
    """A conversation to answer, up to its last assistant turn; `key` seeds its random draws."""

    id: int
    conversation: Conversation
    key: int

    @property
    def messages(self) -> list[Message]:
        return self.conversation.messages


@dataclass
class Shard:
    """A shard in progress; each row is on disk as soon as it is finished."""

    name: str
    pending: list[PendingRow]
    # Holds finished rows until the shard is complete.
    path: Path
    lock: FileLock
    rows: dict[int, Row] = field(default_factory=dict)
    failed: dict[int, FailedRow] = field(default_factory=dict)
    journal: TextIO | None = None

    def release_lock(self) -> None:
        """Release the shard, finished or not, to other processes."""
        if self.journal is not None:
            self.journal.close()
        self.lock.release()

    def restore_rows(self, finished_rows: Iterable[Row]) -> None:
        """Restore the rows of an earlier attempt, without a line that a kill has truncated."""
        ids = {pending.id for pending in self.pending}
        self.rows = {
            row.id: row for row in [*finished_rows, *read_rows(self.path)] if row.id in ids
        }
        write_text(self.path, to_json_lines(self.rows.values()))
        self.journal = self.path.open("a", encoding="utf-8")

    def add_outcome(self, outcome: Row | FailedRow) -> None:
        if isinstance(outcome, Row):
            assert self.journal is not None, "begin opens it"
            self.rows[outcome.id] = outcome
            self.journal.write(to_json_lines([outcome]))
            self.journal.flush()
        else:
            self.failed[outcome.id] = outcome

    @property
    def is_complete(self) -> bool:
        return len(self.rows) + len(self.failed) == len(self.pending)

    @property
    def unanswered_rows(self) -> list[PendingRow]:
        return [
            pending
            for pending in self.pending
            if pending.id not in self.rows and pending.id not in self.failed
        ]


class ShardSet:
    """The directory of a set of shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open_shards: list[Shard] = []  # and not yet finished

    @property
    def is_begun(self) -> bool:
        return (self.folder / MANIFEST).exists()

    @property
    def manifest(self) -> dict[str, Any]:
        """The current content of manifest.json."""
        path = self.folder / MANIFEST
        try:
            if path.exists() and not path.is_file():
                raise ValueError("this is no file")
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            check_manifest(manifest)
            return manifest
        except FileNotFoundError as error:
            raise UserError(
                f"out={self.folder}: there is no {MANIFEST}, so no regenerated set; give its "
                "directory"
            ) from error
        except (ValueError, TypeError, OSError, RecursionError) as error:
            raise UserError(
                f"{path}: it cannot be read ({first_line(error)}); put back a copy, or make the "
                "set anew in another folder"
            ) from error

    @property
    def shard_names(self) -> list[str]:
        """The names of all shards, written or not."""
        manifest = self.manifest
        return [
            shard_name(number)
            for number in range(-(-manifest["conversations"] // manifest["shard_size"]))
        ]

    def begin_or_resume(self, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        """Begin the set, or resume it if it was begun with the same settings; otherwise raise a
        UserError.
        """
        if not self.is_begun and (stray := next(self.folder.glob("*.jsonl*"), None)):
            raise UserError(
                f"out={self.folder}: it holds {stray.name} but no {MANIFEST}; choose an empty "
                "folder"
            )
        try:
            for folder in (
                self.folder / "failed",
                self.folder / "unfinished",
                self.folder / ".locks",
            ):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"out={self.folder}: it cannot be written ({error.strerror}); choose another folder"
            ) from error
        with self._manifest_lock():
            if not self.is_begun:
                write_text(
                    self.folder / MANIFEST,
                    format_manifest({**facts, "settings": settings, "shards": {}}),
                )
            began = self.manifest["settings"]
        for key in (*began, *settings):
            is_known = key in began or key not in LATER_SETTINGS
            if is_known and began.get(key) != settings.get(key):
                raise UserError(
                    f"{key}={settings.get(key)}: the set in {self.folder} was begun with "
                    f"{began.get(key)}; use that, or another out"
                )

    def find_faults(self) -> dict[str, str]:
        """Return the shards that are unfinished, missing or corrupt: name -> fault."""
        records = self.manifest["shards"]
        faults = {name: self._check_shard(name, records.get(name)) for name in self.shard_names}
        return {name: fault for name, fault in faults.items() if fault is not None}

    def find_fault(self, name: str) -> str | None:
        """Return the current fault of one shard, or None."""
        return self._check_shard(name, self.manifest["shards"].get(name))

    def _check_shard(self, name: str, record: dict[str, Any] | None) -> str | None:
        path = self.folder / name
        if record is None:
            return "unfinished"
        if not path.is_file():
            return "missing"
        return None if hash_content(path.read_bytes()) == record["sha256"] else "corrupt"

    def claim_shard(self, name: str, pending: list[PendingRow]) -> Shard | None:
        """Return a shard to write, or None while another process holds it. The claim ends with
        `finish_shard` or with this process."""
        lock = FileLock(self.folder / ".locks" / f"{name}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            return None
        self.open_shards.append(Shard(name, pending, self.folder / "unfinished" / name, lock))
        return self.open_shards[-1]

    def release_shard(self, shard: Shard) -> None:
        """Release a shard to other processes."""
        self.open_shards.remove(shard)
        shard.release_lock()

    def finish_shard(self, shard: Shard) -> None:
        """Write a shard whose rows are all finished or failed, in the order of the source, and
        record it in the manifest.
        """
        text = to_json_lines(shard.rows[number] for number in sorted(shard.rows))
        failed = self.folder / "failed" / shard.name
        if shard.failed:
            write_text(
                failed, to_json_lines(shard.failed[number] for number in sorted(shard.failed))
            )
        else:
            failed.unlink(missing_ok=True)
        write_text(self.folder / shard.name, text)
        kinds = [failed_row.kind for failed_row in shard.failed.values()]
        record = {
            "rows": len(shard.rows),
            "tokens": sum(sum(row.num_tokens) for row in shard.rows.values()),
            "cut": sum("length" in row.finish_reason for row in shard.rows.values()),
            "ended": sum(row.ended is not None for row in shard.rows.values()),
            "lost": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "sha256": hash_content(text.encode()),
        }
        with self._manifest_lock():
            manifest = self.manifest
            manifest["shards"] = dict(sorted({**manifest["shards"], shard.name: record}.items()))
            write_text(self.folder / MANIFEST, format_manifest(manifest))
        shard.path.unlink()
        self.release_shard(shard)

    def remove_leftovers(self) -> None:
        """Remove what a kill between the last two steps of `finish_shard` has left."""
        for path in (self.folder / "unfinished").glob("*.jsonl"):
            shard = self.claim_shard(path.name, [])
            if shard is not None:
                if self.find_fault(path.name) is None:
                    path.unlink()
                self.release_shard(shard)

    def read_shard(self, name: str) -> list[Row]:
        """Return the rows of a finished shard."""
        return list(read_rows(self.folder / name))

    def complete_files(self) -> list[Path]:
        """Return the files of a complete set; raise a UserError if a shard is faulty."""
        if faults := self.find_faults():
            name, fault = next(iter(faults.items()))
            more = f", and {len(faults) - 1} more are incomplete" if len(faults) > 1 else ""
            raise UserError(
                f"{self.folder / name}: this shard is {fault}{more}; make it with the spectrain "
                "data regenerate command that began the set, or read what is there by "
                f"data.path='{self.folder}/part-*.jsonl'"
            )
        return [self.folder / name for name in self.shard_names]

    @contextmanager
    def _manifest_lock(self) -> Iterator[None]:
        """Lock the manifest while this process reads and writes it."""
        with FileLock(self.folder / ".locks" / "manifest.lock"):
            yield


class ShardRecord(BaseModel):
    """What manifest.json holds of a finished shard; tallies of its rows are optional."""

    model_config = ConfigDict(extra="allow", strict=True)

    rows: NonNegativeInt
    sha256: str


class Manifest(BaseModel):
    """What manifest.json of a set has to hold; it also says where the conversations came from."""

    model_config = ConfigDict(extra="allow", strict=True)

    settings: dict[str, Any]
    conversations: NonNegativeInt
    shard_size: PositiveInt
    shards: dict[str, ShardRecord]


def check_manifest(content: Any) -> None:
    """Raise a ValueError in one line where the content of manifest.json is not that of a set
    that can be read.
    """
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise ValueError(describe_violation(error)) from error
    if manifest.conversations > MAX_SHARDS * manifest.shard_size:
        raise ValueError(
            f"conversations: {manifest.conversations} in shards of {manifest.shard_size} are "
            f"more shards than {MAX_SHARDS}"
        )


def shard_name(number: int) -> str:
    return f"part-{number:05d}.jsonl"


def hash_content(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def to_json_lines(rows: Iterable[Row | FailedRow]) -> str:
    """Format rows as JSON Lines."""
    present = (
        {key: value for key, value in asdict(row).items() if value is not None} for row in rows
    )
    return "".join(json.dumps(row) + "\n" for row in present)


def format_manifest(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=2) + "\n"


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file that may be missing or truncated; invalid lines are skipped."""
    if not path.is_file():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            yield ROW.validate_json(line, strict=True)
        except ValidationError:
            continue

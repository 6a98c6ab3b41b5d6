"""Request logs instead of a proxy: the .jsonl files of a folder, read as they grow.

A line is a JSON object with `request` and `response`, the bodies that a client sent and got:
objects, or for a streamed answer its text. Each may also be an object with `body`, as in OpenAI's
batches. Optional are `route`, `kind` and `time`, in seconds.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from spectrain.files import write_text

from .checked_json import read_json_as
from .clock import read_date
from .exchange import Exchange
from .settings import RECORDED_ROUTES, ListenSettings

READ_BYTES = 2**22
"""Bytes of a file that are read at once; a longer line is left out."""


@dataclass
class LogPosition:
    """How far a file was read."""

    offset: Annotated[int, Ge(0)] = 0
    # Whether the rest of a line that is too long is still to be passed over.
    is_inside_line: bool = False


@dataclass
class RequestLogs:
    """Gives the requests that were added to a folder of logs. Where it stopped is saved in a
    file.
    """

    settings: ListenSettings
    folder: Path
    saved: Path
    # The clock of follow (`clock.py`), by which recorded conversations age.
    now: Callable[[], float] = read_date
    # By the number of the file in its file system, which a rotation keeps.
    positions: dict[int, LogPosition] = field(default_factory=dict)
    generator: random.Random = field(default_factory=random.Random)
    # Lines that were read, and those of them that hold no request with an answer.
    num_lines: int = 0
    num_malformed: int = 0

    def load_positions(self) -> None:
        """Read where an earlier process stopped."""
        if self.saved.exists():
            remedy = "delete it; then all request logs are read from their beginning"
            self.positions = read_json_as(self.saved, dict[int, LogPosition], remedy)

    def save_positions(self) -> None:
        """Save how far every file was read."""
        content = {str(number): vars(position) for number, position in self.positions.items()}
        write_text(self.saved, json.dumps(content) + "\n")

    def find_age(self, moment: float | None) -> float:
        """Return the age in seconds of a line with a time. The clock that makes it younger
        counts.
        """
        return 0.0 if moment is None else max(0.0, min(read_date(), self.now()) - moment)

    def take_all(self) -> list[Exchange]:
        """Return the requests of lines that are new, at most some megabytes of each file."""
        exchanges = list[Exchange]()
        present = set[int]()
        # Opening a pipe would wait for somebody who writes to it.
        for path in sorted(path for path in self.folder.glob("*.jsonl") if path.is_file()):
            with suppress(OSError), path.open("rb") as file:
                number = path.stat().st_ino
                present.add(number)
                for line in self._read_lines(
                    file, self.positions.setdefault(number, LogPosition())
                ):
                    self.num_lines += 1
                    exchange = self._parse_line(line)
                    if exchange is not None:
                        exchanges.append(exchange)
        self.positions = {
            number: position for number, position in self.positions.items() if number in present
        }
        return exchanges

    def _read_lines(self, file: Any, position: LogPosition) -> Iterator[bytes]:
        """Yield the complete lines after a position, which moves on."""
        size = file.seek(0, 2)
        if size < position.offset:
            # The file was emptied.
            position.offset = 0
            position.is_inside_line = False
        file.seek(position.offset)
        content: bytes = file.read(READ_BYTES)
        complete, newline, _ = content.rpartition(b"\n")
        if not newline:
            is_too_long = len(content) == READ_BYTES
            position.offset += len(content) if is_too_long else 0
            position.is_inside_line |= is_too_long
            return
        position.offset += len(complete) + 1
        lines = complete.split(b"\n")
        yield from lines[position.is_inside_line :]
        position.is_inside_line = False

    def _parse_line(self, line: bytes) -> Exchange | None:
        """Return the request of a line; None for one that is not to be recorded."""
        if self.generator.random() >= self.settings.sample:
            return None
        try:
            entry = json.loads(line)
            exchange = parse_log_entry(entry)
            age = self.find_age(parse_time(entry.get("time")))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.num_malformed += 1
            return None
        is_old = age > 3600 * self.settings.retention_hours
        is_long = exchange.num_bytes > self.settings.max_record_bytes
        if is_old or is_long or exchange.route not in self.settings.routes:
            return None
        return replace(exchange, time=self.now() - age)


def parse_log_entry(entry: dict[str, Any]) -> Exchange:
    """Return the request of a line of a log; a ValueError, KeyError, TypeError or AttributeError
    says that it holds none.
    """
    request, response = (open_body(entry[key]) for key in ("request", "response"))
    chat, text = RECORDED_ROUTES
    route = entry.get("route") or (chat if "messages" in request else text)
    content = response if isinstance(response, str) else json.dumps(response)
    kind = entry.get("kind")
    return Exchange(
        str(route),
        json.dumps(request).encode(),
        content.encode(),
        None if kind is None else str(kind),
    )


def parse_time(value: Any) -> float | None:
    """Return the time of a line, or None without one; a ValueError says that it is no number."""
    moment = None if value is None else float(value)
    if moment is not None and not math.isfinite(moment):
        raise ValueError("time is no number")
    return moment


def open_body(value: Any) -> Any:
    """Return what was sent: a body, which may be inside an object."""
    return value["body"] if isinstance(value, dict) and "body" in value else value

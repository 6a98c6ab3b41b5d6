"""W&B's offline files, RUN/wandb/offline-run-*/run-ID.wandb, read back: after a kill, how far they go is not known otherwise.

A file is LevelDB's log: after 7 bytes of its own, blocks of 32 KiB that hold chunks. A chunk is 4 bytes of checksum, 2 of
length, 1 of kind (1 a whole record, 2 its first part, 3 a middle one, 4 the last) and its content. Records are protobuf.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, CHUNK, BLOCK = 7, 7, 32768
WHOLE, LAST = 1, 4


def records(file: Path) -> Iterator[Any]:
    """The records of one file, up to where a kill cut it short."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, message = file.read_bytes(), HEADER, b""
    while place + CHUNK <= len(data):
        left = BLOCK - place % BLOCK
        if left < CHUNK:
            place += left  # too little for a chunk: the block's rest is empty
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        message += data[place + CHUNK : place + CHUNK + length]
        place += CHUNK + length
        if kind in (WHOLE, LAST):
            try:
                yield Record.FromString(message)
            except DecodeError:
                return
            message = b""


def last_logged_step(run: Path, run_id: str) -> int:
    """The last step that the offline files of a run folder hold of a W&B run; 0 where they hold none."""
    files = run.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    return max(
        (record.history.step.num_parts for file in files for record in records(file) if record.HasField("history")), default=0
    )

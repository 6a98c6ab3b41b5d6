"""A reader of W&B's offline files, RUN/wandb/offline-run-*/run-ID.wandb.

A file is LevelDB's log: after 7 bytes of its own, blocks of 32 KiB that hold chunks. A chunk is 4
bytes of checksum, 2 of length, 1 of kind (1 a complete record, 2 its first part, 3 a middle one, 4
the last) and its content. Records are protobuf.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = 7
CHUNK = 7
BLOCK = 32768
COMPLETE = 1
LAST = 4


def read_records(file: Path) -> Iterator[Any]:
    """Yield the records of a file, up to where a kill cut it short."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    position = HEADER
    message = b""
    while position + CHUNK <= len(data):
        left = BLOCK - position % BLOCK
        if left < CHUNK:
            position += left  # too little for a chunk: the block's rest is empty
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        message += data[position + CHUNK : position + CHUNK + length]
        position += CHUNK + length
        if kind in (COMPLETE, LAST):
            try:
                yield Record.FromString(message)
            except DecodeError:
                return
            message = b""

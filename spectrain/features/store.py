"""The feature store: features of complete sequences, captured once, on disk. Shapes: T tokens, L
layers, D width.

    DIR/manifest.json            what is stored of every sequence, and for which target
    DIR/NAME.safetensors         a shard, written atomically: the tensors of many sequences
    DIR/NAME.json                its index: size and SHA-256 of the shard, a checksum for every
    sequence

The hash of its tokens identifies a sequence, so neither the order nor the number of processes
matters. Every shard has a random name, so any number of processes may write. The store compares a
checksum when it first reads a sequence, and sizes when it opens. Hashing terabytes at every start
would cost more than it detects, so only `spectrain data verify` compares SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spectrain.config.plain_files import read_json_object
from spectrain.data.chat import Example
from spectrain.errors import RunError, UserError, first_line
from spectrain.files import REPEAT_COMMAND, atomic_write, lock_file, try_lock, write_text
from spectrain.models.features import Layer
from spectrain.models.target import Target
from spectrain.output.streams import print_text

from .base import FeatureCache
from .store_contents import SCALED_DTYPES, StoreContents, format_manifest, read_manifest

HEADER_BYTES = 600
"""Upper bound of the bytes that a sequence takes in the header of its shard and in the index, in
addition to its tensors.
"""
MANIFEST_SECONDS = 60.0
"""Seconds to wait for another process that writes the manifest."""
STALE_SECONDS = 600.0
"""Seconds after which an unfinished file is taken for a killed process's: writing one takes far
less.
"""


@dataclass
class StoreShard:
    """The contents of a shard's index file."""

    name: str
    bytes: int
    sha256: str
    sequences: dict[str, int]  # sequence key -> checksum of its tensors


SHARD = TypeAdapter(StoreShard)
MAX_INDEX_BYTES = 200_000_000
"""Of an index, which has a line for every sequence of a shard."""


class FeatureStore(FeatureCache):
    """A feature store on disk, and the sequences that wait to be written to it.

    It reports a shard that is missing or damaged, whose sequences then count as not stored. With
    `repair` it deletes the files.
    """

    def __init__(
        self,
        path: Path,
        requested: StoreContents | None = None,
        max_bytes: float = float("inf"),
        shard_bytes: float = 512e6,
        repair: bool = False,
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.shard_bytes = shard_bytes
        self.repair = repair
        self.manifest = path / "manifest.json"
        if self.manifest.exists():
            self.contents = read_manifest(self.manifest)
        elif requested is not None:
            self.contents = requested
        else:
            raise UserError(
                f"{path}: it holds no feature store (no manifest.json); give the folder of one"
            )
        self.shards: dict[str, StoreShard] = {}
        self.shard_names: dict[str, str] = {}  # sequence key -> name of its shard
        self.damaged_files: list[str] = []  # names of missing or damaged files
        self.verified_keys: set[str] = set()  # sequences whose checksum was compared
        self.pending: dict[str, dict[str, Tensor]] = {}  # sequence key -> tensors to write
        self.pending_bytes = 0
        self.read_indices: set[str] = set()  # names of the index files
        self.is_writer = True  # False where another process writes the pending sequences
        self.folder_mtime = -1  # nanoseconds, when the indices were last read
        self.open_shard: Callable[[str], Any] = lru_cache(maxsize=128)(
            lambda name: safe_open(path / name, "pt")
        )
        self._remove_stale_files()
        self._read_new_indices()

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.contents.layers

    @property
    def num_bytes(self) -> int:
        """The bytes of all shards."""
        return sum(shard.bytes for shard in self.shards.values())

    def sequence_key(self, example: Example) -> str:
        return self.contents.sequence_key(example)

    def describe_capture(self, distinct: list[Example], missing: list[Example]) -> str:
        """Describe the store's size once it holds these sequences; raise `UserError` if there is
        not enough room.
        """
        contents = self.contents
        max_gb = self.max_bytes / 1e9
        tokens = sum(len(example.tokens) for example in distinct)
        bytes_per_token = sum(map(contents.num_bytes, distinct)) / tokens
        new_bytes = sum(map(contents.num_bytes, missing))
        total = self.num_bytes + new_bytes + HEADER_BYTES * len(missing)
        folder = next(
            folder
            for folder in (self.path.absolute(), *self.path.absolute().parents)
            if folder.is_dir()
        )
        free = shutil.disk_usage(folder).free
        size = (
            f"{tokens} tokens of {bytes_per_token:.0f} bytes, {total / 1e9:.3g} GB in "
            f"{contents.dtype}"
        )
        remedy = (
            "store less: source.dtype=int8 in a new folder, source.supervised_only=true, data.limit"
        )
        if total > self.max_bytes:
            raise UserError(
                f"source.max_gb={max_gb:g}: the store needs {size}; raise it, or {remedy}"
            )
        if new_bytes > free:
            raise UserError(
                f"source.path={self.path}: the store needs {size}, and only {free / 1e9:.3g} GB "
                f"are free; choose another disk, or {remedy}"
            )
        return (
            f"{self.path}: {len(distinct)} sequences, {size}; {len(distinct) - len(missing)} are "
            f"stored, {new_bytes / 1e9:.3g} GB to capture; {free / 1e9:.3g} GB free"
        )

    def __contains__(self, example: Example) -> bool:
        key = self.contents.sequence_key(example)
        if key not in self.shard_names and key not in self.pending:
            # Another process may have written the sequence.
            self._read_new_indices()
        return key in self.shard_names or key in self.pending

    def read_states(
        self, example: Example, layers: tuple[Layer, ...], like: Tensor | Target
    ) -> Tensor | None:
        """Read the states [T, L, D] of a sequence in the type and on the device of `like`; None
        if no intact copy is stored.
        """
        if example not in self:
            return None
        key = self.contents.sequence_key(example)
        tensors = self.pending.get(key) or self._load_tensors(key)
        if tensors is not None and not self.contents.matches_tensors(example, tensors):
            # A checksum of bytes says nothing of a header.
            file = f"{self.shard_names[key]}.safetensors"
            self._drop_shard(file, "its tensors have other types or sizes than what was stored")
            return None
        return None if tensors is None else self._decode_tensors(example, tensors, layers, like)

    def put_states(self, example: Example, states: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """Store states [T, L, D] of the store's layers; return what reading `layers` of them
        gives from now on.
        """
        key = self.contents.sequence_key(example)
        tensors = self.contents.encode_states(example, states)
        if not all(
            bool(tensor.isfinite().all())
            for tensor in tensors.values()
            if tensor.dtype not in SCALED_DTYPES
        ):
            raise RunError(
                f"source.path={self.path}: the target's features of a sequence ({key}) are not "
                f"finite in {self.contents.dtype}; use source.dtype=bfloat16, or check the target"
            )
        if key not in self.pending:
            self.pending[key] = tensors
            self.pending_bytes += sum(tensor.nbytes for tensor in tensors.values())
        states_read = self._decode_tensors(example, tensors, layers, states)
        if self.pending_bytes >= self.shard_bytes:
            self.flush()
        return states_read

    def flush(self) -> None:
        """Write the pending sequences as one shard, then its index."""
        try:
            if self.pending and self.is_writer:
                self._write_shard()
            self.pending = {}
            self.pending_bytes = 0
        except OSError as error:
            raise UserError(
                f"source.path={self.path}: it cannot be written ({error.strerror}); choose "
                "another folder"
            ) from error

    def _write_shard(self) -> None:
        if self.num_bytes + self.pending_bytes > self.max_bytes:
            raise UserError(
                f"source.max_gb={self.max_bytes / 1e9:g}: the store in {self.path} is full; raise "
                "it"
            )
        self._begin_manifest()
        name = f"features-{secrets.token_hex(5)}"
        file = self.path / f"{name}.safetensors"
        tensors = {
            f"{key}/{part}": tensor
            for key, parts in self.pending.items()
            for part, tensor in parts.items()
        }
        with self._mark_writing():
            with atomic_write(file) as scratch:
                save_file(tensors, scratch, metadata={"format": "pt"})
                # safetensors writes files that only their owner can read.
                scratch.chmod(self.manifest.stat().st_mode)
                shard = StoreShard(
                    name,
                    scratch.stat().st_size,
                    hash_file(scratch),
                    {k: compute_checksum(v) for k, v in self.pending.items()},
                )
            write_text(file.with_suffix(".json"), json.dumps(asdict(shard)) + "\n")
        self._add_shard(shard)
        self.verified_keys |= set(self.pending)

    def _begin_manifest(self) -> None:
        """Write the manifest, or raise a UserError if another process has written that of other
        features.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        taken = f"source.path={self.path}: another process begins this store"
        with lock_file(
            self.path / ".lock", taken, REPEAT_COMMAND, MANIFEST_SECONDS, is_temporary=True
        ):
            if not self.manifest.exists():
                write_text(self.manifest, format_manifest(self.contents))
            elif read_manifest(self.manifest) != self.contents:
                raise UserError(
                    f"source.path={self.path}: another process has begun to store other features "
                    "there; choose another folder"
                )

    def verify_shards(self) -> None:
        """Hash every shard, and drop those that differ from what was written, or whose index is
        missing.
        """
        # The index of a shard is written behind it, under the same lock.
        if not self._is_written():
            self._read_new_indices()
            for file in sorted(self.path.glob("features-*.safetensors")):
                if f"{file.stem}.json" not in self.read_indices:
                    self._drop_shard(file.name, f"its index {file.stem}.json is missing")
        for shard in list(self.shards.values()):
            file = self.path / f"{shard.name}.safetensors"
            if hash_file(file) != shard.sha256:
                self._drop_shard(file.name, "its SHA-256 differs")

    def _drop_shard(self, file: str, reason: str) -> None:
        """Report a missing or damaged shard or index, whose sequences then count as not stored."""
        name = file.removesuffix(".safetensors").removesuffix(".json")
        keys = [key for key, shard_name in self.shard_names.items() if shard_name == name]
        self.damaged_files.append(file)
        outcome = "will be captured again" if self.repair else "count as not stored"
        print_text(
            f"{self.path / file}: {reason}; "
            + (f"its {len(keys)} sequences " if keys else "what it held ")
            + outcome,
        )
        self.shards.pop(name, None)
        for key in keys:
            del self.shard_names[key]
        self.verified_keys -= set(keys)
        if self.repair:
            for suffix in (".json", ".safetensors"):
                # Another process may have deleted the file, or this one may not be allowed to.
                with suppress(OSError):
                    (self.path / f"{name}{suffix}").unlink()

    def _decode_tensors(
        self,
        example: Example,
        tensors: dict[str, Tensor],
        layers: tuple[Layer, ...],
        like: Tensor | Target,
    ) -> Tensor:
        """Decode stored tensors on the device of `like`, to which they move in their stored
        type.
        """
        on_device = {part: tensor.to(like.device) for part, tensor in tensors.items()}
        return self.contents.decode_states(example, on_device, layers, like.dtype)

    def _load_tensors(self, key: str) -> dict[str, Tensor] | None:
        """Read the stored tensors of a sequence; the first reading compares their checksum. None
        if they are damaged.
        """
        name = self.shard_names[key]
        file = f"{name}.safetensors"
        try:
            shard = self.open_shard(file)
            tensors = {
                part: shard.get_tensor(f"{key}/{part}") for part in self.contents.tensor_names
            }
        except (OSError, SafetensorError) as error:
            self._drop_shard(file, f"it cannot be read ({error})")
            return None
        if key not in self.verified_keys:
            if compute_checksum(tensors) != self.shards[name].sequences[key]:
                self._drop_shard(file, "its checksum differs")
                return None
            self.verified_keys.add(key)
        return tensors

    def _read_new_indices(self) -> None:
        """Read the indices that were written since the last call."""
        if not self.path.is_dir() or (mtime := self.path.stat().st_mtime_ns) == self.folder_mtime:
            return
        self.folder_mtime = mtime
        for index in sorted(self.path.glob("features-*.json")):
            if index.name in self.read_indices:
                continue
            self.read_indices.add(index.name)
            if not index.exists():  # another process has just dropped the shard
                continue
            try:
                shard = SHARD.validate_python(read_json_object(index, MAX_INDEX_BYTES))
                if shard.name != index.stem:
                    raise ValueError("it names another file")
            except ValueError as error:
                reason = (
                    first_line(error)
                    .removeprefix(f"{index}: ")
                    .removesuffix("; copy the file again")
                )
                self._drop_shard(index.name, f"this index cannot be read ({reason})")
                continue
            self._add_shard(shard)
            file = index.with_suffix(".safetensors")
            num_bytes = file.stat().st_size if file.exists() else None
            if num_bytes != shard.bytes:
                self._drop_shard(
                    file.name,
                    "it is missing"
                    if num_bytes is None
                    else f"it has {num_bytes} bytes instead of {shard.bytes}",
                )

    def _add_shard(self, shard: StoreShard) -> None:
        self.read_indices.add(f"{shard.name}.json")
        self.shards[shard.name] = shard
        self.shard_names |= dict.fromkeys(shard.sequences, shard.name)

    @contextmanager
    def _mark_writing(self) -> Iterator[None]:
        """Hold a lock of the manifest, which processes that write share, so that none removes an
        unfinished file of another.
        """
        with self.manifest.open() as file:
            # Not every file system has locks.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def _is_written(self) -> bool:
        """Return whether another process is writing now."""
        if not self.manifest.exists():
            return False
        with self.manifest.open() as file:
            return try_lock(file.fileno()) is None

    def _remove_stale_files(self) -> None:
        """With `repair`, delete the unfinished files of killed processes.

        They are recognized by their age. A clock that has jumped makes all files old, so nothing is
        deleted while a process writes.
        """
        if not self.repair or not self.path.is_dir() or self._is_written():
            return
        complete = {file.stem for file in self.path.glob("features-*.json")}
        for file in [*self.path.glob("*.part"), *self.path.glob("features-*.safetensors")]:
            # Another process may delete the same file.
            with suppress(OSError):
                if file.stem not in complete and time.time() - file.stat().st_mtime > STALE_SECONDS:
                    file.unlink()


def compute_checksum(tensors: dict[str, Tensor]) -> int:
    """Return the CRC-32 of the bytes of tensors, in the order of their names."""
    checksum = 0
    for _, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy(), checksum)  # type: ignore[arg-type]
    return checksum


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as a hexadecimal string."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()

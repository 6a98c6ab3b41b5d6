"""The feature store: target features of whole sequences, captured once, on disk. Shapes: T tokens, L layers, D width.

    DIR/manifest.json            what is stored of every sequence, and of which target
    DIR/NAME.safetensors         a shard, written whole: the tensors of many sequences
    DIR/NAME.json                its index: size and SHA-256 of the shard, a checksum for every sequence

A sequence is found by the hash of its tokens, so neither order nor number of processes matters; every shard has a random name,
so any number of processes may write. A checksum is compared when a sequence is first read, a size when the store is opened:
a whole SHA-256 of terabytes at every start would cost more than it finds, and is `spectrain data verify`'s to do.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from spectrain.data.chat import Example
from spectrain.errors import RunError, UserError
from spectrain.files import atomic_write, write_text
from spectrain.models.features import Layer
from spectrain.models.target import Target

StoreDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "fp8": torch.float8_e4m3fn, "int8": torch.int8}  # fmt: skip
MAX_SCALED_VALUE = {"fp8": 448.0, "int8": 127.0}
"""What the largest value of a token becomes, where a token has a scale."""
SCALED_DTYPES = tuple(TORCH_DTYPES[dtype] for dtype in MAX_SCALED_VALUE)
HEADER_BYTES = 600
"""Bytes that a sequence takes at most in the header of its shard and in the index, beside its tensors."""
FORMAT_VERSION = 1
STALE_SECONDS = 600.0
"""Seconds after which a file that nobody finished is a killed process's: writing one takes far less."""


def count_state_bytes(rows: float, width: int, dtype: str) -> float:
    """What so many states take on disk, with a scale each where they have one."""
    return rows * (width * TORCH_DTYPES[dtype].itemsize + (4 if dtype in MAX_SCALED_VALUE else 0))


def quantize(states: Tensor, dtype: StoreDtype) -> tuple[Tensor, Tensor | None]:
    """States [.., D] as they are stored and, for fp8 and int8, one float32 scale a token and layer [..].

    Rounded to the nearest, ties to even: the least error, and none on average over many values. Stochastic rounding would be
    unbiased for each value, but a store is drawn once and read in every epoch, so its noise, twice as large, would never
    average out.
    """
    if dtype not in MAX_SCALED_VALUE:
        return states.to(TORCH_DTYPES[dtype]), None
    scale = (states.float().abs().amax(-1) / MAX_SCALED_VALUE[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (states.float() / scale[..., None]).clamp(-MAX_SCALED_VALUE[dtype], MAX_SCALED_VALUE[dtype])
    return (scaled.round() if dtype == "int8" else scaled).to(TORCH_DTYPES[dtype]), scale


def dequantize(states: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Undo `quantize`, up to rounding, in another type."""
    return states.to(dtype) if scale is None else (states.float() * scale[..., None]).to(dtype)


def select_final_positions(mask: list[bool], reach: int) -> Tensor:
    """[n] the positions whose next token carries loss, and up to `reach` positions before each of them."""
    carries = torch.tensor([*mask[1:], False])
    for _ in range(reach):
        carries = carries | torch.cat([carries[1:], carries.new_zeros(1)])
    return carries.nonzero()[:, 0]


def hash_weights(model: nn.Module) -> str:
    """A hash of some values of every weight, whatever type holds them; fresh adapters do not change it."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if ".lora_" not in name:
            whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            flat = whole.detach().flatten()
            some = flat[:: max(1, len(flat) // 64)].float().cpu()
            digest.update(f"{name.replace('.base_layer', '')} {tuple(weight.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class StoreContents:
    """What a store holds of every sequence, and of which target."""

    target: str
    path: str
    weights: str  # the target's fingerprint
    template: str  # a hash of the chat template
    layers: tuple[Layer, ...]
    width: int
    dtype: StoreDtype
    final_reach: int | None  # "final" is stored only where `read_before` says; None: everywhere

    @property
    def dense_layers(self) -> tuple[Layer, ...]:
        """The layers stored at every position."""
        return self.layers if self.final_reach is None else tuple(layer for layer in self.layers if layer != "final")

    def sequence_key(self, example: Example) -> str:
        """By what a sequence is found: its tokens, and what carries loss where that decides what is stored."""
        return (
            example.content_hash
            if self.final_reach is None
            else f"{example.content_hash}-{zlib.crc32(bytes(example.mask)):08x}"
        )

    def num_bytes(self, example: Example) -> int:
        """What a sequence takes on disk."""
        rows = len(example.tokens) * len(self.dense_layers)
        if self.final_reach is not None:
            rows += len(select_final_positions(example.mask, self.final_reach))
        return int(count_state_bytes(rows, self.width, self.dtype))

    def encode_states(self, example: Example, states: Tensor) -> dict[str, Tensor]:
        """The tensors to store of states [T, L, D]."""
        parts = {}
        if self.dense_layers:
            parts["hidden"] = states[:, [self.layers.index(layer) for layer in self.dense_layers]]
        if self.final_reach is not None:
            rows = select_final_positions(example.mask, self.final_reach).to(states.device)
            parts["final"] = states[rows, self.layers.index("final")]
        found = {}
        for name, part in parts.items():
            found[name], scale = quantize(part, self.dtype)
            if scale is not None:
                found[f"{name}.scale"] = scale
        return {name: tensor.to("cpu").contiguous() for name, tensor in found.items()}

    def decode_states(
        self, example: Example, tensors: dict[str, Tensor], layers: tuple[Layer, ...], dtype: torch.dtype
    ) -> Tensor:
        """States [T, L, D] of these layers; NaN where "final" is not stored, so that reading it there is noticed."""
        everywhere, there = self.dense_layers, next(iter(tensors.values())).device
        if everywhere:
            hidden = dequantize(tensors["hidden"], tensors.get("hidden.scale"), dtype)
            if layers == everywhere:
                return hidden
        states = torch.full((len(example.tokens), len(layers), self.width), torch.nan, dtype=dtype, device=there)
        for number, layer in enumerate(layers):
            if layer in everywhere:
                states[:, number] = hidden[:, everywhere.index(layer)]
            else:
                rows = select_final_positions(example.mask, self.final_reach or 0).to(there)
                states[rows, number] = dequantize(tensors["final"], tensors.get("final.scale"), dtype)
        return states

    def check_serves(self, requested: StoreContents, where: Path) -> None:
        """Stop with the reason where `wanted` cannot be read from what is stored."""
        lacking = [str(layer) for layer in requested.layers if layer not in self.layers]
        reason = None
        if self.weights != requested.weights:
            reason = f"it was captured from {self.target} ({self.path}), whose weights are not those of {requested.target}"
        elif self.template != requested.template:
            reason = "it was captured with another chat template, so that none of its sequences would be found"
        elif lacking:
            reason = f"it holds layers {format_layers(self.layers)}, and the drafter reads {', '.join(lacking)} too"
        elif self.dtype != requested.dtype:
            reason = f"it holds {self.dtype}, not {requested.dtype}; leave source.dtype out to read it"
        elif self.final_reach is not None and "final" in requested.layers:
            reach = requested.final_reach
            if reach is None or reach > self.final_reach:
                reason = "it holds the last state only at supervised positions, and more is asked for"
        if reason is not None:
            raise UserError(f"source.path={where}: {reason}; choose another folder to capture anew")


def format_layers(layers: tuple[Layer, ...]) -> str:
    return ", ".join(map(str, layers))


@dataclass
class StoreShard:
    """What an index says of its shard."""

    name: str
    bytes: int
    sha256: str
    sequences: dict[str, int]  # key -> checksum of its tensors


class FeatureStore:
    """A store on disk, and what waits to be written to it.

    A shard that is missing or damaged is named, and its sequences count as not stored; with `mend` its files are removed.
    """

    def __init__(
        self, path: Path, requested: StoreContents | None = None, max_bytes: float = float("inf"), shard_bytes: float = 512e6,
        repair: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.max_bytes, self.shard_bytes, self.repair = path, max_bytes, shard_bytes, repair
        manifest = path / "manifest.json"
        if manifest.exists():
            self.contents = read_manifest(manifest)
        elif requested is not None:
            self.contents = requested
        else:
            raise UserError(f"{path}: there is no feature store in it (no manifest.json); give the folder of one")
        self.shards: dict[str, StoreShard] = {}
        self.shard_names: dict[str, str] = {}  # of a sequence, its shard
        self.damaged_files: list[str] = []  # files that were missing or damaged
        self.verified_keys: set[str] = set()  # sequences whose checksum was compared
        self.pending: dict[str, dict[str, Tensor]] = {}
        self.pending_bytes = 0
        self.read_indices: set[str] = set()  # indices read
        self.is_writer = True  # False: what waits is another process's to keep
        self.folder_mtime = -1  # when the folder was, as of the last look
        self.open_shard: Callable[[str], Any] = lru_cache(maxsize=128)(lambda name: safe_open(path / name, "pt"))
        self._remove_stale_files()
        self._read_new_indices()

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.contents.layers

    @property
    def num_bytes(self) -> int:
        """What its shards take."""
        return sum(shard.bytes for shard in self.shards.values())

    def sequence_key(self, example: Example) -> str:
        return self.contents.sequence_key(example)

    def describe_capture(self, distinct: list[Example], missing: list[Example]) -> str:
        """What it will take with these sequences, of which some are missing; stops where there is less room."""
        contents, max_gb = self.contents, self.max_bytes / 1e9
        tokens = sum(len(example.tokens) for example in distinct)
        a_token = sum(map(contents.num_bytes, distinct)) / tokens
        to_come = sum(map(contents.num_bytes, missing))
        total = self.num_bytes + to_come + HEADER_BYTES * len(missing)
        where = next(folder for folder in (self.path.absolute(), *self.path.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(where).free
        told = f"{tokens} tokens of {a_token:.0f} bytes, {total / 1e9:.3g} GB in {contents.dtype}"
        less = "ask for less: source.dtype=int8 in a new folder, source.supervised_only=true, data.limit"
        if total > self.max_bytes:
            raise UserError(f"source.max_gb={max_gb:g}: the store needs {told}; raise it, or {less}")
        if to_come > free:
            raise UserError(
                f"source.path={self.path}: the store needs {told}, and only {free / 1e9:.3g} GB are free; choose another disk, "
                f"or {less}"
            )
        return (
            f"{self.path}: {len(distinct)} sequences, {told}; {len(distinct) - len(missing)} are stored, "
            f"{to_come / 1e9:.3g} GB to capture; {free / 1e9:.3g} GB free"
        )

    def __contains__(self, example: Example) -> bool:
        key = self.contents.sequence_key(example)
        if key not in self.shard_names and key not in self.pending:
            self._read_new_indices()  # another process may have written it
        return key in self.shard_names or key in self.pending

    def read_states(self, example: Example, layers: tuple[Layer, ...], like: Tensor | Target) -> Tensor | None:
        """States [T, L, D] of a sequence, of the type and device of `like`; None where it is not stored, or no longer whole."""
        if example not in self:
            return None
        key = self.contents.sequence_key(example)
        tensors = self.pending.get(key) or self._load_tensors(key)
        return None if tensors is None else self._decode_tensors(example, tensors, layers, like)

    def put_states(self, example: Example, states: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """Keep states [T, L, D] of the store's layers; what reading `layers` of them gives from now on."""
        key, tensors = self.contents.sequence_key(example), self.contents.encode_states(example, states)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values() if tensor.dtype not in SCALED_DTYPES):
            raise RunError(
                f"source.path={self.path}: the target's features of a sequence ({key}) are not finite in "
                f"{self.contents.dtype}; use source.dtype=bfloat16, or look at the target"
            )
        if key not in self.pending:
            self.pending[key] = tensors
            self.pending_bytes += sum(tensor.nbytes for tensor in tensors.values())
        found = self._decode_tensors(example, tensors, layers, states)
        if self.pending_bytes >= self.shard_bytes:
            self.flush()
        return found

    def flush(self) -> None:
        """Write what waits as one shard, then its index."""
        try:
            if self.pending and self.is_writer:
                self._write_shard()
            self.pending, self.pending_bytes = {}, 0
        except OSError as error:
            raise UserError(
                f"source.path={self.path}: it cannot be written ({error.strerror}); choose another folder"
            ) from error

    def _write_shard(self) -> None:
        if self.num_bytes + self.pending_bytes > self.max_bytes:
            raise UserError(f"source.max_gb={self.max_bytes / 1e9:g}: the store in {self.path} is full; raise it")
        manifest = self.path / "manifest.json"
        if manifest.exists():
            if read_manifest(manifest) != self.contents:
                raise UserError(
                    f"source.path={self.path}: meanwhile another process stores other features there; choose another"
                )
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(manifest, json.dumps({"format": FORMAT_VERSION, **asdict(self.contents)}, indent=2) + "\n")
        name = f"features-{secrets.token_hex(5)}"
        file = self.path / f"{name}.safetensors"
        tensors = {f"{key}/{part}": tensor for key, parts in self.pending.items() for part, tensor in parts.items()}
        with atomic_write(file) as scratch:
            save_file(tensors, scratch, metadata={"format": "pt"})
            scratch.chmod(manifest.stat().st_mode)  # safetensors lets nobody else read what it writes
            shard = StoreShard(
                name, scratch.stat().st_size, hash_file(scratch), {k: compute_checksum(v) for k, v in self.pending.items()}
            )
        write_text(file.with_suffix(".json"), json.dumps(asdict(shard)) + "\n")
        self._add_shard(shard)
        self.verified_keys |= set(self.pending)

    def verify_shards(self) -> None:
        """Read every shard whole, and leave behind those that are not as they were written."""
        for shard in list(self.shards.values()):
            file = self.path / f"{shard.name}.safetensors"
            if hash_file(file) != shard.sha256:
                self._drop_shard(file.name, "its SHA-256 differs")

    def _drop_shard(self, file: str, reason: str) -> None:
        """Name a shard, or its index, that is missing or damaged; its sequences count as not stored."""
        name = file.removesuffix(".safetensors").removesuffix(".json")
        lost = [key for key, home in self.shard_names.items() if home == name]
        self.damaged_files.append(file)
        again = "will be captured again" if self.repair else "count as not stored"
        print(
            f"{self.path / file}: {reason}; " + (f"its {len(lost)} sequences " if lost else "what it held ") + again, flush=True
        )
        self.shards.pop(name, None)
        for key in lost:
            del self.shard_names[key]
        self.verified_keys -= set(lost)
        if self.repair:
            for suffix in (".json", ".safetensors"):
                with suppress(OSError):  # another process may have removed it, or the folder is not ours
                    (self.path / f"{name}{suffix}").unlink()

    def _decode_tensors(
        self, example: Example, tensors: dict[str, Tensor], layers: tuple[Layer, ...], like: Tensor | Target
    ) -> Tensor:
        """What is stored crosses to the device as it is, and is rounded back there."""
        there = {part: tensor.to(like.device) for part, tensor in tensors.items()}
        return self.contents.decode_states(example, there, layers, like.dtype)

    def _load_tensors(self, key: str) -> dict[str, Tensor] | None:
        """The stored tensors of a sequence, compared with their checksum at the first reading."""
        name = self.shard_names[key]
        file = f"{name}.safetensors"
        try:
            shard = self.open_shard(file)
            parts = ("hidden", "hidden.scale", "final", "final.scale")
            held = (bool(self.contents.dense_layers), self.contents.final_reach is not None)
            scaled = self.contents.dtype in MAX_SCALED_VALUE
            wanted = [part for part, there in zip(parts, (held[0], held[0] and scaled, held[1], held[1] and scaled)) if there]
            tensors = {part: shard.get_tensor(f"{key}/{part}") for part in wanted}
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
        """Read the indices that were written since the last look."""
        if not self.path.is_dir() or (changed := self.path.stat().st_mtime_ns) == self.folder_mtime:
            return
        self.folder_mtime = changed
        for index in sorted(self.path.glob("features-*.json")):
            if index.name in self.read_indices:
                continue
            self.read_indices.add(index.name)
            try:
                shard = StoreShard(**json.loads(index.read_text()))
            except FileNotFoundError:  # another process has just left it behind
                continue
            except (OSError, ValueError, TypeError) as error:
                self._drop_shard(index.name, f"this index cannot be read ({error})")
                continue
            self._add_shard(shard)
            file = index.with_suffix(".safetensors")
            found = file.stat().st_size if file.exists() else None
            if found != shard.bytes:
                self._drop_shard(
                    file.name, "it is missing" if found is None else f"it has {found} bytes instead of {shard.bytes}"
                )

    def _add_shard(self, shard: StoreShard) -> None:
        self.read_indices.add(f"{shard.name}.json")
        self.shards[shard.name] = shard
        self.shard_names |= dict.fromkeys(shard.sequences, shard.name)

    def _remove_stale_files(self) -> None:
        """Remove what killed processes left unfinished."""
        whole = {file.stem for file in self.path.glob("features-*.json")}
        for file in [*self.path.glob("*.part"), *self.path.glob("features-*.safetensors")]:
            with suppress(OSError):  # another process may sweep too
                if self.repair and file.stem not in whole and time.time() - file.stat().st_mtime > STALE_SECONDS:
                    file.unlink()


def read_manifest(path: Path) -> StoreContents:
    """What a store holds, from its manifest."""
    try:
        facts = json.loads(path.read_text())
        if facts.pop("format") != FORMAT_VERSION or facts["dtype"] not in get_args(StoreDtype):
            raise ValueError("another version of spectrain wrote it")
        return StoreContents(**{**facts, "layers": tuple(facts["layers"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: this manifest cannot be read ({error}); capture to another folder") from error


def compute_checksum(tensors: dict[str, Tensor]) -> int:
    """CRC-32 of the bytes of tensors, in the order of their names."""
    found = 0
    for _, tensor in sorted(tensors.items()):
        found = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy(), found)  # type: ignore[arg-type]
    return found


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()

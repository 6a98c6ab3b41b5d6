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
from spectrain.files import write_text, written
from spectrain.models.features import Layer
from spectrain.models.target import Target

Dtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "fp8": torch.float8_e4m3fn, "int8": torch.int8}  # fmt: skip
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""What the largest value of a token becomes, where a token has a scale."""
ROUNDED = tuple(STORED[dtype] for dtype in LARGEST)
PLACE = 600
"""Bytes that a sequence takes at most in the header of its shard and in the index, beside its tensors."""
FORMAT = 1
STALE = 600.0
"""Seconds after which a file that nobody finished is a killed process's: writing one takes far less."""


def bytes_of(rows: float, width: int, dtype: str) -> float:
    """What so many states take on disk, with a scale each where they have one."""
    return rows * (width * STORED[dtype].itemsize + (4 if dtype in LARGEST else 0))


def quantize(states: Tensor, dtype: Dtype) -> tuple[Tensor, Tensor | None]:
    """States [.., D] as they are stored and, for fp8 and int8, one float32 scale a token and layer [..].

    Rounded to the nearest, ties to even: the least error, and none on average over many values. Stochastic rounding would be
    unbiased for each value, but a store is drawn once and read in every epoch, so its noise, twice as large, would never
    average out.
    """
    if dtype not in LARGEST:
        return states.to(STORED[dtype]), None
    scale = (states.float().abs().amax(-1) / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (states.float() / scale[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype == "int8" else scaled).to(STORED[dtype]), scale


def dequantize(states: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Undo `quantize`, up to rounding, in another type."""
    return states.to(dtype) if scale is None else (states.float() * scale[..., None]).to(dtype)


def read_before(mask: list[bool], reach: int) -> Tensor:
    """[n] the positions whose next token carries loss, and up to `reach` positions before each of them."""
    carries = torch.tensor([*mask[1:], False])
    for _ in range(reach):
        carries = carries | torch.cat([carries[1:], carries.new_zeros(1)])
    return carries.nonzero()[:, 0]


def fingerprint(model: nn.Module) -> str:
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
class Contents:
    """What a store holds of every sequence, and of which target."""

    target: str
    path: str
    weights: str  # the target's fingerprint
    template: str  # a hash of the chat template
    layers: tuple[Layer, ...]
    width: int
    dtype: Dtype
    final_reach: int | None  # "final" is stored only where `read_before` says; None: everywhere

    @property
    def everywhere(self) -> tuple[Layer, ...]:
        """The layers stored at every position."""
        return self.layers if self.final_reach is None else tuple(layer for layer in self.layers if layer != "final")

    def key(self, example: Example) -> str:
        """By what a sequence is found: its tokens, and what carries loss where that decides what is stored."""
        return example.key if self.final_reach is None else f"{example.key}-{zlib.crc32(bytes(example.mask)):08x}"

    def num_bytes(self, example: Example) -> int:
        """What a sequence takes on disk."""
        rows = len(example.tokens) * len(self.everywhere)
        if self.final_reach is not None:
            rows += len(read_before(example.mask, self.final_reach))
        return int(bytes_of(rows, self.width, self.dtype))

    def encode(self, example: Example, states: Tensor) -> dict[str, Tensor]:
        """The tensors to store of states [T, L, D]."""
        parts = {}
        if self.everywhere:
            parts["hidden"] = states[:, [self.layers.index(layer) for layer in self.everywhere]]
        if self.final_reach is not None:
            rows = read_before(example.mask, self.final_reach).to(states.device)
            parts["final"] = states[rows, self.layers.index("final")]
        found = {}
        for name, part in parts.items():
            found[name], scale = quantize(part, self.dtype)
            if scale is not None:
                found[f"{name}.scale"] = scale
        return {name: tensor.to("cpu").contiguous() for name, tensor in found.items()}

    def decode(self, example: Example, tensors: dict[str, Tensor], layers: tuple[Layer, ...], dtype: torch.dtype) -> Tensor:
        """States [T, L, D] of these layers; NaN where "final" is not stored, so that reading it there is noticed."""
        everywhere, there = self.everywhere, next(iter(tensors.values())).device
        if everywhere:
            hidden = dequantize(tensors["hidden"], tensors.get("hidden.scale"), dtype)
            if layers == everywhere:
                return hidden
        states = torch.full((len(example.tokens), len(layers), self.width), torch.nan, dtype=dtype, device=there)
        for number, layer in enumerate(layers):
            if layer in everywhere:
                states[:, number] = hidden[:, everywhere.index(layer)]
            else:
                rows = read_before(example.mask, self.final_reach or 0).to(there)
                states[rows, number] = dequantize(tensors["final"], tensors.get("final.scale"), dtype)
        return states

    def refuse_unless(self, wanted: Contents, where: Path) -> None:
        """Stop with the reason where `wanted` cannot be read from what is stored."""
        lacking = [str(layer) for layer in wanted.layers if layer not in self.layers]
        reason = None
        if self.weights != wanted.weights:
            reason = f"it was captured from {self.target} ({self.path}), whose weights are not those of {wanted.target}"
        elif self.template != wanted.template:
            reason = "it was captured with another chat template, so that none of its sequences would be found"
        elif lacking:
            reason = f"it holds layers {names(self.layers)}, and the drafter reads {', '.join(lacking)} too"
        elif self.dtype != wanted.dtype:
            reason = f"it holds {self.dtype}, not {wanted.dtype}; leave source.dtype out to read it"
        elif self.final_reach is not None and "final" in wanted.layers:
            reach = wanted.final_reach
            if reach is None or reach > self.final_reach:
                reason = "it holds the last state only at supervised positions, and more is asked for"
        if reason is not None:
            raise UserError(f"source.path={where}: {reason}; choose another folder to capture anew")


def names(layers: tuple[Layer, ...]) -> str:
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
        self, path: Path, wanted: Contents | None = None, max_bytes: float = float("inf"), shard_bytes: float = 512e6,
        mend: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.max_bytes, self.shard_bytes, self.mend = path, max_bytes, shard_bytes, mend
        manifest = path / "manifest.json"
        if manifest.exists():
            self.contents = read_manifest(manifest)
        elif wanted is not None:
            self.contents = wanted
        else:
            raise UserError(f"{path}: there is no feature store in it (no manifest.json); give the folder of one")
        self.shards: dict[str, StoreShard] = {}
        self.home: dict[str, str] = {}  # of a sequence, its shard
        self.lost: list[str] = []  # files that were missing or damaged
        self.checked: set[str] = set()  # sequences whose checksum was compared
        self.waiting: dict[str, dict[str, Tensor]] = {}
        self.waiting_bytes = 0
        self.seen: set[str] = set()  # indices read
        self.writes = True  # False: what waits is another process's to keep
        self.changed = -1  # when the folder was, as of the last look
        self.handle: Callable[[str], Any] = lru_cache(maxsize=128)(lambda name: safe_open(path / name, "pt"))
        self._sweep()
        self._look()

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.contents.layers

    @property
    def num_bytes(self) -> int:
        """What its shards take."""
        return sum(shard.bytes for shard in self.shards.values())

    def key(self, example: Example) -> str:
        return self.contents.key(example)

    def announced(self, distinct: list[Example], missing: list[Example]) -> str:
        """What it will take with these sequences, of which some are missing; stops where there is less room."""
        contents, max_gb = self.contents, self.max_bytes / 1e9
        tokens = sum(len(example.tokens) for example in distinct)
        a_token = sum(map(contents.num_bytes, distinct)) / tokens
        to_come = sum(map(contents.num_bytes, missing))
        total = self.num_bytes + to_come + PLACE * len(missing)
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
        key = self.contents.key(example)
        if key not in self.home and key not in self.waiting:
            self._look()  # another process may have written it
        return key in self.home or key in self.waiting

    def read(self, example: Example, layers: tuple[Layer, ...], like: Tensor | Target) -> Tensor | None:
        """States [T, L, D] of a sequence, of the type and device of `like`; None where it is not stored, or no longer whole."""
        if example not in self:
            return None
        key = self.contents.key(example)
        tensors = self.waiting.get(key) or self._load(key)
        return None if tensors is None else self._decoded(example, tensors, layers, like)

    def take(self, example: Example, states: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """Keep states [T, L, D] of the store's layers; what reading `layers` of them gives from now on."""
        key, tensors = self.contents.key(example), self.contents.encode(example, states)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values() if tensor.dtype not in ROUNDED):
            raise RunError(
                f"source.path={self.path}: the target's features of a sequence ({key}) are not finite in "
                f"{self.contents.dtype}; use source.dtype=bfloat16, or look at the target"
            )
        if key not in self.waiting:
            self.waiting[key] = tensors
            self.waiting_bytes += sum(tensor.nbytes for tensor in tensors.values())
        found = self._decoded(example, tensors, layers, states)
        if self.waiting_bytes >= self.shard_bytes:
            self.flush()
        return found

    def flush(self) -> None:
        """Write what waits as one shard, then its index."""
        try:
            if self.waiting and self.writes:
                self._write()
            self.waiting, self.waiting_bytes = {}, 0
        except OSError as error:
            raise UserError(
                f"source.path={self.path}: it cannot be written ({error.strerror}); choose another folder"
            ) from error

    def _write(self) -> None:
        if self.num_bytes + self.waiting_bytes > self.max_bytes:
            raise UserError(f"source.max_gb={self.max_bytes / 1e9:g}: the store in {self.path} is full; raise it")
        manifest = self.path / "manifest.json"
        if manifest.exists():
            if read_manifest(manifest) != self.contents:
                raise UserError(
                    f"source.path={self.path}: meanwhile another process stores other features there; choose another"
                )
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(manifest, json.dumps({"format": FORMAT, **asdict(self.contents)}, indent=2) + "\n")
        name = f"features-{secrets.token_hex(5)}"
        file = self.path / f"{name}.safetensors"
        tensors = {f"{key}/{part}": tensor for key, parts in self.waiting.items() for part, tensor in parts.items()}
        with written(file) as scratch:
            save_file(tensors, scratch, metadata={"format": "pt"})
            scratch.chmod(manifest.stat().st_mode)  # safetensors lets nobody else read what it writes
            shard = StoreShard(name, scratch.stat().st_size, sha256(scratch), {k: checksum(v) for k, v in self.waiting.items()})
        write_text(file.with_suffix(".json"), json.dumps(asdict(shard)) + "\n")
        self._add(shard)
        self.checked |= set(self.waiting)

    def verify(self) -> None:
        """Read every shard whole, and leave behind those that are not as they were written."""
        for shard in list(self.shards.values()):
            file = self.path / f"{shard.name}.safetensors"
            if sha256(file) != shard.sha256:
                self._lose(file.name, "its SHA-256 differs")

    def _lose(self, file: str, reason: str) -> None:
        """Name a shard, or its index, that is missing or damaged; its sequences count as not stored."""
        name = file.removesuffix(".safetensors").removesuffix(".json")
        lost = [key for key, home in self.home.items() if home == name]
        self.lost.append(file)
        again = "will be captured again" if self.mend else "count as not stored"
        print(
            f"{self.path / file}: {reason}; " + (f"its {len(lost)} sequences " if lost else "what it held ") + again, flush=True
        )
        self.shards.pop(name, None)
        for key in lost:
            del self.home[key]
        self.checked -= set(lost)
        if self.mend:
            for suffix in (".json", ".safetensors"):
                with suppress(OSError):  # another process may have removed it, or the folder is not ours
                    (self.path / f"{name}{suffix}").unlink()

    def _decoded(
        self, example: Example, tensors: dict[str, Tensor], layers: tuple[Layer, ...], like: Tensor | Target
    ) -> Tensor:
        """What is stored crosses to the device as it is, and is rounded back there."""
        there = {part: tensor.to(like.device) for part, tensor in tensors.items()}
        return self.contents.decode(example, there, layers, like.dtype)

    def _load(self, key: str) -> dict[str, Tensor] | None:
        """The stored tensors of a sequence, compared with their checksum at the first reading."""
        name = self.home[key]
        file = f"{name}.safetensors"
        try:
            shard = self.handle(file)
            parts = ("hidden", "hidden.scale", "final", "final.scale")
            held = (bool(self.contents.everywhere), self.contents.final_reach is not None)
            scaled = self.contents.dtype in LARGEST
            wanted = [part for part, there in zip(parts, (held[0], held[0] and scaled, held[1], held[1] and scaled)) if there]
            tensors = {part: shard.get_tensor(f"{key}/{part}") for part in wanted}
        except (OSError, SafetensorError) as error:
            self._lose(file, f"it cannot be read ({error})")
            return None
        if key not in self.checked:
            if checksum(tensors) != self.shards[name].sequences[key]:
                self._lose(file, "its checksum differs")
                return None
            self.checked.add(key)
        return tensors

    def _look(self) -> None:
        """Read the indices that were written since the last look."""
        if not self.path.is_dir() or (changed := self.path.stat().st_mtime_ns) == self.changed:
            return
        self.changed = changed
        for index in sorted(self.path.glob("features-*.json")):
            if index.name in self.seen:
                continue
            self.seen.add(index.name)
            try:
                shard = StoreShard(**json.loads(index.read_text()))
            except FileNotFoundError:  # another process has just left it behind
                continue
            except (OSError, ValueError, TypeError) as error:
                self._lose(index.name, f"this index cannot be read ({error})")
                continue
            self._add(shard)
            file = index.with_suffix(".safetensors")
            found = file.stat().st_size if file.exists() else None
            if found != shard.bytes:
                self._lose(file.name, "it is missing" if found is None else f"it has {found} bytes instead of {shard.bytes}")

    def _add(self, shard: StoreShard) -> None:
        self.seen.add(f"{shard.name}.json")
        self.shards[shard.name] = shard
        self.home |= dict.fromkeys(shard.sequences, shard.name)

    def _sweep(self) -> None:
        """Remove what killed processes left unfinished."""
        whole = {file.stem for file in self.path.glob("features-*.json")}
        for file in [*self.path.glob("*.part"), *self.path.glob("features-*.safetensors")]:
            with suppress(OSError):  # another process may sweep too
                if self.mend and file.stem not in whole and time.time() - file.stat().st_mtime > STALE:
                    file.unlink()


def read_manifest(path: Path) -> Contents:
    """What a store holds, from its manifest."""
    try:
        facts = json.loads(path.read_text())
        if facts.pop("format") != FORMAT or facts["dtype"] not in get_args(Dtype):
            raise ValueError("another version of spectrain wrote it")
        return Contents(**{**facts, "layers": tuple(facts["layers"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: this manifest cannot be read ({error}); capture to another folder") from error


def checksum(tensors: dict[str, Tensor]) -> int:
    """CRC-32 of the bytes of tensors, in the order of their names."""
    found = 0
    for _, tensor in sorted(tensors.items()):
        found = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy(), found)  # type: ignore[arg-type]
    return found


def sha256(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()

"""Features that were captured before and lie on the disk. Shapes: B batch, T tokens, L layers, D target width."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.errors import RunError, UserError
from spectrain.models.features import Features, Layer
from spectrain.models.images import refuse_images
from spectrain.models.target import Target

from .base import BatchRequest, Source
from .batch import Batch, collate, pad_or_pack
from .speculators import SpeculatorsCache, find_hidden_states
from .store import FeatureStore, StoreContents, format_layers, hash_weights, read_manifest


class FeatureCache(Protocol):
    """Features on the disk, ours or another project's."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What it can give."""

    def sequence_key(self, example: Example) -> str:
        """By what a sequence is found."""

    def __contains__(self, example: Example) -> bool: ...

    def describe_capture(self, distinct: list[Example], missing: list[Example]) -> str:
        """What a training on these sequences, of which some are missing, takes from it and adds to it, in a sentence."""

    def read_states(self, example: Example, layers: tuple[Layer, ...], like: Target) -> Tensor | None:
        """States [T, L, D] of a sequence, of the target's type and device; None where it cannot give them."""

    def put_states(self, example: Example, states: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """Of states [T, L, D] of all its layers, what reading `layers` would give; some keep them."""

    def flush(self) -> None:
        """Write down what waits."""


class StoredSource(Source):
    """Reads features from a folder, which `spectrain data store` fills; what it lacks is captured at first use.

    A new folder holds the layers that the drafter reads, in `dtype` (auto: the target's; fp8 and int8 have a scale a token and
    layer), with `supervised_only` the last state only where the drafter reads it. No more than `max_gb` are written, in shards
    of `shard_mb`. With capture=false nothing is, and what is missing stops the training. A cache of the speculators project is
    read as it is.
    """

    stores_features = True

    def __init__(
        self,
        path: str,
        dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto",
        supervised_only: bool | None = None,
        max_gb: float = 100.0,
        shard_mb: float = 512.0,
        capture: bool = True,
    ) -> None:
        for key, value in (("max_gb", max_gb), ("shard_mb", shard_mb)):
            if not value > 0:
                raise UserError(f"source.{key}={value}: use more than 0")
        self.path, self.dtype, self.supervised_only = Path(path).expanduser(), dtype, supervised_only
        self.max_gb, self.shard_mb, self.capture = max_gb, shard_mb, capture
        self.store: FeatureCache | None = None
        self.own_store: FeatureStore | None = None  # the store, where it is not another project's

    def prepare(
        self, target: Target, layers: tuple[Layer, ...], final_reach: int | None, examples: list[Example] | None
    ) -> str:
        """Open the store, and stop where what is missing would not fit the budget or the disk."""
        if not layers:
            raise UserError("source=store: this family reads no features, it runs the target itself; use source=live")
        store = self._open_store(target, layers, final_reach)
        if examples is None:
            return (
                f"{self.path}: layers {format_layers(store.layers)}; what it lacks of a stream is captured, "
                f"up to {self.max_gb:g} GB"
            )
        distinct = list({store.sequence_key(example): example for example in examples}.values())
        missing = [example for example in distinct if example not in store]
        if missing and not self.capture:
            raise UserError(
                f"source.path={self.path}: {len(missing)} of {len(distinct)} sequences are not in it; capture them first with "
                "spectrain data store, or say source.capture=true"
            )
        return store.describe_capture(distinct, missing)

    def writable_store(self) -> FeatureStore | None:
        return self.own_store

    def _open_store(self, target: Target, layers: tuple[Layer, ...], final_reach: int | None) -> FeatureCache:
        if self.store is not None:
            return self.store
        if find_hidden_states(self.path) is not None:
            cache = SpeculatorsCache(self.path, target)
            lacking = [layer for layer in layers if layer not in cache.layers]
            if lacking:
                raise UserError(
                    f"source.path={self.path}: it holds layers {format_layers(cache.layers)}, and the drafter reads "
                    f"{format_layers(tuple(lacking))} too; give it those of the cache with drafter.layers"
                )
            self.store = cache
            return cache
        manifest = self.path / "manifest.json"
        stored = read_manifest(manifest) if manifest.exists() else None
        wanted = self._requested_contents(target, layers, final_reach, stored)
        if stored is not None:
            stored.check_serves(wanted, self.path)
        self.store = self.own_store = FeatureStore(
            self.path, wanted, self.max_gb * 1e9, self.shard_mb * 1e6, repair=self.capture
        )
        if target.sharding == "tensor" and dist.get_rank():
            self.own_store.is_writer = False  # every process of it sees the same data, and the first keeps them
        return self.store

    def _requested_contents(
        self, target: Target, layers: tuple[Layer, ...], final_reach: int | None, stored: StoreContents | None
    ) -> StoreContents:
        """What is asked of the store; what is left open is as it is stored."""
        if self.supervised_only and (final_reach is None or "final" not in layers):
            raise UserError("source.supervised_only=true: this family reads every position; leave it out")
        thrifty = self.supervised_only or (
            self.supervised_only is None and stored is not None and stored.final_reach is not None
        )
        dtype: Any = self.dtype
        if dtype == "auto":
            dtype = str(target.dtype).removeprefix("torch.") if stored is None else stored.dtype
        template = hashlib.sha256(str(target.tokenizer.chat_template).encode()).hexdigest()[:16]
        facts = target.name, target.path, hash_weights(target.model), template
        return StoreContents(*facts, layers, target.width, dtype, final_reach if thrifty else None)

    def make_batch(self, request: BatchRequest) -> Batch:
        target, layers, examples = request.target, request.layers, request.examples
        batch = collate(examples, request.packed).to(target.device)
        if not layers:
            refuse_images(request.texts, "source: this family reads no features, it runs the target itself")
            return batch
        store = self._open_store(target, layers, None)
        rows = [store.read_states(example, layers, target) for example in examples]
        absent = sum(row is None for row in rows)
        if _is_missing_anywhere(absent > 0, target):
            if absent and not self.capture:
                raise RunError(f"source.path={self.path}: {absent} sequences of a batch are not in it; say source.capture=true")
            # The whole batch, as source=live runs it: the last bits of a product depend on what is batched with what.
            hidden = target.features(batch.tokens, store.layers, batch.lengths, request.texts).hidden
            parts = hidden if batch.lengths is None else hidden[0].split(batch.lengths)
            rows = [
                store.put_states(example, states[: len(example.tokens)], layers) if row is None else row
                for example, row, states in zip(examples, rows, parts)
            ]
        found = pad_or_pack([row for row in rows if row is not None], request.packed)
        return replace(batch, features=Features(batch.tokens, layers, found))

    def flush(self) -> None:
        if self.store is not None:
            self.store.flush()


def _is_missing_anywhere(missing: bool, target: Target) -> bool:
    """Whether something is missing, on any process where all of them must run the target together."""
    if not target.runs_in_lockstep or not dist.is_initialized():
        return missing
    found = torch.tensor(float(missing), device=target.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)

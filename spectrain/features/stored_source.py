"""A source that reads captured features from disk. Shapes: B batch, T tokens, L layers, D target
width.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain.config.values import Positive
from spectrain.data.chat import Example
from spectrain.errors import RunError, UserError
from spectrain.models.features import Layer
from spectrain.models.target import Target

from .base import BatchRequest, FeatureCache, FeatureSource, FeaturesRead, compute_alone
from .batch import Batch, pad_or_pack
from .speculators import SpeculatorsCache, find_hidden_states
from .store import FeatureStore
from .store_contents import StoreContents, format_layers, hash_head, hash_weights, read_manifest


class StoredSource(FeatureSource):
    """Reads features from a folder that `spectrain data store` fills, and captures missing
    sequences at their first use.

    A new folder holds the layers that the drafter reads. A cache of the speculators project is
    read, but never written.
    """

    stores_features = True

    def __init__(
        self,
        # Folder of the feature store, or of a feature cache of the speculators project.
        path: str,
        # Type of the stored features; auto takes the target's type or that of an existing store,
        # and fp8 and int8 store one scale per token and layer.
        dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto",
        # Whether the target's final state is stored only at the positions where the drafter's loss
        # reads it; null follows an existing store, and a new one holds every position.
        supervised_only: bool | None = None,
        # Largest size of the store, in gigabytes.
        max_gb: Positive = 100.0,
        # Size of one shard, in megabytes.
        shard_mb: Positive = 512.0,
        # Whether missing sequences are captured and stored during training; false stops the
        # training instead.
        capture: bool = True,
    ) -> None:
        self.path = Path(path).expanduser()
        self.dtype = dtype
        self.supervised_only = supervised_only
        self.max_gb, self.shard_mb, self.capture = max_gb, shard_mb, capture
        self.store: FeatureCache | None = None
        # None where the store is another project's cache
        self.own_store: FeatureStore | None = None
        # The server that fills the store, as the manifest names it; None where the target runs
        # here.
        self.engine: str | None = None

    def prepare(self, target: Target, reads: FeaturesRead, examples: list[Example] | None) -> str:
        """Open the store, and raise `UserError` if the missing sequences would exceed the size
        limit or the free disk space.
        """
        if not reads.layers:
            raise UserError(
                "source=store: this family reads no features, because it runs the target itself; "
                "use source=live"
            )
        store = self._open_store(target, reads)
        if examples is None:
            return (
                f"{self.path}: layers {format_layers(store.layers)}; missing sequences of the "
                f"stream are captured, up to {self.max_gb:g} GB"
            )
        distinct, missing = store.list_distinct(examples)
        if missing and self.capture and self.engine is None:
            target.require_layers(
                f"source.path={self.path} lacks {len(missing)} of {len(distinct)} sequences, "
                "whose capture"
            )
        elif missing and self.engine is None:
            raise UserError(
                f"source.path={self.path}: {len(missing)} of {len(distinct)} sequences are not in "
                "it; capture them first with spectrain data store, or set source.capture=true"
            )
        return store.describe_capture(distinct, missing) + self._describe_origin(target)

    def _describe_origin(self, target: Target) -> str:
        """Return where stored features come from, for a target without layers, of which only the
        head could be compared.
        """
        if target.has_layers or self.own_store is None or not self.own_store.shards:
            return ""
        contents = self.own_store.contents
        return (
            f"; from {contents.target} ({contents.path}), compared by embedding, norm and "
            "output layer"
        )

    def leave_writing(self) -> None:
        if self.own_store is not None:
            self.own_store.is_writer = False

    def writable_store(self) -> FeatureStore | None:
        return self.own_store

    def provenance_facts(self) -> dict[str, Any]:
        if self.own_store is None:
            return {} if self.store is None else {"layers": list(self.store.layers)}
        contents = self.own_store.contents
        return {
            "dtype": contents.dtype,
            "final_reach": contents.final_reach,
            "head": contents.head,
            "engine": contents.engine,
        }

    def _open_store(self, target: Target, reads: FeaturesRead) -> FeatureCache:
        if self.store is not None:
            return self.store
        if find_hidden_states(self.path) is not None:
            cache = SpeculatorsCache(self.path, target)
            missing = [layer for layer in reads.layers if layer not in cache.layers]
            if missing:
                raise UserError(
                    f"source.path={self.path}: it holds layers {format_layers(cache.layers)}, and "
                    f"the drafter also reads {format_layers(tuple(missing))}; set drafter.layers "
                    "to layers of the store"
                )
            self.store = cache
            return cache
        manifest = self.path / "manifest.json"
        stored = read_manifest(manifest) if manifest.exists() else None
        requested = self._requested_contents(target, reads, stored)
        if stored is not None:
            stored.check_serves(requested, self.path)
            if self.engine and not stored.engine:
                raise UserError(
                    f"source.path={self.path}: the target itself stored its features; choose "
                    "another folder"
                )
        self.store = self.own_store = FeatureStore(
            self.path, requested, self.max_gb * 1e9, self.shard_mb * 1e6, repair=self.capture
        )
        return self.store

    def _requested_contents(
        self, target: Target, reads: FeaturesRead, stored: StoreContents | None
    ) -> StoreContents:
        """Return the contents that the settings request; settings left open follow the existing
        store.
        """
        if self.supervised_only and (reads.final_reach is None or "final" not in reads.layers):
            raise UserError(
                "source.supervised_only=true: this family reads every position; leave it out"
            )
        stores_supervised_only = self.supervised_only or (
            self.supervised_only is None and stored is not None and stored.final_reach is not None
        )
        dtype: Any = self.dtype
        if dtype == "auto":
            dtype = str(target.dtype).removeprefix("torch.") if stored is None else stored.dtype
        template = hashlib.sha256(str(target.tokenizer.chat_template).encode()).hexdigest()[:16]
        # A server may hold the layers in other types, so only the weights outside of them are
        # known.
        weights = hash_weights(target.model) if target.has_layers and self.engine is None else None
        reach = reads.final_reach if stores_supervised_only else None
        identity = target.name, target.path, weights, template
        return StoreContents(
            *identity, reads.layers, target.width, dtype, reach, hash_head(target), self.engine
        )

    def get_states(self, batch: Batch, request: BatchRequest) -> Tensor:
        target, layers, examples = request.target, request.layers, request.examples
        store = self._open_store(target, FeaturesRead(layers))
        rows = [store.read_states(example, layers, target) for example in examples]
        num_missing = sum(row is None for row in rows)
        if _is_missing_anywhere(num_missing > 0, target):
            if num_missing and not self.capture:
                raise RunError(
                    f"source.path={self.path}: {num_missing} sequences of a batch are not in it; "
                    "set source.capture=true"
                )
            parts = self._compute_missing(batch, request, store.layers, rows)
            rows = [
                store.put_states(example, states[: len(example.tokens)], layers)
                if row is None
                else row
                for example, row, states in zip(examples, rows, parts)
            ]
        return pad_or_pack([row for row in rows if row is not None], request.packed)

    def _compute_missing(
        self,
        batch: Batch,
        request: BatchRequest,
        layers: tuple[Layer, ...],
        rows: Sequence[Tensor | None],
    ) -> Sequence[Tensor]:
        """Return the states [T.., L, D] of every sequence of a batch that has no row; those of the
        others may be empty.

        They have the bits that source=live has with its default settings: on a CPU every sequence
        runs by itself, elsewhere the complete batch runs.
        """
        target = request.target
        if target.device.type == "cpu" and not target.runs_in_lockstep:
            return [
                compute_alone(example, target, layers) if row is None else row[:0]
                for example, row in zip(request.examples, rows)
            ]
        hidden = target.features(batch.tokens, layers, batch.lengths, request.texts).hidden
        return hidden.unbind() if batch.lengths is None else hidden[0].split(batch.lengths)

    def flush(self) -> None:
        if self.store is not None:
            self.store.flush()


def _is_missing_anywhere(missing: bool, target: Target) -> bool:
    """Tell whether sequences are missing here, or on any process if all of them must run the
    target together.
    """
    if not target.runs_in_lockstep or not dist.is_initialized():
        return missing
    flag = torch.tensor(float(missing), device=target.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)

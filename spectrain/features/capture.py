"""The commands `spectrain data store`, which fills a feature store before training, and
`spectrain data verify`.
"""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.errors import RunError, UserError
from spectrain.models.target import Target
from spectrain.output.count_progress import CountProgress
from spectrain.output.verbosity import print_json, result_output

from .base import BatchRequest, FeatureServer, FeaturesRead, Source, StateCapture
from .store import FeatureStore
from .store_contents import format_layers
from .stored_source import StoredSource


def capture_features(spec: RunSpec) -> None:
    """Store the features that the recipe's drafter reads, for all its data; continue where an
    earlier capture stopped.

    The target runs the batches of the first epoch, so that a training reads, bit for bit, what it
    would have computed. With a server, the states are requested from it, one sequence at a time,
    and checked.
    """
    source = spec.source.build()
    if not isinstance(source, StoredSource):
        raise UserError(
            "source: data store writes a feature store; set source=store source.path=DIR"
        )
    trainer = spec.trainer.build()
    accelerator = trainer.make_accelerator()
    data = spec.data.build()
    data.load_conversations()
    target: Target = spec.target.build()
    dataset: Dataset = data.make_dataset(target.template, target.vision)
    if dataset.is_sample:
        raise UserError(
            "data: the length of a stream is unknown; train with source=store, which captures "
            "what it reads"
        )
    if target.sharding != "none":
        raise UserError(
            f"target.sharding={target.sharding}: data store runs different batches on every "
            "process; leave it out, or train with source=store, which captures what it reads"
        )
    drafter = spec.drafter.build(target=target)
    stage = drafter.stages[0]
    layers = stage.layers
    reads = FeaturesRead(layers, stage.final_reach)
    capture: StateCapture | None = None
    if spec.server:
        server: FeatureServer = spec.server.build()
        capture = server.start_capture(target, layers, dataset.examples)
        source.engine = capture.engine
    message = source.prepare(target, reads, dataset.examples)
    store = source.writable_store()
    if store is None:
        raise UserError(
            f"source.path={spec.source.settings.get('path')}: this cache is another project's and "
            "is never written; choose another folder"
        )
    if accelerator.is_main_process:
        print(message, flush=True)
    if capture is None:
        batches = [dataset[batch] for batch in dataset.make_batches(0, trainer.batch_settings)]
        run_batches(
            source,
            store,
            accelerator,
            [BatchRequest(batch, target, layers, trainer.packing) for batch in batches],
        )
    else:
        capture.fill_store(store, accelerator, dataset.examples)
    accelerator.wait_for_everyone()
    if missing := sum(example not in store for example in dataset.examples):
        reasons = (
            "" if capture is None else f"; {store.path / capture.failure_file} has the reasons"
        )
        raise RunError(
            f"source.path={store.path}: {missing} sequences are still missing{reasons}; run the "
            "same command again"
        )
    if accelerator.is_main_process:
        print_json(describe_store(store))
        with result_output():
            print(f"{store.path}: complete; train with source=store source.path={store.path}")


def describe_store(store: FeatureStore) -> dict[str, Any]:
    """Return what a store holds, as plain values."""
    return {
        "path": str(store.path),
        "sequences": len(store.shard_names),
        "shards": len(store.shards),
        "bytes": store.num_bytes,
        "layers": [*store.layers],
        "dtype": str(store.contents.dtype),
        "damaged": [*store.damaged_files],
    }


def run_batches(
    source: Source, store: FeatureStore, accelerator: Accelerator, requests: list[BatchRequest]
) -> None:
    """Let the target run this process's share of the batches that hold a missing sequence."""
    remaining = [
        request for request in requests if not all(example in store for example in request.examples)
    ]
    # Every process must list the remaining batches before any process adds to the store.
    accelerator.wait_for_everyone()
    if remaining:
        remaining[0].target.pack_weights()
    own_requests = remaining[accelerator.process_index :: accelerator.num_processes]
    fill_store(source, own_requests, shows_progress=accelerator.is_main_process)


def fill_store(source: Source, requests: list[BatchRequest], shows_progress: bool) -> None:
    """Let the source store the missing sequences of these batches."""
    sizes = [sum(len(example.tokens) for example in request.examples) for request in requests]
    progress = CountProgress("capturing", sum(sizes), unit="tokens", enabled=shows_progress)
    try:
        with progress:
            for request, size in zip(requests, sizes):
                source.make_batch(request)
                progress.advance(size)
    finally:
        source.flush()


def verify_store(path: str | None, drop: bool) -> None:
    """Compare every shard with its size and SHA-256, and report those that are missing or
    damaged, or without an index; a store without shards is an error.
    """
    if path is None:
        raise UserError("path: name the feature store, as in path=DIR")
    store = FeatureStore(Path(path).expanduser(), repair=drop)
    store.verify_shards()
    if not store.shards and not store.damaged_files:
        raise RunError(
            f"{store.path}: this store has no shards; run spectrain data store, or give the folder "
            "of another store"
        )
    print_json(describe_store(store))
    print(
        f"{store.path}: {len(store.shards)} intact shards, {store.num_bytes / 1e9:.3g} GB, "
        f"{len(store.shard_names)} sequences, layers {format_layers(store.layers)} in "
        f"{store.contents.dtype}"
    )
    if store.damaged_files:
        remedy = (
            "they were deleted; run spectrain data store again"
            if drop
            else "delete them with drop=true, then run spectrain data store"
        )
        raise RunError(
            f"{store.path}: {len(store.damaged_files)} files are missing or damaged "
            f"({', '.join(store.damaged_files)}); {remedy}"
        )

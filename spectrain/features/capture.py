"""`spectrain data store` fills a feature store before training, `spectrain data verify` reads one whole."""

import time
from pathlib import Path

from omegaconf import DictConfig

from spectrain.config.build import build
from spectrain.data.dataset import Dataset
from spectrain.errors import RunError, UserError
from spectrain.models.target import Target

from .base import BatchRequest, Source
from .store import FeatureStore, format_layers


def capture_features(config: DictConfig) -> None:
    """Store the features that the recipe's drafter reads, of all its data; go on where an earlier capture stopped.

    Sequences are run in the batches of the first epoch, so that a training reads, bit for bit, what it would have computed.
    """
    source: Source = build(config.source)
    if not source.stores_features:
        raise UserError("source: data store writes a feature store; say source=store source.path=DIR")
    trainer = build(config.trainer)
    accelerator = trainer.accelerator()
    data = build(config.data)
    data.conversations()
    target: Target = build(config.target)
    dataset: Dataset = data.dataset(target.tokenizer, target.vision)
    if dataset.is_sample:
        raise UserError("data: a stream does not know how much it holds; train with source=store, which captures what it reads")
    if target.sharding != "none":
        raise UserError(
            f"target.sharding={target.sharding}: data store gives every process its own batches; leave it out, or train with "
            "source=store, which captures what it reads"
        )
    drafter = build(config.drafter, target=target)
    layers = drafter.stages[0].layers
    told = source.prepare(target, layers, drafter.stages[0].final_reach, dataset.examples)
    store = source.writable_store()
    if store is None:
        raise UserError(
            f"source.path={config.source.path}: this cache is another project's, and nothing is added; choose another folder"
        )
    batches = [dataset[batch] for batch in dataset.make_batches(0, trainer.batching)]
    todo = [batch for batch in batches if not all(example in store for example in batch)]
    if accelerator.is_main_process:
        print(told, flush=True)
    accelerator.wait_for_everyone()  # every process has seen the same to do before any adds to the store
    target.pack_weights()
    mine = todo[accelerator.process_index :: accelerator.num_processes]
    requests = [BatchRequest(examples, target, layers, trainer.packing) for examples in mine]
    fill_store(source, requests, shows_progress=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    if missing := sum(example not in store for example in dataset.examples):
        raise RunError(f"source.path={store.path}: {missing} sequences are still missing; give the same command again")
    if accelerator.is_main_process:
        print(f"{store.path}: complete; train with source=store source.path={store.path}")


def fill_store(source: Source, requests: list[BatchRequest], shows_progress: bool) -> None:
    """Let the source store what these batches lack, and tell now and then how far it is."""
    began = printed = time.monotonic()
    tokens = 0
    try:
        for number, request in enumerate(requests, 1):
            source.make_batch(request)
            tokens += sum(len(example.tokens) for example in request.examples)
            now = time.monotonic()
            if shows_progress and now - printed > 30:
                left = (now - began) / number * (len(requests) - number)
                printed = now
                print(
                    f"batch {number} of {len(requests)}  {tokens / (now - began):.0f} tokens/s  {left:.0f} s left", flush=True
                )
    finally:
        source.flush()


def verify_store(config: DictConfig) -> None:
    """Compare every shard with its size and SHA-256, and name those that are missing or damaged."""
    if config.path is None:
        raise UserError("path: say which feature store, as in path=DIR")
    store = FeatureStore(Path(config.path).expanduser(), repair=bool(config.drop))
    store.verify_shards()
    print(
        f"{store.path}: {len(store.shards)} whole shards, {store.num_bytes / 1e9:.3g} GB, "
        f"{len(store.shard_names)} sequences, layers "
        f"{format_layers(store.layers)} in {store.contents.dtype}"
    )
    if store.damaged_files:
        mend = (
            "they are gone; run spectrain data store again"
            if config.drop
            else "mend it with drop=true, then spectrain data store"
        )
        raise RunError(
            f"{store.path}: {len(store.damaged_files)} files are missing or damaged ({', '.join(store.damaged_files)}); {mend}"
        )

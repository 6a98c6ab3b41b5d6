"""The fit of a drafter's initial weights to the first batches of a training."""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from spectrain.data.chat import Example
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import FittedDrafter
from spectrain.errors import RunError
from spectrain.features.base import BatchRequest, Source, SourceError
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target

from .budget import Budget
from .parallel import ParallelStrategy
from .progress import RunProgress

# Share of trainer.max_minutes in which batches are read for the initial weights.
FIT_SHARE = 0.4

BatchKey = tuple[Any, ...]
"""What identifies a batch."""


class FittedBatches(NamedTuple):
    """The batches that a fit reads, with their features, and their number of tokens."""

    batches: dict[BatchKey, Batch]
    num_tokens: int


def fit_initial_weights(
    run: RunProgress, drafter: Drafter, target: Target, stream: Iterable[list[Example]]
) -> dict[BatchKey, Batch]:
    """Fit a drafter's initial weights to the first batches of a stream, where its family and its settings do that.

    At most the batches of this training are read, each text once. Processes that share a feature store leave the fit out,
    because each would store the same features. The batches whose features the first steps take are returned: those of a
    single process. A source that works ahead computes them anyway.
    """
    source, parallel = run.source, run.parallel
    if not isinstance(drafter, FittedDrafter) or not drafter.fit_tokens:
        return {}
    if parallel.num_processes > 1 and source.stores_features:
        if parallel.is_main:
            print("the initial weights are not fitted: several processes would each store the same features", flush=True)
        return {}
    if parallel.is_main:
        print(f"fitting the initial weights to up to {drafter.fit_tokens} tokens", flush=True)
    start_time = time.monotonic()
    drafter.to(parallel.device)
    # What a source generates depends on a drafter that drafts already; the fit reads the texts of the data.
    reader = LiveSource() if source.generates_text else source
    layers, packing = drafter.stages[0].layers, run.trainer.packing
    texts = choose_texts(stream, drafter.fit_tokens, run.num_steps * run.batches_per_step)
    requests = [BatchRequest(examples, target, layers, packing, 0, drafter) for examples in texts]
    try:
        fitted = read_features(requests, reader, run.budget, parallel)
    except SourceError as error:
        how = f"no step was finished; go on with the same command, trainer.resume=auto run={run.run}"
        raise RunError(f"{error}; {how}") from error
    drafter.fit_start([*fitted.batches.values()], target)
    parallel.copy_from_first(drafter)
    if parallel.is_main:
        seconds = time.monotonic() - start_time
        print(f"initial weights fitted to {fitted.num_tokens} tokens in {seconds:.0f} s", flush=True)
    keeps = parallel.num_processes == 1 and reader is source and not source.num_ahead
    return fitted.batches if keeps else {}


def batch_key(examples: list[Example]) -> BatchKey:
    """Return what identifies a batch: its texts and what of them carries loss."""
    return tuple((example.content_hash, bytes(example.mask)) for example in examples)


def choose_texts(stream: Iterable[list[Example]], num_tokens: int, max_batches: float) -> list[list[Example]]:
    """Return the first batches of a stream, up to this many tokens or batches, or until a text returns."""
    chosen: list[list[Example]] = []
    texts: set[str] = set()
    for examples in stream:
        if num_tokens <= 0 or len(chosen) >= max_batches or examples[0].content_hash in texts:
            break
        chosen.append(examples)
        texts.update(example.content_hash for example in examples)
        num_tokens -= sum(len(example.tokens) for example in examples)
    return chosen


def read_features(requests: list[BatchRequest], source: Source, budget: Budget, parallel: ParallelStrategy) -> FittedBatches:
    """Return the batches of these requests, of which none is read after FIT_SHARE of the training's minutes."""
    batches: dict[BatchKey, Batch] = {}
    num_requested = num_tokens = 0
    for number, request in enumerate(requests):
        if budget.has_spent(FIT_SHARE, parallel):
            break
        for coming in requests[num_requested : number + 1 + source.num_ahead]:
            source.request_ahead(coming.examples)
            num_requested += 1
        batches[batch_key(request.examples)] = source.make_batch(request).to("cpu")
        num_tokens += sum(len(example.tokens) for example in request.examples)
    return FittedBatches(batches, num_tokens)

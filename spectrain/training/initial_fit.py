"""The fit of a drafter's initial weights to the first batches of a training."""

import time
from collections.abc import Callable
from typing import NamedTuple

from spectrain.data.chat import Example
from spectrain.data.dataset import BatchStream, StreamState
from spectrain.drafters.base import Drafter
from spectrain.errors import RunError
from spectrain.features.base import BatchRequest, Source, SourceError
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.output.count_progress import CountProgress

from .budget import Budget
from .parallel import ParallelStrategy
from .progress import RunProgress

# Share of trainer.max_minutes in which batches are read for the initial weights.
FIT_SHARE = 0.4


class ChosenBatch(NamedTuple):
    """A batch that a fit may read, and the position in the data behind it."""

    examples: list[Example]
    position: StreamState


class FittedBatches(NamedTuple):
    """The batches that a fit reads, with their features, their number of tokens, and the
    position in the data behind them.
    """

    batches: list[Batch]
    num_tokens: int
    position: StreamState | None


def fit_initial_weights(
    run: RunProgress, drafter: Drafter, target: Target, stream: BatchStream
) -> StreamState | None:
    """Fit a drafter's initial weights to the first batches of a stream, where its family and its
    settings do that.

    At most the batches of this training are read, each text once. Processes that share a feature
    store leave the fit out, because each would store the same features. Return the position behind
    the batches that were read, where the training
    begins: on texts that the fit has read it would learn little that holds elsewhere. None where
    nothing is fitted.
    """
    source, parallel = run.source, run.parallel
    fit = drafter.capabilities.initial_fit
    if fit is None:
        return None
    if parallel.num_processes > 1 and source.stores_features:
        if parallel.is_main:
            print(
                "the initial weights are not fitted: several processes would each store the same "
                "features",
                flush=True,
            )
        return None
    if parallel.is_main:
        print(f"fitting the initial weights to up to {fit.num_tokens} tokens", flush=True)
    start_time = time.monotonic()
    drafter.to(parallel.device)
    # What a source generates depends on a drafter that drafts already; the fit reads the texts of
    # the data.
    reader = LiveSource() if source.generates_text else source
    layers, packing = drafter.stages[0].layers, run.trainer.packing
    chosen = choose_batches(stream, fit.num_tokens, run.num_steps * run.batches_per_step)
    try:
        fitted = read_features(
            chosen,
            lambda examples: BatchRequest(examples, target, layers, packing, 0, drafter),
            reader,
            run.budget,
            parallel,
        )
    except SourceError as error:
        how = (
            f"no step was finished; go on with the same command, trainer.resume=auto run={run.run}"
        )
        raise RunError(f"{error}; {how}") from error
    fit.run(drafter, fitted.batches, target)
    parallel.copy_from_first(drafter)
    if parallel.is_main:
        seconds = time.monotonic() - start_time
        print(
            f"initial weights fitted to {fitted.num_tokens} tokens in {seconds:.0f} s", flush=True
        )
    return fitted.position


def choose_batches(stream: BatchStream, num_tokens: int, max_batches: float) -> list[ChosenBatch]:
    """Return the first batches of a stream, up to this many tokens or batches, or until a text
    returns.
    """
    chosen: list[ChosenBatch] = []
    texts: set[str] = set()
    for examples in stream:
        if num_tokens <= 0 or len(chosen) >= max_batches or examples[0].content_hash in texts:
            break
        chosen.append(ChosenBatch(examples, stream.merge_states([stream.state_dict()])))
        texts.update(example.content_hash for example in examples)
        num_tokens -= count_tokens(examples)
    return chosen


def count_tokens(examples: list[Example]) -> int:
    """Return the number of tokens of texts, without padding."""
    return sum(len(example.tokens) for example in examples)


def read_features(
    chosen: list[ChosenBatch],
    make_request: Callable[[list[Example]], BatchRequest],
    source: Source,
    budget: Budget,
    parallel: ParallelStrategy,
) -> FittedBatches:
    """Return the features of these batches, of which none is read after FIT_SHARE of the
    training's minutes.
    """
    batches: list[Batch] = []
    num_requested = num_tokens = 0
    position = None
    total = sum(count_tokens(examples) for examples, _ in chosen)
    with CountProgress("fitting", total, unit="tokens", enabled=parallel.is_main) as progress:
        for number, (examples, behind) in enumerate(chosen):
            if budget.has_spent(FIT_SHARE, parallel):
                break
            for coming in chosen[num_requested : number + 1 + source.num_ahead]:
                source.request_ahead(coming.examples)
                num_requested += 1
            batches.append(source.make_batch(make_request(examples)).to("cpu"))
            num_tokens += count_tokens(examples)
            progress.advance(count_tokens(examples), budget.seconds_until(FIT_SHARE))
            position = behind
    return FittedBatches(batches, num_tokens, position)

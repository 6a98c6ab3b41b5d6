"""The fit of a drafter's initial weights to the first batches of a training."""

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from spectrain.data.chat import Example
from spectrain.data.dataset import BatchStream, StreamState
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import FitSeconds
from spectrain.errors import RunError
from spectrain.features.base import BatchRequest, Source, SourceError
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.output.count_progress import CountProgress
from spectrain.output.streams import print_text

from .parallel.base import ParallelStrategy
from .progress import RunProgress

# Share of trainer.max_minutes after which the initial weights are fitted: what comes before, such
# as the held-out answers, and their own texts and solutions included.
FIT_SHARE = 0.4


class ChosenBatch(NamedTuple):
    """A batch that a fit may read, and the position in the data behind it."""

    examples: list[Example]
    position: StreamState


class FitPlan:
    """How many tokens a fit reads, so that it is done after FIT_SHARE of the training's minutes.

    The seconds of a token are those of the texts that were read last, and those of the fit.
    """

    def __init__(
        self,
        seconds: FitSeconds,
        seconds_left: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self.seconds_left, self.clock = seconds, seconds_left, clock
        self.num_tokens = 0
        # Seconds of reading a token; None before the first text.
        self.read_seconds: float | None = None

    def count_texts(self, examples: list[Example]) -> int:
        """Return how many of these texts there is time for."""
        left = self.seconds_left() - self.seconds.solving
        if left == math.inf:
            return len(examples)
        left -= self.num_tokens * self.seconds.per_token
        if self.read_seconds is None:
            # One text shows how long a token takes.
            return int(left > 0)
        num_affordable = left / (self.read_seconds + self.seconds.per_token)
        lengths = accumulate(len(example.tokens) for example in examples)
        return sum(length <= num_affordable for length in lengths)

    def reading_seconds_left(self) -> float | None:
        """Return the seconds that are left to read in, at most; None without a limit."""
        left = self.seconds_left() - self.seconds.solving
        left -= self.num_tokens * self.seconds.per_token
        return None if left == math.inf else max(0.0, left)

    def read(self, examples: list[Example], make_batch: Callable[[], Batch]) -> Batch:
        """Return the batch of some texts; measure how long it takes."""
        start = self.clock()
        batch = make_batch()
        num_tokens = count_tokens(examples)
        self.num_tokens += num_tokens
        self.read_seconds = (self.clock() - start) / max(1, num_tokens)
        return batch


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
            print_text(
                "the initial weights are not fitted: several processes would each store the same "
                "features",
            )
        return None
    if parallel.is_main:
        print_text(f"fitting the initial weights to up to {fit.num_tokens} tokens")
    start_time = time.monotonic()
    drafter.to(parallel.device)
    # What a source generates depends on a drafter that drafts already; the fit reads the texts of
    # the data.
    reader = LiveSource() if source.generates_text else source
    layers, packing = drafter.stages[0].layers, run.trainer.packing
    chosen = choose_batches(stream, fit.num_tokens, run.num_steps * run.batches_per_step)
    # Without a time limit no seconds are counted, and none are spent on trial products.
    has_limit = run.budget.max_seconds is not None
    speed = fit.measure(drafter) if has_limit else FitSeconds(0.0, 0.0)
    plan = FitPlan(speed, lambda: run.budget.seconds_until(FIT_SHARE, parallel))
    try:
        fitted = read_features(
            chosen,
            lambda examples: BatchRequest(examples, target, layers, packing, 0, drafter),
            reader,
            plan,
            parallel,
        )
    except SourceError as error:
        how = (
            f"no step was finished; go on with the same command, trainer.resume=auto run={run.run}"
        )
        raise RunError(f"{error}; {how}") from error
    if not fitted.batches:
        if parallel.is_main and chosen:
            print_text(
                f"the initial weights are not fitted: solving takes {speed.solving:.0f} s, and "
                f"trainer.max_minutes leaves {FIT_SHARE:.0%} of its time for that",
            )
        return None
    fit.run(drafter, fitted.batches, target)
    parallel.copy_from_first(drafter)
    if parallel.is_main:
        seconds = time.monotonic() - start_time
        print_text(f"initial weights fitted to {fitted.num_tokens} tokens in {seconds:.0f} s")
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
    plan: FitPlan,
    parallel: ParallelStrategy,
) -> FittedBatches:
    """Return the features of these batches, as far as the plan has time for their texts. The
    position is behind the last batch of which a text was read.
    """
    batches: list[Batch] = []
    num_requested = 0
    position = None
    total = sum(count_tokens(examples) for examples, _ in chosen)
    with CountProgress("fitting", total, unit="tokens", enabled=parallel.is_main) as progress:
        for number, (examples, behind) in enumerate(chosen):
            texts = examples
            # The main process decides for all.
            while texts and (count := parallel.all_gather(plan.count_texts(texts))[0]):
                for coming in chosen[num_requested : number + 1 + source.num_ahead]:
                    source.request_ahead(coming.examples)
                    num_requested += 1
                request = make_request(texts[:count])
                read = partial(source.make_batch, request)
                batches.append(plan.read(texts[:count], read).to("cpu"))
                progress.advance(count_tokens(texts[:count]), plan.reading_seconds_left())
                texts = texts[count:]
                position = behind
            if texts:
                break
    return FittedBatches(batches, plan.num_tokens, position)

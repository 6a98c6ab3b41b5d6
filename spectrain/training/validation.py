"""Validation: the acceptance of a drafter's drafts during training, on held-out conversations.

The places of a validation are fixed by the data and the target: the target answers held-out prompts
greedily, once, before the training, and every validation drafts after each token of these answers.
Shapes: C conversations, R roots, K draft depths.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.decoding.generation import Generation
from spectrain.decoding.replay import (
    RecordedTexts,
    ReplayedDrafts,
    record_answers,
    record_features,
    replay,
)
from spectrain.drafters.base import Drafter
from spectrain.models.features import Layer
from spectrain.models.target import Target
from spectrain.output.console import make_console
from spectrain.output.progress_line import ProgressLine

MIN_PLACES = 2000  # drafts that a validation judges, where the held-out data allows as many
MAX_CONVERSATIONS = 24  # conversations whose answers are drafted
# tokens of the target's own answer to each; more where there are fewer conversations
ANSWER_TOKENS = 32
MAX_ANSWER_TOKENS = 512  # tokens of an answer at most, however few conversations there are
DRAFT_DEPTH = 4  # drafts at each place, or as many as the drafter makes


@contextmanager
def evaluation_mode(drafter: Drafter) -> Iterator[None]:
    """Set the drafter to evaluation mode for a while."""
    training = drafter.training
    drafter.eval()
    try:
        yield
    finally:
        drafter.train(training)


class SelectedPrompts(NamedTuple):
    """The prompts of a validation, the source of each, and the number of tokens that the target
    answers.
    """

    prompts: list[list[int]]
    sources: list[str]
    answer_tokens: int


def find_prompt(example: Example) -> list[int]:
    """Return the tokens that the target continues: those before the first supervised one, and the
    first half of a piece of a long text, which has none.
    """
    return example.prompt or example.tokens[: len(example.tokens) // 2]


def select_prompts(
    examples: list[Example], max_length: int, sources: Sequence[str] = ()
) -> SelectedPrompts:
    """Select the prompts of a validation, for a target of this context length, and the length of
    the answers.

    Without sources all prompts have the same name.
    """
    names = sources or [""] * len(examples)
    prompts = [find_prompt(example) for example in examples]
    fitting = [
        (prompt, name)
        for prompt, name in zip(prompts, names)
        if prompt and len(prompt) + ANSWER_TOKENS <= max_length
    ]
    chosen = fitting[:MAX_CONVERSATIONS]
    longest = max((len(prompt) for prompt, _ in chosen), default=0)
    # Half more than needed, because some answers end early and some drafters make fewer drafts.
    per_text = 1.5 * MIN_PLACES / max(1, len(chosen))
    needed = 1 + math.ceil((per_text + DRAFT_DEPTH * (DRAFT_DEPTH - 1) / 2) / DRAFT_DEPTH)
    tokens = min(max(ANSWER_TOKENS, needed), MAX_ANSWER_TOKENS, max_length - longest)
    return SelectedPrompts([prompt for prompt, _ in chosen], [name for _, name in chosen], tokens)


@dataclass(frozen=True)
class HeldOutTexts:
    """The places of a run's validations: the target's answers to held-out prompts, with its
    features.
    """

    texts: RecordedTexts
    # The source of each text in a mixture; empty names otherwise.
    sources: list[str]
    layers: tuple[Layer, ...]

    @property
    def num_roots(self) -> int:
        """The number of tokens after which a drafter drafts."""
        return sum(self.texts.num_roots)

    @property
    def num_places(self) -> int:
        """The largest number of drafts that a validation judges: as many after each root as the
        answer has tokens left.
        """
        return sum(
            max(0, roots - depth) for roots in self.texts.num_roots for depth in range(DRAFT_DEPTH)
        )


@torch.no_grad()
def record_held_out(
    target: Target,
    layers: tuple[Layer, ...],
    examples: list[Example],
    sources: Sequence[str] = (),
    shows_progress: bool = False,
) -> HeldOutTexts | None:
    """Let the target answer the held-out prompts, all of them together; None where no prompt
    fits its context.
    """
    selected = select_prompts(examples, target.max_length, sources)
    if not selected.prompts:
        return None
    total = selected.answer_tokens
    line = ProgressLine("answering held-out prompts", total, make_console(), enabled=shows_progress)

    def show(generations: list[Generation]) -> None:
        done = max(len(generation.output) for generation in generations)
        line.update(done, f"{done} of {total} tokens")

    with torch.random.fork_rng(), line:
        return HeldOutTexts(
            record_answers(target, selected.prompts, total, layers, show),
            selected.sources,
            layers,
        )


class Validation(NamedTuple):
    """The measures of a validation as metrics.jsonl has them, and what each conversation adds to
    the forecast's error.
    """

    metrics: dict[str, Any]
    influences: list[float]


def measure_acceptance(drafter: Drafter, target: Target, held_out: HeldOutTexts) -> Validation:
    """Measure a drafter on the target's own greedy answers, by depth.

    Every draft before the judged one is correct. `agreement` is the share of places at which the
    most likely draft is the target's most likely token, `acceptance` the mean sum of min(p, q),
    which is how often a drawn draft is accepted, and `places` the number of places. `forecast` is
    the expected tokens per forward of a chain in greedy decoding, 1 + a_1 + a_1 a_2 + ... of the
    agreement, `forecast_interval` its 95 % interval over conversations, `forecast_sampled` the same
    sum of the acceptance, and `acceptance_length` the tokens per round of the chains that would
    draft the answers. For a mixture, `by_source` holds the same for each source. The weights
    and the random numbers of the training stay as they are.
    """
    texts = held_out.texts
    with evaluation_mode(drafter), torch.random.fork_rng():
        if drafter.capabilities.target_training is not None:
            texts = record_features(target, texts, held_out.layers)
        judged = replay(target, drafter, texts, DRAFT_DEPTH)
    metrics, influences = summarize_acceptance(judged)
    if any(held_out.sources):
        metrics["by_source"] = {}
        for source in dict.fromkeys(held_out.sources):
            rows = torch.tensor([name == source for name in held_out.sources])
            parts = {
                name: getattr(judged, name)[rows] for name in ("is_judged", "hits", "overlaps")
            }
            metrics["by_source"][source] = summarize_acceptance(replace(judged, **parts)).metrics
    return Validation(metrics, influences)


def summarize_acceptance(judged: ReplayedDrafts) -> Validation:
    """Return the measures of judged drafts."""
    rounds = judged.round_lengths()
    counts = judged.is_judged.sum((0, 1))
    reached = counts > 0
    counts = counts[reached]
    agreement, acceptance = (
        (part.sum((0, 1))[reached] / counts).tolist() for part in (judged.hits, judged.overlaps)
    )
    influences = forecast_influences(
        judged.hits.sum(1)[:, reached], judged.is_judged.sum(1)[:, reached]
    )
    forecast = 1 + sum(accumulate(agreement, mul))
    metrics = {
        "agreement": [round(share, 4) for share in agreement],
        "acceptance": [round(share, 4) for share in acceptance],
        "places": counts.tolist(),
        "acceptance_length": round(sum(rounds) / len(rounds), 4) if rounds else None,
        "forecast": round(forecast, 4),
        "forecast_interval": interval_around(forecast, influences),
        "forecast_sampled": round(1 + sum(accumulate(acceptance, mul)), 4),
        "conversations": len(influences),
    }
    return Validation(metrics, influences)


def forecast_influences(sums: Tensor, counts: Tensor) -> list[float]:
    """Return what each conversation adds to the error of the forecast, from its sums and counts [C,
    K] of places by depth.

    The places of a text are not independent, so the error is that of the conversations (the delta
    method for ratios of clusters): u_c = sum over d of dF/da_d (s_cd - a_d n_cd) / N_d.
    Conversations without a place are left out.
    """
    with_places = counts.sum(1) > 0
    sums = sums[with_places].double()
    counts = counts[with_places].double()
    totals = counts.sum(0)
    rates = sums.sum(0) / totals
    depths = range(len(rates))
    others = [
        [float(torch.cat([rates[:depth], rates[depth + 1 : last + 1]]).prod()) for last in depths]
        for depth in depths
    ]
    slopes = torch.tensor(
        [sum(products[depth:]) for depth, products in enumerate(others)], dtype=torch.float64
    )
    influences: list[float] = ((sums - rates * counts) / totals * slopes).sum(1).tolist()
    return influences


def interval_around(value: float, influences: Sequence[float]) -> list[float] | None:
    """Return the 95 % interval of a value by Student's t, from its influences [C]; None below
    two conversations.
    """
    count = len(influences)
    if count < 2:
        return None
    error = math.sqrt(count / (count - 1) * sum(influence**2 for influence in influences))
    margin = float(stdtrit(count - 1, 0.975)) * error
    return [round(value - margin, 4), round(value + margin, 4)]


def difference_interval(
    before: float, after: float, influences: tuple[Sequence[float], Sequence[float]]
) -> list[float] | None:
    """Return the 95 % interval of `after` - `before`, which were measured at the same places;
    None where it is unknown.
    """
    first, second = influences
    if len(first) != len(second):
        return None
    return interval_around(after - before, [late - early for early, late in zip(first, second)])

"""Validation: the acceptance of a drafter's drafts during training, on held-out conversations."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch

from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.decoding.teacher_forcing import TeacherForcedBuilder, run_teacher_forced
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees import Chain

MAX_CONVERSATIONS = 8  # conversations that are looked at
ANSWER_TOKENS = 32  # tokens of the target's own answer to each
DRAFT_DEPTH = 4  # drafts at each of its places, or as many as the drafter makes


@contextmanager
def evaluation_mode(drafter: Drafter) -> Iterator[None]:
    """Set the drafter to evaluation mode for a while."""
    training = drafter.training
    drafter.eval()
    try:
        yield
    finally:
        drafter.train(training)


def select_prompts(examples: list[Example], max_length: int) -> list[list[int]]:
    """Select the prompts of a validation, for a target of this context length."""
    return [example.prompt for example in examples if len(example.prompt) + ANSWER_TOKENS <= max_length][:MAX_CONVERSATIONS]


class ValidationRows(NamedTuple):
    """The largest numbers of rows that a validation runs: it drafts answers with no draft accepted, then with all accepted."""

    num_prompt: int  # prompt tokens; only the last one's logits are needed
    num_verified: int
    num_drafted: int


def count_validation_rows(prompts: list[list[int]]) -> ValidationRows:
    """Count the rows of a validation over prompts from `select_prompts`."""
    rounds = len(prompts) * (ANSWER_TOKENS - 1 + math.ceil((ANSWER_TOKENS - 1) / (DRAFT_DEPTH + 1)))
    return ValidationRows(2 * sum(map(len, prompts)), rounds * (DRAFT_DEPTH + 1), rounds * DRAFT_DEPTH)


def measure_acceptance(
    drafter: Drafter, target: Target, examples: list[Example], sources: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure a drafter on the target's own greedy answers to the prompts of these examples, by depth.

    Every draft before the judged one is correct. `agreement` is the share of positions at which the most likely draft is the
    target's most likely token, `acceptance` the mean sum of min(p, q), which is how often a drawn draft is accepted, and
    `places` the number of positions. `forecast` is the expected tokens per forward of a chain, 1 + a_1 + a_1 a_2 + ..., and
    `acceptance_length` that of the chains that drafted the answers. With `sources`, the source of each example, `by_source`
    holds the same for the prompts of each source. The weights and the random numbers of the training stay as they are.
    """
    prompts = select_prompts(examples, target.max_length)
    names = select_sources(examples, target.max_length, sources)
    with evaluation_mode(drafter), torch.random.fork_rng():
        answers = [decode(target, [prompt], Greedy(), ANSWER_TOKENS, drafter, Chain(DRAFT_DEPTH))[0] for prompt in prompts]
        groups = {source: [answer for answer, name in zip(answers, names) if name == source] for source in dict.fromkeys(names)}
        # With every draft before a token correct.
        forced = {
            source: run_teacher_forced(
                target, drafter, Chain(DRAFT_DEPTH), Greedy(), [answer.prompt for answer in group], ANSWER_TOKENS, group
            )
            for source, group in groups.items()
        }
    result = summarize_acceptance([*forced.values()], answers)
    if sources:
        result["by_source"] = {source: summarize_acceptance([forced[source]], group) for source, group in groups.items()}
    return result


def select_sources(examples: list[Example], max_length: int, sources: Sequence[str]) -> list[str]:
    """Return the source of each prompt from `select_prompts`; without sources all have the same name."""
    names = sources or [""] * len(examples)
    fitting = [name for example, name in zip(examples, names) if len(example.prompt) + ANSWER_TOKENS <= max_length]
    return fitting[:MAX_CONVERSATIONS]


def summarize_acceptance(forced: list[TeacherForcedBuilder], answers: list[Generation]) -> dict[str, Any]:
    """Return the measures of answers that were drafted for in one or more groups."""
    rounds = [emitted for answer in answers for emitted in answer.complete_round_lengths]
    counts, hits, overlaps = (
        [sum(values) for values in zip(*(getattr(group, name) for group in forced))]
        for name in ("counts", "top1_sums", "overlap_sums")
    )
    acceptance = [total / count for total, count in zip(overlaps, counts) if count]
    return {
        "agreement": [round(total / count, 4) for total, count in zip(hits, counts) if count],
        "acceptance": [round(share, 4) for share in acceptance],
        "places": [count for count in counts if count],
        "acceptance_length": round(sum(rounds) / len(rounds), 4) if rounds else None,
        "forecast": round(1 + sum(accumulate(acceptance, mul)), 4),
    }

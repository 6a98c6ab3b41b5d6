"""How much of its drafts would be kept, while a drafter trains: on conversations that it does not train on."""

import math
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch

from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.calibration import run_forced
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees import Chain

from .on_policy import evaluating

MOST = 8  # conversations that are looked at
ANSWER = 32  # tokens of the target's own answer to each
DEPTH = 4  # drafts at each of its places, or as many as the drafter makes


def looked_at(examples: list[Example], longest: int) -> list[list[int]]:
    """The prompts that a look asks for answers to, of a target for texts so long."""
    return [example.prompt for example in examples if len(example.prompt) + ANSWER <= longest][:MOST]


class Looked(NamedTuple):
    """Rows that a look runs, at most: an answer is drafted and nothing of it kept, then drafted again and all is."""

    read: int  # of prompts, whose logits nobody asks for but the last one's
    verified: int
    drafted: int


def rows_of_a_look(prompts: list[list[int]]) -> Looked:
    """Of these prompts, as `looked_at` gives them."""
    rounds = len(prompts) * (ANSWER - 1 + math.ceil((ANSWER - 1) / (DEPTH + 1)))
    return Looked(2 * sum(map(len, prompts)), rounds * (DEPTH + 1), rounds * DEPTH)


def held_out_acceptance(drafter: Drafter, target: Target, examples: list[Example]) -> dict[str, Any]:
    """Over the target's own answers to the prompts of these examples, by depth, with every draft before it right: `agreement`,
    how often the most likely draft is the target's most likely token, and `acceptance`, the mean sum of min(p, q), how often
    a drawn draft is kept, over so many `places`. `forecast` is the tokens a forward that the acceptance promises a chain:
    1 + a_1 + a_1 a_2 + ... `acceptance_length` are those of the chains that the answers were really drafted with, greedily.

    Nothing learns from it, and the random numbers of the training stay as they are.
    """
    prompts = looked_at(examples, target.max_length)
    with evaluating(drafter), torch.random.fork_rng():
        answers = [decode(target, [prompt], Greedy(), ANSWER, drafter, Chain(DEPTH))[0] for prompt in prompts]
        forced = run_forced(target, drafter, Chain(DEPTH), Greedy(), prompts, ANSWER, answers)
    rounds = [emitted for answer in answers for emitted in answer.whole_rounds]
    acceptance = forced.overlap
    return {
        "agreement": [round(share, 4) for share in forced.first],
        "acceptance": [round(share, 4) for share in acceptance],
        "places": [count for count in forced.counts if count],
        "acceptance_length": round(sum(rounds) / len(rounds), 4) if rounds else None,
        "forecast": round(1 + sum(accumulate(acceptance, mul)), 4),
    }

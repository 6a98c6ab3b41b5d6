"""Which rounds of a server are those of a decoding of ours, one by one.

Rates alone hide faults: a drafter whose queries are permuted keeps almost as many drafts. Rounds
are compared as far as both answers have the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.eval.identity import first_difference
from spectrain.eval.kinds import round_starts
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder


@dataclass(frozen=True)
class RoundAgreement:
    """How far a server's rounds are those of a decoding of ours."""

    # Prompts whose rounds are all equal, and prompts compared.
    equal: int
    checked: int
    # Rounds with the same start and the same length, of those of the longer list.
    shared_rounds: int
    rounds: int
    # Answers with the same tokens.
    same_outputs: int
    # Smallest position in a sequence, prompt included, at which a round differs; None where all are
    # equal.
    first_difference: int | None

    @property
    def share(self) -> float:
        return self.shared_rounds / max(1, self.rounds)


def compare_rounds(served: Sequence[Generation], own: Sequence[Generation]) -> RoundAgreement:
    """Compare a server's generations with ours of the same prompts."""
    pairs = [list_rounds(left, right) for left, right in zip(served, own, strict=True)]
    differing = [pair.position for pair in find_differing(served, own)]
    return RoundAgreement(
        sum(left == right for left, right in pairs),
        len(pairs),
        sum(len(left & right) for left, right in pairs),
        sum(max(len(left), len(right)) for left, right in pairs),
        sum(left.output == right.output for left, right in zip(served, own)),
        min(differing, default=None),
    )


def list_rounds(
    served: Generation, own: Generation
) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return (start, length) of the complete rounds of both, before the first token that differs.

    Without those at the end, in which some engines draft only as many tokens as fit.
    """
    end = first_difference(served.output, own.output)
    shared = len(served.output) if end is None else end
    last = len(served.output) - max(served.depths, default=0)
    left, right = (
        {(start, n) for start, n in round_starts(each) if start + n <= shared and start < last}
        for each in (served, own)
    )
    return left, right


@dataclass(frozen=True)
class DifferingPair:
    """A server's answer and ours to one prompt, and the first round in which they differ."""

    served: Generation
    own: Generation
    # Tokens of the answer before that round.
    start: int
    # Tokens of that round in each; None where it is not complete.
    served_length: int | None
    own_length: int | None

    @property
    def position(self) -> int:
        """Return the position of the round in the sequence, prompt included."""
        return len(self.served.prompt) + self.start


def find_differing(served: Sequence[Generation], own: Sequence[Generation]) -> list[DifferingPair]:
    """Return the answers whose rounds differ, in the order of the prompts."""
    pairs = []
    for left, right in zip(served, own, strict=True):
        served_rounds, own_rounds = list_rounds(left, right)
        if served_rounds != own_rounds:
            start = min(start for start, _ in served_rounds ^ own_rounds)
            pairs.append(
                DifferingPair(
                    left, right, start, dict(served_rounds).get(start), dict(own_rounds).get(start)
                )
            )
    return pairs


def decode_prompts(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    served: Sequence[Generation],
    max_new_tokens: int,
) -> list[Generation]:
    """Decode the prompts of a server's answers greedily, one at a time."""
    prompts = [generation.prompt for generation in served]
    return [
        decode(target, [prompt], Greedy(), max_new_tokens, drafter, builder)[0]
        for prompt in prompts
    ]

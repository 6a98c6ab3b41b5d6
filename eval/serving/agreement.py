"""Whether a server drafts as our own chain does: round by round, with the likely cause where it does not.

Rates alone hide faults: a drafter whose queries are permuted keeps almost as many drafts. Rounds are compared as far as both
answers have the same tokens. Every cause is tested by really decoding as the server would with that fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.eval.identity import first_difference
from spectrain.eval.kinds import round_starts
from spectrain.eval.metrics import Turn
from spectrain.models.fast import lowest_precision
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain.trees.base import TreeBuilder

# Prompts on which causes are tested, those that agree least.
NUM_TESTED = 8
# Share of the disagreeing rounds that a cause must explain.
MIN_EXPLAINED = 0.7


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
    # Smallest position in a sequence, prompt included, at which a round differs; None where all are equal.
    first_difference: int | None

    @property
    def share(self) -> float:
        return self.shared_rounds / max(1, self.rounds)


def compare_rounds(served: Sequence[Generation], own: Sequence[Generation]) -> RoundAgreement:
    """Compare a server's generations with ours of the same prompts."""
    pairs = [list_rounds(left, right) for left, right in zip(served, own, strict=True)]
    differing = [
        len(generation.prompt) + min(start for start, _ in left ^ right)
        for generation, (left, right) in zip(served, pairs)
        if left != right
    ]
    return RoundAgreement(
        sum(left == right for left, right in pairs),
        len(pairs),
        sum(len(left & right) for left, right in pairs),
        sum(max(len(left), len(right)) for left, right in pairs),
        sum(left.output == right.output for left, right in zip(served, own)),
        min(differing, default=None),
    )


def list_rounds(served: Generation, own: Generation) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return (start, length) of the complete rounds of both, before the first token that differs.

    Without those at the end, in which some engines draft only as many tokens as fit.
    """
    end = first_difference(served.output, own.output)
    shared = len(served.output) if end is None else end
    last = len(served.output) - max(served.depths, default=0)
    left, right = (
        {(start, n) for start, n in round_starts(each) if start + n <= shared and start < last} for each in (served, own)
    )
    return left, right


@dataclass(frozen=True)
class Cause:
    """A fault that may explain a disagreement, and the decoding that a server with this fault would do."""

    name: str
    # Completes "the server decodes with ..".
    description: str
    remedy: str
    load: Callable[[], tuple[Target, Drafter]]


@dataclass(frozen=True)
class TestedCause:
    """A cause with the agreement of its decoding with the server's."""

    name: str
    description: str
    remedy: str
    agreement: RoundAgreement

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "agreement": {**asdict(self.agreement), "share": round(self.agreement.share, 4)}}


class OwnChain:
    """Our own chain with a run's drafter as it was loaded, not packed to 8 bits."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        causes: Callable[[int], Iterator[Cause]],
        make_builder: Callable[[int], TreeBuilder] = Chain,
    ) -> None:
        self.target, self.drafter, self.causes, self.make_builder = target, drafter, causes, make_builder
        self.console = Console(stderr=True)

    def compare(self, turns: Sequence[Turn], max_new_tokens: int) -> dict[str, Any]:
        """Decode the prompts of a server's answers; return the entry `own_chain` of summary.json."""
        served = [turn.drafted for turn in turns]
        depth = max((depth for generation in served for depth in generation.depths), default=0)
        if not depth:
            return {"checked": 0}
        own = decode_prompts(self.target, self.drafter, self.make_builder(depth), served, max_new_tokens)
        agreement = compare_rounds(served, own)
        rounds = [length for generation in own for length in generation.complete_round_lengths]
        result = {
            **asdict(agreement),
            "share": round(agreement.share, 4),
            "acceptance_length": round(sum(rounds) / max(1, len(rounds)), 4),
            "depth": depth,
            "drafter_dtype": lowest_precision(self.drafter),
        }
        if agreement.equal == agreement.checked:
            return result
        self.console.print(f"{agreement.equal} of {agreement.checked} prompts have our chain's rounds; testing likely causes")
        tested = self.test_causes(served, own, depth, max_new_tokens)
        best = max(tested, key=lambda cause: cause.agreement.share, default=None)
        base = compare_rounds(*select_worst(served, own))
        is_found = best is not None and best.agreement.share > base.share + MIN_EXPLAINED * (1 - base.share)
        return {
            **result,
            "cause": best.to_json() if best is not None and is_found else None,
            "tested": [cause.to_json() for cause in tested],
        }

    def test_causes(
        self, served: Sequence[Generation], own: Sequence[Generation], depth: int, max_new_tokens: int
    ) -> list[TestedCause]:
        """Decode the prompts that agree least with one cause after the other, up to one that explains every round."""
        worst, _ = select_worst(served, own)
        position = compare_rounds(served, own).first_difference
        tested = []
        for cause in self.causes(position or 0):
            generations = decode_prompts(*cause.load(), self.make_builder(depth), worst, max_new_tokens)
            agreement = compare_rounds(worst, generations)
            tested.append(TestedCause(cause.name, cause.description, cause.remedy, agreement))
            if agreement.equal == agreement.checked:
                break
        return tested


def select_worst(served: Sequence[Generation], own: Sequence[Generation]) -> tuple[list[Generation], list[Generation]]:
    """Return the pairs whose rounds agree least, at most `NUM_TESTED`."""
    pairs = sorted(zip(served, own), key=lambda pair: compare_rounds([pair[0]], [pair[1]]).share)[:NUM_TESTED]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def decode_prompts(
    target: Target, drafter: Drafter, builder: TreeBuilder, served: Sequence[Generation], max_new_tokens: int
) -> list[Generation]:
    """Decode the prompts of a server's answers greedily, one at a time."""
    prompts = [generation.prompt for generation in served]
    return [decode(target, [prompt], Greedy(), max_new_tokens, drafter, builder)[0] for prompt in prompts]

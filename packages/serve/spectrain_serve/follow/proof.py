"""The proof: a candidate against the drafter that serves, on the same prompts, with intervals, and
the rule of promotion.

Both decode every prompt in this project's engine with the chain that the server drafts, whose
rounds are those of the server. The compared value is tokens per forward. Shapes: P prompts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from spectrain.config.build import register_resolvers
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.eval.intervals import Interval, interval
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.runs.drafters import load_for_decoding
from spectrain.trees import Chain

from .train_candidate import read_examples

SIGNS = (1, -1, -1, 1)
LEAST_PROMPTS = 8
"""Fewest prompts of a comparison that decides anything."""


@dataclass(frozen=True)
class PairedGain:
    """Tokens per forward of the candidate over those of the serving drafter, on the same
    prompts.
    """

    num_prompts: int
    serving: float
    candidate: float
    # Relative gain, -0.02 for a loss of 2 %, with its 95 % interval; None where there are too few
    # prompts.
    gain: float
    interval: Interval
    # Answers of both that are equal, which all should be.
    num_equal: int

    @property
    def low(self) -> float:
        """Return the lower end of the interval, or minus infinity without one."""
        return float("-inf") if self.interval is None else self.interval[0]


@dataclass(frozen=True)
class PromotionProof:
    """The comparison on recent and on old conversations, and what follows from it."""

    new: PairedGain
    old: PairedGain
    is_promoted: bool
    reason: str


def decide_promotion(new: PairedGain, old: PairedGain, tolerance: float) -> PromotionProof:
    """Promote a candidate only if new traffic gains with its lower bound above 0, and the lower
    bound of old traffic is above minus the tolerance."""
    reason = None
    if min(new.num_prompts, old.num_prompts) < LEAST_PROMPTS:
        reason = (
            f"too few prompts: {new.num_prompts} new and {old.num_prompts} old, and "
            f"{LEAST_PROMPTS} are needed"
        )
    elif not new.low > 0:
        reason = (
            f"the gain on new traffic, {new.gain:+.1%}, is not certain: its interval begins "
            f"at {new.low:+.1%}"
        )
    elif not old.low > -tolerance:
        reason = (
            f"old traffic may lose {-old.low:.1%} ({old.gain:+.1%}), which is more than the "
            f"tolerance of {tolerance:.1%}"
        )
    elif new.num_equal < new.num_prompts // 2:
        reason = (
            f"only {new.num_equal} of {new.num_prompts} answers are equal, so the target does "
            "not verify the drafts"
        )
    if reason is not None:
        return PromotionProof(new, old, False, reason)
    return PromotionProof(
        new,
        old,
        True,
        f"new traffic gains {new.gain:+.1%}, at least {new.low:+.1%}; old has {old.gain:+.1%}",
    )


def compare_rounds(serving: Sequence[Generation], candidate: Sequence[Generation]) -> PairedGain:
    """Compare the decodings of the same prompts by two drafters."""
    columns = np.array(
        [[*count_tokens(new), *count_tokens(old)] for old, new in zip(serving, candidate)],
        dtype=np.float64,
    )
    columns = columns.reshape(-1, 4)
    sums = columns.sum(0)
    num_equal = sum(old.output == new.output for old, new in zip(serving, candidate))
    if not sums.all():
        return PairedGain(len(columns), 0.0, 0.0, 0.0, None, num_equal)
    ratio = interval(columns, SIGNS)
    old_rate = sums[2] / sums[3]
    new_rate = sums[0] / sums[1]
    ends = None if ratio is None else [round(end - 1, 4) for end in ratio]
    return PairedGain(
        len(columns),
        float(old_rate),
        float(new_rate),
        float(new_rate / old_rate - 1),
        ends,
        num_equal,
    )


def count_tokens(generation: Generation) -> tuple[int, int]:
    """Return the tokens that the rounds of an answer emitted, and the number of rounds."""
    return sum(generation.round_lengths), len(generation.round_lengths)


def decode_all(
    target: Target, drafter: Drafter, examples: Sequence[Example], depth: int, limit: int
) -> list[Generation]:
    """Decode the prompts of conversations, each by itself as the server does."""
    builder = Chain(depth)
    return [
        decode(
            target,
            [example.prompt],
            Greedy(),
            max(2, min(limit, target.max_length - len(example.prompt) - 1)),
            drafter,
            builder,
        )[0]
        for example in examples
    ]


def prove_candidate(folder: Path) -> PromotionProof:
    """Compare the candidate of a folder with the serving drafter, by the folder's plan.json and
    its conversations.
    """
    plan = json.loads((folder / "plan.json").read_text())
    register_resolvers()
    spec = RunSpec.from_nodes(plan["spec"])
    target: Target = spec.target.build()
    target.pack_weights()
    sets = {name: read_examples(folder / f"prove-{name}.jsonl", target) for name in ("new", "old")}
    results: dict[str, dict[str, list[Generation]]] = {name: {} for name in sets}
    for role, path in (
        ("serving", plan["serving"]),
        ("candidate", str(folder / "run" / "drafter")),
    ):
        drafter = load_for_decoding(Path(path), target)
        for name, examples in sets.items():
            results[name][role] = decode_all(
                target, drafter, examples, plan["depth"], plan["prove_tokens"]
            )
    new, old = (
        compare_rounds(results[name]["serving"], results[name]["candidate"])
        for name in ("new", "old")
    )
    proof = decide_promotion(new, old, plan["tolerance"])
    write_text(folder / "proof.json", json.dumps(asdict(proof), indent=2) + "\n")
    return proof


def read_proof(folder: Path) -> PromotionProof:
    """Return the proof of a candidate."""
    content = json.loads((folder / "proof.json").read_text())
    return PromotionProof(
        PairedGain(**content["new"]),
        PairedGain(**content["old"]),
        content["is_promoted"],
        content["reason"],
    )


if __name__ == "__main__":
    os.nice(int(os.environ.get("SPECTRAIN_FOLLOW_NICE", "10")))
    prove_candidate(Path(sys.argv[1]))

"""Whether rounding explains that a server drafted another token than our own chain.

Engines add the same float32 numbers in different orders, so that two logits that are almost equal
may change places. Then one draft token differs, and one round.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees.base import Prefix, TreeBuilder, WrappedBuilder
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import TokenTree

from .agreement import DifferingPair

# Two float32 logits that differ by less may change places in another engine. The one answer of
# llama.cpp that parted from ours did so at a gap of 0.00017; the bound leaves room for larger
# models.
MAX_GAP = 0.001
# A fault changes the rounds of most prompts; where more differ than these, ties do not explain
# them.
MAX_PAIRS = 4


@dataclass(frozen=True)
class DraftGap:
    """The draft token in which a server's round and ours differ, and how nearly our drafter
    chose another one.
    """

    # Position of the round in the sequence, prompt included, and the draft token in the round, from
    # 1.
    position: int
    draft: int
    # Tokens of the round, the bonus token included.
    served_length: int
    own_length: int
    # Best log-probability of our drafter less its second best one.
    gap: float

    @property
    def is_tie(self) -> bool:
        return self.gap < MAX_GAP

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gap": float(f"{self.gap:.3g}")}


class RecordedRollout(Rollout):
    """Wraps a rollout of one chain, and records the gap between the two best log-probabilities
    of each draft step.
    """

    def __init__(self, inner: Rollout) -> None:
        self.inner = inner
        self.draft_ids, self.depth_limit = inner.draft_ids, inner.depth_limit
        self.gaps: list[float] = []

    def start(self) -> Tensor:
        return self._record_gap(self.inner.start())

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._record_gap(self.inner.extend(tokens, parents))

    def _record_gap(self, log_probs: Tensor) -> Tensor:
        best = torch.topk(log_probs[0, 0].double(), 2).values
        self.gaps.append(float(best[0] - best[1]))
        self.stop_mask, self.accept_probs = self.inner.stop_mask, self.inner.accept_probs
        return log_probs


class GapRecorder(WrappedBuilder):
    """Builds the chains of another builder, and records the gaps of each round."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        self.rounds: list[list[float]] = []

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        if draft.rollout is not None:
            recorded = RecordedRollout(draft.rollout)
            self.rounds.append(recorded.gaps)
            draft = replace(draft, rollout=recorded)
        return self.builder.grow(prefix, draft)


def measure_gap(
    target: Target, drafter: Drafter, builder: TreeBuilder, pair: DifferingPair
) -> DraftGap | None:
    """Draft the first differing round of two answers again; return None where no single draft
    token is known to differ.
    """
    if not builder.traits.is_chain or pair.served_length is None or pair.own_length is None:
        return None
    context = pair.served.prompt + pair.served.output[: pair.start - 1]
    recorder = GapRecorder(builder)
    # The prompt's own token and one round.
    decode(target, [context], Greedy(), 2, drafter, recorder)
    # The shorter round rejected the first draft token that differs.
    index = min(pair.served_length, pair.own_length) - 1
    if not recorder.rounds or index >= len(recorder.rounds[0]):
        return None
    return DraftGap(
        pair.position, index + 1, pair.served_length, pair.own_length, recorder.rounds[0][index]
    )

"""Groups of drafts after one text, with rewards of whole windows (PPOW, Jiang and Sun, 2026, arXiv
2605.14978).

Shapes: G drafts of a group, N nodes, V draft vocabulary.
"""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import NamedTuple

import torch

from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import EagerRunner, decode_steps, make_request
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees.base import RoundResult, TreeBuilder, WrappedBuilder
from spectrain_research.shared.draft_replay import DraftWindow

MIN_SPREAD = 1e-6  # of rewards, added to their standard deviation


class DrawnDraft(NamedTuple):
    """A drawn draft, the number of its tokens that were accepted, and the overlap sum min(p, q)
    at each of them.
    """

    tokens: list[int]
    num_accepted: int
    overlaps: list[float]


class DrawnDraftRecorder(WrappedBuilder):
    """Records the drafts of every round, which their own q was drawn from."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        self.drafts: list[DrawnDraft] = []

    def observe(self, round: RoundResult) -> None:
        self.builder.observe(round)
        tree = round.tree
        assert tree.q is not None, "drafts of a policy are drawn"
        p = round.logits.float().softmax(-1)
        # The target's probabilities of the tokens that can be drafted.
        p = p[..., : tree.q.shape[-1]] if tree.draft_ids is None else p[..., tree.draft_ids]
        overlaps = torch.minimum(p, tree.q).sum(-1)
        columns = (tree.tokens, tree.valid, overlaps, round.counts)
        for tokens, valid, row_overlaps, count in zip(*(part.tolist() for part in columns)):
            draft = [token for token, is_valid in zip(tokens[1:], valid[1:]) if is_valid]
            self.drafts.append(DrawnDraft(draft, count - 1, row_overlaps[: len(draft)]))


def window_reward(draft: DrawnDraft, draft_cost: float) -> float:
    """Return k / (1 + c k) of k accepted tokens, or, where none is accepted, the smallest overlap
    of the window.

    The second part distinguishes rejected drafts: it rises as q comes close to p everywhere in the
    window.
    """
    if draft.num_accepted:
        return draft.num_accepted / (1 + draft_cost * draft.num_accepted)
    return min(draft.overlaps, default=0.0)


def normalize_rewards(rewards: list[float]) -> list[float]:
    """Return the rewards of a group minus their mean, divided by their standard deviation."""
    center = fmean(rewards)
    spread = pstdev(rewards)
    return [(reward - center) / (spread + MIN_SPREAD) for reward in rewards]


def draw_window_group(
    target: Target,
    drafter: Drafter,
    chain: TreeBuilder,
    text: list[int],
    count: int,
    draft_cost: float,
) -> list[DraftWindow]:
    """Draw `count` drafts after a text, its root last, and weigh each by its reward relative to the
    group's.

    The window of a draft ends with its first rejected token, and where none is accepted with the
    draft: its reward depends on no other tokens. Only the window carries loss. A text that ends at
    its root has no drafts.
    """
    recorder = DrawnDraftRecorder(chain)
    request = make_request(
        target, [text[:-1]] * count, chain.depth + 2, list(range(count)), ignore_eos=True
    )
    steps = decode_steps(EagerRunner(target, Greedy(), drafter, recorder), request)
    # The first step emits the root, the second one runs a round.
    for _ in range(2):
        next(steps, None)
    drafts = [draft for draft in recorder.drafts[:count] if draft.tokens]
    if len(drafts) < 2:
        return []
    windows = []
    for draft, advantage in zip(
        drafts, normalize_rewards([window_reward(draft, draft_cost) for draft in drafts])
    ):
        tokens = draft.tokens[: draft.num_accepted + 1] if draft.num_accepted else draft.tokens
        example = Example(text + tokens, [False] * len(text) + [True] * len(tokens))
        windows.append(
            DraftWindow(example, [0.0] * len(text) + [advantage] * len(tokens), len(text))
        )
    return windows

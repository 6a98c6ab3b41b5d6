"""A router that chooses a drafter for every text of a batch (SPIN, Chen et al., 2025, arXiv
2503.15921).

Shapes: B batch, G texts of a group, K drafters, D depth, F frontier nodes, P tokens of a round, V
vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spectrain.config.values import Count
from spectrain.drafters.base import Drafter, drafting_cost
from spectrain.drafters.capabilities import Capabilities, DraftingCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.copy_rollout import as_rollout
from spectrain_research.shared.nesting import build_several, union_layers

from .arms import PRIOR_RATE, Stopwatch
from .groups import GroupedRollout, GroupPart, select_context

NUM_TIMED_ROUNDS = 9  # rounds whose median time counts: other work may slow half of them
PRIOR_WEIGHT = 4.0  # observations of its own that the rate over all texts counts for in a text
NO_GROUP = -1  # the drafter of a text that is done


class RowRouterCost(DraftingCost):
    def extra_nodes(self, builder: TreeBuilder) -> int:
        return int(
            max(drafting_cost(drafter).extra_nodes(builder) for drafter in self.drafter.inner)
        )

    def num_passes(self, depth: float) -> float:
        return float(
            sum(drafting_cost(drafter).num_passes(depth) for drafter in self.drafter.inner)
        )


class RowRouter(Drafter):
    """Every text has the drafter that promises it most; texts of one drafter are a batch of their
    own.

    Each drafter drafts for its group of texts only, all groups' drafts are one batch of trees, and
    the target verifies them in one forward. A text and a drafter are an arm of a bandit: of each
    depth the accepted and rejected drafts are counted, and `switch_every` rounds later every text
    takes the drafter with the largest expected tokens per second, for rates drawn from Beta
    distributions whose prior is the drafter's rate over all texts. Before any of that every drafter
    is timed once.

    A drafter whose group changed reads the texts of its new group from their beginning, as a
    prompt: this is the cost of a change, which `switch_every` bounds. Until then the features of
    all committed tokens are kept.
    """

    saved = SavedFiles(inner=("inner",))
    capabilities = Capabilities(nestable=False, cost=RowRouterCost)

    def __init__(
        self,
        target: Target,
        # Drafters to choose from: run folders, drafter directories or choices, alone or with
        # settings; null uses ngram and causal.
        inner: list[Any] | None = None,
        # Number of rounds from one choice of the drafters to the next.
        switch_every: Count = 8,
        # Number of choices over which the counts of accepted and rejected drafts fade.
        memory: Count = 8,
        # Seed of the random choices.
        seed: int = 0,
    ) -> None:
        super().__init__()
        built = build_several(inner, target, "choose from")
        self.inner = nn.ModuleList([drafter for drafter, _ in built]).requires_grad_(False)
        self.saved = replace(
            self.saved, settings={"inner": [description for _, description in built]}
        )
        self.layers = union_layers([drafter for drafter, _ in built])
        self.switch_every = switch_every
        self.fade = 1 - 1 / (memory + 1)
        self.rng = np.random.default_rng(seed)
        self.clock: Callable[[], float] = time.perf_counter
        self.draft_seconds = [deque[float](maxlen=NUM_TIMED_ROUNDS) for _ in built]
        self.verify_seconds: deque[float] = deque(maxlen=NUM_TIMED_ROUNDS)
        self.assigned: list[int] = []  # the drafter of each text
        self.groups: list[list[int]] = [[] for _ in built]  # the texts that each drafter has read
        # drafts of each group since its drafter read its texts from their beginning
        self.num_drafts = [0] * len(built)
        # features of all committed tokens, by round
        self.history: list[tuple[Features, Tensor]] = []
        self.parts: list[GroupPart] = []  # of this round
        # rounds of this decoding, and changes of a text's drafter
        self.num_rounds = self.num_switches = 0
        self.tree: TokenTree | None = None

    def draft(self, context: Context) -> Draft:
        if context.begins:
            self.history = []
            self.num_rounds = 0
            self.assigned = [NO_GROUP] * len(context.root)
            self.groups = [[] for _ in self.inner]
            self.hits = np.zeros((len(context.root), len(self.inner), context.builder.depth))
            self.misses = np.zeros_like(self.hits)
        self.history.append((context.new_features, context.num_new))
        if self.num_rounds % self.switch_every == 0:
            self._assign_drafters(context)
        self.num_rounds += 1
        self.parts = [
            self._draft_group(number, context)
            for number in range(len(self.inner))
            if number in self.assigned
        ]
        return Draft(GroupedRollout(self.parts, len(context.root), context.target.head.vocab_size))

    def _assign_drafters(self, context: Context) -> None:
        """Choose the drafter of every text that is not done."""
        self.hits = self.hits * self.fade
        self.misses = self.misses * self.fade
        untimed = [number for number, seconds in enumerate(self.draft_seconds) if not seconds]
        before = self.assigned
        self.assigned = [NO_GROUP] * len(before)
        for row, is_active in enumerate(context.active.tolist()):
            if is_active:
                self.assigned[row] = (
                    untimed[row % len(untimed)] if untimed else self._pick_drafter(row)
                )
        self.num_switches += sum(
            NO_GROUP not in pair and pair[0] != pair[1] for pair in zip(before, self.assigned)
        )

    def _pick_drafter(self, row: int) -> int:
        """Return the drafter of a text with the most tokens per second, for rates drawn from
        their posteriors.
        """
        speeds = []
        for number, seconds in enumerate(self.draft_seconds):
            all_hits = self.hits[:, number].sum(0)
            all_misses = self.misses[:, number].sum(0)
            prior = (all_hits + PRIOR_RATE) / (all_hits + all_misses + 1)
            accepted = self.hits[row, number] + PRIOR_WEIGHT * prior
            rates = self.rng.beta(accepted, self.misses[row, number] + PRIOR_WEIGHT * (1 - prior))
            speeds.append(
                (1 + rates.cumprod().sum())
                / max(median(seconds) + median(self.verify_seconds), 1e-9)
            )
        return int(np.argmax(speeds))

    def _draft_group(self, number: int, context: Context) -> GroupPart:
        """Let a drafter read what is new in its texts, or all of them if they changed, and
        draft.
        """
        rows = [row for row, drafter in enumerate(self.assigned) if drafter == number]
        index = torch.tensor(rows, device=context.tokens.device)
        parts = [(context.new_features, context.num_new)]
        if rows != self.groups[number]:
            self.groups[number], self.num_drafts[number], parts = rows, 0, self.history
        drafter = self.inner[number]
        stopwatch = Stopwatch(self.clock, context.target.device)
        with stopwatch:
            view = select_context(context, index, parts, drafter.layers, self.num_drafts[number])  # type: ignore[arg-type]
            rollout = as_rollout(drafter.draft(view), view)  # type: ignore[operator]
        self.num_drafts[number] += 1
        return GroupPart(number, index, rollout, stopwatch)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        self.tree = tree
        stopwatch = Stopwatch(self.clock, context.target.device)
        with stopwatch:
            features = context.verify(tree)
        self.verify_seconds.append(stopwatch.seconds)
        return features

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        assert self.tree is not None
        self._count_drafts(context, accepted, self.tree)
        for part in self.parts:
            drafter: Any = self.inner[part.number]
            # Reading a new group is a prompt's time and no draft's.
            if self.num_drafts[part.number] > 1 or not self.draft_seconds[part.number]:
                self.draft_seconds[part.number].append(part.stopwatch.seconds)
            new = [(context.new_features, context.num_new)]
            view = select_context(
                context, part.rows, new, drafter.layers, self.num_drafts[part.number]
            )
            chosen = AcceptedPath(
                accepted.path[part.rows], accepted.counts[part.rows], accepted.bonus[part.rows]
            )
            drafter.commit(view, chosen)
        self.parts = []
        self.tree = None

    def _count_drafts(self, context: Context, accepted: AcceptedPath, tree: TokenTree) -> None:
        """Count, by text and depth, drafts that were accepted, and the first one that was not."""
        depths = (tree.depths * (tree.valid & tree.can_emit)).amax(1).tolist()
        for row, (drafted, count, emitted) in enumerate(
            zip(depths, accepted.counts.tolist(), context.num_new.tolist())
        ):
            if emitted and self.assigned[row] != NO_GROUP:
                number = self.assigned[row]
                num_accepted = count - 1
                self.hits[row, number, :num_accepted] += 1
                self.misses[row, number, num_accepted : min(drafted, num_accepted + 1)] += 1

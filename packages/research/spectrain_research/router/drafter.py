"""A router between several drafters: the fastest one drafts (Not-a-Bandit, 2025), or all of them
vote (Minions, 2024).

Shapes: B batch, K drafters, D depth, P tokens of a round, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, Literal

import numpy as np
from torch import nn

from spectrain.drafters.base import Drafter, drafting_cost
from spectrain.drafters.capabilities import Capabilities, DraftingCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.nesting import build_several, union_layers

from .arms import Arm, Hedge, Stopwatch
from .voting import VotingRollout

MAX_UNREAD = 64  # tokens that a drafter may leave unread: reading them needs cache slots
NUM_TIMED_ROUNDS = 9  # rounds whose median time counts: other work may slow half of them
NUM_TRIALS = 4  # rounds that every drafter drafts at the start, to be timed


class RouterCost(DraftingCost):
    def extra_nodes(self, builder: TreeBuilder) -> int:
        return MAX_UNREAD + max(
            drafting_cost(drafter).extra_nodes(builder) for drafter in self.drafter.inner
        )

    def num_passes(self, depth: float) -> float:
        return max(
            float(drafting_cost(drafter).num_passes(depth)) for drafter in self.drafter.inner
        )


class DrafterRouter(Drafter):
    """The drafter with the most expected tokens per second drafts a round; the others are idle.

    by=hedge (Not-a-Bandit) needs no exploration. Every `score_every`-th round all drafters read the
    new text, which they would have to read before their next draft, and each is teacher-forced
    along the tokens that the round emits, in one step where possible. So all are scored on the same
    text. Exponential weights over the summed gains of these rounds are the probabilities with which
    a drafter is picked. A gain is the expected tokens per second as a share of the best drafter's:
    those of a chain with the observed acceptance rates, over the median time of its rounds.

    by=bandit scores only the drafter of a round, and draws acceptance rates from Beta posteriors,
    so that drafters with few rounds are explored (SPIN and other bandits). by=vote runs all of
    them: a token's share of q is the weight of the drafters whose first choice it is, with Hedge's
    weights (Minions' majority).
    """

    saved = SavedFiles(inner=("inner",))
    capabilities = Capabilities(nestable=False, cost=RouterCost)

    def __init__(
        self,
        target: Target,
        # Drafters to choose from: run folders, drafter directories or choices, alone or with
        # settings; null uses ngram and causal.
        inner: list[Any] | None = None,
        # How a drafter is chosen: exponential weights (hedge), Thompson sampling (bandit), or a
        # vote of all (vote).
        by: Literal["hedge", "bandit", "vote"] = "hedge",
        # Number of rounds from one that scores all drafters to the next, with by=hedge.
        score_every: int = 4,
        # Number of scored rounds over which observations and gains fade; null remembers all rounds.
        memory: int | None = 16,
        # Seed of the random choices.
        seed: int = 0,
    ) -> None:
        super().__init__()
        for key, value in (("score_every", score_every), ("memory", memory)):
            if value is not None and value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        built = build_several(inner, target, "choose from")
        drafters = [drafter for drafter, _ in built]
        self.inner = nn.ModuleList(drafters).requires_grad_(False)
        self.saved = replace(
            self.saved, settings={"inner": [description for _, description in built]}
        )
        self.by = by
        self.score_every = score_every
        self.layers = union_layers(drafters)
        self.hedge = Hedge(len(drafters), memory)
        self.arms = [Arm(self.hedge.fade, NUM_TIMED_ROUNDS) for _ in drafters]
        self.rng = np.random.default_rng(seed)
        self.clock: Callable[[], float] = time.perf_counter
        self.verify_seconds: deque[float] = deque(maxlen=NUM_TIMED_ROUNDS)  # seconds
        self.picks: list[int] = []  # the drafter of each round
        self.scored_all = False  # whether this round scores every drafter
        self.verified: Features | None = None  # the target's features of this round's tree

    @property
    def scores_all(self) -> bool:
        """Whether this round scores every drafter."""
        return self.by == "vote" or (self.by == "hedge" and len(self.picks) % self.score_every == 0)

    def draft(self, context: Context) -> Draft:
        for arm in self.arms:
            arm.queue_features(context)
        pick = self._pick_arm(context)
        runs_all = self.scores_all
        margin = 2 * (context.builder.depth + 1)
        self.scored_all = runs_all
        for number, (arm, drafter) in enumerate(zip(self.arms, self.inner)):
            must_read = context.begins or arm.num_unread + margin > MAX_UNREAD
            if runs_all or must_read or number == pick:
                arm.make_draft(drafter, context, Stopwatch(self.clock, context.target.device))  # type: ignore[arg-type]
        self.picks.append(pick)
        if self.by == "vote":
            rollouts = [arm.recording for arm in self.arms if arm.recording is not None]
            return Draft(
                VotingRollout(rollouts, self.hedge.weights.tolist(), context.target.head.vocab_size)
            )
        return Draft(self.arms[pick].recording)

    def _pick_arm(self, context: Context) -> int:
        """Pick the drafter of this round."""
        untimed = [number for number, arm in enumerate(self.arms) if len(arm.seconds) < NUM_TRIALS]
        if untimed or not self.verify_seconds:
            return untimed[0] if untimed else 0
        if self.by == "bandit":
            return int(
                np.argmax(
                    [
                        self._tokens_per_second(
                            arm.sample_rates(self.rng, context.builder.depth), arm
                        )
                        for arm in self.arms
                    ]
                )
            )
        return int(self.rng.choice(len(self.arms), p=self.hedge.weights))

    def _tokens_per_second(self, rates: np.ndarray, arm: Arm) -> float:
        """Return the expected tokens per second of a chain with acceptance rates [D]."""
        return float(1 + rates.cumprod().sum()) / max(
            median(arm.seconds) + median(self.verify_seconds), 1e-9
        )

    def verify(self, context: Context, tree: TokenTree) -> Features:
        stopwatch = Stopwatch(self.clock, context.target.device)
        with stopwatch:
            self.verified = context.verify(tree)
        self.verify_seconds.append(stopwatch.seconds)
        return self.verified

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        assert self.verified is not None and self.verified.logits is not None
        pick = self.picks[-1]
        uses_probabilities = context.builder.children != "deterministic"
        logits = self.verified.logits if uses_probabilities else None
        for number, arm in enumerate(self.arms):
            if arm.recording is None:
                continue
            if number == pick or self.by == "vote":
                arm.seconds.append(arm.recording.stopwatch.seconds)
            if number == pick or self.by != "bandit":
                arm.score_draft(context, accepted.path, logits)
            self.inner[number].commit(replace(context, round=arm.num_drafts), accepted)  # type: ignore[operator]
            arm.recording = None
        if self.scored_all and all(arm.seconds for arm in self.arms):
            self.hedge.add_gains(
                np.array(
                    [
                        self._tokens_per_second(arm.acceptance_rates(context.builder.depth), arm)
                        for arm in self.arms
                    ]
                )
            )
        self.verified = None

"""Several drafters, of which the one that pays drafts (Not-a-Bandit, 2025), or all of which vote (Minions, 2024).

Shapes: B batch, K drafters, D depth, P tokens of a round, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import nn

from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, DraftingCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.inner_drafters import build_nestable, union_layers
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.trees.base import Draft, TreeBuilder
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .arms import Arm, Hedge, Stopwatch
from .voting import VotingRollout

if TYPE_CHECKING:
    from spectrain.models.target import Target

PATIENCE = 64  # tokens that a drafter may fall behind: what it catches up with needs slots
TIMED = 9  # of the last rounds' seconds the median counts: half of them may be slowed by something else
TRIALS = 4  # rounds that every drafter drafts at the start, to be timed


class RouterCost(DraftingCost):
    def extra_nodes(self, builder: TreeBuilder) -> int:
        return PATIENCE + max(drafter.cost.extra_nodes(builder) for drafter in self.drafter.inner)

    def num_passes(self, depth: float) -> float:
        return max(float(drafter.cost.num_passes(depth)) for drafter in self.drafter.inner)


class Chosen(Drafter):
    """The drafter that promises most tokens a second drafts a round; the others rest.

    by=hedge (Not-a-Bandit) needs no exploration. Every `score_every`-th round all drafters read the text so far, which they
    must do before they draft again anyway, and each is led along the tokens that were emitted then, in one teacher-forced
    step where it can: how often it would have been right is known of all on the same text. Exponential weights over expected
    tokens a second, which fade, say who is likely to draft. Expected are the tokens of a chain whose depths are kept at the
    rates seen, a second is the median of what rounds took.

    by=bandit scores nobody: a drafter learns from the rounds that it drafted, and the rates are drawn from Beta beliefs, so
    that those who seldom drafted are tried (SPIN and other bandits). by=vote has all of them draft: a token's share of q is
    the weight of the drafters whose first choice it is, the weights being Hedge's (Minions' majority).
    """

    saved = SavedFiles(inner=("inner",))
    capabilities = Capabilities(nestable=False)
    _cost_type = RouterCost

    def __init__(
        self,
        target: Target,
        inner: list[Any] | None = None,  # run folders, drafter directories or choices, alone or with settings
        by: Literal["hedge", "bandit", "vote"] = "hedge",
        score_every: int = 4,  # rounds from one in which all are scored to the next
        memory: int = 8,  # rounds that teach, over which what they taught fades
        seed: int = 0,
    ) -> None:
        super().__init__()
        named = ["ngram", "causal"] if inner is None else inner
        if len(named) < 2:
            raise UserError("drafter.inner: name two drafters or more to choose from, as in drafter.inner=[ngram,runs/NAME]")
        for key, value in (("score_every", score_every), ("memory", memory)):
            if value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        made = [build_nestable(one, "inner", target) for one in named]
        drafters = [drafter for drafter, _ in made]
        self.inner = nn.ModuleList(drafters).requires_grad_(False)
        self.saved = replace(self.saved, settings={"inner": [description for _, description in made]})
        self.by, self.score_every, self.layers = by, score_every, union_layers(drafters)
        self.arms = [Arm(1 - 1 / memory, TIMED) for _ in drafters]
        self.hedge = Hedge(len(drafters), memory)
        self.source = np.random.default_rng(seed)
        self.clock: Callable[[], float] = time.perf_counter
        self.verifying: deque[float] = deque(maxlen=TIMED)  # seconds
        self.picks: list[int] = []  # who drafted each round so far
        self.seen: Features | None = None  # the target's, of this round's tree

    @property
    def scores_all(self) -> bool:
        """Whether every drafter is judged in this round."""
        return self.by == "vote" or (self.by == "hedge" and len(self.picks) % self.score_every == 0)

    def draft(self, context: Context) -> Draft:
        for arm in self.arms:
            arm.queue_features(context)
        pick, everyone, soon = self._pick(context), self.scores_all, 2 * (context.builder.depth + 1)
        for number, (arm, drafter) in enumerate(zip(self.arms, self.inner)):
            late = context.begins or arm.num_unread + soon > PATIENCE
            if everyone or late or number == pick:
                arm.make_draft(drafter, context, Stopwatch(self.clock, context.target.device))  # type: ignore[arg-type]
        self.picks.append(pick)
        if self.by == "vote":
            rollouts = [arm.recording for arm in self.arms if arm.recording is not None]
            return Draft(VotingRollout(rollouts, self.hedge.weights.tolist(), context.target.head.vocab_size))
        return Draft(self.arms[pick].recording)

    def _pick(self, context: Context) -> int:
        """Who drafts this round."""
        untimed = [number for number, arm in enumerate(self.arms) if len(arm.seconds) < TRIALS]
        if untimed or not self.verifying:
            return untimed[0] if untimed else 0
        if self.by == "bandit":
            return int(np.argmax([self._speed(arm.sample_rates(self.source, context.builder.depth), arm) for arm in self.arms]))
        return int(self.source.choice(len(self.arms), p=self.hedge.weights))

    def _speed(self, rates: np.ndarray, arm: Arm) -> float:
        """Tokens a second of a chain whose depths are kept at these rates [D]."""
        return float(1 + rates.cumprod().sum()) / max(median(arm.seconds) + median(self.verifying), 1e-9)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        watch = Stopwatch(self.clock, context.target.device)
        with watch:
            self.seen = context.verify(tree)
        self.verifying.append(watch.seconds)
        return self.seen

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        assert self.seen is not None and self.seen.logits is not None
        pick, judged = self.picks[-1], context.builder.children != "deterministic"
        logits = self.seen.logits if judged else None
        for number, arm in enumerate(self.arms):
            if arm.recording is None:
                continue
            if number == pick or self.by == "vote":
                arm.seconds.append(arm.recording.stopwatch.seconds)
            if number == pick or self.by != "bandit":
                arm.score_draft(context, accepted.path, logits)
            self.inner[number].commit(replace(context, round=arm.num_drafts), accepted)  # type: ignore[operator]
            arm.recording = None
        if self.by != "bandit" and all(arm.seconds for arm in self.arms):
            self.hedge.update_gains(
                np.array([self._speed(arm.acceptance_rates(context.builder.depth), arm) for arm in self.arms])
            )
        self.seen = None

"""A guard that switches drafting off while it does not pay and tries it again later, so that
decoding is never much slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import EagerRunner
from spectrain.decoding.session import RoundChange, Session
from spectrain.errors import UserError
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.systems import System
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees.base import (
    PlanOptions,
    Prefix,
    RoundPlan,
    RoundPolicy,
    RoundReason,
    RoundResult,
)

INITIAL_STEPS = 2  # rounds without a draft before the first draft
# Drafted rounds between two rounds without a draft, which time a step again; a drafter that pays
# loses about 1 % to them.
STEP_INTERVAL = 32
# A step is the median of so many rounds without a draft: other work on the machine may slow half of
# them.
STEP_WINDOW = 9


class Guard(RoundChange):
    """Decides before every round whether to draft, from the gains and costs of drafted rounds so
    far, over all prompts.

    The unit is an autoregressive step: the time of a round without a draft. It is measured again at
    intervals, because the first rounds may be slow and prompts differ in length. A drafted round
    gains its tokens and costs its time. While the running mean over the last `window` rounds is not
    positive, decoding is autoregressive and saves for another try: each token saves `allowance` / 2
    steps, so that tries lose at most half of the allowance. The other half covers the start of a
    stream that never pays: `window` rounds, or fewer that lose `window` steps.
    """

    part = "plan"
    setting_name = "eval.guard"

    def __init__(
        self, allowance: float = 0.05, window: int = 8, cost: Callable[[int], float] | None = None
    ) -> None:
        if not 0 < allowance < 1:
            raise UserError(f"guard allowance={allowance}: use more than 0 and less than 1")
        self.allowance, self.window = allowance, window
        self.cost = cost  # cost of a round by number of nodes; None: the measured seconds
        # costs of the last rounds without a draft
        self.step_costs: deque[float] = deque(maxlen=STEP_WINDOW)
        self.rounds_since_step = 0  # drafted rounds since the last one without
        self.mean_gain = 0.0  # running mean of tokens - cost over drafted rounds
        self.expected_loss = 0.0  # the largest loss that a try is expected to make
        self.savings = 0.0
        self.num_undrafted = self.num_drafted = 0
        self.is_stopped = False  # drafting has stopped
        # Tokens and cost of a round whose drafter ran and proposed nothing yet.
        self.deferred_round: tuple[float, float] | None = None

    def connect(self, session: Session) -> Callable[[EagerRunner], EagerRunner]:
        """Return what lets a runner draft only while this guard allows it."""

        def guard_rounds(runner: EagerRunner) -> EagerRunner:
            runner.policy = GuardPolicy(self, runner.policy)
            return runner

        return guard_rounds

    def should_draft(self) -> bool:
        """Tell whether the next round drafts. The first two do not, nor does one after 32 that
        do: they measure a step.
        """
        if self.num_undrafted < INITIAL_STEPS:
            return False
        if self.deferred_round is not None:
            return True
        return (
            self.savings >= self.expected_loss
            if self.is_stopped
            else self.rounds_since_step < STEP_INTERVAL
        )

    def record_round(
        self, was_drafted: bool, tokens: float, cost: float, has_proposal: bool = True
    ) -> None:
        """Record a round that emitted `tokens` per sequence at a cost in any unit that is the same
        for all rounds.

        A drafter that proposed nothing may have been preparing, so its round counts together with
        the next one.
        """
        if was_drafted and not has_proposal and self.deferred_round is None:
            self.deferred_round = (tokens, cost)
            return
        if not was_drafted:
            self.num_undrafted = self.num_undrafted + 1
            self.rounds_since_step = 0
            self.step_costs.append(cost)
            if self.is_stopped:
                self.savings += self.allowance / 2 * tokens
            return
        step_cost = median(self.step_costs)
        rounds = 1
        if self.deferred_round is not None:
            tokens = tokens + self.deferred_round[0]
            cost = cost + self.deferred_round[1]
            rounds = 2
            self.deferred_round = None
        gain = tokens - cost / step_cost
        self.num_drafted = self.num_drafted + rounds
        self.rounds_since_step = self.rounds_since_step + rounds
        self.mean_gain += (gain - self.mean_gain) / min(self.num_drafted, self.window)
        if self.is_stopped:
            self.savings = min(0.0, self.savings + gain) if gain < 0 else self.savings + gain
        self.expected_loss = max(0.0, cost / step_cost - rounds)
        if self.mean_gain > 0:
            self.is_stopped = False
        elif not self.is_stopped and (
            self.num_drafted >= self.window or -self.mean_gain * self.num_drafted >= self.window
        ):
            self.is_stopped = True
            self.savings = 0.0

    def summarize(self, answers: Sequence[Generation], target: Target) -> dict[str, Any]:
        """Return counts of all rounds so far."""
        return {
            "drafted_rounds": self.num_drafted,
            "plain_rounds": self.num_undrafted,
            "fallen_back": self.is_stopped,
        }


class GuardPolicy(RoundPolicy):
    """Plans drafts while a guard allows them, and reports the cost and the tokens of every round to
    it. `inner` learns from drafted rounds.
    """

    decides_to_draft = True
    skips_any_drafter = True

    def __init__(self, guard: Guard, inner: RoundPolicy) -> None:
        self.guard = guard
        self.inner = inner

    def plan(self, prefix: Prefix, options: PlanOptions) -> RoundPlan:
        runs_drafter = self.guard.should_draft()
        reason: RoundReason = "pays" if runs_drafter else "does not pay"
        return RoundPlan(runs_drafter, is_observed=runs_drafter, reason=reason)

    def record(self, plan: RoundPlan, round: RoundResult) -> None:
        if plan.runs_drafter:
            self.inner.record(plan, round)
        depth, nodes = round.tree.size_stats[:, :2].unbind(1)
        active = round.counts > 0
        cost = self.guard.cost
        self.guard.record_round(
            plan.runs_drafter,
            float(round.counts.sum() / active.sum()),
            sum(round.seconds.values()) if cost is None else cost(int(nodes.max())),
            bool((depth * active).any()),
        )


class GuardedSystem(EvalExtension):
    """Decodes with the drafter's own system under a guard; a tree that decides whether to draft
    needs none.
    """

    def adapt_system(self, candidate: Candidate, first: System) -> System:
        return (
            first
            if first.builder.round_policy.decides_to_draft
            else replace(first, changes=(Guard(), *first.changes))
        )

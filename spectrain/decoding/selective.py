"""Rounds that a policy plans: with a draft, without one, or without the drafter to the end."""

from __future__ import annotations

import math
import time

from spectrain.drafters.context import Context
from spectrain.drafters.layers.skippable import SkippableDrafter
from spectrain.trees.base import PlanOptions, Prefix
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath

from .latency import time_verification
from .loop import EagerRunner, Request, required_layers

# Where drafting does not pay, features are recorded for a drafter only if it may draft within this
# share of the rounds left.
WAITING_SHARE = 1 / 3


class PlannedDrafter(SkippableDrafter):
    """Asks a runner's policy before every round how it runs.

    A drafter with copies has weighed them itself, so it drafts in every round, as does one that
    adds nodes to every tree; unless the policy skips any drafter.

    Recording features that a drafter may read later takes 5 % of a step of the tiny target. So a
    decoding goes on without the drafter once none of the rounds in the first third of those left
    may draft. One whose drafter reads no features does so once none of all rounds left may draft.
    """

    def __init__(self, runner: EagerRunner, request: Request) -> None:
        super().__init__(runner.round_drafter)
        assert runner.drafter is not None
        self.runner = runner
        capabilities = runner.drafter.capabilities
        self.is_skippable = runner.policy.skips_any_drafter or (
            capabilities.nestable if capabilities.is_copier else not capabilities.has_no_q
        )
        self.share = WAITING_SHARE if runner.drafter.layers else 1.0
        self.rounds_left = request.max_new_tokens  # at most

    def draft(self, context: Context) -> Draft:
        self.rounds_left -= 1
        num_waited = None if self.is_active else self.num_waited
        options = PlanOptions(time_sizes, self.is_skippable, num_waited)
        plan = self.runner.policy.plan(context, options)
        self.runner.follow_plan(plan)
        if not self.is_skippable:
            # A drafter with copies reads the features of rounds that it skipped when it needs them.
            return self.drafter.draft(context)
        if plan.runs_drafter:
            return super().draft(context)
        if not plan.keeps_drafter:
            context.layers = required_layers(None, self.runner.rule)
        self.skip(context)
        return Draft()

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        if self.runner.drafter is None:
            # Nothing reads the features of this round and of those before it.
            context.deferred = []
        else:
            super().commit(context, accepted)

    @property
    def num_waited(self) -> int:
        """The number of next rounds of which one must draft for features to be recorded."""
        return math.ceil(self.share * self.rounds_left)

    def is_worth_waiting(self, num_texts: int, length: int) -> bool:
        """Tell whether a round of the decoding may draft soon enough to record features until
        then.
        """
        return not self.is_skippable or self.runner.policy.may_draft(
            num_texts, length, self.num_waited
        )


def time_sizes(prefix: Prefix, sizes: list[int]) -> tuple[dict[int, float], float]:
    """Time the verification of trees of these sizes; return the seconds of every size, and those
    of the whole measurement.
    """
    assert isinstance(prefix, Context)
    start = time.perf_counter()
    seconds = time_verification(prefix, sizes)
    return seconds, time.perf_counter() - start


def plan_rounds(runner: EagerRunner, request: Request) -> None:
    """Let a runner's policy plan its rounds.

    Once it is not worth waiting for another draft, the decoding goes on without the drafter.
    """
    planned = PlannedDrafter(runner, request)
    if not planned.is_worth_waiting(len(request.prompts), request.longest_prompt):
        runner.follow_plan(runner.policy.plan_without(len(request.prompts)))
        return
    runner.round_drafter = planned
    # A drafter that reads skipped tokens writes as many slots in every row as in the one with most
    # of them.
    runner.extra_slots = request.max_new_tokens

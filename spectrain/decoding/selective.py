"""Rounds that draft only where their tree builder expects a gain."""

from __future__ import annotations

import math
import time

from spectrain.drafters.context import Context
from spectrain.drafters.layers.skippable import SkippableDrafter
from spectrain.trees.base import RootOnlyBuilder, RoundResult, TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath

from .latency import time_verification
from .loop import EagerRunner, Request, required_layers

# Where drafting does not pay, features are recorded for a drafter only if it may draft within this
# share of the rounds left.
WAITING_SHARE = 1 / 3


class SelectiveDrafter(SkippableDrafter):
    """Asks a runner's tree builder before every round whether to draft, and times verification for
    it where it needs that.

    A drafter with copies has weighed them itself, so it drafts in every round, as does one that
    adds nodes to every tree.

    Recording features that a drafter may read later takes 5 % of a step of the tiny target. So a
    decoding goes on without the drafter once none of the rounds in the first third of those left
    may draft. One whose drafter reads no features does so once none of all rounds left may draft.
    """

    def __init__(self, runner: EagerRunner, request: Request) -> None:
        super().__init__(runner.round_drafter)
        assert runner.drafter is not None
        self.runner, self.builder = runner, runner.builder
        capabilities = runner.drafter.capabilities
        self.is_skippable = (
            capabilities.nestable if capabilities.is_copier else not capabilities.has_no_q
        )
        self.share = WAITING_SHARE if runner.drafter.layers else 1.0
        self.rounds_left = request.max_new_tokens  # at most

    def draft(self, context: Context) -> Draft:
        refresh_times(self.builder, context)
        if not self.is_skippable:
            # A drafter with copies reads the features of rounds that it skipped when it needs them.
            return self.drafter.draft(context)
        self.rounds_left -= 1
        if not self.is_active and not self.is_worth_waiting(
            len(context.lengths), context.longest, begins=False
        ):
            context.layers = required_layers(None, self.runner.rule)
            self.runner.remove_drafter(PlainRounds(self.builder))
        elif self.builder.should_draft(context):
            return super().draft(context)
        self.skip(context)
        return Draft()

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        if self.runner.drafter is None:
            # Nothing reads the features of this round and of those before it.
            context.deferred = []
        else:
            super().commit(context, accepted)

    def is_worth_waiting(self, num_texts: int, length: int, begins: bool = True) -> bool:
        """Tell whether a round of the decoding may draft soon enough to record features until
        then.
        """
        return not self.is_skippable or self.builder.may_draft(
            num_texts, length, math.ceil(self.share * self.rounds_left), begins
        )


def refresh_times(builder: TreeBuilder, context: Context, is_new_batch: bool = False) -> None:
    """Time verification for a builder where it needs that. `is_new_batch`: also if the number of
    threads may still change.
    """
    if sizes := builder.untimed_sizes(context, is_new_batch):
        start = time.perf_counter()
        seconds = time_verification(context, sizes)
        builder.record_times(context, seconds, time.perf_counter() - start)


class PlainRounds(RootOnlyBuilder):
    """Counts the plain rounds of a decoding in which a tree builder may not draft."""

    def __init__(self, builder: TreeBuilder) -> None:
        self.builder = builder

    def observe(self, round: RoundResult) -> None:
        self.builder.count_plain_round(len(round.counts), sum(round.seconds.values()))


def draft_selectively(runner: EagerRunner, request: Request) -> None:
    """Let a runner draft only where its tree builder expects a gain.

    Once it is not worth waiting for another draft, the decoding goes on without the drafter.
    """
    selective = SelectiveDrafter(runner, request)
    if not selective.is_worth_waiting(len(request.prompts), request.longest_prompt):
        runner.remove_drafter(PlainRounds(runner.builder))
        return
    runner.round_drafter = selective
    # A drafter that reads skipped tokens writes as many slots in every row as in the one with most
    # of them.
    runner.extra_slots = request.max_new_tokens

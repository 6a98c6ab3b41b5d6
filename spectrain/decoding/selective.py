"""Rounds that draft only where their tree builder expects a gain."""

from __future__ import annotations

import math
import time

from spectrain.drafters.context import Context
from spectrain.drafters.layers.skippable import SkippableDrafter
from spectrain.trees.base import RootOnlyBuilder, RoundResult, TreeBuilder
from spectrain.trees.rollout import Draft

from .latency import time_verification
from .loop import EagerRunner, Request, required_layers

# Features are recorded for a drafter only if a round may draft within this share of those that are left.
WAITING_SHARE = 0.125


class SelectiveDrafter(SkippableDrafter):
    """Asks a runner's tree builder before every round whether to draft, and times verification for it where it needs that.

    A drafter with copies has weighed them itself, so it drafts in every round, as does one that adds nodes to every tree.

    Recording features that a drafter may read later takes up to 8 % of a small target's step, so a decoding in which no round
    may draft any more goes on without the drafter.
    """

    def __init__(self, runner: EagerRunner, request: Request) -> None:
        super().__init__(runner.round_drafter)
        assert runner.drafter is not None
        self.runner, self.builder = runner, runner.builder
        capabilities = runner.drafter.capabilities
        self.is_skippable = capabilities.nestable if capabilities.is_copier else not capabilities.has_no_q
        self.reads_features = bool(runner.drafter.layers)
        # Rounds that are left at most, and tokens of the longest text at the last draft.
        self.rounds_left, self.num_read = request.max_new_tokens, 0

    def draft(self, context: Context) -> Draft:
        refresh_times(self.builder, context)
        if not self.is_skippable:
            # A drafter with copies reads the features of rounds that it skipped when it needs them.
            return self.drafter.draft(context)
        self.rounds_left -= 1
        if not self.is_active and not self.may_draft(len(context.lengths), context.longest):
            context.layers = required_layers(None, self.runner.rule)
            self.runner.remove_drafter(PlainRounds(self.builder))
        elif self.builder.should_draft(context):
            self.num_read = context.longest
            return super().draft(context)
        self.skip(context)
        return Draft()

    def may_draft(self, num_texts: int, length: int) -> bool:
        """Tell whether a round of the decoding may still draft, soon enough to record features until then."""
        if not self.is_skippable:
            return True
        share = WAITING_SHARE if self.reads_features else 1.0
        return self.builder.may_draft(num_texts, length, length - self.num_read, math.ceil(share * self.rounds_left))


def refresh_times(builder: TreeBuilder, context: Context, is_new_batch: bool = False) -> None:
    """Time verification for a builder where it needs that. `is_new_batch`: also if the number of threads may still change."""
    if sizes := builder.untimed_sizes(context, is_new_batch):
        start = time.perf_counter()
        seconds = time_verification(context, sizes)
        builder.record_times(context, seconds, time.perf_counter() - start)


class PlainRounds(RootOnlyBuilder):
    """Counts the plain rounds of a decoding in which a tree builder may not draft."""

    def __init__(self, builder: TreeBuilder) -> None:
        self.builder = builder

    def observe(self, round: RoundResult) -> None:
        self.builder.count_plain_round()


def draft_selectively(runner: EagerRunner, request: Request) -> None:
    """Let a runner draft only where its tree builder expects a gain.

    As soon as no round of the decoding may draft any more, it goes on without the drafter.
    """
    selective = SelectiveDrafter(runner, request)
    if not selective.may_draft(len(request.prompts), request.longest_prompt):
        runner.remove_drafter(PlainRounds(runner.builder))
        return
    runner.round_drafter = selective
    # A drafter that reads skipped tokens writes as many slots in every row as in the one with most of them.
    runner.extra_slots = request.max_new_tokens

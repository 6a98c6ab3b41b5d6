"""Rounds that draft only where their tree builder expects a gain."""

from __future__ import annotations

import time

from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.drafters.layers.skippable import SkippableDrafter
from spectrain.trees.base import Draft, RootOnlyBuilder, RoundResult, TreeBuilder

from .latency import time_verification
from .loop import EagerRunner, Request


class SelectiveDrafter(SkippableDrafter):
    """Asks a tree builder before every round whether to draft, and times verification for it where it needs that.

    A drafter with copies has weighed them itself, so it drafts in every round, as does one that adds nodes to every tree.
    """

    def __init__(self, drafter: Drafter, builder: TreeBuilder) -> None:
        super().__init__(drafter)
        self.builder = builder
        capabilities = drafter.capabilities
        self.is_skippable = capabilities.nestable if capabilities.is_copier else not capabilities.has_no_q

    def draft(self, context: Context) -> Draft:
        refresh_times(self.builder, context)
        if not self.is_skippable:
            # A drafter with copies reads the features of rounds that it skipped when it needs them.
            return self.drafter.draft(context)
        if self.builder.should_draft(context):
            return super().draft(context)
        self.skip(context)
        return Draft()


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

    If no round of the decoding may draft, it records no features for a drafter and is decoding without one.
    """
    assert runner.drafter is not None
    selective = SelectiveDrafter(runner.drafter, runner.builder)
    size = len(request.prompts), request.longest_prompt, request.max_new_tokens
    if selective.is_skippable and not runner.builder.may_draft(*size):
        runner.remove_drafter(PlainRounds(runner.builder))
        return
    runner.round_drafter = selective
    # A drafter that reads skipped tokens writes as many slots in every row as in the one with most of them.
    runner.extra_slots = request.max_new_tokens

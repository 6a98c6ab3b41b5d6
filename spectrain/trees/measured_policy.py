"""The policy of rounds by measured times: it decides whether a round drafts, when verification is
timed, and what is learned from a round. Shapes: B batch.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import numpy as np
import torch

from spectrain.copying.trie import Trie
from spectrain.errors import UserError

from .base import (
    WITHOUT_DRAFTER,
    PlanOptions,
    Prefix,
    RoundPlan,
    RoundPolicy,
    RoundResult,
    TimeSizes,
)
from .copy_tree import CopyRanks, CopyTree, are_calibrated
from .draft_choice import DRAFTED, ROUNDS_PER_READING, TRIAL_ALLOWANCE, DraftChoice
from .drafter_over_copies import CopyCosts, DrafterOverCopies
from .estimates import AcceptanceByDepth, RunningMean, TokenCurves, VerifyFit
from .measurements import Calibration, Latency, list_timed_sizes
from .round_costs import RoundCosts
from .token_tree import TokenTree

CONTEXT_STRIDE = 32  # tokens by which a context grows before its times are interpolated again
# expected tokens and cost of a drafted round before any tree was grown: drafting is tried at first
UNKNOWN_ROUND = 1.5, 1.0
READ_NODES = 64  # nodes of a draft step by which the cost of reading a token is estimated
# Rounds over which the mean of the cost of reading a token is taken, because few rounds read many
# skipped tokens.
READ_MEMORY = 4


class MeasuredPolicy(RoundPolicy):
    """Weighs what rounds took and emitted, with a draft and without one.

    A round drafts only if drafted rounds gain more tokens than plain steps would in the same time
    (`DraftChoice`). Where copies are available, the drafter runs only if it adds enough to them
    (`DrafterOverCopies`). Of several texts, those with the fewest new tokens so far count, because
    a batch ends with its last text.

    Times belong to a batch size and a number of threads. For others than the calibrated ones they
    are estimated at first. They are measured once rounds with them have taken a hundred times as
    long as measuring does, and again when drafted rounds take longer or shorter than expected,
    compared with plain steps.
    """

    decides_to_draft = True

    def __init__(self, depth: int, budget: int, top_k: int, memory: int, refit: bool) -> None:
        # The settings of the tree.
        self.depth = depth
        self.budget = budget
        self.top_k = top_k
        self.memory = memory
        self.refit = refit
        self.text_length = 0  # tokens of the longest text in this round
        # by batch size and number of threads
        self.costs_by_setting: dict[tuple[int, int], RoundCosts] = {}
        # batch size and threads of this round, and earlier ones in a row with them
        self.setting = (0, 0)
        self.num_settled = 0
        self.curves = TokenCurves(depth, budget, memory)
        self.acceptance = AcceptanceByDepth(depth, memory)
        # [B, depth + 1] expected tokens of this round
        self.expected_by_depth: np.ndarray | None = None
        self.num_new: list[int] | None = None  # new tokens of each text since its decoding began
        self.num_levels = 0  # levels that the drafter made in this round
        self.is_skipped = False  # this round was decided to be a plain step
        # verification was timed in this round, whose own times are not those of others
        self.has_timed = False
        self.num_unread = 0  # tokens that the drafter reads in this round beyond those of one round
        self.last_draft_length = 0  # text length at the last drafted round
        self.over_copies = DrafterOverCopies(memory)
        # learned acceptance of copies that no drafter has calibrated
        self.copy_ranks = CopyRanks(budget, memory)
        self.copies_alone = False  # some round had such copies
        self.tree_sizes: list[int] = []  # tree size of every drafted round
        # rounds in which the builder decided whether to draft, and those without one
        self.num_rounds = self.num_plain = 0

    def prepare(self, calibration: Calibration) -> None:
        """Take the measurements of this target and drafter."""
        latency = calibration.latency
        if latency is None:
            raise self._untimed_error()
        self.costs_by_setting.clear()
        self.setting = latency.batch, torch.get_num_threads()
        self.costs_by_setting[self.setting] = self._make_costs(latency)
        self.costs.is_timed = True

    def _make_costs(self, latency: Latency, copy_seconds: float = 0.0) -> RoundCosts:
        """Return the costs of rounds with these times, before any of them ran; `copy_seconds` is
        the time of a draft that only copies, if the number of prompts is new."""
        # All numbers of threads share what decides about the drafter: if one of them drafted more
        # often than another, the times of its rounds would not say which is faster.
        shared = next(
            (
                costs
                for (batch, _), costs in self.costs_by_setting.items()
                if batch == latency.batch
            ),
            None,
        )
        choice = (
            shared.choice if shared else DraftChoice(*self._expected_round(latency), self.memory)
        )
        copies = shared.copies if shared else CopyCosts(RunningMean(copy_seconds))
        fit = VerifyFit(self.memory) if self.refit else None
        # Reading a token costs what a node of a draft step does, until it was measured.
        reading = max(0.0, latency.estimate_step(READ_NODES) - latency.estimate_step(1)) / (
            READ_NODES - 1
        )
        timing = latency.estimate_timing(list_timed_sizes(self.budget), self.text_length)
        start, step = (
            RunningMean(x, self.memory)
            for x in (latency.start_seconds, latency.estimate_step(self.top_k))
        )
        per_token = RunningMean(reading, READ_MEMORY if reading else 0)
        return RoundCosts(
            latency, choice, copies, start, step, per_token, fit=fit, timing_seconds=timing
        )

    def verify_seconds(self, length: int) -> list[float]:
        """Return the seconds to verify every size up to the budget, for a context of this
        length.
        """
        costs = self.costs
        context = length // CONTEXT_STRIDE * CONTEXT_STRIDE
        if context not in costs.verify_curves:
            costs.verify_curves[context] = [
                costs.latency.estimate_verify(size, context) for size in range(1, self.budget + 1)
            ]
        seconds = costs.verify_curves[context]
        return seconds if costs.fit is None else costs.fit.correct(seconds)

    @property
    def costs(self) -> RoundCosts:
        """The costs of this round's number of texts and of threads."""
        return self.costs_by_setting[self.setting]

    def _untimed_error(self) -> UserError:
        return UserError(
            "tree=auto: nothing is timed yet; call prepare with a Calibration that has a latency"
        )

    def _expected_round(self, latency: Latency) -> tuple[float, float]:
        """Return the expected tokens of a drafted round and its cost in plain steps, for the
        tree that gains most.
        """
        if self.copies_alone:
            seconds = [
                latency.estimate_verify(size, self.text_length)
                for size in range(1, self.budget + 1)
            ]
            return self.copy_ranks.expected_round(seconds, latency.start_seconds)
        if not self.curves.num_rounds:
            return UNKNOWN_ROUND
        return self.curves.find_best_round(latency, self.top_k, self.text_length)

    def plan(self, prefix: Prefix, options: PlanOptions) -> RoundPlan:
        self.refresh_times(prefix, options.time_sizes)
        if not options.can_skip:
            return RoundPlan()
        if options.num_waited is not None and not self.may_draft(
            len(prefix.lengths), prefix.longest, options.num_waited, begins=False
        ):
            return self.plan_without(len(prefix.lengths))
        return self._plan_draft(prefix)

    def refresh_times(
        self, prefix: Prefix, time_sizes: TimeSizes, is_new_batch: bool = False
    ) -> None:
        """Time verification where it is due. `is_new_batch`: also if the number of threads may
        still change.
        """
        self.select_costs(prefix)
        costs = self.costs
        self.has_timed = (
            not costs.is_timed
            if is_new_batch
            else costs.needs_timing(self.text_length, self.num_settled)
        )
        if self.has_timed:
            seconds, costs.timing_seconds = time_sizes(prefix, list_timed_sizes(self.budget))
            costs.round_seconds = 0.0
            costs.set_times(self.text_length, seconds, len(prefix.lengths))
            costs.choice.expect_round(*self._expected_round(costs.latency))

    def _plan_draft(self, prefix: Prefix) -> RoundPlan:
        """Decide whether the next round drafts."""
        self.select_costs(prefix)
        self._count_unread(prefix)
        self.num_rounds += 1
        costs = self.costs
        is_comparable = self.num_settled > 0 and costs.time_ratios.has_drafted
        choice = costs.choice
        reason = choice.decide(self._reading_cost(costs, self.num_unread), is_comparable)
        self.is_skipped = reason not in DRAFTED
        if not self.is_skipped:
            self.last_draft_length = self.text_length
        return RoundPlan(
            runs_drafter=not self.is_skipped,
            reason=reason,
            gain=choice.mean_gain,
            savings=choice.savings,
        )

    def may_draft(self, num_texts: int, length: int, num_rounds: int, begins: bool = True) -> bool:
        costs = self.costs_by_setting.get((num_texts, torch.get_num_threads()))
        if costs is None or not (costs.is_timed or costs.choice.has_drafted):
            return True
        num_unread = self._skipped_tokens(length, 0 if begins else self.last_draft_length)
        return costs.choice.may_draft(num_rounds, self._reading_cost(costs, num_unread, length))

    def plan_without(self, num_texts: int) -> RoundPlan:
        choice = self.costs_by_setting[num_texts, torch.get_num_threads()].choice
        return replace(WITHOUT_DRAFTER, gain=choice.mean_gain, savings=choice.savings)

    def needs_drafter(self, prefix: Prefix, copies: list[Trie]) -> bool:
        self.select_costs(prefix)
        costs = self.costs
        if not are_calibrated(copies):
            return True
        self._count_unread(prefix)
        is_needed = self.over_copies.needs_drafter(
            self._fastest_copies(copies, costs.estimate_drafting(0)),
            costs.copies,
            costs.time_ratios,
            costs.estimate_drafting,
            self.num_unread * costs.reading_seconds.value / ROUNDS_PER_READING,
        )
        self.num_unread = self.num_unread if is_needed else 0
        return is_needed

    def start_tree(self, prefix: Prefix) -> RoundCosts:
        """Begin the tree of a round, and return its costs."""
        self.select_costs(prefix)
        self.last_draft_length = self.text_length
        return self.costs

    def record_tree(
        self, num_levels: int, expected_by_depth: np.ndarray, curves: list[np.ndarray]
    ) -> None:
        """Take what the tree of this round promises: `expected_by_depth` [B, depth + 1] tokens, of
        `num_levels` levels that the drafter made, with the tokens by size of each level's curve.
        """
        self.num_levels = num_levels
        self.expected_by_depth = expected_by_depth
        self.curves.add(curves)

    def choose_copies(self, prefix: Prefix, tries: list[Trie]) -> int:
        """Return the fastest size after drafting; copies and drafted nodes compete by calibrated
        probability.
        """
        if not tries:
            return 1
        self.select_costs(prefix)
        if not are_calibrated(tries):
            self.copies_alone = True
            seconds = self.verify_seconds(self.text_length)
            return self.copy_ranks.choose_size(
                tries, self.depth, seconds, self.costs.estimate_drafting(0)
            )
        if self.num_levels:
            fastest = self._fastest_copies(tries, self.costs.estimate_drafting(self.num_levels))
            self.over_copies.record_draft(fastest, self.num_levels, self.costs.copies)
        else:
            fastest = self.over_copies.copies or self._fastest_copies(
                tries, self.costs.estimate_drafting(0)
            )
        self.expected_by_depth = fastest.expected_by_depth
        return fastest.size

    def record(self, plan: RoundPlan, round: RoundResult) -> None:
        if not plan.keeps_drafter:
            self.num_rounds += 1
            self.num_plain += 1
            # A number of threads that is tried for the first time has no costs yet.
            setting = len(round.counts), torch.get_num_threads()
            if costs := self.costs_by_setting.get(setting):
                costs.round_seconds += sum(round.seconds.values())
                costs.choice.savings += TRIAL_ALLOWANCE
            return
        counts = round.counts.tolist()
        num_new = [0] * len(counts) if self.num_new is None else self.num_new
        self.num_new = [before + count for before, count in zip(num_new, counts)]
        # The first round with another number of prompts or threads may wake threads.
        is_settled = self.num_settled > 0
        self.num_settled += 1
        seconds = sum(round.seconds.values())
        self.costs.round_seconds += seconds
        self.copy_ranks.observe(round)
        if self.is_skipped:
            if not self.has_timed:
                ratio = seconds / self.verify_seconds(self.text_length)[0] if is_settled else None
                self.costs.choice.record_plain(self.costs.time_ratios.compare(False, ratio))
            self.num_unread = 0
            self.is_skipped = False
            self.has_timed = False
            self.num_plain += 1
            return
        levels = self.num_levels
        self.num_levels = 0
        has_copies = self.over_copies.finish_round(round)
        judged = round.tree.num_drafted.tolist()
        if (size := max(judged)) > 1:
            self.tree_sizes.append(size)
        if not self.has_timed:
            self._record_drafted(round, size, levels, num_new, has_copies, is_settled)
        self.num_unread = 0
        self.has_timed = False
        # neither copies that are not calibrated, nor nothing drafted
        if self.expected_by_depth is not None and size > 1:
            self.acceptance.record(self.expected_by_depth, counts, judged)

    def _record_drafted(
        self,
        round: RoundResult,
        size: int,
        levels: int,
        num_new: list[int],
        has_copies: bool,
        is_settled: bool,
    ) -> None:
        """Record times and tokens of a drafted round, before which texts had `num_new` new
        tokens each.
        """
        costs, seconds = self.costs, round.seconds
        expected = costs.estimate_drafting(levels)
        verifying = self._estimate_verification(round.tree, size)
        # Other work on the machine slows drafting as much as verification.
        slowdown = (seconds["verify"] + seconds["accept"]) / verifying
        drafting = seconds["draft"] / max(slowdown, 1e-9)
        reading = max(0.0, drafting - expected) if self.num_unread else 0.0
        ratio = None
        if size > 1 and not self.num_unread and is_settled:
            ratio = sum(seconds.values()) / (expected + verifying)
            if has_copies:
                costs.time_ratios.record_copies(levels > 0, ratio)
        active = [(before, count) for before, count in zip(num_new, round.counts.tolist()) if count]
        if active:
            costs.choice.is_preparing = size == 1 and not costs.choice.is_preparing
            least = min(before for before, _ in active)
            step = self.verify_seconds(self.text_length)[0]
            tokens = mean(count for before, count in active if before == least)
            comparison = costs.time_ratios.compare(True, ratio)
            costs.choice.record_draft(
                tokens, (expected + verifying) / step, comparison, reading / step
            )
        if size == 1 or not is_settled:
            return
        if costs.fit is not None:
            costs.fit.record(verifying, seconds["verify"] + seconds["accept"])
        if self.num_unread:
            costs.reading_seconds.add(reading / self.num_unread, READ_MEMORY)
        else:
            costs.record_drafting(levels, drafting, self.memory)

    def _estimate_verification(self, tree: TokenTree, size: int) -> float:
        """Return the expected seconds to verify a tree of `size` nodes."""
        latency = self.costs.latency
        levels = latency.estimate_levels(int(tree.depths.max())) if latency.level_seconds else 0.0
        return latency.estimate_verify(size, self.text_length) + levels

    def select_costs(self, prefix: Prefix) -> None:
        """Select the costs of the prompts' number and of the number of threads; estimate new
        ones from the closest known.
        """
        if not self.costs_by_setting:
            raise self._untimed_error()
        batch, threads = setting = len(prefix.lengths), torch.get_num_threads()
        self.text_length = prefix.longest
        if setting == self.setting:
            return
        self.num_settled = 0
        if setting not in self.costs_by_setting:
            closest = min(
                (other for other, costs in self.costs_by_setting.items() if costs.is_timed),
                key=lambda other: (other[0] != batch, other[1] != threads, abs(other[0] - batch)),
            )
            nearest = self.costs_by_setting[closest]
            share = batch / closest[0]
            copy_seconds = nearest.copies.draft_seconds.value * share
            costs = self.costs_by_setting[setting] = self._make_costs(
                nearest.latency.for_batch(batch), copy_seconds
            )
            costs.reading_seconds = replace(
                nearest.reading_seconds, value=nearest.reading_seconds.value * share
            )
        self.setting = setting

    def _reading_cost(self, costs: RoundCosts, num_unread: int, length: int | None = None) -> float:
        """Return the plain steps that reading so many skipped tokens takes, behind a text of
        `length` tokens or this one.
        """
        if not num_unread:
            return 0.0
        return (
            num_unread
            * costs.reading_seconds.value
            / costs.latency.estimate_verify(1, length or self.text_length)
        )

    def _count_unread(self, prefix: Prefix) -> None:
        """Count the tokens that the drafter would read in this round beyond those of one round."""
        if prefix.begins:
            self.last_draft_length = 0
            self.num_new = None
        self.num_unread = self._skipped_tokens(self.text_length, self.last_draft_length)

    def _skipped_tokens(self, length: int, last_length: int) -> int:
        """Return the tokens since `last_length` that the drafter has not read, 0 where one round
        may have accepted them.
        """
        return length - last_length if length - last_length > self.depth + 1 else 0

    def _fastest_copies(self, tries: list[Trie], spent: float) -> CopyTree:
        """Return the fastest tree of these nodes after `spent` seconds of drafting."""
        seconds = self.verify_seconds(self.text_length)
        return CopyTree.find_fastest(tries, self.depth, seconds, spent, self.costs.latency)

    def report_rounds(self) -> dict[str, object]:
        """Return what was decided, for a report."""
        middle = sorted(self.tree_sizes)[len(self.tree_sizes) // 2] if self.tree_sizes else None
        share = round(self.num_plain / self.num_rounds, 4) if self.num_rounds else None
        return {"median_size": middle, "undrafted_share": share}

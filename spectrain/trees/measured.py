"""Trees that trade expected tokens against measured costs on this machine. Shapes: B batch, F frontier nodes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain.errors import UserError

from .base import Prefix, Rollout, RoundResult, TreeBuilder
from .growing import GrowingTree
from .measurements import Calibration, Latency
from .token_tree import TokenTree
from .trie import Trie

CONTEXT_STRIDE = 32  # tokens by which a context grows before its times are interpolated again


class LatencyAwareBuilder(TreeBuilder):
    """A builder that needs measured times of drafting and verifying."""

    requirements: tuple[str, ...] = ("latency",)
    uses_latency = True
    latency: Latency | None = None

    def prepare(self, calibration: Calibration) -> None:
        self.latency = calibration.latency
        self.verify_curves: dict[int, list[float]] = {}  # seconds of every tree size, by context length

    def require_latency(self) -> Latency:
        if self.latency is None:
            raise UserError(f"tree={self.name}: nothing is timed yet; call prepare with a Calibration that has a latency")
        return self.latency

    def verify_seconds(self, length: int) -> list[float]:
        """Return the seconds to verify every size up to the budget, for a context of this length."""
        latency, context = self.require_latency(), length // CONTEXT_STRIDE * CONTEXT_STRIDE
        if context not in self.verify_curves:
            self.verify_curves[context] = [latency.estimate_verify(size, context) for size in range(1, self.budget + 1)]
        return self.verify_curves[context]


def are_calibrated(tries: list[Trie]) -> bool:
    """Tell whether the weights of all tries are acceptance probabilities."""
    return bool(tries) and all(trie.is_calibrated for trie in tries)


def chances_by_depth(tries: list[Trie], nodes: list[list[int]], depth: int, budget: int) -> np.ndarray:
    """Return the acceptance probability of each text's nodes, in their order, at the node's depth: [B, depth + 1, budget]."""
    chances = np.zeros((len(tries), depth + 1, budget))
    for text_chances, trie, chosen in zip(chances, tries, nodes):
        text_chances[[trie.depths[node] for node in chosen], range(len(chosen))] = [trie.weights[node] for node in chosen]
    return chances


class Auto(LatencyAwareBuilder):
    """The depth and size that maximise predicted speed: expected tokens over the time to draft and verify them.

    Expected tokens are the drafter's path probabilities, corrected at each depth by observed acceptance. Verification times are
    those of the calibration, which ran all sizes in turn. Drafting times are running means, scaled by how much faster or slower
    the round's own verification was than calibrated. (Verification is not fitted again: other work on the machine changed the
    slope of such a fit within a few rounds, and trees grew three times too large.)

    Where copies are available, the drafter runs only if decoding the tokens that it adds would take longer without it, the
    cost of the larger tree included. Its gain is estimated from earlier rounds whose copies promised as many tokens, times the
    fraction of such gains that was realised: tokens accepted beyond what copies alone would have yielded. From time to time
    the drafter runs anyway, to update the estimate; less often as trials accumulate.
    """

    name = "auto"
    learns_from_trees = True

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 8,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 64,
        # Nodes of a level that are expanded, and children of each of them.
        top_k: int = 8,
        # Rounds over which running means of acceptance and times are taken.
        memory: int = 64,
    ) -> None:
        self.depth, self.budget, self.top_k, self.memory = depth, budget, top_k, memory
        self.check_settings(depth=(depth, 1), budget=(budget, 2), top_k=(top_k, 1), memory=(memory, 1))
        self.max_drafted = (depth - 1) * top_k
        self.text_length = 0  # tokens of the longest text in this round
        self.step_seconds = self.start_seconds = 0.0
        self.predicted_rates = np.ones(depth)  # running means, by depth: predicted acceptance ...
        self.observed_rates = np.ones(depth)  # ... and observed acceptance
        self.expected_by_depth: Tensor | None = None  # [B, depth + 1] expected tokens of this round
        self.num_levels = 0  # levels that the drafter made in this round
        self.copy_seconds = 0.0  # drafting time of a round that only copies
        self.copy_tree: CopyTree | None = None  # copies of this round, where the drafter may run too
        self.promised_tokens: float | None = None  # expected gain of the drafter over copies in this round
        self.mean_promised = self.mean_gained = 1.0  # running means of expected and realised gains ...
        self.num_judged = 4  # ... over so many rounds; the first four count as fully realised
        self.drafter_gains: dict[int, DrafterGain] = defaultdict(
            DrafterGain
        )  # gains of the drafter by bucket of the copies' expected tokens
        self.tree_sizes: list[int] = []  # tree size of every round

    def prepare(self, calibration: Calibration) -> None:
        super().prepare(calibration)
        latency = self.require_latency()
        self.start_seconds, self.step_seconds = latency.start_seconds, latency.estimate_step(self.top_k)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        self.text_length, latency = prefix.longest, self.require_latency()
        tree = GrowingTree(self, prefix, rollout)
        device = prefix.root.device
        depths = torch.zeros_like(tree.tokens)
        trust = np.minimum.accumulate(np.clip(self.observed_rates / self.predicted_rates, 0.05, 1.5))
        correction = torch.tensor([0.0, *np.log(trust)], dtype=torch.float32, device=device)
        verify = torch.tensor(self.verify_seconds(self.text_length), dtype=torch.float32, device=device)
        depth = self.max_depth(rollout)
        for level in range(depth):
            scores = tree.add_children(self.top_k)
            depths = torch.cat([depths, torch.full_like(scores, level + 1, dtype=torch.int64)], dim=1)
            chances = (tree.scores + correction[depths]).exp().sort(dim=1, descending=True).values[:, : self.budget]
            tokens = chances.mean(0).cumsum(0)  # the root alone emits one
            spent = self.start_seconds + level * self.step_seconds + latency.estimate_levels(level + 1)
            speed = tokens / (spent + verify[: len(tokens)])
            if level + 1 == depth:
                break
            best = scores.sort(dim=1, descending=True, stable=True)
            mass = float((best.values[:, : self.top_k] + correction[level + 1]).exp().sum(1).mean())
            carried = self.observed_rates[level + 1] / max(self.observed_rates[level], 1e-6)
            if mass * carried < (self.step_seconds + latency.level_seconds) * float(speed.max()):
                break  # another level costs more time than its expected tokens save
            tree.extend_frontier(best.indices[:, : self.top_k])
        size = max(2, int(speed.argmax()) + 1)
        self.num_levels = level + 1
        ranked = tree.scores.sort(dim=1, descending=True, stable=True)
        self.expected_by_depth = torch.zeros(len(prefix.root), self.depth + 1, device=device)
        self.expected_by_depth.scatter_add_(1, depths.gather(1, ranked.indices[:, :size]), ranked.values[:, :size].exp())
        return tree.select_best(size)

    def needs_drafter(self, prefix: Prefix, tries: list[Trie]) -> bool:
        self.copy_tree, self.text_length = None, prefix.longest
        if not are_calibrated(tries):
            return True
        self.copy_tree = copies = self._fastest_copies(tries, self.copy_seconds)
        alone, added = self.copy_seconds + copies.seconds, self.drafter_gains[copies.gain_bucket]
        drafting = (
            self.start_seconds - self.copy_seconds + max(0.0, added.num_levels - 1) * self.step_seconds + added.verify_seconds
        )
        tokens = added.num_tokens * min(1.0, max(0.0, self.mean_gained / max(self.mean_promised, 1e-6)))
        return added.needs_trial() or tokens * alone > copies.num_tokens * drafting

    def copy_budget(self, prefix: Prefix, tries: list[Trie]) -> int:
        """Return the fastest size after drafting; copies and drafted nodes compete by calibrated probability."""
        if not are_calibrated(tries):
            return self.budget
        self.text_length = prefix.longest
        if self.num_levels:
            fastest = self._fastest_copies(tries, self.start_seconds + (self.num_levels - 1) * self.step_seconds)
        else:
            fastest = self.copy_tree or self._fastest_copies(tries, self.copy_seconds)
        if self.num_levels and self.copy_tree is not None:
            self.promised_tokens = fastest.num_tokens - self.copy_tree.num_tokens
            added = self.drafter_gains[self.copy_tree.gain_bucket]
            added.update_means(self.promised_tokens, self.num_levels, fastest.seconds - self.copy_tree.seconds, 1 / self.memory)
        self.expected_by_depth = fastest.expected_by_depth
        return fastest.size

    def _fastest_copies(self, tries: list[Trie], spent: float) -> CopyTree:
        """Return the fastest tree of these nodes after `spent` seconds of drafting."""
        nodes = [trie.rank_nodes(self.depth, self.budget) for trie in tries]
        chances = chances_by_depth(tries, nodes, self.depth, self.budget)
        tokens, seconds = chances.sum(1).mean(0).cumsum(), np.asarray(self.verify_seconds(self.text_length))
        if self.require_latency().level_seconds:
            levels = np.arange(chances.shape[1])[:, None] * (chances.sum(0) > 0)
            seconds = seconds + [
                self.require_latency().estimate_levels(int(level)) for level in np.maximum.accumulate(levels.max(0))
            ]
        size = int((tokens / (spent + seconds)).argmax()) + 1
        expected = torch.from_numpy(chances[:, :, :size].sum(2))
        selected = [set(chosen[:size]) for chosen in nodes]
        return CopyTree(size, float(tokens[size - 1]), float(seconds[size - 1]), expected, tries, selected)

    def observe(self, round: RoundResult) -> None:
        rate, levels, self.num_levels = 1 / self.memory, self.num_levels, 0
        copies, self.copy_tree, promised, self.promised_tokens = self.copy_tree, None, self.promised_tokens, None
        if copies is not None and promised is not None and int(round.counts.min()):  # a finished row emits nothing
            self.num_judged += 1
            judge_rate = max(rate, 1 / self.num_judged)
            self.mean_promised += judge_rate * (promised - self.mean_promised)
            self.mean_gained += judge_rate * (copies.drafter_gain(round) - self.mean_gained)
        judged = (round.tree.valid & round.tree.can_emit).sum(1)
        if int(judged.max()) == 1:
            return  # nothing was drafted
        self.tree_sizes.append(int(judged.max()))
        latency = self.require_latency()
        expected_seconds = latency.estimate_verify(self.tree_sizes[-1], self.text_length)
        expected_seconds += latency.estimate_levels(int(round.tree.depths.max())) if latency.level_seconds else 0.0
        slowdown = (round.seconds["verify"] + round.seconds["accept"]) / expected_seconds
        drafting = round.seconds["draft"] / max(slowdown, 1e-9)
        if levels > 1:
            step = max(0.0, (drafting - self.start_seconds) / (levels - 1))
            self.step_seconds += rate * (step - self.step_seconds)
        elif levels == 0:
            self.copy_seconds += rate * (drafting - self.copy_seconds)
        else:
            self.start_seconds += rate * (drafting - self.start_seconds)
        if self.expected_by_depth is None:
            return  # uncalibrated copies
        for expected, count in zip(self.expected_by_depth.tolist(), (round.counts * (judged > 1)).tolist()):
            for depth in range(1, self.depth + 1):
                if count and expected[depth]:
                    self.predicted_rates[depth - 1] += rate * (expected[depth] - self.predicted_rates[depth - 1])
                    self.observed_rates[depth - 1] += rate * ((count > depth) - self.observed_rates[depth - 1])

    def report_settings(self) -> dict[str, object]:
        middle = sorted(self.tree_sizes)[len(self.tree_sizes) // 2] if self.tree_sizes else None
        return {**super().report_settings(), "median_size": middle}


@dataclass(frozen=True)
class CopyTree:
    """The fastest tree of ready continuations. Shapes: B batch, D depth."""

    size: int  # nodes, the root included
    num_tokens: float  # expected tokens of a round
    seconds: float  # time to verify the tree
    expected_by_depth: Tensor  # [B, 1 + D] expected accepted nodes, by depth
    tries: list[Trie]
    nodes: list[set[int]]  # selected nodes of each trie

    @property
    def gain_bucket(self) -> int:
        """The bucket of expected tokens by which gains are averaged; at most 6, because more buckets have fewer rounds each."""
        return min(6, round(2 * self.num_tokens))

    def drafter_gain(self, outcome: RoundResult) -> float:
        """Return how many more tokens per text a round with drafted nodes accepted than these copies alone would have."""
        assert outcome.path is not None
        paths = outcome.tree.tokens.gather(1, outcome.path).tolist()
        accepted = [path[1:count] for path, count in zip(paths, outcome.counts.tolist())]
        return sum(len(tokens) - self._matched_length(row, tokens) for row, tokens in enumerate(accepted)) / len(accepted)

    def _matched_length(self, row: int, tokens: list[int]) -> int:
        """Return how many of the tokens after a text's root follow a path of these nodes."""
        node: int | None = 0
        for length, token in enumerate(tokens):
            node = None if node is None else self.tries[row].find_child(node, token)
            if node not in self.nodes[row]:
                return length
        return len(tokens)


@dataclass
class DrafterGain:
    """The drafter's expected gain over copies of one bucket: running means over the rounds in which it ran."""

    num_tokens: float = 0.0
    num_levels: float = 1.0
    verify_seconds: float = 0.0  # added seconds of the larger tree
    num_trials: int = 0
    rounds_skipped: int = 0  # rounds without the drafter since the last trial

    def needs_trial(self) -> bool:
        """Tell whether trials are too few or too long ago."""
        self.rounds_skipped += 1
        return self.num_trials < 4 or self.rounds_skipped >= 16 * self.num_trials

    def update_means(self, tokens: float, levels: int, verifying: float, rate: float) -> None:
        self.num_trials, self.rounds_skipped = self.num_trials + 1, 0
        rate = max(rate, 1 / self.num_trials)
        self.num_tokens += rate * (tokens - self.num_tokens)
        self.num_levels += rate * (levels - self.num_levels)
        self.verify_seconds += rate * (verifying - self.verify_seconds)

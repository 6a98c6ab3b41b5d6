"""Trees that weigh what a node may gain against what it costs on this machine. Shapes: B batch, F frontier nodes."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain.errors import UserError

from .base import GrowingTree, Prefix, Rollout, Round, TreeBuilder
from .measurements import Calibration, Latency
from .token_tree import TokenTree
from .trie import Trie

STRIDE = 32  # tokens by which a text grows before the times behind it are looked up again


class Measured(TreeBuilder):
    """A builder that needs the time of drafting and verifying."""

    needs: tuple[str, ...] = ("latency",)
    goes_by_clock = True
    latency: Latency | None = None

    def prepare(self, calibration: Calibration) -> None:
        self.latency = calibration.latency
        self.curves: dict[int, list[float]] = {}  # seconds of every size, by the length of the text, in steps of STRIDE

    def _known(self) -> Latency:
        if self.latency is None:
            raise UserError(f"tree={self.name}: nothing is timed yet; call prepare with a Calibration that has a latency")
        return self.latency

    def _verify_seconds(self, length: int) -> list[float]:
        """Of every size up to the budget, behind texts so long."""
        latency, context = self._known(), length // STRIDE * STRIDE
        if context not in self.curves:
            self.curves[context] = [latency.verify(size, context) for size in range(1, self.budget + 1)]
        return self.curves[context]


class Cast(Measured):
    """CAST (Hu et al., 2025): breadth, depth and size by measured cost. u is expected tokens, c is cost in target steps.

    Walking k up the sorted nodes, k is taken where (u_k - u_k') / (c_k - c_k') exceeds a threshold, k' the last one taken:
    `breadth_gain` for how many nodes of a level are drafted on, `size_gain` for how many nodes are verified. Another level is
    drafted while alpha u / c of this one is at least `depth_gain`, alpha being the mean of how u changed from level to level
    over the last `memory` rounds. The default, one token a target step, is what decoding without a drafter yields.
    """

    name = "cast"

    def __init__(
        self,
        depth: int = 8,
        budget: int = 64,
        top_k: int = 8,
        breadth_gain: float = 1.0,
        depth_gain: float = 1.0,
        size_gain: float = 1.0,
        memory: int = 16,
    ) -> None:
        self.depth, self.budget, self.top_k, self.memory = depth, budget, top_k, memory
        self.breadth_gain, self.depth_gain, self.size_gain = breadth_gain, depth_gain, size_gain
        self._check(depth=(depth, 1), budget=(budget, 2), top_k=(top_k, 1), memory=(memory, 1), breadth_gain=(breadth_gain, 0),
                    depth_gain=(depth_gain, 0), size_gain=(size_gain, 0))  # fmt: skip
        self.drafted = (depth - 1) * top_k
        self.change: list[deque[float]] = [deque(maxlen=memory) for _ in range(depth)]
        self.costs: list[float] = []  # of verifying so many nodes, in target steps, in the round that is being drafted

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        latency = self._known()
        length = prefix.longest
        step = latency.verify(1, length)
        draft = GrowingTree(self, prefix, rollout)
        depth = self.reach(rollout)
        last = None
        for level in range(depth):
            scores = draft.branch(self.top_k)
            best = scores.sort(dim=1, descending=True, stable=True)
            gains = best.values[:, : self.top_k].exp().mean(0).cumsum(0).tolist()
            costs = [(latency.step(k, length) + latency.level_seconds) / step for k in range(1, len(gains) + 1)]
            width = walk_up(gains, costs, self.breadth_gain)
            if last is not None:
                self.change[level - 1].append(gains[width - 1] / max(last, 1e-9))
            last = gains[width - 1]
            history = self.change[level]
            alpha = sum(history) / len(history) if history else 1.0
            if level + 1 == depth or alpha * last / max(costs[width - 1], 1e-9) < self.depth_gain:
                break
            draft.extend(best.indices[:, :width])
        values = draft.scores.sort(dim=1, descending=True).values[:, : self.budget].exp().mean(0).cumsum(0).tolist()
        self.costs = [seconds / step for seconds in self._verify_seconds(length)]
        return draft.best(max(2, walk_up(values, self.costs, self.size_gain)))

    def room(self, prefix: Prefix, tries: list[Trie]) -> int:
        if not (self.costs and weigh_chances(tries)):
            return self.budget
        nodes = [trie.heaviest(self.depth, self.budget) for trie in tries]
        tokens = expected_tokens(tries, nodes, self.depth, self.budget).sum(1).mean(0).cumsum()
        return walk_up(tokens.tolist(), self.costs, self.size_gain)


def walk_up(gains: list[float], costs: list[float], least: float) -> int:
    """How many nodes to take: k is taken where its gain over the last one taken exceeds `least` times the added cost."""
    taken = 0
    for k in range(1, len(gains)):
        if gains[k] - gains[taken] > least * (costs[k] - costs[taken]):
            taken = k
    return taken + 1


def weigh_chances(tries: list[Trie]) -> bool:
    """Whether it is known how likely their nodes are kept."""
    return bool(tries) and all(trie.weighs_chances for trie in tries)


def expected_tokens(tries: list[Trie], nodes: list[list[int]], depth: int, budget: int) -> np.ndarray:
    """[B, depth + 1, budget] the chance of the first of each text's nodes, the second and so on, at the node's depth."""
    found = np.zeros((len(tries), depth + 1, budget))
    for row, trie, chosen in zip(found, tries, nodes):
        row[[trie.depths[node] for node in chosen], range(len(chosen))] = [trie.weights[node] for node in chosen]
    return found


class Auto(Measured):
    """The depth and size that maximise predicted speed: expected tokens over the time to draft and verify them.

    Expected tokens are the drafter's path probabilities, corrected at each depth by how often they came true. Times are those
    of the calibration, which ran all sizes in turn; those of drafting follow what happens, as much faster or slower as the
    round's own verification says that the machine is now. (Verification itself is not fitted anew: other work beside a few
    rounds changed the slope of such a fit, and trees grew three times too large.)

    Where copies are known besides, a drafter is asked only if the tokens that it adds to what copies promise would take longer
    to decode without it, the larger trees that they make counted. They are those that it promised in earlier rounds, beside
    copies that promised as much, of which as many count as proved to be added: kept, where copies alone would have kept fewer.
    Now and then it is asked to see, the more rarely the more is known.
    """

    name = "auto"
    learns_from_trees = True

    def __init__(self, depth: int = 8, budget: int = 64, top_k: int = 8, memory: int = 64) -> None:
        self.depth, self.budget, self.top_k, self.memory = depth, budget, top_k, memory
        self._check(depth=(depth, 1), budget=(budget, 2), top_k=(top_k, 1), memory=(memory, 1))
        self.drafted = (depth - 1) * top_k
        self.length = 0  # of the longest text in this round
        self.step_seconds = self.start_seconds = 0.0
        self.predicted = np.ones(depth)  # running means, by depth: chance that a node there is kept, as predicted ...
        self.observed = np.ones(depth)  # ... and as it came true
        self.expected: Tensor | None = None  # [B, depth + 1] of the round that is being verified
        self.levels = 0  # that the drafter made in that round
        self.copy_seconds = 0.0  # of a round's draft that only copies
        self.copies: ReadyTree | None = None  # of this round, if a drafter may be asked beside them
        self.hoped: float | None = None  # tokens that it promised to add to them in this round
        self.promised = self.proved = 1.0  # running means of such tokens, and of those that it did add ...
        self.judged = 4  # ... over so many rounds, which count as if they had held what they promised
        self.added: dict[int, Added] = defaultdict(Added)  # by the drafter, by twice the tokens that copies promised
        self.sizes: list[int] = []  # of every round's tree

    def prepare(self, calibration: Calibration) -> None:
        super().prepare(calibration)
        latency = self._known()
        self.start_seconds, self.step_seconds = latency.start_seconds, latency.step(self.top_k)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        self.length, latency = prefix.longest, self._known()
        draft = GrowingTree(self, prefix, rollout)
        device = prefix.root.device
        depths = torch.zeros_like(draft.tokens)
        trust = np.minimum.accumulate(np.clip(self.observed / self.predicted, 0.05, 1.5))
        correction = torch.tensor([0.0, *np.log(trust)], dtype=torch.float32, device=device)
        verify = torch.tensor(self._verify_seconds(self.length), dtype=torch.float32, device=device)
        depth = self.reach(rollout)
        for level in range(depth):
            scores = draft.branch(self.top_k)
            depths = torch.cat([depths, torch.full_like(scores, level + 1, dtype=torch.int64)], dim=1)
            chances = (draft.scores + correction[depths]).exp().sort(dim=1, descending=True).values[:, : self.budget]
            tokens = chances.mean(0).cumsum(0)  # the root alone emits one
            spent = self.start_seconds + level * self.step_seconds + latency.deeper(level + 1)
            speed = tokens / (spent + verify[: len(tokens)])
            if level + 1 == depth:
                break
            best = scores.sort(dim=1, descending=True, stable=True)
            mass = float((best.values[:, : self.top_k] + correction[level + 1]).exp().sum(1).mean())
            carried = self.observed[level + 1] / max(self.observed[level], 1e-6)
            if mass * carried < (self.step_seconds + latency.level_seconds) * float(speed.max()):
                break  # the tokens that another level promises would be decoded sooner without it
            draft.extend(best.indices[:, : self.top_k])
        size = max(2, int(speed.argmax()) + 1)
        self.levels = level + 1
        kept = draft.scores.sort(dim=1, descending=True, stable=True)
        self.expected = torch.zeros(len(prefix.root), self.depth + 1, device=device)
        self.expected.scatter_add_(1, depths.gather(1, kept.indices[:, :size]), kept.values[:, :size].exp())
        return draft.best(size)

    def asks(self, prefix: Prefix, tries: list[Trie]) -> bool:
        self.copies, self.length = None, prefix.longest
        if not weigh_chances(tries):
            return True
        self.copies = copies = self._fastest(tries, self.copy_seconds)
        alone, added = self.copy_seconds + copies.seconds, self.added[copies.kind]
        drafting = self.start_seconds - self.copy_seconds + max(0.0, added.levels - 1) * self.step_seconds + added.verifying
        tokens = added.tokens * min(1.0, max(0.0, self.proved / max(self.promised, 1e-6)))
        return added.wants_trial() or tokens * alone > copies.tokens * drafting

    def room(self, prefix: Prefix, tries: list[Trie]) -> int:
        """As many as pay, the draft being made: copies and what a drafter's nodes turned out to be worth are weighed alike."""
        if not weigh_chances(tries):
            return self.budget
        self.length = prefix.longest
        if self.levels:
            found = self._fastest(tries, self.start_seconds + (self.levels - 1) * self.step_seconds)
        else:
            found = self.copies or self._fastest(tries, self.copy_seconds)
        if self.levels and self.copies is not None:
            self.hoped = found.tokens - self.copies.tokens
            added = self.added[self.copies.kind]
            added.learn(self.hoped, self.levels, found.seconds - self.copies.seconds, 1 / self.memory)
        self.expected = found.expected
        return found.size

    def _fastest(self, tries: list[Trie], spent: float) -> ReadyTree:
        """The best tree of such nodes after so many seconds of drafting."""
        nodes = [trie.heaviest(self.depth, self.budget) for trie in tries]
        chances = expected_tokens(tries, nodes, self.depth, self.budget)
        tokens, seconds = chances.sum(1).mean(0).cumsum(), np.asarray(self._verify_seconds(self.length))
        if self._known().level_seconds:
            levels = np.arange(chances.shape[1])[:, None] * (chances.sum(0) > 0)
            seconds = seconds + [self._known().deeper(int(level)) for level in np.maximum.accumulate(levels.max(0))]
        size = int((tokens / (spent + seconds)).argmax()) + 1
        expected = torch.from_numpy(chances[:, :, :size].sum(2))
        kept = [set(chosen[:size]) for chosen in nodes]
        return ReadyTree(size, float(tokens[size - 1]), float(seconds[size - 1]), expected, tries, kept)

    def observe(self, round: Round) -> None:
        rate, levels, self.levels = 1 / self.memory, self.levels, 0
        copies, self.copies, hoped, self.hoped = self.copies, None, self.hoped, None
        if copies is not None and hoped is not None and int(round.counts.min()):  # a row that was done emits nothing
            self.judged += 1
            swift = max(rate, 1 / self.judged)
            self.promised += swift * (hoped - self.promised)
            self.proved += swift * (copies.added_in(round) - self.proved)
        judged = (round.tree.valid & round.tree.emitted).sum(1)
        if int(judged.max()) == 1:
            return  # nothing was ready to draft
        self.sizes.append(int(judged.max()))
        latency = self._known()
        usual = latency.verify(self.sizes[-1], self.length)
        usual += latency.deeper(int(round.tree.depths.max())) if latency.level_seconds else 0.0
        slower = (round.seconds["verify"] + round.seconds["accept"]) / usual
        drafting = round.seconds["draft"] / max(slower, 1e-9)
        if levels > 1:
            step = max(0.0, (drafting - self.start_seconds) / (levels - 1))
            self.step_seconds += rate * (step - self.step_seconds)
        elif levels == 0:
            self.copy_seconds += rate * (drafting - self.copy_seconds)
        else:
            self.start_seconds += rate * (drafting - self.start_seconds)
        if self.expected is None:
            return  # copies, of which nothing is known but their order
        for expected, count in zip(self.expected.tolist(), (round.counts * (judged > 1)).tolist()):
            for depth in range(1, self.depth + 1):
                if count and expected[depth]:
                    self.predicted[depth - 1] += rate * (expected[depth] - self.predicted[depth - 1])
                    self.observed[depth - 1] += rate * ((count > depth) - self.observed[depth - 1])

    def settings(self) -> dict[str, object]:
        middle = sorted(self.sizes)[len(self.sizes) // 2] if self.sizes else None
        return {**super().settings(), "median_size": middle}


@dataclass(frozen=True)
class ReadyTree:
    """Of ready continuations, as many nodes as are expected to be the fastest. Shapes: B batch, D depth."""

    size: int  # nodes, the root included
    tokens: float  # that it promises
    seconds: float  # of verifying it
    expected: Tensor  # [B, 1 + D] nodes that are expected to be kept, by depth
    tries: list[Trie]
    nodes: list[set[int]]  # of each

    @property
    def kind(self) -> int:
        """By which promises are told apart, large ones not: the more kinds there are, the less is known of each."""
        return min(6, round(2 * self.tokens))

    def added_in(self, outcome: Round) -> float:
        """How many more tokens a round kept, in which a drafter's nodes were there too, than these alone would have."""
        assert outcome.path is not None
        paths = outcome.tree.tokens.gather(1, outcome.path).tolist()
        kept = [path[1:count] for path, count in zip(paths, outcome.counts.tolist())]
        return sum(len(tokens) - self._found(row, tokens) for row, tokens in enumerate(kept)) / len(kept)

    def _found(self, row: int, tokens: list[int]) -> int:
        """How many of the tokens that followed a text's root are a path of these nodes."""
        node: int | None = 0
        for length, token in enumerate(tokens):
            node = None if node is None else self.tries[row].child(node, token)
            if node not in self.nodes[row]:
                return length
        return len(tokens)


@dataclass
class Added:
    """What a drafter promised to add to copies that promised so much: running means over the rounds that asked it."""

    tokens: float = 0.0
    levels: float = 1.0
    verifying: float = 0.0  # seconds that the larger tree took
    trials: int = 0
    since: int = 0  # rounds that went without it

    def wants_trial(self) -> bool:
        """Whether too little is known, or it is long ago."""
        self.since += 1
        return self.trials < 4 or self.since >= 16 * self.trials

    def learn(self, tokens: float, levels: int, verifying: float, rate: float) -> None:
        self.trials, self.since = self.trials + 1, 0
        rate = max(rate, 1 / self.trials)
        self.tokens += rate * (tokens - self.tokens)
        self.levels += rate * (levels - self.levels)
        self.verifying += rate * (verifying - self.verifying)

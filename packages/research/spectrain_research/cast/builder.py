"""Trees whose breadth, depth and size follow measured costs. Shapes: B batch."""

from __future__ import annotations

from collections import deque

from spectrain.copying.trie import Trie
from spectrain.trees.base import Prefix, check_settings
from spectrain.trees.copy_tree import are_calibrated, chances_by_depth
from spectrain.trees.growing import GrowingTree
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.latency_aware import LatencyAwareBuilder


class Cast(LatencyAwareBuilder):
    """CAST (Hu et al., 2025): breadth, depth and size by measured cost. u: expected tokens, c: cost
    in target steps.

    Walking k up the sorted nodes, k is taken where (u_k - u_k') / (c_k - c_k') exceeds a threshold,
    k' the last one taken: `breadth_gain` for how many nodes of a level are drafted on, `size_gain`
    for how many nodes are verified. Another level is drafted while alpha u / c of this one is at
    least `depth_gain`, alpha being the mean of how u changed from level to level over the last
    `memory` rounds. The default, one token a target step, is what decoding without a drafter
    yields.
    """

    name = "cast"

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 8,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 64,
        # Nodes of a level that are expanded, and children of each of them.
        top_k: int = 8,
        # Expected tokens that one more target step of cost must gain for another node of a level to
        # be drafted on.
        breadth_gain: float = 1.0,
        # Expected tokens per target step of cost that a level must promise for another level to be
        # drafted.
        depth_gain: float = 1.0,
        # Expected tokens that one more target step of cost must gain for another node to be
        # verified.
        size_gain: float = 1.0,
        # Rounds over which the change of expected tokens from level to level is averaged.
        memory: int = 16,
    ) -> None:
        self.depth = depth
        self.budget = budget
        self.top_k = top_k
        self.memory = memory
        self.breadth_gain, self.depth_gain, self.size_gain = breadth_gain, depth_gain, size_gain
        check_settings(
            self,
            depth=(depth, 1),
            budget=(budget, 2),
            top_k=(top_k, 1),
            memory=(memory, 1),
            breadth_gain=(breadth_gain, 0),
            depth_gain=(depth_gain, 0),
            size_gain=(size_gain, 0),
        )
        self.max_drafted = (depth - 1) * top_k
        self.level_ratios: list[deque[float]] = [deque(maxlen=memory) for _ in range(depth)]
        # verification cost by number of nodes in this round, in target steps
        self.verify_costs: list[float] = []

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        latency = self.require_latency()
        length = prefix.longest
        step = latency.estimate_verify(1, length)
        tree = GrowingTree(self, prefix, rollout)
        depth = rollout.limit_depth(self.depth)
        last_gain = None
        for level in range(depth):
            scores = tree.add_children(self.top_k)
            best = scores.sort(dim=1, descending=True, stable=True)
            gains = best.values[:, : self.top_k].exp().mean(0).cumsum(0).tolist()
            costs = [
                (latency.estimate_step(k, length) + latency.level_seconds) / step
                for k in range(1, len(gains) + 1)
            ]
            width = choose_size(gains, costs, self.breadth_gain)
            if last_gain is not None:
                self.level_ratios[level - 1].append(gains[width - 1] / max(last_gain, 1e-9))
            last_gain = gains[width - 1]
            history = self.level_ratios[level]
            alpha = sum(history) / len(history) if history else 1.0
            if (
                level + 1 == depth
                or alpha * last_gain / max(costs[width - 1], 1e-9) < self.depth_gain
            ):
                break
            tree.extend_frontier(best.indices[:, :width])
        values = (
            tree.scores.sort(dim=1, descending=True)
            .values[:, : self.budget]
            .exp()
            .mean(0)
            .cumsum(0)
            .tolist()
        )
        self.verify_costs = [seconds / step for seconds in self.verify_seconds(length)]
        return tree.select_best(max(2, choose_size(values, self.verify_costs, self.size_gain)))

    def copy_budget(self, prefix: Prefix, tries: list[Trie]) -> int:
        if not (self.verify_costs and are_calibrated(tries)):
            return self.budget
        nodes = [trie.rank_nodes(self.depth, self.budget) for trie in tries]
        tokens = chances_by_depth(tries, nodes, self.depth, self.budget).sum(1).mean(0).cumsum()
        return choose_size(tokens.tolist(), self.verify_costs, self.size_gain)


def choose_size(gains: list[float], costs: list[float], threshold: float) -> int:
    """Choose how many nodes to take: k is taken where its gain over the last one exceeds
    `threshold` times the added cost.
    """
    taken = 0
    for k in range(1, len(gains)):
        if gains[k] - gains[taken] > threshold * (costs[k] - costs[taken]):
            taken = k
    return taken + 1

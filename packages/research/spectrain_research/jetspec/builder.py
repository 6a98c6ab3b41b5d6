"""Trees from one pass of a drafter (JetSpec, arXiv 2606.18394)."""

from __future__ import annotations

import heapq
import itertools
import math

import torch

from spectrain.trees.base import Prefix, TreeBuilder, check_settings
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree


class OnePassTree(TreeBuilder):
    """JetSpec's `accum_logp`: the node whose path has the largest probability gets the `width` most
    likely tokens of the next depth as children, until the budget is reached.

    After a pass that drafts all tokens, as DFlash's, all nodes of a depth have the same children,
    and a node costs a lookup. With width 1 the tree is the greedy chain.
    """

    name = "one_pass"

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 15,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 32,
        # Number of children of a node.
        width: int = 4,
    ) -> None:
        self.depth, self.budget, self.width = depth, budget, width
        check_settings(self, depth=(depth, 1), budget=(budget, 2), width=(width, 1))
        self.max_drafted = budget

    def report_settings(self) -> dict[str, object]:
        return {**super().report_settings(), "width": self.width}

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        rows = [
            _Row(self, token, rollout.limit_depth(self.depth)) for token in prefix.root.tolist()
        ]
        log_q = rollout.start()
        device = prefix.root.device
        for number in itertools.count(1):
            top = log_q[:, 0].topk(min(self.width, log_q.shape[-1]), dim=-1)
            scores = (
                top.values
                if rollout.stop_mask is None
                else top.values.masked_fill(rollout.stop_mask[:, :1], -math.inf)
            )
            for row, *children in zip(
                rows, scores.tolist(), rollout.to_target_ids(top.indices).tolist()
            ):
                row.add_children(*children)
            opened = [row.open_best(number) for row in rows]
            if not any(row.is_open for row in rows):
                break
            tokens, parents = torch.tensor(opened, device=device).T[..., None]
            log_q = rollout.extend(tokens, parents)
        size = max(len(row.nodes) for row in rows)
        padded = [row.nodes + [(0, 0, -math.inf)] * (size - len(row.nodes)) for row in rows]
        tokens, parents = torch.tensor(
            [[node[:2] for node in row] for row in padded], device=device
        ).unbind(-1)
        log_scores = torch.tensor([[node[2] for node in row] for row in padded], device=device)
        valid = log_scores > -math.inf
        every = torch.ones_like(tokens, dtype=torch.bool)
        return TokenTree(
            tokens, parents, valid, every, draft_ids=rollout.draft_ids, scores=log_scores
        )


class _Row:
    """The tree of one row while it grows: nodes with token, parent and score, the root first."""

    def __init__(self, builder: OnePassTree, root: int, max_depth: int) -> None:
        self.budget, self.max_depth = builder.budget, max_depth
        self.nodes: list[tuple[int, int, float]] = [(root, -1, 0.0)]
        # depth of each node, and the order of those that the drafter has run
        self.depths = [0]
        self.run_order = {0: 0}
        # negated score and number of each node that may be continued
        self.heap: list[tuple[float, int]] = []
        self.newest = 0
        self.is_open = True

    def add_children(self, scores: list[float], tokens: list[int]) -> None:
        """Add the children of the newest opened node, the likeliest first, as far as the budget
        reaches.
        """
        if not self.is_open:
            return
        depth = self.depths[self.newest] + 1
        for score, token in zip(scores, tokens):
            total = self.nodes[self.newest][2] + score
            if len(self.nodes) < self.budget and total > -math.inf:
                if depth < self.max_depth:
                    heapq.heappush(self.heap, (-total, len(self.nodes)))
                self.nodes.append((token, self.newest, total))
                self.depths.append(depth)

    def open_best(self, number: int) -> tuple[int, int]:
        """Open the best node and return its token and its parent's order; a row that is complete
        runs its root again.
        """
        self.is_open = self.is_open and bool(self.heap) and len(self.nodes) < self.budget
        if not self.is_open:
            return self.nodes[0][0], 0
        _, self.newest = heapq.heappop(self.heap)
        self.run_order[self.newest] = number
        token, parent, _ = self.nodes[self.newest]
        return token, self.run_order[parent]

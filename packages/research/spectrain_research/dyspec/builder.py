"""Trees that grow slot by slot, the most valuable slot first. Shapes: B batch, F frontier nodes,
V draft ids.
"""

from __future__ import annotations

import heapq
from typing import Literal

import torch
from torch import Tensor

from spectrain.randomness import DRAFT, gumbel_noise, keyed_generator
from spectrain.trees.base import Prefix, TreeBuilder, TreeTraits, check_settings
from spectrain.trees.growing import sampling_probs
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree


class DySpec(TreeBuilder):
    """DySpec (Xiong et al., 2024): the open slot with the largest value, the probability that it is
    reached, is filled next.

    Token y, drawn at a slot of value v from the residual of q, opens a child slot of value v q(y)
    and a sibling slot of value v (1 - q(y)), with y removed from q. Where the best slot lies below
    a node that the drafter has not run, all such nodes run together. Filling stops at the budget or
    below `threshold`. A slot is given up before its token is drawn, so sampled trees stay lossless.
    """

    name = "dyspec"
    traits = TreeTraits(drafts_by_level=False)

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 5,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Filling stops where the best open slot is reached with a probability below this threshold.
        threshold: float = 0.0,
        # How the children of a node are chosen: deterministic or without_replacement; acceptance
        # rules depend on it.
        children: Literal["deterministic", "without_replacement"] = "without_replacement",
        # Temperature of the distribution that sampled children are drawn from.
        temperature: float = 1.0,
        # Seed of the random draws of children.
        seed: int = 0,
    ) -> None:
        self.depth, self.budget, self.threshold = depth, budget, threshold
        self.children, self.temperature, self.seed = children, temperature, seed
        check_settings(self, depth=(depth, 1), budget=(budget, 2), threshold=(threshold, 0))
        # rows wait for each other: step i runs at most budget - i nodes
        self.max_drafted = budget * (budget - 1) // 2

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        rows = [
            _DySpecRow(self, index, token, keyed_generator(DRAFT, self.seed, key, position))
            for index, (token, key, position) in enumerate(
                zip(prefix.root.tolist(), prefix.sequence_ids.tolist(), prefix.lengths.tolist())
            )
        ]
        device = prefix.root.device
        num_fed = 0
        log_q = rollout.start()
        nodes_by_row = [[0] for _ in rows]
        while True:
            for row, nodes, q in zip(rows, nodes_by_row, sampling_probs(log_q, self.temperature)):
                for position, node in enumerate(nodes):
                    row.rollout_index[node], row.q[node] = num_fed + position, q[position]
                if rollout.stop_mask is not None:
                    row.stopped_nodes |= {
                        node
                        for position, node in enumerate(nodes)
                        if rollout.stop_mask[row.index, position]
                    }
                row.fill_slots(rollout)
            num_fed += log_q.shape[1]
            nodes_by_row = [row.nodes_to_run() for row in rows]
            width = max(map(len, nodes_by_row))
            if width == 0:
                return self._make_tree(rows, rollout, log_q)
            padding = [[0] * (width - len(nodes)) for nodes in nodes_by_row]
            tokens = [
                [row.tokens[n] for n in nodes] + pad
                for row, nodes, pad in zip(rows, nodes_by_row, padding)
            ]
            parents = [
                [row.rollout_index[row.parents[n]] for n in nodes] + pad
                for row, nodes, pad in zip(rows, nodes_by_row, padding)
            ]
            log_q = rollout.extend(
                torch.tensor(tokens, device=device), torch.tensor(parents, device=device)
            )

    def _make_tree(self, rows: list[_DySpecRow], rollout: Rollout, like: Tensor) -> TokenTree:
        """Build one padded batch from the trees of all rows."""
        width = max(len(row.tokens) for row in rows)
        device = like.device
        tokens = torch.tensor(
            [row.tokens + [0] * (width - len(row.tokens)) for row in rows], device=device
        )
        parents = torch.tensor(
            [row.parents + [0] * (width - len(row.tokens)) for row in rows], device=device
        )
        valid = torch.tensor(
            [[n < len(row.tokens) for n in range(width)] for row in rows], device=device
        )
        q = None
        if self.children != "deterministic":
            q = like.new_zeros(len(rows), width, like.shape[-1])
            for b, row in enumerate(rows):
                for node, drawn_from in row.q.items():
                    q[b, node] = drawn_from
        values = torch.tensor(
            [row.values + [0.0] * (width - len(row.tokens)) for row in rows], device=device
        )
        every = torch.ones_like(valid)
        return TokenTree(
            tokens, parents, valid, every, self.children, q, rollout.draft_ids, scores=values.log()
        )


class _DySpecRow:
    """The tree of one row while DySpec fills it."""

    def __init__(self, builder: DySpec, number: int, root: int, source: torch.Generator) -> None:
        self.builder = builder
        self.index = number
        self.rng = source
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.values = [1.0]  # the chance that a node is reached
        self.rollout_index: dict[int, int] = {}  # node -> its order in the rollout
        self.q: dict[int, Tensor] = {}  # draft distribution of each node that the drafter has run
        self.residual_q: dict[int, Tensor] = {}  # q without the children that exist, normalised
        self.stopped_nodes: set[int] = set()  # nodes whose children are not drafted
        self.open_slots = [(-1.0, 0)]  # negated value of an open slot, and its parent node

    def fill_slots(self, rollout: Rollout) -> None:
        """Fill open slots, the best first, until one lies below a node that the drafter has not
        run.
        """
        while self._has_open_slot() and self.open_slots[0][1] in self.q:
            value, parent = heapq.heappop(self.open_slots)
            if parent in self.stopped_nodes:
                continue
            residual = self.residual_q.get(parent, self.q[parent])
            scores = residual.log()
            if self.builder.children != "deterministic":
                scores = scores + gumbel_noise(tuple(residual.shape), self.rng).to(residual.device)
            choice = scores.argmax()
            chance = float(residual[choice])
            node = len(self.tokens)
            self.tokens.append(int(rollout.to_target_ids(choice)))
            self.values.append(self.values[parent] * float(self.q[parent][choice]))
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            if self.depths[node] < rollout.limit_depth(self.builder.depth):
                heapq.heappush(self.open_slots, (value * chance, node))
            rest = residual.clone()
            rest[choice] = 0
            if (total := float(rest.sum())) > 0:
                self.residual_q[parent] = rest / total
                heapq.heappush(self.open_slots, (value * (1 - chance), parent))

    def nodes_to_run(self) -> list[int]:
        """Return the nodes that the drafter must run before filling continues; none when the
        tree is complete.
        """
        return (
            [node for _, node in sorted(self.open_slots) if node not in self.q]
            if self._has_open_slot()
            else []
        )

    def _has_open_slot(self) -> bool:
        return (
            bool(self.open_slots)
            and len(self.tokens) < self.builder.budget
            and -self.open_slots[0][0] >= self.builder.threshold
        )

"""Trees shaped by the drafter's own confidence, anew each round. Shapes: B batch, F frontier nodes, K children, V draft ids."""

from __future__ import annotations

import heapq
from typing import Literal

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.randomness import DRAFT, gumbel_noise, keyed_generator

from .base import NEG_INF, GrowingTree, Prefix, Rollout, TreeBuilder, sampling_probs
from .token_tree import TokenTree


class Eagle2(TreeBuilder):
    """EAGLE-2's dynamic tree (Li et al., 2024, section 4): expand the likeliest nodes, then verify the likeliest ones.

    Each level expands its `top_k` best nodes into `top_k` children each; of everything drafted, the `budget` - 1 nodes with
    the best scores are verified.
    """

    name = "eagle2"
    is_fixed = True

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 5,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Nodes of a level that are expanded, and children of each of them.
        top_k: int = 4,
    ) -> None:
        self.depth, self.budget, self.top_k = depth, budget, top_k
        self._check_settings(depth=(depth, 1), budget=(budget, 2), top_k=(top_k, 1))
        self.max_drafted = (depth - 1) * top_k

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tree = GrowingTree(self, prefix, rollout)
        depth = self.max_depth(rollout)
        for level in range(depth):
            scores = self._add_level(tree)
            if level + 1 < depth:
                tree.extend_frontier(_best_of_level(scores, self.top_k))
        return tree.select_best(self.budget)

    def _add_level(self, draft: GrowingTree) -> Tensor:
        return draft.add_children(self.top_k)


class Entropy(Eagle2):
    """Sure drafts deep, unsure ones wide: a node has as many children as its distribution has likely tokens.

    That many is exp(H), the perplexity of q, rounded and at most `top_k`; the rest is EAGLE-2's.
    """

    name = "entropy"

    def _add_level(self, draft: GrowingTree) -> Tensor:
        entropy = -(draft.log_q.exp() * draft.log_q.clamp(min=-1e4)).sum(-1, keepdim=True)
        rank = torch.arange(self.top_k, device=entropy.device)
        return draft.add_children(self.top_k, rank < entropy.exp().round())


class Beam(Eagle2):
    """ReDrafter's beam search (Zhang et al., 2024, section 3): of every length the `top_k` likeliest paths go on, and the last
    of them are verified, merged where they begin alike.

    It grows as EAGLE-2's tree does and differs in what stays: whole beams, the best first, as many as `budget` nodes hold once
    they are merged. A node that no last beam goes through is not verified, however likely it is by itself.
    """

    name = "beam"

    def __init__(
        self,
        # Length of a beam in draft tokens.
        depth: int = 4,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Beams of every length that are continued.
        top_k: int = 4,
    ) -> None:
        super().__init__(depth, budget, top_k)
        if budget <= depth:
            raise UserError(
                f"tree.budget={budget}: one beam of tree.depth={depth} takes {depth + 1} nodes; use as many or more"
            )

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tree = GrowingTree(self, prefix, rollout)
        depth = self.max_depth(rollout)
        beams = _best_of_level(self._add_level(tree), self.top_k)
        for _ in range(depth - 1):
            tree.extend_frontier(beams)
            beams = _best_of_level(self._add_level(tree), self.top_k)
        selected = self._select_beams(tree.parents, tree.level_start + beams, depth)
        tree.scores = tree.scores.masked_fill(~selected, NEG_INF)
        return tree.select_best(self.budget)

    def _select_beams(self, parents: Tensor, ends: Tensor, depth: int) -> Tensor:
        """Mark the root and the beams, best first, that end in `ends` [B, W] and fit the budget: [B, nodes] bool."""
        path = [ends]
        for _ in range(depth - 1):
            path.append(parents.gather(1, path[-1]))
        nodes = torch.stack(path, dim=-1)  # [B, W, depth] of every beam
        width = nodes.shape[1]
        better = torch.ones(width, width, dtype=torch.bool, device=nodes.device).tril(-1)
        shared = ((nodes[:, :, None] == nodes[:, None]) & better[..., None]).any(2)  # with a better beam
        fits = (~shared).sum(-1).cumsum(1) < self.budget  # the root takes one slot
        selected = torch.zeros_like(parents)
        selected.scatter_reduce_(1, nodes.flatten(1), fits[..., None].expand_as(nodes).flatten(1).long(), "amax")
        selected[:, 0] = 1
        return selected.bool()


class OptTree(TreeBuilder):
    """OPT-Tree (Wang et al., 2024): the tree of `budget` nodes with the largest sum of path probabilities, its expected length.

    Such a tree is the nodes with the largest ones, so only the newest level's members of it are drafted on. Drafting stops
    where a level adds at most `threshold` expected tokens, which a draft step should cost in steps of the target.
    """

    name = "opt"

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 8,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Drafting stops where a level adds at most so many expected tokens.
        threshold: float = 0.1,
    ) -> None:
        self.depth, self.budget, self.threshold = depth, budget, threshold
        self._check_settings(depth=(depth, 1), budget=(budget, 2), threshold=(threshold, 0))
        self.max_drafted = (depth - 1) * (budget - 1)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tree = GrowingTree(self, prefix, rollout)
        expected = torch.ones(len(prefix.root), device=prefix.root.device)
        is_open = torch.ones_like(expected, dtype=torch.bool)
        depth = self.max_depth(rollout)
        for level in range(depth):
            tree.add_children(self.budget - 1, is_open[:, None, None] if level else None)
            best = tree.scores.topk(min(self.budget, tree.scores.shape[1]), dim=1)
            gained = best.values.exp().sum(1) - expected
            expected = expected + gained
            is_open = is_open & (gained > self.threshold)
            newest = (best.indices >= tree.level_start) & (best.values > NEG_INF)
            width = int((newest & is_open[:, None]).sum(1).max())
            if level + 1 == depth or width == 0:
                break
            tree.extend_frontier(_best_of_level(tree.scores[:, tree.level_start :], width))
        return tree.select_best(self.budget)


class DySpec(TreeBuilder):
    """DySpec (Xiong et al., 2024): the open slot with the largest value, the probability that it is reached, is filled next.

    Token y, drawn at a slot of value v from the residual of q, opens a child slot of value v q(y) and a sibling slot of
    value v (1 - q(y)), with y removed from q. Where the best slot lies below a node that the drafter has not run, all
    such nodes run together. Filling stops at the budget or below `threshold`. A slot is given up before its token is
    drawn, so sampled trees stay lossless.
    """

    name = "dyspec"
    drafts_by_level = False

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 5,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Filling stops where the best open slot is reached with a probability below this threshold.
        threshold: float = 0.0,
        # How the children of a node are chosen: deterministic or without_replacement; acceptance rules depend on it.
        children: Literal["deterministic", "without_replacement"] = "without_replacement",
        # Temperature of the distribution that sampled children are drawn from.
        temperature: float = 1.0,
        # Seed of the random draws of children.
        seed: int = 0,
    ) -> None:
        self.depth, self.budget, self.threshold = depth, budget, threshold
        self.children, self.temperature, self.seed = children, temperature, seed
        self._check_settings(depth=(depth, 1), budget=(budget, 2), threshold=(threshold, 0))
        self.max_drafted = budget * (budget - 1) // 2  # rows wait for each other: step i runs at most budget - i nodes

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        rows = [
            _DySpecRow(self, index, token, keyed_generator(DRAFT, self.seed, key, position))
            for index, (token, key, position) in enumerate(zip(
                prefix.root.tolist(), prefix.sequence_ids.tolist(), prefix.lengths.tolist()
            ))
        ]  # fmt: skip
        device = prefix.root.device
        num_fed = 0
        log_q = rollout.start()
        nodes_by_row = [[0] for _ in rows]
        while True:
            for row, nodes, q in zip(rows, nodes_by_row, sampling_probs(log_q, self.temperature)):
                for position, node in enumerate(nodes):
                    row.rollout_index[node], row.q[node] = num_fed + position, q[position]
                if rollout.stop_mask is not None:
                    row.stopped_nodes |= {node for position, node in enumerate(nodes) if rollout.stop_mask[row.index, position]}
                row.fill_slots(rollout)
            num_fed += log_q.shape[1]
            nodes_by_row = [row.nodes_to_run() for row in rows]
            width = max(map(len, nodes_by_row))
            if width == 0:
                return self._make_tree(rows, rollout, log_q)
            padding = [[0] * (width - len(nodes)) for nodes in nodes_by_row]
            tokens = [[row.tokens[n] for n in nodes] + pad for row, nodes, pad in zip(rows, nodes_by_row, padding)]
            parents = [
                [row.rollout_index[row.parents[n]] for n in nodes] + pad for row, nodes, pad in zip(rows, nodes_by_row, padding)
            ]
            log_q = rollout.extend(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))

    def _make_tree(self, rows: list[_DySpecRow], rollout: Rollout, like: Tensor) -> TokenTree:
        """Build one padded batch from the trees of all rows."""
        width = max(len(row.tokens) for row in rows)
        device = like.device
        tokens = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in rows], device=device)
        parents = torch.tensor([row.parents + [0] * (width - len(row.tokens)) for row in rows], device=device)
        valid = torch.tensor([[n < len(row.tokens) for n in range(width)] for row in rows], device=device)
        q = None
        if self.children != "deterministic":
            q = like.new_zeros(len(rows), width, like.shape[-1])
            for b, row in enumerate(rows):
                for node, drawn_from in row.q.items():
                    q[b, node] = drawn_from
        values = torch.tensor([row.values + [0.0] * (width - len(row.tokens)) for row in rows], device=device)
        every = torch.ones_like(valid)
        return TokenTree(tokens, parents, valid, every, self.children, q, rollout.draft_ids, scores=values.log())


class _DySpecRow:
    """The tree of one row while DySpec fills it."""

    def __init__(self, builder: DySpec, number: int, root: int, source: torch.Generator) -> None:
        self.builder, self.index, self.rng = builder, number, source
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.values = [1.0]  # the chance that a node is reached
        self.rollout_index: dict[int, int] = {}  # node -> its order in the rollout
        self.q: dict[int, Tensor] = {}  # draft distribution of each node that the drafter has run
        self.residual_q: dict[int, Tensor] = {}  # q without the children that exist, normalised
        self.stopped_nodes: set[int] = set()  # nodes whose children are not drafted
        self.open_slots = [(-1.0, 0)]  # negated value of an open slot, and its parent node

    def fill_slots(self, rollout: Rollout) -> None:
        """Fill open slots, the best first, until one lies below a node that the drafter has not run."""
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
            if self.depths[node] < self.builder.max_depth(rollout):
                heapq.heappush(self.open_slots, (value * chance, node))
            rest = residual.clone()
            rest[choice] = 0
            if (total := float(rest.sum())) > 0:
                self.residual_q[parent] = rest / total
                heapq.heappush(self.open_slots, (value * (1 - chance), parent))

    def nodes_to_run(self) -> list[int]:
        """Return the nodes that the drafter must run before filling continues; none when the tree is complete."""
        return [node for _, node in sorted(self.open_slots) if node not in self.q] if self._has_open_slot() else []

    def _has_open_slot(self) -> bool:
        return (
            bool(self.open_slots)
            and len(self.tokens) < self.builder.budget
            and -self.open_slots[0][0] >= self.builder.threshold
        )


def _best_of_level(scores: Tensor, count: int) -> Tensor:
    """Return the best nodes of a level, [B, at most count]; ties go to the first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]

"""Drafts of all beams: one tree per beam, grown together. Shapes: K beams, F frontier nodes of a
beam, M nodes, V draft ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spectrain.randomness import gumbel_noise
from spectrain.trees.base import Prefix, TreeBuilder
from spectrain.trees.growing import NEG_INF
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree

from .search import MISSING, Constraint, restrict_tokens


@dataclass
class Forest:
    """The nodes of one round, in the order in which the drafter has run them."""

    tokens: Tensor  # [K, M]
    parents: Tensor  # [K, M]
    valid: Tensor  # [K, M]
    scores: Tensor  # [K, M] log of the beam's score and of q along the path
    depths: list[int]  # depth of every column
    draft_ids: Tensor | None  # [V] the target id of every draft id; None where they are the same
    log_q: list[Tensor] = field(default_factory=list)  # [K, F, V] after the nodes of every depth
    # (row, node) -> position in the order of its depth's draws
    ranks: dict[tuple[int, int], int] = field(default_factory=dict)

    def find_children(self) -> dict[tuple[int, int, int], int]:
        """Map (row, parent, token) to the node."""
        real = self.valid.tolist()
        rows = enumerate(zip(self.tokens.tolist(), self.parents.tolist()))
        return {
            (row, parent, token): node
            for row, (tokens, parents) in rows
            for node, (token, parent) in enumerate(zip(tokens, parents))
            if parent >= 0 and real[row][node]
        }

    def node_log_q(self, row: int, node: int) -> Tensor | None:
        """Return log q after a node, over draft ids, with the path's score; None where nothing
        was drafted after it.
        """
        depth = self.depths[node]
        if depth >= len(self.log_q):
            return None
        log_q = self.log_q[depth][row, node - self.depths.index(depth)]
        return (log_q.double() + self.scores[row, node].double()).cpu()


class ForestBuilder(TreeBuilder):
    """The drafter's own beam search: of all continuations of all beams, `width` go on at every
    depth.

    They are the most likely ones, or drawn without replacement. A path's probability counts with
    the score of its beam, so that a likely beam has more drafts than an unlikely one.
    """

    name = "forest"

    def __init__(
        self, depth: int, width: int, is_sampled: bool = False, temperature: float = 1.0
    ) -> None:
        self.depth = depth
        self.width = width
        self.is_sampled = is_sampled
        self.temperature = temperature
        self.budget = 1 + depth * width
        self.max_drafted = depth * width
        self.constraint: Constraint | None = None
        self.beams: list[list[int]] = []
        self.beam_scores = torch.zeros(1)  # [K]
        self.source = torch.Generator()
        self.forest: Forest | None = None

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        root = prefix.root[:, None]
        real = self.beam_scores.to(root.device)[:, None] > MISSING / 2
        scores = self.beam_scores.to(root.device)[:, None] / self.temperature
        forest = Forest(
            root,
            torch.full_like(root, -1),
            real.clone(),
            scores.masked_fill(~real, NEG_INF),
            [0],
            rollout.draft_ids,
        )
        forest.valid[:, 0] = True
        answers = [[beam] for beam in self.beams]  # by row and frontier node
        log_q = rollout.start()
        frontier = torch.zeros_like(root)
        for level in range(rollout.limit_depth(self.depth)):
            log_q = (log_q.float() / self.temperature).log_softmax(-1)
            if self.constraint is not None and rollout.draft_ids is None:
                flat = [answer for row in answers for answer in row]
                log_q = (
                    restrict_tokens(log_q.flatten(0, 1), flat, self.constraint)
                    .view_as(log_q)
                    .log_softmax(-1)
                )
            forest.log_q.append(log_q)
            nodes = self._pick_nodes(forest.scores.gather(1, frontier)[..., None] + log_q)
            if not nodes:
                break
            frontier, answers = self._append_level(forest, frontier, nodes, rollout, answers)
            if level + 1 < rollout.limit_depth(self.depth):
                log_q = rollout.extend(
                    forest.tokens.gather(1, frontier), forest.parents.gather(1, frontier)
                )
        self.forest = forest
        tree = TokenTree.from_parents(forest.tokens, forest.parents, forest.valid)
        return replace(tree, height=forest.depths[-1], scores=forest.scores)

    def _pick_nodes(self, totals: Tensor) -> list[tuple[int, int, int, float]]:
        """Pick continuations from scores [K, F, V]; return row, frontier node, draft id and
        score, in the order of the draw.
        """
        flat = totals.flatten().cpu()
        keys = flat + gumbel_noise(tuple(flat.shape), self.source) if self.is_sampled else flat
        chosen = keys.topk(min(self.width, len(flat))).indices
        chosen = chosen[flat[chosen] > NEG_INF]
        size, vocab_size = totals.shape[1:]
        candidates = zip(chosen.tolist(), flat[chosen].tolist())
        return [
            (index // (size * vocab_size), index // vocab_size % size, index % vocab_size, score)
            for index, score in candidates
        ]

    def _append_level(
        self,
        forest: Forest,
        frontier: Tensor,
        nodes: list[tuple[int, int, int, float]],
        rollout: Rollout,
        answers: list[list[list[int]]],
    ) -> tuple[Tensor, list[list[list[int]]]]:
        """Append a level; return its nodes [K, F], padded to the longest row, and the answers
        that end in them.
        """
        batch, start = forest.tokens.shape
        device = forest.tokens.device
        above = frontier.tolist()
        ids = rollout.to_target_ids(
            torch.tensor([draft_id for _, _, draft_id, _ in nodes], device=device)
        ).tolist()
        # token, parent and score of every node
        rows: list[list[tuple[int, int, float]]] = [[] for _ in range(batch)]
        later: list[list[list[int]]] = [[] for _ in range(batch)]
        for rank, (token, (row, parent, _, score)) in enumerate(zip(ids, nodes)):
            forest.ranks[row, start + len(rows[row])] = rank
            rows[row].append((token, above[row][parent], score))
            later[row].append([*answers[row][parent], token])
        width = max(map(len, rows))
        padded = [[*row, *[(0, 0, NEG_INF)] * (width - len(row))] for row in rows]
        answers_of_rows = [[*row, *[[] for _ in range(width - len(row))]] for row in later]
        tokens, parents, scores = (
            torch.tensor([[node[part] for node in row] for row in padded], device=device)
            for part in range(3)
        )
        forest.tokens, forest.parents = (
            torch.cat([forest.tokens, tokens], 1),
            torch.cat([forest.parents, parents], 1),
        )
        forest.scores = torch.cat([forest.scores, scores.to(forest.scores.dtype)], 1)
        forest.valid = torch.cat([forest.valid, scores > NEG_INF], 1)
        forest.depths += [forest.depths[-1] + 1] * width
        return torch.arange(start, start + width, device=device).expand(batch, -1), answers_of_rows

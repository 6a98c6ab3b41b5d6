"""Trees that grow level by level. Shapes: B batch, F frontier nodes, K children of a node, V
draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.kernels import counter
from spectrain.kernels.append_children import Nodes, append_children, can_append
from spectrain.kernels.counter import fold_key, gumbel_noise
from spectrain.kernels.dispatch import run_on_cpu
from spectrain.kernels.tree_selection import Frontier, can_select, select_best, select_frontier
from spectrain.randomness import DRAFT

from .base import Prefix, TreeBuilder
from .cached_value import cached_value
from .rollout import Rollout
from .token_tree import Children, TokenTree

NEG_INF = float("-inf")
MIN_PROB = 1e-20  # smallest probability that can be sampled; well above the float32 limit


def sampling_probs(log_q: Tensor, temperature: float) -> Tensor:
    """Return the distribution that children are sampled from: q at a temperature, with
    probabilities below MIN_PROB set to 0.

    A rule divides by the rest of q once likelier children are rejected, in float32, and a child
    with q = 0 would always be accepted.
    """
    q = (log_q / temperature).softmax(-1)
    return q.masked_fill(q < MIN_PROB, 0)


def pick_top_and_sampled(
    q: Tensor, width: int, noise: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pick the most likely children of each node, then one sampled by Gumbel `noise` [.., V] from
    the rest of q [.., V].

    Returns their draft ids and log q [.., K], and the distribution of the last one [.., V]: q
    without the others, normalised; all zeros, with log q -inf, where that is empty. Nodes of
    `counts` [F] children have theirs first, followed by padding.
    """
    top = q.topk(width, dim=-1)
    last = (
        torch.full(q.shape[:-1], width - 1, device=q.device)
        if counts is None
        else (counts - 1).expand(q.shape[:-1])
    )
    is_top = torch.arange(width, device=q.device) < last[..., None]  # [.., K]
    residual = q.scatter(-1, top.indices, top.values.masked_fill(is_top, 0))
    residual = residual / residual.sum(-1, keepdim=True).clamp(min=MIN_PROB)
    drawn = (residual.log() + noise).argmax(-1, keepdim=True)
    ids = top.indices.scatter(-1, last[..., None], drawn)
    return ids, top.values.scatter(-1, last[..., None], residual.gather(-1, drawn)).log(), residual


@dataclass(frozen=True)
class ChildDraw:
    """How children of nodes are picked in a round. The same nodes and distributions always have the
    same children, so that a drafter can know in advance what a builder will draw."""

    children: Children
    temperature: float
    key: Tensor | None  # [B] of the round's draws; None if nothing is drawn

    @classmethod
    def of_round(cls, builder: TreeBuilder, prefix: Prefix) -> ChildDraw:
        """Return the draws of a builder in the round below a prefix."""
        if builder.children == "deterministic":
            return cls(builder.children, builder.temperature, None)
        key = counter.make_key(DRAFT, builder.seed, prefix.sequence_ids, prefix.lengths)
        return cls(builder.children, builder.temperature, key)

    def pick(
        self, log_q: Tensor, nodes: Tensor, width: int, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Pick children of nodes [B, F], their indices in the tree, from log q [B, F, V]: their
        draft ids [B, F, K], in the order of the draw, their log q, and the distribution [B, F, V]
        that they were drawn from, if they were."""
        if self.key is None:
            best = log_q.topk(width, dim=-1)
            return best.indices, best.values, None
        q = sampling_probs(log_q, self.temperature)
        # a node's own
        keys = fold_key(self.key[:, None], nodes)
        size = q.shape[-1]
        if self.children == "top_and_sampled":
            return pick_top_and_sampled(q, width, gumbel_noise(keys, size), counts)
        log_q = q.log()
        if self.children == "without_replacement":
            ids = (log_q + gumbel_noise(keys, size)).topk(width, dim=-1).indices
        else:
            ids = torch.stack(
                [
                    (log_q + gumbel_noise(fold_key(keys, number), size)).argmax(-1)
                    for number in range(width)
                ],
                dim=-1,
            )
        return ids, log_q.gather(-1, ids), q


class GrowingTree:
    """A tree that grows level by level; its frontier are the nodes with a distribution and no
    children yet.

    A node's score is the sum of log q along its path: the drafter's own estimate that the path is
    accepted.
    """

    def __init__(self, builder: TreeBuilder, prefix: Prefix, rollout: Rollout) -> None:
        self.builder, self.rollout = builder, rollout
        root = prefix.root
        self.tokens = root[:, None]  # [B, nodes]
        self.parents = torch.full_like(self.tokens, -1)
        self.scores = torch.zeros(self.tokens.shape, device=root.device)
        self.frontier = torch.zeros_like(self.tokens)  # [B, F] index of each frontier node
        # The rollout has run the frontier last: its nodes are the last of these.
        self.num_rollout_nodes = 1
        self.level_start = 0  # first node of the newest level
        # Kernels normalise the outputs of the drafter while they look for the likeliest children.
        self.has_logits = (
            builder.children == "deterministic"
            and can_append(root.device)
            and rollout.request_logits()
        )
        self.outputs = rollout.start()  # [B, F, V] log q of the frontier, or its logits
        self.num_levels = self.max_width = 0
        # frontier nodes and the q that their children were drawn from
        self.draft_probs: list[tuple[Tensor, Tensor]] = []
        self.prefix = prefix

    @cached_value
    def draw(self) -> ChildDraw:
        """The draws of this round."""
        return ChildDraw.of_round(self.builder, self.prefix)

    @property
    def log_q(self) -> Tensor:
        """The log-probabilities [B, F, V] of the tokens below the frontier."""
        return self.outputs.float().log_softmax(-1) if self.has_logits else self.outputs

    def add_children(
        self, width: int, allowed: Tensor | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """Add `width` children to every frontier node; where `allowed` [B, F, K] is False they stay
        padding.

        counts [F]: how many children a node retains, its first ones, where that is less. Returns
        the scores [B, F * K] of this new level.
        """
        width = min(width, self.outputs.shape[-1])
        appended = self._append_likeliest(width) if allowed is None else None
        if appended is not None:
            self.num_levels, self.max_width = self.num_levels + 1, max(self.max_width, width)
            self.level_start = self.tokens.shape[1]
            self.tokens, self.parents, self.scores = appended
            return self.scores[:, self.level_start :]
        ids, log_q = self._pick_children(width, counts)
        scores = self.scores.gather(1, self.frontier)[..., None] + log_q
        if allowed is not None:
            scores = scores.masked_fill(~allowed[..., :width], NEG_INF)
        if self.rollout.stop_mask is not None:
            scores = scores.masked_fill(self.rollout.stop_mask[..., None], NEG_INF)
        self.num_levels, self.max_width = self.num_levels + 1, max(self.max_width, width)
        self.level_start = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, self.rollout.to_target_ids(ids.flatten(1))], dim=1)
        self.parents = torch.cat(
            [self.parents, self.frontier.repeat_interleave(width, dim=1)], dim=1
        )
        self.scores = torch.cat([self.scores, scores.flatten(1)], dim=1)
        return scores.flatten(1)

    def extend_frontier(self, keep: Tensor) -> None:
        """Run nodes `keep` [B, F] of the newest level through the drafter; they become the
        frontier.
        """
        nodes = self.level_start + keep
        parents = self._first_frontier_run + keep // self._level_width
        self._run_frontier(Frontier(nodes, self.tokens.gather(1, nodes), parents))

    def extend_best(self, count: int) -> None:
        """Run the `count` best nodes of the newest level through the drafter; they become the
        frontier. Ties go to the first.
        """
        self._run_frontier(
            select_frontier(
                self.tokens,
                self.scores,
                self.level_start,
                self._level_width,
                self._first_frontier_run,
                count,
            )
        )

    @property
    def _level_width(self) -> int:
        """Number of children that each frontier node has in the newest level."""
        return (self.tokens.shape[1] - self.level_start) // self.frontier.shape[1]

    @property
    def _first_frontier_run(self) -> int:
        """Index of the frontier's first node in the rollout."""
        return self.num_rollout_nodes - self.frontier.shape[1]

    def _run_frontier(self, frontier: Frontier) -> None:
        self.outputs = self.rollout.extend(frontier.tokens, frontier.parents)
        self.frontier = frontier.nodes
        self.num_rollout_nodes += frontier.nodes.shape[1]

    def select_best(self, budget: int) -> TokenTree:
        """Return the tree of the `budget` best-scored nodes.

        A path's score never rises and ties go to the shallower node, so every selected node has its
        parent.
        """
        if self.builder.children == "deterministic" and can_select(
            self.tokens.device, self.tokens.shape[1]
        ):
            selected = select_best(Nodes(self.tokens, self.parents, self.scores), budget)
            return self._make_tree(*selected)
        return self.select_nodes(
            self.scores.sort(dim=1, descending=True, stable=True)
            .indices[:, :budget]
            .sort(dim=1)
            .values
        )

    def select_all(self) -> TokenTree:
        """Return the tree of all nodes."""
        if self.builder.children == "deterministic":
            valid = self.scores > NEG_INF
            return self._make_tree(self.tokens, self.parents, self.scores, valid)
        every = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return self.select_nodes(every.expand_as(self.tokens))

    def _make_tree(
        self, tokens: Tensor, parents: Tensor, scores: Tensor, valid: Tensor
    ) -> TokenTree:
        """Return a tree of deterministic children."""
        return TokenTree(
            tokens,
            parents,
            valid,
            torch.ones_like(valid),
            "deterministic",
            draft_ids=self.rollout.draft_ids,
            height=self.num_levels,
            max_children=self.max_width,
            scores=scores,
            emits_all=True,
        )

    def select_nodes(self, keep: Tensor) -> TokenTree:
        """Return the tree of nodes `keep` [B, N], ascending and closed under parents; nodes of
        score -inf are padding.
        """
        tree = self.tokens, self.parents, self.scores
        selected = None
        if self.builder.children == "deterministic":
            keep = keep.contiguous()
            selected = run_on_cpu("select_nodes", keep, tree)
        if selected is not None:
            return self._make_tree(*selected)
        renumber = torch.full_like(self.tokens, -1)
        renumber.scatter_(1, keep, torch.arange(keep.shape[1], device=keep.device).expand_as(keep))
        old = self.parents.gather(1, keep)
        parents = torch.where(old < 0, -1, renumber.gather(1, old.clamp(min=0)))
        valid = self.scores.gather(1, keep) > NEG_INF
        tokens = self.tokens.gather(1, keep)
        q = None
        if self.builder.children != "deterministic":
            batch, count = keep.shape
            # the last row takes nodes that are not selected
            q = self.outputs.new_zeros(batch, count + 1, self.outputs.shape[-1])
            rows = torch.arange(batch, device=keep.device)[:, None]
            for nodes, drawn_from in self.draft_probs:
                indices = renumber.gather(1, nodes)
                q[rows, torch.where(indices < 0, count, indices)] = drawn_from
            q = q[:, :count]
        every = torch.ones_like(valid)
        drawn = self.builder.children, q, self.rollout.draft_ids
        scores = self.scores.gather(1, keep)
        return TokenTree(
            tokens, parents, valid, every, *drawn, self.num_levels, self.max_width, scores=scores
        )

    def _append_likeliest(self, width: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return tokens, parents and scores of the tree with the most likely children, or None
        where no kernel adds them.
        """
        if self.builder.children != "deterministic" or self.rollout.stop_mask is not None:
            return None
        tree = Nodes(self.tokens, self.parents, self.scores)
        self.frontier = self.frontier.contiguous()
        draft_ids = self.rollout.draft_ids
        if can_append(self.tokens.device, width):
            return append_children(self.outputs, width, draft_ids, self.frontier, tree)
        appended: tuple[Tensor, Tensor, Tensor] | None = run_on_cpu(
            "append_children", self.log_q, width, draft_ids, self.frontier, tree
        )
        return appended

    def _pick_children(self, width: int, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return draft ids [B, F, K] of children and their log q; sampled ones in the order of
        the draw.
        """
        ids, log_q, drawn_from = self.draw.pick(self.log_q, self.frontier, width, counts)
        if drawn_from is not None:
            self.draft_probs.append((self.frontier, drawn_from))
        return ids, log_q

"""Token trees: what a drafter proposes and the target verifies. Shapes: B batch, N nodes, W words, V draft vocabulary.

Node 0 is the root: the newest token of the sequence, chosen by the target and not yet run through it.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from spectrain.kernels.round_log import tree_stats
from spectrain.kernels.token_commit import gather_emitted
from spectrain.kernels.tree_attention import pack_words

Children = Literal["deterministic", "sampled", "without_replacement", "top_and_sampled"]
"""How the children of a node were chosen; an acceptance rule is valid for some of these only.

top_and_sampled: the likeliest tokens and, behind them, one drawn from the rest; the tree's q is that rest, normalised.
"""


@dataclass(frozen=True)
class PruningStats:
    """What early pruning took from a tree, [B] each."""

    depth_before: Tensor  # of the tree before
    num_dropped: Tensor  # dropped
    num_judged: Tensor  # nodes whose children an early exit judged for that


@dataclass(frozen=True)
class TokenTree:
    """A batch of trees, parents before children, siblings in the order they were drawn, with distinct
    tokens unless sampled with replacement."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, -1 at the root, parents[:, i] < i elsewhere
    valid: Tensor  # [B, N] bool, False on padding
    can_emit: Tensor  # [B, N] bool, False on nodes that only draft, such as mask tokens
    children: Children = "deterministic"
    q: Tensor | None = None  # [B, N, V] the distribution each node's children were drawn from, over draft ids
    draft_ids: Tensor | None = None  # [V] the target id of every draft id; None where they are the same
    height: int | None = None  # no node is deeper, where the host knows it
    max_children: int | None = None  # no node has more that can be emitted, where the host knows it
    pruning: PruningStats | None = None
    scores: Tensor | None = None  # [B, N] log of the drafter's own estimate that a node is kept, where it has one

    @classmethod
    def from_parents(cls, tokens: Tensor, parents: Tensor, valid: Tensor | None = None) -> "TokenTree":
        """A tree of deterministic children that are all emitted and, unless `valid` says so, none of them padding."""
        every = torch.ones_like(tokens, dtype=torch.bool)
        return cls(tokens, parents, every if valid is None else valid, every)

    @classmethod
    def from_chain(cls, tokens: Tensor, valid: Tensor | None = None) -> "TokenTree":
        """A tree of width one from `tokens` [B, N]; a single column is plain autoregressive decoding."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        return replace(
            cls.from_parents(tokens, parents.expand_as(tokens), valid),
            height=tokens.shape[1] - 1,
            max_children=min(1, tokens.shape[1] - 1),
        )

    @property
    def max_path_nodes(self) -> int:
        """Nodes that a path has at most, known without asking the device."""
        num_nodes = self.tokens.shape[1]
        return num_nodes if self.height is None else min(num_nodes, self.height + 1)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has two children; the device is asked only where the host does not know."""
        if self.max_children is not None and self.max_children < 2:
            return True
        chain = torch.arange(-1, self.tokens.shape[1] - 1, device=self.tokens.device)
        return bool(((self.parents == chain) | ~(self.valid & self.can_emit)).all())

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool, True where node j is node i or one of its ancestors."""
        num_nodes = self.tokens.shape[1]
        eye = torch.eye(num_nodes, device=self.tokens.device)
        if num_nodes == 1:
            return eye.bool().expand(self.tokens.shape[0], 1, 1)
        step = torch.zeros(*self.tokens.shape, num_nodes, device=self.tokens.device)
        step.scatter_(2, self.parents.clamp(min=0)[..., None], (self.parents >= 0).float()[..., None])
        reach = step + eye
        for _ in range((self.max_path_nodes - 1).bit_length()):  # each squaring doubles the depth that is covered
            reach = (reach @ reach).clamp(max=1)
        return reach.bool()

    @cached_property
    def depths(self) -> Tensor:
        """[B, N] int64, 0 at the root."""
        return self.ancestors.sum(-1) - 1

    def select_nodes(self, keep: Tensor) -> "TokenTree":
        """The tree of the nodes that `keep` [B, N] marks, which must be closed under parents; padded to the longest row."""
        order = keep.long().argsort(dim=1, descending=True, stable=True)[:, : int(keep.sum(1).max())]
        places = torch.zeros_like(self.tokens).scatter(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        parents = self.parents.gather(1, order)
        parents = torch.where(parents < 0, -1, places.gather(1, parents.clamp(min=0)))
        real = keep.gather(1, order)
        parents = torch.where(real, parents, 0)  # padding hangs below the root
        q = None if self.q is None else self.q.gather(1, order[..., None].expand(-1, -1, self.q.shape[-1]))
        valid, emitted = self.valid.gather(1, order) & real, self.can_emit.gather(1, order)
        tokens = self.tokens.gather(1, order)
        scores = None if self.scores is None else self.scores.gather(1, order)
        known = self.children, q, self.draft_ids, self.height, self.max_children
        return TokenTree(tokens, parents, valid, emitted, *known, scores=scores)

    @cached_property
    def ancestor_words(self) -> Tensor:
        """[B, N, W] int64: bit j of word w of node i is set where node 64 w + j is i or an ancestor of it."""
        return pack_words(self.ancestors)

    @property
    def size_stats(self) -> Tensor:
        """[B, 5] for a report: its depth, the nodes that the target runs, those among them that only draft, further nodes that
        were pruned, and nodes whose children were judged for that."""
        depth, run, idle = tree_stats(self.depths, self.valid, self.can_emit).unbind(1)
        pruned = self.pruning or PruningStats(depth, torch.zeros_like(depth), torch.zeros_like(depth))
        return torch.stack([pruned.depth_before, run, idle, pruned.num_dropped, pruned.num_judged], dim=1)

    def check_structure(self) -> None:
        """Raise AssertionError where the tree breaks what kernels and rules rely on."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        assert (self.parents[:, 0] == -1).all(), "node 0 must be the root"
        assert (self.parents[:, 1:] >= 0).all() and (self.parents < index).all(), "parents must come before children"
        if self.children != "sampled":
            same = (self.parents[:, :, None] == self.parents[:, None]) & (self.tokens[:, :, None] == self.tokens[:, None])
            real = self.valid & self.can_emit
            twins = same & real[:, :, None] & real[:, None] & ~torch.eye(len(index), dtype=torch.bool, device=index.device)
            assert not twins.any(), "siblings must carry distinct tokens"


@dataclass(frozen=True)
class AcceptedPath:
    """One round's result: `counts[b]` nodes of `path[b]` are kept, the root first, and `bonus[b]` follows them."""

    path: Tensor  # [B, P] node indices, ascending, padded with the last one
    counts: Tensor  # [B] nodes kept, the root included: so many tokens were emitted, the bonus included
    bonus: Tensor  # [B] the next root

    def emitted_tokens(self, tree: TokenTree) -> Tensor:
        """[B, P] the tokens of the round: the kept nodes after the root, then the bonus, then padding."""
        return gather_emitted(tree.tokens, self.path, self.counts, self.bonus)

    def trim_padding(self) -> "AcceptedPath":
        """Without what is padding in every row, after a host-device synchronisation."""
        return replace(self, path=self.path[:, : int(self.counts.max())])

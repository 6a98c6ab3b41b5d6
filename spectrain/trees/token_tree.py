"""Token trees: what a drafter proposes and the target verifies. Shapes: B batch, N nodes, V draft
vocabulary.

Node 0 is the root: the newest token of the sequence, emitted by the target and not yet run through
it.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.kernels.dispatch import run_on_cpu
from spectrain.kernels.round_log import tree_stats
from spectrain.kernels.tree_masks import find_ancestors

from .cached_value import cached_value

Children = Literal["deterministic", "sampled", "without_replacement", "top_and_sampled"]
"""How the children of a node were chosen; an acceptance rule is valid for some of these only.

top_and_sampled: the most likely tokens, then one sampled from the rest; the tree's q is that rest,
normalised.
"""


@dataclass(frozen=True)
class PruningStats:
    """Counts of the nodes that early pruning removed from a tree, [B] each."""

    depth_before: Tensor  # depth of the tree before pruning
    num_dropped: Tensor  # nodes removed
    num_judged: Tensor  # nodes whose children an early exit scored


@dataclass(frozen=True)
class TokenTree:
    """A batch of trees: parents before children, siblings in the order they were drawn.

    Siblings have distinct tokens unless they were sampled with replacement.
    """

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, -1 at the root, parents[:, i] < i elsewhere
    valid: Tensor  # [B, N] bool, False on padding
    can_emit: Tensor  # [B, N] bool, False on nodes that are never emitted, such as mask tokens
    children: Children = "deterministic"
    # [B, N, V] the distribution each node's children were drawn from, over draft ids
    q: Tensor | None = None
    # [V] the target id of every draft id; None where they are the same
    draft_ids: Tensor | None = None
    height: int | None = None  # upper bound of the depth; None where the host has none
    # upper bound of a node's emittable children; None where the host has none
    max_children: int | None = None
    pruning: PruningStats | None = None
    scores: Tensor | None = None  # [B, N] log of the drafter's estimate that a node is accepted
    emits_all: bool = False  # whether the host knows that every node can be emitted

    @classmethod
    def from_parents(
        cls, tokens: Tensor, parents: Tensor, valid: Tensor | None = None
    ) -> "TokenTree":
        """Make a tree of deterministic children that can all be emitted; without `valid` none is
        padding.
        """
        every = torch.ones_like(tokens, dtype=torch.bool)
        return cls(tokens, parents, every if valid is None else valid, every)

    @classmethod
    def from_chain(cls, tokens: Tensor, valid: Tensor | None = None) -> "TokenTree":
        """Make a tree of width one from `tokens` [B, N]; a single column is autoregressive
        decoding.
        """
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        return replace(
            cls.from_parents(tokens, parents.expand_as(tokens), valid),
            height=tokens.shape[1] - 1,
            max_children=min(1, tokens.shape[1] - 1),
        )

    @classmethod
    def from_star(cls, tokens: Tensor) -> "TokenTree":
        """Make a tree of `tokens` [B, N], of which all but the first are its children."""
        parents = torch.zeros_like(tokens)
        parents[:, 0] = -1
        return cls.from_parents(tokens, parents)

    @property
    def max_path_nodes(self) -> int:
        """The largest number of nodes on a path, without a host-device synchronisation."""
        num_nodes = self.tokens.shape[1]
        return num_nodes if self.height is None else min(num_nodes, self.height + 1)

    @cached_value
    def is_chain(self) -> bool:
        """Whether no node has two children; synchronises with the device only where the host has
        no bound.
        """
        if self.max_children is not None and self.max_children < 2:
            return True
        chain = torch.arange(-1, self.tokens.shape[1] - 1, device=self.tokens.device)
        return bool(((self.parents == chain) | ~(self.valid & self.can_emit)).all())

    @cached_value
    def _ancestors_and_depths(self) -> tuple[Tensor, Tensor]:
        """What is found at once."""
        found: tuple[Tensor, Tensor] | None = run_on_cpu("find_ancestors", self.parents)
        return find_ancestors(self.parents, self.max_path_nodes) if found is None else found

    @property
    def ancestors(self) -> Tensor:
        """The ancestor mask [B, N, N] bool: True where node j is node i or one of its ancestors."""
        return self._ancestors_and_depths[0]

    @property
    def depths(self) -> Tensor:
        """The depth of every node [B, N] int64, 0 at the root."""
        return self._ancestors_and_depths[1]

    @property
    def can_accept(self) -> Tensor:
        """Which nodes [B, N] may be accepted: those that can be emitted and are no padding."""
        return self.valid if self.emits_all else self.valid & self.can_emit

    @property
    def num_drafted(self) -> Tensor:
        """Return the number of nodes [B] that can be emitted, the root and pruned ones included."""
        real = (self.valid & self.can_emit).sum(1)
        return real if self.pruning is None else real + self.pruning.num_dropped

    def select_nodes(self, keep: Tensor) -> "TokenTree":
        """Return the tree of the nodes that `keep` [B, N] marks, closed under parents; padded to
        the longest row.
        """
        order = keep.long().argsort(dim=1, descending=True, stable=True)[
            :, : int(keep.sum(1).max())
        ]
        new_index = torch.zeros_like(self.tokens).scatter(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        parents = self.parents.gather(1, order)
        parents = torch.where(parents < 0, -1, new_index.gather(1, parents.clamp(min=0)))
        is_real = keep.gather(1, order)
        parents = torch.where(is_real, parents, 0)  # padding hangs below the root
        q = (
            None
            if self.q is None
            else self.q.gather(1, order[..., None].expand(-1, -1, self.q.shape[-1]))
        )
        valid = self.valid.gather(1, order) & is_real
        emitted = self.can_emit.gather(1, order)
        tokens = self.tokens.gather(1, order)
        scores = None if self.scores is None else self.scores.gather(1, order)
        properties = self.children, q, self.draft_ids, self.height, self.max_children
        return TokenTree(tokens, parents, valid, emitted, *properties, scores=scores)

    @property
    def size_stats(self) -> Tensor:
        """Statistics for a report, [B, 5].

        The columns are the depth before pruning, the nodes that the target runs, those among them
        that are never emitted, the pruned nodes, and the nodes whose children were scored for
        pruning.
        """
        depth, run, idle = tree_stats(self.depths, self.valid, self.can_emit).unbind(1)
        pruned = self.pruning or PruningStats(
            depth, torch.zeros_like(depth), torch.zeros_like(depth)
        )
        return torch.stack(
            [pruned.depth_before, run, idle, pruned.num_dropped, pruned.num_judged], dim=1
        )


@dataclass(frozen=True)
class AcceptedPath:
    """The result of verification: `counts[b]` nodes of `path[b]` are accepted, the root first,
    and `bonus[b]` follows them.
    """

    path: Tensor  # [B, P] node indices, ascending, padded with the last one
    # [B] accepted nodes, the root included; equals the emitted tokens, the bonus included
    counts: Tensor
    bonus: Tensor  # [B] the next root

    def trim_padding(self) -> "AcceptedPath":
        """Drop columns that are padding in every row; synchronises with the device."""
        return replace(self, path=self.path[:, : int(self.counts.max())])

"""Masks in decoding: behind the nodes of a tree, and what they say once they have run.

Shapes: B batch, N nodes, H hosts, K masks behind a host in all, D target width, V vocabulary, F frontier nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.trees.base import DepthRollout, gather_by_depth
from spectrain.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from spectrain.models.head import Head


def append_masks(tree: TokenTree, hosts: Tensor, num_masks: int, num_chains: int, words: Tensor | None) -> TokenTree:
    """The tree's nodes, then the masks of each of the nodes `hosts` [B, H] below it, as a chain or several, never emitted; with
    `words` [B, H K] these stand at the masks."""
    num_nodes, count = tree.tokens.shape[1], hosts.shape[1]
    number = torch.arange(num_masks * num_chains, device=hosts.device)
    place = num_nodes + torch.arange(count, device=hosts.device)[:, None] * len(number) + number
    parents = torch.where(number % num_masks == 0, hosts[..., None], place - 1).flatten(1)
    nothing = torch.zeros_like(parents)
    valid = tree.valid.gather(1, hosts).repeat_interleave(len(number), dim=1)
    return TokenTree(
        torch.cat([tree.tokens, nothing if words is None else words], dim=1),
        torch.cat([tree.parents, parents], dim=1),
        torch.cat([tree.valid, valid], dim=1),
        torch.cat([torch.ones_like(tree.valid), nothing.bool()], dim=1),
        tree.children,
        None if tree.q is None else F.pad(tree.q, (0, 0, 0, parents.shape[1])),
        tree.draft_ids,
        None if tree.height is None else tree.height + num_masks,
        tree.max_children,
    )


def parallel_chains_mask(num_chains: int, length: int, shared: int, device: torch.device) -> Tensor:
    """[N, N] bool, what each of `shared` places and of the chains of this length behind them sees: what is shared, up to
    itself, and its own chain up to itself."""
    order = torch.arange(shared + num_chains * length, device=device)
    chain = (order - shared).div(max(length, 1), rounding_mode="floor")
    together = (chain == chain[:, None]) | (order < shared)
    return together & (order <= order[:, None])


def end_probabilities(tree: TokenTree) -> Tensor:
    """[B, N] the drafter's own estimate that a round ends at each node: that it is kept, and none of its children. Where a tree
    has no estimate, a node is kept half as often as its parent."""
    scores = -0.6931 * tree.depths if tree.scores is None else tree.scores
    kept = scores.exp() * tree.valid
    below = torch.zeros_like(kept).scatter_add(1, tree.parents.clamp(min=0), kept * (tree.parents >= 0))
    return torch.where(tree.valid, (kept - below).clamp(min=0), -1.0)


class MaskRollout(DepthRollout):
    """One round: the target's head on the mask of a depth, and with a sampler on that and the token before."""

    def __init__(self, root: Tensor, states: Tensor, head: Head, sampler: nn.Module | None, has_root_state: bool) -> None:
        super().__init__(root, states.shape[1])
        self.states, self.head, self.sampler = states, head, sampler  # [B, K, D]
        self.has_root_state = has_root_state  # the first state is the target's own at the root, which no sampler changes

    def start(self) -> Tensor:
        return self._log_q(self.states[:, :1]) if self.has_root_state else super().start()

    def log_probs_at(self, depth: Tensor, tokens: Tensor) -> Tensor:
        states = gather_by_depth(self.states, depth)
        if self.sampler is not None:
            states = self.sampler(states, self.head.embed(tokens)).to(states.dtype)
        return self._log_q(states)

    def _log_q(self, states: Tensor) -> Tensor:
        return self.head.logits(states.to(self.head.output.weight.dtype)).log_softmax(-1)

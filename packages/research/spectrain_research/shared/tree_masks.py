"""Masks in decoding: appended to the nodes of a tree, and the rollout from their states.

Shapes: B batch, N nodes, H hosts, K masks per host, D target width, V vocabulary, F frontier nodes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.models.head import Head
from spectrain.trees.rollout import DepthRollout, gather_by_depth
from spectrain.trees.token_tree import TokenTree


def append_masks(
    tree: TokenTree, hosts: Tensor, num_masks: int, masks_per_host: int, mask_tokens: Tensor | None
) -> TokenTree:
    """Append masks to the nodes `hosts` [B, H] of a tree, as one or several chains of `num_masks`
    below each, which are never emitted.

    `mask_tokens` [B, H K] are the tokens at the masks, by default 0.
    """
    num_nodes = tree.tokens.shape[1]
    count = hosts.shape[1]
    mask_index = torch.arange(masks_per_host, device=hosts.device)
    slots = (
        num_nodes + torch.arange(count, device=hosts.device)[:, None] * len(mask_index) + mask_index
    )
    parents = torch.where(mask_index % num_masks == 0, hosts[..., None], slots - 1).flatten(1)
    zeros = torch.zeros_like(parents)
    valid = tree.valid.gather(1, hosts).repeat_interleave(len(mask_index), dim=1)
    return TokenTree(
        torch.cat([tree.tokens, zeros if mask_tokens is None else mask_tokens], dim=1),
        torch.cat([tree.parents, parents], dim=1),
        torch.cat([tree.valid, valid], dim=1),
        torch.cat([torch.ones_like(tree.valid), zeros.bool()], dim=1),
        tree.children,
        None if tree.q is None else F.pad(tree.q, (0, 0, 0, parents.shape[1])),
        tree.draft_ids,
        None if tree.height is None else tree.height + num_masks,
        tree.max_children,
    )


def mask_rows(tree: TokenTree, num_masks: int) -> Tensor:
    """Return the indices [R] of the masks, which are the last `num_masks` nodes of each row,
    among all B N nodes.
    """
    indices = torch.arange(tree.tokens.numel(), device=tree.tokens.device).view_as(tree.tokens)
    return indices[:, -num_masks:].flatten()


def end_probabilities(tree: TokenTree) -> Tensor:
    """Return the probability [B, N] that a round ends at each node: that it is accepted, and none
    of its children.

    It follows from the drafter's scores. In a tree without scores, a node is accepted half as often
    as its parent.
    """
    scores = -0.6931 * tree.depths if tree.scores is None else tree.scores
    reach_probs = scores.exp() * tree.valid
    child_probs = torch.zeros_like(reach_probs).scatter_add(
        1, tree.parents.clamp(min=0), reach_probs * (tree.parents >= 0)
    )
    return torch.where(tree.valid, (reach_probs - child_probs).clamp(min=0), -1.0)


class MaskRollout(DepthRollout):
    """A rollout by the target's head on the mask state of a node's depth, which a sampler
    corrects for the token before.
    """

    def __init__(
        self,
        root: Tensor,
        states: Tensor,
        head: Head,
        sampler: nn.Module | None,
        has_root_state: bool,
    ) -> None:
        super().__init__(root, states.shape[1])
        self.states, self.head, self.sampler = states, head, sampler  # [B, K, D]
        # Whether the first state is the target's own at the root, which the sampler does not
        # change.
        self.has_root_state = has_root_state

    def start(self) -> Tensor:
        return self._log_q(self.states[:, :1]) if self.has_root_state else super().start()

    def log_probs_at(self, depth: Tensor, tokens: Tensor) -> Tensor:
        states = gather_by_depth(self.states, depth)
        if self.sampler is not None:
            states = self.sampler(states, self.head.embed(tokens)).to(states.dtype)
        return self._log_q(states)

    def _log_q(self, states: Tensor) -> Tensor:
        return self.head.logits(states.to(self.head.output.weight.dtype)).log_softmax(-1)

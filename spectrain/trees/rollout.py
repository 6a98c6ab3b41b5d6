"""The drafting side of a round: a drafter's draft, and the rollouts that draft step by step.

Shapes: B batch, F frontier nodes, K depths, V draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.copying.trie import Trie

from .token_tree import TokenTree


class Rollout(ABC):
    """One round of a drafter that drafts step by step."""

    # [V] the target id of every draft id; None where they are the same
    draft_ids: Tensor | None = None
    # largest depth that the drafter supports, such as its number of heads; None: any
    depth_limit: int | None = None
    stop_mask: Tensor | None = None  # [B, F] latest nodes below which nothing should be drafted
    # [B, F] estimated acceptance of a token below the latest nodes
    accept_probs: Tensor | None = None

    @abstractmethod
    def start(self) -> Tensor:
        """Return log-probabilities [B, 1, V] of the token after the root."""

    @abstractmethod
    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return log-probabilities [B, F, V] after new nodes, given their tokens [B, F] in target
        ids and their parents [B, F].

        Parents count nodes in the order in which they were passed; the root is 0.
        """

    def request_logits(self) -> bool:
        """Let `start` and `extend` return logits in place of log-probabilities, for a tree that
        normalises them itself; return whether they will.
        """
        return False

    def limit_depth(self, depth: int) -> int:
        """Return the depth to draft: this one, or the drafter's limit where that is less."""
        return depth if self.depth_limit is None else min(depth, self.depth_limit)

    def extend_path(self, tokens: Tensor, parents: Tensor, num_given: int) -> Tensor:
        """Return log-probabilities [B, F, V] after a path of nodes `tokens` [B, F], the first of
        them below `parents` [B].

        `num_given` nodes were passed before, the root included. Some drafters run the path in one
        step.
        """
        columns = tokens.split(1, dim=1)
        later = [
            torch.full_like(parents, num_given + step)[:, None] for step in range(len(columns) - 1)
        ]
        return self.extend_levels(list(zip(columns, [parents[:, None], *later])))

    def draft_along(self, tokens: Tensor, levels: int) -> list[Tensor]:
        """Draft along the chain of given tokens [B, levels - 1 or more]; return log-probabilities
        [B, V] after the root and after all of them but the last, `levels` in all.
        """
        log_probs = [self.start()[:, 0]]
        for level in range(levels - 1):
            parents = torch.full_like(tokens[:, :1], level)
            log_probs.append(self.extend(tokens[:, level : level + 1], parents)[:, 0])
        return log_probs

    def extend_levels(self, levels: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return log-probabilities [B, F, V] after the nodes of several levels, each with tokens
        and parents as `extend` takes them; parents may be in the level before. Some drafters run
        all levels in one step."""
        log_probs = []
        estimates = []
        for tokens, parents in levels:
            log_probs.append(self.extend(tokens, parents))
            estimates.append((self.accept_probs, self.stop_mask))
        accept_probs, stop_masks = zip(*estimates)
        self.accept_probs = None if self.accept_probs is None else torch.cat(accept_probs, dim=1)
        self.stop_mask = None if self.stop_mask is None else torch.cat(stop_masks, dim=1)
        return torch.cat(log_probs, dim=1)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Map draft ids to target ids."""
        return ids if self.draft_ids is None else self.draft_ids[ids]


@dataclass(frozen=True)
class Draft:
    """A drafter's proposal of one round: a rollout to draft with, ready continuations, or both."""

    rollout: Rollout | None = None
    continuations: list[Trie] | None = None  # of each text: weighted continuations of its root
    # merges the rollout's tree with copies, by probability
    merge_copies: Callable[[TokenTree], list[Trie]] | None = None
    # copies after a row's text and further tokens
    copies_after: Callable[[int, list[int]], Trie] | None = None
    # adds nodes that are never emitted, such as mask tokens
    add_mask_nodes: Callable[[TokenTree], TokenTree] | None = None
    mask_layer: int = 0  # first layer of the target that runs these nodes


class BranchVisibility:
    """Depth and visibility of nodes that a drafter runs after a cache that holds the root, in
    the order of their arrival.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.depths = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # [B, nodes so far]
        # [B, nodes, nodes without the root]
        self.visible = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)

    def add_nodes(self, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Add nodes below `parents` [B, F]; return their depths [B, F] and visibility [B, F, M],
        with themselves last.
        """
        batch, num_new = parents.shape
        depth = self.depths.gather(1, parents) + 1
        above = self.visible.gather(1, parents[..., None].expand(-1, -1, self.visible.shape[-1]))
        itself = torch.eye(num_new, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        return depth, self._append_nodes(depth, torch.cat([above, itself], dim=2))

    def add_levels(self, levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Add levels of nodes below `parents` [B, F] each, which may be in the level before;
        return the same of all nodes.
        """
        parts = [self.add_nodes(parents) for parents in levels]
        size = self.visible.shape[-1]
        visible = torch.cat([F.pad(part, (0, size - part.shape[-1])) for _, part in parts], dim=1)
        return torch.cat([depth for depth, _ in parts], dim=1), visible

    def _append_nodes(self, depth: Tensor, visible: Tensor) -> Tensor:
        self.visible = torch.cat([F.pad(self.visible, (0, depth.shape[1])), visible], dim=1)
        self.depths = torch.cat([self.depths, depth], dim=1)
        return visible


class DepthRollout(Rollout):
    """One round of a drafter whose distribution depends only on a node's depth and token, not on
    earlier nodes.
    """

    def __init__(self, root: Tensor, depth_limit: int) -> None:
        self.root, self.depth_limit = root, depth_limit  # [B]
        # depth of every node so far
        self.depths = torch.zeros(len(root), 1, dtype=torch.int64, device=root.device)
        self.max_level = 0  # upper bound of node depths: the number of calls of extend

    @abstractmethod
    def log_probs_at(self, depth: Tensor, tokens: Tensor) -> Tensor:
        """Return log-probabilities [B, F, V] after nodes of depths [B, F], below the limit, with
        tokens [B, F].
        """

    def start(self) -> Tensor:
        return self._clamped_log_probs(self.depths, self.root[:, None])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        depth = self.depths.gather(1, parents) + 1
        self.depths = torch.cat([self.depths, depth], dim=1)
        self.max_level += 1
        return self._clamped_log_probs(depth, tokens)

    def _clamped_log_probs(self, depth: Tensor, tokens: Tensor) -> Tensor:
        assert self.depth_limit is not None
        # results past the limit are never used
        return self.log_probs_at(depth.clamp(max=self.depth_limit - 1), tokens)


class MarginalRollout(DepthRollout):
    """One round of a drafter that computes all depths in advance: a node's distribution is that
    of its depth.
    """

    def __init__(self, root: Tensor, log_q: Tensor, draft_ids: Tensor | None = None) -> None:
        super().__init__(root, log_q.shape[1])
        self.log_q, self.draft_ids = log_q, draft_ids  # [B, K, V]

    def log_probs_at(self, depth: Tensor, tokens: Tensor) -> Tensor:
        return gather_by_depth(self.log_q, depth)


def gather_by_depth(values: Tensor, depth: Tensor) -> Tensor:
    """Select the values [B, K, ..] of each depth for nodes of depths [B, F]."""
    return values.gather(1, depth[..., None].expand(-1, -1, values.shape[-1]))

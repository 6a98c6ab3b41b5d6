"""Tree builders: how many nodes are drafted, and where. Shapes: B batch, F frontier nodes, V draft vocabulary.

A builder asks a `Rollout` for the drafter's distribution after nodes and returns a TokenTree. It knows no family.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .errors import UserError
from .tree import TokenTree


class Rollout(ABC):
    """One round of a drafter that drafts step by step."""

    @abstractmethod
    def start(self) -> Tensor:
        """Log-probabilities [B, 1, V] of the token after the root."""

    @abstractmethod
    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Log-probabilities [B, F, V] after new nodes: their tokens [B, F] in target ids, and their parents [B, F] by
        the order in which nodes were given, the root being 0."""

    def to_target(self, ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return ids


class TreeBuilder(ABC):
    """What `propose` is given: how much to draft."""

    name: str
    depth: int  # longest path below the root: the most tokens a round can accept before its bonus
    budget: int  # nodes that the target verifies, the root included
    drafted: int  # nodes at most that `grow` gives to a rollout, which its cache must hold

    @abstractmethod
    def grow(self, root: Tensor, rollout: Rollout) -> TokenTree:
        """Draft a tree below the root tokens [B]."""


class Chain(TreeBuilder):
    """The drafter's most likely continuation, `depth` tokens long."""

    name = "chain"

    def __init__(self, depth: int = 3) -> None:
        if depth < 1:
            raise UserError(f"tree.depth={depth}: use 1 or more")
        self.depth, self.budget, self.drafted = depth, depth + 1, depth - 1

    def grow(self, root: Tensor, rollout: Rollout) -> TokenTree:
        tokens = [root[:, None]]
        log_q = rollout.start()
        for step in range(self.depth):
            tokens.append(rollout.to_target(log_q.argmax(-1)))
            if step + 1 < self.depth:
                log_q = rollout.extend(tokens[-1], torch.full_like(tokens[-1], step))
        return TokenTree.chain(torch.cat(tokens, dim=1))


class Eagle2(TreeBuilder):
    """EAGLE-2's dynamic tree (Li et al., 2024, section 4): expand the likeliest nodes, then keep the likeliest ones.

    A node's score is the sum of log q along its path. Each level expands its `top_k` best nodes into `top_k` children
    each; of everything drafted, the `budget - 1` best are verified. A path's score never rises, so parents are kept with
    their children; ties go to the shallower node.
    """

    name = "eagle2"

    def __init__(self, depth: int = 5, budget: int = 16, top_k: int = 4) -> None:
        for key, value, least in (("depth", depth, 1), ("budget", budget, 2), ("top_k", top_k, 1)):
            if value < least:
                raise UserError(f"tree.{key}={value}: use {least} or more")
        self.depth, self.budget, self.top_k = depth, budget, top_k
        self.drafted = (depth - 1) * top_k

    def grow(self, root: Tensor, rollout: Rollout) -> TokenTree:
        log_q = rollout.start()
        top_k = min(self.top_k, log_q.shape[-1])
        batch = root.shape[0]
        score = torch.zeros(batch, 1, device=root.device)  # of the frontier [B, F]
        node = torch.zeros(batch, 1, dtype=torch.int64, device=root.device)  # index of each frontier node, the root 0
        fed = torch.zeros_like(node)  # the same nodes, in the order given to the rollout
        tokens, parents, scores = [root[:, None]], [node - 1], [score]
        num_nodes = num_fed = 1
        for level in range(self.depth):
            best = log_q.topk(top_k, dim=-1)
            child_scores = (score[..., None] + best.values).flatten(1)  # [B, F * K]
            tokens.append(rollout.to_target(best.indices.flatten(1)))
            parents.append(node.repeat_interleave(top_k, dim=1))
            scores.append(child_scores)
            if level + 1 == self.depth:
                break
            keep = child_scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            log_q = rollout.extend(tokens[-1].gather(1, keep), fed.gather(1, keep // top_k))
            score, node = child_scores.gather(1, keep), num_nodes + keep
            fed = torch.arange(num_fed, num_fed + keep.shape[1], device=root.device).expand_as(keep)
            num_nodes += child_scores.shape[1]
            num_fed += keep.shape[1]
        return _best_nodes(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), self.budget)


def _best_nodes(tokens: Tensor, parents: Tensor, scores: Tensor, budget: int) -> TokenTree:
    """The `budget` best-scored nodes of a tree, renumbered; levels stay in order, so parents come first."""
    keep = scores.sort(dim=1, descending=True, stable=True).indices[:, :budget].sort(dim=1).values
    renumber = torch.full_like(tokens, -1)
    renumber.scatter_(1, keep, torch.arange(keep.shape[1], device=tokens.device).expand_as(keep))
    old = parents.gather(1, keep)
    new = torch.where(old < 0, -1, renumber.gather(1, old.clamp(min=0)))
    return TokenTree.of(tokens.gather(1, keep), new)

"""A rollout that drafts as another one does. Shapes: B batch, F frontier nodes, V vocabulary."""

from __future__ import annotations

from torch import Tensor

from spectrain.trees.rollout import Rollout


class NestedRollout(Rollout):
    """Drafts with `inner`; subclasses observe or change what it returns."""

    def __init__(self, inner: Rollout) -> None:
        self.inner, self.draft_ids, self.depth_limit = inner, inner.draft_ids, inner.depth_limit

    def start(self) -> Tensor:
        return self.take_estimates(self.inner.start())

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.take_estimates(self.inner.extend(tokens, parents))

    def extend_path(self, tokens: Tensor, parents: Tensor, num_given: int) -> Tensor:
        return self.take_estimates(self.inner.extend_path(tokens, parents, num_given))

    def take_estimates(self, log_q: Tensor) -> Tensor:
        """Take the stop marks and acceptance estimates of the inner rollout's latest nodes;
        return their log q as it is.
        """
        self.accept_probs, self.stop_mask = self.inner.accept_probs, self.inner.stop_mask
        return log_q

"""Trees whose width follows the entropy of the drafter. Shapes: B batch, F frontier nodes, K
children of a node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.trees.dynamic import Eagle2
from spectrain.trees.growing import GrowingTree


class Entropy(Eagle2):
    """Sure drafts deep, unsure ones wide: a node has as many children as its distribution has
    likely tokens.

    That many is exp(H), the perplexity of q, rounded and at most `top_k`; the rest is EAGLE-2's.
    """

    name = "entropy"

    def _add_level(self, draft: GrowingTree) -> Tensor:
        entropy = -(draft.log_q.exp() * draft.log_q.clamp(min=-1e4)).sum(-1, keepdim=True)
        rank = torch.arange(self.top_k, device=entropy.device)
        return draft.add_children(self.top_k, rank < entropy.exp().round())

"""The divergence of two distributions by which drafts are trusted. V vocabulary."""

import torch
from torch import Tensor


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of distributions [.., V] in nats, from 0 to log 2:
    the entropy of their mean less the mean of their entropies.
    """
    p, q = p.double(), q.double()
    entropies = [torch.special.entr(vector).sum(-1) for vector in ((p + q) / 2, p, q)]
    # Rounding gives tiny negative numbers for equal distributions.
    return (entropies[0] - (entropies[1] + entropies[2]) / 2).clamp(min=0)

"""An output layer in two stages: scores of low rank choose candidates, and the layer itself judges
only these.

Shapes: V draft vocabulary, D width, K rank, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectrain.drafters.layers.candidates import IMPOSSIBLE, candidate_logits
from spectrain.kernels.linear_divergence import Projection
from spectrain.models.fast import pack_linears


class FirstStage:
    """The scores of all tokens by the best approximation of rank K of an output layer W [V, D] for
    given weights f of its rows: the one with the smallest sum_v f_v |w_v - u_v P|^2.

    P [K, D] holds the first right singular vectors of diag(sqrt f) W, the eigenvectors of W^T
    diag(f) W with the largest eigenvalues (Eckart and Young, 1936), and u_v is w_v P^T.
    """

    # Packed products read the version of a weight, which tensors of an inference do not have.
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, weight: Tensor, row_weights: Tensor, rank: int) -> None:
        exact = weight.double()
        vectors = torch.linalg.eigh(exact.T @ (row_weights.double()[:, None] * exact)).eigenvectors
        self.down = _make_linear(vectors[:, -rank:].T, weight.dtype)  # P
        self.up = _make_linear(exact @ vectors[:, -rank:], weight.dtype)  # [V, K]
        # A packed product reads the larger matrix in fewer bits, as it reads the output layer.
        pack_linears(self.up, low_precision=True)

    def score_tokens(self, states: Tensor) -> Tensor:
        """Return scores [.., V] of states [.., D]."""
        scores: Tensor = self.up(self.down(states.to(self.down.weight.dtype)))
        return scores


def _make_linear(weight: Tensor, dtype: torch.dtype) -> nn.Linear:
    """Make a linear layer without a bias of a weight, that is not trained."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)
    return linear


def choose_candidates(
    head: Projection, first_stage: FirstStage, states: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens [.., C] with the highest scores of the first stage at states [.., D], and
    their logits [.., C] under an output layer.
    """
    scores = first_stage.score_tokens(states)
    candidates = scores.topk(min(num_candidates, scores.shape[-1]), dim=-1, sorted=False).indices
    return candidates, candidate_logits(head, states, candidates)


def spread_candidates(candidates: Tensor, values: Tensor, vocab_size: int) -> Tensor:
    """Return values [.., V] that are those of the candidates [.., C], and for all other tokens
    finite ones without any probability.
    """
    spread = values.new_full((*values.shape[:-1], vocab_size), IMPOSSIBLE)
    return spread.scatter_(-1, candidates, values)

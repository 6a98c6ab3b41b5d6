"""Early heads: low-rank maps from a layer's states to the order of the target's logits. Shapes: T
tokens, D target width, V vocabulary, r rank, K tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.models.target import Target

# tokens of the target's own answer to each prompt that an early head is fitted on
ANSWER_TOKENS = 64


@dataclass(frozen=True)
class EarlyHead:
    """Predicts the target's logits from a layer's states through rank r: r (D + V) multiply-adds
    per node instead of D V.
    """

    down: Tensor  # [D, r]
    up: Tensor  # [V, r]
    bias: Tensor | None  # [V]

    def __call__(self, normed: Tensor) -> Tensor:
        """Return logits [.., V] of normed states [.., D], without the head's scale and cap: only
        their order is used.
        """
        logits = normed @ self.down @ self.up.T
        return logits if self.bias is None else logits + self.bias

    @classmethod
    def from_states(
        cls, normed: Tensor, final: Tensor, head: Tensor, bias: Tensor | None, rank: int
    ) -> EarlyHead:
        """Fit a head by reduced-rank regression from normed states [T, D] to the states [T, D] that
        the head [V, D] reads.

        The least-squares map is reduced to the `rank` directions that move the logits most. The
        ridge is the states' mean square; it pulls the map to the identity, which is the early exit
        without a fit, where data are few.
        """
        x = normed.double()
        y = final.double()
        width = normed.shape[-1]
        identity = torch.eye(width, dtype=x.dtype, device=x.device)
        mapping = identity + torch.linalg.solve(
            x.T @ x + x.pow(2).mean() * len(x) * identity, x.T @ (y - x)
        )
        gram = (head.float().T @ head.float()).double()
        factor = torch.linalg.cholesky(gram + 1e-6 * gram.diagonal().mean() * identity)
        directions = torch.linalg.svd(x @ mapping @ factor, full_matrices=False).Vh[:rank].T
        inverse = torch.linalg.solve(factor.T, directions)  # undoes the root
        return cls(
            (mapping @ factor @ directions).to(head.dtype), head @ inverse.to(head.dtype), bias
        )


class EarlyHeadUser(Protocol):
    """Reads the most likely tokens of an early exit, by a head or, where that is None, by the
    target's own.
    """

    layer: int
    head: EarlyHead | None

    def select_top(self, logits: Tensor) -> Tensor:
        """Return the tokens [.., K] that it reads of logits [.., V]."""


def fit_early_heads(
    target: Target, users: Sequence[EarlyHeadUser], prompts: list[list[int]], rank: int
) -> None:
    """Fit a head of this rank for each user on the target's answers to prompts.

    The target's head stays in use where it predicts the target's token more often on every fourth
    answer, which is not fitted.
    """
    answers = decode(target, prompts, Greedy(), ANSWER_TOKENS)
    layers = tuple({user.layer for user in users})
    states_by_answer: list[tuple[dict[int, Tensor], Tensor]] = []
    for answer in answers:
        features = target.features(
            torch.tensor([answer.prompt + answer.output], device=target.device), (*layers, "final")
        )
        states_by_answer.append(
            (
                {layer: target.apply_final_norm(features.at_layer(layer))[0] for layer in layers},
                features.at_layer("final")[0],
            )
        )
    training = [
        pair
        for number, pair in enumerate(states_by_answer)
        if number % 4 or len(states_by_answer) == 1
    ]
    final = torch.cat([final for _, final in training])
    projection = target.head.projection
    heads = {
        layer: EarlyHead.from_states(
            torch.cat([states[layer] for states, _ in training]),
            final,
            projection.weight,
            projection.bias,
            rank,
        )
        for layer in layers
    }
    validation = states_by_answer[::4]
    labels = target.head.logits(torch.cat([final for _, final in validation])).argmax(
        -1, keepdim=True
    )
    for user in users:
        states = torch.cat([states[user.layer] for states, _ in validation])

        def count_hits(
            logits_of: Callable[[Tensor], Tensor],
            user: EarlyHeadUser = user,
            states: Tensor = states,
        ) -> int:
            return int((user.select_top(logits_of(states)) == labels).any(-1).sum())

        head = heads[user.layer]
        user.head = head if count_hits(head) >= count_hits(target.head.logits) else None

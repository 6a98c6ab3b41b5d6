"""The window of speculative Jacobi decoding (Teng et al., 2024, arXiv 2410.01699).

Shapes: B batch, W tokens of the window, N nodes (the root and the window), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.decoding.acceptance.base import Vector
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.trees.rollout import MarginalRollout


def shift_window(
    distributions: Sequence[Vector], num_emitted: int, width: int, initial: Vector
) -> list[Vector]:
    """Return the distributions from which the next window of a text is drawn, one per position.

    `distributions` are the target's after every node of the last window, of which the text has
    emitted `num_emitted` tokens. They are of the same positions one iteration ago. Positions that
    no iteration has reached are drawn from `initial`.
    """
    return [*distributions[num_emitted:], *[initial] * width][:width]


class SampledWindow:
    """The target's distributions of the last round, from which the next window is drawn anew.

    Which tokens the last window had decides nothing but these distributions, and they are fixed
    before the draw. So each is the q of its position, and speculative sampling with it is lossless.
    """

    def __init__(self) -> None:
        self.log_p: Tensor | None = None  # [B, N, V] after the nodes of the last round

    def record_logits(self, logits: Tensor, temperature: float) -> None:
        """Record the target's distributions at a temperature, from its logits [B, N, V] after
        every node.
        """
        self.log_p = (logits.float() / temperature).log_softmax(-1)

    def make_rollout(self, context: Context) -> MarginalRollout:
        """Return a rollout whose distribution at each depth is that of the position in the last
        round.
        """
        if not context.builder.traits.is_chain:
            raise UserError(
                "drafter.method=speculative: it draws one window; use tree=chain "
                "tree.children=sampled"
            )
        if context.round == 0:
            self.log_p = None
        width = context.builder.depth
        vocab_size = context.target.head.vocab_size
        rows = []
        for row, (end, count) in enumerate(zip(context.lengths.tolist(), context.num_new.tolist())):
            text = context.tokens[row, : end + 1]
            # A position that no iteration has reached is drawn from the tokens of the text.
            initial = (torch.bincount(text, minlength=vocab_size) / len(text)).log()
            last = [] if self.log_p is None else list(self.log_p[row])
            rows.append(torch.stack(shift_window(last, count, width, initial)))
        return MarginalRollout(context.root, torch.stack(rows))

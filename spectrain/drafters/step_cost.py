"""What a training step of a family computes, declared in closed form: which modules run over how
many rows, and which logits exist.

`planning` computes memory and arithmetic from it. A row is a token that a module runs over, or a
state that an output layer reads. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

OUTPUT_LAYERS = ("lm_head", "lm_down")
"""Linears whose outputs are logits, which a step does not store; the formula of the logits
counts them.
"""


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a batch: texts, tokens of the longest one, tokens with padding, and tokens
    that carry loss.
    """

    texts: float
    length: int
    tokens: int
    supervised: int
    # Largest number of consecutive tokens of a text that carry loss in a step; None if all may.
    loss_tokens: int | None = None

    def window_rows(self, num_steps: int) -> int:
        """Count the positions at which `num_steps` draft steps predict the tokens of the
        windows: all tokens without any.
        """
        if self.loss_tokens is None:
            return self.tokens
        return min(self.tokens, int(self.texts) * (self.loss_tokens + num_steps + 1))


@dataclass(frozen=True)
class Run:
    """A module that a training step runs, whose intermediate results its backward pass reads."""

    module: nn.Module
    # Rows of one call.
    rows: float
    # Keys that a row attends to.
    keys: float
    # Calls of the module.
    calls: float = 1
    # Values of the masks that every attention layer of a call stores.
    mask: float = 0
    # Further values that a row stores.
    extra: float = 0
    # Share of the rows of all calls whose values are stored at the same time; less than 1 where
    # the backward pass computes the values again in chunks, or some calls have no gradients.
    stored_share: float = 1
    # Keys that a row attends to on a CPU where attention runs in chunks, whose scores the backward
    # pass computes again; 0 if it does not.
    chunk_keys: float = 0


@dataclass(frozen=True)
class Judged:
    """The logits [R, V] that a step's loss computes in chunks of rows."""

    # Rows of the drafter's logits, of one output layer at a time, and their vocabulary.
    rows: float
    vocab_size: int
    # Rows of the target's logits; 0 if the labels are tokens.
    label_rows: float = 0
    # Matrices of the drafter's rows, and of the labels' rows, that exist at the same time.
    copies: float = 2
    label_copies: float = 2
    # Number of output layers that are judged one after another, and the width that they read; 0 is
    # the target's.
    layers: int = 1
    width: int = 0
    # Whether the output layers have a gradient; the target's own have none.
    is_trained: bool = True
    # Rows whose logits are computed without gradients, besides the labels.
    other_rows: float = 0


@dataclass(frozen=True)
class StepCost:
    """What a training step computes beyond the target's features."""

    runs: list[Run]
    judged: Judged
    # Values that exist in the backward pass only, after the logits.
    backward_values: float = 0
    # Rows of the target's forwards without gradients in the loss.
    forward_rows: float = 0
    # Further such rows, whose results a drafter keeps for the later epochs.
    cached_rows: float = 0

"""The positions at which draft steps run where only a window of each text carries loss
(`trainer.loss_tokens`).

Position t of step i predicts token t + 2 + i and attends to the first step's keys up to itself, so
positions before a window take part in the first step alone. Shapes: B batch, T tokens, W positions
of a row, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from spectrain.features.batch import Batch
from spectrain.models.attention import attend_rows
from spectrain.models.cache_types import AttentionOptions


@dataclass(frozen=True)
class WindowRows:
    """Consecutive positions of every text of a batch."""

    # [B, W] the positions' columns in the batch.
    index: Tensor
    # First position of each text, in the text.
    first: tuple[int, ...]
    # Positions of each text, and lengths of the texts, where texts are packed into one row.
    widths: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None

    @classmethod
    def select(cls, batch: Batch, num_steps: int) -> WindowRows | None:
        """Return the positions that some of `num_steps` steps supervises; None without windows
        or if they are all positions.
        """
        if batch.loss_windows is None:
            return None
        first = [max(0, start - 1 - num_steps) for start, _ in batch.loss_windows]
        widths = [end - begin for begin, (_, end) in zip(first, batch.loss_windows)]
        device = batch.tokens.device
        if batch.lengths is None:
            length = batch.tokens.shape[1]
            width = max(widths)
            if width >= length:
                return None
            first = [min(begin, length - width) for begin in first]
            return cls(
                torch.tensor(first, device=device)[:, None] + torch.arange(width, device=device),
                tuple(first),
            )
        if widths == [*batch.lengths]:
            return None
        starts = accumulate(batch.lengths[:-1], initial=0)
        parts = [
            torch.arange(start + begin, start + begin + width, device=device)
            for start, begin, width in zip(starts, first, widths)
        ]
        return cls(torch.cat(parts)[None], tuple(first), tuple(widths), batch.lengths)

    def take(self, part: Tensor) -> Tensor:
        """Return the positions [B, W, ..] of values [B, T, ..]."""
        if part.dim() == 2:
            return part.expand(len(self.index), -1).gather(1, self.index)
        return torch.stack([row[columns] for row, columns in zip(part, self.index)])

    def take_heads(self, heads: Tensor) -> Tensor:
        """Return the positions [B, H, W, D] of heads [B, H, T, D]."""
        return self.take(heads.transpose(1, 2)).transpose(1, 2)

    def attend(
        self, q: Tensor, keys: list[Tensor], values: list[Tensor], options: AttentionOptions
    ) -> Tensor:
        """Return [B, H, W, D]: queries at these positions see the keys and values of the first step
        [B, K, T, D] up to themselves, and of later steps [B, K, W, D] those at their own position.
        """
        if self.widths is None or self.lengths is None:
            texts = [[part[row : row + 1] for part in (q, *keys, *values)] for row in range(len(q))]
        else:
            sizes = [self.widths, *([self.lengths, *[self.widths] * (len(keys) - 1)] * 2)]
            texts = [
                [*parts]
                for parts in zip(
                    *(part.split(size, 2) for part, size in zip((q, *keys, *values), sizes))
                )
            ]
        outputs = [
            attend_rows(parts[0], parts[1 : 1 + len(keys)], parts[1 + len(keys) :], first, options)
            for first, parts in zip(self.first, texts)
        ]
        return torch.cat(outputs, dim=0 if self.widths is None else 2)

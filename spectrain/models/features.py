"""Features: what a forward of the target yields. Shapes: B batch, T tokens, L captured layers, D
width, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Layer = int | Literal["final"]
"""A point in the target: k is the residual stream entering layer k, `num_layers` the un-normed
output of the last one, "final" the output of the final norm, which the head reads."""


@dataclass(frozen=True)
class Features:
    """Hidden states of the target over tokens; `hidden[:, t]` has attended to `tokens[:, :t + 1]`,
    or to the ancestors of a node."""

    tokens: Tensor  # [B, T]
    layers: tuple[Layer, ...]
    hidden: Tensor  # [B, T, L, D]
    logits: Tensor | None = None  # [B, T, V], where the plan requests logits

    def at_layer(self, layer: Layer) -> Tensor:
        """Return the hidden states of one layer, [B, T, D]."""
        return self.hidden[:, :, self.layers.index(layer)]

    def fuse_layers(self, layers: tuple[Layer, ...]) -> Tensor:
        """Concatenate the hidden states of several layers, [B, T, len(layers) * D]."""
        if layers == self.layers[: len(layers)]:  # the usual case: one view, one copy at most
            return self.hidden[:, :, : len(layers)].flatten(2)
        return torch.cat([self.at_layer(layer) for layer in layers], dim=-1)

    def gather(self, index: Tensor) -> "Features":
        """Return the features at positions `index` [B, P] of every row."""
        hidden = self.hidden.gather(
            1, index[:, :, None, None].expand(-1, -1, *self.hidden.shape[2:])
        )
        return Features(self.tokens.gather(1, index), self.layers, hidden)

    @staticmethod
    def concat_prefixes(parts: list[tuple["Features", Tensor]]) -> "Features":
        """Concatenate the first `counts[b]` positions of every part. The result has the layers
        of the last part.
        """
        layers = parts[-1][0].layers
        states = [
            part.hidden
            if part.layers == layers
            else torch.stack([part.at_layer(layer) for layer in layers], 2)
            if layers
            else part.hidden[:, :, :0]
            for part, _ in parts
        ]
        real = torch.cat(
            [
                torch.arange(part.tokens.shape[1], device=counts.device) < counts[:, None]
                for part, counts in parts
            ],
            1,
        )
        order = (~real).long().argsort(dim=1, stable=True)[:, : int(real.sum(1).max())]
        return Features(
            torch.cat([part.tokens for part, _ in parts], 1), layers, torch.cat(states, 1)
        ).gather(order)

    def to(self, device: torch.device | str) -> "Features":
        return replace(self, tokens=self.tokens.to(device), hidden=self.hidden.to(device))


def document_positions(lengths: Iterable[int], device: torch.device) -> Tensor:
    """Return [1, T], the position of every token in its own document, for consecutive documents."""
    return torch.cat([torch.arange(length, device="cpu") for length in lengths])[None].to(device)

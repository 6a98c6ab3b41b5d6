"""What crosses from the target to a drafter. Shapes: B batch, T tokens, L captured layers, D target width, V vocabulary."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Layer = int | Literal["final"]
"""A place in the target: k is the residual stream entering layer k, `num_layers` the un-normed output of the
last one, "final" the output of the final norm, which the head reads."""


@dataclass(frozen=True)
class Features:
    """Hidden states of the target over some tokens; `hidden[:, t]` has seen `tokens[:, :t + 1]`, or a node's ancestors."""

    tokens: Tensor  # [B, T]
    layers: tuple[Layer, ...]
    hidden: Tensor  # [B, T, L, D]
    logits: Tensor | None = None  # [B, T, V], only where they were asked for

    def at(self, layer: Layer) -> Tensor:
        """The hidden states of one layer, [B, T, D]."""
        return self.hidden[:, :, self.layers.index(layer)]

    def fused(self, layers: tuple[Layer, ...]) -> Tensor:
        """The hidden states of several layers side by side, [B, T, len(layers) * D]."""
        if layers == self.layers[: len(layers)]:  # the usual case: one view, one copy at most
            return self.hidden[:, :, : len(layers)].flatten(2)
        return torch.cat([self.at(layer) for layer in layers], dim=-1)

    def gather(self, index: Tensor) -> "Features":
        """The positions `index` [B, P] of every row."""
        hidden = self.hidden.gather(1, index[:, :, None, None].expand(-1, -1, *self.hidden.shape[2:]))
        return Features(self.tokens.gather(1, index), self.layers, hidden)

    @staticmethod
    def joined(parts: list[tuple["Features", Tensor]]) -> "Features":
        """The first `counts[b]` positions of every part, one after another; layers are those of the last part."""
        layers = parts[-1][0].layers
        states = [part.hidden if part.layers == layers else torch.stack([part.at(layer) for layer in layers], 2)
                  if layers else part.hidden[:, :, :0] for part, _ in parts]  # fmt: skip
        real = torch.cat(
            [torch.arange(part.tokens.shape[1], device=counts.device) < counts[:, None] for part, counts in parts], 1
        )
        order = (~real).long().argsort(dim=1, stable=True)[:, : int(real.sum(1).max())]
        return Features(torch.cat([part.tokens for part, _ in parts], 1), layers, torch.cat(states, 1)).gather(order)

    def to(self, device: torch.device | str) -> "Features":
        return replace(self, tokens=self.tokens.to(device), hidden=self.hidden.to(device))


@dataclass(frozen=True)
class Batch:
    """Conversations as tokens: one a row, padded on the right, or packed, all in one row without padding.

    Attention is causal, so padding is never seen; packed documents, whose `lengths` are known, never see each other.
    """

    tokens: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool, True on the tokens that the assistant wrote
    features: Features | None = None  # what the source added, for a drafter that names layers
    distance: Tensor | None = None  # [B, T] how far behind the first wrong token of a draft a token lies; -1 where it was kept
    lengths: tuple[int, ...] | None = None  # of the documents of a packed batch, in their order; None where it is padded

    @property
    def longest(self) -> int:
        """The length of the longest document, in tokens."""
        return self.tokens.shape[1] if self.lengths is None else max(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """[1, T] the position of every token in its document: all that tells where a packed document begins."""
        return document_positions(self.lengths or (self.tokens.shape[1],), self.tokens.device)

    @property
    def predicts(self) -> Tensor:
        """[B, T] bool, the positions whose next token, of the same document, carries loss."""
        return torch.nn.functional.pad((self.loss_mask & (self.positions > 0))[:, 1:], (0, 1))

    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        """Tokens and loss mask [T] of every document, on the CPU; with its padding, where there is any."""
        tokens, mask = self.tokens.cpu(), self.loss_mask.cpu()
        if self.lengths is None:
            return list(zip(tokens, mask))
        return list(zip(tokens[0].split(self.lengths), mask[0].split(self.lengths)))

    @property
    def num_supervised(self) -> int:
        """How many tokens carry loss: what a loss sum is divided by, over the whole step."""
        return int(self.loss_mask.sum())

    def to(self, device: torch.device | str) -> "Batch":
        features = None if self.features is None else self.features.to(device)
        distance = None if self.distance is None else self.distance.to(device)
        return Batch(self.tokens.to(device), self.loss_mask.to(device), features, distance, self.lengths)


def document_positions(lengths: Iterable[int], device: torch.device) -> Tensor:
    """[1, T] the position of every token in its own document, the documents standing one after another."""
    return torch.cat([torch.arange(length) for length in lengths])[None].to(device)


def laid_out(rows: list[Tensor], packed: bool, padding: int = 0) -> Tensor:
    """What each document has for its tokens, [T, ..] each, as a batch holds it, [B, T, ..]: padded, or packed in one row."""
    return torch.cat(rows)[None] if packed else pad_sequence(rows, batch_first=True, padding_value=padding)

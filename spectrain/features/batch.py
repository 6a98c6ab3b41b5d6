"""Conversations as the training reads them. Shapes: B batch, T tokens."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spectrain.data.chat import Example
from spectrain.models.features import Features, document_positions


@dataclass(frozen=True)
class Batch:
    """Conversations as tokens: one a row, padded on the right, or packed, all in one row without padding.

    Attention is causal, so padding is never seen; packed documents, whose `lengths` are known, never see each other.
    """

    tokens: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool, True on the tokens that the assistant wrote
    features: Features | None = None  # what the source added, for a drafter that names layers
    tokens_past_error: Tensor | None = (
        None  # [B, T] how far behind the first wrong token of a draft a token lies; -1 where it was kept
    )
    lengths: tuple[int, ...] | None = None  # of the documents of a packed batch, in their order; None where it is padded
    weight: Tensor | None = None  # [B, T] what each token's loss counts, of replayed drafts; None: all of them 1
    advantage: Tensor | None = None  # [B, T] of a drawn token, what its draft brought beyond what was expected; 0 elsewhere
    position_ids: Tensor | None = (
        None  # [B, T] where each token stands in its text, where not all follow each other: side branches
    )
    visible: Tensor | tuple[Tensor, ...] | None = None  # what each token sees then, [B, T, T], or [1, T, T] a document

    @property
    def max_document_length(self) -> int:
        """The length of the longest document, in tokens."""
        return self.tokens.shape[1] if self.lengths is None else max(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """[1, T] the position of every token in its document: all that tells where a packed document begins."""
        return document_positions(self.lengths or (self.tokens.shape[1],), self.tokens.device)

    @property
    def next_is_supervised(self) -> Tensor:
        """[B, T] bool, the positions whose next token, of the same document, carries loss."""
        return torch.nn.functional.pad((self.loss_mask & (self.positions > 0))[:, 1:], (0, 1))

    def at_next_token(self, part: Tensor | None) -> Tensor | None:
        """[R] of the token after each of these positions, what `part` [B, T] says of it, if it is there."""
        return None if part is None else part.roll(-1, dims=1)[self.next_is_supervised]

    def split_documents(self) -> list[tuple[Tensor, Tensor]]:
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
        parts = (self.tokens_past_error, self.weight, self.advantage, self.position_ids)
        distance, weight, advantage, places = (None if part is None else part.to(device) for part in parts)
        visible = tuple(one.to(device) for one in self.visible) if isinstance(self.visible, tuple) else self.visible
        visible = visible.to(device) if isinstance(visible, Tensor) else visible
        tokens, mask = self.tokens.to(device), self.loss_mask.to(device)
        return Batch(tokens, mask, features, distance, self.lengths, weight, advantage, places, visible)


def pad_or_pack(rows: list[Tensor], packed: bool, padding: int = 0) -> Tensor:
    """What each document has for its tokens, [T, ..] each, as a batch holds it, [B, T, ..]: padded, or packed in one row."""
    return torch.cat(rows)[None] if packed else pad_sequence(rows, batch_first=True, padding_value=padding)


def collate(examples: list[Example], packed: bool = False) -> Batch:
    """Examples as one batch: a row each, padded on the right, or packed, one after another in one row."""
    tokens = pad_or_pack([torch.tensor(example.tokens) for example in examples], packed)
    mask = pad_or_pack([torch.tensor(example.mask) for example in examples], packed)
    return Batch(tokens, mask, lengths=tuple(len(example.tokens) for example in examples) if packed else None)

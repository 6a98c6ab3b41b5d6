"""Batches of tokenised conversations. Shapes: B batch, T tokens."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from spectrain.data.chat import Example
from spectrain.models.features import Features, document_positions
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.host_copies import copy_to_device, on_host

from .context_piece import WHOLE, ContextGroup, ContextPiece, SplitPiece

if TYPE_CHECKING:
    from spectrain.kernels.linear_divergence import Projection


class DraftTerm(Protocol):
    """A loss term of draft steps, which a source of batches adds to that of the labels."""

    @property
    def name(self) -> str:
        """The name of the term."""

    def loss(
        self, hidden: Tensor, lm_head: nn.Linear, label_index: Tensor, step: Tensor | int
    ) -> Tensor:
        """Return the summed loss of states [R, D] under an output layer, which belong to the rows
        `label_index` [R] at these draft steps.
        """


@dataclass(frozen=True)
class RowLoss:
    """How a source of batches weighs and compares supervised rows [R], beside the drafter's own
    loss.
    """

    # [R] weight of every row; None weighs all rows 1.
    weight: Tensor | None = None
    # Divergence [R] of log p and log q [R, V] and the `inputs`, in place of the drafter's own loss;
    # None keeps that.
    divergence: Callable[..., Tensor] | None = None
    # [R] each.
    inputs: tuple[Tensor, ...] = ()

    def select_rows(self, rows: Tensor) -> "RowLoss":
        """Return the loss of the rows with these indices, which may repeat."""
        weight = None if self.weight is None else self.weight[rows]
        return replace(self, weight=weight, inputs=tuple(part[rows] for part in self.inputs))


PLAIN_ROWS = RowLoss()
"""Rows with the drafter's own loss."""


@dataclass(frozen=True)
class Batch:
    """Conversations as tokens: padded rows of one conversation each, or one packed row without
    padding.

    Attention is causal, so no token attends to padding. Packed documents, whose `lengths` are
    given, never see each other.
    """

    tokens: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool, True on the tokens that the assistant wrote
    # Features that the source added, for a drafter that names layers.
    features: Features | None = None
    # Lengths of the documents of a packed batch, in order; None for a padded batch.
    lengths: tuple[int, ...] | None = None
    # Of each document, the only tokens that carry loss: the first of them and the one after the
    # last. None if any may.
    loss_windows: tuple[tuple[int, int], ...] | None = None
    # The columns that this process runs. Features exist at them and at the next ones, up to the
    # labels of its losses.
    piece: ContextPiece = WHOLE

    @property
    def max_document_length(self) -> int:
        """The length of the longest document, in tokens."""
        return self.tokens.shape[1] if self.lengths is None else max(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """The position [1, T] of every token in its document; a packed document begins where it
        is 0.
        """
        lengths = self.lengths or (self.tokens.shape[1],)
        return copy_to_device(document_positions(lengths, torch.device("cpu")), self.tokens.device)

    @property
    def next_is_supervised(self) -> Tensor:
        """[B, T] bool, True at positions whose next token is of the same document and carries
        loss. It is computed on the host, so that rows may be chosen by it.
        """
        carries_loss = on_host(self.loss_mask) & (on_host(self.positions) > 0)
        return copy_to_device(
            torch.nn.functional.pad(carries_loss[:, 1:], (0, 1)), self.loss_mask.device
        )

    @property
    def input_features(self) -> Features:
        """The features at the columns that this process runs."""
        assert self.features is not None
        if self.piece.is_whole:
            return self.features
        count = self.piece.cut_columns(self.tokens).shape[1]
        return replace(
            self.features,
            tokens=self.features.tokens[:, :count],
            hidden=self.features.hidden[:, :count],
        )

    @property
    def feature_columns(self) -> slice:
        """The columns at which this process has features."""
        if not isinstance(self.piece, SplitPiece) or self.features is None:
            return slice(0, self.tokens.shape[1])
        return slice(self.piece.start, self.piece.start + self.features.hidden.shape[1])

    def select_labels(self, is_predicted: Tensor) -> Tensor:
        """Return is_predicted [B, T] without the columns at which this process has no features."""
        selected = torch.zeros_like(is_predicted)
        selected[:, self.feature_columns] = is_predicted[:, self.feature_columns]
        return selected

    def split_context(self, group: ContextGroup, label_reach: int) -> "Batch":
        """Return the batch with the features of this process: at its columns and `label_reach`
        next ones.
        """
        piece = group.make_piece(self.tokens.shape[1])
        features = self.features
        if features is not None:
            columns = slice(piece.start, piece.stop + label_reach)
            # The copy lets the other features go.
            features = replace(
                features,
                tokens=features.tokens[:, columns],
                hidden=features.hidden[:, columns].clone(),
            )
        return replace(self, piece=piece, features=features)

    def plan_forward(self, plan: ForwardPlan) -> ForwardPlan:
        """Return the plan of a forward over these tokens: with the lengths of packed documents."""
        return replace(plan, lengths=self.lengths)

    def text_terms(
        self, states: Tensor, head: "Projection", next_tokens: Tensor
    ) -> dict[str, Tensor]:
        """Return further loss terms of a language model, by name, from its states [R, D] before
        the tokens [R] that `next_is_supervised` marks; a plain batch has none.
        """
        return {}

    def draft_term(self, is_predicted: Tensor, draft_ids: Tensor) -> DraftTerm | None:
        """Return a further loss term of draft steps, whose rows are those that `is_predicted`
        [B, T] marks; None for a plain batch.

        `draft_ids` [V] holds the draft vocabulary.
        """
        return None

    def row_loss(self, is_predicted: Tensor) -> RowLoss:
        """Return how the rows are weighed and compared whose next tokens `is_predicted` [B, T]
        marks; a plain batch leaves that to the drafter.
        """
        return PLAIN_ROWS

    def list_drafted_documents(self) -> list[bool]:
        """Tell of every document whether it ends with a draft that was rejected, so that its
        supervised tokens were drafted after one root; none of a plain batch does.
        """
        return [False] * (self.tokens.shape[0] if self.lengths is None else len(self.lengths))

    def split_documents(self) -> list[tuple[Tensor, Tensor]]:
        """Return tokens and loss mask [T] of every document on the CPU, padding included."""
        return list(zip(self.split_values(self.tokens), self.split_values(self.loss_mask)))

    def split_values(self, values: Tensor) -> list[Tensor]:
        """Return values [B, T] as those of every document, [T], on the CPU, padding included."""
        host = on_host(values)
        return list(host if self.lengths is None else host[0].split(self.lengths))

    @property
    def num_supervised(self) -> int:
        """Number of tokens that carry loss. A step divides its loss sum by the total over its
        batches.
        """
        return int(on_host(self.loss_mask).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with all tensors on `device`."""
        return replace(self, **self.tensors_on(device))

    def tensors_on(self, device: torch.device | str) -> dict[str, Any]:
        """Return the fields that hold tensors, by name, with these on `device`."""
        return {
            field.name: copy_to_device(value, device)
            if isinstance(value, Tensor)
            else value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), (Tensor, Features))
        }


def pad_or_pack(rows: list[Tensor], packed: bool, padding: int = 0) -> Tensor:
    """Arrange per-token values [T, ..] of every document as a batch [B, T, ..]: padded, or
    packed in one row.
    """
    if packed:
        return torch.cat(rows)[None]
    return pad_sequence(rows, batch_first=True, padding_value=padding)


def collate(examples: list[Example], packed: bool = False) -> Batch:
    """Make a batch of examples: padded on the right in a row each, or packed in one row."""
    tokens = pad_or_pack([torch.tensor(example.tokens) for example in examples], packed)
    mask = pad_or_pack([torch.tensor(example.mask) for example in examples], packed)
    return Batch(
        tokens, mask, lengths=tuple(len(example.tokens) for example in examples) if packed else None
    )

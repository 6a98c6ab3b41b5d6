"""Mask tokens: slots after a prefix at which a model predicts further tokens.

After the prefix that ends at position i, mask j (from 0) stands at position i + 1 + j and predicts
token i + 2 + j; the model predicts token i + 1 at position i itself. A mask sees the prefix and the
masks of its block before it. No other token sees it.

Shapes: B batch, T tokens, M masks of a row, N = T + M, K different masks, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.features.batch import Batch
from spectrain.models.host_copies import copy_to_device, on_host

EMBEDDING_CHUNK = 4096  # rows of an embedding that are read together


@dataclass(frozen=True)
class MaskBlocks:
    """A batch with blocks of masks after some of its prefixes, all of which one forward trains."""

    tokens: Tensor  # [B, N] the sequence, then the tokens at the masks, by default 0
    positions: Tensor  # [B, N]
    mask_index: Tensor  # [B, N] which mask, from 0; -1 at ordinary tokens
    visible: Tensor | tuple[Tensor, ...]  # [B, N, N], or [1, N, N] per packed document
    supervised: Tensor  # [B, N] bool, masks whose label is a token of the assistant
    labels: Tensor  # [B, N] the token after the one at the same position
    token_index: Tensor  # [B, N] index in the batch of the token at the same position
    anchor_index: Tensor  # [B, N] index among the N of the token at the same position
    # [B, N] which block of its document a mask belongs to, from 0; -1 at ordinary tokens
    chain_index: Tensor
    lengths: tuple[int, ...] | None = None  # of packed documents, masks included

    def to(self, device: torch.device) -> MaskBlocks:
        """Return the blocks with all tensors on a device."""
        tensors: dict[str, Any] = {
            field.name: copy_to_device(value, device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)

    @property
    def prefix_end_index(self) -> Tensor:
        """The index [B, N] in the batch of the last token of a mask's prefix; an ordinary
        token's own index.
        """
        return (self.token_index - self.mask_index - 1).clamp(min=0)

    @property
    def is_batch_token(self) -> Tensor:
        """[B, N] bool, True at the batch's own tokens."""
        anchors = on_host(self.anchor_index)
        return copy_to_device(
            anchors == torch.arange(anchors.shape[1], device="cpu"), self.anchor_index.device
        )

    def loss_weights(self, selected: Tensor, batch: Batch, share: Tensor | None = None) -> Tensor:
        """Return the loss weights [R] of the `selected` slots [B, N].

        Those of a document sum to its number of supervised tokens, whatever the batch. Within a
        document they are equal, or proportional to `share` [R].
        """
        count = len(selected) if self.lengths is None else len(self.lengths)
        device = selected.device
        # Documents are counted on the host.
        selected = on_host(selected)
        numbers = torch.arange(count, device="cpu")
        slot_documents = token_documents = numbers[:, None]
        if self.lengths is not None and batch.lengths is not None:
            slot_documents, token_documents = (
                numbers.repeat_interleave(torch.tensor(lengths, device="cpu"))[None]
                for lengths in (self.lengths, batch.lengths)
            )
        token_counts = torch.bincount(
            token_documents.expand(batch.tokens.shape)[on_host(batch.loss_mask)], minlength=count
        )
        tokens = copy_to_device(token_counts, device)
        documents = copy_to_device(slot_documents.expand(selected.shape)[selected], device)
        share = torch.ones_like(documents, dtype=torch.float32) if share is None else share
        totals = share.new_zeros(count).index_add(0, documents, share)
        return (tokens / totals.clamp(min=torch.finfo(totals.dtype).tiny))[documents] * share


def find_prefix_ends(mask: Tensor, num_masks: int) -> Tensor:
    """Return the positions [n] at which prefixes may end: those after which any mask has a label in
    `mask` [T].

    It need not be the first mask: supervised tokens may be corrections of single tokens, which deep
    masks should learn too.
    """
    return F.pad(mask[2:], (0, num_masks)).unfold(0, num_masks, 1).any(-1).nonzero()[:, 0]


def add_blocks(
    batch: Batch, prefixes: list[list[tuple[int, int]]], mask_tokens: list[list[int]] | None = None
) -> MaskBlocks:
    """Add blocks of masks after prefixes.

    `prefixes` holds (position of the last token, number of masks) for every prefix of every
    document, and `mask_tokens` the tokens at a document's masks, in this order.
    """
    mask_tokens = [[] for _ in prefixes] if mask_tokens is None else mask_tokens
    device = batch.tokens.device
    tokens = on_host(batch.tokens)
    is_supervised = on_host(batch.next_is_supervised)
    if batch.lengths is None:
        return _make_blocks(tokens, is_supervised, prefixes, mask_tokens, device).to(device)
    rows = zip(
        tokens.split(batch.lengths, dim=1),
        is_supervised.split(batch.lengths, dim=1),
        prefixes,
        mask_tokens,
    )
    parts = [
        _make_blocks(tokens, is_supervised, [document_prefixes], [document_masks], device)
        for tokens, is_supervised, document_prefixes, document_masks in rows
    ]
    return _pack_blocks(parts, batch.lengths).to(device)


def _pack_blocks(parts: list[MaskBlocks], lengths: tuple[int, ...]) -> MaskBlocks:
    """Concatenate the blocks of packed documents in one row."""

    def concat_rows(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors, dim=1)

    sizes = tuple(part.tokens.shape[1] for part in parts)
    tokens_before = accumulate(lengths, initial=0)
    slots_before = accumulate(sizes, initial=0)
    return MaskBlocks(
        concat_rows([part.tokens for part in parts]),
        concat_rows([part.positions for part in parts]),
        concat_rows([part.mask_index for part in parts]),
        tuple(part.visible for part in parts if isinstance(part.visible, Tensor)),
        concat_rows([part.supervised for part in parts]),
        concat_rows([part.labels for part in parts]),
        concat_rows([part.token_index + before for part, before in zip(parts, tokens_before)]),
        concat_rows([part.anchor_index + before for part, before in zip(parts, slots_before)]),
        concat_rows([part.chain_index for part in parts]),
        sizes,
    )


def _make_blocks(
    tokens: Tensor,
    next_is_supervised: Tensor,
    prefixes: list[list[tuple[int, int]]],
    mask_tokens: list[list[int]],
    device: torch.device,
) -> MaskBlocks:
    """Add blocks of masks to documents that have a row each, [B, T], on the host; only what sees
    what is computed on the device.
    """
    count, length = tokens.shape
    slots = [
        [(b, i, j) for b, (i, size) in enumerate(row) for j in range(size)] for row in prefixes
    ]
    width = max(map(len, slots), default=0)
    # 1. Pad the masks of all rows to one width; every padding slot is a block of its own.
    filled = [row + [(-1 - n, 0, -1) for n in range(width - len(row))] for row in slots]
    numbers = torch.tensor(filled, dtype=torch.int64, device="cpu").view(count, width, 3)
    block, prefix, number = numbers.unbind(-1)
    masks = torch.tensor(
        [row + [0] * (width - len(row)) for row in mask_tokens], dtype=torch.int64, device="cpu"
    ).view(count, width)
    # 2. Which token sees which.
    visible = _make_visible(copy_to_device(numbers, device), length)
    order = torch.arange(length, device="cpu")
    # 3. Positions and labels: a mask has the label of the token at its position.
    positions = torch.cat(
        [order.expand(count, -1), (prefix + 1 + number).clamp(max=length - 1)], dim=1
    )
    mask_index = torch.cat([torch.full_like(tokens, -1), number], dim=1)
    is_in_text = torch.cat(
        [torch.zeros_like(next_is_supervised), (number >= 0) & (prefix + 2 + number < length)],
        dim=1,
    )
    return MaskBlocks(
        torch.cat([tokens, masks], dim=1),
        positions,
        mask_index,
        visible,
        is_in_text & next_is_supervised.gather(1, positions),
        tokens.roll(-1, dims=1).gather(1, positions),
        positions,
        positions,
        torch.cat([torch.full_like(tokens, -1), block], dim=1),
    )


def _make_visible(numbers: Tensor, length: int) -> Tensor:
    """Return [B, N, N] bool: tokens see earlier tokens; masks, given as block, prefix and number
    [B, M, 3], see their prefix and the masks of their block up to themselves.
    """
    block, prefix, number = numbers.unbind(-1)
    count, width = block.shape
    order = torch.arange(length, device=block.device)
    causal = (order <= order[:, None]).expand(count, -1, -1)
    same_chain = (block[:, :, None] == block[:, None]) & (number[:, None] <= number[:, :, None])
    token_rows = torch.cat([causal, causal.new_zeros(count, length, width)], dim=2)
    mask_rows = torch.cat([order <= prefix[..., None], same_chain], dim=2)
    return torch.cat([token_rows, mask_rows], dim=1)


@contextmanager
def replace_embeddings(embedding: nn.Module, vectors: Tensor, mask_index: Tensor) -> Iterator[None]:
    """Replace the embeddings of the tokens that `mask_index` [B, N] marks, inside the context.

    `vectors` holds a vector per mask [K, D], one vector for all masks [1, D], or one per text [B,
    1, D].
    """
    is_mask = (mask_index >= 0)[..., None]
    rows = mask_index.clamp(0, len(vectors) - 1)

    def replace_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        embedded = vectors if vectors.dim() == 3 else nn.functional.embedding(rows, vectors)
        return torch.where(is_mask, embedded.to(output.dtype), output)

    handle = embedding.register_forward_hook(replace_output)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def add_embeddings(embedding: nn.Module, added: Tensor) -> Iterator[None]:
    """Add `added` [B, N, D] to the embeddings of tokens, inside the context."""
    handle = embedding.register_forward_hook(
        lambda module, args, output: output + added.to(output.dtype)
    )
    try:
        yield
    finally:
        handle.remove()


def init_mask_vectors(embedding: nn.Module, count: int) -> Tensor:
    """Initialise mask vectors [K, D] as the mean embedding plus noise of a tenth of the embeddings'
    standard deviation.

    Rows are read in chunks: all of them in float32 would be the largest tensor of a training.
    """
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    mean = weight.new_zeros((), dtype=torch.float32)
    total = weight.new_zeros((), dtype=torch.float32)
    size = 0
    for ids in torch.arange(len(weight), device=weight.device).split(EMBEDDING_CHUNK):
        # Some embeddings scale their rows, so they are called instead of indexed.
        rows = embedding(ids).float()
        mean = mean + rows.sum(0)
        total = total + rows.square().sum()
        size = size + rows.numel()
    deviation = ((total - mean.sum().square() / size) / (size - 1)).sqrt()
    return mean / len(weight) + 0.1 * deviation * torch.randn(
        count, len(mean), device=weight.device
    )

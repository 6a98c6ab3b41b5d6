"""Mask tokens: places behind a prefix that ask a model what comes further on.

Shapes: B batch, T tokens, M masks in a row, N = T + M, K different masks, D width.

Behind the prefix that ends at position i, the j-th mask, from 0, stands at position i + 1 + j and predicts token i + 2 + j;
token i + 1 is what the model says at i itself. It sees the prefix and the masks before it, and nothing sees it from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.features.batch import Batch
from spectrain.randomness import MASKED_PREFIXES, sequence_generator

EMBEDDING_CHUNK = 4096  # embeddings that are looked at together


@dataclass(frozen=True)
class MaskBlocks:
    """A batch with blocks of masks behind some of its prefixes: one forward trains all of them."""

    tokens: Tensor  # [B, N] the sequence, then the masks: token 0, or what was said
    positions: Tensor  # [B, N]
    mask_index: Tensor  # [B, N] which mask, from 0; -1 at ordinary tokens
    visible: Tensor | tuple[Tensor, ...]  # [B, N, N], or of each packed document [1, N, N]
    supervised: Tensor  # [B, N] masks whose answer is a token of the assistant
    labels: Tensor  # [B, N] the token after the one at the same position: what a mask there should say
    token_index: Tensor  # [B, N] where in the batch the token at the same position stands
    anchor_index: Tensor  # [B, N] where among these N it stands: at an ordinary token, its own place
    chain_index: Tensor  # [B, N] which of its document's blocks a mask belongs to, from 0; -1 at ordinary tokens
    lengths: tuple[int, ...] | None = None  # of packed documents, each with its masks behind its tokens

    @property
    def prefix_end_index(self) -> Tensor:
        """[B, N] where in the batch the last token stands that a mask's block knows; at ordinary tokens, these themselves."""
        return (self.token_index - self.mask_index - 1).clamp(min=0)

    @property
    def host_index(self) -> Tensor:
        """[B, N] where among these N that token stands."""
        return (self.anchor_index - self.mask_index - 1).clamp(min=0)

    @property
    def is_batch_token(self) -> Tensor:
        """[B, N] bool, the batch's own tokens."""
        return self.anchor_index == torch.arange(self.anchor_index.shape[1], device=self.anchor_index.device)

    def loss_weights(self, asked: Tensor, batch: Batch, share: Tensor | None = None) -> Tensor:
        """[R] what each place in `asked` [B, N] counts: so much that a document counts as many terms as it has tokens that
        carry loss, whatever it is batched with; of these, places alike, or in proportion to their `share` [R]."""
        count, device = (len(asked) if self.lengths is None else len(self.lengths)), asked.device
        document, owner = torch.arange(count, device=device)[:, None], torch.arange(count, device=device)[:, None]
        if self.lengths is not None and batch.lengths is not None:
            document, owner = (
                torch.arange(count).repeat_interleave(torch.tensor(lengths)).to(device)[None]
                for lengths in (self.lengths, batch.lengths)
            )
        tokens = torch.bincount(owner.expand_as(batch.tokens)[batch.loss_mask], minlength=count)
        mine = document.expand_as(asked)[asked]
        share = torch.ones_like(mine, dtype=torch.float32) if share is None else share
        whole = share.new_zeros(count).index_add(0, mine, share)
        return (tokens / whole.clamp(min=torch.finfo(whole.dtype).tiny))[mine] * share


def find_prefix_ends(mask: Tensor, num_masks: int) -> Tensor:
    """Positions [n] that prefixes may end at: one of the masks behind it, not only the first, has an answer in `mask` [T], for
    answers may be corrections of single tokens, which deep masks are to learn too."""
    return F.pad(mask[2:], (0, num_masks)).unfold(0, num_masks, 1).any(-1).nonzero()[:, 0]


def tile_prefixes(batch: Batch, size: int) -> list[list[tuple[int, int]]]:
    """Of every sequence the prefixes that end where a tile of `size` tokens begins, with as many masks."""
    ends = [find_prefix_ends(mask, size).tolist() for _, mask in batch.split_documents()]
    return [[(end, size) for end in row if (end + 1) % size == 0] for row in ends]


def sample_prefixes(batch: Batch, num_masks: int, mask_ratio: float, seed: int, step: int) -> list[list[tuple[int, int]]]:
    """Of every sequence random prefixes, drawn for its own tokens and the step, `mask_ratio` masks to a token."""
    rows = []
    for tokens, mask in batch.split_documents():
        found = find_prefix_ends(mask, num_masks)
        length = int(tokens.nonzero()[-1]) + 1 if tokens.any() else 0  # without padding
        source = sequence_generator(MASKED_PREFIXES, seed, tokens, step)
        count = max(1, int(mask_ratio * length / num_masks))
        chosen = found[torch.randperm(len(found), generator=source)[:count]].sort().values
        rows.append([(end, num_masks) for end in chosen.tolist()])
    return rows


def add_blocks(batch: Batch, prefixes: list[list[tuple[int, int]]], mask_tokens: list[list[int]] | None = None) -> MaskBlocks:
    """Put blocks behind prefixes, given for every document as (position i of its last token, number of masks), and with `said`
    the tokens that stand at its masks, in this order."""
    mask_tokens = [[] for _ in prefixes] if mask_tokens is None else mask_tokens
    if batch.lengths is None:
        return _make_blocks(batch.tokens, batch.next_is_supervised, prefixes, mask_tokens)
    rows = zip(
        batch.tokens.split(batch.lengths, dim=1), batch.next_is_supervised.split(batch.lengths, dim=1), prefixes, mask_tokens
    )
    return _pack_blocks(
        [_make_blocks(tokens, predicts, [given], [words]) for tokens, predicts, given, words in rows], batch.lengths
    )


def _pack_blocks(parts: list[MaskBlocks], lengths: tuple[int, ...]) -> MaskBlocks:
    """The blocks of packed documents, in one row."""

    def beside(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors, dim=1)

    sizes = tuple(part.tokens.shape[1] for part in parts)
    tokens_before, places_before = accumulate(lengths, initial=0), accumulate(sizes, initial=0)
    return MaskBlocks(
        beside([part.tokens for part in parts]),
        beside([part.positions for part in parts]),
        beside([part.mask_index for part in parts]),
        tuple(part.visible for part in parts if isinstance(part.visible, Tensor)),
        beside([part.supervised for part in parts]),
        beside([part.labels for part in parts]),
        beside([part.token_index + before for part, before in zip(parts, tokens_before)]),
        beside([part.anchor_index + before for part, before in zip(parts, places_before)]),
        beside([part.chain_index for part in parts]),
        sizes,
    )


def _make_blocks(tokens: Tensor, predicts: Tensor, prefixes: list[list[tuple[int, int]]], said: list[list[int]]) -> MaskBlocks:
    """The same for documents of a row each, [B, T]."""
    count, length = tokens.shape
    places = [[(b, i, j) for b, (i, size) in enumerate(row) for j in range(size)] for row in prefixes]
    width = max(map(len, places), default=0)
    filled = [row + [(-1 - n, 0, -1) for n in range(width - len(row))] for row in places]  # padding: blocks of their own
    device = tokens.device
    block, prefix, number = torch.tensor(filled, dtype=torch.int64, device=device).view(count, width, 3).unbind(-1)
    words = torch.tensor([row + [0] * (width - len(row)) for row in said], dtype=torch.int64, device=device).view(count, width)
    order = torch.arange(length, device=device)
    ordinary = (order <= order[:, None]).expand(count, -1, -1)
    together = (block[:, :, None] == block[:, None]) & (number[:, None] <= number[:, :, None])
    above = torch.cat([ordinary, ordinary.new_zeros(count, length, width)], dim=2)
    below = torch.cat([order <= prefix[..., None], together], dim=2)
    positions = torch.cat([order.expand(count, -1), (prefix + 1 + number).clamp(max=length - 1)], dim=1)
    numbers = torch.cat([torch.full_like(tokens, -1), number], dim=1)
    inside = torch.cat([torch.zeros_like(predicts), (number >= 0) & (prefix + 2 + number < length)], dim=1)
    return MaskBlocks(
        torch.cat([tokens, words], dim=1),
        positions,
        numbers,
        torch.cat([above, below], dim=1),
        inside & predicts.gather(1, positions),
        tokens.roll(-1, dims=1).gather(1, positions),
        positions,
        positions,
        torch.cat([torch.full_like(tokens, -1), block], dim=1),
    )


@contextmanager
def replace_embeddings(embedding: nn.Module, vectors: Tensor, mask_index: Tensor) -> Iterator[None]:
    """Let the tokens that `numbers` [B, N] marks be embedded as mask vectors [K, D]; with one vector, all of them as that; with
    vectors [B, 1, D], those of a text as its own."""
    masks, rows = (mask_index >= 0)[..., None], mask_index.clamp(0, len(vectors) - 1)

    def replace(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        put = vectors if vectors.dim() == 3 else nn.functional.embedding(rows, vectors)
        return torch.where(masks, put.to(output.dtype), output)

    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def add_embeddings(embedding: nn.Module, added: Tensor) -> Iterator[None]:
    """Let what tokens are embedded as be that and `added` [B, N, D]."""
    handle = embedding.register_forward_hook(lambda module, args, output: output + added.to(output.dtype))
    try:
        yield
    finally:
        handle.remove()


def init_mask_vectors(embedding: nn.Module, count: int) -> Tensor:
    """Mask vectors [K, D] to begin with: the mean embedding, told apart by noise of the embeddings' own spread.

    Rows are looked up some at a time: all of them in float32 would be the largest tensor of a training.
    """
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    mean, total, size = weight.new_zeros((), dtype=torch.float32), weight.new_zeros((), dtype=torch.float32), 0
    for ids in torch.arange(len(weight), device=weight.device).split(EMBEDDING_CHUNK):
        rows = embedding(ids).float()  # some scale what they look up
        mean, total, size = mean + rows.sum(0), total + rows.square().sum(), size + rows.numel()
    spread = ((total - mean.sum().square() / size) / (size - 1)).sqrt()
    return mean / len(weight) + 0.1 * spread * torch.randn(count, len(mean), device=weight.device)

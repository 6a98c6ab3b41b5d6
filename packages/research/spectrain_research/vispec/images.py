"""The spans of images in a batch, and the sequence without the rows that a drafter leaves out.

Shapes: B batch, T tokens, N rows of the shorter sequence, D target width, Q vectors of an image, I
image tokens. Row t pairs the target's state at t with token t + 1, so that an image's rows end one
before its last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError


class ImageAdaptor(nn.Module):
    """Compresses the embeddings of an image's tokens to Q vectors: learned queries attend to
    them without positions.
    """

    def __init__(self, num_queries: int, num_heads: int, width: int) -> None:
        super().__init__()
        head_dim = width // num_heads
        self.query = nn.Parameter(torch.randn(num_queries, num_heads, head_dim) * head_dim**-0.5)
        self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(3)
        )

    def forward(self, embedded: Tensor) -> Tensor:
        """Return Q vectors [Q, D] of an image's embeddings [I, D]."""
        heads = self.query.shape[1]
        keys, values = (
            proj(embedded).unflatten(-1, (heads, -1)).transpose(0, 1)
            for proj in (self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(
            self.query.transpose(0, 1)[None], keys[None], values[None]
        )[0]
        return self.o_proj(attended.transpose(0, 1).flatten(1))


@dataclass(frozen=True)
class ImageSpans:
    """The rows of images in a batch, of which each leaves its last `num_rows` ones for its
    vectors.
    """

    # row of the batch, first row and end of an image, end of its document
    spans: list[tuple[int, int, int, int]]
    remaining: Tensor  # [B, T] bool: the rows of the shorter sequence

    @classmethod
    def find(cls, is_image: Tensor, is_start: Tensor, num_rows: int) -> ImageSpans:
        """Find the spans of rows [B, T] that pair with image tokens; `is_start` marks the first
        rows of documents.
        """
        edges = F.pad(is_image.int(), (1, 1)).diff(dim=1)
        firsts = (edges == 1).nonzero().tolist()
        ends = (edges == -1).nonzero().tolist()
        remaining = ~is_image
        spans = []
        length = is_image.shape[1]
        for (row, first), (_, end) in zip(firsts, ends):
            if end - first < num_rows:
                raise UserError(
                    f"drafter.num_queries={num_rows + 1}: an image has {end - first} tokens in a "
                    f"row, and its vectors take {num_rows} of them; use fewer queries"
                )
            remaining[row, end - num_rows : end] = True
            later = is_start[row, end:].nonzero()
            spans.append((row, first, end, end + int(later[0]) if len(later) else length))
        return cls(spans, remaining)

    @property
    def is_empty(self) -> bool:
        return not self.spans

    def shorten_rows(self) -> Tensor:
        """Return the indices [B, N] of the rows of the shorter sequence, padded at the end."""
        order = self.remaining.long().argsort(dim=1, descending=True, stable=True)
        return order[:, : int(self.remaining.sum(1).max())]

    def shorten_lengths(self, lengths: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return the lengths of packed documents in the shorter sequence."""
        return (
            None
            if lengths is None
            else tuple(int(part.sum()) for part in self.remaining[0].split(lengths))
        )

    def place_vectors(self, vectors: list[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        """Place the vectors [Q, D] of every image: the first ones at its last rows, and the last
        one at all rows of its document after it, until the next image; both [B, T, D]."""
        placed = torch.zeros_like(like)
        after = torch.zeros_like(like)
        for (row, _, end, document_end), vector in zip(self.spans, vectors):
            columns = torch.arange(end - len(vector) + 1, end, device=like.device)
            placed = placed.index_put(
                (torch.full_like(columns, row), columns), vector[:-1].to(like.dtype)
            )
            columns = torch.arange(end, document_end, device=like.device)
            after = after.index_put(
                (torch.full_like(columns, row), columns),
                vector[-1].to(like.dtype).expand(len(columns), -1),
            )
        return placed, after

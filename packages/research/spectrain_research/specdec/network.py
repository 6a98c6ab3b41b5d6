"""The network of SpecDec: a deep encoder of the source, and a shallow decoder with one query for
each draft.

Shapes: B texts, E source tokens, T prefix tokens, A anchors of a text, K drafts, L = T + A K
positions, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AttentionLayer(nn.Module):
    """A layer of self-attention, of attention to the source where there is one, and of
    feed-forward, each after a norm.
    """

    def __init__(self, width: int, heads: int, reads_source: bool) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross_attn = (
            nn.MultiheadAttention(width, heads, batch_first=True) if reads_source else None
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if reads_source else 2))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self, x: Tensor, hidden: Tensor, source: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """Transform [B, L, W]. `hidden` [B, L, L] marks what a position does not see, `padding`
        [B, E] what is no source.
        """
        normed = self.norms[0](x)
        mask = hidden.repeat_interleave(self.self_attn.num_heads, dim=0)
        x = x + self.self_attn(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        if self.cross_attn is not None and source is not None:
            x = (
                x
                + self.cross_attn(
                    self.norms[1](x), source, source, key_padding_mask=padding, need_weights=False
                )[0]
            )
        output: Tensor = x + self.mlp(self.norms[-1](x))
        return output


class QueryNetwork(nn.Module):
    """The encoder and the decoder, over embeddings of `in_width`."""

    def __init__(
        self,
        in_width: int,
        width: int,
        heads: int,
        num_encoder_layers: int,
        num_layers: int,
        num_drafts: int,
    ) -> None:
        super().__init__()
        # Embeddings of targets differ in scale.
        self.input = nn.Sequential(nn.LayerNorm(in_width), nn.Linear(in_width, width, bias=False))
        self.encoder = nn.ModuleList(
            AttentionLayer(width, heads, False) for _ in range(num_encoder_layers)
        )
        reads_source = num_encoder_layers > 0
        self.decoder = nn.ModuleList(
            AttentionLayer(width, heads, reads_source) for _ in range(num_layers)
        )
        self.queries = nn.Parameter(torch.randn(num_drafts, width) * 0.02)
        self.encoder_norm: nn.Module = nn.LayerNorm(width) if reads_source else nn.Identity()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, in_width, bias=False)

    def encode(self, embedded: Tensor, is_real: Tensor) -> Tensor:
        """Return the source's states [B, E, W] from its embeddings, of which `is_real` [B, E]
        are tokens.
        """
        x = self.input(embedded)
        x = x + encode_positions(torch.arange(x.shape[1], device=x.device), x.shape[-1])
        hidden = ~is_real[:, None].expand(-1, x.shape[1], -1)
        for layer in self.encoder:
            x = layer(x, hidden)
        states: Tensor = self.encoder_norm(x)
        return states

    def draft_states(
        self, prefix: Tensor, anchors: Tensor, source: Tensor | None, is_real: Tensor | None
    ) -> Tensor:
        """Return the states [B, A, K, in_width] of the drafts after anchors [B, A], indices in the
        prefix [B, T, in_width].

        A prefix token sees the tokens before it; a query sees the prefix up to its anchor and the
        queries of its anchor.
        """
        batch, length, _ = prefix.shape
        count = anchors.shape[1]
        drafts = len(self.queries)
        indices = torch.arange(length, device=prefix.device)
        steps = torch.arange(1, drafts + 1, device=prefix.device)
        positions = torch.cat(
            [indices.expand(batch, -1), (anchors[..., None] + steps).flatten(1)], dim=1
        )
        x = torch.cat(
            [self.input(prefix), self.queries.repeat(count, 1).expand(batch, -1, -1)], dim=1
        )
        x = x + encode_positions(positions, x.shape[-1])
        hidden = hide_positions(length, anchors, drafts)
        padding = None if is_real is None else ~is_real
        for layer in self.decoder:
            x = layer(x, hidden, source, padding)
        return self.output(self.norm(x[:, length:])).unflatten(1, (count, drafts))


def hide_positions(length: int, anchors: Tensor, drafts: int) -> Tensor:
    """Return [B, L, L], which positions a prefix token or a query does not see."""
    batch, count = anchors.shape
    indices = torch.arange(length, device=anchors.device)
    causal = (indices[None] > indices[:, None]).expand(batch, -1, -1)
    no_queries = torch.ones(batch, length, count * drafts, dtype=torch.bool, device=anchors.device)
    block = torch.arange(count, device=anchors.device).repeat_interleave(drafts)
    after_anchor = (indices > anchors[..., None]).repeat_interleave(drafts, dim=1)
    other_blocks = (block[:, None] != block).expand(batch, -1, -1)
    return torch.cat(
        [torch.cat([causal, no_queries], dim=2), torch.cat([after_anchor, other_blocks], dim=2)],
        dim=1,
    )


def encode_positions(positions: Tensor, width: int) -> Tensor:
    """Return sines and cosines [.., W] of positions."""
    rates = torch.exp(torch.arange(0, width, 2, device=positions.device) * (-9.21 / width))
    angles = positions[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width]

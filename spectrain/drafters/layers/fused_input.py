"""What EAGLE's layers and block drafters read: fused layers of the target, and tokens.

Shapes: B batch, T tokens, F fused layers, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.models.features import Features, Layer
from spectrain.models.head import Head
from spectrain.models.target import Target


def choose_fused_layers(
    target: Target, layers: list[int] | None, default: Callable[[], list[int]]
) -> tuple[Layer, ...]:
    """Return the layers that a drafter fuses, ascending: those of its setting, or the default.

    A UserError is raised where there is none, or for one that the target does not have.
    """
    fused = default() if layers is None else sorted(set(layers))
    if not fused:
        raise UserError("drafter.layers=[]: name at least one layer, or leave it out")
    target.check_layers(fused)
    return tuple(fused)


def make_embedding(target: Target, is_own: bool) -> nn.Embedding | None:
    """Make an input embedding of the drafter's own; None reads the target's."""
    return nn.Embedding(target.head.vocab_size, target.width) if is_own else None


@dataclass(frozen=True)
class FusedInput:
    """Reads the target's features and the tokens of a text.

    The modules are the drafter's own attributes, under which its tensors are saved; the drafter
    makes this object of them where it reads. So an adapter, or a shard, that replaces one of them
    is read too.
    """

    # The layers of the target that are fused.
    layers: tuple[Layer, ...]
    # The target's, whose embedding is read where the drafter has none.
    head: Head
    # From the concatenated layers [.., F * D] to the drafter's width.
    fc: nn.Linear
    embedding: nn.Embedding | None
    # Norm over the concatenated layers, before `fc`.
    fused_norm: nn.Module | None = None
    # Norm of every layer, before `fc`.
    layer_norms: nn.ModuleList | None = None
    # Norm of what `fc` returns.
    output_norm: nn.Module | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, features: Features) -> Tensor:
        """Concatenate the fused layers of the target: [B, T, F * D]."""
        return features.fuse_layers(self.layers)

    def project(self, fused: Tensor) -> Tensor:
        """Project concatenated layers [.., F * D] to the drafter's width [.., D]."""
        fused = fused.to(self.dtype)
        if self.fused_norm is not None:
            fused = self.fused_norm(fused)
        if self.layer_norms is not None:
            parts = fused.chunk(len(self.layer_norms), dim=-1)
            fused = torch.cat([norm(part) for norm, part in zip(self.layer_norms, parts)], dim=-1)
        projected: Tensor = self.fc(fused)
        return projected if self.output_norm is None else self.output_norm(projected)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [..] to [.., D], by the drafter's own embedding or the target's frozen
        one.
        """
        if self.embedding is not None:
            return self.embedding(tokens).to(self.dtype)
        with torch.no_grad():
            return self.head.embed(tokens).to(self.dtype)

    @torch.no_grad()
    def copy_embedding(self, device: torch.device) -> None:
        """Start the drafter's own embedding, if it has one, as the target's."""
        if self.embedding is not None:
            self.embedding.weight.copy_(self.head.all_embeddings(device))

"""The base of drafters that read fused layers of the target, and tokens: EAGLE's layers and block
drafters.

Shapes: B batch, T tokens, F fused layers, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from spectrain.drafters.base import Stage
from spectrain.drafters.capabilities import Capture
from spectrain.errors import UserError
from spectrain.models.features import Features, Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target

from .vocabulary import VocabularyDrafter


class FusedDrafter(VocabularyDrafter):
    """A drafter whose `fc` reads fused layers of the target, and which embeds tokens by an
    embedding of its own, `embed_tokens`, or by the target's frozen one.
    """

    capabilities = replace(VocabularyDrafter.capabilities, capture=Capture(state_names=("cache",)))
    # The layers of the target that are fused, ascending.
    fused_layers: tuple[Layer, ...]
    # From the concatenated layers [.., F * D] to the drafter's width.
    fc: nn.Linear
    embed_tokens: nn.Embedding | None
    cache: TreeCache | None = None

    def read_target(
        self, target: Target, layers: list[int] | None, default: Callable[[], list[int]]
    ) -> None:
        """Read the target's head and these layers, by default those that `default` returns; raise
        a UserError where there is none, or for one that the target does not have.
        """
        fused = default() if layers is None else sorted(set(layers))
        if not fused:
            raise UserError("drafter.layers=[]: name at least one layer, or leave it out")
        target.check_layers(fused)
        self.fused_layers = tuple(fused)
        self.layers = (*self.fused_layers, "final")
        self.head = target.head

    @property
    def stages(self) -> list[Stage]:
        return [Stage.single(self, self.layers, final_reach=0)]

    def fuse_features(self, features: Features) -> Tensor:
        """Project the target's fused layers to the drafter's width: [B, T, D]."""
        return self.project_fused(features.fuse_layers(self.fused_layers))

    def project_fused(self, fused: Tensor) -> Tensor:
        """Project concatenated layers [.., F * D] to the drafter's width [.., D]."""
        return self.fc(fused.to(self.fc.weight.dtype))

    def embed_inputs(self, tokens: Tensor) -> Tensor:
        """Embed tokens [..] to [.., D]."""
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens).to(self.fc.weight.dtype)
        with torch.no_grad():
            return self.head.embed(tokens).to(self.fc.weight.dtype)


def make_embedding(target: Target, is_own: bool) -> nn.Embedding | None:
    """Make an input embedding of the drafter's own; None reads the target's."""
    return nn.Embedding(target.head.vocab_size, target.width) if is_own else None


@torch.no_grad()
def copy_embedding(drafter: FusedDrafter, device: torch.device) -> None:
    """Start the drafter's own embedding, if it has one, as the target's."""
    if drafter.embed_tokens is not None:
        drafter.embed_tokens.weight.copy_(drafter.head.all_embeddings(device))

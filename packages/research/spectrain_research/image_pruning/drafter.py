"""EAGLE-3 that reads only some of an image's tokens: those that the prompt's last state attends to
most.

Shapes: B texts, P new positions, K kept positions, D target width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain.config.values import LayerCount, Share, Steps, VocabularySize
from spectrain.data.image_processor import have_images
from spectrain.drafters.context import Context
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.losses import LossName
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target


class PrunedImages(Eagle3):
    """EAGLE-3 whose cache holds a share of every prompt's image tokens, so that draft steps behind
    large images are short.

    A token of an image weighs as much as the final feature of the prompt's last token attends to
    its final feature. Positions close up. Training reads all tokens; with `keep` 1, and without
    images, this is EAGLE-3.
    """

    def __init__(
        self,
        target: Target,
        # Share of a prompt's image tokens that the drafter reads, from 0 to 1.
        keep: Share = 0.25,
        # Number of draft steps that are unrolled in training (training-time test).
        ttt_steps: Steps = 7,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Layers of the target whose hidden states are fused; null uses the family's default layers.
        layers: list[int] | None = None,
        # Number of decoder layers of the drafter.
        num_layers: LayerCount = 1,
        # Divergence between the target's and the drafter's token distributions.
        loss: LossName = "forward_kl",
        # Configuration keys and variants of the layers that differ from the target's; null copies
        # the target's.
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            target, ttt_steps, vocab_size, layers, num_layers, loss=loss, architecture=architecture
        )
        self.keep = keep
        self.placeholder_id = target.vision.placeholder_id if target.vision.has_vision else -1

    def read_accepted(self, context: Context) -> tuple[Tensor, TreeCache]:
        """Read the features of the last accepted tokens, of a prompt with images only those that
        are kept.
        """
        if not context.begins or not have_images(context.texts) or self.keep == 1:
            return super().read_accepted(context)
        self.cache = context.drafting_cache(
            self.cache, self.num_layers, context.builder.max_drafted
        )
        index, counts = select_rows(context, self.placeholder_id, self.keep)
        features = context.new_features.gather(index)
        tokens = context.next_tokens.gather(1, index)
        output = self.run(
            tokens,
            self.fuse_features(features),
            self.cache.next_slots(index.shape[1]),
            self.cache,
            None,
        )
        self.cache.commit(None, counts)
        last = (counts - 1)[:, None, None].expand(-1, 1, output.shape[-1])
        return output.gather(1, last), self.cache


def select_rows(context: Context, placeholder_id: int, keep: float) -> tuple[Tensor, Tensor]:
    """Return the kept positions [B, K] of prompts, in order, and their numbers [B]; the last
    position is always kept.
    """
    final = context.new_features.at_layer("final").float()
    steps = torch.arange(final.shape[1], device=final.device)
    is_real = steps < context.num_new[:, None]
    is_image = (
        (context.next_tokens == placeholder_id) & is_real & (steps < context.num_new[:, None] - 1)
    )
    last = context.last_state(final)
    scores = (final @ last.transpose(1, 2))[..., 0].masked_fill(~is_image, -torch.inf)
    rank = scores.argsort(dim=1, descending=True).argsort(dim=1)
    limit = (is_image.sum(1) * keep).ceil()
    is_read = is_real & (~is_image | (rank < limit[:, None]))
    counts = is_read.sum(1)
    order = (~is_read).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
    return order, counts

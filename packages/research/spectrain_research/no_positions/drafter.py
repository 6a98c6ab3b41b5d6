"""EAGLE-3 without rotary positions, so that its attention sees contents and causality alone."""

from __future__ import annotations

from typing import Any, Literal

from spectrain.config.values import Count, LayerCount, Share, Steps, VocabularySize
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.losses import LossName
from spectrain.models.target import Target
from spectrain_research.shared.no_rotation import NoRotation


class NoPositions(Eagle3):
    """EAGLE-3 whose queries and keys are not rotated (NoPE, Kazemnejad et al., 2023), as EAGLE-4's
    drafters may be.

    A token attends to itself and to earlier tokens, however far away they are: no weight of the
    drafter depends on the length of the text.
    """

    saved = SavedFiles(shape=("vocab_size", "layers", "num_layers", "window", "architecture"))

    def __init__(
        self,
        target: Target,
        # Number of draft steps that are unrolled in training (training-time test).
        ttt_steps: Steps = 7,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Layers of the target whose hidden states are fused; null uses the family's default layers.
        layers: list[int] | None = None,
        # Number of decoder layers of the drafter.
        num_layers: LayerCount = 1,
        # Number of preceding positions that a token attends to; null attends to all of them.
        window: Count | None = None,
        # Divergence between the target's and the drafter's token distributions.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive draft steps.
        step_decay: Share = 0.8,
        # Initial values, as those of eagle3.
        start: Literal["target", "random", "fitted"] = "target",
        # Configuration keys and variants of the layers that differ from the target's; null copies
        # the target's.
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            target,
            ttt_steps,
            vocab_size,
            layers,
            num_layers,
            window,
            loss,
            step_decay,
            start,
            architecture=architecture,
        )
        self.rotary = NoRotation(self.self_attn.head_dim)
        self.has_dynamic_rope = False

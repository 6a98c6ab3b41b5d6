"""SPACE (Yi et al., 2024, arXiv 2402.11809): the target learns to decode in parallel, and verifies
its own masks.

Shapes: B batch, T tokens, K masks, D target width.
"""

from __future__ import annotations

from typing import Literal

from spectrain.config.values import NotNegative, Positive, Seed, Share, Steps, Width
from spectrain.drafters.capabilities import SavedFiles
from spectrain.models.target import Target
from spectrain_research.shared.gated_masks import MaskConfig
from spectrain_research.shared.learned_masks import LearnedMasks
from spectrain_research.shared.masks_in_trained_target import JointTraining, MasksInTrainedTarget


class Space(MasksInTrainedTarget, LearnedMasks):
    """Mask tokens in the target, which is fine-tuned to fill them (semi-autoregressive
    fine-tuning), and no other drafter.

    The loss is the language model's own, on ordinary tokens, + `masks_weight` times the
    cross-entropy of the masks behind random prefixes. A round verifies the drafted tokens and runs
    new masks behind each of them in one forward (auto-correct decoding). The output is that of the
    fine-tuned target, token by token: only drafts come from masks.
    """

    saved = SavedFiles(shape=("num_masks",))

    def __init__(
        self,
        target: Target,
        # Number of mask tokens behind a prefix, which is the number of drafts.
        num_masks: Steps = 4,
        # How the target is trained: LoRA adapters in all its linears (lora), or all weights (full).
        adapt: Literal["lora", "full"] = "lora",
        # Rank of the LoRA adapters, used with adapt=lora.
        adapter_rank: Width = 16,
        # Scale of the LoRA adapters; their output is multiplied by alpha / rank.
        adapter_alpha: Positive = 32.0,
        # Weight of the masks' loss relative to the target's own.
        masks_weight: NotNegative = 1.0,
        # Learning rate of the target as a multiple of trainer.lr.
        target_lr_scale: Positive = 0.25,
        # Factor from 0 to 1 between the loss weights of successive masks.
        step_decay: Share = 0.9,
        # Number of mask tokens per ordinary token in a training batch.
        mask_ratio: Positive = 1.0,
        # Seed of the prefixes that masks follow in training.
        seed: Seed = 0,
    ) -> None:
        self.train_with_target(
            JointTraining(adapt, adapter_rank, adapter_alpha, masks_weight, target_lr_scale)
        )
        super().__init__(
            target,
            MaskConfig(
                num_masks=num_masks,
                rank=0,
                sampler=False,
                strategy="quadratic",
                loss="cross_entropy",
                consistency=0.0,
                step_decay=step_decay,
                mask_ratio=mask_ratio,
                seed=seed,
            ),
        )

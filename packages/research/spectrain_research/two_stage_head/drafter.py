"""EAGLE-3 over the target's whole vocabulary, with an output layer in two stages, as EAGLE-4's
drafters have it.

Shapes: V vocabulary, D width, B batch, F frontier nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.config.values import Count, LayerCount, Share, Steps, VocabularySize, Width
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.eagle3 import Eagle3, warm_up_steps
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.state_rollout import StateRollout
from spectrain.errors import UserError
from spectrain.kernels.linear_divergence import Projection
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft
from spectrain_research.shared.no_rotation import NoRotation

from .head import FirstStage, choose_candidates, spread_candidates


class TwoStageHead(Eagle3):
    """EAGLE-3 that drafts only from `candidates` tokens, which an approximation of its output layer
    of rank `rank` chooses.

    The output layer is the largest part of a draft step. A reduced vocabulary makes it small, but
    can never draft other tokens; here every token can be drafted, for K (V + D) + C D products in
    place of V D. The approximation is best for the tokens that the assistant uses most. It is
    computed from the output layer when decoding begins, so training and the weights in files are
    those of EAGLE-3. By default the output layer is the target's and is not trained. With `window`
    and without `positions` it has the other parts of EAGLE-4's drafters too.
    """

    saved = SavedFiles(
        shape=("vocab_size", "layers", "num_layers", "window", "architecture", "positions"),
    )

    def __init__(
        self,
        target: Target,
        # Rank of the first stage.
        rank: Width = 64,
        # Number of tokens that the output layer judges; all tokens give the full output layer.
        candidates: Count = 64,
        # Number of draft steps that are unrolled in training (training-time test).
        ttt_steps: Steps = 7,
        # Draft vocabulary in tokens; null uses the target's whole vocabulary.
        vocab_size: VocabularySize | None = None,
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
        # Whether the output layer keeps the target's weights and is not trained.
        freeze_output: bool = True,
        # Configuration keys and variants of the layers that differ from the target's; null copies
        # the target's.
        architecture: dict[str, Any] | None = None,
        # Whether queries and keys are rotated by position; false leaves them as they are.
        positions: bool = True,
    ) -> None:
        if rank > target.width:
            raise UserError(
                f"drafter.rank={rank}: states are {target.width} wide; use {target.width} or less"
            )
        super().__init__(
            target,
            ttt_steps,
            target.head.vocab_size if vocab_size is None else vocab_size,
            layers,
            num_layers,
            window,
            loss,
            step_decay,
            start,
            freeze_output=freeze_output,
            architecture=architecture,
        )
        if not positions:
            self.rotary = NoRotation(self.self_attn.head_dim)
            self.has_dynamic_rope = False
        self.capabilities = replace(self.capabilities, prepare_kernels=make_first_stage)
        self.rank = rank
        self.candidates = candidates
        self.register_buffer("token_weights", torch.ones(len(self.d2t)))
        self.token_weights: Tensor  # [V] how often the assistant uses each token
        self.first_stage: FirstStage | None = None
        self.first_stage_versions = (-1, -1)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary with the weights of its tokens, and initialise the layers."""
        super().prepare(target, token_counts)
        # A token that never occurs still weighs something.
        counts = token_counts.to(self.token_weights.device)[self.draft_ids]
        self.token_weights.copy_(counts + 1)

    def find_first_stage(self) -> FirstStage:
        """Return the first stage of the weights as they are now; it is made anew where they have
        changed.
        """
        versions = (self.lm_head.weight._version, self.token_weights._version)
        if self.first_stage is None or self.first_stage_versions != versions:
            self.first_stage = FirstStage(self.lm_head.weight, self.token_weights, self.rank)
            self.first_stage_versions = versions
        return self.first_stage

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the features of the last accepted tokens, and draft from the last of them."""
        root, cache = self.read_accepted(context)
        return Draft(StateRollout(self, cache, root, self.draft_ids))

    def judge_candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return candidates [B, F, C] and their logits, from output states [B, F, D]."""
        head = Projection(self.lm_head.weight, self.lm_head.bias)
        states = self.head_inputs(hidden)
        return choose_candidates(head, self.find_first_stage(), states, self.candidates)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [B, F, V] from output states [B, F, D]; those of other tokens than the
        candidates have no probability.
        """
        return spread_candidates(*self.judge_candidates(hidden), len(self.d2t))

    def log_q(self, hidden: Tensor) -> Tensor:
        """Compute log q [B, F, V] from output states [B, F, D]."""
        candidates, logits = self.judge_candidates(hidden)
        return spread_candidates(candidates, logits.log_softmax(-1), len(self.d2t))


@torch.inference_mode()
def make_first_stage(drafter: TwoStageHead) -> None:
    """Make the first stage and load the kernels, so that no timed round does."""
    warm_up_steps(drafter)
    drafter.find_first_stage()

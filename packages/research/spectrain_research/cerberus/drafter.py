"""Cerberus (Liu et al., 2024, arXiv 2410.13344): heads that read the head before them, and a gate
that decides to draft.

Shapes: B batch, T tokens, D target width, V draft vocabulary, K heads, F frontier nodes.
Head k, from 0, at index t predicts token t + 2 + k; token t + 1 is the target's own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import NotNegative, Share, Steps, VocabularySize, Width
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, OnePassCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.output_layer import make_output_layer, project_down
from spectrain.drafters.layers.vocabulary import HeadsDrafter, Supervision
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, MarginalRollout


class CerberusHead(nn.Module):
    """Residual blocks that read the target's state and the state of the head before, and an output
    layer.

        s <- s + SiLU(W [h; s] + b), from s = the state of the head before

    W and b are zero at first, so that every head starts as the target's own.
    """

    def __init__(self, width: int, vocab_size: int, num_layers: int, rank: int | None) -> None:
        super().__init__()
        blocks = [nn.Linear(2 * width, width) for _ in range(num_layers)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)
        self.lm_down, self.lm_head = make_output_layer(width, vocab_size, rank)

    def forward(self, final: Tensor, previous: Tensor) -> Tensor:
        """Return the state [.., D] of this head from the target's and from that of the head
        before, [.., D] each.
        """
        state = previous
        for block in self.blocks:
            state = state + F.silu(block(torch.cat([final, state], dim=-1)))
        return state


class Cerberus(HeadsDrafter):
    """Medusa's heads, each of which reads the state of the head before (sequential knowledge), all
    in one pass.

    No head reads a drafted token. With `max_entropy`, a round drafts only in texts whose newest
    token the target drew from a distribution of less entropy (adaptive parallel decoding); the
    others make a plain step. The gate reads committed text alone, so every rule stays as lossless
    as before. It computes the target's distribution once more, one product with its output layer.
    The loss is sum_k head_decay^k L_k.
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(shape=("num_heads", "num_layers", "vocab_size", "head_rank"))
    capabilities = replace(HeadsDrafter.capabilities, capture=Capture(), cost=OnePassCost)

    def __init__(
        self,
        target: Target,
        # Number of heads, which is the number of drafts.
        num_heads: Steps = 4,
        # Number of residual blocks per head.
        num_layers: Steps = 1,
        # Entropy in nats of the target's distribution of the newest token from which a text makes a
        # plain step; null always drafts.
        max_entropy: NotNegative | None = None,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Loss of each head: a cross-entropy with the data or a divergence from the target.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive heads.
        head_decay: Share = 0.8,
        # Rank of the heads' factorised output layers (SlimSpec); null uses full-rank layers.
        head_rank: Width | None = None,
    ) -> None:
        super().__init__()
        self.divergence = loss
        self.head_decay = head_decay
        self.max_entropy = max_entropy
        self.head = target.head
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.heads = nn.ModuleList(
            CerberusHead(target.width, vocab_size, num_layers, head_rank) for _ in range(num_heads)
        )
        self.add_vocabulary(vocab_size, target.head.vocab_size)
        if max_entropy is not None:
            # The host decides whether a round drafts.
            self.capabilities = replace(self.capabilities, capture=None)

    @property
    def stages(self) -> list[Stage]:
        return [Stage.single(self, self.layers, final_reach=len(self.heads))]

    def run_heads(self, final: Tensor, count: int) -> list[Tensor]:
        """Return the states [.., D] of the first `count` heads from the target's state [.., D]."""
        states = []
        state = final
        for head in self.heads[:count]:
            state = head(final, state)
            states.append(state)
        return states

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        assert batch.features is not None
        supervision = Supervision(self, batch)
        supervised = [supervision.is_supervised(k) for k in range(len(self.heads))]
        # Features may be missing where no head reads them.
        is_read = torch.stack(supervised).any(0)
        final = batch.features.at_layer("final")[is_read].to(next(self.parameters()).dtype)
        states = self.run_heads(final, len(self.heads))

        def head_input(k: int) -> Tensor:
            return project_down(self.heads[k].lm_down, states[k][supervised[k][is_read]])

        return Losses(*self.heads_loss(supervision, head_input))

    def draft(self, context: Context) -> Draft:
        final = context.last_state(context.new_features.at_layer("final"))
        unsure = None if self.max_entropy is None else self.find_unsure(final)
        if unsure is not None and bool(unsure.all()):
            return Draft()
        states = self.run_heads(
            final.to(next(self.parameters()).dtype),
            max(1, min(len(self.heads), context.builder.depth)),
        )
        logits = [
            head.lm_head(project_down(head.lm_down, state))
            for head, state in zip(self.heads, states)
        ]
        log_q = torch.cat(logits, dim=1).float().log_softmax(-1)
        return Draft(GatedRollout(context.root, log_q, self.draft_ids, unsure))

    def find_unsure(self, final: Tensor) -> Tensor:
        """Return the texts [B] in which the target's distribution after its states [B, 1, D] has
        too much entropy.
        """
        log_p = (
            self.head.logits(final[:, 0].to(self.head.output.weight.dtype)).float().log_softmax(-1)
        )
        return torch.special.entr(log_p.exp()).sum(-1) >= self.max_entropy


class GatedRollout(MarginalRollout):
    """Marginals of all depths; the texts `unsure` [B] draft nothing."""

    def __init__(
        self, root: Tensor, log_q: Tensor, draft_ids: Tensor, unsure: Tensor | None
    ) -> None:
        super().__init__(root, log_q, draft_ids)
        self.unsure = unsure
        self.stop_mask = None if unsure is None else unsure[:, None]

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        if self.unsure is not None:
            self.stop_mask = self.unsure[:, None].expand_as(tokens)
        return super().extend(tokens, parents)

"""OWL (2025): an LSTM whose first state is the target's own at a mask behind the newest verified
token.

Shapes: B batch, T tokens, N tokens and masks, R supervised masks, F frontier nodes, D target width,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from spectrain.config.values import Share, Steps
from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.context import Context
from spectrain.drafters.layers.losses import LossName, TargetLogProbs, head_loss
from spectrain.drafters.layers.mask_blocks import MaskBlocks
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees.rollout import Rollout
from spectrain_research.shared.gated_masks import MaskConfig
from spectrain_research.shared.learned_masks import LearnedMasks


class Owl(LearnedMasks):
    """One [SPEC] mask behind every verified node; the state h at the mask behind the accepted node
    starts the drafter:

        s_0 = h, c_0 = 0        s_k, c_k = LSTM(E(x_k), s_(k-1), c_(k-1))        q_k =
        softmax(head(h + W s_k))

    x_1 is the newest token, which the target has not run, E its embedding and head its output
    layer. The target is frozen: the vector of the mask, the cell and W are trained. No drafted
    token attends to the text, so acceptance depends on its length only through h. The mask sees its
    prefix, and nothing sees the mask: logits are those without it.
    """

    def __init__(
        self,
        target: Target,
        # Number of draft steps that are trained.
        num_steps: Steps = 5,
        # Loss of each draft step: a cross-entropy with the data or a divergence from the target.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive draft steps.
        step_decay: Share = 0.8,
        # Number of mask tokens per ordinary token in training.
        mask_ratio: float = 0.5,
        # Seed of the prefixes that masks follow in training.
        seed: int = 0,
    ) -> None:
        super().__init__(
            target,
            MaskConfig(
                num_masks=1,
                rank=0,
                sampler=False,
                strategy="quadratic",
                loss=loss,
                step_decay=step_decay,
                mask_ratio=mask_ratio,
                consistency=0.0,
                seed=seed,
            ),
        )
        self.num_steps = num_steps
        self.cell = nn.LSTMCell(target.width, target.width)
        self.output = nn.Linear(target.width, target.width, bias=False)

    def make_capabilities(self) -> Capabilities:
        return replace(super().make_capabilities(), capture=None)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the mask near the mean embedding, and the output as the state at the mask."""
        super().prepare(target, token_counts)
        with torch.no_grad():
            self.output.weight.zero_()

    def run_cell(self, tokens: Tensor, state: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states and the memories [R, D] after one more token [R] each."""
        with torch.no_grad():
            embedded = self.head.embed(tokens).to(self.output.weight.dtype)
        new_state, new_memory = self.cell(embedded, (state, memory))
        return new_state, new_memory

    # Training

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Run the target over the batch with masks after some prefixes, and the cell over the
        true tokens after each mask.
        """
        blocks = self.make_blocks(batch, state)
        plan = ForwardPlan(
            layers=("final",),
            grad=torch.is_grad_enabled(),
            positions=blocks.positions,
            mask=blocks.visible,
            lengths=blocks.lengths,
        )
        with self.insert_masks(target, blocks.mask_index):
            final = target.run(blocks.tokens, plan).at_layer("final")
        rows, first = blocks.supervised.nonzero().unbind(1)
        start = final[rows, first].to(self.output.weight.dtype)
        hidden = start
        memory = torch.zeros_like(start)
        parts = []
        for step in range(self.num_steps):
            index, is_judged = find_tokens(blocks, batch, rows, first, step)
            hidden, memory = state.run_checkpointed(
                self.run_cell, blocks.tokens[rows, index], hidden, memory
            )
            judged = is_judged.nonzero()[:, 0]
            next_index = (blocks.token_index[rows, index] + 1).clamp(max=batch.tokens.shape[1] - 1)
            parts.append(
                (
                    (start + self.output(hidden))[judged],
                    final[rows, index].detach()[judged],
                    batch.tokens[rows, next_index][judged],
                    torch.full_like(judged, step),
                )
            )
        states, anchors, labels, steps = (torch.cat(column) for column in zip(*parts))
        weights = self.step_decay**steps
        weights = weights * (batch.loss_mask.sum() / weights.sum().clamp(min=1e-9))
        log_probs = TargetLogProbs(HeadTarget(anchors, self.head.projection))
        result = head_loss(
            self.divergence, states, self.head.projection, labels, log_probs, row_weight=weights
        )
        loss = result.loss + 0 * sum(parameter.sum() for parameter in self.parameters())
        return Losses.by_depth(
            {self.divergence: loss},
            (result.predictions == result.labels).float(),
            steps,
            self.num_steps,
        )

    # Decoding

    def make_rollout(self, context: Context, states: Tensor) -> Rollout:
        return CellRollout(self, context.root, states[:, 0].to(self.output.weight.dtype))

    def drafting_layers(self, target: Target) -> nn.Module:
        return nn.ModuleList([self.cell, self.output, self.head.output])


def find_tokens(
    blocks: MaskBlocks, batch: Batch, rows: Tensor, masks: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """Return the index [R] of the token that draft step `step` after a mask reads, and whether
    its successor is supervised.
    """
    index = blocks.anchor_index[rows, masks] + step
    position = blocks.positions[rows, masks] + step
    last = blocks.tokens.shape[1] - 1
    is_inside = index <= last
    index = index.clamp(max=last)
    is_inside &= (blocks.mask_index[rows, index] < 0) & (blocks.positions[rows, index] == position)
    return index, is_inside & batch.next_is_supervised[rows, blocks.token_index[rows, index]]


class CellRollout(Rollout):
    """One round: a node's state is that of the cell after its token and its parent's state."""

    def __init__(self, drafter: Owl, root: Tensor, start: Tensor) -> None:
        # [B, D]
        self.drafter = drafter
        self.root = root
        self.first = start
        self.states = start[:, None]  # [B, nodes so far, D], the mask's first
        self.memories = torch.zeros_like(self.states)

    def start(self) -> Tensor:
        return self._run(self.root[:, None], torch.zeros_like(self.root[:, None]))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._run(tokens, parents + 1)

    def _run(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return log q [B, F, V] after nodes below `parents` [B, F], among the states."""
        index = parents[..., None].expand(-1, -1, self.states.shape[-1])
        before = (part.gather(1, index).flatten(0, 1) for part in (self.states, self.memories))
        state, memory = (
            part.unflatten(0, tokens.shape)
            for part in self.drafter.run_cell(tokens.flatten(), *before)
        )
        self.states, self.memories = (
            torch.cat([self.states, state], dim=1),
            torch.cat([self.memories, memory], dim=1),
        )
        hidden = self.first[:, None] + self.drafter.output(state)
        return (
            self.drafter.head.logits(hidden.to(self.drafter.head.output.weight.dtype))
            .float()
            .log_softmax(-1)
        )

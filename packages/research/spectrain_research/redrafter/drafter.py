"""ReDrafter (Zhang et al., 2024, arXiv 2403.09919): a recurrent cell with the target's last state,
and beam search.

Shapes: B batch, T tokens, D target width, V draft vocabulary, R supervised rows, F frontier nodes.
Index t has the target's state at t. Draft step k, from 0, has read tokens t + 1 to t + 1 + k and
predicts token t + 2 + k: true tokens in training, those of the path in decoding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import Number, Share, Steps, VocabularySize, Width
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.heads import ResBlock
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.output_layer import (
    init_output_layer,
    make_output_layer,
    project_down,
)
from spectrain.drafters.layers.vocabulary import Supervision, VocabularyDrafter, judge_rows
from spectrain.drafters.step_cost import BatchShape, Run, StepCost
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.host_copies import select_joined, select_rows
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, Rollout


class Redrafter(VocabularyDrafter):
    """One cell and one output layer for all draft steps (section 3.1):

        s_0 = e_(t+1)        s_k = SiLU(U s_(k-1) + W e_(t+1+k) + b)        g_k = [s_k; h_t]
        q = softmax(V blocks(g_k))

    The authors' released code and TensorRT-LLM have a linear cell instead, s_0 = W e_(t+1) and s_k
    without SiLU.

    e are the target's embeddings, h its last state. `num_blocks` residual blocks over g start as
    the identity and V as the target's output layer on h, so an untrained drafter repeats the
    target's last prediction. It learns the target's distribution, as the authors distil, and step k
    has weight step_decay^k. Their beam search is tree=beam, which works with any family; this
    family works with any tree.
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(shape=("vocab_size", "num_blocks", "head_rank", "cell"))
    capabilities = replace(VocabularyDrafter.capabilities, capture=Capture())

    def __init__(
        self,
        target: Target,
        # Number of draft steps that are trained.
        num_steps: Steps = 5,
        # Number of residual blocks between the cell and the output layer.
        num_blocks: Number = 2,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Loss of each draft step: a cross-entropy with the data or a divergence from the target.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive draft steps.
        step_decay: Share = 0.8,
        # Rank of the factorised output layer (SlimSpec); null uses a full-rank layer.
        head_rank: Width | None = None,
        # Recurrent cell: that of the paper's equation (silu), or of its released code, which
        # TensorRT-LLM runs (linear).
        cell: Literal["silu", "linear"] = "silu",
    ) -> None:
        super().__init__()
        self.cell = cell
        self.num_steps = num_steps
        self.divergence = loss
        self.step_decay = step_decay
        self.head = target.head
        width = target.width
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.rnn_u = nn.Linear(width, width, bias=False)
        self.rnn_w = nn.Linear(width, width)
        self.blocks = nn.ModuleList(ResBlock(2 * width) for _ in range(num_blocks))
        self.lm_down, self.lm_head = make_output_layer(2 * width, vocab_size, head_rank)
        self.add_vocabulary(vocab_size, target.head.vocab_size)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary, and start the output layer as the target's, which ignores
        the cell.
        """
        rows = self.head.output.weight[self.choose_vocabulary(token_counts)]
        init_output_layer(
            self.lm_down, self.lm_head, torch.cat([torch.zeros_like(rows), rows], dim=-1)
        )

    @property
    def stages(self) -> list[Stage]:
        return [Stage.single(self, self.layers, final_reach=self.num_steps)]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, [..] -> [.., D]."""
        with torch.no_grad():
            return self.head.embed(tokens).to(self.rnn_w.weight.dtype)

    def first_state(self, tokens: Tensor) -> Tensor:
        """Return the first state [.., D], after one token [..]."""
        embedded = self.embed(tokens)
        return F.linear(embedded, self.rnn_w.weight) if self.cell == "linear" else embedded

    def run_cell(self, tokens: Tensor, state: Tensor) -> Tensor:
        """Return the state [.., D] after one more token [..]."""
        state = self.rnn_u(state) + self.rnn_w(self.embed(tokens))
        return state if self.cell == "linear" else F.silu(state)

    def mix_states(self, state: Tensor, final: Tensor) -> Tensor:
        """Return the input of the output layer from the cell's state and the target's, [.., D]
        each.
        """
        mixed = torch.cat([state, final], dim=-1)
        for block in self.blocks:
            mixed = block(mixed)
        return project_down(self.lm_down, mixed)

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the cell and its residual blocks, once for each draft step over the
        supervised tokens.
        """
        runs = [Run(self, batch.supervised, 0, self.num_steps, extra=4 * target.width)]
        judged = judge_rows(self, batch, self.num_steps * batch.supervised)
        return StepCost(runs, replace(judged, width=2 * target.width))

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Run the cell over the true tokens after every index; one loss covers all steps."""
        assert batch.features is not None
        supervision = Supervision(self, batch)
        final = batch.features.at_layer("final").to(self.rnn_w.weight.dtype)
        # tokens past a document's end are never supervised
        cell_states = self.first_state(batch.tokens.roll(-1, dims=1))
        head_inputs: list[Tensor] = []  # of the supervised indices of every step
        for step in range(self.num_steps):
            if step:
                cell_states = state.run_checkpointed(
                    self.run_cell, batch.tokens.roll(-1 - step, dims=1), cell_states
                )
            rows = supervision.is_supervised(step)
            head_inputs.append(
                self.mix_states(select_rows(cell_states, rows), select_rows(final, rows))
            )
        label_index, row_order, steps = supervision.join_steps(self.num_steps)
        hidden = select_joined(head_inputs, row_order)
        loss, is_correct = supervision.judge_states(
            hidden, self.lm_head, label_index, self.step_decay**steps
        )
        return Losses.by_depth({self.divergence: loss}, is_correct, steps, self.num_steps)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Draft from the target's last state and the newest token. There is no state between
        rounds.
        """
        last = (context.num_new - 1).clamp(min=0)[:, None]
        final = context.new_features.gather(last).at_layer("final").to(self.rnn_w.weight.dtype)
        return Draft(_Cells(self, final, context.root))


class _Cells(Rollout):
    """One round: a node's state is that of the cell after its token and its parent's state."""

    def __init__(self, drafter: Redrafter, final: Tensor, root: Tensor) -> None:
        self.drafter, self.final, self.draft_ids = drafter, final, drafter.draft_ids  # [B, 1, D]
        self.states = drafter.first_state(root)[:, None]  # [B, nodes so far, D]

    def start(self) -> Tensor:
        return self._log_q_after(self.states)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        parent_states = self.states.gather(
            1, parents[..., None].expand(-1, -1, self.states.shape[-1])
        )
        states = self.drafter.run_cell(tokens, parent_states)
        self.states = torch.cat([self.states, states], dim=1)
        return self._log_q_after(states)

    def _log_q_after(self, states: Tensor) -> Tensor:
        """Compute log q from states, [B, F, D] -> [B, F, V]."""
        head_inputs = self.drafter.mix_states(states, self.final.expand_as(states))
        return self.drafter.lm_head(head_inputs).float().log_softmax(-1)

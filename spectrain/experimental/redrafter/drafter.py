"""ReDrafter (Zhang et al., 2024, arXiv 2403.09919): a recurrent cell beside the target's last state, searched by beams.

Shapes: B batch, T tokens, D target width, V draft vocabulary, R supervised rows, F frontier nodes.
Index t has the target's state at t. Draft step k, from 0, has read tokens t + 1 to t + 1 + k and predicts token t + 2 + k: true
tokens in training, those of the path in decoding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import Count, Number, Share, Steps, VocabularySize
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.layers import ResBlock
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.output_layer import init_output_layer, make_output_layer, project_down
from spectrain.drafters.layers.vocabulary import Supervision, VocabularyDrafter
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.target import Target
from spectrain.trees.base import Draft, Rollout


class Redrafter(VocabularyDrafter):
    """One cell and one output layer for all draft steps (section 3.1):

        s_0 = e_(t+1)        s_k = SiLU(U s_(k-1) + W e_(t+1+k) + b)        g_k = [s_k; h_t]        q = softmax(V blocks(g_k))

    e are the target's embeddings, h its last state. `num_blocks` residual blocks over g start as the identity and V as the
    target's own output layer on h, so that an untrained drafter repeats what the target has just said. The target's
    distribution is what is learnt, as the authors distil, and step k weighs step_decay^k. Their beam search is tree=beam: it
    takes any family, as this one takes any tree.
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(shape=("vocab_size", "num_blocks", "head_rank"))
    capabilities = replace(VocabularyDrafter.capabilities, capture=Capture())

    def __init__(
        self,
        target: Target,
        num_steps: Steps = 5,  # draft steps that are trained
        num_blocks: Number = 2,  # residual blocks between the cell and the output layer
        vocab_size: VocabularySize = 32000,
        loss: LossName = "forward_kl",
        step_decay: Share = 0.8,  # weight of each draft step's loss against the one before it
        head_rank: Count | None = None,  # of the output layer (SlimSpec); None: full
    ) -> None:
        super().__init__()
        self.num_steps, self.divergence, self.step_decay = num_steps, loss, step_decay
        self.head = target.head
        width, vocab_size = target.width, min(vocab_size, target.head.vocab_size)
        self.rnn_u, self.rnn_w = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.blocks = nn.ModuleList(ResBlock(2 * width) for _ in range(num_blocks))
        self.lm_down, self.lm_head = make_output_layer(2 * width, vocab_size, head_rank)
        self.add_vocabulary(vocab_size, target.head.vocab_size)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary; the output layer starts as the target's, and does not read the cell."""
        rows = self.head.output.weight[self.choose_vocabulary(token_counts)]
        init_output_layer(self.lm_down, self.lm_head, torch.cat([torch.zeros_like(rows), rows], dim=-1))

    @property
    def stages(self) -> list[Stage]:
        return [Stage.whole(self, self.layers, final_reach=self.num_steps)]

    def embed(self, tokens: Tensor) -> Tensor:
        """[..] -> [.., D], the cell's first state."""
        with torch.no_grad():
            return self.head.embed(tokens).to(self.rnn_w.weight.dtype)

    def cell(self, tokens: Tensor, state: Tensor) -> Tensor:
        """The state [.., D] after one more token [..]."""
        return F.silu(self.rnn_u(state) + self.rnn_w(self.embed(tokens)))

    def read_by_head(self, state: Tensor, final: Tensor) -> Tensor:
        """What the output layer reads, of the cell's state and the target's [.., D]."""
        mixed = torch.cat([state, final], dim=-1)
        for block in self.blocks:
            mixed = block(mixed)
        return project_down(self.lm_down, mixed)

    # Training

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Run the cell over the true tokens behind every index; all steps are judged together."""
        assert batch.features is not None
        supervision = Supervision(self, batch)
        final = batch.features.at_layer("final").to(self.rnn_w.weight.dtype)
        own = self.embed(batch.tokens.roll(-1, dims=1))  # what a document takes from beyond its end is never supervised
        read: list[Tensor] = []  # of the supervised indices of every step
        for step in range(self.num_steps):
            if step:
                own = state.checkpointed(self.cell, batch.tokens.roll(-1 - step, dims=1), own)
            rows = supervision.is_supervised(step)
            read.append(self.read_by_head(own[rows], final[rows]))
        answer, order, steps = supervision.join_steps(self.num_steps)
        hidden = torch.cat(read).index_select(0, order)
        loss, right = supervision.judge_states(hidden, self.lm_head, answer, self.step_decay**steps)
        return Losses.by_depth({self.divergence: loss}, right, steps, self.num_steps)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """From the target's state before the newest token, and that token. Nothing is kept between rounds."""
        last = (context.counts - 1).clamp(min=0)[:, None]
        final = context.fresh.gather(last).at_layer("final").to(self.rnn_w.weight.dtype)
        return Draft(_Cells(self, final, context.root))


class _Cells(Rollout):
    """One round: a node's state is the cell's, one token behind its parent's."""

    def __init__(self, drafter: Redrafter, final: Tensor, root: Tensor) -> None:
        self.drafter, self.final, self.draft_ids = drafter, final, drafter.draft_ids  # [B, 1, D]
        self.states = drafter.embed(root)[:, None]  # [B, nodes given so far, D]

    def start(self) -> Tensor:
        return self._after(self.states)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self.states.gather(1, parents[..., None].expand(-1, -1, self.states.shape[-1]))
        new = self.drafter.cell(tokens, above)
        self.states = torch.cat([self.states, new], dim=1)
        return self._after(new)

    def _after(self, states: Tensor) -> Tensor:
        """[B, F, D] -> [B, F, V]"""
        read = self.drafter.read_by_head(states, self.final.expand_as(states))
        return self.drafter.lm_head(read).float().log_softmax(-1)

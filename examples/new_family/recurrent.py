"""A recurrent drafter in the manner of ReDrafter (Zhang et al., 2024): a cell that rolls over the
tokens it drafts.

Shapes: B batch, T tokens, F new nodes, D target width, V draft vocabulary.
Index t has the target's state at t. The cell reads token t + 1, which is the target's own, and
predicts token t + 2; at draft step k (from 0) it reads token t + 1 + k and predicts token t + 2 +
k: true tokens in training, drafted ones in decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectrain.config.values import Share, Steps, VocabularySize
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.losses import LossName as Loss
from spectrain.drafters.layers.vocabulary import Supervision, VocabularyDrafter
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.target import Target
from spectrain.models.weight_block import OutputLayer
from spectrain.trees.rollout import Draft, Rollout


class Recurrent(VocabularyDrafter):
    """A GRU cell over the target's embeddings; its output layer starts as the target's. The loss
    is sum_k step_decay^k L_k.
    """

    layers: tuple[Layer, ...] = ("final",)  # read from the target, in training and in decoding
    saved = SavedFiles(shape=("vocab_size",))  # the settings that shape the weights

    def __init__(
        self,
        target: Target,
        # Number of draft steps in training.
        num_steps: Steps = 4,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Loss of each step: a cross-entropy with the data or a divergence from the target.
        loss: Loss = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive steps.
        step_decay: Share = 0.8,
    ) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.divergence = loss
        self.step_decay = step_decay
        self.head = target.head  # lent: it is neither trained nor saved with the drafter
        width = target.width
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.begin = nn.Linear(width, width)
        self.cell = nn.GRUCell(width, width)
        self.mix = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, width, bias=False)
        self.lm_head = OutputLayer(width, vocab_size, bias=False)
        self.add_vocabulary(vocab_size, target.head.vocab_size)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Draft the most frequent tokens, and start as the target's own output layer."""
        ids = self.choose_vocabulary(token_counts)
        with torch.no_grad():
            self.lm_head.weight.copy_(self.head.output.weight[ids])
            self.out.weight.zero_()

    def start(self, final: Tensor) -> Tensor:
        """Return the cell's state [.., D] before it has read anything, from the target's last
        state.
        """
        return self.begin(final).tanh()

    def read(self, tokens: Tensor, state: Tensor) -> Tensor:
        """Return the cell's state [.., D] after one more token."""
        embedded = self.head.embed(tokens).to(state.dtype)
        return self.cell(embedded.flatten(0, -2), state.flatten(0, -2)).view_as(state)

    def hidden(self, final: Tensor, state: Tensor) -> Tensor:
        """Return what the output layer reads, [.., D]."""
        return final + self.out(nn.functional.silu(self.mix(torch.cat([final, state], dim=-1))))

    @property
    def stages(self) -> list[Stage]:
        """Return one stage, whose step k is judged by the target's state k + 1 tokens later."""
        return [Stage.single(self, self.layers, final_reach=self.num_steps)]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        assert batch.features is not None
        # the target's labels, and the indices that each step is judged at
        supervision = Supervision(self, batch)
        final = batch.features.at_layer("final").to(self.lm_head.weight.dtype)
        hidden = self.start(final)
        terms = {}
        hits, counts = torch.zeros(2, self.num_steps, device=final.device)
        for step in range(self.num_steps):
            # Tokens that roll over the end are never judged.
            hidden = state.run_checkpointed(self.read, batch.tokens.roll(-1 - step, dims=1), hidden)
            rows = supervision.is_supervised(step)
            states = self.hidden(final[rows], hidden[rows])
            divergence, correct = supervision.judge_states(
                states, self.lm_head, supervision.label_index(step)
            )
            terms[f"step{step}"] = self.step_decay**step * divergence
            hits[step], counts[step] = correct.sum(), len(correct)
        return Losses(terms, hits, counts)

    def draft(self, context: Context) -> Draft:
        final = context.last_state(context.new_features.at_layer("final")).to(
            self.lm_head.weight.dtype
        )
        return Draft(_Roll(self, final, context.root))


class _Roll(Rollout):
    """One round: every node's state is the cell's, one token after its parent's."""

    def __init__(self, drafter: Recurrent, final: Tensor, root: Tensor) -> None:
        # final [B, 1, D]
        self.drafter, self.final, self.draft_ids = drafter, final, drafter.draft_ids
        # [B, nodes given so far, D]
        self.states = drafter.read(root[:, None], drafter.start(final))

    def start(self) -> Tensor:
        return self._after(self.states)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self.states.gather(1, parents[..., None].expand(-1, -1, self.states.shape[-1]))
        new = self.drafter.read(tokens, above)
        self.states = torch.cat([self.states, new], dim=1)
        return self._after(new)

    def _after(self, states: Tensor) -> Tensor:
        """Log-probabilities [B, F, V] of the token after each of these nodes."""
        return (
            self.drafter.lm_head(self.drafter.hidden(self.final.expand_as(states), states))
            .float()
            .log_softmax(-1)
        )

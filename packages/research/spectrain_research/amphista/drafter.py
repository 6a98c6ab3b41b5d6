"""Amphista (Li et al., 2024, arXiv 2406.13170): Medusa's heads that attend to each other before
they predict.

Shapes: B batch, T tokens, R rows, D target width, V draft vocabulary, K heads.
Head k, from 0, at index t reads the target's states up to t and the embeddings of the tokens up to
t + 1, and predicts token t + 2 + k.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from spectrain.config.values import OptionalLayers, Share, Steps, VocabularySize, Width
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, OnePassCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.heads import MedusaHead
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.output_layer import project_down
from spectrain.drafters.layers.vocabulary import HeadsDrafter, Supervision, embed_as_target
from spectrain.drafters.step_cost import BatchShape, Run, StepCost
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.host_copies import on_host, select_rows
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, MarginalRollout
from spectrain_research.shared.head_layers import HeadMixer, StagedAdapter


class Amphista(HeadsDrafter):
    """Medusa's heads with staged adaptation layers before them and bidirectional attention over
    them.

    Each head reads one stage of the adaptation layers over the target's states (section 3.3),
    earlier heads an earlier stage. Attention over the heads is the auto-embedding block (section
    3.2). The loss is sum_k head_decay^k L_k, k from 1. Without either kind of layer these are
    Medusa's heads.

        s_i = layer_i(fc_i([s_(i-1); E(x_(t+1))])), s_0 = h_t        x_k = MLP_k(s of head k) +
        place_k x = x + attention(x), x = x + MLP(x), over the heads         p_k = softmax(W_k x_k)

    A head does not read drafted tokens: a node's distribution depends on its depth alone, and one
    pass predicts all depths.
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(
        shape=(
            "num_heads",
            "num_layers",
            "attention_layers",
            "adaptation_layers",
            "vocab_size",
            "head_rank",
        ),
    )
    capabilities = replace(
        HeadsDrafter.capabilities, capture=Capture(state_names=("cache",)), cost=OnePassCost
    )

    def __init__(
        self,
        target: Target,
        # Number of heads, which is the number of drafts.
        num_heads: Steps = 5,
        # Number of residual blocks per head.
        num_layers: OptionalLayers = 1,
        # Number of attention layers over the heads of one position.
        attention_layers: OptionalLayers = 1,
        # Number of adaptation layers over the target's states; each is a stage that some of the
        # heads read.
        adaptation_layers: OptionalLayers = 2,
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
        self.head = target.head
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.adaptation = StagedAdapter(target, adaptation_layers)
        self.heads = nn.ModuleList(
            MedusaHead(target.width, vocab_size, num_layers, head_rank) for _ in range(num_heads)
        )
        self.exchange = HeadMixer(target, num_heads, attention_layers)
        self.add_vocabulary(vocab_size, target.head.vocab_size)
        self.cache: TreeCache | None = None

    @property
    def stages(self) -> list[Stage]:
        """One stage. Heads without adaptation read the state of one position, heads with it
        those of all earlier ones too.
        """
        return [
            Stage.single(
                self, self.layers, final_reach=None if self.adaptation.layers else len(self.heads)
            )
        ]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the heads over the supervised tokens, with attention between heads."""
        cost = super().step_cost(target, batch)
        rows = len(self.heads) * batch.supervised
        runs = [run for run in cost.runs if run.module is not self.exchange]
        return StepCost([*runs, Run(self.exchange, rows, len(self.heads))], cost.judged)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        assert batch.features is not None
        supervision = Supervision(self, batch)
        # [B, T, K], on the host
        is_supervised = torch.stack(
            [on_host(supervision.is_supervised(k)) for k in range(len(self.heads))], dim=-1
        )
        rows = is_supervised.any(-1)
        final = batch.features.at_layer("final").to(next(self.parameters()).dtype)
        stages = self.adaptation(
            final,
            embed_as_target(self, batch.tokens.roll(-1, dims=1)),
            batch.positions,
            lengths=batch.lengths,
        )
        mixed_states = state.run_checkpointed(
            self.mix_heads, *(select_rows(stage, rows) for stage in stages)
        )

        def head_input(k: int) -> Tensor:
            own = select_rows(mixed_states[:, k], is_supervised[rows][:, k])
            return project_down(self.heads[k].lm_down, own)

        return Losses(*self.heads_loss(supervision, head_input))

    def mix_heads(self, *stages: Tensor) -> Tensor:
        """Return the states [R, K, D] of all heads from those of every stage [R, D]."""
        count = len(self.heads)
        return self.exchange(
            torch.stack(
                [
                    head.run_blocks(stages[k * len(stages) // count])
                    for k, head in enumerate(self.heads)
                ],
                1,
            )
        )

    def draft(self, context: Context) -> Draft:
        """Read the states of the tokens accepted last; all heads then predict from the last
        state.
        """
        self.cache = context.drafting_cache(self.cache, len(self.adaptation.layers), 0)
        final = context.new_features.at_layer("final").to(next(self.parameters()).dtype)
        stages = self.adaptation(
            final,
            embed_as_target(self, context.next_tokens),
            self.cache.next_slots(final.shape[1]),
            self.cache,
        )
        self.cache.commit(None, context.num_new)
        states = self.mix_heads(*(context.last_state(stage)[:, 0] for stage in stages))
        logits = [
            head.lm_head(project_down(head.lm_down, states[:, k]))
            for k, head in enumerate(self.heads)
        ]
        return Draft(
            MarginalRollout(
                context.root, torch.stack(logits, dim=1).float().log_softmax(-1), self.draft_ids
            )
        )

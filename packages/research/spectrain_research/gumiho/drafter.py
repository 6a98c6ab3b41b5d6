"""Gumiho (Li et al., 2025, arXiv 2503.10135): layers draft the first tokens serially, heads the
later ones in parallel.

Shapes: B batch, T tokens, D target width, V draft vocabulary, S serial steps, F frontier nodes.
Index t pairs the target's features at t with the embedding of token t + 1. Serial step i predicts
token t + 2 + i, parallel head j token t + 2 + S + j.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import LayerCount, Number, Share, Steps, VocabularySize, Width
from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.capabilities import DraftingCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.eagle_layers import NORM_VARIANTS, EagleSettings
from spectrain.drafters.layers.eagle_unrolled import UnrolledEagle
from spectrain.drafters.layers.heads import ResBlock
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.target_kind import check_architecture
from spectrain.drafters.layers.vocabulary import Supervision, judge_rows
from spectrain.drafters.step_cost import OUTPUT_LAYERS, BatchShape, Run, StepCost
from spectrain.features.batch import Batch
from spectrain.models.host_copies import select_rows
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.rollout import BranchVisibility, Draft, Rollout


class ParallelHead(nn.Module):
    """A head over all serial steps: their last state plus the output of an MLP, which starts at
    0.
    """

    def __init__(self, width: int, num_steps: int, num_blocks: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * num_steps * width, width)
        self.add = nn.Linear(width, width)
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(num_blocks))
        nn.init.zeros_(self.add.weight)
        nn.init.zeros_(self.add.bias)

    def forward(self, pairs: Tensor, last: Tensor) -> Tensor:
        """Compute [.., D] from the last state [.., D] and from each step's state and token
        embedding, `pairs` [.., 2 S D].
        """
        hidden = last + self.add(F.silu(self.mix(pairs)))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class GumihoCost(DraftingCost):
    def num_passes(self, depth: float) -> float:
        return min(depth, self.drafter.num_serial + 1.0)


class Gumiho(UnrolledEagle):
    """EAGLE's layers draft the first `num_serial` tokens serially, `num_parallel` heads the others
    at once (section 3.2).

    The first tokens decide most. The heads read the inputs and outputs of the serial steps. The
    loss is that of all steps, weighted by step_decay^i.

        h_i = layers(E(x_(t+1+i)), h_(i-1)), i < S        head j: h_(S-1) + MLP_j([E(x_(t+2)); h_0;
        ..; E(x_(t+1+S)); h_(S-1)])

    Layers, features and divergence are `eagle3`'s; the authors use EAGLE-1's regression to the
    target's features. Their full tree attention, which extends shorter candidates like longer ones,
    corresponds to a tree builder over every head.
    """

    saved = SavedFiles(
        shape=(
            "num_serial",
            "num_parallel",
            "num_blocks",
            "vocab_size",
            "layers",
            "num_layers",
            "head_rank",
        ),
    )
    capabilities = replace(UnrolledEagle.capabilities, cost=GumihoCost)

    def __init__(
        self,
        target: Target,
        # Number of tokens that the layers draft serially.
        num_serial: Steps = 2,
        # Number of tokens that heads draft in parallel after them.
        num_parallel: Number = 5,
        # Number of residual blocks per parallel head.
        num_blocks: Number = 5,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Layers of the target whose hidden states are fused; null uses the default layers of
        # EAGLE-3.
        layers: list[int] | None = None,
        # Number of decoder layers of the drafter.
        num_layers: LayerCount = 2,
        # Divergence between the target's and the drafter's token distributions.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive drafts.
        step_decay: Share = 0.8,
        # Initial values of the output layer and fc: the target's (target), or random ones (random).
        start: Literal["target", "random"] = "target",
        # Rank of the factorised output layer (SlimSpec); null uses a full-rank layer.
        head_rank: Width | None = None,
    ) -> None:
        variants = check_architecture({}, NORM_VARIANTS)
        super().__init__(
            target,
            EagleSettings(num_layers, layers, vocab_size, None, start, False, head_rank, variants),
        )
        self.num_serial = num_serial
        self.num_steps = num_serial + num_parallel
        self.divergence = loss
        self.step_decay = step_decay
        self.parallel = nn.ModuleList(
            ParallelHead(target.width, num_serial, num_blocks) for _ in range(num_parallel)
        )

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """The layers run once for each serial step; each parallel head runs over the supervised
        tokens.
        """
        later = [
            Run(head, batch.supervised, 0, extra=2 * self.num_serial * target.width)
            for head in self.parallel
        ]
        layers = [
            part
            for name, part in self.named_children()
            if name not in ("parallel", "fc", *OUTPUT_LAYERS)
        ]
        serial = [
            Run(self.fc, batch.tokens, 0),
            Run(nn.ModuleList(layers), batch.tokens, batch.length, self.num_serial),
        ]
        return StepCost(
            [*serial, *later], judge_rows(self, batch, self.num_steps * batch.supervised)
        )

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Unroll the serial steps over their own states, with the true tokens as input, then
        apply every head to them.
        """
        supervision = Supervision(self, batch)
        states: list[Tensor] = []  # of the supervised indices of every step
        pairs: list[Tensor] = []  # [B, T, 2 D] of every serial step
        for step, hidden in enumerate(self.unroll_steps(batch, self.num_serial, state)):
            states.append(select_rows(hidden, supervision.is_supervised(step)))
            pairs.append(self.attention_inputs(batch.tokens.roll(-2 - step, dims=1), hidden)[0])
        head_inputs = torch.cat(pairs, dim=-1)
        for number, head in enumerate(self.parallel, self.num_serial):
            rows = supervision.is_supervised(number)
            states.append(head(select_rows(head_inputs, rows), select_rows(hidden, rows)))
        return self.judge_steps(supervision, states)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the features of the tokens accepted last, then draft from the last of them."""
        root, cache = self.read_accepted(context)
        return Draft(_SerialThenParallel(self, cache, root, context.builder.traits.drafts_by_level))


class _SerialThenParallel(Rollout):
    """One round: down to depth S - 1 the layers run every node, below it heads predict from the
    node's serial steps.
    """

    def __init__(self, drafter: Gumiho, cache: TreeCache, root: Tensor, by_level: bool) -> None:
        self.drafter, self.cache, self.by_level = drafter, cache, by_level
        self.draft_ids = drafter.draft_ids
        self.depth_limit = drafter.num_steps
        self.hidden = root  # [B, nodes so far, D], the last serial state of a node's path
        # of that path's serial steps
        self.pairs = root.new_zeros(len(root), 1, drafter.num_serial, 2 * root.shape[-1])
        self.branches = BranchVisibility(len(root), root.device)  # the root itself is committed
        self.deepest = 0

    def start(self) -> Tensor:
        return self.drafter.log_q(self.hidden)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        drafter = self.drafter
        serial = self.drafter.num_serial
        self.deepest += 1
        above = self.hidden.gather(1, parents[..., None].expand(-1, -1, self.hidden.shape[-1]))
        depth, visible = self.branches.add_nodes(parents)
        steps = torch.arange(1, serial + 1, device=depth.device)
        pairs = self.pairs.gather(1, parents[..., None, None].expand(-1, -1, *self.pairs.shape[2:]))
        own = drafter.attention_inputs(tokens, above)[0]
        pairs = torch.where((depth[..., None] == steps)[..., None], own[:, :, None], pairs)
        hidden = above
        if not (self.by_level and self.deepest >= serial):
            positions = self.cache.lengths[:, None] - 1 + depth
            output = drafter.run(tokens, above, positions, self.cache, visible)
            hidden = torch.where((depth < serial)[..., None], output, above)
        self.hidden, self.pairs = (
            torch.cat([self.hidden, hidden], dim=1),
            torch.cat([self.pairs, pairs], dim=1),
        )
        return drafter.log_q(self._head_inputs(depth, hidden, pairs.flatten(2)))

    def _head_inputs(self, depth: Tensor, hidden: Tensor, pairs: Tensor) -> Tensor:
        """Return the inputs [B, F, D] of the output layer after nodes of these depths [B, F], up
        to the last head.
        """
        deepest = min(self.deepest, self.drafter.num_steps - 1) - self.drafter.num_serial
        outputs = hidden
        for j in range(deepest if self.by_level else 0, deepest + 1):
            if j >= 0:
                head_output = self.drafter.parallel[j](pairs, hidden)
                outputs = torch.where(
                    (depth >= self.drafter.num_serial + j)[..., None], head_output, outputs
                )
        return outputs

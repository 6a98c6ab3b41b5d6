"""Hydra (Ankner et al., 2024): Medusa's heads made sequential, for each reads the tokens drafted before it.

Shapes: B batch, T tokens, D target width, V draft vocabulary, K heads, R supervised rows, F frontier nodes.
Head k, from 0, at index t reads the target's state at t and the embeddings of tokens t + 1 to t + 1 + k, and predicts
token t + 2 + k. In training these tokens are the true ones, in decoding those of the path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spectrain.config.values import Count, Share, Steps, VocabularySize
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.heads import PrefixAttention
from spectrain.drafters.layers.layers import ResBlock
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.output_layer import make_output_layer, project_down
from spectrain.drafters.layers.vocabulary import HeadsDrafter, Supervision
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.base import Draft, Rollout

if TYPE_CHECKING:
    from spectrain.models.target import Target


class HydraHead(nn.Module):
    """A projection of state and embeddings, residual blocks, an output layer. It starts as the target's own head."""

    def __init__(self, width: int, num_tokens: int, vocab_size: int, num_layers: int, rank: int | None) -> None:
        super().__init__()
        self.project = nn.Linear((1 + num_tokens) * width, width, bias=False)
        self.mix = nn.Linear((1 + num_tokens) * width, width)
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(num_layers - 1))
        self.lm_down, self.lm_head = make_output_layer(width, vocab_size, rank)
        with torch.no_grad():
            self.project.weight.zero_()
            self.project.weight[:, :width].fill_diagonal_(1.0)
            self.mix.weight.zero_()
            self.mix.bias.zero_()

    def hidden(self, inputs: Tensor) -> Tensor:
        """What its output layer reads."""
        hidden = self.project(inputs) + nn.functional.silu(self.mix(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return project_down(self.lm_down, hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.lm_head(self.hidden(inputs))


class Hydra(HeadsDrafter):
    """Sequentially dependent heads (section 3); with `prefix_attention`, Hydra++. The loss is sum_k head_decay^k L_k."""

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(shape=("num_heads", "num_layers", "vocab_size", "prefix_attention", "head_rank"))
    capabilities = replace(HeadsDrafter.capabilities, capture=Capture(state_names=("cache",)))

    def __init__(
        self,
        target: Target,
        num_heads: Steps = 3,
        num_layers: Steps = 1,
        vocab_size: VocabularySize = 32000,
        loss: LossName = "forward_kl",
        head_decay: Share = 0.8,
        prefix_attention: bool = False,
        head_rank: Count | None = None,  # of the heads' output layers (SlimSpec); None: full
    ) -> None:
        super().__init__()
        for key, value in (("num_heads", num_heads), ("num_layers", num_layers)):
            if value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        self.divergence, self.head_decay = loss, head_decay
        self.head = target.head
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.prefix: PrefixAttention | None = PrefixAttention(target) if prefix_attention else None
        self.heads = nn.ModuleList(HydraHead(target.width, 1 + k, vocab_size, num_layers, head_rank) for k in range(num_heads))
        self.add_vocabulary(vocab_size, target.head.vocab_size)
        self.cache: TreeCache | None = None

    @property
    def stages(self) -> list[Stage]:
        return [Stage.whole(self, self.layers, final_reach=None if self.prefix is not None else len(self.heads))]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        assert batch.features is not None
        supervision = Supervision(self, batch)
        states = batch.features.at_layer("final").to(next(self.parameters()).dtype)
        if self.prefix is not None:
            states = self.prefix(states, batch.positions, lengths=batch.lengths)
        embedded = self.embed(batch.tokens)

        def read(k: int) -> Tensor:
            rows = supervision.is_supervised(k)
            inputs = torch.cat([states[rows], *(embedded.roll(-1 - j, dims=1)[rows] for j in range(k + 1))], dim=-1)
            hidden: Tensor = self.heads[k].hidden(inputs)
            return hidden

        return Losses(*self.heads_loss(supervision, read))

    def draft(self, context: Context) -> Draft:
        states = context.fresh.at_layer("final").to(next(self.parameters()).dtype)
        if self.prefix is not None:
            self.cache = context.drafting_cache(self.cache, 1, 0)
            states = self.prefix(states, self.cache.next_slots(states.shape[1]), self.cache)
            self.cache.add_uncommitted(states.shape[1])
            self.cache.commit(None, context.counts)
        return Draft(_Path(self, context.newest(states), context.root, context.builder.drafts_by_level))


class _Path(Rollout):
    """One round: a node's head is that of its depth, and reads the tokens from the root to the node.

    What level by level is given needs one head at a time; otherwise a node may be of any depth so far.
    """

    def __init__(self, drafter: Hydra, state: Tensor, root: Tensor, by_level: bool) -> None:
        self.drafter, self.state, self.by_level = drafter, state, by_level  # [B, 1, D]
        self.deepest = 0
        self.draft_ids = drafter.draft_ids
        self.depth_limit: int = len(drafter.heads)
        self.read = drafter.embed(root)[:, None, None]  # [B, nodes, depth + 1, D], what is behind a node's depth is unused
        self.depth = torch.zeros(len(root), 1, dtype=torch.int64, device=root.device)

    def start(self) -> Tensor:
        return self._after(self.read, self.depth)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        depth = self.depth.gather(1, parents) + 1
        self.deepest += 1
        self.read = nn.functional.pad(self.read, (0, 0, 0, 1))
        read = self.read.gather(1, parents[:, :, None, None].expand(-1, -1, *self.read.shape[2:]))
        place = depth[:, :, None, None].expand(-1, -1, 1, read.shape[-1])
        read = read.scatter(2, place, self.drafter.embed(tokens)[:, :, None])
        self.read, self.depth = torch.cat([self.read, read], dim=1), torch.cat([self.depth, depth], dim=1)
        return self._after(read, depth)

    def _after(self, read: Tensor, depth: Tensor) -> Tensor:
        """[B, F, V]; below the last head there is nothing to ask, and nothing will be used."""
        found = None
        last = min(self.deepest, self.depth_limit - 1)
        for k in range(last if self.by_level else 0, last + 1):
            inputs = torch.cat([self.state.expand(-1, read.shape[1], -1), read[:, :, : k + 1].flatten(2)], dim=-1)
            log_q = self.drafter.heads[k](inputs).float().log_softmax(-1)
            found = log_q if found is None else torch.where((depth >= k)[..., None], log_q, found)
        assert found is not None
        return found

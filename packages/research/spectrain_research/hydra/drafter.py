"""Hydra (Ankner et al., 2024): Medusa's heads made sequential, for each reads the tokens drafted
before it.

Shapes: B batch, T tokens, D target width, V draft vocabulary, K heads, R supervised rows, F
frontier nodes. Head k, from 0, at index t reads the target's state at t and the embeddings of
tokens t + 1 to t + 1 + k, and predicts token t + 2 + k. In training these tokens are the true ones,
in decoding those of the path.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from spectrain.config.values import Share, Steps, VocabularySize, Width
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.heads import ResBlock
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.output_layer import make_output_layer, project_down
from spectrain.drafters.layers.vocabulary import HeadsDrafter, Supervision, embed_as_target
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.host_copies import select_rows
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, Rollout
from spectrain_research.shared.head_layers import PrefixAttention
from spectrain_research.shared.on_policy import OnPolicy, find_on_policy


class HydraHead(nn.Module):
    """A projection of state and embeddings, residual blocks, an output layer. It starts as the
    target's own head.
    """

    def __init__(
        self, width: int, num_tokens: int, vocab_size: int, num_layers: int, rank: int | None
    ) -> None:
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

    def compute_hidden(self, inputs: Tensor) -> Tensor:
        """Compute the input [.., D] of the output layer from states and embeddings [.., (1 +
        tokens) D].
        """
        hidden = self.project(inputs) + nn.functional.silu(self.mix(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return project_down(self.lm_down, hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.lm_head(self.compute_hidden(inputs))


class Hydra(HeadsDrafter):
    """Sequentially dependent heads (section 3); with `prefix_attention`, Hydra++. The loss is
    sum_k head_decay^k L_k.
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(
        shape=("num_heads", "num_layers", "vocab_size", "prefix_attention", "head_rank")
    )
    capabilities = replace(
        HeadsDrafter.capabilities,
        capture=Capture(state_names=("cache",)),
    )

    def __init__(
        self,
        target: Target,
        # Number of heads, which is the number of drafts.
        num_heads: Steps = 3,
        # Number of residual blocks per head.
        num_layers: Steps = 1,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Loss of each head: a cross-entropy with the data or a divergence from the target.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive heads.
        head_decay: Share = 0.8,
        # Whether a decoder layer over all earlier states of the target precedes the heads
        # (Hydra++).
        prefix_attention: bool = False,
        # Rank of the heads' factorised output layers (SlimSpec); null uses full-rank layers.
        head_rank: Width | None = None,
    ) -> None:
        super().__init__()
        self.divergence = loss
        self.head_decay = head_decay
        self.head = target.head
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.prefix: PrefixAttention | None = PrefixAttention(target) if prefix_attention else None
        self.heads = nn.ModuleList(
            HydraHead(target.width, 1 + k, vocab_size, num_layers, head_rank)
            for k in range(num_heads)
        )
        self.add_vocabulary(vocab_size, target.head.vocab_size)
        self.cache: TreeCache | None = None

    @property
    def stages(self) -> list[Stage]:
        return [
            Stage.single(
                self, self.layers, final_reach=None if self.prefix is not None else len(self.heads)
            )
        ]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        assert batch.features is not None
        supervision = Supervision(self, batch)
        states = batch.features.at_layer("final").to(next(self.parameters()).dtype)
        if self.prefix is not None:
            states = self.prefix(states, batch.positions, lengths=batch.lengths)
        embedded = embed_as_target(self, batch.tokens)

        def head_input(k: int) -> Tensor:
            rows = supervision.is_supervised(k)
            inputs = torch.cat(
                [
                    select_rows(states, rows),
                    *(select_rows(embedded.roll(-1 - j, dims=1), rows) for j in range(k + 1)),
                ],
                dim=-1,
            )
            hidden: Tensor = self.heads[k].compute_hidden(inputs)
            return hidden

        return Losses(*self.heads_loss(supervision, head_input))

    def draft(self, context: Context) -> Draft:
        states = context.new_features.at_layer("final").to(next(self.parameters()).dtype)
        if self.prefix is not None:
            self.cache = context.drafting_cache(self.cache, 1, 0)
            states = self.prefix(states, self.cache.next_slots(states.shape[1]), self.cache)
            self.cache.add_uncommitted(states.shape[1])
            self.cache.commit(None, context.num_new)
        return Draft(
            _Path(
                self,
                context.last_state(states),
                context.root,
                context.builder.traits.drafts_by_level,
            )
        )


find_on_policy.register(Hydra, lambda drafter: OnPolicy(learns_windows=True))


class _Path(Rollout):
    """One round: a node's head is that of its depth, and reads the tokens from the root to the
    node.

    Nodes that arrive level by level need one head at a time; otherwise a node may have any depth.
    """

    def __init__(self, drafter: Hydra, state: Tensor, root: Tensor, by_level: bool) -> None:
        self.drafter, self.state, self.by_level = drafter, state, by_level  # [B, 1, D]
        self.deepest = 0
        self.draft_ids = drafter.draft_ids
        self.depth_limit: int = len(drafter.heads)
        # [B, nodes, depth + 1, D], unused past a node's depth
        self.path_embeddings = embed_as_target(drafter, root)[:, None, None]
        self.depth = torch.zeros(len(root), 1, dtype=torch.int64, device=root.device)

    def start(self) -> Tensor:
        return self._log_q(self.path_embeddings, self.depth)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        depth = self.depth.gather(1, parents) + 1
        self.deepest += 1
        self.path_embeddings = nn.functional.pad(self.path_embeddings, (0, 0, 0, 1))
        path_embeddings = self.path_embeddings.gather(
            1, parents[:, :, None, None].expand(-1, -1, *self.path_embeddings.shape[2:])
        )
        depth_index = depth[:, :, None, None].expand(-1, -1, 1, path_embeddings.shape[-1])
        path_embeddings = path_embeddings.scatter(
            2, depth_index, embed_as_target(self.drafter, tokens)[:, :, None]
        )
        self.path_embeddings, self.depth = (
            torch.cat([self.path_embeddings, path_embeddings], dim=1),
            torch.cat([self.depth, depth], dim=1),
        )
        return self._log_q(path_embeddings, depth)

    def _log_q(self, path_embeddings: Tensor, depth: Tensor) -> Tensor:
        """Return log q [B, F, V]; results below the last head are not used."""
        combined = None
        last = min(self.deepest, self.depth_limit - 1)
        for k in range(last if self.by_level else 0, last + 1):
            inputs = torch.cat(
                [
                    self.state.expand(-1, path_embeddings.shape[1], -1),
                    path_embeddings[:, :, : k + 1].flatten(2),
                ],
                dim=-1,
            )
            log_q = self.drafter.heads[k](inputs).float().log_softmax(-1)
            combined = (
                log_q if combined is None else torch.where((depth >= k)[..., None], log_q, combined)
            )
        assert combined is not None
        return combined

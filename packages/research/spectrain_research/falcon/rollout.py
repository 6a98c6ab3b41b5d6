"""A rollout that runs a block of nodes per pass. Shapes: B batch, N nodes so far, F new nodes, S
slots of a block, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.drafters.layers.llama_layer import Rotary, append_and_attend
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.rollout import Rollout

if TYPE_CHECKING:
    pass


class FeatureBlocks(Protocol):
    """The parts of a drafter that runs blocks of features."""

    block_size: int
    lstm: nn.LSTM
    rotary: Rotary

    def fuse_inputs(self, features: Tensor, tokens: Tensor) -> Tensor: ...

    def project_inputs(
        self, states: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def finish_features(self, states: Tensor, attended: Tensor) -> Tensor: ...

    def log_q(self, features: Tensor) -> Tensor: ...


class BlockRollout(Rollout):
    """One round: a node at depth d is predicted from slot d mod S of a block that ends at its
    ancestor of depth S (d // S).

    Nodes at a depth that S divides run a block of their own: the S nodes of their path down to
    themselves, each with the feature that predicted it.
    """

    def __init__(
        self,
        drafter: FeatureBlocks,
        cache: TreeCache,
        features: Tensor,
        lstm_state: tuple[Tensor, Tensor],
    ) -> None:
        self.drafter = drafter
        self.cache = cache
        self.size = drafter.block_size
        batch = len(features)
        device = features.device
        # [B, blocks, S, D] predicted features, those of the committed text first
        self.blocks = features[:, None]
        # [layers, B, blocks, D] after every block
        self.states = [part[:, :, None] for part in lstm_state]
        self.depths = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # [B, N]
        self.parents, self.block_of = torch.zeros_like(self.depths), torch.zeros_like(self.depths)
        # [B, N, D] fused input of every node; not the root's
        self.inputs = features.new_zeros(batch, 1, features.shape[-1])
        # [B, blocks, blocks without the first]
        self.visible = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)

    def start(self) -> Tensor:
        return self.drafter.log_q(self.blocks[:, :, 0])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        depth = self.depths.gather(1, parents) + 1
        self.inputs = torch.cat(
            [self.inputs, self.drafter.fuse_inputs(self.predicting_features(parents), tokens)],
            dim=1,
        )
        first = self.depths.shape[1]
        self.depths, self.parents = (
            torch.cat([self.depths, depth], dim=1),
            torch.cat([self.parents, parents], dim=1),
        )
        block_of = self.block_of.gather(1, parents)
        begins = depth % self.size == 0
        if bool(begins.any()):
            nodes = torch.arange(first, first + depth.shape[1], device=depth.device).expand_as(
                depth
            )
            own = torch.arange(depth.shape[1], device=depth.device) + self.blocks.shape[1]
            self.run_blocks(nodes, block_of)
            block_of = torch.where(begins, own, block_of)
        self.block_of = torch.cat([self.block_of, block_of], dim=1)
        return self.drafter.log_q(self.features_after(block_of, depth))

    def features_after(self, blocks: Tensor, depths: Tensor) -> Tensor:
        """Return the features [B, F, D] that predict the tokens after nodes of these blocks and
        depths [B, F].
        """
        slots = blocks * self.size + depths % self.size
        return self.blocks.flatten(1, 2).gather(
            1, slots[..., None].expand(-1, -1, self.blocks.shape[-1])
        )

    def predicting_features(self, parents: Tensor) -> Tensor:
        """Return the features [B, F, D] that predicted the children of these nodes."""
        return self.features_after(self.block_of.gather(1, parents), self.depths.gather(1, parents))

    def run_blocks(self, nodes: Tensor, above: Tensor) -> None:
        """Run the blocks that end at nodes [B, F], each after the block `above` [B, F]; those of
        other nodes are never read.
        """
        batch, count = nodes.shape
        path = [nodes]
        for _ in range(self.size - 1):
            path.append(self.parents.gather(1, path[-1]))
        order = torch.stack(path[::-1], dim=-1)  # [B, F, S], the shallowest first
        width = self.inputs.shape[-1]
        z = self.inputs.gather(1, order.flatten(1)[..., None].expand(-1, -1, width)).unflatten(
            1, (count, self.size)
        )
        index = above[None, ..., None].expand(len(self.states[0]), -1, -1, width)
        before = [part.gather(2, index).flatten(1, 2).contiguous() for part in self.states]
        outputs, after = self.drafter.lstm(z.flatten(0, 1), tuple(before))
        states = z + outputs.unflatten(0, (batch, count))
        depths = (
            self.depths.gather(1, nodes)[..., None]
            - self.size
            + 1
            + torch.arange(self.size, device=nodes.device)
        )
        positions = (self.cache.lengths[:, None, None] - 1 + depths).clamp(min=0).flatten(1)
        flat = states.flatten(1, 2)
        attended = append_and_attend(
            *self.drafter.project_inputs(flat, self.drafter.rotary(flat, positions)),
            self.cache,
            self._add_visibility(above),
            0,
        )
        self.cache.add_uncommitted(count * self.size)
        features = self.drafter.finish_features(flat, attended).unflatten(1, (count, self.size))
        self.blocks = torch.cat([self.blocks, features], dim=1)
        self.states = [
            torch.cat([old, new.unflatten(1, (batch, count))], 2)
            for old, new in zip(self.states, after)
        ]

    def _add_visibility(self, above: Tensor) -> Tensor:
        """Return which appended entries [B, F S, blocks S] the entries of new blocks below
        `above` [B, F] see.
        """
        count = above.shape[1]
        earlier = self.visible.shape[-1]
        seen = self.visible.gather(1, above[..., None].expand(-1, -1, earlier))
        itself = torch.eye(count, dtype=torch.bool, device=above.device).expand(len(above), -1, -1)
        new = torch.cat([seen, itself], dim=2)
        self.visible = torch.cat([F.pad(self.visible, (0, count)), new], dim=1)
        return new.repeat_interleave(self.size, dim=1).repeat_interleave(self.size, dim=2)

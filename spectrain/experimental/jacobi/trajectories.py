"""Jacobi trajectories of a target over blocks inside training texts (CLLM, Kou et al., 2024, section 3.1).

Shapes: B batch, T tokens, N = T + M with M tokens of blocks behind them, P blocks, n tokens of a block, D width.
A block stands behind the prefix that ends at its root: its token j, from 0, at the position of the root + 1 + j.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.drafters.layers.masks import MaskBlocks, add_blocks
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import argmax_and_log_z
from spectrain.models.forward_plan import ForwardPlan
from spectrain.randomness import TRAJECTORY, sequence_generator

if TYPE_CHECKING:
    from spectrain.models.target import Target


@dataclass(frozen=True)
class TrajectoryBlocks:
    """A batch with blocks of tokens behind some of its prefixes, each seen by itself alone."""

    blocks: MaskBlocks
    token_index: Tensor  # [P, n] of the blocks' tokens among all B N
    root_index: Tensor  # [P] of their roots
    batch_index: Tensor  # [B T] of the batch's own tokens

    @classmethod
    def from_roots(cls, batch: Batch, roots: list[list[int]], size: int) -> TrajectoryBlocks:
        """Room for a block of `size` tokens behind each of these positions of every document; several where one is repeated."""
        blocks = add_blocks(batch, [[(root, size) for root in row] for row in roots])
        lengths = batch.lengths or (batch.tokens.shape[1],) * len(batch.tokens)
        sizes = blocks.lengths or (blocks.tokens.shape[1],) * len(batch.tokens)
        places, found, ordinary = [], [], []
        for start, length, row in zip(accumulate(sizes, initial=0), lengths, roots):
            ordinary.append(torch.arange(start, start + length))
            places.append(torch.arange(len(row) * size).view(-1, size) + start + length)
            found.append(torch.tensor(row, dtype=torch.int64) + start)
        device = batch.tokens.device
        return cls(blocks, *(torch.cat(part).to(device) for part in (places, found, ordinary)))

    def run_target(self, target: Target, words: Tensor, grad: bool = False, recompute: bool = False) -> Tensor:
        """The target's states [B N, D] behind its final norm, with `words` [P, n] in the blocks; at the batch's own tokens they
        are those without blocks."""
        blocks = self.blocks
        tokens = blocks.tokens.flatten().scatter(0, self.token_index.flatten(), words.flatten()).view_as(blocks.tokens)
        plan = ForwardPlan(
            layers=("final",), grad=grad, recompute=recompute, positions=blocks.positions, mask=blocks.visible,
            lengths=blocks.lengths,
        )  # fmt: skip
        return target.run(tokens, plan).at_layer("final").flatten(0, 1)

    def loss_weights(self, batch: Batch, chosen: Tensor) -> Tensor:
        """[places] what each of the chosen places [P, n] counts: so that a document counts as many terms as it has tokens that
        carry loss."""
        asked = torch.zeros(self.blocks.tokens.numel(), dtype=torch.bool, device=chosen.device)
        return self.blocks.loss_weights(asked.index_fill(0, chosen.flatten(), True).view_as(self.blocks.tokens), batch)


class Trajectories:
    """What a target does with `count` random blocks of `size` tokens in every text; a text's own tokens key all that is drawn,
    so what it does is found once and kept."""

    def __init__(self, size: int, count: int, seed: int) -> None:
        self.size, self.count, self.seed = size, count, seed
        self.cached_trajectories: dict[
            bytes, tuple[list[int], Tensor]
        ] = {}  # of every text its roots, and states [n + 1, blocks, n]

    def __deepcopy__(self, memo: object) -> Trajectories:
        return Trajectories(self.size, self.count, self.seed)

    @torch.no_grad()
    def get_trajectories(self, batch: Batch, target: Target) -> tuple[list[list[int]], Tensor]:
        """The roots of every document's blocks, and what all blocks of the batch are after each step, [n + 1, P, n], the last
        being the fixed point; the target runs where a document is not known yet."""
        texts = batch.split_documents()
        keys = [tokens[: text_length(tokens)].numpy().tobytes() for tokens, _ in texts]
        if any(key not in self.cached_trajectories for key in keys):
            self.cached_trajectories |= zip(keys, self._iterate_jacobi(batch, target, texts))
        known = [self.cached_trajectories[key] for key in keys]
        states = torch.cat([states for _, states in known], dim=1).to(batch.tokens)
        return [roots for roots, _ in known], states

    def _iterate_jacobi(
        self, batch: Batch, target: Target, texts: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[list[int], Tensor]]:
        """y_j <- argmax p(. | x, y_<j) for all j at once, as often as a block has tokens: after step j its first j tokens are
        right, so that it ends in the fixed point. (No value is looked at, so that `plan` can run it.)"""
        begun = [self._sample_starts(tokens, mask) for tokens, mask in texts]
        roots = [row for row, _ in begun]
        blocks = TrajectoryBlocks.from_roots(batch, roots, self.size)
        before = torch.cat([blocks.root_index[:, None], blocks.token_index[:, :-1]], dim=1).flatten()
        states = [torch.cat([words for _, words in begun]).to(batch.tokens.device)]
        for _ in range(self.size):
            said = argmax_and_log_z(blocks.run_target(target, states[-1])[before], target.head.projection)[0]
            states.append(said.view(-1, self.size))
        whole = torch.stack(states).to("cpu", torch.int32)
        return list(zip(roots, whole.split([len(row) for row in roots], dim=1)))

    def _sample_starts(self, tokens: Tensor, mask: Tensor) -> tuple[list[int], Tensor]:
        """Roots whose block lies in the answer, and for each what is drawn [blocks, n] from the text before it."""
        source, length = sequence_generator(TRAJECTORY, self.seed, tokens, 0), text_length(tokens)
        inside = mask[1:length].unfold(0, self.size, 1).all(-1) if length > self.size else mask[:0]
        possible = inside.nonzero()[:, 0]
        roots = possible[torch.randperm(len(possible), generator=source)[: self.count]].sort().values.tolist()
        drawn = [tokens[torch.randint(root + 1, (self.size,), generator=source)] for root in roots]
        return roots, torch.stack(drawn) if drawn else tokens.new_zeros(0, self.size)


def text_length(tokens: Tensor) -> int:
    """Of a text without its padding."""
    return int(tokens.nonzero()[-1]) + 1 if tokens.any() else 0

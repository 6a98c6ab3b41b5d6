"""Jacobi trajectories of a target over blocks inside training texts (CLLM, Kou et al., 2024,
section 3.1).

A block follows the prefix that ends at its root; its token j, counted from 0, stands at the
position of the root + 1 + j.
Shapes: B batch, T tokens, N = T + M with M block tokens after them, P blocks, n tokens of a block,
D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from spectrain.drafters.layers.mask_blocks import MaskBlocks, add_blocks
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import argmax_and_log_z
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.randomness import sequence_generator
from spectrain_research.shared.purposes import TRAJECTORY


@dataclass(frozen=True)
class TrajectoryBlocks:
    """A batch with blocks of tokens after some of its prefixes, none of which other tokens see."""

    blocks: MaskBlocks
    token_index: Tensor  # [P, n] of the blocks' tokens among all B N
    root_index: Tensor  # [P] of the blocks' roots among all B N
    batch_index: Tensor  # [B T] of the batch's own tokens among all B N

    @classmethod
    def from_roots(cls, batch: Batch, roots: list[list[int]], size: int) -> TrajectoryBlocks:
        """Add a block of `size` tokens after each of these positions of every document, which
        may repeat.
        """
        blocks = add_blocks(batch, [[(root, size) for root in row] for row in roots])
        lengths = batch.lengths or (batch.tokens.shape[1],) * len(batch.tokens)
        sizes = blocks.lengths or (blocks.tokens.shape[1],) * len(batch.tokens)
        token_index = []
        root_index = []
        batch_index = []
        for start, length, row in zip(accumulate(sizes, initial=0), lengths, roots):
            batch_index.append(torch.arange(start, start + length))
            token_index.append(torch.arange(len(row) * size).view(-1, size) + start + length)
            root_index.append(torch.tensor(row, dtype=torch.int64) + start)
        device = batch.tokens.device
        return cls(
            blocks, *(torch.cat(part).to(device) for part in (token_index, root_index, batch_index))
        )

    def run_target(
        self, target: Target, block_tokens: Tensor, grad: bool = False, recompute: bool = False
    ) -> Tensor:
        """Return the target's normed states [B N, D] with `block_tokens` [P, n] in the blocks,
        which no other token sees.
        """
        blocks = self.blocks
        tokens = (
            blocks.tokens.flatten()
            .scatter(0, self.token_index.flatten(), block_tokens.flatten())
            .view_as(blocks.tokens)
        )
        plan = ForwardPlan(
            layers=("final",),
            grad=grad,
            recompute=recompute,
            positions=blocks.positions,
            mask=blocks.visible,
            lengths=blocks.lengths,
        )
        return target.run(tokens, plan).at_layer("final").flatten(0, 1)

    def loss_weights(self, batch: Batch, selected: Tensor) -> Tensor:
        """Return loss weights of the selected block tokens; those of a document sum to its number
        of supervised tokens.

        `selected` holds indices [P, n] among all B N tokens.
        """
        is_selected = torch.zeros(
            self.blocks.tokens.numel(), dtype=torch.bool, device=selected.device
        )
        return self.blocks.loss_weights(
            is_selected.index_fill(0, selected.flatten(), True).view_as(self.blocks.tokens), batch
        )


class Trajectories:
    """Jacobi trajectories of `count` random blocks of `size` tokens in every text.

    A text's own tokens key all draws, so its trajectories are computed once and cached.
    """

    def __init__(self, size: int, count: int, seed: int) -> None:
        self.size, self.count, self.seed = size, count, seed
        # Per text: its roots, and the tokens of its blocks after each step [n + 1, blocks, n].
        self.cached_trajectories: dict[bytes, tuple[list[int], Tensor]] = {}

    def __deepcopy__(self, memo: object) -> Trajectories:
        return Trajectories(self.size, self.count, self.seed)

    @torch.no_grad()
    def get_trajectories(self, batch: Batch, target: Target) -> tuple[list[list[int]], Tensor]:
        """Return the roots of every document's blocks, and the tokens of all blocks after each step
        [n + 1, P, n].

        The last step is the fixed point. The target runs only if a document is not cached.
        """
        texts = batch.split_documents()
        keys = [tokens[: text_length(tokens)].numpy().tobytes() for tokens, _ in texts]
        if any(key not in self.cached_trajectories for key in keys):
            self.cached_trajectories |= zip(keys, self._iterate_jacobi(batch, target, texts))
        trajectories = [self.cached_trajectories[key] for key in keys]
        states = torch.cat([states for _, states in trajectories], dim=1).to(batch.tokens)
        return [roots for roots, _ in trajectories], states

    def _iterate_jacobi(
        self, batch: Batch, target: Target, texts: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[list[int], Tensor]]:
        """Iterate y_j <- argmax p(. | x, y_<j) for all j at once, n times.

        After step j, the first j tokens are final, so that the last step is the fixed point. The
        loop reads no values, so that `plan` can run it on tensors without data.
        """
        starts = [self._sample_starts(tokens, mask) for tokens, mask in texts]
        roots = [row for row, _ in starts]
        blocks = TrajectoryBlocks.from_roots(batch, roots, self.size)
        previous = torch.cat(
            [blocks.root_index[:, None], blocks.token_index[:, :-1]], dim=1
        ).flatten()
        states = [torch.cat([tokens for _, tokens in starts]).to(batch.tokens.device)]
        for _ in range(self.size):
            predictions = argmax_and_log_z(
                blocks.run_target(target, states[-1])[previous], target.head.projection
            )[0]
            states.append(predictions.view(-1, self.size))
        trajectories = torch.stack(states).to("cpu", torch.int32)
        return list(zip(roots, trajectories.split([len(row) for row in roots], dim=1)))

    def _sample_starts(self, tokens: Tensor, mask: Tensor) -> tuple[list[int], Tensor]:
        """Sample roots whose blocks lie inside the answer, and for each block tokens [blocks, n]
        of the text before it.
        """
        source = sequence_generator(TRAJECTORY, self.seed, tokens, 0)
        length = text_length(tokens)
        fits = mask[1:length].unfold(0, self.size, 1).all(-1) if length > self.size else mask[:0]
        candidates = fits.nonzero()[:, 0]
        roots = (
            candidates[
                torch.randperm(len(candidates), generator=source, device="cpu")[: self.count]
            ]
            .sort()
            .values.tolist()
        )
        starts = [
            tokens[torch.randint(root + 1, (self.size,), generator=source, device="cpu")]
            for root in roots
        ]
        return roots, torch.stack(starts) if starts else tokens.new_zeros(0, self.size)


def text_length(tokens: Tensor) -> int:
    """Return the length of a text without padding."""
    return int(tokens.nonzero()[-1]) + 1 if tokens.any() else 0

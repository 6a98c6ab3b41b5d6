"""Parallel prompt decoding (PPD, Chen et al., 2024, arXiv 2405.18628): learned prompt tokens in
several chains.

Shapes: B batch, E chains, K masks, D target width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.config.values import Width
from spectrain.data.image_processor import refuse_images
from spectrain.drafters.base import TrainingState
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.mask_blocks import MaskBlocks, add_blocks
from spectrain.features.batch import Batch
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.host_copies import copy_to_device, on_host, select_rows
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.gated_masks import MaskConfig
from spectrain_research.shared.learned_masks import LearnedMasks


@dataclass(frozen=True, kw_only=True)
class PromptTokenConfig(MaskConfig):
    """Settings of prompt tokens."""

    # Number of chains of learned mask vectors whose states are averaged.
    ensembles: Width = 1


class PromptTokens(LearnedMasks):
    """`ensembles` chains of prompt tokens after a prefix, which do not see each other, and whose
    states are averaged (section 3.3). With `num_hosts` they follow the nodes where a round is
    likeliest to end, the paper's sparse tree."""

    saved = SavedFiles(shape=("num_masks", "rank", "alpha", "sampler", "ensembles"))

    def __init__(self, target: Target, config: PromptTokenConfig) -> None:
        self.ensembles = config.ensembles
        super().__init__(target, config)

    @property
    def masks_per_host(self) -> int:
        return self.ensembles * self.num_masks

    # Training

    def make_blocks(self, batch: Batch, state: TrainingState) -> MaskBlocks:
        """Append this step's masks, all chains of a prefix one after another."""
        rows = self.prefixes(batch, state.step, state.progress)
        return add_blocks(
            batch, [[prefix for prefix in row for _ in range(self.ensembles)] for row in rows]
        )

    def number_masks(self, blocks: MaskBlocks) -> Tensor:
        chain = on_host(blocks.chain_index) % self.ensembles
        mask_index = on_host(blocks.mask_index)
        numbers = mask_index + self.num_masks * chain * (mask_index >= 0)
        return copy_to_device(numbers, blocks.tokens.device)

    def read_masks(self, final: Tensor, blocks: MaskBlocks) -> tuple[Tensor, Tensor]:
        """Average the chains, which have the same labels in the same order."""
        chain = on_host(blocks.chain_index) % self.ensembles
        supervised = on_host(blocks.supervised)
        states = [
            select_rows(final, supervised & (chain == number)) for number in range(self.ensembles)
        ]
        is_first = copy_to_device(supervised & (chain == 0), final.device)
        return torch.stack(states).mean(0), is_first

    # Decoding

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        """Run the prompts; several chains, which must not see each other, run after them in a
        forward of their own.
        """
        if self.ensembles == 1 or self.strategy == "apart":
            return super().prefill(context, tokens, lengths)
        refuse_images(context.texts, "drafter: this family reads prompts by itself")
        features = context.prefill(tokens, lengths)
        self.states = self._run_chains(context, None, self.num_masks)
        self.ready_at = lengths.clone()
        return features

    def run_root_and_masks(self, context: Context) -> Tensor:
        if self.ensembles == 1:
            return super().run_root_and_masks(context)
        return self._run_chains(context, context.root, self.count_masks(context))

    def _run_chains(self, context: Context, root: Tensor | None, depth: int) -> Tensor:
        """Return the averaged states [B, depth, D] of masks after the committed tokens, or after a
        root [B], whose state comes first.
        """
        lengths = context.cache.lengths
        num_roots = int(root is not None)
        batch = len(lengths)
        device = lengths.device
        depths = torch.arange(depth, device=device).repeat(self.ensembles)
        chains = torch.arange(self.ensembles, device=device).repeat_interleave(depth)
        positions = lengths[:, None] + num_roots + depths
        tokens = torch.zeros_like(positions)
        mask_index = (depths + self.num_masks * chains).expand(batch, -1)
        if root is not None:
            tokens = torch.cat([root[:, None], tokens], dim=1)
            mask_index = F.pad(mask_index, (1, 0), value=-1)
            positions = torch.cat([lengths[:, None], positions], dim=1)
        rows = torch.arange(tokens.numel(), device=device).view_as(tokens)[:, num_roots:].flatten()
        visible = parallel_chains_mask(self.ensembles, depth, num_roots, device)
        plan = ForwardPlan(
            layers=("final",),
            cache=context.cache,
            positions=positions,
            mask=visible.expand(batch, -1, -1),
        )
        with self.insert_masks(context.target, mask_index, rows, torch.zeros_like(mask_index)):
            features = context.target.run(tokens, plan)
        context.cache.roll_back()
        final = features.at_layer("final")
        states = final[:, num_roots:]
        if depth:
            states = states.unflatten(1, (self.ensembles, depth)).mean(1)
        return torch.cat([final[:, :num_roots], states], dim=1)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        features = super().verify(context, tree)
        if self.strategy != "apart" and self.states is not None:
            self.states = self.states.unflatten(2, (self.ensembles, self.num_masks)).mean(2)
        return features


def parallel_chains_mask(num_chains: int, length: int, shared: int, device: torch.device) -> Tensor:
    """Return the causal mask [N, N] of `shared` tokens and of parallel chains after them, which
    do not see each other.
    """
    order = torch.arange(shared + num_chains * length, device=device)
    chain = (order - shared).div(max(length, 1), rounding_mode="floor")
    same_chain = (chain == chain[:, None]) | (order < shared)
    return same_chain & (order <= order[:, None])

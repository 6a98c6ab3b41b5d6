"""The base of drafters that run mask tokens in the target itself.

Shapes: B batch, T tokens, N tree nodes, K masks, D target width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.data.image_processor import refuse_images
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, Capture, DraftingCost
from spectrain.drafters.context import Context
from spectrain.kernels import counter
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.head import Head
from spectrain.models.target import Target
from spectrain.randomness import NOISE
from spectrain.trees.base import TreeBuilder
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .tree_masks import (
    MaskRollout,
    append_masks,
    end_probabilities,
    mask_rows,
)

Strategy = Literal["quadratic", "linear", "apart"]


class MaskCost(DraftingCost):
    drafter: MaskDrafter

    def extra_nodes(self, builder: TreeBuilder) -> int:
        return self.drafter.masks_per_host * self.drafter.max_hosts(builder.budget)

    def num_passes(self, depth: float) -> float:
        return min(1.0, depth) if self.drafter.strategy == "apart" else depth

    def weights(self, target: Target) -> nn.Module:
        return self.drafter.drafting_layers(target)

    def num_target_forwards(self) -> int:
        return int(self.drafter.strategy == "apart")


class MaskDrafter(Drafter):
    """Runs masks in the target: after nodes of a tree in the forward that verifies it, or in a
    forward of their own before it.

    A node with masks after it is a host.
    """

    num_masks: int
    strategy: Strategy
    # Number of hosts with strategy=quadratic; None makes every node a host.
    num_hosts: int | None
    # Whether a uniformly random token is the input of every mask.
    has_random_tokens: bool = False
    seed: int
    head: Head
    sampler: nn.Module | None
    states: Tensor | None = None  # [B, hosts, K, D] of the masks of this round's tree
    # [B] committed length after which the states are valid; -1 for none
    ready_at: Tensor | None = None
    hosts: Tensor | None = None  # [B, hosts] nodes
    mask_index: Tensor | None = None  # [B, N] which mask a node is; -1 at ordinary nodes

    @abstractmethod
    def insert_masks(
        self,
        target: Target,
        mask_index: Tensor,
        rows: Tensor | None = None,
        hosts: Tensor | None = None,
    ) -> AbstractContextManager[None]:
        """Run the target with masks, inside the context.

        `mask_index` [B, N] says which mask a token is, `rows` are the masks' indices among all B N
        tokens, and `hosts` [B, N] the indices in the row of their hosts.
        """

    def make_capabilities(self) -> Capabilities:
        """Declare what the drafter can do. With few hosts a round cannot be captured: the CPU
        must check for ready masks.
        """
        state_names = () if self.strategy == "apart" else ("states", "ready_at")
        needs_check = self.strategy == "linear" or (
            self.strategy == "quadratic" and self.num_hosts is not None
        )
        capture = None if needs_check else Capture(state_names=state_names)
        return Capabilities(
            capture=capture, nestable=False, prefill=type(self).prefill, cost=MaskCost
        )

    @abstractmethod
    def drafting_layers(self, target: Target) -> nn.Module:
        """Return the modules that a draft step reads."""

    @property
    def masks_per_host(self) -> int:
        """Number of masks after one host, of which each `num_masks` form a chain."""
        return self.num_masks

    def max_hosts(self, budget: int) -> int:
        """Return the largest number of hosts of a tree."""
        if self.strategy != "quadratic":
            return 1
        return budget if self.num_hosts is None else min(self.num_hosts, budget)

    def random_tokens(self, context: Context, positions: Tensor) -> Tensor:
        """Draw the random tokens of masks at these positions [B, M], independently of the batch."""
        key = counter.make_key(NOISE, self.seed, context.sequence_ids[:, None], positions)
        return counter.random_bits(key, torch.zeros_like(positions)) % self.head.vocab_size

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        """Run the prompts with the first round's masks after them, which no committed token sees
        and no cache holds.
        """
        if self.strategy == "apart":
            return context.prefill(tokens, lengths)
        refuse_images(context.texts, "drafter: this family reads prompts by itself")
        positions = lengths[:, None] + torch.arange(self.num_masks, device=tokens.device)
        padded = F.pad(tokens, (0, self.num_masks))
        if self.has_random_tokens:
            padded = padded.scatter(1, positions, self.random_tokens(context, positions))
        mask_index = torch.full_like(padded, -1).scatter(1, positions, positions - lengths[:, None])
        rows = (
            positions
            + torch.arange(len(positions), device=tokens.device)[:, None] * padded.shape[1]
        )
        with self.insert_masks(
            context.target, mask_index, rows.flatten(), (lengths - 1)[:, None].expand_as(padded)
        ):
            features = context.target.prefill(padded, lengths, context.cache, ("final",))
        states = features.at_layer("final")
        self.states = states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))
        self.ready_at = lengths.clone()
        return Features(tokens, (), features.hidden[:, : tokens.shape[1], :0], features.logits)

    def draft(self, context: Context) -> Draft:
        """Draft from the masks after the last accepted node, if it was a host; then add masks
        after the new nodes.
        """
        if self.strategy == "apart":
            return Draft(self.make_rollout(context, self.run_root_and_masks(context)))
        assert self.states is not None and self.ready_at is not None
        add_masks = partial(self._add_masks, context)
        if context.cache.bound is not None and self.strategy == "quadratic":
            # Every row is ready, because every node is a host.
            return Draft(self.make_rollout(context, self.states), add_mask_nodes=add_masks)
        is_ready = self.ready_at == context.cache.lengths
        if not is_ready.any():
            children = context.builder.children
            q = (
                None
                if children == "deterministic"
                else context.new_features.hidden.new_zeros(len(is_ready), 1, self.head.vocab_size)
            )
            return Draft(
                add_mask_nodes=lambda root: add_masks(replace(root, children=children, q=q))
            )

        def add_to_ready(tree: TokenTree) -> TokenTree:
            is_root = torch.arange(tree.tokens.shape[1], device=is_ready.device) == 0
            ready = tree.select_nodes(tree.valid & (is_ready[:, None] | is_root))
            return add_masks(replace(ready, pruning=tree.pruning))

        return Draft(self.make_rollout(context, self.states), add_mask_nodes=add_to_ready)

    def make_rollout(self, context: Context, states: Tensor) -> Rollout:
        """Return a rollout from the states [B, K, D] of masks; with strategy=apart the first one
        is the root's.
        """
        return MaskRollout(context.root, states, self.head, self.sampler, self.strategy == "apart")

    def count_masks(self, context: Context) -> int:
        """Count the masks of a chain that the tree's depth needs after a root, whose own state is
        the first draft.
        """
        return min(self.num_masks, context.builder.depth - 1)

    def run_root_and_masks(self, context: Context) -> Tensor:
        """Return the states [B, 1 + K, D] of the root and of as many masks as the tree's depth
        needs, without caching them.
        """
        depth = self.count_masks(context)
        lengths = context.cache.lengths
        batch = len(lengths)
        device = lengths.device
        positions = lengths[:, None] + 1 + torch.arange(depth, device=device)
        if self.has_random_tokens:
            tokens = self.random_tokens(context, positions)
        else:
            tokens = torch.zeros_like(positions)
        tokens = torch.cat([context.root[:, None], tokens], dim=1)
        mask_index = torch.arange(-1, depth, device=device).expand(batch, -1)
        rows = torch.arange(tokens.numel(), device=device).view_as(tokens)[:, 1:].flatten()
        plan = ForwardPlan(layers=("final",), cache=context.cache)
        with self.insert_masks(context.target, mask_index, rows, torch.zeros_like(mask_index)):
            features = context.target.run(tokens, plan)
        context.cache.roll_back()
        return features.at_layer("final")

    def _add_masks(self, context: Context, tree: TokenTree) -> TokenTree:
        """Choose the hosts of a tree, and append each host's masks as chains below it, which are
        never emitted.
        """
        batch, num_nodes = tree.tokens.shape
        device = tree.tokens.device
        if self.strategy != "quadratic":
            self.hosts = (tree.depths * tree.valid).argmax(-1)[:, None]
        elif self.num_hosts is None or self.num_hosts >= num_nodes:
            self.hosts = torch.arange(num_nodes, device=device).expand(batch, -1)
        else:
            self.hosts = (
                end_probabilities(tree).topk(self.num_hosts, dim=-1).indices.sort(dim=-1).values
            )
        noise = None
        if self.has_random_tokens:
            depths = (
                tree.depths.gather(1, self.hosts)[..., None]
                + 1
                + torch.arange(self.num_masks, device=device)
            )
            noise = self.random_tokens(context, context.cache.lengths[:, None] + depths.flatten(1))
        host_masks = torch.arange(self.masks_per_host, device=device).repeat(self.hosts.shape[1])
        self.mask_index = torch.cat(
            [torch.full_like(tree.tokens, -1), host_masks.expand(batch, -1)], dim=1
        )
        return replace(
            append_masks(tree, self.hosts, self.num_masks, self.masks_per_host, noise),
            pruning=tree.pruning,
        )

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """Verify the tree and run its masks. The logits of masks stay zero, because nothing
        reads them.
        """
        if self.strategy == "apart":
            return context.verify(tree)
        assert self.mask_index is not None and self.hosts is not None
        num_masks = self.hosts.shape[1] * self.masks_per_host
        features = self.run_tree(context, tree, num_masks)
        final = features.at_layer("final")
        self.states = final[:, -num_masks:].unflatten(1, (-1, self.masks_per_host))
        logits = self.head.logits(final[:, :-num_masks])
        return Features(
            tree.tokens, features.layers, features.hidden, F.pad(logits, (0, 0, 0, num_masks))
        )

    def run_tree(self, context: Context, tree: TokenTree, num_masks: int) -> Features:
        """Return the final states of a tree, whose last `num_masks` nodes are masks."""
        assert self.mask_index is not None and self.hosts is not None
        hosts = F.pad(
            self.hosts.repeat_interleave(self.masks_per_host, dim=1),
            (tree.tokens.shape[1] - num_masks, 0),
        )
        plan = ForwardPlan(
            layers=("final",),
            positions=context.positions(tree),
            mask=tree.ancestors,
            cache=context.cache,
        )
        with self.insert_masks(context.target, self.mask_index, mask_rows(tree, num_masks), hosts):
            return context.target.run(tree.tokens, plan)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """Keep the states of the masks after the last accepted node."""
        if self.strategy == "apart":
            return
        assert self.states is not None and self.hosts is not None
        last = accepted.path.gather(1, (accepted.counts - 1)[:, None])
        is_last_host = self.hosts == last
        index = (
            is_last_host.long()
            .argmax(-1)[:, None, None, None]
            .expand(-1, 1, *self.states.shape[2:])
        )
        self.states = self.states.gather(1, index)[:, 0]
        self.ready_at = torch.where(is_last_host.any(-1), context.cache.lengths, -1)

"""Decoding with mask tokens behind what is known, in the target itself.

Shapes: B batch, T tokens, N tree nodes, K masks, D target width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.drafters.abilities import Abilities, Capture
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.kernels import counter
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan
from spectrain.randomness import NOISE
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .tree_masks import MaskRollout, append_masks, end_probabilities, parallel_chains_mask

if TYPE_CHECKING:
    from spectrain.models.head import Head
    from spectrain.models.target import Target

Strategy = Literal["quadratic", "linear", "apart"]
Noise = Literal["masks", "uniform", "mean", "transfer", "streams"]


class MaskDrafter(Drafter):
    """Runs masks in the target, behind the nodes of a tree in the forward that verifies it, or before in one of their own."""

    num_masks: int
    ensembles: int  # chains of them behind a node, whose states are averaged
    strategy: Strategy
    num_hosts: int | None  # nodes that they stand behind with quadratic; None: all
    noise: Noise
    seed: int
    head: Head
    sampler: nn.Module | None
    means: Tensor | None = None  # [B, 1, D] of the embeddings of each prompt
    states: Tensor | None = None  # [B, hosts, K, D] of the masks of this round's tree
    ready_at: Tensor | None = None  # [B] how much was committed when the states were those behind it; -1 never
    hosts: Tensor | None = None  # [B, hosts] the nodes that masks stand behind
    mask_index: Tensor | None = None  # [B, N] which mask a node is

    @abstractmethod
    def insert_masks(
        self, target: Target, numbers: Tensor, rows: Tensor | None = None, hosts: Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Run the target with what stands at masks: at the places `rows` of all B N, where `numbers` [B, N] names one, behind
        the places `hosts` [B, N] of their row."""

    def make_capabilities(self, adapts_layers: bool) -> Abilities:
        """Masks behind every node are ready whatever is accepted; behind some, the host must know whether they are."""
        carried = ("means",) if self.noise == "mean" else ()
        ready = () if self.strategy == "apart" else ("states", "ready_at")
        sparse = self.strategy == "linear" or (self.strategy == "quadratic" and self.num_hosts is not None)
        capture = None if sparse else Capture(carried=(*ready, *carried))
        prefill = MaskDrafter.prefill if ready or carried else None
        return Abilities(capture=capture, adapts_layers=adapts_layers, prefill=prefill, plain=False)

    @property
    def masks_per_host(self) -> int:
        """Masks behind one node: chain after chain."""
        return self.ensembles * self.num_masks

    def max_hosts(self, budget: int) -> int:
        """How many nodes of a tree masks stand behind at most."""
        if self.strategy != "quadratic":
            return 1
        return budget if self.num_hosts is None else min(self.num_hosts, budget)

    def random_tokens(self, context: Context, positions: Tensor) -> Tensor:
        """The random tokens that stand at masks with these positions [B, M], whatever the text is batched with."""
        key = counter.make_key(NOISE, self.seed, context.sequence_ids[:, None], positions)
        return counter.random_bits(key, torch.zeros_like(positions)) % self.head.vocab_size

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        """The first round's masks stand right behind each prompt: nothing committed sees them, and the cache keeps none."""
        steps = torch.arange(tokens.shape[1] + self.num_masks, device=tokens.device)
        if self.noise == "mean":
            real = (steps[: tokens.shape[1]] < lengths[:, None])[..., None]
            self.means = (self.head.embed(tokens) * real).sum(1, keepdim=True) / lengths[:, None, None]
        if self.strategy == "apart":
            return context.prefill(tokens, lengths)
        if self.ensembles > 1:  # chains that do not see each other want a forward of their own
            seen = context.prefill(tokens, lengths)
            self.states, self.ready_at = self.run_masks(context, None, self.num_masks), lengths.clone()
            return seen
        places = lengths[:, None] + steps[: self.num_masks]
        padded = F.pad(tokens, (0, self.num_masks))
        if self.noise == "uniform":
            padded = padded.scatter(1, places, self.random_tokens(context, places))
        numbers = torch.full_like(padded, -1).scatter(1, places, places - lengths[:, None])
        rows = places + torch.arange(len(places), device=tokens.device)[:, None] * padded.shape[1]
        with self.insert_masks(context.target, numbers, rows.flatten(), (lengths - 1)[:, None].expand_as(padded)):
            seen = context.target.prefill(padded, lengths, context.cache, ("final",))
        states = seen.at_layer("final")
        self.states = states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
        self.ready_at = lengths.clone()
        return Features(tokens, (), seen.hidden[:, : tokens.shape[1], :0], seen.logits)

    def draft(self, context: Context) -> Draft:
        """Draft from the masks behind the last accepted node, where there were any; then put masks behind the new nodes."""
        if self.strategy == "apart":
            return Draft(self.make_rollout(context, self.run_root_and_masks(context)))
        assert self.states is not None and self.ready_at is not None
        masked = partial(self._add_masks, context)
        if context.cache.bound is not None and self.strategy == "quadratic":
            return Draft(self.make_rollout(context, self.states), add_mask_nodes=masked)  # every row is ready
        ready = self.ready_at == context.cache.lengths
        if not ready.any():
            children = context.builder.children
            q = None if children == "deterministic" else context.fresh.hidden.new_zeros(len(ready), 1, self.head.vocab_size)
            return Draft(add_mask_nodes=lambda root: masked(replace(root, children=children, q=q)))

        def complete(tree: TokenTree) -> TokenTree:
            first = torch.arange(tree.tokens.shape[1], device=ready.device) == 0
            return masked(tree.select_nodes(tree.valid & (ready[:, None] | first)))

        return Draft(self.make_rollout(context, self.states), add_mask_nodes=complete)

    def make_rollout(self, context: Context, states: Tensor) -> MaskRollout:
        """How to draft from the states [B, K, D] of masks, or with apart of the root and masks."""
        return MaskRollout(context.root, states, self.head, self.sampler, self.strategy == "apart")

    def run_root_and_masks(self, context: Context) -> Tensor:
        """States [B, 1 + K, D] of the root, which is the target's own, and of as many masks behind it as the tree's depth has a
        use for; the cache keeps none of it."""
        return self.run_masks(context, context.root, min(self.num_masks, context.builder.depth - 1))

    def run_masks(self, context: Context, root: Tensor | None, depth: int) -> Tensor:
        """States [B, depth, D] of masks behind what is committed, or with a root [B] behind it, whose own comes first."""
        lengths, first = context.cache.lengths, int(root is not None)
        batch, device = len(lengths), lengths.device
        order = torch.arange(depth, device=device).repeat(self.ensembles)
        number = order + self.num_masks * torch.arange(self.ensembles, device=device).repeat_interleave(depth)
        positions = lengths[:, None] + first + order
        tokens = self.random_tokens(context, positions) if self.noise == "uniform" else torch.zeros_like(positions)
        numbers = number.expand(batch, -1)
        rows = torch.arange(batch * (first + len(order)), device=device).view(batch, -1)[:, first:].flatten()
        if root is not None:
            tokens, numbers = torch.cat([root[:, None], tokens], dim=1), F.pad(numbers, (1, 0), value=-1)
            positions = torch.cat([lengths[:, None], positions], dim=1)
        plan = ForwardPlan(layers=("final",), cache=context.cache)
        if self.ensembles > 1:
            visible = parallel_chains_mask(self.ensembles, depth, first, device).expand(batch, -1, -1)
            plan = replace(plan, positions=positions, mask=visible)
        with self.insert_masks(context.target, numbers, rows, torch.zeros_like(numbers)):
            seen = context.target.run(tokens, plan)
        context.cache.roll_back()
        final = seen.at_layer("final")
        return torch.cat([final[:, :first], self._average_chains(final[:, None, first:], depth)[:, 0]], dim=1)

    def _average_chains(self, states: Tensor, depth: int) -> Tensor:
        """The mean [B, H, depth, D] over the chains of every host of states [B, H, E depth, D]."""
        return states.unflatten(2, (self.ensembles, depth)).mean(2) if self.ensembles > 1 and depth else states

    def _add_masks(self, context: Context, tree: TokenTree) -> TokenTree:
        """The tree's nodes, then each host's masks as a chain below it, never emitted."""
        batch, num_nodes = tree.tokens.shape
        device = tree.tokens.device
        if self.strategy != "quadratic":
            self.hosts = (tree.depths * tree.valid).argmax(-1)[:, None]
        elif self.num_hosts is None or self.num_hosts >= num_nodes:
            self.hosts = torch.arange(num_nodes, device=device).expand(batch, -1)
        else:
            self.hosts = end_probabilities(tree).topk(self.num_hosts, dim=-1).indices.sort(dim=-1).values
        words = None
        if self.noise == "uniform":
            depths = tree.depths.gather(1, self.hosts)[..., None] + 1 + torch.arange(self.num_masks, device=device)
            words = self.random_tokens(context, context.cache.lengths[:, None] + depths.flatten(1))
        number = torch.arange(self.masks_per_host, device=device).repeat(self.hosts.shape[1])
        self.mask_index = torch.cat([torch.full_like(tree.tokens, -1), number.expand(batch, -1)], dim=1)
        return append_masks(tree, self.hosts, self.num_masks, self.ensembles, words)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """Logits at the nodes that can be emitted; those of masks are left at zero, for nothing reads them."""
        if self.strategy == "apart":
            return context.verify(tree)
        assert self.mask_index is not None and self.hosts is not None
        positions = context.cache.lengths[:, None] + tree.depths
        num_masks = self.hosts.shape[1] * self.masks_per_host
        places = torch.arange(tree.tokens.numel(), device=tree.tokens.device).view_as(tree.tokens)
        hosts = F.pad(self.hosts.repeat_interleave(self.masks_per_host, dim=1), (tree.tokens.shape[1] - num_masks, 0))
        with self.insert_masks(context.target, self.mask_index, places[:, -num_masks:].flatten(), hosts):
            seen = context.target.run(
                tree.tokens, ForwardPlan(layers=("final",), positions=positions, mask=tree.ancestors, cache=context.cache)
            )
        final = seen.at_layer("final")
        self.states = self._average_chains(
            final[:, -num_masks:].unflatten(1, (self.hosts.shape[1], self.masks_per_host)), self.num_masks
        )
        logits = self.head.logits(final[:, :-num_masks])
        return Features(tree.tokens, seen.layers, seen.hidden, F.pad(logits, (0, 0, 0, num_masks)))

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """Keep the states of the masks behind the last accepted node."""
        if self.strategy == "apart":
            return
        assert self.states is not None and self.hosts is not None
        last = accepted.path.gather(1, (accepted.counts - 1)[:, None])
        found = self.hosts == last
        index = found.long().argmax(-1)[:, None, None, None].expand(-1, 1, *self.states.shape[2:])
        self.states = self.states.gather(1, index)[:, 0]
        self.ready_at = torch.where(found.any(-1), context.cache.lengths, -1)

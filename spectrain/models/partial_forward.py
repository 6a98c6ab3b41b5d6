"""Partial forwards: the nodes of a round in the first layers of the target, for self-speculation
and early pruning.

Shapes: B batch, F new nodes, M nodes run so far, N nodes of a tree, D target width.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.trees.token_tree import TokenTree

from .features import Features, Layer
from .forward_plan import ForwardPlan, LayerSpan, SkippedLayer, layer_index
from .kv_cache import TreeCache
from .target import Target


@dataclass(frozen=True)
class NodeLevel:
    """Nodes that were run together."""

    features: Features  # at the exit layer, and "final": after the final norm
    positions: Tensor  # [B, F]
    visible: Tensor  # [B, F, M + F] which nodes of the round each one sees


class PartialForward:
    """Uncommitted nodes that only a part of the target has run, in the order of their arrival.

    That part is the layers before `last` without those `skipped`. Its results below `exit_layer`,
    the first layer left out, equal the target's own: keys and values stay in the cache, the
    residual stream entering `exit_layer` stays here, and `run_tree` continues a tree from there. So
    no layer below `exit_layer` runs a node twice.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache,
        last: int,
        skipped: Collection[SkippedLayer] = (),
        layers: tuple[Layer, ...] = (),
    ) -> None:
        self.target, self.cache = target, cache
        self.last, self.skipped, self.layers = last, skipped, layers
        self.exit_layer = min((last, *map(layer_index, skipped)))
        batch = len(cache.lengths)
        device = cache.lengths.device
        below = {k for k in layers if isinstance(k, int) and k < self.exit_layer}
        self.captured_layers: tuple[int, ...] = (*sorted(below), self.exit_layer)
        self.tokens = torch.zeros(batch, 0, dtype=torch.int64, device=device)  # [B, M]
        self.parents = torch.zeros_like(self.tokens)  # indices of nodes, -1 at the root
        self.depths = torch.zeros_like(self.tokens)
        self.visible = torch.zeros(batch, 0, 0, dtype=torch.bool, device=device)
        # [B, M, len(captured_layers), D] what enters these layers
        self.hidden: Tensor | None = None

    def run_root(self, root: Tensor) -> NodeLevel:
        """Run the root [B]."""
        tokens = root[:, None]
        return self._run_level(
            tokens,
            torch.full_like(tokens, -1),
            torch.zeros_like(tokens),
            self.visible.new_zeros(len(root), 1, 0),
        )

    def run_children(self, tokens: Tensor, parents: Tensor) -> NodeLevel:
        """Run new nodes [B, F] below earlier ones; `parents` [B, F] count nodes in the order of
        their arrival.
        """
        above = self.visible.gather(1, parents[..., None].expand(-1, -1, self.visible.shape[-1]))
        return self._run_level(tokens, parents, self.depths.gather(1, parents) + 1, above)

    def run_tree(self, tree: TokenTree) -> Features:
        """Return logits and features at every node of a tree, after running the missing layers.
        Commit afterwards.
        """
        self.align_to_tree(tree)
        assert self.hidden is not None
        later = tuple(layer for layer in self.layers if layer not in self.captured_layers)
        features = self._continue_tree(tree, later, logits=True)
        states = [
            self.hidden[:, :, self.captured_layers.index(k)]
            if k in self.captured_layers
            else features.at_layer(k)
            for k in self.layers
        ]
        return Features(
            tree.tokens,
            self.layers,
            torch.stack(states, dim=2) if states else features.hidden,
            features.logits,
        )

    def _continue_tree(
        self,
        tree: TokenTree,
        layers: tuple[Layer, ...],
        last: int | None = None,
        logits: bool = False,
    ) -> Features:
        """Run the nodes of an aligned tree from `exit_layer` on."""
        assert self.hidden is not None
        positions = self.cache.lengths[:, None] + tree.depths
        span = LayerSpan(first=self.exit_layer, last=last, hidden=self.hidden[:, :, -1])
        plan = ForwardPlan(
            layers, logits, positions=positions, mask=tree.ancestors, cache=self.cache, span=span
        )
        return self.target.run(tree.tokens, plan)

    def align_to_tree(self, tree: TokenTree) -> None:
        """Run the missing nodes of the tree up to `exit_layer`, and drop and reorder nodes so that
        they are those of the tree."""
        nodes = self._match_nodes(tree)
        missing = (nodes < 0) & tree.valid
        before = self.tokens.shape[1]
        # A bounded cache never synchronizes. Its trees hold all drafted nodes, so the host can
        # compute how many are missing.
        count = (
            int(missing.sum(1).max()) if self.cache.bound is None else tree.tokens.shape[1] - before
        )
        if count:
            assert self.cache.uncommitted == before, (
                "after a bounded cache is aligned, a tree can only lose nodes"
            )
            # Rows with fewer missing nodes repeat some.
            order = missing.long().argsort(dim=1, descending=True, stable=True)[:, :count]
            nodes = torch.where(missing, before + missing.long().cumsum(1) - 1, nodes)
            above = tree.ancestors.gather(
                1, order[..., None].expand(-1, -1, tree.tokens.shape[1])
            ).long()
            columns = nodes.clamp(min=0)[:, None].expand(-1, count, -1)
            visible = (
                above.new_zeros(len(above), count, before + count).scatter_add_(2, columns, above)
                > 0
            )
            depths = tree.depths.gather(1, order)
            self._append_nodes(tree.tokens.gather(1, order), depths, visible, self.exit_layer, ())
        nodes = nodes.clamp(min=0)
        self.cache.reorder_nodes(nodes, self.target.architecture.cache_slice_below(self.exit_layer))
        self.cache.roll_back()
        assert self.hidden is not None
        self.hidden = self.hidden.gather(
            1, nodes[:, :, None, None].expand(-1, -1, *self.hidden.shape[2:])
        )
        # Padding has no path.
        self.tokens = tree.tokens.masked_fill(~tree.valid, -1)
        self.parents = tree.parents
        self.depths = tree.depths
        self.visible = tree.ancestors

    def run_to_layer(self, tree: TokenTree, layer: int) -> None:
        """Run all nodes of a tree up to `layer`, if `exit_layer` is before it. No node can be
        drafted afterwards.
        """
        self.align_to_tree(tree)
        if layer <= self.exit_layer:
            return
        assert self.hidden is not None
        between = sorted(
            k for k in self.layers if isinstance(k, int) and self.exit_layer < k < layer
        )
        features = self._continue_tree(tree, (*between, layer), last=layer)
        self.cache.roll_back()
        self.hidden = torch.cat([self.hidden, features.hidden], dim=2)
        self.captured_layers = (*self.captured_layers, *between, layer)
        self.exit_layer = layer
        self.last = layer

    def _run_level(
        self, tokens: Tensor, parents: Tensor, depths: Tensor, above: Tensor
    ) -> NodeLevel:
        batch, num_new = tokens.shape
        itself = torch.eye(num_new, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        visible = torch.cat([above, itself], dim=2)
        features = self._append_nodes(tokens, depths, visible, self.last, self.skipped)
        self.visible = torch.cat([F.pad(self.visible, (0, num_new)), visible], dim=1)
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.depths = torch.cat([self.depths, depths], dim=1)
        return NodeLevel(features, self.cache.lengths[:, None] + depths, visible)

    def _append_nodes(
        self,
        tokens: Tensor,
        depths: Tensor,
        visible: Tensor,
        last: int,
        skipped: Collection[SkippedLayer],
    ) -> Features:
        positions = self.cache.lengths[:, None] + depths
        layers: tuple[Layer, ...] = (*self.captured_layers, "final")
        span = LayerSpan(last=last, skipped=skipped)
        plan = ForwardPlan(layers, positions=positions, mask=visible, cache=self.cache, span=span)
        features = self.target.run(tokens, plan)
        captured = features.hidden[:, :, :-1]
        self.hidden = captured if self.hidden is None else torch.cat([self.hidden, captured], dim=1)
        return features

    def _match_nodes(self, tree: TokenTree) -> Tensor:
        """Return [B, N], the node already run that has the path of each tree node, or -1.

        Equal siblings, sampled with replacement, share one node: their states are the same.
        """
        if not self.tokens.shape[1]:
            return torch.full_like(tree.tokens, -1)
        alike = self.tokens[:, None] == tree.tokens[..., None]  # [B, N, M]
        below = (tree.parents[..., None] >= 0) & (self.parents[:, None] >= 0)
        upwards = (
            tree.parents.clamp(min=0)[..., None].expand_as(alike),
            self.parents.clamp(min=0)[:, None].expand_as(alike),
        )
        root = torch.zeros_like(alike)
        root[:, 0, 0] = True
        same = root
        for _ in range(tree.max_path_nodes - 1):  # equal tokens with equal parents
            same = root | (alike & below & same.gather(1, upwards[0]).gather(2, upwards[1]))
        return torch.where(same.any(-1), same.long().argmax(-1), -1)

"""Nodes of a chain that climb through parts of the target, each as far as needed. Shapes: B
batch, N nodes, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target


class ExitLadder:
    """A chain after the committed tokens, whose nodes have run the layers before different exits.

    Part j of the target is the layers between two exits. A part runs all nodes that wait for it in
    one forward, so that keys of every layer are those of the target itself, in whatever order nodes
    arrive (synchronized parallel decoding, FREE, section 3.2).
    """

    def __init__(self, target: Target, cache: TreeCache, exits: Sequence[int]) -> None:
        bounds = [0, *exits, target.num_layers]
        self.target, self.cache = target, cache
        self.spans = list(zip(bounds, bounds[1:]))
        # [B, N]
        self.tokens = torch.zeros(
            len(cache.lengths), 0, dtype=torch.int64, device=cache.lengths.device
        )
        # [B, N, D] what enters each part
        self.inputs: list[Tensor | None] = [None] * len(self.spans)
        self.counts = [0] * len(self.spans)  # nodes that each part has run
        # [B, n, D] after the final norm, by exit
        self.exit_states: list[list[Tensor]] = [[] for _ in exits]
        self.num_node_layers = 0  # nodes run through a layer, summed over layers

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    def add_node(self, tokens: Tensor) -> None:
        """Append one node [B, 1] below the last one; no layer has run it yet."""
        self.tokens = torch.cat([self.tokens, tokens], dim=1)

    def run_part(self, part: int) -> Features:
        """Run all nodes that wait for a part, [B, n]; return their states after the final norm,
        as an early exit reads them.
        """
        first, last = self.spans[part]
        start = self.counts[part]
        is_last = last == self.target.num_layers
        new = self.num_nodes - start
        device = self.tokens.device
        waiting = self.inputs[part]
        span = LayerSpan(
            first, None if is_last else last, None if waiting is None else waiting[:, start:]
        )
        steps = torch.arange(start, self.num_nodes, device=device)
        mask = torch.arange(self.num_nodes, device=device) <= steps[:, None]
        # Layers of this part have appended fewer nodes than earlier ones.
        self.cache.uncommitted = start
        before = torch.arange(start, device=device)
        self.cache.positions = self.cache.lengths[:, None] + before if start else None
        features = self.target.run(
            self.tokens[:, start:],
            ForwardPlan(
                ("final",) if is_last else (last, "final"),
                positions=self.cache.lengths[:, None] + steps,
                mask=mask.expand(len(self.tokens), -1, -1),
                cache=self.cache,
                span=span,
            ),
        )
        self.cache.uncommitted = self.num_nodes
        self.counts[part] = self.num_nodes
        self.num_node_layers += new * (last - first)
        if not is_last:
            entered = self.inputs[part + 1]
            reached = features.at_layer(last)
            self.inputs[part + 1] = (
                reached if entered is None else torch.cat([entered, reached], dim=1)
            )
            self.exit_states[part].append(features.at_layer("final"))
        return features

    def finish_chain(self) -> Tensor:
        """Run all nodes through all parts that they have not run; return the target's final
        states [B, N, D].
        """
        for part, count in enumerate(self.counts[:-1]):
            if count < self.num_nodes:
                self.run_part(part)
        return self.run_part(len(self.spans) - 1).at_layer("final")

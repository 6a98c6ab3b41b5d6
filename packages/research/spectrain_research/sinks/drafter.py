"""EAGLE-3 with a window, whose first positions stay visible: attention sinks (Xiao et al., 2024).

Shapes: B batch, T positions of a text, H query heads, K key-value heads, D head size, N new nodes,
M appended nodes, S sinks, W window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.config.values import Count, LayerCount, Share, Steps, VocabularySize
from spectrain.drafters.base import TrainingState
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.llama_layer import Attention, causal_visibility
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.fused_attention import fused_attention
from spectrain.models.attention import attend_per_document
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.host_copies import select_rows
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target


class Sinks(Eagle3):
    """EAGLE-3 whose tokens attend to the last `window` positions and to the first `sinks` positions
    of the text.

    Softmax has to put its weight somewhere. Much of it lies on the first tokens, whose values add
    little (StreamingLLM). A window that cuts them off changes what attention returns as soon as the
    text is longer than it. Training and decoding hide the same positions. A draft step reads S + W
    keys of the cache, whatever the length of the text is.
    """

    saved = SavedFiles(
        shape=("vocab_size", "layers", "num_layers", "window", "sinks", "architecture"),
        adjustable=(*Eagle3.saved.adjustable, "sinks"),
    )

    def __init__(
        self,
        target: Target,
        # Number of preceding positions that a token attends to, itself included.
        window: Count = 512,
        # Number of positions at the beginning of a text that every token attends to.
        sinks: Count = 4,
        # Number of draft steps that are unrolled in training (training-time test).
        ttt_steps: Steps = 7,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Layers of the target whose hidden states are fused; null uses the family's default layers.
        layers: list[int] | None = None,
        # Number of decoder layers of the drafter.
        num_layers: LayerCount = 1,
        # Divergence between the target's and the drafter's token distributions.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive draft steps.
        step_decay: Share = 0.8,
        # Initial values, as those of eagle3.
        start: Literal["target", "random", "fitted"] = "target",
        # Configuration keys and variants of the layers that differ from the target's; null copies
        # the target's.
        architecture: dict[str, Any] | None = None,
    ) -> None:
        if (architecture or {}).get("latent_attention"):
            raise UserError(
                "drafter.architecture.latent_attention=true: sinks needs the target's ordinary "
                "heads; leave it out"
            )
        super().__init__(
            target,
            ttt_steps,
            vocab_size,
            layers,
            num_layers,
            window,
            loss,
            step_decay,
            start,
            architecture=architecture,
        )
        self.sinks = sinks
        # Other processes and graphs read windows without sinks.
        self.capabilities = replace(self.capabilities, context_parallel=None, capture=None)

    # Training

    def supervised_states(
        self, supervision: Supervision, batch: Batch, count: int, state: TrainingState
    ) -> list[Tensor]:
        """Return the states [R, D] at the supervised positions of each of `count` draft steps.
        Every step runs at all positions, with windows of the loss too.
        """
        return [
            select_rows(hidden, supervision.is_supervised(step))
            for step, hidden in enumerate(self.unroll_steps(batch, count, state))
        ]

    def attend_steps(
        self,
        q: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        lengths: tuple[int, ...] | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute the attention of a draft step in training: of the first step's keys, those of the
        sinks and of the window; of each later step, the key of the token's own index.
        """
        steps = len(keys)

        def attend(q: Tensor, *parts: Tensor) -> Tensor:
            mask = self._training_mask(q.shape[2], steps, q.device)
            all_keys, all_values = torch.cat(parts[:steps], 2), torch.cat(parts[steps:], 2)
            return fused_attention(q, all_keys, all_values, mask)

        return attend_per_document(attend, lengths, q, *keys, *values)

    def _training_mask(self, length: int, steps: int, device: torch.device) -> Tensor:
        """Return [T, steps * T] bool: which keys of the draft steps each token of the last one
        sees. Each step is one position later.
        """
        assert self.window is not None
        index = torch.arange(length, device=device)
        distance = index[:, None] + steps - 1 - index
        is_earlier = index <= index[:, None]
        first = is_earlier & ((distance < self.window) | (index < self.sinks))
        eye = torch.eye(length, dtype=torch.bool, device=device)
        later = []
        for step in range(1, steps):
            position = index + step
            is_visible = (steps - 1 - step < self.window) | (position < self.sinks)
            later.append(eye & is_visible)
        return torch.cat([first, *later], dim=1)

    # Decoding

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
    ) -> Tensor:
        """Run new nodes, append them to the cache, and return their output states [B, F, D]."""
        rope = self.rotary(self.fc.weight.detach(), positions)
        cache.set_positions(positions)

        def attend(number: int, attention: Attention, x: Tensor) -> Tensor:
            q, k, v = attention.project_qkv(x, rope)
            sees = causal_visibility(q) if visible is None else visible
            return attention.project_output(self._attend_cached(q, k, v, sees, cache, number))

        output = self.run_layers(tokens, hidden, attend)
        cache.add_uncommitted(tokens.shape[1])
        return output

    def _attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, cache: TreeCache, layer: int
    ) -> Tensor:
        """Append keys and values [B, K, N, D] of new nodes, and attend to the sinks, to the window
        of the text, and to the nodes in `visible` [B, N, M]: [B, H, N, D].
        """
        assert self.window is not None and cache.positions is not None
        keys, values = cache.append(layer, k, v)
        slots = self._list_slots(cache, visible.shape[2])  # [B, J]
        node_positions = cache.positions  # [B, M]
        num_old = slots.shape[1] - visible.shape[2]
        lengths = cache.lengths[:, None]
        # A slot of the text holds the token at that position. Where sinks and window overlap, or
        # begin before the text, a slot counts once.
        old = slots[:, :num_old]
        num_sinks = min(self.sinks, cache.longest)
        order = torch.arange(num_old, device=q.device)
        is_text = (old >= 0) & (old < lengths) & ((order < num_sinks) | (old >= self.sinks))
        positions = torch.cat([old, node_positions], dim=1)
        distance = node_positions[:, -q.shape[2] :, None] - positions[:, None]
        is_near = (distance < self.window) | (positions < self.sinks)[:, None]
        is_seen = torch.cat([is_text[:, None].expand(-1, q.shape[2], -1), visible], dim=2)
        mask = (is_seen & is_near)[:, None]
        index = slots.clamp(min=0)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        picked = keys.gather(2, index), values.gather(2, index)
        return fused_attention(q.to(keys.dtype), *picked, mask).to(q.dtype)

    def _list_slots(self, cache: TreeCache, num_nodes: int) -> Tensor:
        """Return the slots [B, J] that any new node may see: the first ones, those of the last
        `window` tokens of the text, and those of the appended nodes. Slots before the text are
        negative.
        """
        assert self.window is not None
        device = cache.lengths.device
        batch = len(cache.lengths)
        num_sinks = min(self.sinks, cache.longest)
        first = torch.arange(num_sinks, device=device).expand(batch, -1)
        width = min(self.window, cache.longest)
        recent = cache.lengths[:, None] - width + torch.arange(width, device=device)
        nodes = cache.lengths[:, None] + torch.arange(num_nodes, device=device)
        return torch.cat([first, recent, nodes], dim=1)

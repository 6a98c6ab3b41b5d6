"""EAGLE's layer by compiled kernels for drafting on a CPU: what `fused_eagle` computes in 8
bits, for one text.

A level of a tree is one call, from its tokens to the log-probabilities after them. Shapes: F nodes,
P tokens, D width, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectrain.models.fast import packed_weights
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.rollout import Rollout

from .available import HEAD_STEP
from .eagle import EagleDraft, EagleKernels, EagleShape
from .int8 import ByteWeights

ANGLES_STEP = 128
"""Positions whose angles are computed together."""


def find_embedding(drafter: Any) -> Any:
    """Return the module that embeds the tokens that a drafter reads."""
    return drafter.head.embedding if drafter.embed_tokens is None else drafter.embed_tokens


def _name_linears(drafter: Any) -> dict[str, nn.Linear]:
    """Return the linears of a layer, by what the kernels call them; those that read the same
    input count as one.
    """
    attention = drafter.self_attn
    mlp = drafter.mlp
    linears = attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj, drafter.lm_head
    return dict(zip(("qkv", "output", "gate_up", "down", "head"), linears))


class CompiledEagle:
    """The kernels of a drafter of one layer, and what they were made of."""

    def __init__(self, drafter: Any) -> None:
        attention = drafter.self_attn
        self.rotary = drafter.rotary
        embedding = find_embedding(drafter)
        norms = {
            "input": drafter.input_layernorm,
            "hidden": drafter.hidden_norm,
            "later": drafter.post_attention_layernorm,
            "final": drafter.norm,
        }
        linears = _name_linears(drafter)
        packed = {name: packed_weights(linear) for name, linear in linears.items()}
        size = attention.head_dim
        shape = EagleShape(
            attention.q_proj.out_features // size,
            attention.k_proj.out_features // size,
            size,
            drafter.norm.eps,
        )
        self.kernels = EagleKernels(
            embedding.weight,
            {name: norm.weight for name, norm in norms.items()},
            {name: ByteWeights(weights.packed_int8) for name, weights in packed.items()},
            shape,
        )
        # What must stay as it is: weights, and their packed copies.
        others = attention.k_proj, attention.v_proj, drafter.mlp.up_proj, embedding
        modules = [*norms.values(), *linears.values(), *others]
        self.parameters = [(module._parameters, module.weight) for module in modules]
        self.versions = [weight._version for _, weight in self.parameters]
        self.packed = [(weights, weights.packed) for weights in packed.values()]
        self.forwards = [(vars(linear), vars(linear)["forward"]) for linear in linears.values()]

    @staticmethod
    def supports(drafter: Any) -> bool:
        """Return whether the kernels compute what a drafter with fused calls computes."""
        embedding = find_embedding(drafter)
        dtype = drafter.fc.weight.dtype
        linears = _name_linears(drafter).values()
        if (
            type(embedding) is not nn.Embedding
            or embedding.weight.dtype != dtype
            or drafter.has_dynamic_rope
        ):
            return False
        if not all(
            packed_weights(linear).packed_int8 is not None and linear.bias is None
            for linear in linears
        ):
            return False
        return drafter.self_attn.head_dim % HEAD_STEP == 0 and all(
            ByteWeights.supports(linear) for linear in linears
        )

    def is_current(self) -> bool:
        """Return whether the drafter still has the weights that the kernels have."""
        return (
            all(table["weight"] is weight for table, weight in self.parameters)
            and [weight._version for _, weight in self.parameters] == self.versions
            and all(weights.packed is packed for weights, packed in self.packed)
            and all(attributes.get("forward") is forward for attributes, forward in self.forwards)
        )

    def warm_up(self) -> None:
        """Run every kernel once."""
        cache = TreeCache(1, 1, 4, "cpu")
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        root = self.read_tokens(tokens, torch.zeros(1, 1, self.kernels.width), cache)
        cache.commit(None, torch.ones(1, dtype=torch.int64))
        rollout = self.start_rollout(cache, root, 1, tokens)
        rollout.start()
        rollout.extend(tokens, tokens)

    def can_run(self, cache: TreeCache) -> bool:
        """Return whether kernels may run nodes over this cache: of one text, whose keys are
        float32.
        """
        return (
            len(cache.lengths) == 1 and not cache.is_bounded and cache.lends_storage(torch.float32)
        )

    def read_tokens(self, tokens: Tensor, hidden: Tensor, cache: TreeCache) -> Tensor:
        """Compute `EagleDrafter.run` for the next tokens [1, P] of the text: [1, P, D]."""
        count = tokens.shape[1]
        slots = self._lend_slots(cache, count)
        states = self.kernels.read_tokens(tokens, hidden, slots, cache.longest + cache.uncommitted)
        cache.add_uncommitted(count)
        return states

    def start_rollout(
        self, cache: TreeCache, root: Tensor, capacity: int, draft_ids: Tensor
    ) -> CompiledRollout:
        """Return a rollout from the root's state [1, 1, D], with room for `capacity` nodes below
        it.
        """
        slots = self._lend_slots(cache, capacity)
        return CompiledRollout(
            EagleDraft(self.kernels, root, slots, cache.longest, capacity + 1), cache, draft_ids
        )

    def _lend_slots(self, cache: TreeCache, num_new: int) -> Tensor:
        """Return the slots [2, T, K, d] of the text, with room for new nodes."""
        _, num_key_heads, size, _ = self.kernels.shape
        if self.kernels.num_positions < cache.max_length:
            positions = torch.arange(-(-cache.max_length // ANGLES_STEP) * ANGLES_STEP)
            self.kernels.use_angles(*self.rotary(torch.empty(0), positions[None]))
        return cache.lend_storage(num_new, num_key_heads, size, torch.float32)[0, :, 0]


class CompiledRollout(Rollout):
    """A rollout of one text, one level of nodes after another."""

    def __init__(self, draft: EagleDraft, cache: TreeCache, draft_ids: Tensor) -> None:
        self.nodes = draft
        self.cache = cache
        self.draft_ids = draft_ids

    def start(self) -> Tensor:
        return self.nodes.score_root()

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.cache.add_uncommitted(tokens.shape[1])
        return self.nodes.extend(tokens, parents)

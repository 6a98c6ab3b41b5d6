"""EAGLE's layers unrolled over their own states, one draft step after another (Li et al., 2025, section 3.2).

Shapes: B batch, T tokens, D target width, R supervised rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.context import Context
from spectrain.features.batch import Batch
from spectrain.models.attention import unrolled_attention
from spectrain.models.kv_cache import AttentionOptions, TreeCache
from spectrain.models.step_cost import BatchShape, Run, StepCost
from spectrain.models.target import Target
from spectrain.trees.token_tree import AcceptedPath

from .eagle_layers import EagleDrafter
from .layers import Attention
from .vocabulary import Supervision

LayerKeysValues = list[tuple[Tensor, Tensor]]  # keys and values per layer


class UnrolledEagle(EagleDrafter):
    """A drafter whose draft steps read the states of earlier steps, in training as in decoding."""

    # Loss weight of each draft step relative to the step before it.
    step_decay: float
    # Number of draft steps that are trained.
    num_steps: int

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the layers, which run once for each draft step over all tokens, and of the logits of all steps."""
        runs = [Run(self, batch.tokens, batch.length, self.num_steps, extra=2 * target.width)]
        return StepCost(runs, self.judged_rows(batch, self.num_steps * batch.supervised))

    def unroll_steps(self, batch: Batch, count: int, state: TrainingState) -> Iterator[Tensor]:
        """Yield the states [B, T, D] of `count` draft steps, with the true tokens as input.

        The first step reads the target's features, each later one the states of the step before it.
        """
        assert batch.features is not None
        hidden, step_kv = self.fuse_features(batch.features), list[LayerKeysValues]()
        for step in range(count):
            hidden, new_kv = state.run_checkpointed(self.run_step, batch, hidden, step, step_kv[:])
            step_kv.append(new_kv)
            yield hidden

    def run_step(
        self, batch: Batch, hidden: Tensor, step: int, earlier_kv: list[LayerKeysValues]
    ) -> tuple[Tensor, LayerKeysValues]:
        """Run one draft step over hidden states [B, T, D] after the keys and values of earlier steps; return its own too."""
        # Tokens that roll in from beyond the end of a document are never supervised.
        tokens = batch.tokens.roll(-1 - step, dims=1)
        rope = self.rotary(self.fc.weight.detach(), batch.positions + step)
        new_kv: LayerKeysValues = []

        def attend(number: int, attention: Attention, x: Tensor) -> Tensor:
            q, k, v = attention.project_qkv(x, rope)
            new_kv.append((k, v))
            keys, values = ([kv[number][part] for kv in (*earlier_kv, new_kv)] for part in (0, 1))
            return attention.project_output(
                unrolled_attention(q, keys, values, batch.lengths, AttentionOptions(window=self.window))
            )

        return self.run_layers(tokens, hidden, attend), new_kv

    def judge_steps(self, supervision: Supervision, states: list[Tensor]) -> Losses:
        """Compute the losses of the states of every step's supervised positions together. Step i weighs step_decay^i."""
        head_inputs = [self.head_inputs(state) for state in states]
        return supervision.judge_steps(head_inputs, self.lm_head, self.step_decay, self.num_steps)

    # Decoding

    def read_accepted(self, context: Context) -> tuple[Tensor, TreeCache]:
        """Read the features of the last accepted tokens; return the root's state [B, 1, D] and the drafter's cache."""
        self.cache = context.drafting_cache(self.cache, self.num_layers, context.builder.max_drafted)
        num_new = context.new_features.tokens.shape[1]
        output = self.run(
            context.next_tokens, self.fuse_features(context.new_features), self.cache.next_slots(num_new), self.cache, None
        )
        self.cache.commit(None, context.num_new)
        return context.last_state(output), self.cache

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """Remove the draft's uncommitted entries from the cache."""
        assert self.cache is not None
        self.cache.roll_back()

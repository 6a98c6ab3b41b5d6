"""EAGLE's layers rolled over their own states, one draft step after another (Li et al., 2025, section 3.2).

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
from spectrain.trees.token_tree import AcceptedPath

from .eagle_layers import EagleDrafter
from .layers import Attention
from .vocabulary import Supervision

LayerKeysValues = list[tuple[Tensor, Tensor]]  # the keys and values of every layer


class UnrolledEagle(EagleDrafter):
    """A drafter whose later steps read what its earlier ones gave, in training as in decoding."""

    step_decay: float  # weight of each draft step's loss against the one before it
    num_steps: int  # that are trained

    # Training

    def unroll_steps(self, batch: Batch, count: int, state: TrainingState) -> Iterator[Tensor]:
        """The states [B, T, D] of so many draft steps, the first from the target's features, each later one from the step
        before it, with the true tokens as input."""
        assert batch.features is not None
        hidden, held = self.fuse_features(batch.features), list[LayerKeysValues]()
        for step in range(count):
            hidden, own = state.checkpointed(self.run_step, batch, hidden, step, held[:])
            held.append(own)
            yield hidden

    def run_step(
        self, batch: Batch, hidden: Tensor, step: int, before: list[LayerKeysValues]
    ) -> tuple[Tensor, LayerKeysValues]:
        """One draft step over hidden states [B, T, D], behind the keys and values of the steps before; its own with it."""
        tokens = batch.tokens.roll(-1 - step, dims=1)  # what a document takes from beyond its end is never supervised
        rope = self.rotary(self.fc.weight.detach(), batch.positions + step)
        held: LayerKeysValues = []

        def attend(number: int, attention: Attention, x: Tensor) -> Tensor:
            q, k, v = attention.project_qkv(x, rope)
            held.append((k, v))
            keys, values = ([own[number][part] for own in (*before, held)] for part in (0, 1))
            return attention.project_output(
                unrolled_attention(q, keys, values, batch.lengths, AttentionOptions(window=self.window))
            )

        return self.run_layers(tokens, hidden, attend), held

    def judge_steps(self, supervision: Supervision, states: list[Tensor]) -> Losses:
        """The states of every step's supervised indices, all steps at once. Step i counts step_decay^i."""
        read = [self.head_inputs(state) for state in states]
        return supervision.judge_steps(read, self.lm_head, self.step_decay, self.num_steps)

    # Decoding

    def read_accepted(self, context: Context) -> tuple[Tensor, TreeCache]:
        """Read the features of what was just accepted: the root's state [B, 1, D], and the cache that holds the others'."""
        self.cache = context.drafting_cache(self.cache, self.num_layers, context.builder.max_drafted)
        num_new = context.fresh.tokens.shape[1]
        output = self.run(
            context.following, self.fuse_features(context.fresh), self.cache.next_slots(num_new), self.cache, None
        )
        self.cache.commit(None, context.counts)
        return context.newest(output), self.cache

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """What drafting has put behind the accepted pairs goes."""
        assert self.cache is not None
        self.cache.roll_back()

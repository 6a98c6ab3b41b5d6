"""EAGLE's layers rolled over their own states, one draft step after another (Li et al., 2025, section 3.2).

Shapes: B batch, T tokens, D target width, R supervised rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from spectrain.features.batch import Batch
from spectrain.models.attention import unrolled_attention
from spectrain.models.kv_cache import Rules, TreeCache
from spectrain.trees.token_tree import Accepted

from ..base import Losses, TrainingState
from ..context import Context
from .eagle_layers import EagleDrafter
from .layers import Attention
from .vocabulary import Supervision

Held = list[tuple[Tensor, Tensor]]  # the keys and values of every layer


class UnrolledEagle(EagleDrafter):
    """A drafter whose later steps read what its earlier ones gave, in training as in decoding."""

    step_decay: float  # weight of each draft step's loss against the one before it
    num_steps: int  # that are trained

    # Training

    def unrolled(self, batch: Batch, count: int, state: TrainingState) -> Iterator[Tensor]:
        """The states [B, T, D] of so many draft steps, the first from the target's features, each later one from the step
        before it, with the true tokens as input."""
        assert batch.features is not None
        hidden, held = self.fuse(batch.features), list[Held]()
        for step in range(count):
            hidden, own = state.checkpointed(self.unroll, batch, hidden, step, held[:])
            held.append(own)
            yield hidden

    def unroll(self, batch: Batch, hidden: Tensor, step: int, before: list[Held]) -> tuple[Tensor, Held]:
        """One draft step over hidden states [B, T, D], behind the keys and values of the steps before; its own with it."""
        tokens = batch.tokens.roll(-1 - step, dims=1)  # what a document takes from beyond its end is never supervised
        rope = self.rotary(self.fc.weight.detach(), batch.positions + step)
        held: Held = []

        def attend(number: int, attention: Attention, x: Tensor) -> Tensor:
            q, k, v = attention.project(x, rope)
            held.append((k, v))
            keys, values = ([own[number][part] for own in (*before, held)] for part in (0, 1))
            return attention.output(unrolled_attention(q, keys, values, batch.lengths, Rules(window=self.window)))

        return self.layered(tokens, hidden, attend), held

    def judge_steps(self, supervision: Supervision, states: list[Tensor]) -> Losses:
        """The states of every step's supervised indices, all steps at once. Step i counts step_decay^i."""
        read = [self.read_by_head(state) for state in states]
        return supervision.judge_steps(read, self.lm_head, self.step_decay, self.num_steps)

    # Decoding

    def read_accepted(self, context: Context) -> tuple[Tensor, TreeCache]:
        """Read the features of what was just accepted: the root's state [B, 1, D], and the cache that holds the others'."""
        self.cache = context.drafting_cache(self.cache, self.num_layers, context.builder.drafted)
        num_new = context.fresh.tokens.shape[1]
        output = self.run(context.following, self.fuse(context.fresh), self.cache.slots(num_new), self.cache, None)
        self.cache.commit(None, context.counts)
        return context.newest(output), self.cache

    def commit(self, context: Context, accepted: Accepted) -> None:
        """What drafting has put behind the accepted pairs goes."""
        assert self.cache is not None
        self.cache.forget()

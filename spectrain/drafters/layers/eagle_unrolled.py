"""EAGLE's layers unrolled over their own states, one draft step after another (Li et al., 2025,
section 3.2).

Shapes: B batch, T tokens, D target width, R supervised rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from spectrain.drafters.base import Losses, TrainingState
from spectrain.features.batch import Batch
from spectrain.features.context_piece import UnrolledRows
from spectrain.models.attention import MASKED_ROWS
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.target import Target

from ..step_cost import BatchShape, Run, StepCost
from .eagle_layers import EagleDrafter
from .layers import Attention
from .state_rollout import StateDrafter
from .unrolled_attention import unrolled_attention
from .vocabulary import Supervision
from .window_rows import WindowRows

LayerKeysValues = list[tuple[Tensor, Tensor]]  # keys and values per layer


class UnrolledEagle(EagleDrafter, StateDrafter):
    """A drafter whose draft steps read the states of earlier steps, in training as in decoding."""

    # Loss weight of each draft step relative to the step before it.
    step_decay: float
    repeated_parts = ("self_attn", "mlp", "later")
    # Number of draft steps that are trained.
    num_steps: int

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the layers, which run once for each draft step, and of the logits of
        all steps.

        A step runs over all tokens. With windows of the loss, it runs over the positions of the
        windows; the first one also computes what these read of the positions before them.
        """
        rows = batch.window_rows(self.num_steps)
        width = target.width
        judged = self.num_steps * batch.supervised
        runs = [Run(self, rows, batch.length, self.num_steps, extra=2 * width)]
        if rows < batch.tokens:
            inputs = nn.ModuleList([self.fc, self.input_layernorm, self.hidden_norm])
            inputs.extend(self.self_attn.input_linears)
            first = self if self.num_layers > 1 else inputs
            mask = rows / batch.texts * batch.length if rows <= batch.texts * MASKED_ROWS else 0
            runs = [
                replace(runs[0], mask=mask),
                Run(first, batch.tokens, batch.length, extra=2 * width),
            ]
        return StepCost(runs, self.judged_rows(batch, judged))

    def supervised_states(
        self, supervision: Supervision, batch: Batch, count: int, state: TrainingState
    ) -> list[Tensor]:
        """Return the states [R, D] at the supervised positions of each of `count` draft steps.

        With windows of the loss, positions before a window run in the first step only.
        """
        # A piece of the columns is run completely in every step.
        rows = WindowRows.select(batch, count) if batch.piece.is_whole else None
        states = list[Tensor]()
        for step, hidden in enumerate(self.unroll_steps(batch, count, state, rows)):
            is_supervised = supervision.is_supervised(step)
            if rows is not None and self._returns_rows(step):
                is_supervised = rows.take(is_supervised)
            states.append(hidden[is_supervised])
        return states

    def _returns_rows(self, step: int) -> bool:
        """Tell whether a step returns states at chosen rows only: each but a first one of several
        layers, whose later layers attend to what the layers before return.
        """
        return step > 0 or self.num_layers == 1

    def unroll_steps(
        self, batch: Batch, count: int, state: TrainingState, rows: WindowRows | None = None
    ) -> Iterator[Tensor]:
        """Yield the states [B, T, D] of `count` draft steps, with the true tokens as input.

        The first step reads the target's features, each later one the states of the step before it.
        Where `rows` are given, later steps, and the first one as far as nothing else reads it,
        return the states [B, W, D] of these positions.
        """
        hidden = self.fuse_features(batch.input_features)
        step_kv = list[LayerKeysValues]()
        for step in range(count):
            if step == 1 and rows is not None and not self._returns_rows(0):
                hidden = rows.take(hidden)
            hidden, new_kv = state.run_checkpointed(
                self.run_step, batch, hidden, step, step_kv[:], rows
            )
            step_kv.append(new_kv)
            yield hidden

    def run_step(
        self,
        batch: Batch,
        hidden: Tensor,
        step: int,
        earlier_kv: list[LayerKeysValues],
        rows: WindowRows | None = None,
    ) -> tuple[Tensor, LayerKeysValues]:
        """Run one draft step over hidden states [B, T, D] after the keys and values of earlier
        steps; return its own too.

        Where `rows` are given, the first step of a single layer returns the states at these
        positions, and later steps take and return them.
        """
        # Tokens that roll in from beyond the end of a document are never supervised.
        tokens = batch.piece.cut_columns(batch.tokens.roll(-1 - step, dims=1))
        positions = batch.positions + step
        if step and rows is not None:
            tokens = rows.take(tokens)
            positions = rows.take(positions)
        # Some scalings of the rotary embedding depend on the last position of the complete text.
        cos, sin = self.rotary(self.fc.weight.detach(), positions)
        rope = batch.piece.cut_columns(cos), batch.piece.cut_columns(sin)
        new_kv: LayerKeysValues = []
        # Nothing reads what the last layer returns before a window.
        is_cut = step == 0 and rows is not None and self._returns_rows(0)

        def attend(number: int, attention: Attention, x: Tensor) -> Tensor:
            def mix_values(own_q: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
                q, k, v = batch.piece.exchange_qkv(own_q, own_k, own_v, step)
                new_kv.append((k, v))
                layers = (*earlier_kv, new_kv)
                keys, values = ([kv[number][part] for kv in layers] for part in (0, 1))
                options = AttentionOptions(window=self.window)
                if rows is not None and (step or is_cut):
                    q = rows.take_heads(q) if is_cut else q
                    return rows.attend(q, keys, values, options)
                return batch.piece.attend_unrolled(
                    unrolled_attention, UnrolledRows(q, keys, values, batch.lengths, options)
                )

            outputs: Tensor = attention(x, rope, mix_values)
            return outputs

        if not is_cut or rows is None:
            return self.run_layers(tokens, hidden, attend), new_kv
        x, residual = self.attention_inputs(tokens, hidden)
        return self.run_later_layers(
            rows.take(residual) + attend(0, self.self_attn, x), attend
        ), new_kv

    def judge_steps(self, supervision: Supervision, states: list[Tensor]) -> Losses:
        """Compute the losses of the states of every step's supervised positions together. Step i
        weighs step_decay^i.
        """
        head_inputs = [self.head_inputs(state) for state in states]
        return supervision.judge_steps(head_inputs, self.lm_head, self.step_decay, self.num_steps)

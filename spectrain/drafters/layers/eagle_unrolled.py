"""EAGLE's layers unrolled over their own states, one draft step after another (Li et al., 2025,
section 3.2).

Shapes: B batch, T tokens, W positions of a row that steps run at, H heads, D target width or head
size, R supervised rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.drafters.base import Losses, TrainingState
from spectrain.features.batch import Batch
from spectrain.features.context_piece import UnrolledRows
from spectrain.models.attention import MASKED_ROWS, attend_rows
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.fast import merge_for_training, needs_gradients, use_merged
from spectrain.models.host_copies import copy_to_device, on_host, select_rows
from spectrain.models.target import Target

from ..step_cost import BatchShape, Run, StepCost
from .eagle_layers import EagleDrafter
from .llama_layer import Attention
from .state_rollout import StateDrafter
from .unrolled_attention import unrolled_attention
from .vocabulary import Supervision, judge_rows

LayerKeysValues = list[tuple[Tensor, Tensor]]  # keys and values per layer


@dataclass(frozen=True)
class WindowRows:
    """Consecutive positions of every text of a batch: those at which draft steps run where only a
    window of each text carries loss (`trainer.loss_tokens`).

    Position t of step i predicts token t + 2 + i and attends to the first step's keys up to itself,
    so positions before a window take part in the first step alone.
    """

    # [B, W] the positions' columns in the batch.
    index: Tensor
    # First position of each text, in the text.
    first: tuple[int, ...]
    # Positions of each text, and lengths of the texts, where texts are packed into one row.
    widths: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    # Whether the first step, too, returns states at these positions only. One of several layers
    # does not: its later layers attend to what the layers before return.
    cut_first: bool = True

    @classmethod
    def select(cls, batch: Batch, num_steps: int, cut_first: bool) -> WindowRows | None:
        """Return the positions that some of `num_steps` steps supervises; None without windows
        or if they are all positions.
        """
        if batch.loss_windows is None:
            return None
        first = [max(0, start - 1 - num_steps) for start, _ in batch.loss_windows]
        widths = [end - begin for begin, (_, end) in zip(first, batch.loss_windows)]
        if batch.lengths is None:
            length = batch.tokens.shape[1]
            width = max(widths)
            if width >= length:
                return None
            first = [min(begin, length - width) for begin in first]
            index = torch.tensor(first, device="cpu")[:, None] + torch.arange(width, device="cpu")
            return cls(
                copy_to_device(index, batch.tokens.device), tuple(first), cut_first=cut_first
            )
        if widths == [*batch.lengths]:
            return None
        starts = accumulate(batch.lengths[:-1], initial=0)
        parts = [
            torch.arange(start + begin, start + begin + width, device="cpu")
            for start, begin, width in zip(starts, first, widths)
        ]
        index = copy_to_device(torch.cat(parts)[None], batch.tokens.device)
        return cls(index, tuple(first), tuple(widths), batch.lengths, cut_first)

    def cuts(self, step: int) -> bool:
        """Tell whether a draft step returns states at these positions only."""
        return step > 0 or self.cut_first

    def take(self, part: Tensor) -> Tensor:
        """Return the positions [B, W, ..] of values [B, T, ..]."""
        index = on_host(self.index) if part.device.type == "cpu" else self.index
        if part.dim() == 2:
            return part.expand(len(index), -1).gather(1, index)
        return torch.stack([row[columns] for row, columns in zip(part, index)])

    def take_heads(self, heads: Tensor) -> Tensor:
        """Return the positions [B, H, W, D] of heads [B, H, T, D]."""
        return self.take(heads.transpose(1, 2)).transpose(1, 2)

    def attend(
        self, q: Tensor, keys: list[Tensor], values: list[Tensor], options: AttentionOptions
    ) -> Tensor:
        """Return [B, H, W, D]: queries at these positions see the keys and values of the first step
        [B, K, T, D] up to themselves, and of later steps [B, K, W, D] those at their own position.
        """
        if self.widths is None or self.lengths is None:
            texts = [[part[row : row + 1] for part in (q, *keys, *values)] for row in range(len(q))]
        else:
            sizes = [self.widths, *([self.lengths, *[self.widths] * (len(keys) - 1)] * 2)]
            texts = [
                [*parts]
                for parts in zip(
                    *(part.split(size, 2) for part, size in zip((q, *keys, *values), sizes))
                )
            ]
        outputs = [
            attend_rows(parts[0], parts[1 : 1 + len(keys)], parts[1 + len(keys) :], first, options)
            for first, parts in zip(self.first, texts)
        ]
        return torch.cat(outputs, dim=0 if self.widths is None else 2)


class UnrolledEagle(EagleDrafter, StateDrafter):
    """A drafter whose draft steps read the states of earlier steps, in training as in decoding."""

    capabilities = replace(EagleDrafter.capabilities, repeated_parts=("self_attn", "mlp", "later"))
    # Loss weight of each draft step relative to the step before it.
    step_decay: float
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
        return StepCost(runs, judge_rows(self, batch, judged))

    def supervised_states(
        self, supervision: Supervision, batch: Batch, count: int, state: TrainingState
    ) -> list[Tensor]:
        """Return the states [R, D] at the supervised positions of each of `count` draft steps.

        With windows of the loss, positions before a window run in the first step only.
        """
        # A piece of the columns is run completely in every step.
        cuts_first = self.num_layers == 1
        rows = WindowRows.select(batch, count, cuts_first) if batch.piece.is_whole else None
        states = list[Tensor]()
        for step, hidden in enumerate(self.unroll_steps(batch, count, state, rows)):
            is_supervised = on_host(supervision.is_supervised(step))
            if rows is not None and rows.cuts(step):
                is_supervised = rows.take(is_supervised)
            states.append(select_rows(hidden, is_supervised))
        return states

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
        merged = merge_for_training(self, not state.recompute) if needs_gradients(hidden) else {}

        def run(*arguments: Any) -> tuple[Tensor, LayerKeysValues]:
            with use_merged(merged):
                return self.run_step(*arguments)

        for step in range(count):
            if step == 1 and rows is not None and not rows.cuts(0):
                hidden = rows.take(hidden)
            hidden, new_kv = state.run_checkpointed(run, batch, hidden, step, step_kv[:], rows)
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
        is_cut = step == 0 and rows is not None and rows.cuts(0)

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
                unrolled = UnrolledRows(q, keys, values, batch.lengths, options)
                return batch.piece.attend_unrolled(self.attend_steps, unrolled)

            outputs: Tensor = attention(x, rope, mix_values)
            return outputs

        if not is_cut or rows is None:
            return self.run_layers(tokens, hidden, attend), new_kv
        x, residual = self.attention_inputs(tokens, hidden)
        return self.run_later_layers(
            rows.take(residual) + attend(0, self.self_attn, x), attend
        ), new_kv

    def attend_steps(
        self,
        q: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        lengths: tuple[int, ...] | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute the attention of a draft step in training, as `unrolled_attention` does."""
        return unrolled_attention(q, keys, values, lengths, options)

    def judge_steps(self, supervision: Supervision, states: list[Tensor]) -> Losses:
        """Compute the losses of the states of every step's supervised positions together. Step i
        weighs step_decay^i.
        """
        head_inputs = [self.head_inputs(state) for state in states]
        return supervision.judge_steps(head_inputs, self.lm_head, self.step_decay, self.num_steps)

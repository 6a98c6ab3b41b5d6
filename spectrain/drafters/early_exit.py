"""Early exit (LayerSkip, Elhoushi et al., 2024): the target's own first layers draft, its other
layers verify.

Shapes: B batch, T tokens, L layers of the target, D its width, V vocabulary, R supervised rows.
Exit l, from 0, follows layer l: it reads the residual stream entering layer l + 1. Exit L - 1 is
the model's own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import Below1, Count, NotNegative, Width
from spectrain.drafters.layers.language_model_loss import original_log_probs
from spectrain.drafters.layers.losses import TargetLogProbs, head_loss
from spectrain.drafters.layers.self_speculation import SelfDrafter, resolve_exit_layer
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import (
    DivergenceResult,
    argmax_and_log_z,
    total_entropy,
)
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.host_copies import copy_to_device, select_rows
from spectrain.models.lora import TargetTraining
from spectrain.models.target import Target
from spectrain.randomness import LAYER_DROPOUT, sequence_generator

from .base import Losses, Stage, TrainingState
from .step_cost import BatchShape, Judged, Run, StepCost

Curriculum = Literal["rotational", "gradual", "all"]


class EarlyExit(SelfDrafter):
    """Drafts with the layers before `exit_layer` and the target's norm and head; training adapts
    the target to that.

    Layer dropout (section 4.1.1): a sequence skips layer l with probability S(t) D(l) max_dropout,
    D(l) = exp(l ln 2 / (L - 1))
    - 1; S is 1, or with dropout_schedule=exponential, for pre-training, exp(t ln 2 / (T - 1)) - 1
      at step t of T.
    Early-exit loss (4.1.2): J = sum_l C(t, l) e(l) CE(head(norm(x_(l+1))), Y) / sum_l C(t, l) e(l)
    with e(l) = exit_scale * (0 + 1 + ... + l) before the last exit and e(L - 1) = L - 1 +
    exit_scale * (0 + 1 + ... + L - 2). The curriculum C is rotational (every `rotate`-th exit, with
    an offset that grows by one per step), gradual (exits open from the last one downwards, and all
    are open after half of the training) or all. The last exit is always in the loss.

    With self_distillation Y is the distribution of the original target instead of the data's token:
    the target without its adapters, or a frozen copy where all weights are trained. The output is
    that of the trained target.
    """

    def __init__(
        self,
        target: Target,
        # Number of the target's layers that draft; null uses a quarter of them.
        exit_layer: int | None = None,
        # Probability with which training skips the last layer; earlier layers are skipped less
        # often.
        max_dropout: Below1 = 0.1,
        # Layer dropout over the training: unchanged (constant), or growing from zero for
        # pre-training (exponential).
        dropout_schedule: Literal["constant", "exponential"] = "constant",
        # Weight of the earlier exits relative to the last exit in the loss.
        exit_scale: NotNegative = 1.0,
        # Exits trained at a step: every rotate-th one in turn (rotational), opening from the last
        # downwards (gradual), or all of them (all).
        curriculum: Curriculum = "rotational",
        # Spacing of the exits that a rotational curriculum trains at one step.
        rotate: Count = 4,
        # How training changes the target: all its weights (full), or LoRA adapters (lora).
        adapt: Literal["full", "lora"] = "full",
        # Rank of the LoRA adapters.
        rank: Width = 32,
        # Scale of the LoRA adapters; their output is multiplied by alpha / rank.
        alpha: float = 32.0,
        # Whether the labels are the original target's distributions instead of the data's tokens.
        self_distillation: bool = False,
        # Seed of layer dropout.
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._set_exit(target, exit_layer)
        self.max_dropout = max_dropout
        self.dropout_schedule = dropout_schedule
        self.exit_scale = exit_scale
        self.curriculum, self.rotate, self.seed = curriculum, rotate, seed
        self.self_distillation = self_distillation
        self.target_training = TargetTraining(adapt, rank, alpha, keeps_original=self_distillation)
        self.capabilities = replace(
            self.capabilities, target_training=self.target_training, at_exit=type(self).at_exit
        )
        self.head = target.head

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Open the target's weights, or add its adapters."""
        self.target_training.start_training(target)

    def at_exit(self, exit_layer: int, target: Target) -> EarlyExit:
        """Return the same drafter, with shared weights, at another exit."""
        other = copy.copy(self)
        other._set_exit(target, exit_layer)
        return other

    def _set_exit(self, target: Target, exit_layer: int | None) -> None:
        self.exit_layer = resolve_exit_layer(target, exit_layer, 1 / 4)
        self.saved = replace(self.saved, settings={"exit_layer": self.exit_layer})

    # Training

    @property
    def stages(self) -> list[Stage]:
        """One stage without features: the loss runs the target with dropped layers."""
        return [Stage([{"params": self.target_training.parameters}], ())]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of all layers of the target over all tokens, and of the logits of
        every open exit.
        """
        exits = {"rotational": -(-target.num_layers // self.rotate)}.get(
            self.curriculum, target.num_layers
        )
        labels = batch.supervised if self.self_distillation else 0
        judged = Judged(exits * batch.supervised, target.head.vocab_size, labels, label_copies=1)
        original = batch.tokens if self.self_distillation else 0
        return StepCost(
            [Run(target.layers, batch.tokens, batch.length)], judged, forward_rows=original
        )

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the weighted cross-entropies of all open exits; hits are agreements of
        `exit_layer` with the last exit.
        """
        weights = self.exit_weights(target.num_layers, state)
        open_exits = [number for number, weight in enumerate(weights) if weight > 0]
        exits_read = sorted({*open_exits, self.exit_layer - 1})
        predicts = batch.next_is_supervised
        grad = torch.is_grad_enabled()
        tokens = select_rows(batch.tokens.roll(-1, dims=1), predicts)
        original = None
        if self.self_distillation:
            original = original_log_probs(batch, target, self.target_training)
        layers = tuple(number + 1 for number in exits_read)
        span = LayerSpan(dropped=self.draw_dropped_layers(batch, target, state))
        plan = ForwardPlan(
            layers=layers, grad=grad, recompute=state.recompute, lengths=batch.lengths, span=span
        )
        states = target.run(batch.tokens, plan)
        final = {
            number: target.apply_final_norm(
                select_rows(states.at_layer(number + 1), predicts)[None],
                grad=grad and number in open_exits,
            )[0]
            for number in exits_read
        }
        terms = {
            "language_model": torch.zeros((), device=tokens.device),
            "exits": torch.zeros((), device=tokens.device),
        }
        best: dict[int, Tensor] = {}
        entropy = 0.0 if original is None else total_entropy(original, len(tokens))
        for term, exits in (("language_model", open_exits[-1:]), ("exits", open_exits[:-1])):
            if not exits:
                continue
            judged = self._judge_exits(
                [final[number] for number in exits],
                [weights[number] for number in exits],
                tokens,
                original,
            )
            terms[term] = judged.loss + sum(weights[number] for number in exits) * entropy
            best |= dict(zip(exits, judged.predictions.view(len(tokens), len(exits)).unbind(1)))
        drafted = self.exit_layer - 1
        if drafted not in best:
            best[drafted] = argmax_and_log_z(final[drafted], self.head.projection)[0]
        hits = (best[drafted] == best[open_exits[-1]]).sum()[None].float()
        return Losses(terms, hits, torch.full_like(hits, len(tokens)))

    def _judge_exits(
        self,
        final: list[Tensor],
        weights: list[float],
        tokens: Tensor,
        original: TargetLogProbs | None,
    ) -> DivergenceResult:
        """Compute the loss of exits with states [R, D] each. The rows of a position are adjacent,
        so that the original target's distribution is computed once for all exits.

        The divergence from the original is KL, which is the cross-entropy minus the entropy, so its
        gradient is the same.
        """
        count = len(final)
        device = tokens.device
        hidden = torch.stack(final, dim=1).flatten(0, 1)  # [R * exits, D]
        row_weight = copy_to_device(torch.tensor(weights, device="cpu"), device)
        row_weight = row_weight.repeat(len(tokens))
        labels_log_probs: Callable[[slice], Tensor] | None = original
        if original is not None and count > 1:
            rows = torch.arange(len(tokens), device="cpu").repeat_interleave(count)
            labels_log_probs = original.select_rows(copy_to_device(rows, device))
        name = "cross_entropy" if original is None else "forward_kl"
        labels = tokens.repeat_interleave(count)
        return head_loss(
            name, hidden, self.head.projection, labels, labels_log_probs, row_weight=row_weight
        )

    def exit_weights(self, num_layers: int, state: TrainingState) -> list[float]:
        """Return the weight of every exit's loss at this step, [L]. They sum to 1; closed exits
        weigh 0.
        """
        last = num_layers - 1
        scale = [self.exit_scale * number * (number + 1) / 2 for number in range(last)]
        scale.append(last + self.exit_scale * (last - 1) * last / 2)
        if self.curriculum == "rotational":
            open_exits = set(range(state.step % self.rotate, num_layers, self.rotate))
        elif self.curriculum == "gradual":
            open_exits = set(range(max(0, last - int(state.progress * 2 * num_layers)), num_layers))
        else:
            open_exits = set(range(num_layers))
        open_exits.add(last)
        total = sum(scale[number] for number in open_exits)
        # A target of one layer has one exit.
        if not total:
            return [float(number == last) for number in range(num_layers)]
        return [
            scale[number] / total if number in open_exits else 0.0 for number in range(num_layers)
        ]

    def dropout_rates(self, num_layers: int, state: TrainingState) -> list[float]:
        """Return the probability [L] that a sequence skips each layer at this step."""
        last = max(1, round(state.step / state.progress) - 1) if state.progress else 1  # T - 1
        over_time = (
            1.0
            if self.dropout_schedule == "constant"
            else math.expm1(state.step / last * math.log(2))
        )
        span = max(1, num_layers - 1)
        return [
            self.max_dropout * over_time * math.expm1(layer * math.log(2) / span)
            for layer in range(num_layers)
        ]

    def draw_dropped_layers(
        self, batch: Batch, target: Target, state: TrainingState
    ) -> Tensor | None:
        """Draw the layers that each sequence skips, [L, sequences] on the CPU; None without
        dropout.

        A sequence's tokens and the step seed the draw, so that it depends neither on the batch nor
        on the process.
        """
        if not self.training or not self.max_dropout:
            return None
        rates = torch.tensor(self.dropout_rates(target.num_layers, state))
        columns = []
        for tokens, _ in batch.split_documents():
            source = sequence_generator(LAYER_DROPOUT, self.seed, tokens, state.step)
            columns.append(torch.rand(len(rates), generator=source) < rates)
        return torch.stack(columns, dim=1)

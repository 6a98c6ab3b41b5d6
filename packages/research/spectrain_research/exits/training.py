"""Joint training of a target's exits (BranchyNet, Teerapittayanon et al., 2016, arXiv 1709.01686;
FREE, Bae et al., 2023, arXiv 2310.05424).

Shapes: L layers of the target, D its width, R supervised rows, E exits and the last layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import NotNegative
from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.step_cost import BatchShape, Judged, StepCost
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.host_copies import select_rows
from spectrain.models.target import Target

Distillation = Literal["none", "last", "uniform", "dynamic"]


class JointExits(EarlyExit):
    """Trains the target for all its exits at once: the weighted sum of their cross-entropies, and a
    distillation of hidden states from deep layers into the layers below the first exit.

    J = sum_e w_e CE(head(norm(x_e)), Y), over the exits and the last layer (BranchyNet, section
    3.1), plus with FREE's layerwise distillation

        hidden_weight mean_k MSE(x_s(k), x_d(k))

    with the first exit after S layers, where the deep states x_d(k) are held fixed. The pairs are
    (S, L) alone (last), or (k, k L / S rounded) for k = 1 to S (uniform). For dynamic the deep
    layers are the uniform ones, and from the last to the first each takes the shallow layer whose
    states are nearest in this batch and that lies below the one taken before, as in the published
    code of FREE. Where none lies below, the first layer is taken again. The exits decode by
    `drafter=exits`; as a drafter this one has the first exit's drafts verified.
    """

    def __init__(
        self,
        target: Target,
        # Numbers of layers before each exit, ascending; null takes one exit after half of the
        # layers.
        exits: list[int] | None = None,
        # Weights of the losses of the exits and, last, of the target's own output; null weighs each
        # by its number of layers, and all sum to 1.
        weights: list[float] | None = None,
        # Deep layers whose hidden states the layers below the first exit learn: none, the last one
        # for the exit alone (last), evenly spaced ones in order (uniform), or the same ones, each
        # by the layer that is nearest to it (dynamic).
        hidden: Distillation = "none",
        # Weight of the distillation of hidden states.
        hidden_weight: NotNegative = 1.0,
        # How training changes the target: all its weights (full), or LoRA adapters (lora).
        adapt: Literal["full", "lora"] = "full",
        # Rank of the LoRA adapters; their output is multiplied by 1, as alpha is the rank.
        rank: int = 32,
    ) -> None:
        exits = [max(1, target.num_layers // 2)] if exits is None else [*exits]
        bounds = [0, *exits, target.num_layers]
        if not exits or bounds != sorted({*bounds}):
            raise UserError(
                f"drafter.exits={exits}: {target.name} has {target.num_layers} layers; use "
                f"ascending numbers from 1 to {target.num_layers - 1}"
            )
        if weights is not None and (len(weights) != len(exits) + 1 or min(weights) < 0):
            raise UserError(
                f"drafter.weights={weights}: give {len(exits) + 1} weights of 0 or more, one for "
                "each exit and one for the target's own output"
            )
        self.exits = exits
        super().__init__(
            target, exits[0], max_dropout=0.0, curriculum="all", adapt=adapt, rank=rank, alpha=rank
        )
        self.weights = weights
        self.hidden = hidden
        self.hidden_weight = hidden_weight

    def _set_exit(self, target: Target, exit_layer: int | None) -> None:
        super()._set_exit(target, exit_layer)
        self.exits = [
            self.exit_layer,
            *(layer for layer in self.exits if layer > self.exit_layer),
        ]
        self.saved = replace(self.saved, settings={"exits": self.exits})

    def weigh_exits(self, num_layers: int) -> list[float]:
        """Return the weights [E] of the exits' losses and, last, of the target's own."""
        if self.weights is not None:
            return self.weights
        depths = [*self.exits, num_layers]
        return [depth / sum(depths) for depth in depths]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of all layers of the target over all tokens, and of the logits of all
        exits.
        """
        rows = (len(self.exits) + 1) * batch.supervised
        return replace(
            super().step_cost(target, batch),
            judged=Judged(rows, target.head.vocab_size, 0, label_copies=1),
        )

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the exits' losses and the distillation; hits are agreements of the first exit
        with the last layer.
        """
        grad = torch.is_grad_enabled()
        depths = [*self.exits, target.num_layers]
        layers = tuple(depths if self.hidden == "none" else range(1, target.num_layers + 1))
        plan = ForwardPlan(
            layers=layers, grad=grad, recompute=state.recompute, lengths=batch.lengths
        )
        features = target.run(batch.tokens, plan)
        predicts = batch.next_is_supervised
        tokens = select_rows(batch.tokens.roll(-1, dims=1), predicts)
        states = {layer: select_rows(features.at_layer(layer), predicts) for layer in layers}
        final = [target.apply_final_norm(states[depth][None], grad=grad)[0] for depth in depths]
        weights = self.weigh_exits(target.num_layers)
        early = self._judge_exits(final[:-1], weights[:-1], tokens, None)
        own = self._judge_exits(final[-1:], weights[-1:], tokens, None)
        terms = {"language_model": own.loss, "exits": early.loss}
        if self.hidden != "none":
            terms["hidden"] = self.hidden_weight * distil_states(states, self.exits[0], self.hidden)
        first = early.predictions.view(len(tokens), len(self.exits))[:, 0]
        hits = (first == own.predictions).sum()[None].float()
        return Losses(terms, hits, torch.full_like(hits, len(tokens)))


def distil_states(states: dict[int, Tensor], exit_layer: int, hidden: Distillation) -> Tensor:
    """Return FREE's distillation, summed over the rows of the states [R, D] after each layer, whose
    numbers begin at 1.
    """
    last = max(states)
    deep_layers = [round(k * last / exit_layer) for k in range(1, exit_layer + 1)]
    if hidden == "last":
        pairs = [(exit_layer, last)]
    elif hidden == "uniform":
        pairs = [*zip(range(1, exit_layer + 1), deep_layers)]
    else:
        pairs = align_layers(states, exit_layer, deep_layers)
    total = sum(sum_squares(states[layer], states[deep]) for layer, deep in pairs)
    assert isinstance(total, Tensor)
    return total / len(pairs)


@torch.no_grad()
def align_layers(
    states: dict[int, Tensor], exit_layer: int, deep_layers: list[int]
) -> list[tuple[int, int]]:
    """Return pairs of a layer up to the exit and a deep layer, from the last deep layer to the
    first.

    Each deep layer takes the nearest layer below the one that was taken before; where there is
    none, the first layer.
    """
    pairs = list[tuple[int, int]]()
    highest = exit_layer
    for deep in reversed(deep_layers):
        layer = min(
            range(1, max(1, highest) + 1),
            key=lambda layer: float(sum_squares(states[layer], states[deep])),
        )
        pairs.append((layer, deep))
        highest = layer - 1
    return pairs


def sum_squares(state: Tensor, label: Tensor) -> Tensor:
    """Return the squared difference of states [R, D] from fixed labels [R, D], averaged over D and
    summed over R, so that no row at all gives 0.
    """
    return (state.float() - label.detach().float()).pow(2).mean(-1).sum()

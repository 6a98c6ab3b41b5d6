"""Skipped layers that follow the text: by prompt (Draft on the Fly, Metel et al., 2024) or by
token.

Shapes: B batch, P new positions, L layers of the target, D its width, R answer tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.config.values import Count
from spectrain.drafters.capabilities import SettingsSearch
from spectrain.drafters.context import Context
from spectrain.drafters.layers.self_speculation import SelfDrafter
from spectrain.errors import UserError
from spectrain.models.features import Layer
from spectrain.models.forward_plan import SkippedLayer
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft

from .sets import SetScorer, Text, rank_layers

RIDGE = 1.0  # penalty of the probe's weights, per answer token of the calibration


class AdaptiveSkipping(SelfDrafter):
    """Drafts without `num_skipped` layers, which a prompt or every newest token chooses.

    With by=prompt there is no search: the layers whose input and output have the largest cosine
    over the prompt are skipped, as the prefill yields them. With by=token a linear probe reads the
    target's last state at the newest verified token and predicts for every layer whether the target
    would predict the same token without it; this round skips the layers that it needs least. The
    probe is fitted by ridge regression on the calibration prompts, with one forward per layer. All
    texts of a batch share their set.
    """

    def __init__(
        self,
        target: Target,
        # What chooses the layers: the cosines of the prompt (prompt), or a linear probe at the
        # newest token (token).
        by: Literal["prompt", "token"] = "prompt",
        # Number of layers that are skipped; null skips half of them.
        num_skipped: Count | None = None,
        # Tokens of each calibration prompt's answer on which the probe is fitted.
        answer_tokens: int = 32,
    ) -> None:
        super().__init__()
        count = target.num_layers // 2 if num_skipped is None else num_skipped
        if not 1 <= count < target.num_layers:
            raise UserError(
                f"drafter.num_skipped={count}: {target.name} has {target.num_layers} layers; use "
                f"1 to {target.num_layers - 1}"
            )
        if answer_tokens < 2:
            raise UserError(f"drafter.answer_tokens={answer_tokens}: use 2 or more")
        self.by = by
        self.num_skipped = count
        self.exit_layer = target.num_layers
        self.head = target.head
        self.layers: tuple[Layer, ...] = (
            tuple(range(target.num_layers + 1)) if by == "prompt" else ("final",)
        )
        # The host chooses sets.
        search = SettingsSearch(answer_tokens, type(self).search) if by == "token" else None
        self.capabilities = replace(self.capabilities, capture=None, search=search)
        self.skipped: frozenset[SkippedLayer] = frozenset(range(count))
        self.probe: Tensor | None = None  # [D + 1, L]

    def search(self, target: Target, texts: list[Text], depth: int) -> None:
        """Fit the probe: for every layer, whether the target predicts the same token without it."""
        self.capabilities = replace(self.capabilities, search=None)
        scorer = SetScorer(target, texts, depth)
        agrees = [
            (scorer.predict_answers({layer}) == scorer.labels).float()
            for layer in range(target.num_layers)
        ]
        inputs = append_ones(scorer.final)
        labels = torch.stack(agrees, dim=1)
        penalty = RIDGE * torch.eye(inputs.shape[1], device=inputs.device)
        penalty[-1, -1] = 1e-6
        self.probe = torch.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ labels)

    def draft(self, context: Context) -> Draft:
        if self.by == "prompt" and context.begins:
            is_read = (
                torch.arange(context.new_features.tokens.shape[1], device=context.num_new.device)
                < context.num_new[:, None]
            )
            states = torch.stack(
                [context.new_features.at_layer(layer) for layer in self.layers], dim=2
            )
            self.skipped = frozenset(rank_layers(states[is_read])[: self.num_skipped])
        elif self.by == "token" and self.probe is not None:
            final = context.last_state(context.new_features.at_layer("final"))[:, 0]
            predicted = (append_ones(final) @ self.probe)[context.active].mean(0)
            self.skipped = (
                frozenset(predicted.topk(self.num_skipped).indices.tolist())
                if context.active.any()
                else self.skipped
            )
        return super().draft(context)


def append_ones(states: Tensor) -> Tensor:
    """Return normed states [R, D] with a constant, [R, D + 1]."""
    return F.pad(F.rms_norm(states.float(), states.shape[-1:]), (0, 1), value=1.0)

"""The prediction of a state in the middle of the target, and its fit by least squares.

Shapes: W width of the target, S sources, R rows, I = (1 + S) W inputs, U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.drafters.capabilities import FitOperations
from spectrain.drafters.layers.fitted_start import RidgeRegression

PENALTY = 1e-4
"""Ridge penalty of the linear part, relative to inputs of unit variance."""
UNITS_PENALTY = 0.03
"""The same of the gated units."""


class StatePredictor(nn.Module):
    """Predicts the state that enters a middle layer at the next token: a linear map of the next
    token's embedding and of states at the token before it, each normed, plus gated units of the
    same inputs, which add nothing at first.
    """

    def __init__(self, width: int, num_sources: int, num_units: int, eps: float) -> None:
        super().__init__()
        inputs = (1 + num_sources) * width
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=eps) for _ in range(1 + num_sources))
        self.fc = nn.Linear(inputs, width)
        self.gate_proj = nn.Linear(inputs, num_units, bias=False)
        self.up_proj = nn.Linear(inputs, num_units, bias=False)
        self.down_proj = nn.Linear(num_units, width, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def read_inputs(self, embedded: Tensor, sources: Tensor) -> Tensor:
        """Return normed inputs [.., I] from embeddings [.., W] and states [.., S W]."""
        parts = [embedded, *sources.chunk(len(self.norms) - 1, dim=-1)]
        dtype = self.fc.weight.dtype
        parts = [norm(part.to(dtype)) for norm, part in zip(self.norms, parts)]
        return torch.cat(parts, dim=-1)

    def compute_units(self, x: Tensor) -> Tensor:
        """Return the gated units [.., U] of inputs [.., I]."""
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, embedded: Tensor, sources: Tensor) -> Tensor:
        """Return predicted states [.., W]."""
        x = self.read_inputs(embedded, sources)
        return self.fc(x) + self.down_proj(self.compute_units(x))


@torch.no_grad()
def fit_predictor(
    predictor: StatePredictor, pairs: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> bool:
    """Fit the linear map to states [R, W], then the units to what it leaves of them, from pairs of
    embeddings [R, W] and sources [R, S W] with these states. Return whether there is any row;
    without one the weights stay.
    """
    for linear in (predictor.gate_proj, predictor.up_proj):
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    rows = [
        (predictor.read_inputs(embedded, sources), states.float())
        for embedded, sources, states in pairs
        if len(states)
    ]
    if not rows:
        return False
    linear_fit = RidgeRegression()
    for x, y in rows:
        linear_fit.add_rows(F.pad(x, (0, 1), value=1.0), y)
    weight = linear_fit.solve(PENALTY)
    predictor.fc.weight.copy_(weight[:, :-1])
    predictor.fc.bias.copy_(weight[:, -1])
    units_fit = RidgeRegression()
    for x, y in rows:
        units_fit.add_rows(predictor.compute_units(x), y - predictor.fc(x))
    predictor.down_proj.weight.copy_(units_fit.solve(UNITS_PENALTY))
    return True


def count_fit(drafter: Any, num_tokens: float) -> FitOperations:
    """Return the operations of `fit_predictor` for a drafter with a `predictor`."""
    predictor: StatePredictor = drafter.predictor
    width = predictor.fc.out_features
    shapes = [(predictor.fc.in_features + 1, width), (predictor.down_proj.in_features, width)]
    row = 2.0 * sum(p.numel() for p in predictor.parameters())
    row += sum(2 * inputs * (inputs + outputs) for inputs, outputs in shapes)
    exact = sum(inputs**3 / 3 + 2 * inputs**2 * outputs for inputs, outputs in shapes)
    return FitOperations(row, 0.0, exact)

"""Floors: no forward is promised to be faster than reading its weights."""

import torch
from torch import nn

from spectrain.drafters.ngram import Ngram
from spectrain.models.device import arithmetic, bandwidth, forward_floor, read_weights
from spectrain.models.target import Target

CPU = torch.device("cpu")


def test_shared_weights_are_read_once() -> None:
    """A tied embedding is the output layer and read once; one of its own is looked up and not read."""
    model = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
    assert [weight is model[1].weight for weight in read_weights(model)] == [True]
    model[1].weight = model[0].weight
    assert [weight.numel() for weight in read_weights(model)] == [15]


def test_floor_is_memory_or_arithmetic(tiny: Target) -> None:
    """A few rows cost the reading of the weights, very many their arithmetic; a drafter without weights costs nothing."""
    parameters = sum(weight.numel() for weight in read_weights(tiny.model))
    few, many = (forward_floor(tiny.model, rows, CPU, torch.float32) for rows in (1e-9, 1e9))
    assert few == 4 * parameters / bandwidth(CPU)
    assert many == 2 * parameters * 1e9 / arithmetic(CPU, torch.float32)
    assert forward_floor(Ngram(tiny), 16, CPU, torch.float32) == 0

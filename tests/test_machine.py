"""Floors: no forward is promised to be faster than reading its weights."""

import torch
from torch import nn

from spectrain.drafters.ngram import Ngram
from spectrain.machine import arithmetic, bandwidth, forward_floor, weight_bytes
from spectrain.target import Target

CPU = torch.device("cpu")


def test_shared_weights_are_read_once() -> None:
    """Bytes of all parameters, tied ones once, each by its own type."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4).to(torch.bfloat16))
    assert weight_bytes(model) == 4 * 24 + 2 * (24 + 4)
    tied = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
    tied[1].weight = tied[0].weight
    assert weight_bytes(tied) == 4 * 15


def test_floor_is_memory_or_arithmetic(tiny: Target) -> None:
    """A few rows cost the reading of the weights, very many their arithmetic; a drafter without weights costs nothing."""
    parameters = sum(parameter.numel() for parameter in tiny.model.parameters())
    few, many = (forward_floor(tiny.model, rows, CPU, torch.float32) for rows in (1e-9, 1e9))
    assert few == weight_bytes(tiny.model) / bandwidth(CPU)
    assert many == 2 * parameters * 1e9 / arithmetic(CPU, torch.float32)
    assert forward_floor(Ngram(tiny), 16, CPU, torch.float32) == 0

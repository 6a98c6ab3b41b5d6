"""Averages of the weights over a training's steps: what is measured and saved in place of the newest (trainer.ema)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverages:
    """Exponential moving averages (Polyak) of every parameter that has learnt, by name, in float32.

    After step n the newest weight counts 1 - min(decay, (1 + n) / (10 + n)), so that the start is soon forgotten.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update_averages(self, parameters: dict[str, nn.Parameter], step: int) -> None:
        """Join the weights after a step; one that begins to learn starts with what it is."""
        newest = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, parameter in parameters.items():
            if name in self.averages:
                self.averages[name].lerp_(parameter.float(), newest)
            elif parameter.requires_grad:
                self.averages[name] = parameter.detach().float().clone()

    def load(self, averages: dict[str, Tensor], device: torch.device) -> None:
        """Go on from what a checkpoint has of them."""
        self.averages = {name: value.to(device) for name, value in averages.items()}

    @torch.no_grad()
    def copy_to(self, parameters: dict[str, nn.Parameter]) -> None:
        """Let the parameters be their averages."""
        for name, value in self.averages.items():
            parameters[name].copy_(value)

    @contextmanager
    def swap_weights(self, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
        """The averages in place of the weights, which come back bit by bit."""
        own = {name: parameters[name].detach().clone() for name in self.averages}
        self.copy_to(parameters)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in own.items():
                    parameters[name].copy_(value)

"""Moving averages of the weights over the steps, validated and saved in place of the last weights (trainer.ema)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverages:
    """Exponential moving averages (Polyak) of every trained parameter, by name, in float32.

    After step n the newest weight counts 1 - min(decay, (1 + n) / (10 + n)), so that the start is soon forgotten.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update_averages(self, parameters: dict[str, nn.Parameter], step: int) -> None:
        """Add the weights after a step. The average of a newly trained parameter starts at its value."""
        newest = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, parameter in parameters.items():
            if name in self.averages:
                self.averages[name].lerp_(parameter.float(), newest)
            elif parameter.requires_grad:
                self.averages[name] = parameter.detach().float().clone()

    def load(self, averages: dict[str, Tensor], device: torch.device) -> None:
        """Load the averages of a checkpoint."""
        self.averages = {name: value.to(device) for name, value in averages.items()}

    @torch.no_grad()
    def copy_to(self, parameters: dict[str, nn.Parameter]) -> None:
        """Copy the averages to the parameters."""
        for name, value in self.averages.items():
            parameters[name].copy_(value)

    @contextmanager
    def swap_weights(self, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
        """Replace the weights by their averages, and restore them bit by bit at the end."""
        own = {name: parameters[name].detach().clone() for name in self.averages}
        self.copy_to(parameters)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in own.items():
                    parameters[name].copy_(value)

"""The best weights of a training run by validation: when to stop, and which weights are the result."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.files import atomic_write

from .checkpoints import resume_advice


@dataclass
class ValidationHistory:
    """The results of the validations so far."""

    best: float = 0.0  # the highest forecast
    best_step: int = 0  # the step that it was found after; 0: none was
    without_gain: int = 0  # looks since

    def add_forecast(self, forecast: float, step: int) -> bool:
        """Add a validation; tell whether it is the best so far."""
        if forecast > self.best:
            self.best, self.best_step, self.without_gain = forecast, step, 0
            return True
        self.without_gain += 1
        return False


def best_weights_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"best-{step:06d}"


def save_best(run: Path, step: int, weights: dict[str, Tensor]) -> None:
    """Save the weights of the best validation in the folder of the checkpoints."""
    with atomic_write(best_weights_path(run, step), folder=True, remedy=resume_advice(run)) as scratch:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, scratch / "model.safetensors")


def load_best(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(best_weights_path(run, step) / "model.safetensors")


def delete_best_except(run: Path, steps: set[int]) -> None:
    """Delete the weights of all other validations: surpassed ones, and those of steps that a kill has undone."""
    paths = {best_weights_path(run, step) for step in steps}
    for path in (run / "checkpoints").glob("best-*[0-9]"):
        if path not in paths:
            shutil.rmtree(path)

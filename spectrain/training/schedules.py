"""Learning rate schedules after the warm-up, the choices of `schedule=`. They fall to `trainer.min_lr` of the peak."""

import math
from abc import ABC, abstractmethod

from spectrain.config.values import Share


class Schedule(ABC):
    """A curve that starts at 1 at the end of the warm-up."""

    @abstractmethod
    def rate_at(self, progress: float) -> float:
        """Return the rate, from 0 (`trainer.min_lr` of the peak) to 1 (the peak), at a progress of 0 to 1."""


class Cosine(Schedule):
    """Half a cosine (Loshchilov and Hutter, 2017)."""

    def rate_at(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


class Linear(Schedule):
    """A straight line down."""

    def rate_at(self, progress: float) -> float:
        return 1 - progress


class Constant(Schedule):
    """A constant rate, for further training or for averaged weights (`trainer.ema`)."""

    def rate_at(self, progress: float) -> float:
        return 1.0


class Wsd(Schedule):
    """Warm-up, stable, decay (Hu et al., 2024): the peak for most of the training, then 1 - sqrt (Haegele et al., 2024)."""

    def __init__(
        self,
        # Share of the training after the warm-up in which the learning rate falls.
        decay: Share = 0.2,
    ) -> None:
        self.decay = decay

    def rate_at(self, progress: float) -> float:
        falling = max(0.0, progress - (1 - self.decay))
        return 1 - math.sqrt(min(1.0, falling / self.decay)) if falling else 1.0

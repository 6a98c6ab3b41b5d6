"""How the learning rate falls after its warm-up: what `schedule=` chooses. How far it falls is `trainer.min_lr`."""

import math
from abc import ABC, abstractmethod

from spectrain.config.values import Share


class Schedule(ABC):
    """A curve from 1, where the warm-up ends, to what is left of it where the training does."""

    @abstractmethod
    def rate_at(self, progress: float) -> float:
        """The rate between `trainer.min_lr` of its peak (0) and the peak (1), when `progress` of 0 to 1 is done."""


class Cosine(Schedule):
    """Half a cosine (Loshchilov and Hutter, 2017)."""

    def rate_at(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


class Linear(Schedule):
    """A straight line down."""

    def rate_at(self, progress: float) -> float:
        return 1 - progress


class Constant(Schedule):
    """No fall: to go on with what was trained, or to average weights instead (`trainer.ema`)."""

    def rate_at(self, progress: float) -> float:
        return 1.0


class Wsd(Schedule):
    """Warm-up, stable, decay (Hu et al., 2024): the peak for most of the training, then 1 - sqrt (Haegele et al., 2024)."""

    def __init__(
        self,
        decay: Share = 0.2,  # the share of the training, behind the warm-up, in which the rate falls
    ) -> None:
        self.decay = decay

    def rate_at(self, progress: float) -> float:
        falling = max(0.0, progress - (1 - self.decay))
        return 1 - math.sqrt(min(1.0, falling / self.decay)) if falling else 1.0

"""The base of tree builders that weigh measured times of drafting and verifying."""

from __future__ import annotations

from spectrain.errors import UserError
from spectrain.trees.base import TreeBuilder, TreeTraits
from spectrain.trees.measured_policy import CONTEXT_STRIDE
from spectrain.trees.measurements import Calibration, Latency


class LatencyAwareBuilder(TreeBuilder):
    """A builder that needs measured times of drafting and verifying."""

    requirements: tuple[str, ...] = ("latency",)
    traits = TreeTraits(uses_latency=True)
    latency: Latency | None = None

    def prepare(self, calibration: Calibration) -> None:
        self.latency = calibration.latency
        # seconds of every tree size, by context length
        self.verify_curves: dict[int, list[float]] = {}

    def require_latency(self) -> Latency:
        if self.latency is None:
            raise UserError(
                f"tree={self.name}: nothing is timed yet; call prepare with a Calibration that "
                "has a latency"
            )
        return self.latency

    def verify_seconds(self, length: int) -> list[float]:
        """Return the seconds to verify every size up to the budget, for a context of this
        length.
        """
        latency = self.require_latency()
        context = length // CONTEXT_STRIDE * CONTEXT_STRIDE
        if context not in self.verify_curves:
            self.verify_curves[context] = [
                latency.estimate_verify(size, context) for size in range(1, self.budget + 1)
            ]
        return self.verify_curves[context]

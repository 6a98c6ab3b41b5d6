"""A source that computes features with the target during training. Shapes: T tokens, L layers, D
target width.
"""

from torch import Tensor

from spectrain.data.chat import Example
from spectrain.models.target import Target

from .base import BatchRequest, FeatureSource, FeaturesRead, compute_alone
from .batch import Batch, pad_or_pack


class LiveSource(FeatureSource):
    """Runs the target during training, and caches features in memory for later epochs."""

    def __init__(
        self,
        # Gigabytes of features that are cached in memory for later epochs; 0 caches none.
        keep_gb: float = 0.0,
    ) -> None:
        self.max_cached_bytes = int(keep_gb * 1e9)
        self.cached_features: dict[str, Tensor] = {}  # an example's hash -> [T, L, D]
        self.cached_bytes = 0

    def prepare(
        self, target: Target, reads: FeaturesRead, examples: list[Example] | None
    ) -> str | None:
        target.require_layers("source=live")
        return None

    def get_states(self, batch: Batch, request: BatchRequest) -> Tensor:
        target = request.target
        if self.max_cached_bytes and not target.runs_in_lockstep:
            rows = [self._compute_features(example, request) for example in request.examples]
            return pad_or_pack(rows, request.packed).to(target.device)
        return target.features(batch.tokens, request.layers, batch.lengths, request.texts).hidden

    def _compute_features(self, example: Example, request: BatchRequest) -> Tensor:
        """Return the features [T, L, D] of one example, and cache them if there is room."""
        if example.content_hash in self.cached_features:
            return self.cached_features[example.content_hash]
        hidden = compute_alone(example, request.target, request.layers)
        size = hidden.numel() * hidden.element_size()
        if self.cached_bytes + size <= self.max_cached_bytes:
            self.cached_features[example.content_hash] = hidden = hidden.to("cpu", copy=True)
            self.cached_bytes += size
        return hidden.to("cpu")

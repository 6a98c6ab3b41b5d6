"""A source that computes features with the target during training. Shapes: T tokens, L layers, D target width."""

from dataclasses import replace

import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.models.features import Features
from spectrain.models.images import refuse_images

from .base import BatchRequest, Source
from .batch import Batch, collate, pad_or_pack


class LiveSource(Source):
    """Runs the target during training, and caches features in memory for later epochs."""

    def __init__(
        self,
        # Gigabytes of features that are cached in memory for later epochs; 0 caches none.
        keep_gb: float = 0.0,
    ) -> None:
        self.max_cached_bytes = int(keep_gb * 1e9)
        self.cached_features: dict[str, Tensor] = {}  # an example's hash -> [T, L, D]
        self.cached_bytes = 0

    def make_batch(self, request: BatchRequest) -> Batch:
        target, layers = request.target, request.layers
        batch = collate(request.examples, request.packed).to(target.device)
        if not layers:
            refuse_images(request.texts, "source: this family reads no features, because it runs the target itself")
            return batch
        if self.max_cached_bytes and not target.runs_in_lockstep:
            hidden = pad_or_pack([self._compute_features(example, request) for example in request.examples], request.packed)
            return replace(batch, features=Features(batch.tokens, layers, hidden.to(target.device)))
        return replace(batch, features=target.features(batch.tokens, layers, batch.lengths, request.texts))

    def _compute_features(self, example: Example, request: BatchRequest) -> Tensor:
        """Return the features [T, L, D] of one example, and cache them if there is room.

        The example runs by itself, because the last bits depend on the batch: a resumed run, whose cache is empty, would
        otherwise not compute the same features as an uninterrupted one.
        """
        if example.content_hash in self.cached_features:
            return self.cached_features[example.content_hash]
        target = request.target
        tokens = torch.tensor([example.tokens], device=target.device)
        hidden = target.features(tokens, request.layers, texts=[example.tokens]).hidden[0]
        size = hidden.numel() * hidden.element_size()
        if self.cached_bytes + size <= self.max_cached_bytes:
            self.cached_features[example.content_hash] = hidden = hidden.to("cpu", copy=True)
            self.cached_bytes += size
        return hidden.to("cpu")

"""Features that the target computes while training. Shapes: T tokens, L layers, D target width."""

from dataclasses import replace

import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.models.features import Features
from spectrain.models.images import refuse_images

from .base import BatchRequest, Source
from .batch import Batch, collate, pad_or_pack


class LiveSource(Source):
    """Runs the target while training and keeps up to `keep_gb` of features in memory for later epochs."""

    def __init__(self, keep_gb: float = 0.0) -> None:
        self.max_cached_bytes = int(keep_gb * 1e9)
        self.cached_features: dict[str, Tensor] = {}  # an example's key -> [T, L, D]
        self.cached_bytes = 0

    def make_batch(self, request: BatchRequest) -> Batch:
        target, layers = request.target, request.layers
        batch = collate(request.examples, request.packed).to(target.device)
        if not layers:
            refuse_images(request.texts, "source: this family reads no features, it runs the target itself")
            return batch
        if self.max_cached_bytes and not target.runs_in_lockstep:
            hidden = pad_or_pack([self._compute_features(example, request) for example in request.examples], request.packed)
            return replace(batch, features=Features(batch.tokens, layers, hidden.to(target.device)))
        return replace(batch, features=target.features(batch.tokens, layers, batch.lengths, request.texts))

    def _compute_features(self, example: Example, request: BatchRequest) -> Tensor:
        """[T, L, D] of one example, kept where there is room. It is run alone: its last bits would depend on its company, so a
        resumed run, which has kept nothing yet, would not have the same features as an undisturbed one."""
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

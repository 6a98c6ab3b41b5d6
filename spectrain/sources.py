"""Where features come from. Shapes: B batch, T tokens, L layers, D target width."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .data.dataset import Dataset
from .features import Batch, Features, Layer
from .target import Target


class Source(ABC):
    """Turns examples into batches that hold the features a drafter reads."""

    @abstractmethod
    def batch(self, dataset: Dataset, indices: list[int], target: Target, layers: tuple[Layer, ...]) -> Batch:
        """These examples with their features; without features where `layers` is empty."""


class Live(Source):
    """Runs the target while training and keeps up to `keep_gb` of features in memory for later epochs."""

    def __init__(self, keep_gb: float = 0.0) -> None:
        self.keep_bytes = int(keep_gb * 1e9)
        self.kept: dict[int, Tensor] = {}  # example -> [T, L, D]
        self.bytes = 0

    def batch(self, dataset: Dataset, indices: list[int], target: Target, layers: tuple[Layer, ...]) -> Batch:
        batch = dataset.batch(indices).to(target.device)
        if not layers:
            return batch
        if all(index in self.kept for index in indices):
            width = batch.tokens.shape[1]
            rows = [self.kept[index] for index in indices]
            hidden = torch.stack([torch.nn.functional.pad(row, (0, 0, 0, 0, 0, width - len(row))) for row in rows])
            features = Features(batch.tokens, layers, hidden.to(target.device))
        else:
            features = target.features(batch.tokens, layers)
            self._keep(dataset, indices, features.hidden)
        return Batch(batch.tokens, batch.loss_mask, features)

    def _keep(self, dataset: Dataset, indices: list[int], hidden: Tensor) -> None:
        for row, index in enumerate(indices):
            kept = hidden[row, : len(dataset.examples[index].tokens)]
            size = kept.numel() * kept.element_size()
            if index not in self.kept and self.bytes + size <= self.keep_bytes:
                self.kept[index] = kept.to("cpu", copy=True)
                self.bytes += size

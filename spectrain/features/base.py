"""The contract of feature sources: a request for a batch, and the batch with its features."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from spectrain.data.chat import Example
from spectrain.models.features import Layer
from spectrain.models.target import Target

from .batch import Batch
from .store import FeatureStore


@dataclass(frozen=True)
class BatchRequest:
    """A request for a batch of examples with the target's features."""

    examples: list[Example]
    target: Target
    # Layers whose features the batch holds; none where the loss runs the target itself.
    layers: tuple[Layer, ...] = ()
    # Whether all sequences stand in one row, without padding.
    packed: bool = False
    # The training step, which keys random draws.
    step: int = 0
    # The drafter in training, for a source with `uses_drafter`.
    drafter: nn.Module | None = None

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of every example, with their images."""
        return [example.tokens for example in self.examples]


class Source(ABC):
    """Turns examples into batches that hold the features a drafter reads."""

    # Whether the drafter generates text.
    uses_drafter = False
    # Whether batches hold sequences that are not in the data.
    generates_text = False
    # Whether features are stored on disk, so that the target runs at most once over a sequence.
    stores_features = False
    # Largest number of bytes of features held in memory.
    max_cached_bytes = 0

    @abstractmethod
    def make_batch(self, request: BatchRequest) -> Batch:
        """Return the examples with their features, padded or packed."""

    def prepare(
        self, target: Target, layers: tuple[Layer, ...], final_reach: int | None, examples: list[Example] | None
    ) -> str | None:
        """Prepare the source, before the run writes anything; return a message for the user, if there is one.

        The loss reads `layers`. It reads "final" only where the next token carries loss and up to `final_reach` positions
        before, or everywhere if that is None. `examples` are all examples of the training, or None for a stream.
        """
        return None

    def begin(self, drafter: nn.Module) -> None:
        """Receive the drafter in its state before the first step of the training, resumed or not."""

    def writable_store(self) -> FeatureStore | None:
        """Return the prepared store that batches add to; None if the source writes nothing to disk."""
        return None

    def flush(self) -> None:
        """Write pending features to disk. The trainer calls this before every checkpoint and at the end."""

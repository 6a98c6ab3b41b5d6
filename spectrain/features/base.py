"""Where features come from: what a source is asked, and what it answers."""

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
    """What a batch is wanted of."""

    examples: list[Example]
    target: Target
    layers: tuple[Layer, ...] = ()  # features to add; none where the loss runs the target itself
    packed: bool = False  # all sequences in one row, without padding
    step: int = 0  # of the training, for what is drawn anew in each
    drafter: nn.Module | None = None  # that learns, for a source that `asks_drafter`

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of each, with the images that they stand for."""
        return [example.tokens for example in self.examples]


class Source(ABC):
    """Turns examples into batches that hold the features a drafter reads."""

    uses_drafter = False  # it lets the drafter write
    generates_text = False  # sequences come out that are not in the data
    stores_features = False  # on disk, so that the target runs over a sequence once at most
    max_cached_bytes = 0  # of features that it keeps in memory

    @abstractmethod
    def make_batch(self, request: BatchRequest) -> Batch:
        """The examples with their features, padded or packed."""

    def prepare(
        self, target: Target, layers: tuple[Layer, ...], final_reach: int | None, examples: list[Example] | None
    ) -> str | None:
        """Called once before training, before anything is written; what the user should know of what is to come.

        The loss reads `layers`, "final" only where the next token carries loss and up to `final_reach` positions before
        (None: everywhere). `examples` are all there will be, or None where they come as a stream.
        """
        return None

    def begin(self, drafter: nn.Module) -> None:
        """Called once before training with the drafter that is to learn, as it is before any step, resumed or not."""

    def writable_store(self) -> FeatureStore | None:
        """The store, prepared, that its batches add to; None where nothing of them is kept on disk."""
        return None

    def flush(self) -> None:
        """Write down what would be lost: called before a checkpoint, so that a resumed run finds it, and at the end."""

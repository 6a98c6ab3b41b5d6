"""The contracts of feature sources and of caches on disk. Shapes: B batch, T tokens, L layers, D
target width.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from spectrain.data.chat import Example
from spectrain.data.image_processor import refuse_images
from spectrain.errors import RunError
from spectrain.models.features import Features, Layer
from spectrain.models.target import Target

from .batch import Batch, collate


class SourceError(RunError):
    """A source that cannot give the features of a batch for now; the training saves itself and
    stops.
    """


class FeatureCache(ABC):
    """Features on disk: a store of this project or a cache of another one."""

    path: Path

    @property
    @abstractmethod
    def layers(self) -> tuple[Layer, ...]:
        """The layers that can be read."""

    def sequence_key(self, example: Example) -> str:
        """Return the key that identifies a sequence."""
        return example.content_hash

    @abstractmethod
    def __contains__(self, example: Example) -> bool: ...

    def list_distinct(self, examples: list[Example]) -> tuple[list[Example], list[Example]]:
        """Return the different sequences of these examples, and those of them that are missing."""
        distinct = list({self.sequence_key(example): example for example in examples}.values())
        return distinct, [example for example in distinct if example not in self]

    @abstractmethod
    def describe_capture(self, distinct: list[Example], missing: list[Example]) -> str:
        """Describe in a sentence what a training on these sequences reads, and what it adds for
        the missing ones.
        """

    @abstractmethod
    def read_states(
        self, example: Example, layers: tuple[Layer, ...], like: Target
    ) -> Tensor | None:
        """Read the states [T, L, D] of a sequence in the target's type and on its device; None
        if no intact copy is stored.
        """

    @abstractmethod
    def put_states(self, example: Example, states: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """Take states [T, L, D] of all cached layers and return what reading `layers` gives; a
        writable cache stores them.
        """

    def flush(self) -> None:
        """Write the pending states to disk."""


class StateCapture(ABC):
    """Sequences whose states a server computes for a store."""

    # The server and what it serves, as the manifest of the store names them.
    engine: str
    # File in the store's folder that names the sequences that failed, with the reasons.
    failure_file: str

    @abstractmethod
    def fill_store(
        self, store: FeatureCache, accelerator: Accelerator, examples: list[Example]
    ) -> None:
        """Capture this process's share of the sequences that the store lacks; raise a RunError if
        nothing succeeds any more.
        """


class FeatureServer(ABC):
    """A running engine that computes features. An installed package has the engines."""

    @abstractmethod
    def start_capture(
        self, target: Target, layers: tuple[Layer, ...], examples: list[Example]
    ) -> StateCapture:
        """Check that the server computes the states of these layers for such examples, before
        anything is written; raise a UserError if it does not.
        """


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


def compute_alone(example: Example, target: Target, layers: tuple[Layer, ...]) -> Tensor:
    """Return the features [T, L, D] of an example that the target runs by itself.

    The last bits depend on the batch: features that are kept for other batches, or for a resumed
    run, would otherwise depend on the batch that computed them.
    """
    tokens = torch.tensor([example.tokens], device=target.device)
    return target.features(tokens, layers, texts=[example.tokens]).hidden[0]


@dataclass(frozen=True)
class FeaturesRead:
    """The features that the loss of a training reads."""

    layers: tuple[Layer, ...]
    # "final" is read only where the next token carries loss and up to this many positions before;
    # None reads it everywhere.
    final_reach: int | None = None


class Source(ABC):
    """Turns examples into batches that hold the features a drafter reads."""

    # Whether the drafter generates text.
    uses_drafter = False
    # Whether batches hold sequences that are not in the data.
    generates_text = False
    # Whether features are stored on disk, so that the target runs at most once over a sequence.
    stores_features = False
    # Whether a server computes the features.
    needs_server = False
    # Number of batches that the trainer passes to `request_ahead` before it takes them.
    num_ahead = 0
    # Largest number of bytes of features held in memory.
    max_cached_bytes = 0

    @abstractmethod
    def make_batch(self, request: BatchRequest) -> Batch:
        """Return the examples with their features, padded or packed."""

    def prepare(
        self, target: Target, reads: FeaturesRead, examples: list[Example] | None
    ) -> str | None:
        """Prepare the source, before the run writes anything; return a message for the user, if
        there is one.

        `examples` are all examples of the training, or None for a stream.
        """
        return None

    def use_server(self, server: FeatureServer) -> None:
        """Receive the server, if the source needs one."""

    def request_ahead(self, examples: list[Example]) -> None:
        """Receive a coming batch, of which the trainer takes `num_ahead` others first."""

    def take_waited_seconds(self) -> float:
        """Return the seconds that batches have waited for a server since the last call."""
        return 0.0

    def begin(self, drafter: nn.Module) -> None:
        """Receive the drafter in its state before the first step of the training, resumed or
        not.
        """

    def leave_writing(self) -> None:
        """Write nothing to disk, because another process sees the same batches and writes their
        features.
        """

    def writable_store(self) -> FeatureCache | None:
        """Return the prepared store that batches add to; None if the source writes nothing to
        disk.
        """
        return None

    def provenance_facts(self) -> dict[str, Any]:
        """Return what the prepared source reads and no setting says; a resumed training compares
        it.
        """
        return {}

    def flush(self) -> None:
        """Write pending features to disk. The trainer calls this before every checkpoint and at
        the end.
        """

    def close(self) -> str | None:
        """Write pending features and release what the source holds; return a message for the
        user, if there is one.
        """
        self.flush()
        return None


class FeatureSource(Source):
    """A source whose batches hold the examples as they are, with the features of the layers that
    are requested.
    """

    def make_batch(self, request: BatchRequest) -> Batch:
        batch = collate(request.examples, request.packed).to(request.target.device)
        if not request.layers:
            refuse_images(
                request.texts,
                "source: this family reads no features, because it runs the target itself",
            )
            return batch
        return replace(
            batch, features=Features(batch.tokens, request.layers, self.get_states(batch, request))
        )

    @abstractmethod
    def get_states(self, batch: Batch, request: BatchRequest) -> Tensor:
        """Return the states [B, T, L, D] of the layers that are requested, on the target's
        device.
        """

"""What some families can do and others cannot, what drafting costs, and the files of a saved
drafter.

`Capabilities` and `SavedFiles` are data: values of the class, or of an instance if they depend on
its settings. A capability that computes something is a method: the family inherits the small base
class below that declares it.
Shapes: B batch, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spectrain.models.features import Features

from .context import Context

if TYPE_CHECKING:
    from spectrain.data.datastore import Datastore
    from spectrain.features.batch import Batch
    from spectrain.models.lora import TargetTraining
    from spectrain.models.target import Target
    from spectrain.trees.base import TreeBuilder

Text = tuple[list[int], list[int]]  # prompt, answer


@dataclass(frozen=True)
class Capture:
    """Drafting without a host-device synchronisation, so that a CUDA graph can hold a round."""

    # Attributes of the drafter that a round leaves to the next one: a cache, or tensors.
    state_names: tuple[str, ...] = ()
    # Verification goes on from where the drafts stopped, so the tree must hold all of them.
    needs_all_drafts: bool = False


@dataclass(frozen=True)
class OnPolicy:
    """Training on drafts that were made during the training: the loss reads which replayed
    drafts were rejected.
    """

    # The drafter as a language model. It can write texts, run side branches of a text and weigh the
    # drafts that it drew.
    language_model: Target | None = None
    # It drafts from the text before a root and reads no draft, so a replayed draft is judged after
    # its own root only.
    drafts_from_root: bool = False
    # Its loss weighs the tokens of a draft that it drew after a root by their advantage.
    learns_windows: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What a family can do beyond drafting."""

    # Another drafter can contain it: it leaves verification to the target and adds no nodes to the
    # tree.
    nestable: bool = True
    # It drafts from the text and the target's features in `layers` alone, so features that were
    # recorded serve as well as the target itself. Families that run the target to draft, or add
    # nodes to its forwards, do not.
    drafts_from_features: bool = False
    # It drafts chains, and refuses a tree that branches.
    chains_only: bool = False
    # It looks drafts up and computes no distribution, so nothing is drawn.
    is_copier: bool = False
    # Its trees hold copies without a draft probability q, so rules that weigh p against q are
    # refused.
    has_no_q: bool = False
    # It learns for an acceptance rule, which has the name of its recipe, and trains nothing that
    # drafts.
    is_acceptance_probe: bool = False
    # Its rollout runs a path of several given tokens in one step.
    scores_path_at_once: bool = False
    # How its rounds are captured; None if they cannot be.
    capture: Capture | None = None
    # How it learns from its own drafts; None if it cannot.
    on_policy: OnPolicy | None = None
    # How it trains the target, which the run then saves too; None leaves the target unchanged.
    target_training: TargetTraining | None = None


class PromptRunner(ABC):
    """A drafter that runs the prompts itself, with tokens of its own after them."""

    # Whether single layers of the target compute something else at its tokens, so that they cannot
    # be compiled or split.
    adapts_layers: bool = False

    @abstractmethod
    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        """Run prompts [B, T], padded on the right, into the empty cache, and return what
        `Context.prefill` returns.
        """


class RewindableDrafter(ABC):
    """A drafter that reads the text alone, so that another process can draft ahead of
    verification.
    """

    @abstractmethod
    def rewind(self, lengths: Tensor) -> None:
        """Forget what was read of each text from these lengths [B] on."""


class FittedDrafter(ABC):
    """A drafter whose initial weights are fitted to the target's states before the first
    training step.
    """

    # Number of tokens of the data that `fit_start` reads; 0 leaves the initial weights as they are.
    fit_tokens: int = 0

    @abstractmethod
    def fit_start(self, batches: Sequence[Batch], target: Target) -> None:
        """Set the initial weights from batches that hold the features of the first stage."""


class DrafterWithExits(ABC):
    """A drafter that can draft from any layer of the target."""

    @abstractmethod
    def at_exit(self, exit_layer: int, target: Target) -> Any:
        """Return the same drafter, with shared weights, at another exit."""


class ContextParallelDrafter(ABC):
    """A drafter whose loss processes share by columns of a batch (`trainer.context_parallel`): only
    its attention, in the training through `Batch.piece`, reads other columns."""

    @property
    @abstractmethod
    def label_reach(self) -> int:
        """The largest number of columns from a column to the labels of its losses."""

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """The number of query heads of its attention."""


class TunableDrafter(ABC):
    """A drafter that searches its settings before decoding, on the target's greedy answers to
    prompts that are not scored.
    """

    # Number of tokens of each answer.
    answer_tokens: int
    # Whether settings are still open.
    needs_search: bool

    @abstractmethod
    def search(self, target: Target, texts: list[Text], depth: int) -> None:
        """Search the settings for trees of this depth."""


class StoreReader(ABC):
    """A drafter that copies from a datastore, which must not hold scored texts."""

    datastore: Datastore | None


def prefill_prompts(
    drafter: nn.Module | None, context: Context, tokens: Tensor, lengths: Tensor
) -> Features:
    """Run prompts [B, T] into the empty cache, as the drafter does it or else without additions."""
    if isinstance(drafter, PromptRunner):
        return drafter.prefill(context, tokens, lengths)
    return context.prefill(tokens, lengths)


def adapts_layers(drafter: nn.Module) -> bool:
    """Tell whether the drafter, or one that it contains, changes what single layers of the
    target compute.
    """
    return any(
        module.adapts_layers for module in drafter.modules() if isinstance(module, PromptRunner)
    )


def find_datastore(drafter: nn.Module) -> Datastore | None:
    """Return the first datastore that the drafter, or one that it contains, copies from."""
    stores = (module.datastore for module in drafter.modules() if isinstance(module, StoreReader))
    return next((store for store in stores if store is not None), None)


class DraftingCost:
    """What drafting takes, for the room in caches and the lower bound of its time."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter

    def extra_nodes(self, builder: TreeBuilder) -> int:
        """Count the nodes of a tree beyond the builder's budget."""
        return 0

    def num_passes(self, depth: float) -> float:
        """Return how often drafting to a depth reads all of the weights."""
        return depth

    def weights(self, target: Target) -> nn.Module:
        """Return the modules that a draft step reads."""
        drafter: nn.Module = self.drafter
        return drafter

    def num_target_forwards(self) -> int:
        """Count the target's forwards that drafting takes in every round."""
        return 0

    def first_verified_layer(self) -> int:
        """Return the first layer that drafting leaves to verification."""
        return 0


class OnePassCost(DraftingCost):
    """The cost of drafting all depths in one pass."""

    def num_passes(self, depth: float) -> float:
        return min(1.0, depth)


class OutputLayerCost(DraftingCost):
    """The cost of draft steps that read the target's output layer too."""

    def weights(self, target: Target) -> nn.Module:
        return nn.ModuleList([self.drafter, self.drafter.head.output])


@dataclass(frozen=True)
class SavedFiles:
    """The files of a saved drafter."""

    # Settings, and attributes, that name an inner drafter or several: a choice, or its directory.
    inner: tuple[str, ...] = ()
    # Settings that drafter.init takes from the directory that it names.
    shape: tuple[str, ...] = ()
    # Those of `shape`, or keys in one of them, that a command may set to another value, because the
    # weights fit all values.
    adjustable: tuple[str, ...] = (
        "window",
        "causal",
        "architecture.rope_parameters",
        "architecture.max_position_embeddings",
    )
    # Settings that the saved description takes from the drafter instead of the command, so that it
    # loads alone.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # File, and name in it, of every tensor that is not stored in model.safetensors under its own
    # name.
    layout: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # Further files for tools that read the layout: name -> text.
    sidecars: Mapping[str, str] = field(default_factory=dict)

"""What some families can do and others cannot, what drafting costs, and the files of a saved
drafter.

A family declares what it can do as one object, `Capabilities`: a value of the class, or of an
instance if it depends on its settings. A field that computes something is a function whose first
argument is the drafter, so that a copy of a drafter computes with itself.
Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from pathlib import Path

    from spectrain.data.datastore import Datastore
    from spectrain.features.batch import Batch
    from spectrain.models.features import Features
    from spectrain.models.lora import TargetTraining
    from spectrain.models.target import Target
    from spectrain.trees.base import TreeBuilder

    from .context import Context

Text = tuple[list[int], list[int]]  # prompt, answer


@dataclass(frozen=True)
class Capture:
    """Drafting without a host-device synchronisation, so that a CUDA graph can hold a round."""

    # Attributes of the drafter that a round leaves to the next one: a cache, or tensors.
    state_names: tuple[str, ...] = ()
    # Verification goes on from where the drafts stopped, so the tree must hold all of them.
    needs_all_drafts: bool = False


@dataclass(frozen=True)
class FitSeconds:
    """How long a fit takes on this machine once its features are there."""

    # For each token that it reads.
    per_token: float
    # However many tokens it reads.
    solving: float


@dataclass(frozen=True)
class FitOperations:
    """The floating-point operations of a fit once its features are there."""

    # For each token that it reads.
    per_token: float
    # However many tokens it reads, in single and in double precision.
    single: float
    double: float


@dataclass(frozen=True)
class InitialFit:
    """Initial weights that are fitted to the target's states before the first training step."""

    # Number of tokens of the data that the fit reads.
    num_tokens: int
    # Sets the weights of the drafter from batches that hold the features of the first stage.
    run: Callable[[Any, Sequence[Batch], Target], None]
    # Estimates how long that takes for the drafter, by timing a small part of it.
    measure: Callable[[Any], FitSeconds]
    # Counts what that computes for the drafter, which needs no weights, and a number of tokens.
    count: Callable[[Any, float], FitOperations]


@dataclass(frozen=True)
class SettingsSearch:
    """Settings that are still open, and are searched before decoding on the target's greedy answers
    to prompts that are not scored.
    """

    # Number of tokens of each answer.
    answer_tokens: int
    # Searches the settings of the drafter on these texts, for trees of this depth; then nothing is
    # open.
    run: Callable[[Any, Target, list[Text], int], None]


@dataclass(frozen=True)
class ContextParallel:
    """A loss that processes share by columns of a batch (`trainer.context_parallel`): only its
    attention, in the training through `Batch.piece`, reads other columns.
    """

    # The largest number of columns from a column to the labels of the loss.
    label_reach: int
    # Number of query heads of the drafter's attention.
    num_heads: int


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
class Capabilities:
    """What a family can do beyond drafting, and what its drafting takes."""

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
    # Single layers of the target compute something else at its tokens, so that they cannot be
    # compiled or split.
    adapts_layers: bool = False
    # Its rollouts estimate the acceptance of every draft token (`Rollout.accept_probs`), if it has
    # learned that; without, they may leave it out where no draft ends by it.
    estimates_acceptance: bool = False
    # Names of its modules that a training step runs once for each draft step. Training that shards
    # weights gathers them once for the whole step.
    repeated_parts: tuple[str, ...] = ()
    # Keys of a row of the training file that it reads itself, besides the conversation.
    row_keys: tuple[str, ...] = ()
    # Returns the language model with the target's tokenizer that it drafts with; None for a family
    # that is none by itself.
    draft_model: Callable[[Any], Target] | None = None
    # Loads or compiles what drafting runs, so that no timed round does; None where there is nothing
    # to load.
    prepare_kernels: Callable[[Any], None] | None = None
    # How its rounds are captured; None if they cannot be.
    capture: Capture | None = None
    # How it trains the target, which the run then saves too; None leaves the target unchanged.
    target_training: TargetTraining | None = None
    # How its initial weights are fitted; None leaves them as they are.
    initial_fit: InitialFit | None = None
    # How processes share its loss by columns; None if they cannot.
    context_parallel: ContextParallel | None = None
    # How its open settings are searched; None if none is open.
    search: SettingsSearch | None = None
    # The store that it copies from, which must not hold scored texts.
    datastore: Datastore | None = None
    # Runs prompts [B, T], padded on the right, with tokens of its own after them, into the empty
    # cache: (drafter, context, tokens, lengths) -> what `Context.prefill` returns. None runs the
    # prompts alone.
    prefill: Callable[[Any, Context, Tensor, Tensor], Features] | None = None
    # Forgets what was read of each text from these lengths [B] on, so that another process can
    # draft ahead of verification: (drafter, lengths). None if it reads more than the text.
    rewind: Callable[[Any, Tensor], None] | None = None
    # Returns the same drafter, with shared weights, at another exit of the target: (drafter, layer,
    # target). None if it has no exits.
    at_exit: Callable[[Any, int, Target], Any] | None = None
    # What drafting takes.
    cost: type[DraftingCost] = DraftingCost


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
    # Directories that its first weights were loaded from: drafter.init's, then those of inner
    # drafters.
    origins: tuple[Path, ...] = ()
    # Files that its settings name, by setting, as the labels of a judge.
    read: Mapping[str, Path] = field(default_factory=dict)

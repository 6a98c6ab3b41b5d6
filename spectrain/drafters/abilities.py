"""What only some families have, as objects that a family declares: a value of its class, or of an instance where it depends on
its settings. Functions take the drafter first, so that a copied drafter speaks for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from spectrain.data.datastore import Datastore
from spectrain.models.features import Features
from spectrain.models.lora import TargetTraining
from spectrain.models.target import Target
from spectrain.models.traffic import BytesRead
from spectrain.trees.base import TreeBuilder

from .context import Context


@dataclass(frozen=True)
class OnPolicy:
    """What lets a family learn from drafts or texts that were made while it trains."""

    writer: Target | None = None  # the drafter as a model that writes text by itself, where it is one
    learns_replays: bool = False  # its loss tells what a replayed draft got wrong (Batch.distance)
    learns_branches: bool = False  # it runs a batch whose texts have side branches (Batch.places, Batch.visible)
    learns_windows: bool = False  # its loss knows the chance that it drew each token of a draft with (Batch.advantage)


@dataclass(frozen=True)
class Capture:
    """Drafting without a host-device synchronisation, so that a CUDA graph can hold a round."""

    carried: tuple[str, ...] = ()  # attributes that one round leaves to the next: a cache, or tensors
    keeps_drafts: bool = False  # it verifies from where its drafts stopped, so trees must hold all of them


@dataclass(frozen=True)
class Exits:
    """Drafting from any layer of the target."""

    at: Callable[[Any, int, Target], Any]  # (drafter, exit, target): the same, sharing its weights, with another early exit


@dataclass(frozen=True)
class Tuning:
    """A search of settings before decoding, on the target's own greedy answers to prompts that are not scored."""

    is_open: Callable[[Any], bool]  # (drafter): whether there is something to search
    answer_tokens: Callable[[Any], int]  # (drafter): of each answer
    search: Callable[[Any, Target, list[tuple[list[int], list[int]]], int], None]  # (drafter, target, texts, depth of trees)


@dataclass(frozen=True)
class Abilities:
    """What a family can do beyond drafting; None or False where it cannot."""

    capture: Capture | None = None
    exits: Exits | None = None
    tuning: Tuning | None = None
    target_training: TargetTraining | None = None  # it changes the target in training: the run then saves the target too
    on_policy: OnPolicy = OnPolicy()
    adapts_layers: bool = False  # it changes what single layers of the target compute, so no compilation serves them all
    copies_text: bool = False  # it looks drafts up and asks no distribution: a builder shapes nothing, and nothing is drawn
    judges: bool = False  # what it learns is for an acceptance rule, whose name is its recipe's, and its drafts are none of it
    follows_at_once: bool = False  # its rollout runs a path of given tokens in one step, so that it can be drafted for
    plain: bool = True  # it hands over a rollout or continuations and nothing else, runs nothing of the target and leaves
    # verification to it, so that another drafter can hold it
    undrawn: bool = False  # its trees hold copies, which no q was asked for: what weighs p against q is refused
    prefill: Callable[[Any, Context, Tensor, Tensor], Features] | None = None  # (drafter, context, prompts [B, T], their
    # lengths): it runs them itself, with something of its own behind them, and gives what `Context.prefill` does
    ahead: Callable[[Any, Tensor], None] | None = None  # (drafter, lengths [B]): its drafts follow from the text alone, so that
    # another process can make them; it forgets what it has read of each text from that length on
    datastore: Callable[[Any], Datastore | None] = lambda drafter: None  # texts that it copies from, which hold nothing scored


@dataclass(frozen=True)
class DraftingCost:
    """What drafting takes, for the room of caches and the floor of its time."""

    extra_nodes: Callable[[Any, TreeBuilder], int] = lambda drafter, builder: 0  # of a tree, beyond the budget
    passes: Callable[[Any, float], float] = lambda drafter, depth: depth  # how often drafting so deep reads all of the weights
    weights: Callable[[Any, Target], nn.Module] = lambda drafter, target: drafter  # what a draft step reads
    forwards: Callable[[Any], int] = lambda drafter: 0  # whole ones of the target that drafting takes in every round
    verified_from: Callable[[Any], int] = lambda drafter: 0  # the first layer that drafting leaves to verification
    read: Callable[[Any], BytesRead] | None = (
        None  # (drafter): what drafting has read since a decoding began, where it counts that
    )


@dataclass(frozen=True)
class SavedFiles:
    """How a drafter lies on the disk. `settings` are what its description takes from it instead of from the command, so that
    it loads alone; `layout` says where tensors go that do not stay in model.safetensors: name -> (file, name there);
    `sidecars` are further files, for tools that read its layout: name -> text."""

    inner: tuple[str, ...] = ()  # settings, and attributes, that name a drafter inside, or several: a choice, or its directory
    shape: tuple[str, ...] = ()  # settings that saved weights fix; drafter.init takes them from the directory it names
    settings: Callable[[Any], dict[str, Any]] = lambda drafter: {}
    layout: Callable[[Any], dict[str, tuple[str, str]]] = lambda drafter: {}
    sidecars: Callable[[Any], dict[str, str]] = lambda drafter: {}

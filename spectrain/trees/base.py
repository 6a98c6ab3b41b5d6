"""The contract of tree builders. Shapes: B batch, N nodes of a tree, P nodes of a path.

A drafter returns a `Draft`, which rollout.py defines: a `Rollout` that drafts step by step, or
ready continuations. A builder makes a TokenTree of it without knowing the family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from spectrain.copying.trie import Trie
from spectrain.errors import UserError

from .measurements import Calibration
from .rollout import Draft, Rollout
from .token_tree import Children, TokenTree


class Prefix(Protocol):
    """The committed texts that trees hang below, as a builder sees them."""

    @property
    def root(self) -> Tensor:
        """The newest token of each text [B], emitted and not yet run through the target."""

    @property
    def lengths(self) -> Tensor:
        """The number of committed tokens of each text [B], without the root."""

    @property
    def longest(self) -> int:
        """The largest length, or an upper bound of it, available without a host-device
        synchronisation.
        """

    @property
    def tokens(self) -> Tensor:
        """The committed tokens followed by the root, [B, capacity]."""

    @property
    def sequence_ids(self) -> Tensor:
        """The key of each text's random draws, [B]."""

    @property
    def round(self) -> int:
        """The number of drafts made so far."""

    @property
    def begins(self) -> bool:
        """Whether this is the first round of a decoding."""


@dataclass(frozen=True)
class RoundResult:
    """The result and cost of one round, for builders that learn from it."""

    tree: TokenTree
    logits: Tensor  # [B, N, target vocabulary]
    counts: Tensor  # [B] tokens emitted, 0 in rows that had finished before
    # draft, verify, accept, other; of the clock that choose_work_clock gives
    seconds: dict[str, float]
    path: Tensor | None = None  # [B, P] accepted nodes, the root first, padded with the last one


TimeSizes = Callable[[Prefix, list[int]], tuple[dict[int, float], float]]
"""Times the verification of trees of these sizes below the prefixes; returns the seconds of every
size, and those that the measurement took.
"""


RoundReason = Literal[
    "always",
    "pays",
    "prepared",
    "trial",
    "comparison",
    "does not pay",
    "no drafter",
]
"""Why a round runs with a draft or without one.

always: nothing decides, so every round drafts. With a draft: pays, drafted rounds gain tokens on
average; prepared, the drafter proposed nothing in the last round, in which it may have read
for this one; trial, drafting does not pay, and savings cover what this round may lose. Without a
draft: comparison, drafting pays, and a plain step is timed beside it; does not pay; no drafter, no
round of this answer may draft soon enough, so its rest is decoded without the drafter.
"""


@dataclass(frozen=True)
class RoundPlan:
    """How a round runs, and why."""

    runs_drafter: bool = True
    # Whether this round or a later one of the decoding may draft. Otherwise the decoding goes on
    # without the drafter, and nothing is planned for its other rounds.
    keeps_drafter: bool = True
    # Whether the tree builder observes the round.
    is_observed: bool = True
    reason: RoundReason = "always"
    # What the reason was found from, in plain steps: the tokens of a drafted round minus its cost,
    # on average, and the steps that trials may lose. None where nothing was weighed.
    gain: float | None = None
    savings: float | None = None


@dataclass(frozen=True)
class PlanOptions:
    """What a plan may choose from."""

    time_sizes: TimeSizes
    can_skip: bool = True  # whether a round may run without the drafter
    # After a round without the drafter: it stays only if one of so many next rounds may draft.
    # None after a round with it.
    num_waited: int | None = None


class RoundPolicy:
    """Decides rounds: `plan` is called before each of them, and `record` with that plan after it.

    This one always drafts and learns nothing.
    """

    # Whether it may plan rounds without a draft; others need no planning.
    decides_to_draft = False
    # Whether it skips also drafters that decide for themselves, such as those with copies.
    skips_any_drafter = False

    def plan(self, prefix: Prefix, options: PlanOptions) -> RoundPlan:
        """Decide how the next round runs."""
        return RoundPlan()

    def record(self, plan: RoundPlan, round: RoundResult) -> None:
        """Learn from the round that ran by this plan."""

    def refresh_times(
        self, prefix: Prefix, time_sizes: TimeSizes, is_new_batch: bool = False
    ) -> None:
        """Time verification outside of any round, where the policy needs that. `is_new_batch`: also
        if the number of threads may still change.
        """

    def may_draft(self, num_texts: int, length: int, num_rounds: int, begins: bool = True) -> bool:
        """Tell whether one of the next `num_rounds` rounds may draft, if those before it are plain
        steps. The answer changes nothing.

        `length` is that of the longest of `num_texts` texts, whose decoding begins with these
        rounds or goes on with them.
        """
        return True

    def plan_without(self, num_texts: int) -> RoundPlan:
        """Return the plan of the further rounds of so many texts whose drafter `may_draft` leaves
        out.
        """
        return WITHOUT_DRAFTER

    def needs_drafter(self, prefix: Prefix, copies: list[Trie]) -> bool:
        """Complete the plan of a round by copies that are available without the drafter: tell
        whether the drafter runs too.
        """
        return True


ALWAYS_DRAFT = RoundPolicy()
# The plan of rounds of a decoding that goes on without its drafter.
WITHOUT_DRAFTER = RoundPlan(
    runs_drafter=False, keeps_drafter=False, is_observed=False, reason="no drafter"
)


MAX_NODES = 4096  # nodes, and so levels, of a tree: far more than any kernel or drafter can use


@dataclass(frozen=True)
class TreeTraits:
    """What holds for every tree of a builder, and for how it drafts them."""

    is_chain: bool = False  # a node has at most one child
    drafts_by_level: bool = True  # nodes passed to a rollout together have the same depth
    verifies_all: bool = False  # every node passed to a rollout is in the tree
    is_fixed: bool = False  # trees have one size and depth, without a host-device synchronisation
    uses_latency: bool = False  # the tree depends on measured times


class TreeBuilder(ABC):
    """Decides how many nodes are drafted, and where."""

    name: str
    depth: int  # longest path below the root: the most tokens a round can accept before its bonus
    budget: int  # nodes that the target verifies at most, the root included
    max_drafted: int  # nodes that a rollout receives at most; its cache must hold them
    # how a node's children are chosen; acceptance rules depend on it
    children: Children = "deterministic"
    temperature: float = 1.0  # of the distribution that children are sampled from
    seed: int = 0
    traits: TreeTraits = TreeTraits()
    round_policy: RoundPolicy = ALWAYS_DRAFT  # decides whether rounds draft, and learns from them
    # what it must be prepared with: "hits", "latency", "rehearsal" (rounds to learn from)
    requirements: tuple[str, ...] = ()

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        """Build the tree of one round from a rollout, from ready continuations, or from both."""
        if draft.rollout is None:
            tree = merge_tries(prefix, draft.continuations or [], self)
        else:
            tree = self.expand(prefix, draft.rollout)
            if draft.merge_copies is not None:
                tree = merge_tries(prefix, draft.merge_copies(tree), self)
        return tree if draft.add_mask_nodes is None else draft.add_mask_nodes(tree)

    @abstractmethod
    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        """Draft a tree below `prefix.root`, step by step."""

    def copy_budget(self, prefix: Prefix, tries: list[Trie]) -> int:
        """Return how many nodes of ready continuations are verified, the root included."""
        return self.budget

    def prepare(self, calibration: Calibration) -> None:
        """Take the measurements of this target and drafter; called once before decoding."""

    def observe(self, round: RoundResult) -> None:
        """Learn from a drafted round; called after each of them."""

    def sampled_variant(self, temperature: float) -> TreeBuilder | None:
        """Return an unprepared builder of the same trees with sampled children; None where
        selection depends on the samples.
        """
        return None

    def report_settings(self) -> dict[str, object]:
        """Return the settings that a report shows."""
        return {
            "name": self.name,
            "depth": self.depth,
            "budget": self.budget,
            "children": self.children,
        }


class WrappedBuilder(TreeBuilder):
    """A builder that delegates to another one; subclasses change parts of it."""

    def __init__(self, builder: TreeBuilder) -> None:
        self.builder = builder
        for name in TreeBuilder.__annotations__:  # the declared properties of a builder
            setattr(self, name, getattr(builder, name))
        # A subclass may read values on the host.
        self.traits = replace(builder.traits, is_fixed=False)

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        return self.builder.grow(prefix, draft)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        return self.builder.expand(prefix, rollout)

    def copy_budget(self, prefix: Prefix, tries: list[Trie]) -> int:
        return self.builder.copy_budget(prefix, tries)

    def prepare(self, calibration: Calibration) -> None:
        self.builder.prepare(calibration)

    def observe(self, round: RoundResult) -> None:
        self.builder.observe(round)

    def report_settings(self) -> dict[str, object]:
        return self.builder.report_settings()


class RootOnlyBuilder(TreeBuilder):
    """Drafts nothing: a round is one step of autoregressive decoding."""

    name = "root"
    depth = 0
    budget = 1
    max_drafted = 0
    traits = TreeTraits(is_chain=True, verifies_all=True, is_fixed=True)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        return merge_tries(prefix, [], self)


def check_settings(builder: TreeBuilder, **least: tuple[float, float]) -> None:
    """Raise UserError for settings of a builder below their minimum, given as key=(value, minimum),
    for trees too large to store, and for a temperature that is not positive.
    """
    for key, (value, lowest) in least.items():
        if not value >= lowest:
            raise UserError(f"tree.{key}={value}: use {lowest} or more")
        if value > MAX_NODES:
            raise UserError(f"tree.{key}={value}: use {MAX_NODES} or less")
    if not builder.temperature > 0:
        raise UserError(
            f"tree.temperature={builder.temperature}: use more than 0, or "
            "tree.children=deterministic"
        )


def merge_tries(prefix: Prefix, tries: list[Trie], builder: TreeBuilder) -> TokenTree:
    """Build a tree of the heaviest nodes of each text's trie within the builder's budget, padded to
    the longest row.

    Where all tries are empty, the tree is the root alone.
    """
    budget = builder.copy_budget(prefix, tries)
    selections = [
        trie.heaviest_path(builder.depth)
        if builder.traits.is_chain
        else trie.best_nodes(builder.depth, budget)
        for trie in tries
    ]
    roots = prefix.root
    width = max(map(len, selections), default=1)
    if width == 1:
        return TokenTree.from_chain(roots[:, None])
    rows = []
    for root, trie, nodes in zip(roots.tolist(), tries, selections):
        new_index = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        padding = [0] * (width - len(nodes))
        tokens = [root, *(trie.tokens[node] for node in nodes[1:]), *padding]
        parents = [*(new_index[trie.parents[node]] for node in nodes), *padding]
        rows.append((tokens, parents, [index < len(nodes) for index in range(width)]))
    # tokens, parents, valid
    columns = [torch.tensor(list(part), device=roots.device) for part in zip(*rows)]
    return (
        TokenTree.from_chain(columns[0], columns[2])
        if builder.traits.is_chain
        else TokenTree.from_parents(*columns)
    )

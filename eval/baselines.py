"""Baselines of this engine: the same drafter with other trees, other drafters, and retrieval."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.config.choices import find_choice
from spectrain.data.datastore import Datastore
from spectrain.drafters.base import Drafter
from spectrain.drafters.hybrid import DrafterWithCopies
from spectrain.drafters.layers.copies import CopySource
from spectrain.drafters.ngram import Ngram
from spectrain.drafters.retrieval import Retrieval
from spectrain.errors import UserError
from spectrain.eval.columns import DRAFTER, RECOMMENDED
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.fixed_trees import UNTRAINED, FixedTrees, drafts_alike, make_chain
from spectrain.eval.installed_baselines import list_installed_baselines
from spectrain.eval.leaks import check_no_leak
from spectrain.eval.prompts import Prompt
from spectrain.eval.systems import System, describe_tree
from spectrain.eval.transformers_baselines import run_transformers
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.runs.drafters import find_shipped_drafter, load_shipped_drafter
from spectrain.trees import Auto, Chain, Eagle2, TreeBuilder

# acceptance of the drafter, its start, the untrained and the shipped one in the same fixed trees
FIXED = "fixed"
DEFAULT_BASELINES = (
    "own",
    "auto",
    RECOMMENDED,
    "retrieval",
    "chain",
    "shipped",
    "untrained",
    FIXED,
    "ngram",
)
COPYING = {RECOMMENDED, "retrieval"}  # baselines that may copy from a store
OWN_STORE = "own"  # the answers that a run was trained on
TRANSFORMERS = ("generate", "prompt_lookup", "assistant", "early_exit")
INSTALLED = tuple(baseline.name for baseline in list_installed_baselines() if baseline.is_baseline)
TRAINING_FREE = ("ngram", *INSTALLED, "retrieval")  # choices of `drafter`
OURS = ("own", "auto", RECOMMENDED, "chain", "shipped", "untrained", FIXED, *TRAINING_FREE)


@dataclass
class Baselines(EvalExtension):
    """Baselines by name: those of OURS run in this engine, those of TRANSFORMERS in
    transformers.
    """

    names: Sequence[str]
    assistant: str | None = None
    exit_layer: int | None = None
    # A folder, OWN_STORE, or none.
    store: str | None = None
    # The prompts that are scored.
    prompts: Sequence[Prompt] = ()
    # Whether tokens per forward in fixed trees are counted on their own: nothing timed stands for
    # them then, and an untrained drafter, whose speed nobody needs, is not timed.
    counts_apart: bool = False
    fixed_trees: FixedTrees = field(default_factory=FixedTrees)

    def check(self, candidate: Candidate) -> None:
        if (
            "early_exit" in self.names
            and self.exit_layer is None
            and candidate.drafter.capabilities.at_exit is None
        ):
            raise UserError("eval.baselines: early_exit needs eval.exit_layer=N")

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        others = {*self.names} & {*TRAINING_FREE} - {drafter_choice(candidate.drafter)}
        copies = COPYING & ({*self.names} - {*TRAINING_FREE} | others)
        store = self._open_store(candidate) if copies else None
        systems = [
            *self._same_drafter(candidate, first, store),
            *self._other_drafters(candidate),
            *self._training_free(candidate, others, store),
        ]
        own = candidate.default_builder or candidate.builder
        if FIXED not in self.names:
            return systems
        start = None if candidate.make_start is None else candidate.make_start()
        counted = self.fixed_trees.systems(own, [first, *systems], start, self.counts_apart)
        if self.counts_apart:
            systems = [system for system in systems if system.name != UNTRAINED]
        return [*systems, *counted]

    def _same_drafter(
        self, candidate: Candidate, first: System, store: Datastore | None
    ) -> list[System]:
        """Return the same drafter with other trees."""
        drafter, rule, capabilities = (
            candidate.drafter,
            candidate.rule,
            candidate.drafter.capabilities,
        )
        own = candidate.default_builder or candidate.builder
        systems = []
        # A requested tree that may draft nothing is always scored, although a chain stands at the
        # top in its place.
        if candidate.default_builder is not None and (
            "own" in self.names or own.round_policy.decides_to_draft
        ):
            systems.append(System("own", f"drafter, {describe_tree(own)}", drafter, own, rule))
        if "auto" in self.names and supports_auto_tree(candidate.target, drafter, own):
            systems.append(
                System("auto", f"drafter, {describe_tree(Auto())}", drafter, Auto(), rule)
            )
        if RECOMMENDED in self.names and not capabilities.is_copier and not capabilities.has_no_q:
            tree = retrieval_tree(candidate)
            label = f"drafter + retrieval, {describe_tree(tree)}{rule_suffix(candidate)}"
            merged = DrafterWithCopies(drafter, CopySource(store))
            systems.append(System(RECOMMENDED, label, merged, tree, rule.matching_rule()))
        chain = System("chain", "drafter, chain of 3", drafter, make_chain(own), rule)
        if (
            "chain" in self.names
            and not own.traits.is_chain
            and not capabilities.is_copier
            and not drafts_alike(first, chain)
        ):
            systems.append(chain)
        return systems

    def _other_drafters(self, candidate: Candidate) -> list[System]:
        """Return the shipped drafter, and the same one before its training."""
        target = candidate.target
        builder = candidate.builder
        rule = candidate.rule
        systems = []
        if candidate.make_untrained is None:
            return []
        name = find_shipped_drafter(target) if "shipped" in self.names else None
        if name is not None:
            systems.append(
                System(
                    "shipped",
                    name,
                    load_shipped_drafter(name, target),
                    copy.deepcopy(builder),
                    rule,
                )
            )
        if "untrained" in self.names:
            systems.append(
                System(
                    "untrained",
                    "untrained",
                    candidate.make_untrained(),
                    copy.deepcopy(builder),
                    rule,
                )
            )
        return systems

    def _training_free(
        self, candidate: Candidate, names: set[str], store: Datastore | None
    ) -> list[System]:
        """Return drafters that need no training. They copy text and sample nothing, so no rule
        can weigh p / q for them.
        """
        target = candidate.target
        own = candidate.default_builder or candidate.builder
        systems = []
        suffix = rule_suffix(candidate)
        rule = candidate.rule.matching_rule()
        if "retrieval" in names:
            retrieval = Retrieval(target, None if store is None else str(store.folder))
            systems.append(
                System(
                    "retrieval",
                    f"retrieval alone{suffix}",
                    retrieval,
                    retrieval_tree(candidate),
                    rule,
                )
            )
        if "ngram" in names:
            systems.append(
                System(
                    "ngram", f"n-gram lookup{suffix}", Ngram(target), Chain(min(3, own.depth)), rule
                )
            )
        for name in (name for name in INSTALLED if name in names):
            tree = Eagle2(own.depth, own.budget)
            drafter = GroupSpec("drafter", name).load_constructor()(target)
            systems.append(System(name, f"{name}{suffix}", drafter, tree, rule))
        return systems

    def _open_store(self, candidate: Candidate) -> Datastore | None:
        """Open the store to copy from, in addition to the text; a run's own store that holds a
        scored question is left out.
        """
        if self.store is None:
            return None
        store = (
            candidate.open_store()
            if self.store == OWN_STORE
            else Datastore(self.store, candidate.target.tokenizer)
        )
        if store is None:
            return None
        try:
            check_no_leak(store, self.prompts, candidate.setting)
        except UserError as error:
            if self.store != OWN_STORE:
                raise
            print(f"Retrieval copies from the text only: {error}.")
            return None
        return store

    def report(self, results: Results) -> dict[str, Any]:
        fixed = (
            {"acceptance": entries} if (entries := self.fixed_trees.summary(results.turns)) else {}
        )
        names = [name for name in self.names if name in TRANSFORMERS]
        if not names:
            return fixed
        drafter, target = results.candidate.drafter, results.candidate.target
        exit_layer = self.exit_layer or drafter.saved.settings.get("exit_layer")
        return fixed | {
            "transformers": run_transformers(
                target, results.turns[DRAFTER], names, self.assistant, exit_layer
            )
        }


def drafter_choice(drafter: Drafter) -> str | None:
    """Return the choice of `drafter` that constructs this drafter."""
    return find_choice("drafter", f"{type(drafter).__module__}.{type(drafter).__qualname__}")


def retrieval_tree(candidate: Candidate) -> TreeBuilder:
    """Return the tree of drafters that retrieve continuations."""
    own = candidate.default_builder or candidate.builder
    return Auto() if candidate.target.sharding == "none" else Eagle2(own.depth, own.budget)


def rule_suffix(candidate: Candidate) -> str:
    """Name the rule that decides about copied text, if it is another than the drafter's."""
    rule = candidate.rule.matching_rule()
    return "" if rule.name == candidate.rule.name else f", rule {rule.name}"


def supports_auto_tree(target: Target, drafter: Drafter, builder: TreeBuilder) -> bool:
    """Tell whether tree=auto can replace a builder.

    Processes that share a target must draft the same trees, which measured times do not give, and
    tree=auto samples nothing.
    """
    is_separate = target.sharding == "none" and not drafter.capabilities.is_copier
    return is_separate and builder.children == "deterministic" and builder.name != Auto.name

"""Acceptance in fixed trees: the quality of every drafter in the same trees, apart from whether
drafting pays here.

A tree that goes by measured times may draft nothing, so its tokens per forward say how often it
drafted, not how good the drafter is. The drafter, its start, an untrained one and the shipped one
are therefore decoded in the same fixed trees too.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.session import check_compatibility
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities
from spectrain.errors import UserError
from spectrain.eval.columns import DRAFTER
from spectrain.eval.intervals import interval
from spectrain.eval.metrics import (
    Turn,
    acceptance_by_depth,
    acceptance_columns,
    acceptance_interval,
    count_drafted_rounds,
    pooled_acceptance,
)
from spectrain.eval.systems import System, describe_tree
from spectrain.trees import Chain, Eagle2, TreeBuilder

# keys of the fixed trees
CHAIN = "chain"
TREE = "tree"
UNTRAINED = "untrained"
"""Name of the system that is the drafter before anything was learned."""
START = "start"
"""Name of the drafter with its fitted initial weights, which the first step of training began
with.
"""
SUBJECTS = (DRAFTER, START, UNTRAINED, "shipped")
"""Names of the systems whose drafters are decoded in the fixed trees."""
TRAINED = (DRAFTER, START, UNTRAINED)
"""Those of them that the training made."""
SHAPE = ("depth", "budget", "top_k", "children", "temperature", "seed", "stop", "stop_on")
"""Settings of a chain or a tree of EAGLE-2 that decide what it drafts."""


def make_chain(own: TreeBuilder) -> Chain:
    """Return the chain of 3, with children chosen as in the drafter's own tree."""
    return Chain(3, own.children, own.temperature, own.seed)


def choose_trees(
    own: TreeBuilder, rule: AcceptanceRule, capabilities: Capabilities
) -> dict[str, TreeBuilder]:
    """Return the fixed trees: a chain of 3, and EAGLE-2's tree of 16 nodes or the nearest valid
    one.

    The nearest tree is the drafter's own, if that branches and does not go by measured times;
    without one it is left out, as for a drafter of chains.
    """
    trees: dict[str, TreeBuilder] = {CHAIN: make_chain(own)}
    if capabilities.chains_only:
        return trees
    is_usable = (
        not own.traits.is_chain
        and not own.round_policy.decides_to_draft
        and not own.traits.uses_latency
    )
    for builder in (Eagle2(), *([own] if is_usable else [])):
        if allows_tree(rule, builder, capabilities):
            trees[TREE] = builder
            break
    return trees


def allows_tree(rule: AcceptanceRule, builder: TreeBuilder, capabilities: Capabilities) -> bool:
    """Tell whether a rule is valid for the trees of a builder and a drafter with these
    capabilities.
    """
    try:
        check_compatibility(capabilities, builder, rule)
    except UserError:
        return False
    return True


def drafts_alike(system: System, other: System) -> bool:
    """Tell whether two systems draft the same trees with the same drafter."""
    if system.drafter is not other.drafter or system.changes:
        return False
    first = system.builder
    second = other.builder
    if type(first) is not type(second) or not isinstance(first, Chain | Eagle2):
        return first is second
    return all(getattr(first, key, None) == getattr(second, key, None) for key in SHAPE)


class FixedTrees:
    """Chooses which systems decode in the fixed trees, and makes the entry `acceptance` of
    summary.json of their turns.
    """

    def __init__(self) -> None:
        self.trees: dict[str, TreeBuilder] = {}
        # Name of the system that decodes with a fixed tree, by tree and by drafter.
        self.names: dict[str, dict[str, str]] = {}

    def systems(
        self,
        own: TreeBuilder,
        systems: Sequence[System],
        start: Drafter | None = None,
        counts_apart: bool = False,
    ) -> list[System]:
        """Return the systems to decode without timing them; unless they are counted apart, a timed
        system that drafts the same is not decoded again.

        `start` is the drafter with its fitted initial weights, where training began with them.
        """
        self.trees = choose_trees(own, systems[0].rule, systems[0].drafter.capabilities)
        if counts_apart:
            # A larger tree takes minutes where a chain takes seconds.
            self.trees = {CHAIN: self.trees[CHAIN]}
        self.names = {key: {} for key in self.trees}
        untimed = []
        subjects = [
            *systems,
            *(
                []
                if start is None
                else [replace(systems[0], name=START, label=START, drafter=start)]
            ),
        ]
        for key, builder in self.trees.items():
            for system in subjects:
                if system.name not in (TRAINED if counts_apart else SUBJECTS):
                    continue
                plain = replace(
                    system,
                    name=f"{system.name}-{key}",
                    label=f"{system.name}, {describe_tree(builder)}",
                    builder=builder,
                    changes=(),
                    is_timed=False,
                )
                found = next(
                    (
                        other.name
                        for other in systems
                        if not counts_apart and drafts_alike(other, plain)
                    ),
                    None,
                )
                self.names[key][system.name] = found or plain.name
                if found is None:
                    untimed.append(replace(plain, builder=deepcopy(builder)))
        return untimed

    def summary(self, turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
        """Return the entry `acceptance` of summary.json, by tree: the tokens per forward of each
        drafter.
        """
        entries = {}
        for key, builder in self.trees.items():
            answers = {
                drafter: turns[name] for drafter, name in self.names[key].items() if turns.get(name)
            }
            if DRAFTER not in answers:
                continue
            # A drafter with fewer heads or steps drafts less than the tree allows.
            depth = max(
                (depth for turn in answers[DRAFTER] for depth in turn.drafted.depths), default=0
            )
            entries[key] = {
                "label": f"chain of {depth}" if builder.traits.is_chain else describe_tree(builder),
                "tree": {
                    "name": builder.name,
                    "depth": depth,
                    "budget": builder.budget,
                    "children": builder.children,
                },
                "drafters": {
                    drafter: measure_acceptance(part) for drafter, part in answers.items()
                },
                "prompts": len({turn.id for turn in answers[DRAFTER]}),
                # Over the start of the training, or else over the untrained drafter.
                "gain": next(
                    (
                        measure_gain(answers, before)
                        for before in (START, UNTRAINED)
                        if before in answers
                    ),
                    None,
                ),
                # Over the untrained drafter: what the fit and the steps of the training did.
                "training_gain": measure_gain(answers, UNTRAINED) if UNTRAINED in answers else None,
            }
        return entries


def measure_acceptance(turns: Sequence[Turn]) -> dict[str, Any]:
    """Measure a drafter's tokens per forward in one tree."""
    drafted, rounds = count_drafted_rounds(turns)
    return {
        "pooled": round(pooled_acceptance(turns), 4),
        "ci95": acceptance_interval(turns),
        "by_depth": acceptance_by_depth(turns),
        "rounds": rounds,
        "drafted_rounds": drafted,
    }


def measure_gain(answers: Mapping[str, Sequence[Turn]], over: str) -> dict[str, Any]:
    """Divide the tokens per forward of the drafter by those of another one, with the 95 %
    interval over prompts.
    """
    after = answers[DRAFTER]
    before = answers[over]
    columns = np.concatenate([acceptance_columns(after), acceptance_columns(before)], axis=1)
    ratio = pooled_acceptance(after) / pooled_acceptance(before)
    return {"over": over, "ratio": round(ratio, 4), "ci95": interval(columns, (1, -1, -1, 1))}

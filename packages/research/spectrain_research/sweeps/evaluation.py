"""Sweeps: one drafter with many trees, lengths, or exits, decoded in turn and shown as one
table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.errors import UserError
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.systems import System, describe_tree
from spectrain.runs.candidate import Candidate
from spectrain.trees import Auto, Chain, Eagle2, Static, TreeBuilder
from spectrain_research.shared.grid import Grid, GridSweep, exits_of


def choose_builder(name: str, **settings: Any) -> Callable[[int, int], TreeBuilder]:
    """Return a function from depth and budget to the builder of a `tree` choice, which is
    imported when it is called.
    """
    return lambda depth, budget: GroupSpec("tree", name).load_constructor()(
        depth, budget, **settings
    )


SWEPT: dict[str, Callable[[int, int], TreeBuilder]] = {
    "chain": lambda depth, budget: Chain(depth),
    "static": Static,
    "sequoia": choose_builder("sequoia"),
    "eagle2": Eagle2,
    "opt": choose_builder("opt"),
    "dyspec": choose_builder("dyspec", children="deterministic"),
    "entropy": choose_builder("entropy"),
    "cast": choose_builder("cast"),
    "one_pass": choose_builder("one_pass"),
    "auto": Auto,
}
"""Choices of `tree` that take a depth and a budget."""


ADAPTIVE_LENGTH = ("thompson", "policy")
"""Choices of `tree` that decide a chain's length while decoding."""


@dataclass
class TreeSweep(EvalExtension):
    """Decodes with the named kinds of tree at every budget, as deep as the candidate's; a chain
    has one size.
    """

    names: Sequence[str]
    budgets: Sequence[int]

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        depth = candidate.builder.depth
        builders: list[TreeBuilder] = [Chain(depth)] if "chain" in self.names else []
        builders += [
            SWEPT[name](depth, budget)
            for budget in self.budgets
            for name in self.names
            if name != "chain"
        ]
        for builder in builders:
            candidate.rule.check_children(builder.children, builder.traits.is_chain)
        drafter, rule = candidate.drafter, candidate.rule
        return [
            System(
                f"{builder.name}-{builder.budget}", describe_tree(builder), drafter, builder, rule
            )
            for builder in builders
        ]


@dataclass
class LengthSweep(EvalExtension):
    """Decodes with chains of every length up to the candidate's depth, and of lengths that are
    decided while decoding.
    """

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        own = candidate.builder
        drafter = candidate.drafter
        rule = candidate.rule
        sampling = own.children, own.temperature, own.seed
        chains = [Chain(depth, *sampling) for depth in range(1, own.depth + 1)]
        chains += [
            GroupSpec("tree", name).load_constructor()(own.depth, *sampling)
            for name in ADAPTIVE_LENGTH
        ]
        rule.check_children(own.children, is_chain=True)
        return [
            System(f"length-{chain.name}-{chain.depth}", describe_tree(chain), drafter, chain, rule)
            for chain in chains
        ]


@dataclass
class ExitSweep(GridSweep):
    """Decodes with chains of every length from every exit, sampled as the candidate's tree is."""

    exits: Sequence[int] | None
    depths: Sequence[int]

    def check(self, candidate: Candidate) -> None:
        if candidate.drafter.capabilities.at_exit is None:
            raise UserError(
                "eval.sweep=exit: this drafter has no exits to choose from; use "
                "drafter=early_exit, or a run of recipe=layerskip"
            )

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        at_exit = candidate.drafter.capabilities.at_exit
        assert at_exit is not None
        rows = exits_of(candidate.target, self.exits)
        self.grid = Grid("exit", "exit_layer", "depth", rows, tuple(sorted(set(self.depths))))
        systems = []
        builder = candidate.builder
        for exit_layer in self.grid.rows:
            drafter = at_exit(candidate.drafter, exit_layer, candidate.target)
            for depth in self.grid.columns:
                label = f"exit {exit_layer}, chain of {depth}"
                chain = Chain(depth, builder.children, builder.temperature, builder.seed)
                systems.append(
                    System(
                        self.grid.cell_name(exit_layer, depth),
                        label,
                        drafter,
                        chain,
                        candidate.rule,
                    )
                )
        return systems

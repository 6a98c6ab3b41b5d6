"""What rules keep of the drafts of a run, beside the most that any lossless rule could: `eval.optimum=true`.

The prompts are decoded once more, apart from everything that is timed. At each node that a round kept and that has children,
the target's distribution and the drafter's say how often each rule would keep one of them, and the optimal transport how often
any could.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule, Match, Siblings
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.session import Session
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.notes import EXTENSION_NOTES, format_rates
from spectrain.eval.oracle import round_rates
from spectrain.experimental.transport.linear_program import TruncatedLinearProgram
from spectrain.experimental.transport.optimum import optimal_acceptance
from spectrain.experimental.transport.rules import ImportanceSampling, KSeq, Transport
from spectrain.trees import TreeBuilder
from spectrain.trees.base import MIN_PROB, RoundResult, WrappedBuilder
from spectrain.trees.token_tree import TokenTree

BEST = "best"
BY_NODE = (
    Match,
    RecursiveRejection,
    KSeq,
    ImportanceSampling,
    TruncatedLinearProgram,
    Transport,
)  # decide node by node: chances say all
Kept = list[dict[str, float]]  # by depth: how often a child is kept, by the name of a rule


class NodeRecorder(WrappedBuilder):
    """Another builder; of every kept node that has children, how often one of them is kept by each rule, of one sequence."""

    def __init__(self, builder: TreeBuilder, rule: AcceptanceRule) -> None:
        super().__init__(builder)
        self.rules: list[AcceptanceRule] = [rule]
        if rule.sampling_settings is not None:
            self.rules = [one(*rule.sampling_settings) for one in BY_NODE if builder.children in one.children]
        self.rule = rule
        self.rounds: list[Kept] = []
        self.kind = builder.children  # how the children of its trees are chosen: copies are, whatever the builder is asked

    def observe(self, round: RoundResult) -> None:
        self.builder.observe(round)
        assert round.path is not None
        tree, found = round.tree, Kept()
        real = (tree.valid & tree.can_emit)[0]
        for node in round.path[0, : int(round.counts[0])].tolist():
            children = tree.tokens[0][real & (tree.parents[0] == node)].tolist()
            if not children:
                break
            self.kind = tree.children
            siblings = siblings_of(tree, node, children, self.rule.target_distribution(round.logits[0, node]).cpu())
            judges = (rule for rule in self.rules if tree.children in rule.children)
            kept = {rule.name: float(sum(rule.acceptance_chances(siblings))) for rule in judges}
            found.append({**kept, BEST: optimal_acceptance(siblings, tree.children)})
        self.rounds.append(found)


def siblings_of(tree: TokenTree, node: int, tokens: list[int], p: Tensor) -> Siblings:
    """The children of a node of the first tree, and what they are judged by."""
    if tree.children == "deterministic":
        return Siblings(tokens, p, None)
    assert tree.q is not None, "a tree with drawn children says what they were drawn from"
    drawn = tree.q[0, node].double().cpu()
    ids = torch.arange(len(drawn)) if tree.draft_ids is None else tree.draft_ids.cpu()
    q = torch.zeros_like(p).scatter(0, ids, drawn / drawn.sum().clamp(min=MIN_PROB))  # of nothing left, nothing
    return Siblings(tokens, p, q, tree.children == "without_replacement")


class Optimum(EvalExtension):
    """By depth, how often a child of a kept node is kept: by the rules that take such children, and at best."""

    def __init__(self, max_new_tokens: int) -> None:
        self.max_new_tokens = max_new_tokens

    def report(self, results: Results) -> dict[str, Any]:
        """`best_by_depth`, and `kept_by_depth` of each rule, are means over the `places` of each depth: nodes with children
        that the rule in use kept, its last round left out where the limit cut it."""
        target, system = results.candidate.target, results.systems[0]
        places: list[list[dict[str, float]]] = []
        children = system.builder.children
        for row, turn in enumerate(results.turns["drafter"], 1):
            recorder = NodeRecorder(system.builder, system.rule)
            session = Session(target, system.rule, system.drafter, recorder, pruning=system.pruning)
            (generation,) = session.decode([turn.drafted.prompt], self.max_new_tokens, [row])
            children = recorder.kind
            for kept in recorder.rounds[: len(generation.complete_round_lengths)]:
                places += [[] for _ in kept[len(places) :]]
                for depth, found in enumerate(kept):
                    places[depth].append(found)
        kept_by_depth: dict[str, list[float]] = defaultdict(list)
        for level in places:
            for name in level[0]:
                kept_by_depth[name].append(sum(found[name] for found in level) / len(level))
        best = kept_by_depth.pop(BEST, [])
        return {
            "optimum": {
                "children": children,
                "places": [len(level) for level in places],
                "best_by_depth": round_rates(best),
                "kept_by_depth": {name: round_rates(rates) for name, rates in kept_by_depth.items()},
            }
        }


def describe_optimum(optimum: dict[str, Any]) -> Iterator[str]:
    """Say how often rules accept a child, and how often any lossless rule could."""
    rules = "; ".join(f"acceptance={name} {format_rates(rates)}" for name, rates in optimum["kept_by_depth"].items())
    yield (
        f"Of children that are {optimum['children']} any lossless rule accepts, by depth, at most "
        f"{format_rates(optimum['best_by_depth'])}: {rules}."
    )


EXTENSION_NOTES["optimum"] = describe_optimum

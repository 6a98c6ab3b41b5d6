"""The acceptance of each rule on the drafts of a run, compared with the optimum of all lossless
rules: `eval.optimum=true`.

The prompts are decoded once more, without timing. At each accepted node with children, the
distributions of the target and the drafter determine how often each rule would accept one of the
children, and the optimal transport how often any rule could.
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
from spectrain.trees import TreeBuilder
from spectrain.trees.base import RoundResult, WrappedBuilder
from spectrain.trees.growing import MIN_PROB
from spectrain.trees.token_tree import TokenTree
from spectrain_research.transport.linear_program import TruncatedLinearProgram
from spectrain_research.transport.optimum import optimal_acceptance
from spectrain_research.transport.rules import ImportanceSampling, KSeq, Transport

BEST = "best"
# Rules that decide node by node, so that the chances at a node are all of their acceptance.
NODE_RULES = (
    Match,
    RecursiveRejection,
    KSeq,
    ImportanceSampling,
    TruncatedLinearProgram,
    Transport,
)
# by depth: the probability that a child is accepted, by the name of a rule
NodeRates = list[dict[str, float]]


class NodeRecorder(WrappedBuilder):
    """Wraps a builder and records, for one sequence, each rule's acceptance at every accepted
    node with children.
    """

    def __init__(self, builder: TreeBuilder, rule: AcceptanceRule) -> None:
        super().__init__(builder)
        self.rules: list[AcceptanceRule] = [rule]
        if rule.sampling_settings is not None:
            self.rules = [
                rule_class(*rule.sampling_settings)
                for rule_class in NODE_RULES
                if builder.children in rule_class.children
            ]
        self.rule = rule
        self.rounds: list[NodeRates] = []
        # how children were chosen; copies are deterministic with any builder
        self.kind = builder.children

    def observe(self, round: RoundResult) -> None:
        self.builder.observe(round)
        assert round.path is not None
        tree = round.tree
        rates = NodeRates()
        is_real = (tree.valid & tree.can_emit)[0]
        for node in round.path[0, : int(round.counts[0])].tolist():
            children = tree.tokens[0][is_real & (tree.parents[0] == node)].tolist()
            if not children:
                break
            self.kind = tree.children
            siblings = make_siblings(
                tree, node, children, self.rule.target_distribution(round.logits[0, node]).cpu()
            )
            judges = (rule for rule in self.rules if tree.children in rule.children)
            chances = {rule.name: float(sum(rule.acceptance_chances(siblings))) for rule in judges}
            rates.append({**chances, BEST: optimal_acceptance(siblings, tree.children)})
        self.rounds.append(rates)


def make_siblings(tree: TokenTree, node: int, tokens: list[int], p: Tensor) -> Siblings:
    """Make the siblings below a node of the first tree, with the distributions that decide about
    them.
    """
    if tree.children == "deterministic":
        return Siblings(tokens, p, None)
    assert tree.q is not None, "a tree with drawn children has their distribution q"
    drawn = tree.q[0, node].double().cpu()
    ids = torch.arange(len(drawn)) if tree.draft_ids is None else tree.draft_ids.cpu()
    q = torch.zeros_like(p).scatter(0, ids, drawn / drawn.sum().clamp(min=MIN_PROB))
    return Siblings(tokens, p, q, tree.children == "without_replacement")


class Optimum(EvalExtension):
    """Reports by depth how often a child of an accepted node is accepted: by the rules for such
    children, and at best.
    """

    def __init__(self, max_new_tokens: int) -> None:
        self.max_new_tokens = max_new_tokens

    def report(self, results: Results) -> dict[str, Any]:
        """Return `best_by_depth`, and `kept_by_depth` of each rule: means over the `places` of each
        depth.

        These are nodes with children that the rule in use accepted, without a last round that the
        limit cut short.
        """
        target = results.candidate.target
        system = results.systems[0]
        rates_by_depth: list[list[dict[str, float]]] = []
        children = system.builder.children
        tree_changes = tuple(change for change in system.changes if change.part == "tree")
        for row, turn in enumerate(results.turns["drafter"], 1):
            recorder = NodeRecorder(system.builder, system.rule)
            session = Session(target, system.rule, system.drafter, recorder, changes=tree_changes)
            (generation,) = session.decode([turn.drafted.prompt], self.max_new_tokens, [row])
            children = recorder.kind
            for node_rates in recorder.rounds[: len(generation.complete_round_lengths)]:
                rates_by_depth += [[] for _ in node_rates[len(rates_by_depth) :]]
                for depth, rates in enumerate(node_rates):
                    rates_by_depth[depth].append(rates)
        means_by_rule: dict[str, list[float]] = defaultdict(list)
        for level in rates_by_depth:
            for name in level[0]:
                means_by_rule[name].append(sum(rates[name] for rates in level) / len(level))
        best = means_by_rule.pop(BEST, [])
        return {
            "optimum": {
                "children": children,
                "places": [len(level) for level in rates_by_depth],
                "best_by_depth": round_rates(best),
                "kept_by_depth": {
                    name: round_rates(rates) for name, rates in means_by_rule.items()
                },
            }
        }


def describe_optimum(optimum: dict[str, Any]) -> Iterator[str]:
    """Say how often rules accept a child, and how often any lossless rule could."""
    rules = "; ".join(
        f"acceptance={name} {format_rates(rates)}"
        for name, rates in optimum["kept_by_depth"].items()
    )
    yield (
        f"Of children that are {optimum['children']} any lossless rule accepts, by depth, at most "
        f"{format_rates(optimum['best_by_depth'])}: {rules}."
    )


EXTENSION_NOTES["optimum"] = describe_optimum

"""What rules accept, next to the most that any rule could: positions are those of the run, and both
are exact where nothing is drawn."""

from pathlib import Path

import pytest
import torch

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.eval.notes import explain_numbers
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain, Static, TreeBuilder
from spectrain_research.transport.rules import KSeq, Transport
from tests.eval.test_run import SETTING, make_evaluation


@pytest.mark.parametrize("rule", [Greedy(), Match(0.5, seed=3)], ids=lambda rule: rule.name)
def test_no_rule_accepts_more_of_copied_text(
    shallow: Target, tmp_path: Path, rule: AcceptanceRule
) -> None:
    """No rule accepts more copied tokens than the one in use, depth by depth; with greedy decoding
    that is the run's own acceptance."""
    evaluation = make_evaluation(tmp_path, check=False, optimum=True)
    summary = evaluation.score(
        Candidate(shallow, Ngram(shallow), Chain(3), rule, SETTING), tmp_path / "out"
    )
    optimum = summary["optimum"]
    assert (
        optimum["kept_by_depth"] == {rule.name: optimum["best_by_depth"]}
        and optimum["places"][0] > 0
    )
    if rule.name == "greedy":
        assert optimum["best_by_depth"] == summary["acceptance_by_depth"]


def test_copies_are_not_drawn_whatever_the_tree_asks(shallow: Target, tmp_path: Path) -> None:
    """Copies in a tree of sampled children are deterministic, so their optimum is that of
    deterministic children.
    """
    evaluation = make_evaluation(tmp_path, check=False, optimum=True)
    optima = [
        evaluation.score(
            Candidate(shallow, Ngram(shallow), builder, Match(0.5, seed=3), SETTING),
            tmp_path / "out",
        )["optimum"]
        for builder in (Chain(3), Chain(3, "sampled"))
    ]
    assert optima[0] == optima[1] and optima[0]["children"] == "deterministic"


INDEPENDENT = ("match", "recursive", "kseq", "importance", "programme")


@pytest.mark.parametrize(
    "rule, builder, judged",
    [
        (KSeq(seed=1), Static(paths=[[0], [1], [0, 0]], children="sampled"), set(INDEPENDENT)),
        (
            Transport(),
            Static(paths=[[0], [1], [0, 0]], children="top_and_sampled"),
            {"match", "transport"},
        ),
    ],
    ids=["kseq", "transport"],
)
def test_every_rule_for_such_children_is_named(
    shallow: Target, tmp_path: Path, rule: AcceptanceRule, builder: TreeBuilder, judged: set[str]
) -> None:
    """At the positions of one run all rules are judged that take its children, and the printed
    sentence names them and the optimum."""
    torch.manual_seed(1)
    drafter = Eagle3(shallow, vocab_size=512)
    drafter.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    summary = make_evaluation(tmp_path, check=False, optimum=True).score(
        Candidate(shallow, drafter, builder, rule, SETTING), tmp_path / "out"
    )
    optimum = summary["optimum"]
    assert optimum["kept_by_depth"].keys() == judged and optimum["children"] == builder.children
    assert optimum["places"][0] == sum(summary["tokens_by_round"])
    assert all(
        0 <= rate <= 1
        for rates in (optimum["best_by_depth"], *optimum["kept_by_depth"].values())
        for rate in rates
    )
    (sentence,) = [line for line in explain_numbers(summary) if "any lossless rule" in line]
    assert all(f"acceptance={name}" in sentence for name in judged)

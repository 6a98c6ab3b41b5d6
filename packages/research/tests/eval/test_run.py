"""Scoring with the settings of `eval` that ideas add."""

from pathlib import Path

import pytest

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.eval.run import puts_chain_first
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain, Eagle2
from spectrain_research.sweeps.evaluation import SWEPT
from tests.eval.test_run import SETTING, make_evaluation, read_samples


@pytest.fixture(scope="module")
def eagle3(shallow: Target) -> Eagle3:
    return Eagle3(shallow, vocab_size=512)


@pytest.mark.slow
def test_the_sweep_scores_every_builder(shallow: Target, tmp_path: Path, eagle3: Eagle3) -> None:
    """eval.sweep=tree adds a row for every builder at every budget, each identical to generate."""
    evaluation = make_evaluation(tmp_path, sweep="tree", budgets=(4, 6))
    summary = evaluation.score(
        Candidate(shallow, eagle3, Chain(2), Greedy(), SETTING), tmp_path / "out"
    )
    kinds = SWEPT.keys() - {"chain"}
    assert {name for name in summary["compared"]} >= {
        f"{kind}-4" for kind in kinds - {"static", "sequoia"}
    }
    assert {name.rpartition("-")[0] for name in summary["compared"]} == kinds | {"chain"}
    for entry in summary["compared"].values():
        assert entry["lossless"]["identical"] == 4 and entry["nodes_per_round"] <= 6


def test_a_guard_leaves_the_output_alone(shallow: Target, tmp_path: Path, eagle3: Eagle3) -> None:
    """With eval.guard the output is the same, and the rounds that drafted and did not add up."""
    evaluation = make_evaluation(tmp_path, guard=True)
    summary = evaluation.score(
        Candidate(shallow, eagle3, Eagle2(3, 6, 2), Greedy(), SETTING), tmp_path / "out"
    )
    rounds = sum(line["rounds"] for line in read_samples(tmp_path / "out"))
    assert summary["lossless"]["identical"] == 4
    # the warm-up's too
    assert summary["guard"]["drafted_rounds"] + summary["guard"]["plain_rounds"] >= rounds


def test_a_guard_cannot_be_captured(shallow: Target, tmp_path: Path) -> None:
    evaluation = make_evaluation(tmp_path, engine="captured", guard=True)
    with pytest.raises(UserError, match="eval.engine=captured: eval.guard decides on the host"):
        evaluation.score(
            Candidate(shallow, Eagle3(shallow, vocab_size=64), Chain(2), Greedy(), SETTING),
            tmp_path / "out",
        )


def test_a_sweep_over_trees_keeps_the_requested_tree_first(shallow: Target, tmp_path: Path) -> None:
    candidate = Candidate(shallow, Eagle3(shallow, vocab_size=512), Eagle2(3, 6), Greedy(), SETTING)
    assert not puts_chain_first(make_evaluation(tmp_path, measured=True, sweep="tree"), candidate)

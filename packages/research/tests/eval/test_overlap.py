"""Drafting ahead next to the same drafter in one process, and the gain that rounds' times
predict.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.causal import Causal
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain
from spectrain_research.overlap.evaluation import Timetable
from spectrain_research.overlap.runner import Overlap
from tests.eval.test_run import SETTING, make_evaluation

SAME = Timetable(depth=3, emitted_counts=(4,) * 10, draft=1.0, verify=2.0, rest=0.0, step=2.0)
BOTH = (Overlap(), Overlap(pre_verify=True))


@pytest.mark.sweep(1, free=("way",))
@pytest.mark.parametrize("way", ["post", "outcomes"])
def test_overlap_is_scored_with_the_drafter(
    shallow: Target,
    tmp_path: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With eval.overlap the same drafter decodes once more, identical too, and its gain stands next
    to the simulated one; the written files give the same simulation. A message names threads that
    leave it no core."""
    monkeypatch.setattr("os.cpu_count", lambda: 2 if way == "post" else 64)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    drafter = Causal(shallow, num_layers=1)
    evaluation = make_evaluation(tmp_path, overlap=way)
    summary = evaluation.score(
        Candidate(shallow, drafter, Chain(2), Greedy(), SETTING), tmp_path / "out"
    )
    assert ("OMP_NUM_THREADS=1" in capsys.readouterr().out) == (way == "post")
    entry = summary["compared"]["overlap"]
    overlap = summary["overlap"]
    assert (
        entry["lossless"]["identical"] == 4
        and entry["acceptance_length"] == summary["acceptance_length"]
    )
    assert overlap["drafts_missed"] > 0 and overlap["measured"] > 0
    assert ("outcomes" in overlap) == ("outcomes" in overlap["simulated"]) == (way == "outcomes")
    overlap["simulated"].pop("outcomes", None)
    read = Timetable.from_files(tmp_path / "out").summarize()
    assert {
        key: pytest.approx(value, rel=1e-3) for key, value in overlap["simulated"].items()
    } == read


def test_what_is_always_right_costs_what_the_longer_part_takes() -> None:
    """Where every draft is accepted, a round takes as long as its longer part: the verification, or
    a draft and one token more."""
    assert SAME.seconds_per_token(None) == pytest.approx((1 + 2) / 4, rel=1e-3)
    for overlap in BOTH:
        assert SAME.seconds_per_token(overlap) == pytest.approx(2 / 4, rel=1e-3)
        assert replace(SAME, draft=6.0).seconds_per_token(overlap) == pytest.approx(8 / 4, rel=1e-3)


def test_what_is_foreseen_costs_what_the_longer_part_takes() -> None:
    """With every outcome foreseen no round waits for a draft, however little of it is accepted;
    with none foreseen all wait, and with half of them half."""
    for counts in ((4,) * 10, (1,) * 10):
        schedule = replace(SAME, emitted_counts=counts)
        times = [
            schedule.seconds_per_token(
                Overlap(num_outcomes=8, num_ready=ready, num_missed=8 - ready)
            )
            * counts[0]
            for ready in (8, 4, 0)
        ]
        assert times == pytest.approx([2.0, 2.5, 3.0], rel=0.02)


def test_what_is_always_wrong_gains_by_steps_alone() -> None:
    """Where no draft is accepted, drafting ahead is in vain; steps of the target meanwhile are
    decoding without a drafter.
    """
    wrong = replace(SAME, emitted_counts=(1,) * 10)
    assert wrong.accept_rate == 0 and SAME.accept_rate == 1
    assert wrong.seconds_per_token(Overlap()) == wrong.seconds_per_token(None) == pytest.approx(3.0)
    assert wrong.seconds_per_token(Overlap(pre_verify=True)) == pytest.approx(2.0)


@pytest.mark.parametrize("counts", [(4, 4, 1, 2), (2, 1, 1, 3), (4, 3, 4, 4)])
def test_the_mean_round_is_that_of_the_rate(counts: tuple[int, ...]) -> None:
    """One after another, a token takes a round's time divided by the tokens that drafts accepted
    at that rate give.
    """
    schedule = replace(SAME, emitted_counts=counts)
    tokens = sum(schedule.accept_rate**k for k in range(schedule.depth + 1))
    assert schedule.seconds_per_token(None) == pytest.approx(3 / tokens, rel=0.05)
    assert schedule.seconds_per_token(Overlap()) < schedule.seconds_per_token(None)

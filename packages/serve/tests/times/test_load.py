"""A server under load: a queue keeps its formula, and a sweep over batch sizes has the numbers."""

from pathlib import Path

import numpy as np
import pytest

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.ngram import Ngram
from spectrain.eval.page import write_report
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain
from spectrain_serve.times import load
from spectrain_serve.times.load import POLICIES, TimeTable, simulate_load, simulate_policies
from tests.eval.test_run import SETTING, make_evaluation


def test_a_queue_of_constant_service_keeps_its_formula() -> None:
    """M/D/1: the mean wait is rho D / (2 (1 - rho)). Answers of one token need the prompt's
    forward alone.
    """
    service = 0.5
    load = 0.6
    table = TimeTable({1: 1.0}, {1: 1.0}, {1: [1.0]}, service, [1])
    point = simulate_load(table, POLICIES["never"], load / service, num_requests=20_000)
    wait = load * service / (2 * (1 - load))
    assert point.seconds_per_token - service == pytest.approx(wait, rel=0.08)


def test_the_rate_at_which_to_stop_is_that_of_the_crossover() -> None:
    """Drafting doubles the speed of one text and halves that of eight: it pays when few requests
    come, and `measured` does at every rate about as well as the better policy."""
    table = TimeTable({1: 0.01, 8: 0.01}, {1: 0.01, 8: 0.04}, {1: [0.0, 1.0]}, 0.0, [41])
    assert table.pays(1) and not table.pays(8)
    result = simulate_policies(table, 15.0, num_requests=60)
    assert result["stop"]["kind"] == "crosses"
    never, always, measured = (
        np.array([point["seconds_per_token"] for point in result["policies"][name]])
        for name in ("never", "always", "measured")
    )
    assert always[0] < never[0] and never[-1] < always[-1]
    assert (measured <= 1.05 * np.minimum(never, always)).all()
    assert (
        result["policies"]["always"][-1]["goodput"] < result["policies"]["measured"][-1]["goodput"]
    )


def test_a_sweep_over_batches_has_the_load(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score's table has the schedule of a chain, and its page a table of the load."""
    monkeypatch.setattr(load, "LOADS", (0.5, 1.0))
    evaluation = make_evaluation(tmp_path, check=False, sweep="batch", batches=(1, 2))
    evaluation.check_prompts(shallow)
    folder = tmp_path / "run" / "eval" / "batch"
    summary = evaluation.score(
        Candidate(shallow, Ngram(shallow), Chain(3), Greedy(), SETTING), folder
    )
    entry = summary["axis"]["load"]
    assert entry["schedule"]["ranges"][0][0] == 1
    assert set(entry["table"]["step_seconds"]) == {1, 2}
    assert "Draft tokens by measured times: " in (folder / "axis.md").read_text()
    write_report(tmp_path / "report.html", [folder])
    assert (tmp_path / "report.html").read_text().count('class="axis stack"') == 2

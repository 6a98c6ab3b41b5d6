"""The rehearsal of a cluster: its settings compose and its table says what happened. The
rehearsal itself takes an hour.
"""

import json
import shlex
from pathlib import Path
from typing import get_args

import pytest

from lab.benchmarks.cluster_cases import CASES
from lab.benchmarks.machines import Machine
from lab.benchmarks.rehearse_cluster import RehearseCluster, largest_difference, markdown_table
from lab.benchmarks.rehearsed_run import SETTINGS, Cluster, Launcher, RunObserver
from spectrain.errors import UserError
from tests.docs.test_docs import check_command


def test_its_settings_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every launcher, the words after spectrain are a command."""
    cluster = Cluster([Machine(index) for index in range(4)], tmp_path, 40)
    for launcher in get_args(Launcher):
        words = cluster._launch_words(launcher, 4, 1)
        check_command(shlex.join(words[words.index("spectrain") + 1 :]), monkeypatch)
    with pytest.raises(UserError, match="numbered from 1 to"):
        RehearseCluster("out.json", only=(len(CASES) + 1,))
    assert "trainer.resume=auto" in SETTINGS


def test_losses_are_compared_by_step(tmp_path: Path) -> None:
    cluster = Cluster([], tmp_path, 3)
    cluster.run.mkdir(parents=True)
    cluster.metrics.write_text(
        "".join(
            json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in ((1, 2.0), (2, 1.0))
        )
    )
    assert cluster.losses() == {1: 2.0, 2: 1.0} and cluster.num_logged() == 2
    assert largest_difference(cluster.losses(), {1: 2.0, 2: 1.25, 3: 9.0}) == 0.2
    row = {
        "name": "one process is killed",
        "launcher": "torchrun",
        "exit_codes": [1, None],
        "resumed_on": 4,
        "largest_difference": 0.0,
        "failures": [],
        "message": "spectrain: rank 2 died",
        "message_seconds": 3.2,
        "seconds_until_end": 5.1,
        "pause_seconds": 21.0,
        "steps_repeated": 2,
    }
    table = markdown_table({"rows": [row]})
    cells = (
        "| one process is killed | torchrun | 1, - | the same command on 4 | 3 s | 5 s | 21 s "
        "| 2 | the same | nothing |"
    )
    assert cells in table
    assert table.endswith("- one process is killed (torchrun): `spectrain: rank 2 died`")


def test_only_messages_after_the_fault_count(tmp_path: Path) -> None:
    """What was printed while the training started says nothing about the fault. Steps that run
    again are counted.
    """
    cluster = Cluster([], tmp_path, 3)
    cluster.run.mkdir(parents=True)
    log = tmp_path / "machine0.log"
    line = "spectrain: training: rank {} died\n"
    log.write_text(line.format(3))
    cluster.metrics.write_text("{}\n" * 3)
    with RunObserver(cluster, r"rank \d died") as observer:
        # Looks of its thread would fall between these, and between two writes of a file.
        observer.stop_event.set()
        observer.thread.join()
        observer._look()
        assert observer.message is None
        log.write_text(line.format(3) + line.format(2))
        for steps in (2, 3, 4):
            cluster.metrics.write_text("{}\n" * steps)
            observer._look()
    assert observer.message == "spectrain: training: rank 2 died" and observer.num_repeated == 1

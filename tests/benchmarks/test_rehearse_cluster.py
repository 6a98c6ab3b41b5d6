"""The rehearsal of a cluster: its settings compose and its table says what happened. The rehearsal itself takes an hour."""

import json
import shlex
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.machines import Machine
from benchmarks.rehearse_cluster import CASES, SETTINGS, Cluster, Launcher, RehearseCluster, largest_difference, markdown_table
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
    cluster.run.mkdir()
    cluster.metrics.write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in ((1, 2.0), (2, 1.0))))
    assert cluster.losses() == {1: 2.0, 2: 1.0} and cluster.num_logged() == 2
    assert largest_difference(cluster.losses(), {1: 2.0, 2: 1.25, 3: 9.0}) == 0.2
    row = {"name": "one process is killed", "launcher": "torchrun", "exit_codes": [1, None], "resumed_on": 4, "steps": 40,
           "largest_difference": 0.0, "failures": [], "messages": ["spectrain: slow", "spectrain: rank 2 died"],
           "expected_message": "rank 2 died"}  # fmt: skip
    table = markdown_table({"rows": [row]})
    assert "| one process is killed | torchrun | 1, - | the same command on 4 | 40 | the same | nothing |" in table
    assert table.endswith("- one process is killed (torchrun): `spectrain: rank 2 died`")

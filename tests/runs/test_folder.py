"""Resuming a run: only under the settings that it began with."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.runs.train import check_resumable


def test_a_run_goes_on_under_its_own_settings_only(tmp_path: Path) -> None:
    """Another optimizer or schedule is refused; what changes nothing that is learned may change."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        specs = {words: RunSpec.from_config(compose("train", overrides=["recipe=eagle3", "target=tiny", *words]))
                 for words in [(), ("++trainer.log_every=3",), ("optimizer=muon",), ("schedule=wsd",)]}  # fmt: skip
    (tmp_path / "config.yaml").write_text(specs[()].to_yaml())
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    check_resumable(tmp_path, specs[()])
    check_resumable(tmp_path, specs["++trainer.log_every=3",])
    for words, message in (
        (("optimizer=muon",), "optimizer=muon: .*began with adamw"),
        (("schedule=wsd",), "schedule=wsd: .*cosine"),
    ):
        with pytest.raises(UserError, match=message):
            check_resumable(tmp_path, specs[words])

"""Going on with a run: under the settings that it began with, also where these had no name yet."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from spectrain.config.check import check_config
from spectrain.config.choices import by_choice_name
from spectrain.config.keys import TRAIN_KEYS
from spectrain.errors import UserError
from spectrain.runs.folder import check_resumable, to_container


def test_a_run_of_before_goes_on_with_adamw_and_a_cosine(tmp_path: Path) -> None:
    """Its settings name neither optimiser nor schedule, and are those of today's defaults; another choice is refused."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        made = {words: check_config(compose("train", overrides=["recipe=eagle3", "target=tiny", *words]), TRAIN_KEYS)
                for words in [(), ("optimizer=muon",), ("schedule=wsd",)]}  # fmt: skip
    before = {
        key: value for key, value in by_choice_name(to_container(made[()])).items() if key not in ("optimizer", "schedule")
    }
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(before)))
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    check_resumable(tmp_path, made[()])
    for words, said in (
        (("optimizer=muon",), "optimizer=muon: .*began with adamw"),
        (("schedule=wsd",), "schedule=wsd: .*cosine"),
    ):
        with pytest.raises(UserError, match=said):
            check_resumable(tmp_path, made[words])

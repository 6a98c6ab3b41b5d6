"""Going on with a run: under the settings that it began with, also where these had no name yet."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from spectrain.errors import UserError
from spectrain.runs.folder import plain, resumable
from spectrain.settings.check import check_config
from spectrain.settings.choices import named
from spectrain.settings.keys import TRAIN_KEYS


def test_a_run_of_before_goes_on_with_adamw_and_a_cosine(tmp_path: Path) -> None:
    """Its settings name neither optimiser nor schedule, and are those of today's defaults; another choice is refused."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        made = {words: check_config(compose("train", overrides=["recipe=eagle3", "target=tiny", *words]), TRAIN_KEYS)
                for words in [(), ("optimizer=muon",), ("schedule=wsd",)]}  # fmt: skip
    before = {key: value for key, value in named(plain(made[()])).items() if key not in ("optimizer", "schedule")}
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(before)))
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    resumable(tmp_path, made[()])
    for words, said in (
        (("optimizer=muon",), "optimizer=muon: .*began with adamw"),
        (("schedule=wsd",), "schedule=wsd: .*cosine"),
    ):
        with pytest.raises(UserError, match=said):
            resumable(tmp_path, made[words])

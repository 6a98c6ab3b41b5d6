"""What the package gives to the core: older names in saved files, and the list of its names."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.list_package_names import render_names
from spectrain.config.missing import NAMES
from spectrain.config.saved import parse_groups


def test_files_of_the_time_before_the_package_load() -> None:
    """When the ideas were a folder of spectrain, files could name their classes by that path."""
    old = "spectrain.experimental."
    saved = {
        "drafter": {"_target_": f"{old}hydra.drafter.Hydra", "num_heads": 2},
        "acceptance": {"_target_": f"{old}transport.rules.KSeq", "temperature": 0.7},
        "eval": {"_target_": f"{old}evaluation.ExperimentalEvaluation", "guard": True},
    }
    groups = parse_groups(saved, Path("config.yaml"))
    assert groups["drafter"] == {
        "_target_": "spectrain_research.hydra.drafter.Hydra",
        "num_heads": 2,
    }
    assert groups["acceptance"] == {
        "_target_": "spectrain_research.transport.rules.KSeq",
        "temperature": 0.7,
    }
    assert groups["eval"] == {"_target_": "spectrain.eval.default.DefaultEvaluation", "guard": True}


def test_a_setting_that_became_a_family_loads() -> None:
    groups = parse_groups(
        {"drafter": {"choice": "gated_lora", "noise": "transfer"}}, Path("config.yaml")
    )
    assert (
        groups["drafter"]["_target_"] == "spectrain_research.hidden_transfer.drafter.HiddenTransfer"
    )


def test_the_list_of_names_is_current() -> None:
    """`python -m scripts.list_package_names` writes it again."""
    assert NAMES.read_text() == render_names()


@pytest.mark.slow
def test_the_wheel_holds_code_choices_and_entry_points(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(folder),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "spectrain_research"
    }
    present = {
        path.relative_to(folder).as_posix()
        for path in (folder / "spectrain_research").rglob("*")
        if path.is_file()
    }
    assert {name for name in present if not name.endswith(".pyc")} <= {*names}
    assert any(name.endswith("entry_points.txt") for name in names)

"""What the layout and the wheel promise."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_linked_folders_are_folders() -> None:
    """Links that a checkout turned into text files would break imports: clone with core.symlinks=true."""
    assert all((ROOT / "spectrain" / name).is_dir() for name in ("conf", "eval", "kernels"))
    assert (ROOT / "conf" / "recipe").is_dir()


def test_kernels_never_shadows_the_hugging_face_package() -> None:
    """A regular package there would win over an installed `kernels` whenever the root is on sys.path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_wheel_holds_everything_and_nothing_else(tmp_path: Path) -> None:
    """The wheel, built by way of the sdist, ships code, configuration and data under one top-level name."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"spectrain"}
    wanted = ["conf/train.yaml", "conf/recipe/eagle3.yaml", "eval/run.py", "eval/page.html", "eval/results/goals.json",
              "kernels/tree_attention.py", "py.typed", "data/conversations.jsonl.gz",
              "data/heldout.jsonl", "data/tiny/model.safetensors"]  # fmt: skip
    for name in wanted:
        assert f"spectrain/{name}" in names, name

"""What the layout and the wheel promise."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_linked_folders_are_folders() -> None:
    """Links that a checkout turned into text files would break imports: clone with core.symlinks=true."""
    assert all((ROOT / "spectrain" / name).is_dir() for name in ("conf", "eval", "kernels"))
    assert (ROOT / "conf" / "recipe").is_dir()


def test_kernels_never_shadows_the_hugging_face_package() -> None:
    """A regular package there would win over an installed `kernels` whenever the root is on sys.path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def imports(path: Path) -> set[str]:
    """The spectrain modules that a file imports, absolute."""
    package = [*path.relative_to(ROOT).with_suffix("").parts[:-1]]
    package = package if package[0] == "spectrain" else ["spectrain", *package]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("spectrain")}


def sources(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if not any(part.is_symlink() for part in path.parents)]


SHARED = {"base", "layers", "vocabulary", "adapters", "selfdraft", "masks", "models", "__init__"}  # in drafters/, and no family


def test_imports_point_one_way() -> None:
    """kernels import one another alone; the library imports eval only where commands are wired; families are apart."""
    for path in sources("kernels"):
        assert all(name.startswith("spectrain.kernels.") for name in imports(path)), path
    wiring = {"cli.py", "throughput.py", "chat.py"}
    for path in sources("spectrain"):
        if path.name not in wiring:
            assert not any(name.startswith("spectrain.eval.") for name in imports(path)), path
    families = {path.stem for path in sources("spectrain/drafters")} - SHARED
    for family in families:
        others = {f"spectrain.drafters.{other}" for other in families - {family}}
        assert not others & imports(ROOT / "spectrain" / "drafters" / f"{family}.py"), family


@pytest.mark.parametrize("folder", ["spectrain/training", "spectrain/data"])
def test_training_knows_no_family(folder: str) -> None:
    """The trainer and the data never import a family or name one."""
    families = {path.stem for path in sources("spectrain/drafters")} - SHARED
    for path in sources(folder):
        assert not {f"spectrain.drafters.{family}" for family in families} & imports(path), path


def test_wheel_holds_everything_and_nothing_else(tmp_path: Path) -> None:
    """The wheel, built by way of the sdist, ships code, configuration and data under one top-level name."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"spectrain"}
    wanted = ["conf/train.yaml", "conf/recipe/eagle3.yaml", "eval/run.py", "eval/page.html", "eval/results/goals.json",
              "kernels/tree_attention.py", "py.typed", "cli/help.yaml", "cli/completion.bash", "data/conversations.jsonl.gz",
              "data/heldout.jsonl", "data/tiny/model.safetensors"]  # fmt: skip
    for name in wanted:
        assert f"spectrain/{name}" in names, name

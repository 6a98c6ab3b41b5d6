"""What the layout and the wheel promise."""

import ast
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.travelling_wheels import (
    MAX_BYTES,
    check_size,
    find_missing,
    find_requirements,
    is_pure,
    read_versions,
)
from tests.test_house import PACKAGES, code, room_of, tree

ROOT = Path(__file__).parents[1]
OURS = {"spectrain", *(Path(folder).name for folder in PACKAGES)}


def test_linked_folders_are_folders() -> None:
    """Links that a checkout turned into text files would break imports: clone with
    core.symlinks=true.
    """
    assert all((ROOT / "spectrain" / name).is_dir() for name in ("conf", "eval", "kernels"))
    assert (ROOT / "conf" / "recipe").is_dir()


def test_kernels_never_shadows_the_hugging_face_package() -> None:
    """A regular package there would win over an installed `kernels` whenever the root is on
    sys.path.
    """
    assert not (ROOT / "kernels" / "__init__.py").exists()


def read_declared(folder: Path) -> set[str]:
    """Return what the pyproject.toml of a folder requires, with its extras for users."""
    tomllib = pytest.importorskip("tomllib", reason="Python reads toml from 3.11 on")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = [
        names
        for extra, names in project.get("optional-dependencies", {}).items()
        if extra not in ("dev", "docs")
    ]
    return {
        canonicalize_name(Requirement(name).name)
        for names in (project["dependencies"], *extras)
        for name in names
    }


def test_every_import_is_declared() -> None:
    """What the code imports is a dependency or in an extra that users install, not merely there
    because something else is. A package has its own, beside those of the core.
    """
    core = read_declared(ROOT)
    declared_by = {
        Path(folder).name: core | read_declared((ROOT / folder).parent) for folder in PACKAGES
    }
    installed = packages_distributions()
    missing = set()
    # Plugins of servers run in the engine's environment.
    for path in (path for path in code() if path.parent.name != "plugins"):
        declared = declared_by.get(room_of(path), core)
        for node in ast.walk(tree(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                modules = [node.module]
            for name in (
                {module.split(".")[0] for module in modules} - sys.stdlib_module_names - OURS
            ):
                if not declared & set(map(canonicalize_name, installed.get(name, [name]))):
                    missing.add(name)
    assert not missing, f"add to pyproject.toml what ships {sorted(missing)}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_an_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own the command comes from the wheel alone; its dependencies, and
    the packages that add to it, are those of this environment.
    """
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    # With a PYTHONPATH pip would find the checkout installed.
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True, env=bare)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    added = [str((ROOT / folder).parent) for folder in PACKAGES]

    def run(*command: str) -> str:
        environment = {**bare, "PYTHONPATH": os.pathsep.join(added)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    where = run(str(python), "-c", "import spectrain; print(spectrain.__file__)")
    assert Path(where.strip()).is_relative_to(packages)
    spectrain = str(python.with_name("spectrain"))
    version = wheel.name.split("-")[1]
    assert version in run(spectrain, "--version")
    assert "eagle3" in run(spectrain, "recipes")


def test_wheel_holds_everything_and_nothing_else(wheel: Path) -> None:
    """It ships code, configuration and data under one top-level name."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"spectrain"}
    assert not [name for name in names if "lab/" in name or "embedded_prompts" in name]
    expected = [
        "conf/train.yaml",
        "conf/recipe/eagle3.yaml",
        "eval/run.py",
        "eval/page.html",
        "kernels/tree_attention.py",
        "py.typed",
        "cli/help.yaml",
        "cli/completion.bash",
        "data/conversations.jsonl.gz",
        "data/heldout.jsonl",
        "data/tiny/model.safetensors",
    ]
    for name in expected:
        assert f"spectrain/{name}" in names, name


def test_wheels_that_travel_are_pure_and_missing_there() -> None:
    """What spectrain needs is followed to what that needs; torch's own needs stay behind, and
    nothing else is forgotten.
    """
    requirements = find_requirements("spectrain", {})
    assert (
        {"rich", "transformers", "numpy", "mdurl"} <= set(requirements)
        and "torch" not in requirements
        and "sympy" not in requirements
    )
    assert is_pure(requirements["rich"]) and not is_pure(requirements["numpy"])
    assert read_versions("Typing_Extensions==4.1\n-e here\nrich==15.0") == {
        "typing-extensions": "4.1",
        "rich": "15.0",
    }


def test_wheels_travel_for_what_is_too_old_there(tmp_path: Path) -> None:
    """A machine that has everything, but transformers in an older release than spectrain supports,
    gets that wheel alone; an absent package travels too, and one that it needs in another version.
    """
    everything = {
        name: requirement.version
        for name, requirement in find_requirements("spectrain", {}).items()
    }
    assert not find_missing(everything)
    assert list(find_missing({**everything, "transformers": "5.17.0"})) == ["transformers"]
    assert list(find_missing({**everything, "transformers": "5.99.0"})) == ["transformers"]
    without = {name: everything[name] for name in everything if name != "transformers"}
    assert list(find_missing(without)) == ["transformers"]
    # What is too old is found, whoever asks for it.
    assert list(find_missing({**without, "tokenizers": "0.1"})) == ["tokenizers", "transformers"]
    (tmp_path / "large.whl").write_bytes(bytes(1))
    check_size(tmp_path)
    os.truncate(tmp_path / "large.whl", MAX_BYTES + 1)
    with pytest.raises(SystemExit, match="64 may travel"):
        check_size(tmp_path)

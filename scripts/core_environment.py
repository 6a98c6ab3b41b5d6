"""Make .venv-core: the environment of .venv without the packages of packages/, for `make
test-core`.

    python -m scripts.core_environment

It has a folder of links to everything that is installed in this environment, except what belongs to
these packages. So the core's tests run with the same versions, and nothing is downloaded.
"""

import os
import shutil
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-core"


def is_hidden(distribution: Distribution) -> bool:
    """Tell whether a distribution is one of packages/."""
    return distribution.metadata["Name"] in {
        f"spectrain-{folder.name}" for folder in (ROOT / "packages").iterdir()
    }


def list_hidden_names(site: Path) -> set[str]:
    """Return the names in site-packages that belong to the packages: their metadata, and what
    makes them importable.
    """
    names = set()
    for distribution in distributions(path=[str(site)]):
        if is_hidden(distribution):
            names |= {Path(str(file)).parts[0] for file in distribution.files or ()} - {".."}
    return names


def link_environment(site: Path, folder: Path) -> None:
    """Fill the folder of a fresh environment with links to everything in `site` but the
    packages.
    """
    hidden = list_hidden_names(site)
    for entry in site.iterdir():
        if (
            entry.name not in hidden
            and entry.name != "__pycache__"
            and not (folder / entry.name).exists()
        ):
            (folder / entry.name).symlink_to(entry)


def link_programs(programs: Path, folder: Path) -> None:
    """Link the compiled programs of this environment, such as linters; scripts would run with
    this environment's Python.
    """
    for program in programs.iterdir():
        if program.is_symlink() or not program.is_file() or (folder / program.name).exists():
            continue
        with program.open("rb") as file:
            is_script = file.read(2) == b"#!"
        if os.access(program, os.X_OK) and not is_script:
            (folder / program.name).symlink_to(program)


def main() -> None:
    """Make the environment."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = FOLDER / "lib" / version / "site-packages"
    link_environment(site, folder)
    link_programs(Path(sysconfig.get_path("scripts")), FOLDER / "bin")
    print(
        f"{os.path.relpath(FOLDER, ROOT)}: everything of this environment but "
        f"{', '.join(sorted(list_hidden_names(site)))}"
    )


if __name__ == "__main__":
    main()

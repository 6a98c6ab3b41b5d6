"""Which wheels must travel to a machine that has torch and no network: spectrain's needs, in pure
Python, at our versions.

python -m scripts.travelling_wheels [THERE] > wheels.txt      THERE is what `pip list
--format=freeze` prints on that machine python -m pip download --no-deps --only-binary=:all: -r
wheels.txt -d wheels python -m pip install --no-index --no-deps --target site wheels/*.whl
there; with PYTHONPATH=site

What is compiled and missing there is named on stderr: its wheels are of a platform and a Python
version.
"""

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# these bring what they need; a machine with a GPU has them
TORCH = {"torch", "triton", "setuptools"}


def find_requirements(
    package: str, requirements: dict[str, Distribution]
) -> dict[str, Distribution]:
    """Return by name all installed distributions that a package needs, itself left out."""
    for text in distribution(package).requires or []:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not is_needed or name in requirements or name in TORCH:
            continue
        try:
            requirements[name] = distribution(name)
        except PackageNotFoundError:
            continue  # not here either, so it works without
        find_requirements(name, requirements)
    return requirements


def is_pure(package: Distribution) -> bool:
    """Tell whether the package's wheel runs with any Python on any platform."""
    return "-none-any" in (package.read_text("WHEEL") or "")


def read_names(present: str) -> set[str]:
    """Return the names in what `pip list --format=freeze` prints."""
    return {canonicalize_name(line.split("==")[0]) for line in present.splitlines() if "==" in line}


def main() -> None:
    present = read_names(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else set()
    missing = {
        name: package
        for name, package in sorted(find_requirements("spectrain", {}).items())
        if name not in present
    }
    for name, package in missing.items():
        print(f"{name}=={package.version}", file=sys.stdout if is_pure(package) else sys.stderr)


if __name__ == "__main__":
    main()

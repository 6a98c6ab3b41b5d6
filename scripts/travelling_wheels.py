"""Which wheels must travel to a machine that has torch and no network: spectrain's needs, in pure Python, at our versions.

python -m scripts.travelling_wheels [THERE] > wheels.txt      THERE is what `pip list --format=freeze` prints on that machine
python -m pip download --no-deps --only-binary=:all: -r wheels.txt -d wheels
python -m pip install --no-index --no-deps --target site wheels/*.whl      there; with PYTHONPATH=site

What is compiled and missing there is named on stderr: its wheels are of a platform and a Python version.
"""

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TORCH = {"torch", "triton", "setuptools"}  # these bring what they need; a machine with a GPU has them


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """All installed distributions that one needs, itself left out, by their names."""
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        other = canonicalize_name(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not wanted or other in found or other in TORCH:
            continue
        try:
            found[other] = distribution(other)
        except PackageNotFoundError:
            continue  # not here either, so it works without
        needed(other, found)
    return found


def is_pure(one: Distribution) -> bool:
    """Whether its wheel runs with any Python on any platform."""
    return "-none-any" in (one.read_text("WHEEL") or "")


def listed(present: str) -> set[str]:
    """The names in what `pip list --format=freeze` prints."""
    return {canonicalize_name(line.split("==")[0]) for line in present.splitlines() if "==" in line}


def main() -> None:
    there = listed(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else set()
    missing = {name: one for name, one in sorted(needed("spectrain", {}).items()) if name not in there}
    for name, one in missing.items():
        print(f"{name}=={one.version}", file=sys.stdout if is_pure(one) else sys.stderr)


if __name__ == "__main__":
    main()

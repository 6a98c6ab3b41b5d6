"""Which wheels must travel to a machine that has torch and no network: what spectrain needs and the
machine lacks, or has in a version that spectrain does not support.

    python -m scripts.travelling_wheels [THERE [FOLDER [PYTHON]]]

THERE is what `pip list --format=freeze` prints on that machine. Names and our versions are printed;
what is compiled is named on stderr. With a FOLDER its wheels are brought there, for x86-64 Linux
and the PYTHON of that machine (3.12), and must be at most 64 MiB in all. Then, there:

    python -m pip install --no-index --no-deps --target site FOLDER/*.whl
    export PYTHONPATH=site
"""

import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

# these bring what they need; a machine with a GPU has them
TORCH = {"torch", "triton", "setuptools"}
MAX_BYTES = 64 << 20
# pip takes exactly these; no wheel of spectrain's needs asks for a newer one.
PLATFORMS = [
    f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")
]


def list_needs(package: str) -> list[Requirement]:
    """Return what an installed package needs here, its extras left out."""
    texts = distribution(package).requires or []
    requirements = map(Requirement, texts)
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def find_requirements(
    package: str, requirements: dict[str, Distribution]
) -> dict[str, Distribution]:
    """Return by name all installed distributions that a package needs, itself left out."""
    for requirement in list_needs(package):
        name = canonicalize_name(requirement.name)
        if name in requirements or name in TORCH:
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


def read_versions(present: str) -> dict[str, str]:
    """Return versions by name in what `pip list --format=freeze` prints."""
    lines = (line.split("==") for line in present.splitlines() if "==" in line)
    return {canonicalize_name(name): version.strip() for name, version in lines}


def find_missing(present: dict[str, str]) -> dict[str, Distribution]:
    """Return by name what must travel: what is absent there, and what is there in a version that
    spectrain, or another package that travels, does not take.
    """
    needed = find_requirements("spectrain", {})
    missing = {name: needed[name] for name in needed if name not in present}
    while True:
        specifiers: dict[str, SpecifierSet] = {}
        for package in ("spectrain", *missing):
            for requirement in list_needs(package):
                name = canonicalize_name(requirement.name)
                specifiers[name] = specifiers.get(name, SpecifierSet()) & requirement.specifier
        too_old = {
            name: needed[name]
            for name in needed.keys() & specifiers.keys() - missing.keys()
            if not specifiers[name].contains(present[name], prereleases=True)
        }
        if not too_old:
            return dict(sorted(missing.items()))
        missing |= too_old


def bring_wheels(missing: dict[str, Distribution], folder: Path, python: str) -> None:
    """Write the wheels into a folder; one of pure Python is built where the index has none."""
    pip = [sys.executable, "-m", "pip"]
    abi = f"cp{python.replace('.', '')}"
    others = [f"--platform={name}" for name in PLATFORMS]
    others += [f"--python-version={python}", f"--abi={abi}", "--abi=abi3", "--abi=none"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, package in missing.items():
        version = f"{name}=={package.version}"
        command = (
            ["wheel", "--no-deps", f"--wheel-dir={folder}", version]
            if is_pure(package)
            else ["download", "--no-deps", "--only-binary=:all:", *others, f"--dest={folder}"]
            + [version]
        )
        subprocess.run([*pip, "--quiet", *command], check=True)
    check_size(folder)


def check_size(folder: Path) -> None:
    """Refuse wheels that are too large to travel."""
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size > MAX_BYTES:
        sys.exit(
            f"travelling_wheels: {folder} holds {size / 2**20:.0f} MiB, and 64 may travel; list "
            "what the other machine has in THERE"
        )


def main() -> None:
    there = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else ""
    missing = find_missing(read_versions(there))
    for name, package in missing.items():
        print(f"{name}=={package.version}", file=sys.stdout if is_pure(package) else sys.stderr)
    if len(sys.argv) > 2:
        bring_wheels(missing, Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "3.12")


if __name__ == "__main__":
    main()

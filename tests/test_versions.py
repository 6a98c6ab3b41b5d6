"""The bounds of dependencies: they allow what is tested, and each can be installed at its lower
bound.
"""

from packaging.version import Version

from scripts.check_versions import (
    PACKAGES,
    lower_bound,
    make_pins,
    read_all_requirements,
    read_pins,
    read_requirements,
)


def test_bounds_allow_the_tested_versions() -> None:
    pins = read_pins()
    requirements = read_requirements()
    assert {"torch", "transformers", "datasets", "aiohttp"} <= {
        requirement.name for requirement in requirements
    }
    for requirement in requirements:
        assert requirement.name not in pins or pins[requirement.name] in requirement.specifier, (
            requirement
        )


def test_an_api_that_moved_has_an_upper_bound() -> None:
    """transformers 5.24 renamed an argument that release 5.40 drops: a release that nobody
    tested is not installed.
    """
    bounds = {requirement.name: requirement.specifier for requirement in read_requirements()}
    assert (
        not any(version in bounds["transformers"] for version in ("5.20.2", "5.40.0"))
        and "5.24.0" in bounds["transformers"]
    )
    assert "3.0" not in bounds["torch"]


def test_the_oldest_environment_has_the_lower_bounds() -> None:
    pins = dict(pin.split("==") for pin in make_pins("oldest", "2.13.0"))
    assert pins["torch"] == "2.13.0" and "triton" not in pins
    for requirement in read_requirements():
        if requirement.name not in ("torch", "triton"):
            assert Version(pins[requirement.name]) == Version(lower_bound(requirement.specifier))
    assert make_pins("newest", "2.13.0") == ["torch==2.13.0"]


def test_the_packages_that_a_package_requires_are_installed_with_it() -> None:
    """No index has them, so a wheel that is not built here ends the check before its first test."""
    required = {requirement.name for requirement in read_all_requirements()}
    built = {"spectrain", *(f"spectrain-{folder.name}" for folder in PACKAGES)}
    assert {name for name in required if name.startswith("spectrain")} <= built

"""The version of this package, which needs no other package."""

from importlib.metadata import PackageNotFoundError, version


def read_version() -> str:
    """Return the version of spectrain."""
    try:
        return version("spectrain")
    except PackageNotFoundError:
        return "unknown (not installed)"

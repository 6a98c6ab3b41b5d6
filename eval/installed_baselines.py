"""Drafters that need no training and that installed packages add to the comparisons."""

from dataclasses import dataclass

from spectrain.config.installed import load_entry_points


@dataclass(frozen=True)
class InstalledBaseline:
    """A drafter that needs no training and that an installed package adds to the comparisons.

    Tuples of these have entry points in the group `spectrain.baselines`.
    """

    # The choice of `drafter`.
    name: str
    # Whether `eval.baselines` may name it: it then drafts a tree of the candidate's size.
    is_baseline: bool = False
    # Whether `compare` scores it next to the recipes.
    is_compared: bool = False


def list_installed_baselines() -> list[InstalledBaseline]:
    """Return the drafters that installed packages add."""
    return [baseline for baselines in load_entry_points("baselines") for baseline in baselines]

"""Trained drafters that ship with the package, each for one target."""

from spectrain.config.build import GroupSpec
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.target import Target

from .drafter_files import load_description, load_weights
from .paths import SHIPPED_FOLDER

# Target name -> drafter.
SHIPPED_BY_TARGET = {"smollm2-135m-q4_1": "smollm2-eagle3"}


def find_shipped_drafter(target: Target) -> str | None:
    """Return the name of the drafter that ships for a target, or None."""
    return SHIPPED_BY_TARGET.get(target.name)


def smollm2_eagle3(target: Target) -> Drafter:
    """Load EAGLE-3 for SmolLM2-135M-Instruct; its config.json records its training."""
    return load_shipped_drafter("smollm2-eagle3", target)


def is_shipped(drafter: GroupSpec) -> bool:
    """Tell whether a drafter's settings name a drafter that ships with the package."""
    return (SHIPPED_FOLDER / str(drafter.choice)).is_dir()


def load_shipped_drafter(name: str, target: Target) -> Drafter:
    """Load a shipped drafter with its weights; raise a UserError if they do not fit the target."""
    description = load_description(SHIPPED_FOLDER / name, None)
    family = GroupSpec.from_node("drafter", description["drafter"])
    drafter: Drafter = family.build(target=target)
    try:
        load_weights(drafter, SHIPPED_FOLDER / name, target)
    except UserError as error:
        trained_for = GroupSpec.from_node("target", description["target"]).choice
        raise UserError(
            f"drafter={name}: it is for target={trained_for}, and {target.name} is another model; train one for it, as in "
            f"spectrain train recipe={family.choice}"
        ) from error
    return drafter

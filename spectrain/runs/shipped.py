"""Drafters that come with the package, trained and ready for the target that each was trained for."""

from collections.abc import Mapping
from typing import Any

from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.settings.build import build
from spectrain.settings.choices import choice

from .drafter_files import load_weights, saved_description
from .places import SHIPPED

NAMES = {"smollm2-135m-q4_1": "smollm2-eagle3"}  # by the name of the target


def shipped_for(target: Target) -> str | None:
    """The drafter that comes for a target."""
    return NAMES.get(target.name)


def smollm2_eagle3(target: Target) -> Drafter:
    """EAGLE-3 for SmolLM2-135M-Instruct; its config.json says what its training took."""
    return shipped("smollm2-eagle3", target)


def is_shipped(node: Mapping[str, Any]) -> bool:
    """Whether a drafter's settings name one of them."""
    return (SHIPPED / choice("drafter", node)).is_dir()


def shipped(name: str, target: Target) -> Drafter:
    """The drafter of this name, with its weights; refuses a target that these do not fit."""
    description = saved_description(SHIPPED / name, None)
    drafter: Drafter = build(description["drafter"], target=target)
    try:
        load_weights(drafter, SHIPPED / name, target)
    except UserError as error:
        wanted, family = choice("target", description["target"]), choice("drafter", description["drafter"])
        raise UserError(
            f"drafter={name}: it is for target={wanted}, and {target.name} is another model; train one for it, as in "
            f"spectrain train recipe={family}"
        ) from error
    return drafter

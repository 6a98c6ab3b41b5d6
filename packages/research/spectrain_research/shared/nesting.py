"""Drafters inside other drafters, which several ideas use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectrain.drafters.base import Drafter
from spectrain.drafters.layers.inner_drafters import build_inner
from spectrain.errors import UserError
from spectrain.models.features import Layer
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder, WrappedBuilder


def build_nestable(
    choice: str | dict[str, Any], key: str, target: Target
) -> tuple[Drafter, dict[str, Any]]:
    """Build an inner drafter as `build_inner`; raise `UserError` for one that another drafter
    cannot contain.
    """
    drafter, description = build_inner(choice, key, target)
    if not drafter.capabilities.nestable:
        raise UserError(
            f"drafter.{key}={description['choice']}: it runs the target, verifies its own drafts "
            "or adds nodes to the tree, so no other drafter can contain it; use another one, "
            "such as causal, eagle3 or ngram"
        )
    return drafter, description


def build_several(
    inner: list[Any] | None, target: Target, purpose: str
) -> list[tuple[Drafter, dict[str, Any]]]:
    """Build the drafters that `drafter.inner` lists, ngram and causal if it is null, with their
    descriptions.

    Raise `UserError` for fewer than two; `purpose` says what several are for, as in "choose from".
    """
    settings = ["ngram", "causal"] if inner is None else inner
    if len(settings) < 2:
        raise UserError(
            f"drafter.inner: name two drafters or more to {purpose}, as in "
            "drafter.inner=[ngram,runs/NAME]"
        )
    return [build_nestable(setting, "inner", target) for setting in settings]


def union_layers(drafters: Sequence[Drafter]) -> tuple[Layer, ...]:
    """Return the layers that any of these drafters reads, in order."""
    layers = {layer for drafter in drafters for layer in drafter.layers}
    return (
        *sorted(layer for layer in layers if isinstance(layer, int)),
        *(("final",) if "final" in layers else ()),
    )


class LargerBuilder(WrappedBuilder):
    """A builder with room for guesses, which a rollout receives in addition to the builder's
    nodes.
    """

    def __init__(self, builder: TreeBuilder, ahead: int) -> None:
        super().__init__(builder)
        self.max_drafted = (builder.max_drafted + 1) * (1 + ahead)

"""The layouts in which engines read a drafter, and the launches of engines with it."""

from __future__ import annotations

from spectrain.config.spec import RunSpec
from spectrain.drafters.base import Drafter
from spectrain.servers.commands import EngineLaunch
from spectrain.servers.engines import ENGINES

from .card import make_launches
from .layout import DrafterCheckpoint, Layout
from .layouts import LAYOUTS, load_layout
from .targets import TargetFiles


def find_engine_layout(
    checkpoint: DrafterCheckpoint, target: TargetFiles, engine: str
) -> Layout | None:
    """Return the layout in which an engine reads a drafter, that of the engine's own format
    first; None if it reads none.
    """
    rows = [row for row in LAYOUTS if checkpoint.family in row.families.split()]
    rows.sort(key=lambda row: engine not in row.formats.split())
    layouts = map(load_layout, rows)
    return next(
        (layout for layout in layouts if engine in layout.drafter_launches(checkpoint, target, "")),
        None,
    )


def describe_launches(spec: RunSpec, drafter: Drafter, folder: str) -> dict[str, EngineLaunch]:
    """Return, by engine, its launch with a recipe's drafter, which exists without weights, in a
    folder that is to be.
    """
    target = TargetFiles.from_settings(spec.target.node, with_weights=False)
    settings = {**spec.drafter.with_defaults(), **drafter.saved.settings}
    checkpoint = DrafterCheckpoint(str(spec.drafter.choice), settings, dict(drafter.state_dict()))
    layouts = {name: find_engine_layout(checkpoint, target, name) for name in ENGINES}
    return {
        name: make_launches(checkpoint, layout, target, folder)[name]
        for name, layout in layouts.items()
        if layout is not None
    }

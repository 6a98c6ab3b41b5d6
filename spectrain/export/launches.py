"""The layout in which an engine reads a drafter, and the launches of engines with it."""

from __future__ import annotations

from spectrain.servers.commands import EngineLaunch

from .layout import DrafterCheckpoint, Layout
from .layouts import LAYOUTS, load_layout
from .targets import TargetFiles


def find_engine_layout(
    checkpoint: DrafterCheckpoint, target: TargetFiles, engine: str
) -> Layout | None:
    """Return the layout in which an engine reads a drafter, that of the engine's own format
    first; None if it reads none.
    """
    rows = [row for row in LAYOUTS if checkpoint.family in row.families]
    rows.sort(key=lambda row: engine not in row.formats)
    layouts = map(load_layout, rows)
    return next(
        (layout for layout in layouts if engine in layout.drafter_launches(checkpoint, target, "")),
        None,
    )


def make_launches(
    drafter: DrafterCheckpoint, layout: Layout, target: TargetFiles, path: str
) -> dict[str, EngineLaunch]:
    """Return, by engine, its launch with the drafter in the folder `path`."""
    target_path = engine_target(drafter, layout, target, path)
    launches = layout.drafter_launches(drafter, target, path)
    return {name: EngineLaunch(target_path, drafter=launch) for name, launch in launches.items()}


def engine_target(
    drafter: DrafterCheckpoint, layout: Layout, target: TargetFiles, drafter_path: str
) -> str:
    """Return the path of the target that an engine loads: the export itself, the target that was
    trained, or the target.
    """
    if layout.holds_target:
        return drafter_path
    return (
        f"{drafter_path}/target"
        if drafter.trained_target is not None and not drafter.is_target
        else target.engine_path
    )

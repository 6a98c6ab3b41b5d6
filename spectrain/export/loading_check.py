"""The last check of a drafter's files: they are read as eval reads them, and its drafter is
built without weights.
"""

from __future__ import annotations

from spectrain.config.build import GroupSpec
from spectrain.config.check import check_node
from spectrain.errors import UserError
from spectrain.training.checkpoints import find_mismatches

from .drafter_files import METADATA_FILE, DrafterFiles
from .fused_config import build_meta_drafter
from .layout import DrafterCheckpoint, Layout, MissingTarget
from .targets import TargetFiles


def check_settings(files: DrafterFiles, drafter: DrafterCheckpoint) -> None:
    """Raise a UserError where eval would refuse the settings of a drafter, of its tree or of its
    acceptance rule, and where spectrain.json holds another value of a setting than the layout's own
    files."""
    for key, value in files.read_metadata().drafter.items():
        current = drafter.drafter.get(key, value)
        if (type(value), value) != (type(current), current):
            raise UserError(
                f"{files.directory / METADATA_FILE}: drafter.{key}={str(value)[:100]}, and the "
                f"other files have {current}; leave it out"
            )
    check_node("drafter", drafter.spec.node)
    for group in ("tree", "acceptance"):
        GroupSpec.from_node(group, drafter.description.get(group)).build()


def check_loading(files: DrafterFiles, layout: Layout, target: TargetFiles | None) -> None:
    """Raise a UserError, or whatever settings of a wrong type raise, where eval would refuse a
    drafter's files.

    Without a `target`, it is the one that the files name. What depends on a target that is not on
    this machine is left to eval.
    """
    metadata = files.read_metadata()
    target = target or find_local_target(metadata.target)
    try:
        drafter = layout.read(files, target)
    except MissingTarget:
        return
    check_settings(files, drafter)
    target = target or find_local_target(drafter.target)
    if target is None or drafter.is_target or layout.holds_target or layout.builds_drafter:
        return
    module = build_meta_drafter(drafter.spec, target.build_meta_target())
    names = {there: name for name, (_, there) in module.saved.layout.items()}
    tensors = {names.get(name, name): tensor for name, tensor in drafter.tensors.items()}
    for _, fault in find_mismatches(module, tensors):
        raise UserError(
            f"it does not fit the drafter that config.json describes: {fault}; copy the files again"
        )


def find_local_target(reference: str | None) -> TargetFiles | None:
    """Return the files of a target that is on this machine; None for any other."""
    target = None if reference is None else TargetFiles(reference, may_download=False)
    return target if target is not None and target.is_local else None

"""The commands `spectrain export`, `convert` and `lint`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from spectrain.errors import RunError, UserError
from spectrain.export.card import render_card
from spectrain.export.converter import convert, read_drafter, refuse_nonempty, write_drafter
from spectrain.export.hub import push
from spectrain.export.layout import DrafterCheckpoint, DrafterFiles
from spectrain.export.layouts import detect_layout, select_layout
from spectrain.export.linter import check_files, lint
from spectrain.export.targets import TargetFiles
from spectrain.files import atomic_write
from spectrain.runs.paths import find_drafter_directory, require_drafter_directory


def export_command(config: Any) -> Path:
    """Write the drafter of a run for an engine, with a model card; with `push`, upload it too."""
    for key in ("run", "format", "out"):
        if config.get(key) is None:
            raise UserError(f"{key}: it must be given, as in spectrain export run=runs/NAME format=vllm out=DIR")
    run, out = Path(str(config.run)), Path(str(config.out))
    directory = require_drafter_directory("run", run)
    requested = requested_target(config)
    drafter = read_drafter(directory, requested)
    layout = select_layout(drafter.family, config.format)
    target = requested or resolve_target(drafter)
    refuse_nonempty(out)
    with atomic_write(out, folder=True) as scratch:
        write_drafter(drafter, layout, target, scratch)
        if drafter.trained_target is not None and not drafter.is_target:
            shutil.copytree(drafter.trained_target, scratch / "target")
        if not (drafter.is_target or layout.holds_target):
            files = DrafterFiles.from_directory(scratch)
            for finding in check_files(files, detect_layout(files), target):
                if finding.level == "error":
                    raise RunError(
                        f"run={run}: what was written would not serve: {finding.problem} ({finding.name}); {finding.remedy}"
                    )
        location = config.get("push") or str(out)
        (scratch / "README.md").write_text(render_card(drafter, layout, target, location, run))
    print(f"{layout.title}: written to {out}; README.md says how to serve it")
    if config.get("push"):
        print(f"uploaded to {push(out, config.push, config.get('private', True))}")
    return out


def resolve_target(drafter: DrafterCheckpoint) -> TargetFiles:
    """Return the target that a drafter's own files name: the trained one, if there is one."""
    if drafter.trained_target is not None:
        return TargetFiles(str(drafter.trained_target))
    settings = drafter.description.get("target")
    if settings:
        return TargetFiles.from_settings(settings)
    if drafter.target is None:
        raise UserError("target: the drafter's files do not say which target it is for; say it, as in target=tiny")
    return TargetFiles(drafter.target)


def convert_command(config: Any) -> None:
    """Write the drafter of a run, or of any directory, in the layout that config.format names."""
    for key in ("run", "out", "format"):
        if config.get(key) is None:
            raise UserError(f"{key}: it must be given, as in spectrain convert IN OUT --to vllm, or run=IN out=OUT format=vllm")
    out = convert(resolve_directory(config.run), Path(str(config.out)), str(config.format), requested_target(config))
    print(f"{detect_layout(DrafterFiles.from_directory(out)).title}: written to {out}")


def lint_command(config: Any) -> None:
    """Print what is wrong with a drafter's files; raise a RunError (exit status 1) if there is an error."""
    if config.run is None:
        raise UserError("run: say which drafter, as in spectrain lint DIR, or run=DIR")
    directory = resolve_directory(config.run)
    results = lint(directory, requested_target(config))
    console = Console(highlight=False, soft_wrap=True)
    for finding in results:
        console.print(f"{finding.level} {finding.name}: {finding.problem}", markup=False)
        console.print(f"    why: {finding.consequence}", markup=False)
        console.print(f"    mend: {finding.remedy}", markup=False)
    errors = sum(finding.level == "error" for finding in results)
    title = detect_layout(DrafterFiles.from_directory(directory)).title
    if errors:
        raise RunError(f"{directory} ({title}): {errors} errors, {len(results) - errors} warnings")
    print(f"{directory} ({title}): no error, {len(results)} warnings")


def resolve_directory(run: Any) -> Path:
    """Return the drafter directory of a run folder; any other folder is returned unchanged, and reading it reports what it
    lacks."""
    return find_drafter_directory(Path(str(run))) or Path(str(run))


def requested_target(config: Any) -> TargetFiles | None:
    """Return the target that the command names, or None."""
    settings: Any = OmegaConf.to_container(config.target) if config.get("target") else None
    return TargetFiles.from_settings(settings) if settings else None

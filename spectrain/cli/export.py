"""What `spectrain export`, `convert` and `lint` do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from spectrain.errors import RunError, UserError
from spectrain.export.card import card
from spectrain.export.converter import convert, read_drafter, refuse_full, write_drafter
from spectrain.export.hub import push
from spectrain.export.layout import Files, Portable
from spectrain.export.layouts import detect, layout_for
from spectrain.export.linter import check, lint
from spectrain.export.targets import TargetFiles
from spectrain.files import written
from spectrain.runs.places import drafter_directory, existing_drafter


def export(config: Any) -> Path:
    """Write the drafter of a run for an engine, with a model card; with `push`, upload it too."""
    for key in ("run", "format", "out"):
        if config.get(key) is None:
            raise UserError(f"{key}: it must be given, as in spectrain export run=runs/NAME format=vllm out=DIR")
    run, out = Path(str(config.run)), Path(str(config.out))
    directory = existing_drafter("run", run)
    asked = asked_target(config)
    drafter = read_drafter(directory, asked)
    layout = layout_for(drafter.family, config.format)
    target = asked or named_target(drafter)
    refuse_full(out)
    with written(out, folder=True) as scratch:
        write_drafter(drafter, layout, target, scratch)
        if drafter.trained_target is not None and not drafter.is_target:
            shutil.copytree(drafter.trained_target, scratch / "target")
        if not (drafter.is_target or layout.holds_target):
            files = Files.read(scratch)
            for finding in check(files, detect(files), target):
                if finding.level == "error":
                    raise RunError(
                        f"run={run}: what was written would not serve: {finding.what} ({finding.name}); {finding.mend}"
                    )
        place = config.get("push") or str(out)
        (scratch / "README.md").write_text(card(drafter, layout, target, place, run))
    print(f"{layout.title}: written to {out}; README.md says how to serve it")
    if config.get("push"):
        print(f"uploaded to {push(out, config.push, config.get('private', True))}")
    return out


def named_target(drafter: Portable) -> TargetFiles:
    """The target that a drafter's own files name: the trained one, where there is one."""
    if drafter.trained_target is not None:
        return TargetFiles(str(drafter.trained_target))
    settings = drafter.description.get("target")
    if settings:
        return TargetFiles.of(settings)
    if drafter.target is None:
        raise UserError("target: the drafter's files do not say which target it is for; say it, as in target=tiny")
    return TargetFiles(drafter.target)


def convert_command(config: Any) -> None:
    """Write the drafter of a run, or of any directory, in the layout that config.format names."""
    for key in ("run", "out", "format"):
        if config.get(key) is None:
            raise UserError(f"{key}: it must be given, as in spectrain convert IN OUT --to vllm, or run=IN out=OUT format=vllm")
    out = convert(drafter_files(config.run), Path(str(config.out)), str(config.format), asked_target(config))
    print(f"{detect(Files.read(out)).title}: written to {out}")


def lint_command(config: Any) -> None:
    """Tell what is wrong with a drafter's files; a RunError, so exit status 1, where there is an error."""
    if config.run is None:
        raise UserError("run: say which drafter, as in spectrain lint DIR, or run=DIR")
    directory = drafter_files(config.run)
    found = lint(directory, asked_target(config))
    console = Console(highlight=False, soft_wrap=True)
    for finding in found:
        console.print(f"{finding.level} {finding.name}: {finding.what}", markup=False)
        console.print(f"    why: {finding.why}", markup=False)
        console.print(f"    mend: {finding.mend}", markup=False)
    errors = sum(finding.level == "error" for finding in found)
    title = detect(Files.read(directory)).title
    if errors:
        raise RunError(f"{directory} ({title}): {errors} errors, {len(found) - errors} warnings")
    print(f"{directory} ({title}): no error, {len(found)} warnings")


def drafter_files(run: Any) -> Path:
    """The drafter directory of a run folder; any other folder is one itself, or is told what it lacks when it is read."""
    return drafter_directory(Path(str(run))) or Path(str(run))


def asked_target(config: Any) -> TargetFiles | None:
    """The target that the command names, if it names one."""
    settings: Any = OmegaConf.to_container(config.target) if config.get("target") else None
    return TargetFiles.of(settings) if settings else None

"""What `spectrain export`, `convert` and `lint` do."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf
from rich.console import Console

from spectrain.errors import RunError, UserError
from spectrain.export.card import card
from spectrain.export.converter import convert, read_drafter, refuse_full, write_drafter
from spectrain.export.hub import push
from spectrain.export.layout import Files, Portable
from spectrain.export.layouts import FORMATS, detect, layout_for
from spectrain.export.linter import check, lint
from spectrain.export.targets import TargetFiles
from spectrain.files import written
from spectrain.settings.choices import look_in
from spectrain.settings.schema import conf_folders


def export(config: Any) -> Path:
    """Write the drafter of a run for an engine, with a model card; with `push`, upload it too."""
    from spectrain.runs.run import drafter_directory

    for key in ("run", "format", "out"):
        if config.get(key) is None:
            raise UserError(f"{key}: it must be given, as in spectrain export run=runs/NAME format=vllm out=DIR")
    run, out = Path(config.run), Path(config.out)
    directory = drafter_directory(run)
    if directory is None:
        raise UserError(f"run={run}: there is no drafter in it; give a run folder or a drafter directory")
    settings: Any = OmegaConf.to_container(config.target) if config.get("target") else None
    asked = TargetFiles.of(settings) if settings else None
    drafter = read_drafter(directory, asked)
    layout = layout_for(drafter.family, config.format)
    target = asked or named_target(drafter)
    refuse_full(out)
    with written(out, folder=True) as scratch:
        write_drafter(drafter, layout, target, scratch)
        if drafter.trained_target is not None and drafter.family != "EarlyExit":
            shutil.copytree(drafter.trained_target, scratch / "target")
        if drafter.family != "EarlyExit":
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


class Arguments(argparse.ArgumentParser):
    """A parser that leaves by UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog.removeprefix('spectrain ')}: {message}; {self.usage}")


def convert_command(words: list[str]) -> None:
    """`spectrain convert IN OUT --to FORMAT [--target T]`"""
    parser = Arguments("spectrain convert", usage="spectrain convert IN OUT --to FORMAT [--target TARGET]")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--to", required=True, help=", ".join(FORMATS))
    parser.add_argument("--target", help="tiny, smollm2, a directory or a name on the hub")
    parser.add_argument("--config-dir", type=Path, help="a folder of choices outside the project")
    asked = parser.parse_args(words)
    look_in(conf_folders(words))
    target = None if asked.target is None else TargetFiles(asked.target)
    out = convert(asked.source, asked.out, asked.to, target)
    print(f"{detect(Files.read(out)).title}: written to {out}")


def lint_command(words: list[str]) -> None:
    """`spectrain lint DIR [--target T]`; a RunError, so exit status 1, where there is an error."""
    parser = Arguments("spectrain lint", usage="spectrain lint DIR [--target TARGET]")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", help="tiny, smollm2, a directory or a name on the hub")
    parser.add_argument("--config-dir", type=Path, help="a folder of choices outside the project")
    asked = parser.parse_args(words)
    look_in(conf_folders(words))
    found = lint(asked.directory, None if asked.target is None else TargetFiles(asked.target))
    console = Console(highlight=False, soft_wrap=True)
    for finding in found:
        console.print(f"{finding.level} {finding.name}: {finding.what}", markup=False)
        console.print(f"    why: {finding.why}", markup=False)
        console.print(f"    mend: {finding.mend}", markup=False)
    errors = sum(finding.level == "error" for finding in found)
    title = detect(Files.read(asked.directory)).title
    if errors:
        raise RunError(f"{asked.directory} ({title}): {errors} errors, {len(found) - errors} warnings")
    print(f"{asked.directory} ({title}): no error, {len(found)} warnings")

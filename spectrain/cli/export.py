"""The commands `spectrain export`, `convert` and `lint`."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.errors import RunError, UserError
from spectrain.export.card import render_card
from spectrain.export.converter import (
    convert,
    read_drafter,
    refuse_nonempty,
    resolve_target,
    write_checked,
)
from spectrain.export.engine_support import describe_readers
from spectrain.export.hub import push as upload
from spectrain.export.layouts import detect_layout, read_files, select_layout
from spectrain.export.linter import UNREADABLE, lint_files
from spectrain.export.targets import TargetFiles
from spectrain.files import atomic_write
from spectrain.output.console import make_console
from spectrain.output.verbosity import print_json
from spectrain.runs.folder import find_drafter_directory, require_drafter_directory
from spectrain.servers.openvino_ir import IR_NAME, IrConverter

TARGET_FORMATS = {"gguf": "GGUF", "openvino": "OpenVINO"}
"""Formats in which a target can be written, and their titles."""


def export_command(
    run: str | None,
    format: str | None,
    out: str | None,
    *,
    push: str | None = None,
    private: bool = True,
    target: GroupSpec | None = None,
    dtype: str | None = None,
    engine_python: str | None = None,
) -> Path:
    """Write the drafter of a run for an engine, with a model card; with `push`, a repository's
    name, upload it too.

    Without a run, write the target itself, which the formats of `TARGET_FORMATS` can.
    """
    if run is None and format in TARGET_FORMATS and target is not None:
        require_keys(f"spectrain export target=tiny format={format} out=DIR", out=out)
        return export_target(
            TargetFiles.from_settings(target.node), str(out), dtype, str(format), engine_python
        )
    require_keys(
        "spectrain export run=runs/NAME format=vllm out=DIR", run=run, format=format, out=out
    )
    folder = Path(str(out))
    refuse_nonempty(folder)
    requested = requested_target(target)
    drafter = read_drafter(require_drafter_directory("run", str(run)), requested)
    layout = select_layout(drafter.family, str(format), dtype)
    layout = layout if engine_python is None else layout.with_engine(engine_python)
    files_of_target = requested or resolve_target(drafter)
    with atomic_write(folder, folder=True, is_new=True) as scratch:
        write_checked(drafter, layout, files_of_target, scratch)
        if drafter.trained_target is not None and not drafter.is_target:
            refuse_links(drafter.trained_target)
            shutil.copytree(drafter.trained_target, scratch / "target")
        (scratch / "README.md").write_text(
            render_card(drafter, layout, files_of_target, push or str(folder), Path(str(run)))
        )
    readers = describe_readers(layout)
    read_by = f" (read by {readers})" if readers else ""
    print(f"{layout.title}{read_by}: written to {folder}; README.md says how to serve it")
    if push:
        print(f"uploaded to {upload(folder, push, private)}")
    return folder


def write_card(directory: Path, name: str, run: Path) -> None:
    """Write the model card README.md of a drafter directory that the hub gets as `name`; its
    numbers are those of the run's evaluations."""
    drafter = read_drafter(directory)
    card = render_card(
        drafter, detect_layout(read_files(directory)), resolve_target(drafter), name, run
    )
    (directory / "README.md").write_text(card)


def refuse_links(folder: Path) -> None:
    """Raise a UserError for a link in a folder that is copied: it may lead to any file of this
    user.
    """
    link = next((path for path in (folder, *folder.rglob("*")) if path.is_symlink()), None)
    if link is not None:
        raise UserError(f"{link}: this is a link, and only files are exported; put the file there")


def export_target(
    target: TargetFiles,
    out: str,
    dtype: str | None,
    format_name: str = "gguf",
    engine_python: str | None = None,
) -> Path:
    """Write a target in an engine's format into a new folder; return the folder."""
    folder = Path(out)
    refuse_nonempty(folder)
    with atomic_write(folder, folder=True, is_new=True) as scratch:
        if format_name == "gguf":
            from spectrain.export.gguf_model import write_target

            name = write_target(target, scratch, dtype).name
        else:
            IrConverter(engine_python, dtype or "float32").convert(target.engine_path, scratch)
            name = f"{IR_NAME}.xml"
    print(f"{target.name}, {TARGET_FORMATS[format_name]}: written to {folder / name}")
    return folder


def require_keys(example: str, **settings: Any) -> None:
    """Raise a UserError for the first of these settings that has no value."""
    for key, value in settings.items():
        if value is None:
            raise UserError(f"{key}: it must be given, as in {example}")


def convert_command(
    run: str | None,
    format: str | None,
    out: str | None,
    target: GroupSpec | None = None,
    dtype: str | None = None,
) -> None:
    """Write the drafter of a run, or of any directory, in the layout that `format` names."""
    require_keys(
        "spectrain convert IN OUT --to vllm, or run=IN out=OUT format=vllm",
        run=run,
        out=out,
        format=format,
    )
    folder = convert(
        resolve_directory(run), Path(str(out)), str(format), requested_target(target), dtype
    )
    print(f"{detect_layout(read_files(folder)).title}: written to {folder}")


def lint_command(run: str | None, target: GroupSpec | None = None) -> None:
    """Print what is wrong with a drafter's files; raise a RunError (exit status 1) if there is
    an error.
    """
    if run is None:
        raise UserError("run: say which drafter, as in spectrain lint DIR, or run=DIR")
    directory = resolve_directory(run)
    files = read_files(directory)
    results = lint_files(files, requested_target(target))
    print_json([asdict(finding) for finding in results])
    console = make_console(highlight=False, soft_wrap=True)
    for finding in results:
        console.print(f"{finding.level} {finding.name}: {finding.problem}", markup=False)
        console.print(f"    why: {finding.consequence}", markup=False)
        console.print(f"    mend: {finding.remedy}", markup=False)
    errors = sum(finding.level == "error" for finding in results)
    title = (
        "no layout"
        if any(finding.name == UNREADABLE for finding in results)
        else detect_layout(files).title
    )
    warnings = format_count(len(results) - errors, "warning")
    if errors:
        raise RunError(f"{directory} ({title}): {format_count(errors, 'error')}, {warnings}")
    print(f"{directory} ({title}): no error, {warnings}")


def resolve_directory(run: Any) -> Path:
    """Return the drafter directory of a run folder; any other folder is returned unchanged, and
    reading it reports what it lacks."""
    return find_drafter_directory(Path(str(run))) or Path(str(run))


def requested_target(target: GroupSpec | None) -> TargetFiles | None:
    """Return the target that the command names, or None."""
    return TargetFiles.from_settings(target.node) if target else None


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, in the singular for 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

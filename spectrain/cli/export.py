"""The commands `spectrain export`, `convert` and `lint`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.config.plain_files import read_json_object
from spectrain.errors import RunError, UserError
from spectrain.eval.quantization_loss import measure_quantization_loss
from spectrain.export.card import describe_loss, read_shown_scores, render_card
from spectrain.export.converter import (
    convert,
    read_drafter,
    require_servable,
    resolve_target,
    write_checked,
)
from spectrain.export.drafter_files import METADATA_FILE, write_json
from spectrain.export.engine_support import describe_readers, list_quantized_readers
from spectrain.export.hub import check_repository
from spectrain.export.hub import push as upload
from spectrain.export.launches import make_launches
from spectrain.export.layout import CHAIN_TOKENS, DrafterCheckpoint, Layout
from spectrain.export.layouts import (
    TARGET_FORMATS,
    detect_layout,
    find_weightless_export,
    read_files,
    select_layout,
)
from spectrain.export.linter import UNREADABLE, lint_files
from spectrain.export.measure import load_drafter
from spectrain.export.quantization import WeightQuantization
from spectrain.export.targets import TargetFiles
from spectrain.files import atomic_write, refuse_nonempty
from spectrain.models.target import Target
from spectrain.output.console import make_console
from spectrain.output.streams import print_text
from spectrain.output.verbosity import print_json, result_output
from spectrain.runs.folder import find_drafter_directory, require_drafter_directory
from spectrain.servers.advice import list_engine_advice

from .export_checks import check_export, require_keys


@dataclass(frozen=True)
class Upload:
    """Where a written folder goes on the hub."""

    name: str  # ORG/NAME
    private: bool = True


def run_export(push: str | None, private: bool, drafter: GroupSpec | None, **settings: Any) -> Path:
    """Run the command with its settings by key: of a run, or of a drafter without weights."""
    if push:
        check_repository(push)
    destination = Upload(push, private) if push else None
    if not drafter:
        return export_command(push=destination, **settings)
    if settings["run"] is not None:
        raise UserError(
            f"drafter={drafter.choice}: the drafter is that of run={settings['run']}; leave one out"
        )
    for key in ("dtype", "engine_python", "quantize"):
        if settings[key]:
            raise UserError(f"{key}: drafter={drafter.choice} has no weights; leave it out")
    return export_weightless(
        drafter, settings["format"], settings["out"], settings["target"], destination
    )


def export_weightless(
    drafter: GroupSpec,
    format: str | None,
    out: str | None,
    target: GroupSpec | None,
    push: Upload | None = None,
) -> Path:
    """Write a drafter without weights for an engine, with a card."""
    export = find_weightless_export(str(drafter.choice), format)
    require_keys(
        f"spectrain export drafter={drafter.choice} target=tiny format={format} out=DIR",
        out=out,
        target=target or None,
    )
    folder = Path(str(out))
    refuse_nonempty(folder)
    files = requested_target(target)
    assert files is not None
    name = push.name if push else str(folder)
    write: Callable[[GroupSpec, TargetFiles, Path, str], None] = resolve_name(export.path)
    with atomic_write(folder, folder=True, is_new=True) as scratch:
        write(drafter, files, scratch, name)
    lines = [
        f"drafter={drafter.choice} for {export.title}: written to {folder}; README.md says how to "
        "serve it"
    ]
    return report_export(folder, export.title, lines, push)


def report_export(
    folder: Path,
    title: str,
    lines: list[str],
    push: Upload | None = None,
    quantization: dict[str, Any] | None = None,
) -> Path:
    """Print lines about what was written, upload it where that was asked for, and return the
    folder."""
    with result_output():
        print_text("\n".join(lines))
    address = None if push is None else upload(folder, push.name, push.private)
    if address is not None:
        with result_output():
            print(f"uploaded to {address}")
    print_json(
        {"out": str(folder), "layout": title, "address": address, "quantization": quantization}
    )
    return folder


def export_command(
    run: str | None,
    format: str | None,
    out: str | None,
    *,
    push: Upload | None = None,
    target: GroupSpec | None = None,
    dtype: str | None = None,
    engine_python: str | None = None,
    quantize: GroupSpec | None = None,
) -> Path:
    """Write the drafter of a run for an engine, with a model card; with `push`, upload it too.

    Without a run, write the target itself, which the formats of `TARGET_FORMATS` can.
    """
    quantization: WeightQuantization | None = quantize.build() if quantize else None
    check_export(run, format, out, target)
    if run is None and target is not None:
        refuse_quantization(quantization, f"format={format} of a target")
        return export_target(
            TargetFiles.from_settings(target.node), str(out), dtype, str(format), engine_python
        )
    folder = Path(str(out))
    requested = requested_target(target)
    drafter = read_drafter(require_drafter_directory("run", str(run)), requested)
    layout = select_layout(drafter.family, str(format), dtype)
    layout = layout if engine_python is None else layout.with_engine(engine_python)
    files_of_target = requested or resolve_target(drafter)
    if quantization is not None:
        require_readers(quantization, layout, str(format))
    with atomic_write(folder, folder=True, is_new=True) as scratch:
        write_checked(drafter, layout, files_of_target, scratch)
        if quantization is not None:
            quantize_checked(quantization, drafter, layout, files_of_target, scratch)
        if drafter.trained_target is not None and not drafter.is_target:
            refuse_links(drafter.trained_target)
            shutil.copytree(drafter.trained_target, scratch / "target")
        name = push.name if push else str(folder)
        scores = read_shown_scores(Path(str(run)))
        launches = make_launches(drafter, layout, files_of_target, name)
        for advice in list_engine_advice():
            advice.write_schedules(scratch, scores, launches)
        (scratch / "README.md").write_text(
            render_card(
                drafter, layout, files_of_target, name, Path(str(run)), read_quantization(scratch)
            )
        )
    readers = describe_readers(layout)
    read_by = f" (read by {readers})" if readers else ""
    lines = [f"{layout.title}{read_by}: written to {folder}; README.md says how to serve it"]
    loss = read_quantization(folder)
    lines += [] if loss is None else describe_loss(loss)
    return report_export(folder, layout.title, lines, push, loss)


def write_card(directory: Path, name: str, run: Path) -> None:
    """Write the model card README.md of a drafter directory that the hub gets as `name`; its
    numbers are those of the run's evaluations."""
    drafter = read_drafter(directory)
    card = render_card(
        drafter,
        detect_layout(read_files(directory)),
        resolve_target(drafter),
        name,
        run,
        read_quantization(directory),
    )
    (directory / "README.md").write_text(card)


def refuse_quantization(quantization: WeightQuantization | None, where: str) -> None:
    """Raise a UserError for `quantize` where the type of weights is chosen by `dtype`."""
    if quantization is not None:
        raise UserError(
            f"quantize={quantization.choice}: {where} has weights of other types; choose one with "
            "dtype, as in dtype=q8_0 for GGUF or dtype=int8 for OpenVINO"
        )


def require_readers(quantization: WeightQuantization, layout: Layout, format_name: str) -> None:
    """Raise a UserError where no engine reads a layout with weights that are quantized so."""
    if format_name in TARGET_FORMATS:
        refuse_quantization(quantization, f"format={format_name}")
    choice = quantization.choice
    if not list_quantized_readers(layout, choice):
        raise UserError(
            f"quantize={choice}: no engine reads this format, {layout.title}, with quantized "
            "weights; leave it out"
        )
    if quantization.fc and not list_quantized_readers(layout, choice, with_fc=True):
        raise UserError(
            f"quantize.fc=true: no engine reads this format, {layout.title}, with a quantized fc; "
            "leave it out"
        )


def quantize_checked(
    quantization: WeightQuantization,
    drafter: DrafterCheckpoint,
    layout: Layout,
    target: TargetFiles,
    directory: Path,
) -> None:
    """Quantize an export, decode with its weights before and after, and write into spectrain.json
    what that cost; raise a RunError where it cost more than the tolerance.
    """
    names = quantization.quantize_folder(directory)
    require_servable(directory, target)
    launches = layout.drafter_launches(drafter, target, "")
    num_tokens = next((launch.num_tokens for launch in launches.values()), CHAIN_TOKENS)
    model: Target = target.spec.build()
    loss = measure_quantization_loss(
        model,
        load_drafter(drafter, model),
        load_drafter(read_drafter(directory, target), model),
        num_tokens,
        quantization.prompts,
        quantization.max_new_tokens,
    )
    if loss.loss > quantization.tolerance:
        rate = loss.tokens_per_forward
        raise RunError(
            f"quantize={quantization.choice}: tokens per forward fall from {rate.before:.2f} to "
            f"{rate.after:.2f}, by {loss.loss:.1%}, which is more than quantize.tolerance="
            f"{quantization.tolerance}; nothing was written: use another quantize, or allow it"
        )
    content = read_json_object(directory / METADATA_FILE)
    content["quantization"] = {
        "choice": quantization.choice,
        "stored": quantization.about,
        "tensors": len(names),
        "kept": quantization.excluded_modules,
        "tolerance": quantization.tolerance,
        "readers": list_quantized_readers(layout, quantization.choice, quantization.fc),
        **loss.to_json(),
    }
    write_json(directory / METADATA_FILE, content)


def read_quantization(directory: Path) -> dict[str, Any] | None:
    """Return what spectrain.json says of an export's quantized weights, or None."""
    path = directory / METADATA_FILE
    content = read_json_object(path).get("quantization") if path.exists() else None
    return content if isinstance(content, dict) else None


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
    target_format = TARGET_FORMATS[format_name]
    write_target: Callable[..., Path] = resolve_name(target_format.path)
    with atomic_write(folder, folder=True, is_new=True) as scratch:
        name = write_target(target, scratch, dtype, engine_python).name
    line = f"{target.name}, {target_format.title}: written to {folder / name}"
    return report_export(folder, target_format.title, [line])


def convert_command(
    run: str | None,
    format: str | None,
    out: str | None,
    target: GroupSpec | None = None,
    dtype: str | None = None,
) -> None:
    """Write the drafter of a run, or of any directory, in the layout that `format` names."""
    folder = convert(
        resolve_directory(run), Path(str(out)), str(format), requested_target(target), dtype
    )
    title = detect_layout(read_files(folder)).title
    report_export(folder, title, [f"{title}: written to {folder}"])


def lint_command(run: str, target: GroupSpec | None = None) -> None:
    """Print what is wrong with a drafter's files; raise a RunError (exit status 1) if there is
    an error.
    """
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
    print_text(f"{directory} ({title}): no error, {warnings}")


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

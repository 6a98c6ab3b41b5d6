"""The linter of drafter files: it finds silent faults that cost acceptance, each under a stable
name.

`check_files` reads files only (file_checks.py), the drafter's and with a target the target's. Then
the files are read as eval reads them, and the drafter is built without weights. `lint` with a
target also decodes (measure.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from spectrain.config.build import GroupSpec
from spectrain.config.check import check_node
from spectrain.errors import UserError, first_line
from spectrain.models.rope import RopeError
from spectrain.training.checkpoints import find_mismatches

from .container import Finding
from .drafter_files import METADATA_FILE, DrafterFiles
from .file_checks import (
    check_command_only,
    check_data_only,
    check_quantization,
    check_shapes,
    check_tokenizer,
    check_values,
)
from .fused_config import build_meta_drafter
from .layout import (
    MALFORMED_ERRORS,
    DrafterCheckpoint,
    Layout,
    MissingTarget,
    RefusedSettings,
)
from .layouts import detect_layout, read_files
from .targets import TargetFiles

UNREADABLE = "unreadable"
"""The fault of files whose layout cannot be told because of a value of a wrong type."""


def lint(directory: Path, target: TargetFiles | None) -> list[Finding]:
    """Return every fault of a drafter's directory, errors first."""
    return lint_files(read_files(directory), target)


def lint_files(files: DrafterFiles, target: TargetFiles | None) -> list[Finding]:
    """Return every fault of a drafter's files, errors first."""
    try:
        layout = detect_layout(files)
    except UserError:
        raise
    except MALFORMED_ERRORS as error:
        return [
            replace(
                malformed_finding(f"a value of a wrong type ({first_line(error)})"), name=UNREADABLE
            )
        ]
    findings = list(check_files(files, layout, target))
    if is_sound(findings):
        findings += guard_check(partial(require_loadable, files, layout, target))
    if target is not None and is_sound(findings):
        from .measure import find_misinterpretation

        # The measurement shows whether the drafter was trained with another rotary embedding.
        findings = [finding for finding in findings if finding.name != "rope"]
        findings += find_misinterpretation(layout.read(files, target), target, layout)
    return sorted(findings, key=lambda finding: finding.level)


def is_sound(findings: list[Finding]) -> bool:
    """Tell whether spectrain can read files with these findings."""
    return all(
        finding.level == "warning" and finding.name != "not-representable" for finding in findings
    )


def require_loadable(
    files: DrafterFiles, layout: Layout, target: TargetFiles | None
) -> Iterator[Finding]:
    """Yield a fault where eval would refuse the files."""
    try:
        check_loading(files, layout, target)
    except UserError as error:
        raise RefusedSettings(str(error)) from error
    yield from ()


def check_files(
    files: DrafterFiles, layout: Layout, target: TargetFiles | None
) -> Iterator[Finding]:
    """Yield the faults that the files show, and with a target those that a comparison with its
    files shows.
    """
    directives = list(check_data_only(files, layout))
    yield from directives
    yield from check_command_only(files.directory)
    if directives:
        return
    checks: list[Callable[[], Iterator[Finding]]] = [
        lambda: check_values(files, layout),
        lambda: check_shapes(files, layout.expected_tensors(files)),
        lambda: layout.findings(files),
        lambda: check_quantization(files, layout),
    ]
    if target is not None:
        checks += [
            lambda: layout.findings_with_target(files, target),
            lambda: check_tokenizer(files, target),
        ]
    # The same key may stop several checks.
    yield from dict.fromkeys(finding for check in checks for finding in guard_check(check))


def guard_check(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield what a check finds, and a fault in place of any error that settings of a wrong type
    raise.
    """
    try:
        yield from check()
    except KeyError as error:
        yield Finding(
            "missing-key",
            "error",
            f"config.json lacks {error}",
            "engines stop or use a default that may be wrong",
            "write it as it was when the drafter was trained",
        )
    except RopeError as error:
        yield Finding(
            "rope-unreadable",
            "error",
            f"config.json: {error}",
            "engines stop, or rotate by other angles than in training",
            "write it as it was when the drafter was trained",
        )
    except RefusedSettings as error:
        yield Finding(
            "malformed",
            "error",
            f"config.json: {error}",
            "no command can use it",
            "write it as it was when the drafter was trained",
        )
    except UserError:
        raise
    except MALFORMED_ERRORS as error:
        yield malformed_finding(f"a value of a wrong type ({first_line(error)})")


def malformed_finding(problem: str) -> Finding:
    """Return the fault of a config.json that holds what nothing can use."""
    return Finding(
        "malformed",
        "error",
        f"config.json holds {problem}",
        "engines stop, or read something else",
        "write it as it was when the drafter was trained",
    )


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

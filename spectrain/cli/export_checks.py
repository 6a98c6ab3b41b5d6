"""What the commands export, convert and lint refuse before anything heavy is imported: a missing
setting, an unknown format, an output folder that holds files, a folder that does not exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spectrain.errors import UserError
from spectrain.export.layouts import TARGET_FORMATS, require_format
from spectrain.files import refuse_nonempty
from spectrain.runs.folder import find_drafter_directory


def check_export(
    run: str | None,
    format: str | None,
    out: str | None,
    target: object = None,
    drafter: object = None,
    **others: Any,
) -> None:
    """Check the settings of `spectrain export`. Those of a drafter without weights are checked
    where its format is known.
    """
    if drafter:
        return
    if format is not None:
        require_format(format)
    if run is None and format in TARGET_FORMATS and target is not None:
        require_keys(f"spectrain export target=tiny format={format} out=DIR", out=out)
    else:
        require_keys(
            "spectrain export run=runs/NAME format=vllm out=DIR", run=run, format=format, out=out
        )
    refuse_nonempty(Path(str(out)))


def check_convert(run: str | None, format: str | None, out: str | None, **others: Any) -> None:
    """Check the settings of `spectrain convert`."""
    require_keys(
        "spectrain convert IN OUT --to vllm, or run=IN out=OUT format=vllm",
        run=run,
        out=out,
        format=format,
    )
    require_format(str(format))
    require_folder(str(run))
    refuse_nonempty(Path(str(out)))


def check_lint(run: str | None, **others: Any) -> None:
    """Check the settings of `spectrain lint`."""
    if run is None:
        raise UserError("run: say which drafter, as in spectrain lint DIR, or run=DIR")
    require_folder(run)


def require_keys(example: str, **settings: Any) -> None:
    """Raise a UserError for the first of these settings that has no value."""
    for key, value in settings.items():
        if value is None:
            raise UserError(f"{key}: it must be given, as in {example}")


def require_folder(run: str) -> None:
    """Raise a UserError for a name that is neither a path nor a drafter that ships."""
    if not Path(run).exists() and find_drafter_directory(Path(run)) is None:
        raise UserError(
            f"{run}: there is no such folder; give a run folder or the directory of a drafter"
        )

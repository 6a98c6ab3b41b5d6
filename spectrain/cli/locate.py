"""Where a drafter is that a name in Python means: a folder, a shipped drafter, or the hub."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from spectrain.errors import UserError, first_line
from spectrain.runs.folder import find_drafter_directory

CHOICES = "a run folder, a drafter directory, or ORG/NAME of the hub"


def locate_drafter(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a drafter, which is downloaded if the hub alone has it; the name of one
    that ships with the package stays a name.

    A UserError says what the name is instead.
    """
    path = Path(name).expanduser()
    if not path.exists() and find_drafter_directory(path) is None:
        path = download_drafter(os.fspath(name))
    directory = find_drafter_directory(path)
    if directory is None:
        raise UserError(f"drafter {path}: {explain_absence(path)}")
    is_adapter = (directory / "adapter_config.json").exists()
    if is_adapter and not any(
        (directory / own).exists() for own in ("config.json", "spectrain.json")
    ):
        raise UserError(
            f"drafter {path}: it holds an adapter alone, which is no drafter; merge it into its "
            "model with peft's merge_and_unload and give the merged folder"
        )
    return path


def explain_absence(path: Path) -> str:
    """Return what a path without a drafter is, and what to give instead."""
    if path.is_file():
        return f"this is a file; give {CHOICES}"
    if (path / "config.yaml").exists():
        return "this run has no drafter in it yet; go on with its training by trainer.resume=auto"
    return f"there is no drafter in it; give {CHOICES}"


def download_drafter(name: str) -> Path:
    """Download a repository of the hub, or find it among those that were downloaded before."""
    try:
        return Path(snapshot_download(name))
    except HFValidationError as error:
        raise UserError(f"drafter {name}: there is no such folder; give {CHOICES}") from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"drafter {name}: there is no such folder, and the hub cannot be reached; give "
            f"{CHOICES} that was downloaded before"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(
            f"drafter {name}: there is no such folder, and the hub does not give one "
            f"({first_line(error)}); give {CHOICES}"
        ) from error

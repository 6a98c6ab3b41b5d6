"""Run folders: where a drafter and its target are in them.

Every command that reads a drafter imports this module, so it imports nothing heavy.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from spectrain.config.installed import load_entry_points
from spectrain.errors import UserError, suggest_nearest
from spectrain.export.layouts import OWN_SUFFIXES
from spectrain.files import PICKLE_SUFFIXES


@dataclass(frozen=True)
class ShippedDrafter:
    """A trained drafter that comes with this package, or with another one that names it by an entry
    point of the group spectrain.drafters.
    """

    # As in drafter=NAME and run=NAME.
    name: str
    # The choice of target= that it was trained for, and the name of that model.
    target: str
    model: str
    folder: Path


OWN_DRAFTERS = (
    ShippedDrafter(
        "smollm2-eagle3",
        "smollm2",
        "smollm2-135m-q4_1",
        Path(__file__).parents[1] / "data" / "drafters" / "smollm2-eagle3",
    ),
)


@cache
def list_shipped() -> tuple[ShippedDrafter, ...]:
    """Return the drafters of this package and of the installed ones."""
    return (*OWN_DRAFTERS, *load_entry_points("drafters"))


def find_shipped(name: str) -> ShippedDrafter | None:
    """Return the drafter that ships by a name, or None."""
    return next((drafter for drafter in list_shipped() if drafter.name == name), None)


def find_drafter_directory(run: Path) -> Path | None:
    """Return the drafter of a run folder, or the folder itself if it is a drafter directory, ours
    or another project's.

    Any other name may be that of a drafter that ships with the package. None if there is no
    drafter.
    """
    shipped = find_shipped(str(run))
    for directory in (run / "drafter", run, *([shipped.folder] if shipped else [])):
        if OWN_SUFFIXES & {path.suffix for path in directory.glob("*")}:
            return directory
        if not any((directory / name).exists() for name in ("config.json", "adapter_config.json")):
            continue
        if any(path.suffix in (".safetensors", *PICKLE_SUFFIXES) for path in directory.iterdir()):
            return directory
    return None


def require_drafter_directory(key: str, run: str | Path) -> Path:
    """Return the drafter directory that a setting names; raise a UserError if it holds no
    drafter.
    """
    directory = find_drafter_directory(Path(run))
    if directory is None:
        fault = "there is no drafter in it" if Path(run).exists() else "there is no such folder"
        raise UserError(
            f"{key}={run}: {fault}; give a run folder or a drafter directory"
            f"{suggest_runs(Path(run))}"
        )
    return directory


def suggest_runs(run: Path) -> str:
    """Return the drafters that a folder may mean which does not exist: its namesake in runs/, or
    those beside it; "" if there are none.
    """
    if run.exists():
        return ""
    near = [Path("runs") / run]
    if find_drafter_directory(near[0]) is None:
        near = [path for path in run.parent.glob("*") if find_drafter_directory(path) is not None]
    return f"; {suggest_nearest(str(run), map(str, sorted(near)))}" if near else ""


def find_trained_target(run: Path) -> Path | None:
    """Return the target that was trained with a drafter, in its run folder or next to its
    directory; None if there is none.
    """
    return next(
        (directory for directory in (run / "target", run.parent / "target") if directory.is_dir()),
        None,
    )


def find_results_folder(run: Path) -> Path:
    """Return the folder that receives the scores of a run: its own, or runs/NAME for a drafter
    that ships by name.
    """
    is_shipped_name = not run.is_dir() and find_shipped(str(run)) is not None
    return Path("runs") / run if is_shipped_name else run


def archive_earlier(folder: Path) -> None:
    """Rename an earlier score of the same name to NAME.1, NAME.2 and so on; the newest score has
    the plain name.
    """
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)

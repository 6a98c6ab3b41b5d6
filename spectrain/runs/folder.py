"""Run folders: where a drafter and its target are in them.

Every command that reads a drafter imports this module, so it imports nothing heavy.
"""

from pathlib import Path

from spectrain.errors import UserError
from spectrain.export.layouts import OWN_SUFFIXES
from spectrain.files import PICKLE_SUFFIXES

SHIPPED_FOLDER = Path(__file__).parents[1] / "data" / "drafters"


def find_drafter_directory(run: Path) -> Path | None:
    """Return the drafter of a run folder, or the folder itself if it is a drafter directory, ours
    or another project's.

    Any other name may be that of a drafter that ships with the package. None if there is no
    drafter.
    """
    for directory in (
        run / "drafter",
        run,
        *([SHIPPED_FOLDER / run] if run.name == str(run) else []),
    ):
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
        raise UserError(
            f"{key}={run}: there is no drafter in it; give a run folder or a drafter directory"
        )
    return directory


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
    is_shipped_name = run.name == str(run) and not run.is_dir() and (SHIPPED_FOLDER / run).is_dir()
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

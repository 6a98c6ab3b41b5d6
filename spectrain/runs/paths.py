"""Where a drafter is: asked of every command that reads one, so nothing heavy is imported here."""

from pathlib import Path

from spectrain.errors import UserError
from spectrain.files import PICKLE_SUFFIXES

SHIPPED_FOLDER = Path(__file__).parents[1] / "data" / "drafters"


def find_drafter_directory(run: Path) -> Path | None:
    """The drafter of a run folder, or the folder itself where it is a drafter directory, ours or another project's; what is
    neither may be the name of one that comes with the package."""
    for directory in (run / "drafter", run, *([SHIPPED_FOLDER / run] if run.name == str(run) else [])):
        if not any((directory / name).exists() for name in ("config.json", "adapter_config.json")):
            continue
        if any(path.suffix in (".safetensors", *PICKLE_SUFFIXES) for path in directory.iterdir()):
            return directory
    return None


def require_drafter_directory(key: str, run: str | Path) -> Path:
    """The drafter directory that a setting names."""
    directory = find_drafter_directory(Path(run))
    if directory is None:
        raise UserError(f"{key}={run}: there is no drafter in it; give a run folder or a drafter directory")
    return directory

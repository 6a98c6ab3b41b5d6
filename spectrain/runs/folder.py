"""Run folders: their choice, their first files, resuming, and where a drafter is in them.

Every command that reads a drafter imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrain.errors import UserError
from spectrain.export.layouts import OWN_SUFFIXES
from spectrain.files import PICKLE_SUFFIXES, write_text

if TYPE_CHECKING:
    from spectrain.config.spec import RunSpec
    from spectrain.data.dataset import Dataset
    from spectrain.models.target import Target

SHIPPED_FOLDER = Path(__file__).parents[1] / "data" / "drafters"
# Settings that a resumed run may change, because they change nothing that is learnt.
CHANGEABLE_KEYS = {
    "trainer": ("resume", "save_every", "log_every", "keep_checkpoints", "patience", "max_skipped", "gradient_checkpointing",
                "sharding", "accumulate"),
    "target": ("device", "sharding", "trust_remote_code"),
}  # fmt: skip


def find_drafter_directory(run: Path) -> Path | None:
    """Return the drafter of a run folder, or the folder itself if it is a drafter directory, ours or another project's.

    Any other name may be that of a drafter that ships with the package. None if there is no drafter.
    """
    for directory in (run / "drafter", run, *([SHIPPED_FOLDER / run] if run.name == str(run) else [])):
        if OWN_SUFFIXES & {path.suffix for path in directory.glob("*")}:
            return directory
        if not any((directory / name).exists() for name in ("config.json", "adapter_config.json")):
            continue
        if any(path.suffix in (".safetensors", *PICKLE_SUFFIXES) for path in directory.iterdir()):
            return directory
    return None


def require_drafter_directory(key: str, run: str | Path) -> Path:
    """Return the drafter directory that a setting names; raise a UserError if it holds no drafter."""
    directory = find_drafter_directory(Path(run))
    if directory is None:
        raise UserError(f"{key}={run}: there is no drafter in it; give a run folder or a drafter directory")
    return directory


def choose_folder(spec: RunSpec, accelerator: Any) -> Path:
    """Return the run folder, the same on every process. A folder with a run in it is accepted only with
    trainer.resume=auto."""
    from accelerate.utils import broadcast_object_list

    resume = spec.trainer.get("resume") == "auto"
    if spec.run is None and resume:
        raise UserError("trainer.resume=auto: say which run to go on with, as in run=runs/NAME")
    if spec.run is not None:
        run = Path(spec.run)
        taken = [(run / "config.yaml").exists()]
        if accelerator.num_processes > 1:
            # The first process may write it before another process checks.
            broadcast_object_list(taken)
        if not resume and taken[0]:
            raise UserError(f"run={run}: the folder holds a run already; choose another, or go on with trainer.resume=auto")
        if run.exists() and not run.is_dir():
            raise UserError(f"run={run}: this is a file; choose a folder")
        return run
    base = Path("runs") / f"{spec.name}-{spec.target_name}"
    chosen = [base]
    number = 1
    while chosen[0].exists():
        number += 1
        chosen = [base.with_name(f"{base.name}-{number}")]
    return broadcast_object_list(chosen)[0] if accelerator.num_processes > 1 else chosen[0]


def open_run(run: Path, spec: RunSpec, dataset: Dataset, target: Target) -> None:
    """Create the folder with its configuration and provenance; a resumed run keeps its own."""
    from spectrain.provenance import collect_provenance

    made = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
        if (run / "config.yaml").exists():
            check_resumable(run, spec)
            return
        facts = {
            "data": dataset.provenance_facts(),
            "target": target.path,
            "target_name": target.name,
            **collect_provenance(),
        }
        write_text(run / "provenance.json", json.dumps(facts, indent=2) + "\n")
        write_text(run / "config.yaml", spec.to_yaml())
    except OSError as error:
        raise UserError(f"run={run}: the folder cannot be written ({error.strerror}); choose another") from error
    finally:
        if made and not (run / "config.yaml").exists():
            # A full disk leaves an incomplete folder.
            shutil.rmtree(run, ignore_errors=True)


def check_resumable(run: Path, spec: RunSpec) -> None:
    """Raise a UserError if the settings differ from those that the run began with."""
    from spectrain.config.spec import RunSpec
    from spectrain.training.checkpoints import latest_checkpoint

    before, now = RunSpec.load(run / "config.yaml").save(), spec.save()
    if latest_checkpoint(run) is None:
        return
    for group in ("target", "drafter", "data", "trainer", "optimizer", "schedule"):
        free = CHANGEABLE_KEYS.get(group, ())
        old = {k: v for k, v in before[group].items() if k not in free}
        new = {k: v for k, v in now[group].items() if k not in free}
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                name = group if key == "choice" else f"{group}.{key}"
                raise UserError(
                    f"{name}={new.get(key)}: the run in {run} began with {old.get(key)}; use that, or another run folder"
                )


def find_trained_target(run: Path) -> Path | None:
    """Return the target that was trained with a drafter, in its run folder or next to its directory; None if there is none."""
    return next((directory for directory in (run / "target", run.parent / "target") if directory.is_dir()), None)


def archive_earlier(folder: Path) -> None:
    """Rename an earlier score of the same name to NAME.1, NAME.2 and so on; the newest score has the plain name."""
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)

"""The files of a training run beside its checkpoints, which a resumed training goes on with: the
metrics, the weights that it began with and those of the best validation.

Each checkpoint says what these held when it was saved.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

from spectrain.errors import UserError
from spectrain.files import require_regular_file
from spectrain.models.checked_tensors import read_checksum, read_tensors
from spectrain.output.streams import print_warning

from .checkpoints import best_weights_path, load_best, read_progress, start_weights_path
from .metrics import METRICS_NAME

FILES_KEY = "files"
START_ADVICE = "put back a copy, or delete its folder, and the score leaves the start out"
BEST_ADVICE = "put back a copy, or delete its folder, and the best validation is looked for anew"
METRICS_ADVICE = "put back a copy, or delete it and go on without the metrics of these steps"
CHUNK_BYTES = 2**20


def describe_files(run: Path, best_step: int) -> dict[str, Any]:
    """Return what a checkpoint says about the files beside it, under its key of progress.json;
    `best_step` is the step of the best validation.
    """
    metrics, start = run / METRICS_NAME, start_weights_path(run)
    best = best_weights_path(run, best_step) / "model.safetensors"
    size = metrics.stat().st_size if metrics.is_file() else 0
    return {
        FILES_KEY: {
            "metrics": {"bytes": size, "sha256": hash_beginning(metrics, size)},
            "start": read_checksum(start, START_ADVICE) if start.exists() else None,
            "best": read_checksum(best, BEST_ADVICE) if best.exists() else None,
        }
    }


def hash_beginning(path: Path, size: int) -> str | None:
    """Return the hash of the first `size` bytes of a file; None where it has fewer."""
    if size == 0:
        return sha256().hexdigest()
    digest = sha256()
    left = size
    with path.open("rb") as file:
        while left and (chunk := file.read(min(left, CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return None if left else digest.hexdigest()


def check_run_files(run: Path, checkpoint: Path) -> None:
    """Raise a UserError if a file beside the checkpoint from which a run goes on is not what it was
    when that was saved; print which file is missing.

    Checkpoints of earlier versions say nothing about these files.
    """
    progress = read_progress(checkpoint)
    saved = progress.get(FILES_KEY, {})
    if "metrics" in saved:
        _check_metrics(run / METRICS_NAME, checkpoint, **saved["metrics"])
    start = start_weights_path(run)
    if start.parent.exists():
        checksum = saved.get("start")
        read_tensors(start, START_ADVICE)
        if checksum is not None and read_checksum(start, START_ADVICE) != checksum:
            raise UserError(f"{start}: the run began with other weights; {START_ADVICE}")
    elif saved.get("start") is not None:
        print_warning(f"{start}: it is missing; the score leaves the start out")
    best_step = progress["looks"].get("best_step", 0)
    best = best_weights_path(run, best_step)
    if best.exists():
        load_best(run, best_step)
        checksum = saved.get("best")
        path = best / "model.safetensors"
        if checksum is not None and read_checksum(path, BEST_ADVICE) != checksum:
            raise UserError(f"{path}: the best validation had other weights; {BEST_ADVICE}")


def _check_metrics(path: Path, checkpoint: Path, bytes: int, sha256: str) -> None:
    """Check the lines of metrics.jsonl up to a checkpoint."""
    require_regular_file(path, METRICS_ADVICE)
    if not path.exists():
        if bytes:
            print_warning(f"{path}: it is missing; the metrics up to {checkpoint.name} are lost")
        return
    if hash_beginning(path, bytes) != sha256:
        raise UserError(
            f"{path}: it was changed: its first {bytes} bytes are not those of {checkpoint.name}; "
            f"{METRICS_ADVICE}"
        )

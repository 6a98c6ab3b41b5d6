"""The files of a training run beside its checkpoints, which a resumed training goes on with: the
metrics, the weights that it began with and those of the best validation.

Each checkpoint says what the first two held when it was saved.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

from spectrain.errors import UserError
from spectrain.files import require_regular_file
from spectrain.models.checked_tensors import CHECKSUM_KEY, open_tensors, read_tensors
from spectrain.output.streams import print_warning

from .checkpoints import best_weights_path, load_best, read_progress, start_weights_path
from .metrics import METRICS_NAME

FILES_KEY = "files"
START_ADVICE = "put back a copy, or delete its folder, and the score leaves the start out"
METRICS_ADVICE = "put back a copy, or delete it and go on without the metrics of these steps"
CHUNK_BYTES = 2**20


def describe_files(run: Path) -> dict[str, Any]:
    """Return what a checkpoint says about the files beside it, under its key of progress.json."""
    metrics, start = run / METRICS_NAME, start_weights_path(run)
    size = metrics.stat().st_size if metrics.is_file() else 0
    return {
        FILES_KEY: {
            "metrics": {"bytes": size, "sha256": hash_beginning(metrics, size)},
            "start": _read_checksum(start) if start.exists() else None,
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
        if checksum is not None and _read_checksum(start) != checksum:
            raise UserError(f"{start}: the run began with other weights; {START_ADVICE}")
    elif saved.get("start") is not None:
        print_warning(f"{start}: it is missing; the score leaves the start out")
    best_step = progress["looks"].get("best_step", 0)
    if best_weights_path(run, best_step).exists():
        load_best(run, best_step)


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


def _read_checksum(path: Path) -> str | None:
    """Return the checksum in a file of tensors."""
    with open_tensors(path, START_ADVICE) as file:
        return (file.metadata() or {}).get(CHECKSUM_KEY)

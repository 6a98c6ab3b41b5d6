"""The layouts that TensorRT-LLM's converters read: Medusa's and ReDrafter's. It reads EAGLE-3 in
the flat layout.

Sizes: H width of the target, V its vocabulary, L residual blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from .layout import DrafterCheckpoint, DrafterFiles, ExpectedTensors, Finding, write_json
from .medusa import OriginalMedusa
from .targets import TargetFiles

MEDUSA_KEYS = {"num_medusa_heads": "medusa_num_heads"}
"""Keys of TensorRT-LLM's config.json -> the authors'."""


class TensorRtMedusa(OriginalMedusa):
    """The authors' tensors, also as `medusa_lm_head.pt`, which TensorRT-LLM unpickles, and its key
    for the number of heads.

    Reading takes the safetensors file that is written beside it.
    """

    title = "Medusa, TensorRT-LLM's layout"
    pickled_names = ("medusa_lm_head.pt",)

    def matches_files(self, files: DrafterFiles) -> bool:
        return "num_medusa_heads" in files.config and not super().matches_files(files)

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        return super().expected_tensors(rename_keys(files))

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        return super().read(rename_keys(files), target)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(rename_keys(files))

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        super().write(drafter, target, directory)
        files = DrafterFiles.from_directory(directory)
        names = {other: name for name, other in MEDUSA_KEYS.items()}
        write_json(
            directory / "config.json",
            {names.get(key, key): value for key, value in files.config.items()},
        )
        torch.save(files.tensors, directory / self.pickled_names[0])


def rename_keys(files: DrafterFiles) -> DrafterFiles:
    """Return the files with TensorRT-LLM's keys translated into the authors'."""
    return replace(
        files, config={MEDUSA_KEYS.get(key, key): value for key, value in files.config.items()}
    )

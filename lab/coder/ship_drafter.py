"""Put an exported drafter of Qwen2.5-Coder-1.5B into packages/coder.

python -m lab.coder.ship_drafter run=build/coder/run export=build/coder/drafter
"""

from __future__ import annotations

import shutil
from pathlib import Path

from lab.benchmarks.command import run_benchmark
from scripts.make_shipped_drafter import write_origin
from spectrain_coder import DRAFTER

FILES = ("config.json", "model.safetensors", "spectrain.json")


class ShipDrafter:
    """Copy the files of an export and the origin of its training into the package."""

    def __init__(self, run: str, export: str) -> None:
        self.training = Path(run)
        self.export = Path(export)

    def run(self) -> None:
        DRAFTER.folder.mkdir(exist_ok=True)
        for name in FILES:
            shutil.copyfile(self.export / name, DRAFTER.folder / name)
        write_origin(self.training, DRAFTER.folder)
        size = sum(file.stat().st_size for file in DRAFTER.folder.iterdir())
        print(f"{DRAFTER.folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_benchmark(ShipDrafter)

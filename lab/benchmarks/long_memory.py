"""Peak memory of EAGLE-3's training on tiny by the length of a text, planned and measured, on one
process or on several that share the text (float32; the target runs too):

    python -m lab.benchmarks.long_memory
    torchrun --nproc-per-node 2 -m lab.benchmarks.long_memory

Every storage that an operation returns is counted until it is freed, by whatever thread: torch's
profiler misses those that gloo's threads free. The largest peak of all processes counts.
"""

import json
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.features.live_source import LiveSource
from spectrain.files import write_text
from spectrain.models.loading import load_hf
from spectrain.provenance import collect_provenance
from spectrain.training.trainer import Trainer
from spectrain_studies.planning.footprint import Models, bytes_of, peak_memory
from spectrain_studies.planning.workload import batch_shape

from .command import run_benchmark

TINY = Path(__file__).parents[2] / "spectrain" / "data" / "tiny"
STEPS = 2  # Adam's state is there from the second step on


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of the storages that operations return, and their highest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # address of a storage -> bytes
        self.current = self.highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add_storage(tensor.untyped_storage())
        return result

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.current += storage.nbytes()
        self.highest = max(self.highest, self.current)
        weakref.finalize(storage, self._remove_storage, storage._cdata)

    def _remove_storage(self, address: int) -> None:
        self.current -= self.sizes.pop(address, 0)


@dataclass
class LongMemory:
    """Plan and measure a training on one text of each length, all of whose tokens carry loss."""

    # Lengths of the text in tokens.
    lengths: tuple[int, ...] = (1024, 4096, 16384, 32768)
    # Number of draft steps that are unrolled.
    ttt_steps: int = 3
    # Whether draft steps are computed again in the backward pass.
    gradient_checkpointing: bool = False
    # JSON file of the results; null writes none.
    out: str | None = None

    def run(self) -> None:
        rows = [self._measure_length(length) for length in self.lengths]
        if self.out is not None and os.environ.get("RANK", "0") == "0":
            write_text(
                Path(self.out),
                json.dumps({"rows": rows, "provenance": collect_provenance()}, indent=2) + "\n",
            )

    def _measure_length(self, length: int) -> dict[str, float]:
        """Return planned and measured bytes of one length, and print them."""
        with tempfile.TemporaryDirectory() as folder:
            spec = self._make_settings(length, Path(folder))
            processes = int(os.environ.get("WORLD_SIZE", "1"))
            examples = [
                Example([3 + n % 2000 for n in range(length)], [False] + [True] * (length - 1))
            ]
            models = Models.from_spec(spec, torch.device("cpu"), 1000, processes)
            parts = peak_memory(models, [batch_shape(examples, False)])
            target = load_hf(str(Path(folder) / "target"), dtype="float32")
            drafter = spec.drafter.build(target=target)
            trainer = Trainer.from_spec(spec)
            with StorageTracker() as tracker:
                # Weights that a first operation returns are counted by the tracker, so only the
                # others are added.
                target.pack_weights()
                trainer.fit(
                    drafter, target, Dataset(examples, 1, 0, 0), LiveSource(), Path(folder) / "run"
                )
            weights = [*target.parameters(), *drafter.parameters(), *drafter.buffers()]
            resident = bytes_of(
                weight for weight in weights if weight.untyped_storage()._cdata not in tracker.sizes
            )
            measured = max(gather_object([resident + tracker.highest]))
        planned = sum(parts.values())
        if os.environ.get("RANK", "0") == "0":
            print(
                (
                    f"{length} tokens, {processes} processes: planned {planned / 1e6:.1f} MB, "
                    f"measured {measured / 1e6:.1f} MB, ratio {planned / measured:.2f}; {parts}"
                ),
                flush=True,
            )
        return {
            "length": length,
            "processes": processes,
            "planned_bytes": planned,
            "measured_bytes": measured,
        }

    def _make_settings(self, length: int, folder: Path) -> RunSpec:
        """Return the settings of a training on a copy of tiny that takes texts of any length."""
        shutil.copytree(TINY, folder / "target")
        config = json.loads((TINY / "config.json").read_text())
        write_text(
            folder / "target" / "config.json",
            json.dumps({**config, "max_position_embeddings": max(self.lengths)}),
        )
        settings = {
            "batch_tokens": length,
            "max_steps": STEPS,
            "mixed_precision": "no",
            "gradient_checkpointing": self.gradient_checkpointing,
            "context_parallel": int(os.environ.get("WORLD_SIZE", "1")),
        }
        return RunSpec(
            target=GroupSpec("target", "hf", {"model": str(folder / "target"), "dtype": "float32"}),
            drafter=GroupSpec("drafter", "eagle3", {"ttt_steps": self.ttt_steps}),
            trainer=GroupSpec("trainer", "default", settings),
        )


if __name__ == "__main__":
    run_benchmark(LongMemory)

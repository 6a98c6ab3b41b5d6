"""Every way to share training among processes, started as users start it, against one process:
equal losses, and speed.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from spectrain.provenance import collect_provenance

from .command import run_benchmark

ACCELERATE_CONFIGS = Path(__file__).resolve().parents[2] / "conf" / "accelerate"
SHARING_MODES = ("ddp", "fsdp2", "zero2", "zero3")


def markdown_table(results: dict[str, Any]) -> str:
    """Return the rows of a result as a Markdown table."""
    lines = ["| way | tokens/s | largest difference of a step's loss |", "|---|---:|---:|"]
    for row in results["rows"]:
        failed = row["error"] is not None
        speed = "failed" if failed else f"{row['tokens_per_second']:,.0f}"
        lines.append(
            f"| {row['way']} | {speed} | "
            f"{row['error'] if failed else format(row['largest_difference'], '.1e')} |"
        )
    return "\n".join(lines)


class Scale:
    """Train EAGLE-3 for `steps` steps in every way; write losses, speed and differences to `out`.

    A toy run uses the tiny target and two processes on any machine. Otherwise the target is
    SmolLM2, or the one in the directory `target`, with a process for each GPU. Every way gets the
    same data in each step.
    """

    def __init__(
        self, out: str, toy: bool = False, steps: int = 20, target: str | None = None
    ) -> None:
        self.out = Path(out)
        self.toy = toy
        self.steps = steps
        self.processes = 2 if toy or not torch.cuda.is_available() else torch.cuda.device_count()
        self.settings = [
            "recipe=eagle3",
            f"target={'tiny' if toy else 'smollm2'}",
            f"trainer.max_steps={steps}",
            "eval=none",
        ]
        self.settings += ["trainer.log_every=1", "data.limit=64", "data.max_length=256"]
        self.settings += [] if toy else ["trainer.batch_tokens=1024"]
        self.settings += [f"target.path={target}"] if target and not toy else []

    def run(self) -> None:
        with TemporaryDirectory() as folder:
            python = [sys.executable, "-m"]
            single = self._run_training(
                Path(folder) / "plain",
                [*python, "spectrain"],
                [f"trainer.accumulate={self.processes}"],
            )
            rows = [{"way": "one process", **single}]
            for mode in SHARING_MODES:
                launch = [
                    *python,
                    "accelerate.commands.launch",
                    "--config_file",
                    str(ACCELERATE_CONFIGS / f"{mode}.yaml"),
                    "--num_processes",
                ]
                rows.append(
                    {
                        "way": mode,
                        **self._run_training(
                            Path(folder) / mode, [*launch, str(self.processes), "-m", "spectrain"]
                        ),
                    }
                )
            if self.processes > 1:
                torchrun = [
                    *python,
                    "torch.distributed.run",
                    "--nproc-per-node",
                    str(self.processes),
                    "-m",
                    "spectrain",
                ]
                for mode in ("fsdp2", "tensor"):
                    settings = [
                        f"target.sharding={mode}",
                        *([f"trainer.accumulate={self.processes}"] if mode == "tensor" else []),
                    ]
                    rows.append(
                        {
                            "way": f"target {mode}",
                            **self._run_training(
                                Path(folder) / f"target-{mode}", torchrun, settings
                            ),
                        }
                    )
        for row in rows:
            pairs = zip(row["losses"], single["losses"])
            row["largest_difference"] = max(
                (abs(a - b) / max(abs(b), 1e-3) for a, b in pairs), default=None
            )
        self.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {key: value for key, value in collect_provenance().items() if key != "command"}
        results = {
            "setting": {"processes": self.processes, "settings": self.settings, **facts},
            "rows": rows,
        }
        self.out.write_text(json.dumps(results, indent=2) + "\n")
        print(markdown_table(results))

    def _run_training(
        self, run: Path, command: list[str], settings: list[str] | None = None
    ) -> dict[str, Any]:
        """Run one training; return its losses, and its speed over the second half of its steps."""
        arguments = [*command, "train", *self.settings, f"run={run}", *(settings or [])]
        result = subprocess.run(arguments, capture_output=True, text=True, timeout=480)
        file = run / "metrics.jsonl"
        lines = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        )
        shutil.rmtree(run, ignore_errors=True)
        second_half = [line["tokens_per_second"] for line in lines[len(lines) // 2 :]]
        return {
            "losses": [line["loss"] for line in lines],
            "tokens_per_second": sum(second_half) / len(second_half) if second_half else None,
            "error": None
            if result.returncode == 0
            else (result.stderr.strip().splitlines() or ["the process failed"])[-1][:300],
        }


if __name__ == "__main__":
    run_benchmark(Scale)

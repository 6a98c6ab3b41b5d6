"""Every way to share training, started as users start it, beside one plain process: the same losses, and what each costs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from spectrain.provenance import collect_provenance

ACCELERATE_CONFIGS = Path(__file__).resolve().parents[1] / "conf" / "accelerate"
SHARING_MODES = ("ddp", "fsdp2", "zero2", "zero3")


def markdown_table(found: dict[str, Any]) -> str:
    """The rows of a result as a Markdown table."""
    lines = ["| way | tokens/s | largest difference of a step's loss |", "|---|---:|---:|"]
    for row in found["rows"]:
        failed = row["error"] is not None
        speed = "failed" if failed else f"{row['tokens_per_second']:,.0f}"
        lines.append(f"| {row['way']} | {speed} | {row['error'] if failed else format(row['largest_difference'], '.1e')} |")
    return "\n".join(lines)


class Scale:
    """Trains EAGLE-3 for `steps` steps in every way and writes losses, speed and differences to `out`.

    A toy takes the tiny target and two processes on any machine; otherwise SmolLM2, or the directory at `target`, and a
    process for each GPU. Both give each step the same data in every way.
    """

    def __init__(self, out: str, toy: bool = False, steps: int = 20, target: str | None = None) -> None:
        self.out, self.toy, self.steps = Path(out), toy, steps
        self.processes = 2 if toy or not torch.cuda.is_available() else torch.cuda.device_count()
        self.settings = ["recipe=eagle3", f"target={'tiny' if toy else 'smollm2'}", f"trainer.max_steps={steps}", "eval=none"]
        self.settings += [
            "trainer.log_every=1",
            "data.limit=64",
            "data.max_length=256",
            *([] if toy else ["trainer.batch_tokens=1024"]),
        ]
        self.settings += [f"target.path={target}"] if target and not toy else []

    def run(self) -> None:
        with TemporaryDirectory() as folder:
            one = [sys.executable, "-m"]
            plain = self._run_training(Path(folder) / "plain", [*one, "spectrain"], [f"trainer.accumulate={self.processes}"])
            rows = [{"way": "one process", **plain}]
            for way in SHARING_MODES:
                launch = [
                    *one,
                    "accelerate.commands.launch",
                    "--config_file",
                    str(ACCELERATE_CONFIGS / f"{way}.yaml"),
                    "--num_processes",
                ]
                rows.append(
                    {"way": way, **self._run_training(Path(folder) / way, [*launch, str(self.processes), "-m", "spectrain"])}
                )
            if self.processes > 1:
                torchrun = [*one, "torch.distributed.run", "--nproc-per-node", str(self.processes), "-m", "spectrain"]
                for way in ("fsdp2", "tensor"):
                    more = [f"target.sharding={way}", *([f"trainer.accumulate={self.processes}"] if way == "tensor" else [])]
                    rows.append({"way": f"target {way}", **self._run_training(Path(folder) / f"target-{way}", torchrun, more)})
        for row in rows:
            pairs = zip(row["losses"], plain["losses"])
            row["largest_difference"] = max((abs(a - b) / max(abs(b), 1e-3) for a, b in pairs), default=None)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {key: value for key, value in collect_provenance().items() if key != "command"}
        found = {"setting": {"processes": self.processes, "settings": self.settings, **facts}, "rows": rows}
        self.out.write_text(json.dumps(found, indent=2) + "\n")
        print(markdown_table(found))

    def _run_training(self, run: Path, command: list[str], more: list[str] | None = None) -> dict[str, Any]:
        """One training: its losses, and its speed over the second half of its steps."""
        asked = [*command, "train", *self.settings, f"run={run}", *(more or [])]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=480)
        file = run / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        shutil.rmtree(run, ignore_errors=True)
        later = [line["tokens_per_second"] for line in lines[len(lines) // 2 :]]
        return {
            "losses": [line["loss"] for line in lines],
            "tokens_per_second": sum(later) / len(later) if later else None,
            "error": None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[-1][:300],
        }

"""A training on the machines of a rehearsed cluster: how it is launched, observed and ended."""

import json
import os
import re
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from .machines import Machine, run_command

MULTINODE = str(Path(__file__).resolve().parents[2] / "conf" / "accelerate" / "multinode.yaml")
# A drafter of one layer for the target that ships, on texts of 64 tokens.
SETTINGS = [
    *(
        "recipe=eagle3",
        "target=tiny",
        "data.limit=40",
        "data.max_length=64",
        "data.held_out=0",
        "drafter.ttt_steps=2",
    ),
    *(
        "drafter.vocab_size=512",
        "eval=none",
        "trainer.batch_tokens=128",
        "trainer.log_every=1",
        "trainer.save_every=5",
    ),
    *("trainer.patience=5", "trainer.timeout=3", "trainer.resume=auto"),
]
# Seconds until a run that no longer advances counts as hung.
HANG_SECONDS = 240.0
# Bytes of the disk that holds the run folder.
DISK_BYTES = 256 << 20
# Port of torchrun's rendezvous.
PORT = 29400
Launcher = Literal["accelerate", "torchrun", "elastic"]


class Cluster:
    """The machines, and one training on them in a run folder on a small disk of its own."""

    def __init__(self, machines: list[Machine], folder: Path, steps: int) -> None:
        self.machines, self.folder, self.steps = machines, folder, steps
        self.disk = folder / "disk"
        self.run = self.disk / "run"
        self.metrics = self.run / "metrics.jsonl"
        # Bytes of the logs at the fault and at the launch that continues the training.
        self.fault_offsets: dict[str, int] = {}
        self.resume_offsets: dict[str, int] = {}

    def mount_disk(self) -> None:
        """Give the run folder a disk of its own, which can be filled."""
        self.disk.mkdir()
        run_command("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.disk))

    def unmount_disk(self) -> None:
        run_command("umount", str(self.disk))

    def launch(
        self, launcher: Launcher, machines: list[Machine], port: int = PORT, suffix: str = ""
    ) -> None:
        """Start the training on some machines."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        for rank, machine in enumerate(machines):
            words = self._launch_words(launcher, len(machines), rank, port)
            machine.start(words, self.folder / f"{machine.name}{suffix}.log", environment)

    def launch_again(self, launcher: Launcher) -> None:
        """Start the same run a second time on the same machines, and wait until it has ended."""
        doubles = [Machine(machine.index) for machine in self.machines]
        self.launch(launcher, doubles, PORT + 100, "-again")
        self.wait_for_end(doubles)
        for machine in doubles:
            machine.end()

    def _launch_words(
        self, launcher: Launcher, count: int, rank: int, port: int = PORT
    ) -> list[str]:
        task = [
            "-m",
            "spectrain",
            "train",
            *SETTINGS,
            f"trainer.max_steps={self.steps}",
            f"run={self.run}",
        ]
        if launcher == "accelerate":
            sizes = [
                "--num_machines",
                str(count),
                "--num_processes",
                str(count),
                "--machine_rank",
                str(rank),
            ]
            meeting = [
                "--main_process_ip",
                self.machines[0].address,
                "--main_process_port",
                "29500",
            ]
            return [
                sys.executable,
                "-m",
                "accelerate.commands.launch",
                "--config_file",
                MULTINODE,
                *sizes,
                *meeting,
                *task,
            ]
        nodes, restarts = (
            (f"{count - 1}:{count}", "3") if launcher == "elastic" else (str(count), "0")
        )
        meeting = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{self.machines[0].name}:{port}",
            "--rdzv-id",
            f"run{port}",
        ]
        sizes = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", restarts]
        return [sys.executable, "-m", "torch.distributed.run", *sizes, *meeting, *task]

    # What it has done

    def read_steps(self) -> list[dict[str, Any]]:
        """Return the logged steps; a line that is being written is left out."""
        text = self.metrics.read_text() if self.metrics.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1] if line]

    def losses(self) -> dict[int, float]:
        """Return the loss of every logged step."""
        return {line["step"]: line["loss"] for line in self.read_steps()}

    def has_doubles(self) -> bool:
        """Tell whether a step is logged twice."""
        return len(self.losses()) < len(self.read_steps())

    def num_logged(self) -> int:
        return self.metrics.read_text().count("\n") if self.metrics.exists() else 0

    def leftovers(self) -> list[str]:
        """Return the names of files and folders that a write has not completed."""
        return [path.name for pattern in ("*.part", "*.old") for path in self.run.rglob(pattern)]

    def is_running(self) -> bool:
        return any(machine.is_running for machine in self.machines)

    def wait_for_step(self, step: int) -> bool:
        """Wait until a step is logged; tell whether it was, before the training ended or hung."""
        deadline = time.monotonic() + HANG_SECONDS
        while self.num_logged() < step and self.is_running() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.num_logged() >= step

    def wait_for_end(self, machines: list[Machine]) -> bool:
        """Wait until the launchers of these machines have ended; tell whether they have, before
        they count as hung.
        """
        deadline = time.monotonic() + HANG_SECONDS
        while any(machine.is_running for machine in machines) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not any(machine.is_running for machine in machines)

    # What it has printed

    def log_sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.folder.glob("*.log")}

    def read_logs(self, offsets: dict[str, int]) -> str:
        """Return what was printed on all machines since the logs had these sizes, with DIR for
        the run folder.
        """
        paths = sorted(self.folder.glob("*.log"))
        texts = [
            path.read_bytes()[offsets.get(path.name, 0) :].decode(errors="replace")
            for path in paths
        ]
        return "\n".join(texts).replace(str(self.run), "DIR")

    def messages(self) -> list[str]:
        """Return what spectrain printed on all machines since the fault, without doubles."""
        lines = self.read_logs(self.fault_offsets).splitlines()
        return list(dict.fromkeys(line for line in lines if line.startswith("spectrain: ")))

    @property
    def text_since_resume(self) -> str:
        return self.read_logs(self.resume_offsets)

    # The disk

    def fill_disk(self, num_free: int) -> None:
        """Fill the disk of the run folder up to this number of bytes."""
        # The training writes meanwhile, so the disk is filled until it is full, and then some of it
        # is freed.
        with (self.disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(num_free))
        os.truncate(self.disk / "filler", (self.disk / "filler").stat().st_size - num_free)

    def empty_disk(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)

    def clear(self) -> None:
        """End everything, restore the network and delete the run."""
        for machine in self.machines:
            machine.end()
            machine.restore_link()
        for path in self.folder.glob("*.log"):
            path.unlink()
        self.empty_disk()
        shutil.rmtree(self.run, ignore_errors=True)


class RunObserver:
    """Observes a training from the moment of a fault on: its steps, and the first message that
    matches an expression.
    """

    def __init__(self, cluster: Cluster, expression: str) -> None:
        self.cluster, self.expression = cluster, expression
        self.message: str | None = None
        # Seconds from the fault to the message.
        self.message_seconds = 0.0
        # Longest time without a further step, in seconds, from the fault on.
        self.pause_seconds = 0.0
        # Steps that were done a second time, from a checkpoint.
        self.num_repeated = 0
        # The last step before a new launch continued the training.
        self.last_step_before_resume = 0
        self.stop_event = threading.Event()
        self.thread = threading.Thread(target=self._observe, daemon=True)

    def __enter__(self) -> "RunObserver":
        self.cluster.fault_offsets = self.cluster.log_sizes()
        self.start_time = self.step_time = time.monotonic()
        self.step = self.cluster.num_logged()
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_event.set()
        self.thread.join()
        self._look()

    def mark_resume(self) -> None:
        """Note that a new launch begins."""
        self.last_step_before_resume = self.cluster.num_logged()
        self.cluster.resume_offsets = self.cluster.log_sizes()

    def _observe(self) -> None:
        while not self.stop_event.wait(0.03):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        step = self.cluster.num_logged()
        if step > self.step:
            self.pause_seconds = max(self.pause_seconds, now - self.step_time)
            self.step_time = now
        self.num_repeated += max(0, self.step - step)
        self.step = step
        if self.expression and self.message is None:
            matches = [
                message
                for message in self.cluster.messages()
                if re.search(self.expression, message)
            ]
            if matches:
                self.message = matches[0]
                self.message_seconds = now - self.start_time

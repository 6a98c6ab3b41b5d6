"""Rehearse what happens to a training on several machines: each fault is made, and the run that follows is compared.

The machines are network namespaces of this one (`benchmarks.machines`); the commands are those that a user types on a cluster,
`accelerate launch` and `torchrun` with its c10d rendezvous. The program writes JSON and prints a table.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from spectrain.errors import UserError
from spectrain.provenance import collect_provenance

from .command import run_benchmark
from .machines import Machine, enter_private_namespaces, make_machines

MULTINODE = str(Path(__file__).resolve().parents[1] / "conf" / "accelerate" / "multinode.yaml")
# A drafter of one layer for the target that ships, on texts of 64 tokens.
SETTINGS = [
    *("recipe=eagle3", "target=tiny", "data.limit=40", "data.max_length=64", "data.held_out=0", "drafter.ttt_steps=2"),
    *("drafter.vocab_size=512", "eval=none", "trainer.batch_tokens=128", "trainer.log_every=1", "trainer.save_every=5"),
    *("trainer.patience=5", "trainer.timeout=3", "trainer.resume=auto"),
]
# Step after which a fault is made.
FAULT_STEP = 7
# Largest relative difference of a step's loss that rounding explains. Sums over processes have another order on another number
# of them, and in the first step after a start, before DDP has arranged its buckets.
ROUNDING = 1e-5
# Seconds until a run that no longer advances counts as hung.
HANG_SECONDS = 240.0
Launcher = Literal["accelerate", "torchrun", "elastic"]


class Cluster:
    """The machines, and one training on them in a run folder."""

    def __init__(self, machines: list[Machine], folder: Path, steps: int) -> None:
        self.machines, self.folder, self.steps = machines, folder, steps
        self.run = folder / "run"
        self.metrics = self.run / "metrics.jsonl"

    def launch(self, launcher: Launcher, machines: list[Machine]) -> None:
        """Start the training on some machines."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        for rank, machine in enumerate(machines):
            words = self._launch_words(launcher, len(machines), rank)
            machine.start(words, self.folder / f"{machine.name}.log", environment)

    def _launch_words(self, launcher: Launcher, count: int, rank: int) -> list[str]:
        task = ["-m", "spectrain", "train", *SETTINGS, f"trainer.max_steps={self.steps}", f"run={self.run}"]
        if launcher == "accelerate":
            sizes = ["--num_machines", str(count), "--num_processes", str(count), "--machine_rank", str(rank)]
            meeting = ["--main_process_ip", self.machines[0].address, "--main_process_port", "29500"]
            return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", MULTINODE, *sizes, *meeting, *task]
        nodes, restarts = (f"{count - 1}:{count}", "3") if launcher == "elastic" else (str(count), "0")
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.machines[0].name}:29400", "--rdzv-id", "rehearsal"]
        sizes = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", restarts]
        return [sys.executable, "-m", "torch.distributed.run", *sizes, *meeting, *task]

    def losses(self) -> dict[int, float]:
        """Return the loss of every logged step."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return {line["step"]: line["loss"] for line in map(json.loads, filter(None, lines))}

    def num_logged(self) -> int:
        return self.metrics.read_text().count("\n") if self.metrics.exists() else 0

    def is_running(self) -> bool:
        return any(machine.is_running for machine in self.machines)

    def wait_for_step(self, step: int) -> bool:
        """Wait until a step is logged; tell whether it was, before the training ended or hung."""
        deadline = time.monotonic() + HANG_SECONDS
        while self.num_logged() < step and self.is_running() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.num_logged() >= step

    def wait_for_end(self, machines: list[Machine]) -> bool:
        """Wait until the launchers of these machines have ended; tell whether they have, before they count as hung."""
        deadline = time.monotonic() + HANG_SECONDS
        while any(machine.is_running for machine in machines) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not any(machine.is_running for machine in machines)

    def messages(self) -> list[str]:
        """Return what spectrain said on all machines, without doubles, and with DIR for the run folder."""
        texts = [machine.log.read_text(errors="replace") for machine in self.machines if machine.log.is_file()]
        texts = [text.replace(str(self.run), "DIR") for text in texts]
        return list(dict.fromkeys(line for text in texts for line in text.splitlines() if line.startswith("spectrain: ")))

    def clear(self) -> None:
        """End everything, restore the network and delete the run."""
        for machine in self.machines:
            machine.end()
            machine.restore_link()
            machine.log.unlink(missing_ok=True)
        shutil.rmtree(self.run, ignore_errors=True)


@dataclass
class Case:
    """A fault: what happens after `FAULT_STEP` steps, and how the training continues."""

    name: str
    launcher: Launcher
    fault: Callable[[Cluster], None]
    # Machines that are lost; their launchers are ended in the end, as nobody can reach them.
    lost: tuple[int, ...] = ()
    # Machines of the launch that continues the training; 0 where it continues without a new launch.
    resume_on: int = 4
    # What a message must say.
    message: str = ""


def kill_worker(cluster: Cluster) -> None:
    cluster.machines[2].signal_worker(signal.SIGKILL)


def kill_machine(cluster: Cluster) -> None:
    cluster.machines[2].end()


def kill_saving(cluster: Cluster) -> None:
    """Kill the first process while it writes a checkpoint."""
    checkpoints, deadline = cluster.run / "checkpoints", time.monotonic() + HANG_SECONDS
    while not list(checkpoints.glob("*.part")) and cluster.is_running() and time.monotonic() < deadline:
        pass
    cluster.machines[0].signal_worker(signal.SIGKILL)


def cut_machine(cluster: Cluster) -> None:
    cluster.machines[2].cut_link()


def cut_first(cluster: Cluster) -> None:
    cluster.machines[0].drop_packets()


def interrupt_network(cluster: Cluster) -> None:
    """Cut a machine off for six seconds."""
    cluster.machines[2].cut_link()
    time.sleep(6)
    cluster.machines[2].restore_link()


def slow_worker(cluster: Cluster) -> None:
    cluster.machines[3].slow_down(seconds=20, share=0.25)


def freeze_worker(cluster: Cluster) -> None:
    """Stop a worker for 15 seconds."""
    cluster.machines[3].signal_worker(signal.SIGSTOP)
    time.sleep(15)
    cluster.machines[3].signal_worker(signal.SIGCONT)


def terminate_machine(cluster: Cluster) -> None:
    cluster.machines[1].signal_launcher(signal.SIGTERM)


def do_nothing(cluster: Cluster) -> None:
    pass


DEAD = r"rank 2 \(machine2, process \d+\) died in step \d+"
CASES = [
    Case("undisturbed", "accelerate", do_nothing, resume_on=0),
    Case("undisturbed", "torchrun", do_nothing, resume_on=0),
    Case("one process is killed", "accelerate", kill_worker, message=DEAD),
    Case("one process is killed", "torchrun", kill_worker, message=DEAD),
    Case("the first process is killed while it saves", "torchrun", kill_saving, message=r"rank 0.*(has not answered|died)"),
    Case("a machine loses its network", "accelerate", cut_machine, message=DEAD),
    Case("the first machine loses its network", "torchrun", cut_first, message="rank 0.*has not answered for 30 s"),
    Case("the network fails for 6 s", "torchrun", interrupt_network, resume_on=0),
    Case("one process has a quarter of the time for 20 s", "torchrun", slow_worker, resume_on=0),
    Case("one process is frozen for 15 s", "accelerate", freeze_worker, resume_on=0,
         message=r"rank 3 \(machine3, process \d+\) keeps the others waiting"),
    Case("SIGTERM to one machine", "torchrun", terminate_machine, message="stopped by SIGTERM after step"),
    Case("one process is killed; restart on four", "elastic", kill_worker, resume_on=0, message=DEAD),
    Case("a machine is lost; restart on three", "elastic", kill_machine, lost=(2,), resume_on=0, message=DEAD),
    Case("a machine is cut off; restart on three; SIGTERM; resume on four", "elastic", cut_machine, lost=(2,), message=DEAD),
]  # fmt: skip


class RehearseCluster:
    """Train on four machines, disturb each training in another way, let it continue, and compare its losses.

    `out` receives the results as JSON; cases that it holds with the same settings are not run again. `only` selects cases by
    their numbers, from 1, and the first one, which is undisturbed. `logs` is a folder that keeps what the machines printed.
    """

    def __init__(self, out: str, steps: int = 40, only: tuple[int, ...] = (), logs: str | None = None) -> None:
        unknown = [number for number in only if not 1 <= number <= len(CASES)]
        if unknown:
            raise UserError(f"only={list(only)}: the cases are numbered from 1 to {len(CASES)}")
        if steps < 3 * FAULT_STEP:
            raise UserError(f"steps={steps}: use {3 * FAULT_STEP} or more, so that faults happen in the course of the training")
        self.out, self.steps, self.logs = Path(out), steps, None if logs is None else Path(logs)
        self.numbers = sorted({1, *only}) if only else list(range(1, len(CASES) + 1))

    def run(self) -> None:
        enter_private_namespaces()
        rows = self._read_rows()
        with TemporaryDirectory() as folder:
            cluster = Cluster(make_machines(4, Path(folder)), Path(folder), self.steps)
            for number in [number for number in self.numbers if number not in rows]:
                reference = {int(step): loss for step, loss in rows[1]["losses"].items()} if 1 in rows else None
                rows[number] = {"case": number, **self._rehearse(CASES[number - 1], cluster, reference)}
                print(table_row(rows[number]), flush=True)
                self._write(rows)
                self._keep_logs(cluster, number)
                cluster.clear()
        failed = [number for number, row in rows.items() if row["failures"]]
        print(f"{len(rows) - len(failed)} of {len(rows)} cases ended as they should; see {self.out}")
        sys.exit(bool(failed))

    def _read_rows(self) -> dict[int, dict[str, Any]]:
        """Return the cases of an earlier call by their numbers."""
        results = json.loads(self.out.read_text()) if self.out.exists() else {"rows": []}
        if results["rows"] and (results["setting"]["settings"], results["setting"]["steps"]) != (SETTINGS, self.steps):
            raise UserError(f"out={self.out}: it holds results of other settings; choose another file")
        return {row["case"]: row for row in results["rows"]}

    def _rehearse(self, case: Case, cluster: Cluster, reference: dict[int, float] | None) -> dict[str, Any]:
        cluster.launch(case.launcher, cluster.machines)
        failures = [] if cluster.wait_for_step(FAULT_STEP) else [f"step {FAULT_STEP} was not reached"]
        began, start = time.monotonic(), cluster.num_logged()
        case.fault(cluster)
        remaining = [machine for machine in cluster.machines if machine.index not in case.lost]
        if case.launcher == "elastic" and case.resume_on:
            failures += [] if cluster.wait_for_step(2 * FAULT_STEP) else ["the restarted training did not go on"]
            for machine in remaining:
                machine.signal_launcher(signal.SIGTERM)
        failures += [] if cluster.wait_for_end(remaining) else [f"hung for {HANG_SECONDS:.0f} s"]
        seconds, codes = time.monotonic() - began, [machine.exit_code for machine in cluster.machines]
        messages, stopped = cluster.messages(), cluster.num_logged()
        if case.resume_on:
            failures += resume(cluster, case)
        losses = cluster.losses()
        difference = largest_difference(losses, reference or losses)
        failures += check_result(case, cluster, losses, difference, messages)
        return {
            "name": case.name, "launcher": case.launcher, "fault_after_step": start,
            "seconds_until_end": round(seconds, 1), "exit_codes": codes, "expected_message": case.message,
            "logged_when_it_ended": stopped, "resumed_on": case.resume_on, "messages": messages,
            "largest_difference": difference, "steps": len(losses), "slowest": read_slowest(cluster), "failures": failures,
            "losses": losses if reference is None else {},
        }  # fmt: skip

    def _write(self, rows: dict[int, dict[str, Any]]) -> None:
        facts = {key: value for key, value in collect_provenance().items() if key != "command"}
        results = {
            "setting": {"machines": 4, "steps": self.steps, "settings": SETTINGS, **facts},
            "rows": [rows[key] for key in sorted(rows)],
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(results, indent=2) + "\n")

    def _keep_logs(self, cluster: Cluster, number: int) -> None:
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            for machine in cluster.machines:
                shutil.copy(machine.log, self.logs / f"{number:02d}-{machine.name}.log")


def resume(cluster: Cluster, case: Case) -> list[str]:
    """Continue the training by a new launch of the same command; return what failed."""
    for machine in cluster.machines:
        machine.end()
        machine.restore_link()
    launcher: Launcher = "torchrun" if case.launcher == "elastic" else case.launcher
    cluster.launch(launcher, cluster.machines[: case.resume_on])
    if not cluster.wait_for_end(cluster.machines[: case.resume_on]):
        return ["the resumed training hung"]
    codes = [machine.exit_code for machine in cluster.machines[: case.resume_on]]
    return [] if not any(codes) else [f"the resumed training ended with {codes}"]


def largest_difference(losses: dict[int, float], reference: dict[int, float]) -> float:
    """Return the largest relative difference of a step's loss."""
    return max((abs(losses[step] - loss) / abs(loss) for step, loss in reference.items() if step in losses), default=1.0)


def check_result(case: Case, cluster: Cluster, losses: dict[int, float], difference: float, messages: list[str]) -> list[str]:
    """Return what is not as it should be."""
    checks = {
        f"{len(losses)} of {cluster.steps} steps are logged": len(losses) == cluster.steps,
        f"a loss differs by {difference:.1e}": difference <= ROUNDING,
        "no drafter was saved": (cluster.run / "drafter" / "config.json").exists(),
        f"no message says {case.message}": any(re.search(case.message, message) for message in messages) or not case.message,
    }
    return [failure for failure, passed in checks.items() if not passed]


def read_slowest(cluster: Cluster) -> dict[str, Any] | None:
    """Return the process that was the slowest in most steps, and in how many."""
    lines = cluster.metrics.read_text().splitlines() if cluster.metrics.exists() else []
    named = [
        f"rank {line['slowest']['rank']} ({line['slowest']['host']})" for line in map(json.loads, lines) if "slowest" in line
    ]
    names = sorted(set(named), key=named.count)
    return {"name": names[-1], "steps": named.count(names[-1])} if names else None


def table_row(row: dict[str, Any]) -> str:
    """Return a row of the table of results."""
    how = f"the same command on {row['resumed_on']}" if row["resumed_on"] else "by itself"
    same = "the same" if not row["largest_difference"] else f"{row['largest_difference']:.0e}"
    codes = ", ".join("-" if code is None else str(code) for code in row["exit_codes"])
    verdict = "; ".join(row["failures"]) or "nothing"
    return f"| {row['name']} | {row['launcher']} | {codes} | {how} | {row['steps']} | {same} | {verdict} |"


def markdown_table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table, and a message of each case."""
    head = "| fault | launcher | exit status by machine | continues | steps | losses | failed or lost |"
    lines = [head, "|---|---|---|---|---:|---|---|", *(table_row(row) for row in results["rows"])]
    messages = [(row, [message for message in row["messages"] if re.search(row["expected_message"], message)])
                for row in results["rows"] if row["expected_message"]]  # fmt: skip
    said = [f"- {row['name']} ({row['launcher']}): `{found[0]}`" for row, found in messages if found]
    return "\n".join([*lines, "", "What the remaining processes say:", "", *said])


if __name__ == "__main__":
    run_benchmark(RehearseCluster)

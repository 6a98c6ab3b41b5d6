"""Rehearse what happens to a training on several machines: each fault is made, and the run that
follows is compared.

The machines are network namespaces of this one (`lab.benchmarks.machines`); the commands are those
that a user types on a cluster, `accelerate launch` and `torchrun` with its c10d rendezvous. The
program writes JSON and prints a table.
"""

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spectrain.errors import UserError
from spectrain.provenance import collect_provenance

from .cluster_cases import CASES, FAULT_STEP, Case, check_result
from .command import run_benchmark
from .machines import enter_private_namespaces, make_machines
from .rehearsed_run import HANG_SECONDS, SETTINGS, Cluster, Launcher, RunObserver


class RehearseCluster:
    """Train on four machines, disturb each training in another way, let it continue, and compare
    its losses.

    `out` receives the results as JSON; cases that it holds with the same settings are not run
    again. `only` selects cases by their numbers, from 1, and the first one, which is undisturbed.
    `logs` is a folder that keeps what the machines printed.
    """

    def __init__(
        self, out: str, steps: int = 40, only: tuple[int, ...] = (), logs: str | None = None
    ) -> None:
        unknown = [number for number in only if not 1 <= number <= len(CASES)]
        if unknown:
            raise UserError(f"only={list(only)}: the cases are numbered from 1 to {len(CASES)}")
        if steps < 3 * FAULT_STEP:
            raise UserError(
                f"steps={steps}: use {3 * FAULT_STEP} or more, so that faults happen in the "
                "course of the training"
            )
        self.out = Path(out)
        self.steps = steps
        self.logs = None if logs is None else Path(logs)
        self.numbers = sorted({1, *only}) if only else list(range(1, len(CASES) + 1))

    def run(self) -> None:
        enter_private_namespaces()
        rows = self._read_rows()
        with TemporaryDirectory() as folder:
            cluster = Cluster(make_machines(4, Path(folder)), Path(folder), self.steps)
            cluster.mount_disk()
            for number in [number for number in self.numbers if number not in rows]:
                reference = (
                    {int(step): loss for step, loss in rows[1]["losses"].items()}
                    if 1 in rows
                    else None
                )
                rows[number] = {
                    "case": number,
                    **self._rehearse(CASES[number - 1], cluster, reference),
                }
                print(table_row(rows[number]), flush=True)
                self._write(rows)
                self._keep_logs(cluster, number)
                cluster.clear()
            cluster.unmount_disk()
        failed = [number for number, row in rows.items() if row["failures"]]
        print(
            f"{len(rows) - len(failed)} of {len(rows)} cases ended as they should; see {self.out}"
        )
        sys.exit(bool(failed))

    def _read_rows(self) -> dict[int, dict[str, Any]]:
        """Return the cases of an earlier call by their numbers."""
        results = json.loads(self.out.read_text()) if self.out.exists() else {"rows": []}
        if results["rows"] and (results["setting"]["settings"], results["setting"]["steps"]) != (
            SETTINGS,
            self.steps,
        ):
            raise UserError(
                f"out={self.out}: it holds results of other settings; choose another file"
            )
        return {row["case"]: row for row in results["rows"]}

    def _rehearse(
        self, case: Case, cluster: Cluster, reference: dict[int, float] | None
    ) -> dict[str, Any]:
        cluster.launch(case.launcher, cluster.machines)
        failures = (
            [] if cluster.wait_for_step(FAULT_STEP) else [f"step {FAULT_STEP} was not reached"]
        )
        start = cluster.num_logged()
        remaining = [
            machine for machine in cluster.machines if machine.index not in case.lost_machines
        ]
        with RunObserver(cluster, case.message) as observer:
            case.fault(cluster)
            if case.stops:
                failures += (
                    []
                    if cluster.wait_for_step(2 * FAULT_STEP)
                    else ["the restarted training did not go on"]
                )
                for machine in remaining:
                    machine.signal_launcher(signal.SIGTERM)
            failures += (
                [] if cluster.wait_for_end(remaining) else [f"hung for {HANG_SECONDS:.0f} s"]
            )
            seconds = time.monotonic() - observer.start_time
            codes = [machine.exit_code for machine in cluster.machines]
            messages = cluster.messages()
            observer.mark_resume()
            if case.resume_on:
                failures += resume(cluster, case)
        losses = cluster.losses()
        difference = largest_difference(losses, reference or losses)
        failures += check_result(case, cluster, observer, codes, difference)
        return {
            "name": case.name,
            "launcher": case.launcher,
            "fault_after_step": start,
            "seconds_until_end": round(seconds, 1),
            "exit_codes": codes,
            "expected_message": case.message,
            "message": observer.message,
            "message_seconds": round(observer.message_seconds, 1),
            "pause_seconds": round(observer.pause_seconds, 1),
            "steps_repeated": observer.num_repeated,
            "logged_when_it_ended": observer.last_step_before_resume,
            "resumed_on": case.resume_on,
            "messages": messages,
            "largest_difference": difference,
            "steps": len(losses),
            "slowest": read_slowest(cluster),
            "failures": failures,
            "losses": losses if reference is None else {},
        }

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
            for path in cluster.folder.glob("*.log"):
                shutil.copy(path, self.logs / f"{number:02d}-{path.name}")


def resume(cluster: Cluster, case: Case) -> list[str]:
    """Continue the training by a new launch of the same command; return what failed."""
    cluster.empty_disk()
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
    return max(
        (
            abs(losses[step] - loss) / abs(loss)
            for step, loss in reference.items()
            if step in losses
        ),
        default=1.0,
    )


def read_slowest(cluster: Cluster) -> dict[str, Any] | None:
    """Return the process that was the slowest in most steps, and in how many."""
    slowest = [line["slowest"] for line in cluster.read_steps() if "slowest" in line]
    named = [f"rank {process['rank']} ({process['host']})" for process in slowest]
    names = sorted(set(named), key=named.count)
    return {"name": names[-1], "steps": named.count(names[-1])} if names else None


def table_row(row: dict[str, Any]) -> str:
    """Return a row of the table of results."""
    mode = f"the same command on {row['resumed_on']}" if row["resumed_on"] else "by itself"
    same = "the same" if not row["largest_difference"] else f"{row['largest_difference']:.0e}"
    codes = ", ".join("-" if code is None else str(code) for code in row["exit_codes"])
    named = f"{row['message_seconds']:.0f} s" if row["message"] else "-"
    ended = f"{row['seconds_until_end']:.0f} s" if row["resumed_on"] else "-"
    times = f"{named} | {ended} | {row['pause_seconds']:.0f} s"
    verdict = "; ".join(row["failures"]) or "nothing"
    return (
        f"| {row['name']} | {row['launcher']} | {codes} | {mode} | {times} | "
        f"{row['steps_repeated']} | {same} | {verdict} |"
    )


def markdown_table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table, and a message of each case."""
    head = (
        "| fault | launcher | exit status by machine | continues | named after | launchers end "
        "after | longest pause | steps repeated | losses | failed or lost |"
    )
    lines = [
        head,
        "|---|---|---|---|---:|---:|---:|---:|---|---|",
        *(table_row(row) for row in results["rows"]),
    ]
    messages = [
        f"- {row['name']} ({row['launcher']}): `{row['message']}`"
        for row in results["rows"]
        if row["message"]
    ]
    return "\n".join([*lines, "", "What the processes print:", "", *messages])


if __name__ == "__main__":
    run_benchmark(RehearseCluster)

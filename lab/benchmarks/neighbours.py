"""Decoding beside busy neighbours: what other processes on the machine cost, by the policy for
threads.

A neighbour is a Python process at normal priority that computes without a pause, or every other
five seconds. Each case runs `spectrain eval` in a process of its own, because the environment
decides how waiting threads wait. Run it on an idle machine.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from spectrain.config.environment import WAIT_VARIABLES
from spectrain.errors import RunError, UserError
from spectrain.files import write_text
from spectrain.models.threads import PERSONAL_VARIABLES

from .command import list_defaults, run_benchmark

Policy = Literal["fixed", "spin", "sleep", "all"]
Load = Literal["none", "one", "two", "changing", "all"]
SPINNING = {"GOMP_SPINCOUNT": "300000"}  # libgomp's default
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "fixed": {"OMP_NUM_THREADS": str(os.cpu_count()), **SPINNING},
    "spin": SPINNING,
    "sleep": {},
}
"""By policy: torch's number of threads, which spin while they wait (before); a measured number,
whose threads spin, or sleep as they do by default."""
BUSY = "while True: pass"
EVERY_OTHER = (
    "import time\nwhile True:\n    if int(time.monotonic() - {start}) % 10 >= 5: time.sleep(0.05)"
)
LOADS = {"none": [], "one": [BUSY], "two": [BUSY, BUSY], "changing": [EVERY_OTHER]}
"""Programs of the neighbours, by load."""


SHIPPED = "drafter=smollm2-eagle3"
SCORING = [
    "eval.limit=6",
    "eval.max_new_tokens=64",
    "eval.oracle=false",
    "eval.report=false",
    "eval.repeats=1",
    "eval.baselines=[copies,ngram]",
]


class Neighbours:
    """Score a drafter beside other processes, with each policy for threads, and add the results
    to a JSON file.
    """

    def __init__(
        self,
        # Policy for threads: fixed, spin, sleep, or all of them.
        policy: Policy = "all",
        # Neighbours: none, one, two, changing, or all of these.
        load: Load = "all",
        # Run folder whose drafter is scored, with copies of its training data; the scores stay
        # there. Null: the shipped one.
        run: str | None = None,
        # Name of the prompts in the results; settings need one.
        questions: str | None = None,
        # Settings of spectrain eval, as in eval.prompts=questions.jsonl; those of the demo's
        # prompts stay where they are not given.
        settings: tuple[str, ...] = (),
        # Seconds after which a case is given up and recorded as such.
        limit: int = 240,
        # File of the results; cases that it holds already are replaced.
        out: str = "lab/results/neighbours.json",
    ) -> None:
        self.policies = [name for name in ENVIRONMENTS if policy in (name, "all")]
        self.loads = [name for name in LOADS if load in (name, "all")]
        self.run_folder = None if run is None else Path(run).resolve()
        scored = SHIPPED if run is None else f"run={self.run_folder}"
        self.words = [scored, *list_defaults(SCORING, settings), *settings]
        if settings and questions is None:
            raise UserError(
                "questions: name the prompts of these settings, as in 'questions=12 of the demo'"
            )
        self.limit = limit
        self.questions = questions or "6 of the demo"
        self.out = Path(out)

    def run(self) -> None:
        """Run all cases and write the file after each."""
        for load in self.loads:
            for policy in self.policies:
                case = {
                    "load": load,
                    "policy": policy,
                    "questions": self.questions,
                    **self._score(load, policy),
                }
                print(
                    json.dumps({key: value for key, value in case.items() if key != "setting"}),
                    flush=True,
                )
                self._add_case(case)

    def _score(self, load: str, policy: str) -> dict[str, Any]:
        """Return the results of one case."""
        personal = {*PERSONAL_VARIABLES, *WAIT_VARIABLES}
        environment = {
            name: value for name, value in os.environ.items() if name not in personal
        } | ENVIRONMENTS[policy]
        with TemporaryDirectory() as folder, run_neighbours(load):
            name = f"beside-{load}-{policy}-{time.monotonic():.0f}"
            command = [sys.executable, "-m", "spectrain", "eval", *self.words, f"eval.name={name}"]
            start = time.perf_counter()
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=self.limit,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {"seconds": self.limit, "rows": []}
            seconds = time.perf_counter() - start
            paths = list((self.run_folder or Path(folder)).rglob(f"{name}/summary.json"))
            if done.returncode or not paths:
                raise RunError(
                    f"spectrain eval ended with status {done.returncode}: {done.stderr[-500:]}"
                )
            return {"seconds": round(seconds, 1), **read_summary(json.loads(paths[0].read_text()))}

    def _add_case(self, case: dict[str, Any]) -> None:
        """Write a case to the file in place of an earlier one of the same load, policy and
        prompts.
        """
        cases = json.loads(self.out.read_text())["cases"] if self.out.exists() else []
        keys = ("load", "policy", "questions")
        cases = [old for old in cases if any(old[key] != case[key] for key in keys)]
        write_text(self.out, json.dumps({"cases": [*cases, case]}, indent=1) + "\n")


@contextmanager
def run_neighbours(load: str) -> Iterator[None]:
    """Run the neighbours of a load while the context is open."""
    programs = [program.replace("{start}", str(int(time.monotonic()))) for program in LOADS[load]]
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a case from summary.json: its rows, its numbers of threads and its
    setting.
    """
    systems = {"drafter": summary, **summary["compared"]}
    rows = [
        {
            "name": name,
            "tokens_per_forward": system["acceptance_length"]["pooled"],
            "speedup": system["speedup"]["ratio"],
            "ci95": system["speedup"]["ci95"],
            "tokens_per_second": system["tokens_per_second"]["drafted"],
            "nodes_per_round": system["nodes_per_round"],
            "time_share": system["time_share"],
            "identical": [system["lossless"]["identical"], system["lossless"]["checked"]],
        }
        for name, system in systems.items()
    ]
    setting = summary["setting"]
    keys = ("commit", "versions", "hardware", "date", "dtype", "prompts", "max_new_tokens")
    return {
        "plain_tokens_per_second": summary["tokens_per_second"]["autoregressive"],
        "threads": setting["thread_choices"],
        "rows": rows,
        "setting": {key: setting[key] for key in keys},
    }


if __name__ == "__main__":
    run_benchmark(Neighbours)

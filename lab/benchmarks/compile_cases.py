"""Compiles the kernels of all correctness cases in several processes at once. The measurements find
them in Triton's cache; one after another they would take about three seconds each.

    python -m lab.benchmarks.compile_cases [processes=12] [seconds=150]
"""

import time
from multiprocessing import get_context

import torch

from .command import run_benchmark
from .correctness import check_case, iterate_cases


def run_share(number: int, processes: int, toy: bool) -> None:
    """Run one case after another of those that a process has. A case that fails is reported where
    it is measured.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for _, check, case, dtype in list(iterate_cases(toy))[number::processes]:
        try:
            check_case(check, case, dtype, device)
        except Exception:
            continue


class CompileCases:
    """Run every correctness case once, in several processes."""

    def __init__(
        self,
        # Number of processes; each holds a context of the GPU.
        processes: int = 12,
        # Seconds after which processes that still run are ended.
        seconds: float = 150,
        # Whether to run the small cases, on any machine.
        toy: bool = False,
    ) -> None:
        self.processes = processes
        self.seconds = seconds
        self.toy = toy

    def run(self) -> None:
        began = time.monotonic()
        # A forked process could not use the GPU.
        context = get_context("spawn")
        workers = [
            context.Process(target=run_share, args=(number, self.processes, self.toy))
            for number in range(self.processes)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.0, began + self.seconds - time.monotonic()))
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
        elapsed = time.monotonic() - began
        unfinished = sum(worker.exitcode != 0 for worker in workers)
        print(
            f"{self.processes} processes ran the cases in {elapsed:.0f} s; {unfinished} of them "
            "did not come to their end"
        )


if __name__ == "__main__":
    run_benchmark(CompileCases)

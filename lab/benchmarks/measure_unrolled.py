"""EAGLE-3's training step on a CPU: CPU seconds and peak memory, with joined attention and with one
mask for all steps.

python -m lab.benchmarks.measure_unrolled > table.md          a quarter of an hour of one thread

SmolLM2's geometry, random weights and features; loss and gradients of the drafter, without the
target's forward. Each case is a process of its own, and takes the less of two steps. The mask is
what was before: [T, T + (steps - 1) T].
"""

import os
import resource
import subprocess
import sys
import time
from unittest.mock import patch

LENGTHS = (512, 1024, 2048)
STEPS = (3, 7)
WAYS = ("masked", "joined")


def measure(length: int, steps: int, way: str) -> tuple[float, float]:
    """Return the CPU seconds of a step, and the peak memory in MiB above the memory before the
    first step.
    """
    import torch

    from lab.benchmarks.models import ModelGeometry, random_drafter, random_target
    from lab.benchmarks.training import compute_gradients, loss_functions, random_batch
    from spectrain.models import attention

    torch.manual_seed(0)
    if way == "masked":
        patch.object(attention, "is_mergeable", lambda q, v: False).start()
    model = ModelGeometry(
        layers=3,
        width=576,
        inner=1536,
        heads=9,
        kv_heads=3,
        head_size=64,
        vocab=49152,
        draft_vocab=8192,
        context=8192,
    )
    target = random_target(model, torch.device("cpu"), torch.float32)
    drafter = random_drafter(target, model, torch.float32, steps)
    batch = random_batch(target, drafter, 1, length)
    loss = loss_functions(drafter, target, batch)["drafter"]
    before = read_resident_memory()
    times = []
    for _ in range(2):
        began = time.process_time()
        compute_gradients(loss, drafter)
        times.append(time.process_time() - began)
    return min(times), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def read_resident_memory() -> int:
    """Return the resident memory of the process in KiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def main() -> None:
    print(f"load {os.getloadavg()[0]:.1f} at the start", file=sys.stderr)
    print(
        "| tokens | steps | seconds, masked | joined | MiB, masked | joined "
        "|\n|---|---|---|---|---|---|"
    )
    for length in LENGTHS:
        for steps in STEPS:
            measurements = [measure_in_process(length, steps, way) for way in WAYS]
            cells = [f"{seconds:.1f}" for seconds, _ in measurements] + [
                f"{memory:.0f}" for _, memory in measurements
            ]
            print(f"| {length} | {steps} | {' | '.join(cells)} |", flush=True)
    print(f"load {os.getloadavg()[0]:.1f} at the end", file=sys.stderr)


def measure_in_process(length: int, steps: int, way: str) -> tuple[float, float]:
    """Measure a case in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "lab.benchmarks.measure_unrolled",
        str(length),
        str(steps),
        way,
    ]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(words[-2]), float(words[-1])


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(*measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
    else:
        main()

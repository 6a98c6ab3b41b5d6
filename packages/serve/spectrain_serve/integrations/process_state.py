"""What a training of a drafter changes of its process, restored afterwards, so that the training
around it goes on as if nothing had happened.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

SHARED_STATES = (PartialState, AcceleratorState, GradientState)
"""What accelerate shares between all accelerators of a process."""


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore random generators, the number of threads and accelerate's shared state at the end.
    In between accelerate starts as in a new process.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    num_threads = torch.get_num_threads()
    shared = [dict(state._shared_state) for state in SHARED_STATES]
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices):
        for state in SHARED_STATES:
            state._shared_state.clear()
        try:
            yield
        finally:
            for state, saved in zip(SHARED_STATES, shared):
                state._shared_state.clear()
                state._shared_state.update(saved)
            torch.set_num_threads(num_threads)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def redirect_to_file(path: Path) -> Iterator[None]:
    """Write what is printed into a file."""
    with path.open("a") as log, redirect_stdout(log), redirect_stderr(log):
        yield

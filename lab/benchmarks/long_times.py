"""CPU seconds per token of a training step of EAGLE-3 on tiny by the length of a text: of the
target's forward, and of the drafter's forward and backward with loss on all tokens or on a window
(`trainer.loss_tokens`). One thread, float32.

    python -m lab.benchmarks.long_times [out=FILE]
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spectrain.data.chat import Example
from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.features.batch import Batch, collate
from spectrain.features.loss_window import sample_loss_windows
from spectrain.files import write_text
from spectrain.models.loading import load_tiny
from spectrain.provenance import collect_provenance

from .command import run_benchmark
from .context import extend_context

LEAST_SECONDS = 1.0
"""CPU seconds after which a measurement is not repeated."""


@dataclass
class LongTimes:
    """Time the parts of a training step on one text of each length."""

    # Lengths of the text in tokens.
    lengths: tuple[int, ...] = (512, 1024, 4096, 16384, 32768)
    # Number of draft steps that are unrolled.
    ttt_steps: int = 3
    # Tokens of the window of the loss.
    loss_tokens: int = 2048
    # JSON file of the results; null writes none.
    out: str | None = None

    def run(self) -> None:
        torch.manual_seed(0)
        self.target = load_tiny()
        extend_context(self.target, max(self.lengths))
        self.drafter = Eagle3(self.target, ttt_steps=self.ttt_steps)
        self.drafter.prepare(self.target, torch.ones(self.target.head.vocab_size))
        self.target.pack_weights()
        rows = [self._time_length(length) for length in self.lengths]
        if self.out is not None:
            results = {"ttt_steps": self.ttt_steps, "loss_tokens": self.loss_tokens, "rows": rows}
            write_text(
                Path(self.out),
                json.dumps({**results, "provenance": collect_provenance()}, indent=2) + "\n",
            )

    def _time_length(self, length: int) -> dict[str, Any]:
        """Return the CPU milliseconds per token of the text of each part, and print them."""
        batch = collate(
            [Example([3 + n % 2000 for n in range(length)], [False] + [True] * (length - 1))], False
        )

        seconds = dict[str, float]()
        seconds["target"], features = time_call(
            lambda: self.target.features(batch.tokens, self.drafter.layers)
        )
        complete = replace(batch, features=features)
        seconds["all tokens"], _ = time_call(lambda: self._run_step(complete))
        if length > self.loss_tokens:
            # Windows lie at random places.
            windows = [
                sample_loss_windows(complete, self.loss_tokens, seed, 0) for seed in range(4)
            ]
            seconds["window"] = sum(
                time_call(partial(self._run_step, window))[0] for window in windows
            ) / len(windows)
        row = {
            "length": length,
            "ms_per_token": {
                name: round(1e3 * value / length, 4) for name, value in seconds.items()
            },
        }
        print(row, flush=True)
        return row

    def _run_step(self, batch: Batch) -> None:
        """Compute the loss and its gradients."""
        self.drafter.loss(batch, self.target, TrainingState(step=0)).total.backward()
        self.drafter.zero_grad(set_to_none=True)


def time_call(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, the least of several calls where one is short, and its
    result.
    """
    best = total = 0.0
    while total < LEAST_SECONDS:
        start = time.process_time()
        result = call()
        spent = time.process_time() - start
        best = min(best or spent, spent)
        total = total + spent
    return best, result


if __name__ == "__main__":
    run_benchmark(LongTimes)

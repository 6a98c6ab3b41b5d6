"""The number of threads that a kind of step computes with on a CPU, chosen by timing real steps.

No fixed number suits every machine. A forward of SmolLM2-135M over eight nodes on two virtual cores
of an EPYC (bfloat16, without compiled kernels), in milliseconds: idle, one thread takes 24, two
that spin while they wait 19, and two that sleep 32. Beside one process that takes a core, one takes
25, two that spin 80, and two that sleep 29. A training step is fastest with two threads on an idle
machine, however they wait, and with one beside a process.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from spectrain.models.threads import DECODING_TRIAL, personal_variable

FIRST_TRIAL = 2  # times as many steps in the first trial, whose choice has no predecessor
# another count is chosen where its median time is below this fraction of the current count's
MARGIN = 0.96
# a count whose steps take this many times the best count's is timed no further in this trial
HOPELESS = 2.0
PAUSE_PER_TRIAL = 5.0  # shortest pause after a trial, as a multiple of its steps' seconds
WINDOW = 5  # last steps whose median is compared with the time in the last trial
BAND = 1.4  # factor by which that median differs where times are unsteady
UNSTEADY_PAUSE = 1.0  # seconds between two trials because of unsteady times
# seconds until a steady count is compared again
SHORTEST_PAUSE = 4.0
LONGEST_PAUSE = 64.0


@dataclass
class ChangeCounter:
    """Counts changed choices. The tuners of a process share one: a change of the machine's load
    concerns all kinds of steps.
    """

    changes: int = 0


COUNTER = ChangeCounter()


class TimedThreadTuner:
    """Chooses the number of threads of one kind of step: call `set_threads` before a step and
    `record_step` after it.

    A trial runs the next steps with each count in turn, forwards and backwards, as in 2, 1, 1, 2.
    One happens at the start, when the times leave the usual ones, and when another kind of step
    changed its count. A core that becomes free does not show in the times of fewer threads, so
    trials also recur: after four seconds, and after twice the pause whenever a trial changed
    nothing. A trial begins with the counts next to the chosen one.
    """

    def __init__(
        self,
        counts: Sequence[int],
        trial_steps: int = DECODING_TRIAL,
        counter: ChangeCounter = COUNTER,
        clock: Callable[[], float] = time.monotonic,
        free_core: Callable[[], bool] | None = None,
    ) -> None:
        self.counts = sorted(counts)
        self.trial_steps = trial_steps
        self.counter = counter
        self.clock = clock
        self.has_free_core = free_core or has_free_core
        # The count of the next step, and the chosen one, which differ during a trial.
        self.count = self.chosen = (
            torch.get_num_threads() if torch.get_num_threads() in counts else max(counts)
        )
        # Median seconds per unit of work of each count in the last trial.
        self.seconds: dict[int, float] = {}
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.num_changes = self.seen_changes = 0
        # The times of each count in a trial; empty between trials.
        self.trial: dict[int, list[float]] = {}
        # Seconds of the steps of a trial.
        self.trial_seconds = 0.0
        # Time of the last trial's end, and the pause after it.
        self.trial_end = 0.0
        self.pause = SHORTEST_PAUSE
        self._start_trial()

    @property
    def is_chosen(self) -> bool:
        """Whether a first trial is complete."""
        return bool(self.seconds)

    def set_threads(self) -> None:
        """Set the number of threads for the next step."""
        if not self.trial and self._is_trial_due():
            self._start_trial()
        if torch.get_num_threads() != self.count:
            torch.set_num_threads(self.count)

    def record_step(self, seconds: float, work: float = 1.0) -> None:
        """Record the seconds of the step since `set_threads`, and its amount of work where that
        differs between steps.
        """
        if not self.trial:
            self.recent.append(seconds / work)
            return
        self.trial[self.count].append(seconds / work)
        self.trial_seconds += seconds
        best = min(median(times) for times in self.trial.values() if times)
        # Without a usual time to compare with, one slow step may be an accident.
        steps, patience = (
            (self.trial_steps, 1) if self.is_chosen else (FIRST_TRIAL * self.trial_steps, 2)
        )
        hopeless = {
            count
            for count, times in self.trial.items()
            if times and median(times) >= HOPELESS * best
        }
        open_counts = [
            count
            for count, times in self.trial.items()
            if (len(times) < patience or (len(times) < steps and count not in hopeless))
            and (times or not self._is_beyond(count, hopeless))
        ]
        if open_counts:
            # Forwards and backwards in turn, so that steps of two kinds that alternate are shared
            # alike.
            num_passes = min(len(self.trial[count]) for count in open_counts)
            ordered = open_counts[::-1] if num_passes % 2 else open_counts
            self.count = min(ordered, key=lambda count: len(self.trial[count]))
        else:
            self._finish_trial()

    def _is_beyond(self, count: int, hopeless: set[int]) -> bool:
        """Tell whether a hopeless count lies between a count and the chosen one: one step of it
        may take minutes then.
        """
        low, high = sorted((count, self.chosen))
        return any(low < other < high for other in hopeless)

    def summary(self) -> dict[str, Any]:
        """Return the choice with its measurements, for summary.json."""
        seconds = {str(count): round(value, 6) for count, value in sorted(self.seconds.items())}
        return {"threads": self.chosen, "seconds": seconds, "changes": self.num_changes}

    def describe(self) -> str:
        """Describe the choice with its measurements in a few words."""
        times = ", ".join(
            f"{count}: {value * 1e3:.3g} ms" for count, value in sorted(self.seconds.items())
        )
        return f"{self.chosen} ({times})"

    def _is_trial_due(self) -> bool:
        """Tell whether times are unsteady, another kind of step changed its count, or the pause
        is over.
        """
        pause = self.clock() - self.trial_end
        usual = self.seconds[self.chosen]
        if self.counter.changes != self.seen_changes or pause > self.pause:
            return True
        if pause < UNSTEADY_PAUSE or len(self.recent) < 2:
            return False
        is_collapsed = min(self.recent[-1], self.recent[-2]) > HOPELESS * usual
        return is_collapsed or (
            len(self.recent) == WINDOW and not 1 / BAND < median(self.recent) / usual < BAND
        )

    def _start_trial(self) -> None:
        """Begin a trial with the chosen count; where all cores are taken, no larger count takes
        part.
        """
        is_limited = self.is_chosen and self.chosen < self.counts[-1] and not self.has_free_core()
        counts = (
            [count for count in self.counts if count <= self.chosen] if is_limited else self.counts
        )
        if len(counts) > 1:
            distance = {
                count: abs(count.bit_length() - self.chosen.bit_length()) for count in counts
            }
            self.trial = {
                count: []
                for count in sorted(
                    counts, key=lambda count: (count != self.chosen, distance[count])
                )
            }
            self.count = self.chosen
            self.trial_seconds = 0.0
        elif len(self.recent) == WINDOW:
            self.seconds[self.chosen] = median(self.recent)

    def _finish_trial(self) -> None:
        """Choose the fastest count that was tried; after the first trial, the current one stays
        unless another is faster by the margin."""
        before = self.chosen
        is_first = not self.is_chosen
        measured = {count: median(times) for count, times in self.trial.items() if times}
        self.seconds |= measured
        fastest = min(measured, key=lambda count: measured[count])
        if is_first or self.seconds[fastest] < MARGIN * self.seconds[before]:
            self.chosen = fastest
        self.count, self.trial, self.trial_end = self.chosen, {}, self.clock()
        self.recent.clear()
        has_changed = self.chosen != before and not is_first
        self.num_changes += has_changed
        self.counter.changes += has_changed
        self.seen_changes = self.counter.changes
        pause = SHORTEST_PAUSE if is_first or has_changed else min(2 * self.pause, LONGEST_PAUSE)
        self.pause = max(pause, PAUSE_PER_TRIAL * self.trial_seconds)


def has_free_core() -> bool:
    """Tell whether fewer processes run than there are cores, this one included; true where the
    system does not report it.
    """
    try:
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
    except OSError:
        return True
    return int(running) < (os.cpu_count() or 1)


@cache
def candidate_counts() -> tuple[int, ...]:
    """Return the numbers of threads to compare: the powers of two up to torch's own number, and
    that; only that one where the environment sets it."""
    most = torch.get_num_threads()
    if personal_variable() is not None:
        return (most,)
    return tuple(sorted({most, *(1 << power for power in range(most.bit_length()))}))


def make_tuner(device: torch.device, trial_steps: int) -> TimedThreadTuner | None:
    """Make a tuner for one kind of step; None on a GPU and where there is nothing to choose."""
    counts = candidate_counts()
    if device.type != "cpu" or len(counts) == 1:
        return None
    return TimedThreadTuner(counts, trial_steps)

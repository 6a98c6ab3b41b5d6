"""False alarms and delays of the drift test of `spectrain follow`, on simulated traffic.

    python -m lab.benchmarks.follow_alarms out=lab/results/follow-alarms.json

A stream is the mean accepted tokens per draft of one request after another, drawn from one of three
distributions. In half of the streams nothing changes; in the others the mean falls after the
reference.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectrain.files import write_text
from spectrain.provenance import collect_provenance
from spectrain_serve.follow.drift import DriftTest

RATE = 0.05
HORIZON = 1000
REFERENCE = 48
FALL = 0.8
Values = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Values]


def draw_skewed(generator: np.random.Generator, count: int) -> Values:
    """Return means over six rounds of which most accept nothing."""
    mean: Values = np.minimum(generator.geometric(0.6, (count, 6)) - 1, 3).mean(1)
    return mean


def draw_normal(generator: np.random.Generator, count: int) -> Values:
    """Return values of a normal distribution."""
    return generator.normal(1.5, 0.5, count)


def draw_two(generator: np.random.Generator, count: int) -> Values:
    """Return one of two values, as where half of the requests repeat a text."""
    values: Values = generator.choice([0.5, 2.5], count)
    return values


DISTRIBUTIONS: dict[str, Draw] = {
    "skewed": draw_skewed,
    "normal": draw_normal,
    "two values": draw_two,
}


def count_until_alarm(test: DriftTest, values: Values) -> int | None:
    """Return after how many requests the test raises an alarm; None if it does not."""
    return next((number for number, value in enumerate(values, 1) if test.add(float(value))), None)


def measure_distribution(draw: Draw, streams: int) -> dict[str, Any]:
    """Return the share of streams with a false alarm, and the requests until a fall is noticed."""
    generator = np.random.default_rng(0)
    deviation = float(draw(generator, 100_000).std())
    false_alarms = 0
    delays = []
    for _ in range(streams):
        for fall in (0.0, FALL * deviation):
            test = DriftTest(REFERENCE, HORIZON, RATE)
            count_until_alarm(test, draw(generator, REFERENCE))
            alarm = count_until_alarm(test, draw(generator, HORIZON) - fall)
            if fall:
                delays.append(HORIZON if alarm is None else alarm)
            else:
                false_alarms += alarm is not None
    return {
        "streams": streams,
        "false_alarms": false_alarms,
        "median_delay": median(delays),
        "unnoticed": delays.count(HORIZON),
    }


def main(words: list[str]) -> None:
    """Measure all distributions."""
    settings = {"streams": "200", "out": ""} | dict(word.split("=", 1) for word in words)
    setting = {"rate": RATE, "horizon": HORIZON, "reference": REFERENCE, "fall": FALL}
    rows = []
    for name, draw in DISTRIBUTIONS.items():
        rows.append({"distribution": name, **measure_distribution(draw, int(settings["streams"]))})
        print(rows[-1], flush=True)
    if settings["out"]:
        content = {"provenance": collect_provenance(), "setting": setting, "rows": rows}
        write_text(Path(settings["out"]), json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The drift test keeps its stated rate of false alarms, and notices a fall."""

import numpy as np

from spectrain_serve.follow.drift import DriftTest, calibrate_threshold


def draw_requests(generator: np.random.Generator, count: int, fall: float = 0.0) -> list[float]:
    """Mean accepted tokens per draft of requests with few rounds: skewed, with many equal
    values.
    """
    rounds = np.minimum(generator.geometric(0.6 + fall, (count, 6)) - 1, 3)
    return [float(value) for value in rounds.mean(1)]


def test_false_alarms_keep_their_rate() -> None:
    """Over many streams without a change, the share with an alarm is the stated one, three
    standard errors granted.
    """
    generator = np.random.default_rng(0)
    rate = 0.1
    streams = 150
    alarms = 0
    for _ in range(streams):
        test = DriftTest(reference_size=32, horizon=80, rate=rate, resamples=200)
        alarms += any([test.add(value) for value in draw_requests(generator, 32 + 80)])
    assert alarms / streams <= rate + 3 * np.sqrt(rate * (1 - rate) / streams)


def test_a_fall_raises_a_single_alarm() -> None:
    generator = np.random.default_rng(1)
    test = DriftTest(reference_size=32, horizon=200, rate=0.05, resamples=200)
    assert not any([test.add(value) for value in draw_requests(generator, 32)])
    alarms = [
        number
        for number, value in enumerate(draw_requests(generator, 150, fall=0.3))
        if test.add(value)
    ]
    assert len(alarms) == 1 and alarms[0] < 100
    test.restart()
    assert not test.is_ready and not test.has_alarm


def test_a_lower_rate_has_a_higher_threshold() -> None:
    reference = np.array(draw_requests(np.random.default_rng(2), 32))
    thresholds = [calibrate_threshold(reference, 50, rate, 300) for rate in (0.3, 0.1, 0.02)]
    assert thresholds == sorted(thresholds) and thresholds[0] < thresholds[-1]


def test_equal_values_are_no_drift() -> None:
    test = DriftTest(reference_size=16, horizon=50, rate=0.05, resamples=100)
    assert not any([test.add(1.0) for _ in range(200)])

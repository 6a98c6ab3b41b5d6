"""What acceptance drafting needs from measured times: the equations, the files of a measurement,
and the sentences.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spectrain.provenance import processor_name
from spectrain_serve.times.row_times import (
    DrafterTimes,
    EngineTimes,
    RoundTime,
    RowTime,
    Spread,
    advise_engine,
    advise_target,
    expected_tokens,
    find_times,
    load_times,
    predict_speedups,
    required_rate,
    save_times,
)
from tests.settings.test_damaged_files import TEXT, write_no_keys


def make_times(
    seconds: dict[int, float], engine: str = "llamacpp", length: int = 64
) -> EngineTimes:
    """Return a measurement with these medians by the number of rows, on this processor."""
    forwards = tuple(
        RowTime(length, rows, Spread(value, value, value, 9)) for rows, value in seconds.items()
    )
    return EngineTimes(engine, "1.0 (abc)", "tiny", "float32", 1, processor_name(), {}, forwards)


@pytest.mark.parametrize("num_drafts", [1, 2, 7])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_rates_and_tokens_are_those_of_simulated_rounds(rate: float, num_drafts: int) -> None:
    """A round accepts drafted tokens until the first failure of a geometric variable, and adds
    one.
    """
    draws = np.random.default_rng(0).geometric(1 - rate, size=200_000) - 1
    mean = np.minimum(draws, num_drafts).mean() + 1
    assert expected_tokens(rate, num_drafts) == pytest.approx(mean, rel=0.01)
    assert required_rate(expected_tokens(rate, num_drafts), num_drafts) == pytest.approx(rate)


def test_what_no_acceptance_reaches_is_unreachable() -> None:
    assert required_rate(3.01, 2) is None and required_rate(3.0, 2) == pytest.approx(1.0)
    assert required_rate(0.9, 2) == 0.0


def test_a_speedup_is_tokens_over_the_time_of_a_round() -> None:
    """A drafter at the required rate is as fast as decoding without it."""
    ratios = make_times({1: 0.01, 2: 0.015, 4: 0.021}).ratios(64)
    assert ratios == {1: pytest.approx(1.5), 3: pytest.approx(2.1)}
    for num_drafts, ratio in ratios.items():
        rate = required_rate(1.3 * ratio, num_drafts)
        if rate is None:
            assert num_drafts == 1 and 1.3 * ratio > 1.9
            continue
        by_position = [rate**position for position in range(1, num_drafts + 1)]
        assert predict_speedups(ratios, by_position)[num_drafts] == pytest.approx(1.3)
    assert predict_speedups(ratios, [0.5]) == {1: pytest.approx(1.0)}


def test_a_measurement_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    times = make_times({1: 0.01, 2: 0.015})
    rounds = (RoundTime(64, 1, Spread(0.02, 0.02, 0.02, 9)),)
    with_drafter = replace(
        times, drafter=DrafterTimes("runs/a", rounds, (0.4,)), provenance={"date": "now"}
    )
    for each in (times, with_drafter):
        assert load_times(save_times(each, tmp_path / "copy.json")) == each
    # A newer measurement of the same replaces the earlier one; other threads are another
    # measurement.
    save_times(times), save_times(with_drafter), save_times(replace(times, threads=2))
    assert find_times("tiny", "llamacpp", threads=1, dtype=None) == [with_drafter]
    assert (
        len(find_times("tiny")) == 2 and not find_times("tiny", "vllm") and not find_times("other")
    )
    save_times(replace(times, processor="another", engine="vllm"))
    assert not find_times("tiny", "vllm")
    (tmp_path / "broken.json").write_text("{}")
    assert load_times(tmp_path / "broken.json") is None
    (tmp_path / "cache" / "engine-times" / "llamacpp-tiny-broken.json").write_text("{}")
    assert len(find_times("tiny", "llamacpp")) == 2


def test_advice_says_what_pays_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = make_times({1: 0.01, 2: 0.021, 4: 0.05})
    quick = make_times({1: 0.01, 2: 0.012, 4: 0.015}, "openvino")
    assert "no drafter pays" in advise_engine(slow, [0.4, 0.1, 0.05])
    text = advise_engine(quick, [0.5, 0.4, 0.3])
    assert "OpenVINO 1.0 (float32, 1 thread" in text and "breaks even from 20%" in text
    # 1 + 1.2 tokens in 1.5 forwards.
    assert "at most 1.47x, with 3 drafted" in text
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path))
    rounds = (RoundTime(64, 1, Spread(0.02, 0.02, 0.02, 9)),)
    save_times(replace(quick, drafter=DrafterTimes("runs/a", rounds)))
    assert (
        "predicted to reach 0.75x, with 1 drafted"
        in advise_target("tiny", [0.5], "runs/a", ["llamacpp", "openvino"])[0]
    )
    assert "at most 1.25x" in advise_target("tiny", [0.5], "runs/b", ["openvino"])[0]
    assert advise_target("tiny", None, "runs/a", ["vllm"]) == []


@pytest.mark.parametrize("damage", [*TEXT, write_no_keys])
def test_measured_times_are_left_out_aloud(
    tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    path.write_text('{"engine": "llamacpp"}')
    damage(path)
    assert load_times(path) is None
    assert "times.json: it holds no measurement that this version reads" in capsys.readouterr().err

"""The benchmarks and the doctor run and say what they measured; how fast it is, is not a test's
business.
"""

import re
import sys

import pytest

from spectrain.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["spectrain", *arguments])
    main()


@pytest.mark.slow
def test_bench_decode_prints_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints a row for every number of rows, and spectrain's decoding against
    generate.
    """
    run(monkeypatch, "bench", "decode", "target=tiny", "eval.limit=2", "eval.max_new_tokens=6")
    printed = capsys.readouterr().out
    assert all(re.search(rf"[|│]\s+{rows} [|│]", printed) for rows in (1, 8, 32))
    assert "interleaved" in printed
    assert re.search(
        r"generate with a static cache takes [\d.]+ ms, [\d.]+ times as long",
        " ".join(printed.split()),
    )


def test_bench_train_prints_throughput(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens per second, total and supervised, and the share of data, target, drafter, other
    processes and rest.
    """
    run(
        monkeypatch,
        "bench",
        "train",
        "recipe=eagle3",
        "target=tiny",
        "data.limit=20",
        "data.max_length=96",
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"\d+ tokens/s, \d+ supervised", printed)
    assert re.search(r"data \d+%, target \d+%, drafter \d+%, others \d+%, rest \d+%", printed)

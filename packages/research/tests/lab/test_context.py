"""Drafting by the length of the text: every line at small size, and what it counts."""

import json
from pathlib import Path

import pytest

from lab.benchmarks.command import run_benchmark
from lab.benchmarks.context import ContextBench
from spectrain.errors import UserError


def test_it_writes_rows_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row holds a length with every drafter; all answers are the target's, and 3 guesses
    change none of Quest's rounds.
    """
    out = tmp_path / "context.json"
    words = ["lengths=[48]", "prompts=1", "new_tokens=9", "depth=2", "budget=40"]
    monkeypatch.setattr("sys.argv", ["context", *words, f"out={out}"])
    run_benchmark(ContextBench)
    results = json.loads(out.read_text())
    (row,) = results["rows"]
    assert (
        row["length"] == 48
        and row["perplexity"] > 1
        and results["setting"]["trained_length"] == 1024
    )
    for name, entry in row["drafters"].items():
        assert entry["identical"] == 1 and 1 <= entry["acceptance_length"] <= 3, name
        read = {part: sum(entry[part].values()) for part in ("draft", "verify", "autoregressive")}
        assert entry["ratio"] == pytest.approx(
            (read["draft"] + read["verify"]) / read["autoregressive"], abs=1e-3
        )
    assert row["drafters"]["quest"]["by_prompt"] == row["drafters"]["quest, 3 guesses"]["by_prompt"]
    assert out.with_suffix(".svg").read_text().count("int4 weights")


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="prompts=0: use 1 or more"):
        ContextBench(prompts=0)
    # of which one belongs to a round
    with pytest.raises(UserError, match="new_tokens=1: use 2 or more"):
        ContextBench(new_tokens=1)
    with pytest.raises(UserError, match="give lengths of 2 or more"):
        ContextBench(lengths=())

"""Drafting by the length of the text: every line at small size, and what it counts."""

import json
from pathlib import Path

import pytest

from spectrain.bench.context import ContextBench
from spectrain.bench.traffic import count_traffic
from spectrain.cli.main import dispatch_command
from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.report import explanation
from spectrain.experimental.less_cache.drafter import SelfDraft
from spectrain.models.target import Target
from spectrain.models.traffic import weight_bytes
from spectrain.trees import Chain


def test_it_writes_rows_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a length with every drafter; all answers are the target's, and 3 guesses change none of Quest's rounds."""
    out = tmp_path / "context.json"
    given = ["bench.lengths=[48]", "bench.prompts=1", "bench.new_tokens=9", "bench.depth=2", "bench.budget=40"]
    monkeypatch.setattr("sys.argv", ["spectrain"])
    dispatch_command(["bench", "context", *given, f"bench.out={out}"])
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert row["length"] == 48 and row["perplexity"] > 1 and found["setting"]["trained_length"] == 1024
    for name, entry in row["drafters"].items():
        assert entry["identical"] == 1 and 1 <= entry["acceptance_length"] <= 3, name
        read = {part: sum(entry[part].values()) for part in ("draft", "verify", "autoregressive")}
        assert entry["ratio"] == pytest.approx((read["draft"] + read["verify"]) / read["autoregressive"], abs=1e-3)
    assert row["drafters"]["quest"]["by_prompt"] == row["drafters"]["quest, 3 guesses"]["by_prompt"]
    assert out.with_suffix(".svg").read_text().count("int4 weights")


def test_what_an_answer_reads_is_told(shallow: Target) -> None:
    """Of a drafter that counts: a plain step reads every weight, a round those of its drafts and of its verification."""
    prompt, weights = [*range(10, 40)], weight_bytes(shallow)
    assert count_traffic(shallow, Ngram(shallow), Chain(2), Greedy(), prompt) is None
    found = count_traffic(shallow, SelfDraft(shallow, "window", 200), Chain(2), Greedy(), prompt)
    assert found is not None and found["prompt_tokens"] == 30
    assert found["autoregressive"]["weights"] == weights
    assert found["draft"]["weights"] == pytest.approx(2 * found["verify"]["weights"], abs=2)  # two drafts a round
    assert found["verify"]["weights"] == pytest.approx(weights / 3, abs=2)  # and all of them are kept
    assert found["ratio"] == pytest.approx(1, abs=0.1)
    bounds = {"time_share": {}, "acceptance_by_depth": [], "setting": {"batch_size": 1, "device": "", "dtype": ""}}
    assert any("megabytes read a token behind 30 tokens" in line for line in explanation({**bounds, "traffic": found}))


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="bench.prompts=0: use 1 or more"):
        ContextBench(prompts=0)
    with pytest.raises(UserError, match="bench.new_tokens=1: use 2 or more"):  # of which one belongs to a round
        ContextBench(new_tokens=1)
    with pytest.raises(UserError, match="give lengths of 2 or more"):
        ContextBench(lengths=())

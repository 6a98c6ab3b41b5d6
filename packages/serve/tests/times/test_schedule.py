"""Draft tokens by the number of texts: the choice, its ranges, and the card that shows them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from spectrain.cli.export import export_command
from spectrain.models.target import Target
from spectrain_serve.times.engine_schedules import list_steps
from spectrain_serve.times.load import TimeTable
from spectrain_serve.times.schedule import (
    cut_lengths,
    estimate_seconds,
    list_costs,
    list_ranges,
    make_schedule,
    simulate_schedule,
)
from tests.export.test_converter import ours

TOKENS = 3
# With one text a round costs little more than a step, with eight four times as much.
TABLE = TimeTable(
    {1: 0.010, 8: 0.012},
    {1: 0.0112, 8: 0.048},
    {1: [0.4, 0.3, 0.2, 0.1]},
    0.001,
    [41],
)

SUMMARY = json.dumps(
    {
        "setting": {},
        "acceptance_length": {"pooled": 1.5, "ci95": None},
        "speedup": {"ratio": 1.1, "ci95": None, "quotable": True, "reason": None},
        "lossless": {"lossless": True, "checked": 0},
        "tree": {"name": "chain", "depth": 3},
    }
)


def test_the_ends_are_what_was_measured() -> None:
    for num_texts in (1, 8):
        steps = [estimate_seconds(TABLE, num_texts, length, TOKENS) for length in range(TOKENS + 1)]
        assert (steps[0], steps[-1]) == (
            TABLE.step_seconds[num_texts],
            pytest.approx(TABLE.round_seconds[num_texts]),
        )
        assert np.allclose(np.diff(steps, 2), 0)
    means = [np.dot(cut_lengths(TABLE, 1, k), range(1, k + 2)) for k in range(TOKENS + 1)]
    assert means == pytest.approx([1.0, 1.6, 1.9, TABLE.mean_round(1)])


def test_every_number_of_texts_has_its_fastest_length() -> None:
    lengths = make_schedule(TABLE, TOKENS)
    assert lengths[0] == TOKENS and lengths[-1] == 0 and len(lengths) == 8
    assert lengths == sorted(lengths, reverse=True)
    for num_texts, chosen in enumerate(lengths, start=1):
        rates = [
            np.dot(cut_lengths(TABLE, num_texts, length), range(1, length + 2))
            / estimate_seconds(TABLE, num_texts, length, TOKENS)
            for length in range(TOKENS + 1)
        ]
        assert rates[chosen] == max(rates)


@pytest.mark.parametrize("lengths", [[3], [3, 3, 1, 1, 0], [0, 2, 2, 0]])
def test_ranges_cover_every_number_once(lengths: list[int]) -> None:
    ranges = list_ranges(lengths)
    assert [length for first, last, length in ranges for _ in range(first, last + 1)] == lengths
    assert ranges[0][0] == 1
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))
    assert all(before[2] != after[2] for before, after in pairwise(ranges))


def test_the_schedule_is_as_fast_as_a_fixed_length_and_faster_under_load() -> None:
    result = simulate_schedule(TABLE, TOKENS, 50.0, num_requests=80)
    assert result["ranges"] == list_ranges(make_schedule(TABLE, TOKENS))
    assert min(result["gains"]) > 0.97 and result["gains"][-1] > 1.2


def test_the_card_has_vllms_command(tiny: Target, tmp_path: Path) -> None:
    """A sweep of the run gives the card a command with its ranges."""
    drafter = ours(tmp_path / "run" / "drafter", tiny, "eagle3", vocab_size=64)
    out = export_command(str(drafter.parent), "vllm", str(tmp_path / "plain"))
    assert "Draft tokens by load" not in (out / "README.md").read_text()
    folder = tmp_path / "run" / "eval" / "batch"
    folder.mkdir(parents=True)
    schedule = simulate_schedule(TABLE, TOKENS, 50.0, num_requests=20)
    summary = json.loads(SUMMARY) | {"axis": {"load": {"schedule": schedule}}}
    (folder / "summary.json").write_text(json.dumps(summary))
    out = export_command(str(drafter.parent), "vllm", str(tmp_path / "out"))
    card = (out / "README.md").read_text()
    ranges = json.dumps(schedule["ranges"])
    assert f'"num_speculative_tokens_per_batch_size": {ranges}' in card
    assert "the evaluation batch measured" in card.lower()


def test_costs_are_the_forwards_by_their_tokens() -> None:
    """A step of n texts has n tokens, and a round n times one more than it drafts, of whose time
    drafting takes a part; more tokens never take less time.
    """
    table = replace(TABLE, draft_seconds={1: 0.0002, 8: 0.008})
    costs = list_costs(table, TOKENS)
    assert costs is not None
    assert costs["sample_batch_tokens"] == [1, 4, 8, 32]
    seconds = [1 / rate for rate in costs["sample_steps_per_sec"]]
    assert seconds == pytest.approx([0.010, 0.011, 0.012, 0.040], rel=1e-4)
    assert costs["max_batch_tokens"] == 32
    slow = list_costs(replace(table, step_seconds={1: 0.050, 8: 0.012}), TOKENS)
    assert slow is not None and slow["sample_steps_per_sec"] == [20.0] * 4
    assert list_costs(TABLE, TOKENS) is None


def test_sglang_keeps_to_the_schedule() -> None:
    """By its rule, the entry of the largest key that is no more than the number of requests, the
    candidates are the one length that the schedule has."""
    lengths = make_schedule(TABLE, TOKENS)
    steps = list_steps(list_ranges(lengths))
    for num_texts, length in enumerate(lengths, start=1):
        entry = max(int(key) for key in steps if int(key) <= num_texts)
        assert steps[str(entry)] == {"candidate_steps": [length]}


CONFIDENCE = {
    "temperatures": [1.2, 0.9, 1.0, 1.1, 1.3],
    "ece_before": [0.1, 0.12, 0.13, 0.14, 0.15],
    "ece_after": [0.02, 0.03, 0.04, 0.05, 0.06],
    "rounds": 400,
    "judged_rounds": 380,
}


@pytest.mark.parametrize(
    ("family", "options", "files"),
    [
        ("eagle3", {"vocab_size": 64}, {"sglang_steps.json"}),
        (
            "dspark",
            {"block_size": 5, "num_layers": 1, "rank": 8},
            {"sglang_costs.json", "sglang_temperatures.json"},
        ),
        ("dspark", {"block_size": 6, "num_layers": 1, "rank": 8}, set()),
        ("medusa", {}, set()),
    ],
)
def test_an_export_has_the_files_that_sglang_reads(
    tiny: Target, tmp_path: Path, family: str, options: dict[str, object], files: set[str]
) -> None:
    """They hold the schedule, and the card's command names them where they will be."""
    drafter = ours(tmp_path / "run" / "drafter", tiny, family, **options)
    folder = tmp_path / "run" / "eval" / "batch"
    folder.mkdir(parents=True)
    table = replace(TABLE, draft_seconds={1: 0.0002, 8: 0.008})
    schedule = simulate_schedule(table, TOKENS, 50.0, num_requests=20)
    summary = json.loads(SUMMARY)
    summary |= {"axis": {"load": {"schedule": schedule}}, "confidence": CONFIDENCE}
    (folder / "summary.json").write_text(json.dumps(summary))
    format_name = "vllm" if family == "medusa" else "sglang"
    out = export_command(str(drafter.parent), format_name, str(tmp_path / "out"))
    written = {path.name for path in out.glob("sglang_*.json")}
    assert written == files
    card = (out / "README.md").read_text()
    assert all(f"{out}/{name}" in card for name in files)
    contents = {name: json.loads((out / name).read_text()) for name in files}
    if family == "eagle3":
        assert contents["sglang_steps.json"] == list_steps(schedule["ranges"])
        assert "--speculative-adaptive --speculative-adaptive-config" in card
    if family == "dspark" and files:
        assert contents["sglang_costs.json"] == schedule["costs"]
        temperatures = contents["sglang_temperatures.json"]
        assert temperatures["temperatures"] == CONFIDENCE["temperatures"]
        assert temperatures["num_samples"] == CONFIDENCE["rounds"]
        assert "SGLANG_RAGGED_VERIFY_MODE=compact python -m sglang.launch_server" in card
        assert "0.100 0.120 0.130 0.140 0.150 without them and 0.020" in card

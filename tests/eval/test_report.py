"""The table that scoring prints fits where it is read."""

import io
import re
from typing import Any

import pytest

from spectrain.eval.columns import format_identical, list_short_labels
from spectrain.eval.notes import (
    describe_doubts,
    describe_identity,
    explain_numbers,
    list_findings,
)
from spectrain.eval.report import (
    WIDTH,
    print_answer,
    print_table,
    split_by_author,
    system_table,
)
from spectrain.output.console import make_console
from spectrain.output.verbosity import command_output


def make_entry(label: str) -> dict[str, Any]:
    return {
        "label": label,
        "acceptance_length": {"pooled": 12.345, "ci95": [10.111, 13.222]},
        "speedup": {"ratio": 11.66, "ci95": [10.5, 12.9], "predicted": 11.7},
        "tokens_per_second": {"autoregressive": 1014.2, "drafted": 12024.9},
        "lossless": {
            "checked": 100,
            "identical": 100,
            "differences": [],
            "near_ties": [],
            "lossless": True,
            "rule": "greedy",
            "reference": "transformers generate",
        },
    }


@pytest.mark.parametrize(
    "label", ["chain of 5", "a family with a wide name, cartesian, 128 nodes, drawn", "w" * 150]
)
def test_the_table_is_no_wider_than_it_says(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    """However wide a name or a number is, all of it is printed, in lines of at most 100 columns;
    predictions are left out first.
    """
    setting = {
        "recipe": "eagle3",
        "target": "smollm2-135m-q4_1",
        "prompts": 20,
        "max_new_tokens": 64,
        "batch_size": 1,
        "device": ("a processor with a name as long as processors have them @ 2.70GHz, 2 threads"),
        "dtype": "float32",
        "drafter": {},
    }
    share = {"draft": 0.2, "verify": 0.7, "accept": 0.05, "other": 0.05}
    details = {
        "setting": setting,
        "time_share": share,
        "acceptance_by_depth": [0.8] * 30,
        "compared": {"other": make_entry(label)},
    }
    print_table({**make_entry("drafter, eagle2, 16 nodes"), **details})
    shown = capsys.readouterr().out
    assert WIDTH == 100 and max(map(len, shown.splitlines())) <= WIDTH
    row = next(line for line in shown.splitlines() if line.startswith(label[:8]))
    for number in (
        "12.35",
        "10.11 to 13.22",
        "12024.9",
        "11.66",
        "10.50 to 12.90",
        "100 of 100",
    ):
        assert number in row
    first = "".join(line[:WIDTH].split("  ")[0] for line in shown.splitlines())
    assert label.replace(" ", "") in first.replace(" ", "")


def make_summary() -> dict[str, Any]:
    setting = {
        "recipe": "eagle3",
        "target": "tiny",
        "prompts": 20,
        "max_new_tokens": 64,
        "batch_size": 1,
        "device": "a processor",
        "dtype": "float32",
        "drafter": {},
        "skipped": {"prompts too long": 2},
    }
    details: dict[str, Any] = {
        "setting": setting,
        "time_share": {"draft": 0.2, "verify": 0.7, "accept": 0.05, "other": 0.05},
        "acceptance_by_depth": [0.8, 0.6],
        "compared": {"own": make_entry("drafter, eagle2, 16 nodes")},
    }
    for entry in (details["compared"]["own"], details):
        entry |= {
            "acceptance_length": {"pooled": 1.39, "ci95": [1.15, 1.69]},
            "speedup": {"ratio": 1.22, "ci95": [0.92, 1.62], "predicted": 1.23},
            "tokens_per_second": {"autoregressive": 22.4, "drafted": 27.4},
        }
    details["lossless"] = {**make_entry("")["lossless"], "checked": 20, "identical": 20}
    details["compared"]["own"]["lossless"] = details["lossless"]
    return {**make_entry("drafter, chain of 3"), **details}


def test_a_score_prints_headline_table_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    """What explains the numbers is printed with --notes alone."""
    print_table(make_summary())
    short = capsys.readouterr().out
    with command_output("notes"):
        print_table(make_summary())
    noted = capsys.readouterr().out
    for shown in (short, noted):
        assert shown.startswith("Drafter, ") and "Left out: 2 prompts too long." in shown
    assert (
        noted.startswith(short) and "Drafts of the drafter accepted by depth" in noted[len(short) :]
    )
    assert len(short.splitlines()) <= 16


def test_what_was_asked_for_is_printed_without_notes() -> None:
    """A sentence for turns and surely worse categories, and none where there is one turn or the
    interval holds 1.
    """
    turn = {"acceptance_length": 1.5, "ci95": [1.4, 1.6], "rounds": 9, "tokens": 13}
    disparity = {"worst": "Chinese", "best": "English", "ratio": 0.8, "ci95": [0.7, 0.9]}
    summary = make_summary() | {"by_turn": {"turn 1": turn}, "disparity": disparity}
    (sentence,) = list_findings(summary)
    assert sentence.startswith("Disparity of tokens per forward: Chinese has 0.80 of English")
    assert sentence not in explain_numbers(summary)
    summary["disparity"] = {**disparity, "ci95": [0.7, 1.1]}
    assert any("Chinese" in note for note in explain_numbers(summary))
    summary["by_turn"]["turn 2"] = turn
    (sentence,) = list_findings(summary)
    assert "turn 1 1.50 [1.40 to 1.60], turn 2 1.50" in sentence


LABELS = (
    "drafter, chain of 3",
    "drafter + retrieval, auto, up to 64 nodes",
    "drafter, auto, up to 64 nodes",
    "retrieval alone",
)


@pytest.mark.parametrize("width", [50, 60, 72, 80, 90, 100, 120, 160])
def test_names_take_one_line_at_any_width(width: int) -> None:
    """What does not fit beside the names is left out: predictions, tokens per second, identical
    answers, and last the intervals. Tokens per forward and speedup always stand.
    """
    first, *others = (make_entry(label) for label in LABELS)
    tree = {"undrafted_share": 0.1}
    for entry, drafted in zip(others[1:], (1, 94)):
        entry |= {"rounds": 100, "drafted_rounds": drafted, "tree": tree}
    summary = {**make_summary(), **first, "compared": {"own": others[0], "auto": others[1]}}
    summary["compared"]["retrieval"] = others[2]
    shown = io.StringIO()
    console = make_console(width=width, file=shown)
    console.print(system_table(summary, width))
    lines = shown.getvalue().splitlines()
    rows = lines[lines.index(next(line for line in lines if "\u2500" in line)) + 1 :]
    names = [re.split("  +", row)[0] for row in rows]
    assert max(map(len, lines)) <= width
    assert names == [
        "autoregressive",
        "drafter, chain of 3",
        "drafter + retrieval, auto",
        "drafter, auto, 1% drafted",
        "retrieval alone, 94% drafted",
    ]
    needed = ["12.35", "11.66"] + (["10.11 to 13.22"] if width >= 80 else [])
    needed += ["100 of 100", "12024.9"] if width >= 100 else []
    assert all(number in row for row in rows[1:] for number in needed)
    assert any("% drafted: share of rounds" in line for line in lines)


def test_names_that_differ_in_their_nodes_alone_keep_them() -> None:
    entries = [make_entry(f"drafter, auto, up to {nodes} nodes") for nodes in (16, 64)]
    assert list_short_labels(entries) == [entry["label"] for entry in entries]


def test_an_answer_says_who_wrote_each_token(capsys: pytest.CaptureFixture[str]) -> None:
    """The first token and the last one of each round are the target's, accepted ones the
    drafter's; joined, they are the answer.
    """
    pieces = ["A", " bee", " flies", " to", " the", " hive", "."]
    rounds = [
        {"kept": [1, 3], "emitted": 3},
        {"kept": [], "emitted": 1},
        {"kept": [1], "emitted": 2},
    ]
    answer = {"pieces": pieces, "rounds": rounds}
    parts = [(part, drafted) for part, drafted in split_by_author(answer) if part]
    assert [piece for part, _ in parts for piece in part] == pieces
    assert [part for part, drafted in parts if drafted] == [[" bee", " flies"], [" hive"]]
    print_answer([{"tree": {}}, {"pieces": ["x"], "rounds": rounds[1:2]}, answer])
    first, text = capsys.readouterr().out.splitlines()
    assert "in brackets, 3 of 7 tokens" in first and text == "A[ bee flies] to the[ hive]."


@pytest.mark.parametrize(
    ("lossless", "cell", "sentence"),
    [
        (
            {"rule": "greedy", "checked": 3, "identical": 3},
            "3 of 3",
            "identical to transformers generate",
        ),
        ({"rule": "recursive"}, "not checked", "the target's distribution by construction"),
        ({"rule": "typical", "lossless": False}, "lossy", "LOSSY: acceptance=typical"),
    ],
    ids=lambda value: value["rule"] if isinstance(value, dict) else None,
)
def test_a_score_says_what_was_checked(lossless: dict[str, Any], cell: str, sentence: str) -> None:
    """Greedy answers are compared; sampled ones are the target's by construction, unchecked;
    lossy ones never are.
    """
    found = make_entry("drafter")["lossless"] | {"checked": 0, "identical": 0} | lossless
    shown = describe_identity(found)
    assert format_identical(found) == cell and sentence in shown
    assert ("identical" in shown) == bool(found["checked"]) and ("not checked" in shown) == (
        cell == "not checked"
    )


def test_systems_with_a_doubtful_speedup_are_separated() -> None:
    """Names of systems hold commas."""
    doubtful = {"quotable": False, "reason": "the machine was busy"}
    summary = {
        "label": "drafter, chain of 3",
        "speedup": doubtful,
        "compared": {
            "tree": {"label": "drafter, eagle2", "speedup": doubtful},
            "ngram": {"label": "n-gram lookup", "speedup": {"quotable": True}},
        },
    }
    (sentence,) = describe_doubts(summary)
    assert "of drafter, chain of 3; drafter, eagle2: the machine was busy." in sentence

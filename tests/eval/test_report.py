"""The table that scoring prints fits where it is read."""

from typing import Any

import pytest

from spectrain.eval.columns import format_identical
from spectrain.eval.notes import describe_identity
from spectrain.eval.report import WIDTH, print_table


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
    """However wide a name or a number is, all of it is printed, in lines of at most 100 columns."""
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
        "11.70",
        "100 of 100",
    ):
        assert number in row
    first = "".join(line[:WIDTH].split("  ")[0] for line in shown.splitlines())
    assert label.replace(" ", "") in first.replace(" ", "")


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

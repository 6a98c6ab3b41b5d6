"""The comparison with other packages: what its rows count, and one comparison of our own engine."""

import json
from pathlib import Path

import pytest

from lab.side_by_side.compare import Row, SideBySide, count_same, describe_row
from spectrain.errors import UserError


def test_rows_count_tokens_behind_the_prompts_own() -> None:
    """The prompt's forward yields a token that no forward behind it is counted for."""
    row = Row("a", "drafted", [0.5, 0.5], [3, 2], [[1, 2, 3, 4], [5, 6, 7, 8]])
    assert row.tokens_per_forward == 6 / 5
    assert row.tokens_per_second == 8
    row.forwards[1] = None
    assert row.tokens_per_forward is None


def test_a_speedup_is_over_the_same_packages_plain_decoding() -> None:
    outputs = [[1, 2], [3, 4]]
    rows = [
        Row("a", "plain", [2.0, 2.0], [1, 1], outputs),
        Row("a", "drafted", [1.0, 1.0], [1, 1], [[1, 2], [3, 5]]),
        Row("transformers", "plain", [4.0, 4.0], [1, 1], [[9, 9], [3, 5]]),
    ]
    described = describe_row(rows[1], rows)
    assert described["speedup"]["ratio"] == 2
    assert described["same_as_plain"] == 1
    assert described["same_as_transformers"] == 1
    assert count_same(rows[0], rows[2]) == 0


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"packages": "spectrain,nothing"}, "packages=nothing"),
        ({"packages": "economize", "environment": "nowhere"}, "run make side-by-side"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SideBySide(**settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_our_own_engine_decodes_as_its_plain_decoding(tmp_path: Path) -> None:
    """A worker in a process of its own drafts, and its texts are those of plain decoding."""
    out = tmp_path / "result.json"
    settings = {"target": "tiny", "packages": "spectrain", "dtype": "float32"}
    SideBySide(prompts=2, tokens=12, out=str(out), **settings).run()  # type: ignore[arg-type]
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) > 1
    assert all(row["same_as_plain"] == 2 for row in rows)
    assert rows[0]["tokens_per_forward"] == 1

"""The tables of a comparison."""

import io
from typing import Any, get_args

import pytest

from spectrain.eval.columns import SYSTEM_COLUMNS, Column, ComparisonTable
from spectrain.output.console import make_console
from spectrain_studies.comparison import table as tables
from spectrain_studies.comparison.table import (
    comparison_table,
    comparison_titles,
    position_table,
)

LABELS = ("drafter + retrieval, auto, up to 64 nodes", "auto, up to 64 nodes", "chain of 3")


@pytest.mark.parametrize("table", get_args(ComparisonTable))
def test_a_column_says_which_tables_show_it(
    table: ComparisonTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = comparison_titles(table)
    column = Column("noise", "other", str, "Another number.")
    monkeypatch.setattr(tables, "SYSTEM_COLUMNS", (*SYSTEM_COLUMNS, column))
    assert comparison_titles(table) == titles
    shown = Column("noise", "other", str, "Another number.", shown_in=(table,))
    monkeypatch.setattr(tables, "SYSTEM_COLUMNS", (*SYSTEM_COLUMNS, shown))
    assert {*comparison_titles(table)} == {*titles, "other"}


def test_a_comparison_has_a_table_by_position() -> None:
    """It has a column for each range that occurs, and is left out without long texts."""
    group = {"acceptance_length": 2.0, "rounds": 3, "tokens": 6, "ci95": [1.5, 2.5]}
    rows = [
        {
            "label": "a",
            "systems": [{"label": "chain", "by_text_position": {"0-1k": group, "4k-8k": group}}],
        }
    ]
    table = position_table(rows)
    assert table is not None and [column.header for column in table.columns] == [
        "drafter",
        "tree",
        "0-1k",
        "4k-8k",
    ]
    assert [*table.columns[2].cells] == ["2.00\n1.50 to 2.50"]
    assert (
        position_table(
            [{"label": "a", "systems": [{"label": "chain", "by_text_position": {"0-1k": group}}]}]
        )
        is None
    )


def make_system(label: str) -> dict[str, Any]:
    return {
        "label": label,
        "acceptance_length": {"pooled": 3.37, "ci95": [2.96, 3.9]},
        "speedup": {"ratio": 1.09, "ci95": [0.95, 1.33]},
        "lossless": {"checked": 16, "identical": 16},
    }


@pytest.mark.parametrize("width", [60, 80, 90, 100, 120, 160])
def test_names_of_a_comparison_take_one_line(width: int) -> None:
    """Columns from the last on are left out beside which names would wrap; a column without
    values is not there.
    """
    run = {
        "label": "transformer_heads",
        "lossless_to": "target",
        "systems": [make_system(label) for label in LABELS],
        "trained_parameters": 530_000,
        "training_tokens": 335_000,
        "training_seconds": 82,
    }
    setting = {"target": "tiny", "prompts": 1, "max_new_tokens": 9, "device": "c", "dtype": "f"}
    table, titles = comparison_table({"setting": setting, "rows": [run]}, width)
    shown = io.StringIO()
    make_console(width=width, file=shown).print(table)
    printed = shown.getvalue()
    lines = printed.splitlines()
    assert "1 prompt," in printed and "batched" not in printed
    assert titles[:4] == ["drafter", "tree", "tokens per forward", "speedup"]
    assert ("training" in titles) == (width >= 120) and ("identical" in titles) == (width >= 90)
    if width >= 80:
        assert max(map(len, lines)) <= width
        row = next(line for line in lines if "transformer_heads" in line)
        assert "transformer_heads  drafter + retrieval, auto " in row and "3.37" in row
        for name in ("auto", "chain of 3"):
            assert any(line.strip().startswith(f"{name}  ") for line in lines)

"""The tables of a comparison."""

from typing import get_args

import pytest

from spectrain.eval.columns import SYSTEM_COLUMNS, Column, ComparisonTable
from spectrain_studies.comparison import table as tables
from spectrain_studies.comparison.table import comparison_titles, position_table


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

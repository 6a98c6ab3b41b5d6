"""Columns of tables read what summary.json holds, and every view shows all of them."""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest

from spectrain.eval.columns import (
    SYSTEM_COLUMNS,
    Column,
    get_value,
    list_systems,
    tracked_values,
)
from spectrain.eval.metrics import SystemSummary
from spectrain.eval.page import write_report
from spectrain.eval.report import print_table
from tests.eval.test_report import make_entry


@pytest.mark.parametrize("column", SYSTEM_COLUMNS, ids=lambda column: column.key)
def test_a_column_reads_a_field(column: Column) -> None:
    """Every key names a field of the typed summary, and every description is a sentence."""
    kind: Any = SystemSummary
    for part in column.key.split("."):
        assert part in {field.name for field in fields(kind)}
        hint = get_type_hints(kind)[part]
        kind = hint if is_dataclass(hint) else object
    assert column.description[0].isupper() and column.description.endswith(".")


def test_the_recommended_row_is_first() -> None:
    """The drafter with retrieval comes before the drafter itself; without it the drafter is
    first.
    """
    summary = {
        **make_entry("drafter"),
        "compared": {"auto": make_entry("auto"), "copies": make_entry("drafter + retrieval")},
    }
    assert list(list_systems(summary)) == ["copies", "drafter", "auto"]
    assert list(list_systems({**summary, "compared": {}})) == ["drafter"]


def test_a_new_column_is_shown_everywhere(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    """One declaration reaches the terminal, the report page and the trackers."""
    column = Column(
        "tokens_per_second.autoregressive",
        "baseline rate",
        "{:.3f}".format,
        "Baseline tokens per second.",
    )
    for view in ("columns", "report", "page"):
        monkeypatch.setattr(f"spectrain.eval.{view}.SYSTEM_COLUMNS", (*SYSTEM_COLUMNS, column))
    setting = {
        "recipe": "eagle3",
        "target": "tiny",
        "prompts": 1,
        "max_new_tokens": 9,
        "batch_size": 1,
        "device": "cpu",
        "dtype": "float32",
        "drafter": {},
    }
    summary = {
        **make_entry("drafter"),
        "compared": {},
        "setting": setting,
        "time_share": {},
        "acceptance_by_depth": [0.5],
    }
    print_table(summary)
    assert "baseline" in capsys.readouterr().out
    assert tracked_values(summary)["tokens_per_second_autoregressive"] == get_value(
        summary, column.key
    )
    row = {"name": "one", "label": "one", "systems": [summary], "lossless_to": "target"}
    write_report(tmp_path / "report.html", [], {"rows": [row]})
    assert (
        "baseline rate" in (tmp_path / "report.html").read_text()
        and "1014.200" in (tmp_path / "report.html").read_text()
    )

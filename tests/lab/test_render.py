"""The renderer of measured results: templates, rows, columns and parts."""

from typing import Any

import pytest

from lab.pages.render import fill_page, fill_template, render_parts

ROWS = {
    "setting": {"target": "tiny"},
    "rows": [
        {"name": "a+b", "group": "x", "tokens": 1234, "by": {"one": 1, "two": 2}},
        {"name": "c", "group": "y", "tokens": 5, "by": {"one": 3, "two": 4}},
    ],
    "groups": {"first": [{"name": "d"}], "second": [{"name": "e"}]},
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{tokens:,} of {/setting.target}", "1,234 of tiny"),
        ("{name:names}", "`a`, `b`"),
        ("{by.two:.1f}", "2.0"),
        ("{none|tokens}", "1234"),
        ("{none?-:.2f}{none?:ratio}", "-"),
        ("{/rows.1.name}", "c"),
    ],
)
def test_a_template_reads_rows_and_files(template: str, text: str) -> None:
    assert fill_template(template, ROWS["rows"][0], ROWS) == text  # type: ignore[index]


def test_a_missing_entry_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing: the result has no such entry"):
        fill_template("{nothing}", {}, ROWS)


def test_tables_select_rows_and_expand_columns() -> None:
    table = {"rows": "rows", "where": {"group": "y"}, "columns": {"name": "{name}", "*by": "{.}"}}
    (text,) = render_parts([{"table": table}], [ROWS])
    assert text == "| name | one | two |\n|---|---|---|\n| c | 3 | 4 |"


def test_parts_repeat_for_each_key() -> None:
    inner: list[dict[str, Any]] = [
        {"text": "### {key:capitalized}"},
        {"table": {"rows": "value", "columns": {"name": "{name}"}}},
    ]
    parts = list(render_parts([{"each": "groups", "parts": inner}], [ROWS]))
    assert parts == [
        "### First",
        "| name |\n|---|\n| d |",
        "### Second",
        "| name |\n|---|\n| e |",
    ]


def test_what_lies_around_a_measurement_stays() -> None:
    page = "before\n<!-- measured: x -->\nold\n<!-- /measured -->\nafter\n"
    measurement = {
        "files": ["heads-tiny.json"],
        "command": "make",
        "parts": [{"text": "{rows.0.name}"}],
    }
    lines = fill_page(page, {"x": measurement}).splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "medusa1" in lines and "old" not in lines

"""Where a progress bar is drawn anew, and where lines are printed instead."""

from __future__ import annotations

import io

import pytest

from spectrain.output.console import is_live, make_console


def test_a_notebook_has_bars_with_its_widgets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = make_console(force_jupyter=True, file=io.StringIO())
    for spec, expected in ((None, False), (object(), True)):
        monkeypatch.setattr("spectrain.output.console.find_spec", lambda name, spec=spec: spec)
        assert is_live(notebook) is expected
    assert not is_live(make_console(file=io.StringIO(), force_terminal=False))
    assert is_live(make_console(file=io.StringIO(), force_terminal=True))

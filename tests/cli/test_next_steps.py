"""A training and a score end with commands that work next."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain.cli.next_steps import print_after_score, print_after_training
from spectrain.config.choices import list_constructors
from spectrain.export.layouts import select_layout


def list_commands(text: str) -> list[str]:
    first, *lines = text.splitlines()
    assert first == "Next:"
    return [line.partition("#")[0].strip() for line in lines]


@pytest.mark.parametrize("family", ["eagle3", "medusa", "dflash", "ngram"])
def test_a_training_ends_with_the_next_commands(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They chat, show the page, or score where there is none, and export in a format that holds
    the family, if there is one.
    """
    print_after_training(tmp_path, family, None, family)
    chat, score, *exports = list_commands(capsys.readouterr().out)
    assert chat == f"spectrain chat run={tmp_path}"
    assert score == f"spectrain eval run={tmp_path}"
    for export in exports:
        name = export.partition("format=")[2].split()[0]
        assert select_layout(family, name).title
    assert len(exports) == (family != "ngram")
    page = tmp_path / "eval" / "heldout" / "report.html"
    page.parent.mkdir(parents=True)
    page.touch()
    print_after_training(tmp_path, family, "heldout", family)
    assert list_commands(capsys.readouterr().out)[1] == str(page)
    print_after_score(tmp_path, "heldout")
    assert list_commands(capsys.readouterr().out) == [str(page)]


@pytest.mark.skipif(
    "judge" not in list_constructors("acceptance"), reason="the rule is of another package"
)
def test_what_is_trained_for_a_rule_is_scored_with_a_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_after_training(tmp_path, "draft_judge", None, "judge")
    assert list_commands(capsys.readouterr().out) == [
        f"spectrain eval run=runs/NAME acceptance=judge acceptance.path={tmp_path} eval.name=judge"
    ]

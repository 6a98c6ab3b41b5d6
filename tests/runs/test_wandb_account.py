"""An account of Weights & Biases that cannot be read is none."""

from pathlib import Path

import pytest

from spectrain.runs.wandb_account import logged_in


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"machine api.wandb.ai login user password secret\n", True),
        (b"machine other.example login user password secret\n", False),
        (b"machine \xff\xfe login user password secret\n", False),
        (b"machine", False),
        (None, False),
    ],
)
def test_a_file_that_is_no_text_holds_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, expected: bool
) -> None:
    if content is not None:
        (tmp_path / "netrc").write_bytes(content)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert logged_in() == expected


def test_without_a_home_folder_there_is_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NETRC", raising=False)

    def fail(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    assert not logged_in()

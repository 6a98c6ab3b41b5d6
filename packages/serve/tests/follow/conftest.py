"""Every test of this folder has a control key of its own."""

import pytest

KEY = "a-key-of-the-tests-0123"


@pytest.fixture(autouse=True)
def control_key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPECTRAIN_CONTROL_KEY", KEY)
    return KEY

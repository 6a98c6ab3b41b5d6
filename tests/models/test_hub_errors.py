"""A hub that cannot be reached is one sentence, at once, whatever library asked it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from spectrain.errors import RunError, UserError
from spectrain.export import hub
from spectrain.models import load_errors


class TransportError(Exception):
    """Stands for the class of that name in a library for requests."""


class ConnectError(TransportError):
    """Stands for what that library raises without a network."""


def make_api(error: Exception) -> Any:
    """Return what stands for the hub's client, each of whose requests raises the error."""

    def fail(*arguments: Any, **options: Any) -> NoReturn:
        raise error

    return lambda: SimpleNamespace(model_info=fail, create_repo=fail)


def test_a_name_that_is_not_here_needs_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request says so. Faults of the name, and the offline mode, are left to the loader."""
    monkeypatch.setattr(load_errors, "HfApi", make_api(ConnectError("no such host")))
    with pytest.raises(UserError) as raised:
        load_errors.check_hub("spectrain/is-nowhere")
    assert str(raised.value) == (
        "target.model=spectrain/is-nowhere: there is no such directory, and the hub cannot be "
        "reached (no such host); give a model directory, or a name that was downloaded before"
    )
    with pytest.raises(UserError, match="; write tiny for the target of this name$"):
        load_errors.check_hub("Tinny")
    for error in (OfflineModeIsEnabled("offline"), ValueError("a name of another kind")):
        monkeypatch.setattr(load_errors, "HfApi", make_api(error))
        load_errors.check_hub("spectrain/is-nowhere")


def test_an_upload_without_a_network_fails_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no folder, which may be a temporary one, and hides no other error."""
    monkeypatch.setattr(hub, "HfApi", make_api(ConnectError("no such host")))
    with pytest.raises(RunError) as raised:
        hub.push(tmp_path, "ORG/NAME", private=True)
    assert str(raised.value) == (
        "push=ORG/NAME: the upload failed (no such host); log in with hf auth login, or wait for "
        "the network, and try again"
    )
    monkeypatch.setattr(hub, "HfApi", make_api(ConnectionError()))
    with pytest.raises(RunError, match=r"the upload failed \(ConnectionError\)"):
        hub.push(tmp_path, "ORG/NAME", private=True)
    monkeypatch.setattr(hub, "HfApi", make_api(KeyError("a fault of ours")))
    with pytest.raises(KeyError):
        hub.push(tmp_path, "ORG/NAME", private=True)

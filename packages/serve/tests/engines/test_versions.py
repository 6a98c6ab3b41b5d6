"""Versions of engines that do not read a layout are refused."""

import pytest

from spectrain.errors import UserError
from spectrain.export.medusa import VLLM_MEDUSA
from spectrain.export.speculators import SPECULATORS_EAGLE3
from spectrain.export.table import EngineSupport
from spectrain_serve.engines.versions import reads, refuse_version


@pytest.mark.parametrize(
    ("since", "until", "version", "expected"),
    [
        ("", "0.32", "0.31.2", True),
        ("", "0.32", "0.32.1+cpu", True),
        ("", "0.32", "0.33.0", False),
        ("0.33", "", "0.32.9", False),
        ("0.33", "", "0.33.0rc1", True),
        ("0.33", "0.40", "0.40.2", True),
        ("0.33", "0.40", "1.0", False),
        ("", "", "0.1", True),
    ],
)
def test_versions_are_compared_by_release(
    since: str, until: str, version: str, expected: bool
) -> None:
    support = EngineSupport("vllm", "medusa.VLLM_MEDUSA", since=since, until=until)
    assert reads(support, version) == expected


def test_an_engine_without_the_class_is_refused() -> None:
    """vLLM 0.33 has no Medusa: the refusal names the versions that do."""
    with pytest.raises(
        UserError,
        match=r"server.python=ENV: vLLM 0.33.0 is installed there, and only vLLM up to 0.32 reads",
    ):
        refuse_version(VLLM_MEDUSA, "vllm", lambda: "0.33.0", "server.python=ENV")
    refuse_version(VLLM_MEDUSA, "vllm", lambda: "0.32.0", "server.python=ENV")
    refuse_version(VLLM_MEDUSA, "vllm", lambda: None, "server.python=ENV")


def test_the_version_is_not_asked_where_all_read() -> None:
    """Starting an interpreter to ask takes a second."""

    def ask() -> str:
        raise AssertionError("nobody needs the version")

    refuse_version(SPECULATORS_EAGLE3, "vllm", ask, "server.python=ENV")

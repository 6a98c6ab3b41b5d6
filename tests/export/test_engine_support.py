"""The table of the programs that read our layouts, by version."""

import importlib

import pytest
import transformers

from spectrain.errors import UserError
from spectrain.export.engine_support import (
    CORE_SUPPORT,
    PROGRAMS,
    READ_VERSIONS,
    describe_format,
    describe_readers,
    list_support,
    reads,
    refuse_version,
)
from spectrain.export.layouts import EXPORT_FORMATS, LAYOUTS, load_layout
from spectrain.export.medusa import VLLM_MEDUSA
from spectrain.export.speculators import SPECULATORS_EAGLE3
from spectrain.export.table import EngineSupport


def test_rows_name_layouts_and_programs() -> None:
    """No row is for a layout or a program that does not exist, or says the same twice."""
    paths = {row.path for row in LAYOUTS}
    rows = [(support.program, support.layout) for support in list_support()]
    assert {program for program, _ in rows} == PROGRAMS.keys()
    assert {layout for _, layout in rows} <= paths
    assert len(rows) == len(set(rows))
    titles = [load_layout(row).title for row in LAYOUTS]
    assert len(titles) == len(set(titles))


def test_every_format_of_an_export_has_a_reader() -> None:
    """Help and documentation can say of each format who reads it."""
    assert all(describe_format(name) for name in EXPORT_FORMATS)
    assert "vLLM (Medusa up to 0.32" in describe_format("vllm")
    assert describe_readers(VLLM_MEDUSA) == "vLLM up to 0.32"


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


def test_versions_that_bound_a_row_were_read() -> None:
    """A row says more of versions than its program's code was read for."""
    for support in list_support():
        bounds = {support.since, support.until} - {""}
        assert bounds <= {*READ_VERSIONS.get(support.program, ())}


def test_transformers_has_the_classes_of_its_rows() -> None:
    rows = [support for support in CORE_SUPPORT if support.program == "transformers"]
    names = [name for support in rows for name in support.classes.split()]
    assert names
    assert all(hasattr(importlib.import_module("transformers"), name) for name in names), (
        transformers.__version__
    )

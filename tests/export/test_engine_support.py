"""The table of the programs that read our layouts, by version."""

import importlib

import transformers

from spectrain.export.engine_support import (
    CORE_SUPPORT,
    PROGRAMS,
    READ_VERSIONS,
    describe_format,
    describe_readers,
    list_support,
)
from spectrain.export.layouts import EXPORT_FORMATS, LAYOUTS, load_layout
from spectrain.export.medusa import VLLM_MEDUSA


def test_rows_name_layouts_and_programs() -> None:
    """No row is for a layout or a program that does not exist, or says the same twice."""
    paths = {row.path for row in LAYOUTS}
    rows = [(support.program, support.layout) for support in list_support()]
    assert {program for program, _ in rows} <= PROGRAMS.keys()
    assert {layout for _, layout in rows} <= paths
    assert len(rows) == len(set(rows))
    titles = [load_layout(row).title for row in LAYOUTS]
    assert len(titles) == len(set(titles))


def test_every_format_of_an_export_has_a_reader() -> None:
    """Help and documentation can say of each format who reads it."""
    assert all(describe_format(name) for name in EXPORT_FORMATS)
    assert "vLLM (Medusa up to 0.32" in describe_format("vllm")
    assert describe_readers(VLLM_MEDUSA) == "vLLM up to 0.32"


def test_versions_that_bound_a_row_were_read() -> None:
    """A row says more of versions than its program's code was read for."""
    for support in list_support():
        bounds = {support.since, support.until} - {""}
        assert bounds <= {*READ_VERSIONS.get(support.program, ())}


def test_transformers_has_the_classes_of_its_rows() -> None:
    rows = [support for support in CORE_SUPPORT if support.program == "transformers"]
    names = [name for support in rows for name in support.classes]
    assert names
    assert all(hasattr(importlib.import_module("transformers"), name) for name in names), (
        transformers.__version__
    )

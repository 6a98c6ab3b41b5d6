"""The table of layouts: a new layout is one file and one line, whatever its files are."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spectrain.errors import UserError
from spectrain.export import layouts
from spectrain.export.container import Container
from spectrain.export.converter import convert, read_drafter, write_drafter
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.engine_support import list_readers
from spectrain.export.layout import DrafterCheckpoint, ExpectedTensors, Layout
from spectrain.export.layouts import (
    EXPORT_FORMATS,
    FORMATS,
    LAYOUTS,
    TableRow,
    detect_layout,
    load_layout,
)
from spectrain.export.linter import lint
from spectrain.export.targets import TargetFiles
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.servers.engines import ENGINES
from tests.installed import load_cases

from . import test_mtp
from .test_converter import DFLASH, DFLASH2, DSPARK, LATENT, LILICORR, ours

TINY = TargetFiles("tiny")
# Their config.json names the class by which an engine finds its own; those of the speculators
# library name the library's.
FLAT_MODULES = (
    "flat.",
    "latent_eagle3.",
    "dflash_flat.",
    "eagle1.",
    "medusa.VLLM",
    "peagle.FLAT",
    "spectrain_research.xpress.layout.FLAT",
    "spectrain_research.domino.layout.SGLANG",
)


class SingleFile(Container):
    """One file that holds settings and weights, as GGUF's."""

    def read_files(self, directory: Path) -> DrafterFiles:
        with safe_open(directory / "drafter.single", "pt") as file:
            config = json.loads(file.metadata()["config"])
        return DrafterFiles(directory, config, load_file(directory / "drafter.single"))


class SingleFileLayout(Layout):
    """A layout of EAGLE-3 in that container."""

    title = "single file"
    container = SingleFile()

    def matches_files(self, files: DrafterFiles) -> bool:
        return "single" in files.config

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        return ExpectedTensors(
            {name: tuple(tensor.shape) for name, tensor in files.tensors.items()}
        )

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        settings = files.config["single"]
        target_name = files.read_metadata().target
        return DrafterCheckpoint("eagle3", settings, dict(files.tensors), target_name)

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        save_file(
            drafter.tensors,
            directory / "drafter.single",
            {"config": json.dumps({"single": drafter.drafter})},
        )


def test_a_new_layout_is_a_file_and_a_line(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its line in the table, converter and linter write, read and check a layout that has
    no config.json.
    """
    module = ModuleType("spectrain.export.single")
    module.SINGLE = SingleFileLayout()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = TableRow("single.SINGLE", ("single",), ("eagle3",), ".single")
    monkeypatch.setattr(layouts, "LAYOUTS", (row, *LAYOUTS))
    monkeypatch.setattr(layouts, "FORMATS", (*FORMATS, "single"))
    monkeypatch.setattr(layouts, "OWN_SUFFIXES", {".single"})
    start = ours(tmp_path / "start", tiny, "eagle3", vocab_size=256)
    convert(start, tmp_path / "out", "single", TINY)
    assert not (tmp_path / "out" / "config.json").exists() and not lint(tmp_path / "out", None)
    convert(tmp_path / "out", tmp_path / "back", "spectrain", TINY)
    before, after = (read_drafter(path, TINY) for path in (start, tmp_path / "back"))
    assert before.drafter == after.drafter
    assert all(torch.equal(before.tensors[name], tensor) for name, tensor in after.tensors.items())


SMALL: dict[str, dict[str, Any]] = {
    "eagle3": {"vocab_size": 256},
    "peagle": {"vocab_size": 256, "num_layers": 1},
    "medusa": {"vocab_size": 2048},
    "dflash": DFLASH,
    "dflash2": DFLASH2,
    "dspark": DSPARK,
    "causal": {"num_layers": 1},
    "lilicorr": LILICORR,
    "latent_eagle3.LATENT_EAGLE3": {"vocab_size": 256, "architecture": LATENT},
    **load_cases(__name__).get("SMALL", {}),
}


@pytest.fixture(scope="module")
def write_layout(
    tiny: Target, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[TableRow], Path]:
    """Write a random drafter of the first family of a row in its layout; rows of a family share
    the drafter.
    """
    folder = tmp_path_factory.mktemp("layouts")

    @cache
    def read_random(family: str, options: str) -> DrafterCheckpoint:
        return read_drafter(
            ours(folder / f"{options}-start", tiny, family, **SMALL.get(options, {})), TINY
        )

    @cache
    def write_row(row: TableRow) -> Path:
        layout = load_layout(row)
        out = folder / row.path
        family = row.families[0]
        if layout.holds_target:
            source = test_mtp.save_target("glm4_moe", folder / "target")
            return test_mtp.write_stitched(
                test_mtp.make_drafter(load_hf(str(source), dtype="float32")), source, out
            )
        out.mkdir()
        write_drafter(
            read_random(family, row.path if row.path in SMALL else family),
            layout,
            TINY,
            out,
        )
        return out

    return write_row


@pytest.mark.parametrize("row", [row for row in LAYOUTS if row.formats], ids=lambda row: row.path)
def test_a_layout_recognizes_its_own_output(
    row: TableRow, write_layout: Callable[[TableRow], Path]
) -> None:
    """What a layout writes is detected as this layout: its line stands before every layout that
    accepts its files as well.
    """
    assert detect_layout(layouts.read_files(write_layout(row))) is load_layout(row)


@pytest.mark.parametrize("row", [row for row in LAYOUTS if row.formats], ids=lambda row: row.path)
def test_launches_and_files_agree_with_the_table_of_engines(
    row: TableRow, write_layout: Callable[[TableRow], Path]
) -> None:
    """Every engine that a layout starts is one that reads it, and the class that its files name is
    one that the engine's registry has."""
    directory = write_layout(row)
    layout = load_layout(row)
    readers = {support.program: support for support in list_readers(layout)}
    launches = layout.drafter_launches(read_drafter(directory, TINY), TINY, "DIR")
    assert launches.keys() - {"spectrain"} <= readers.keys()
    assert readers.keys() & ENGINES.keys() == launches.keys() - {"spectrain"}
    config = layouts.read_files(directory).config
    written = config.get("architectures") or []
    if row.path.startswith(FLAT_MODULES):
        named = {name for support in readers.values() for name in support.classes}
        assert not named or named & {*written}


def test_the_page_on_serving_names_every_format() -> None:
    """The table of docs/serving.md names each format that an export can have."""
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    formats = [line.split("|")[2] for line in page.splitlines() if line.startswith("|")]
    missing = [name for name in EXPORT_FORMATS if not any(f"`{name}`" in cell for cell in formats)]
    assert not missing


def test_a_format_has_a_single_layout_for_each_family() -> None:
    """Every line of the table names a class that exists, and no two lines answer the same
    request.
    """
    requests = [
        (name, family) for row in LAYOUTS for name in row.formats for family in row.families
    ]
    assert len(requests) == len(set(requests))
    assert all(load_layout(row).title for row in LAYOUTS)


def test_refusals_name_the_formats_of_the_table() -> None:
    """A family that a format does not support is refused with the formats that do."""
    with pytest.raises(
        UserError,
        match="format=sglang: it does not support drafter=medusa; use format=vllm or format=medusa",
    ):
        layouts.select_layout("medusa", "sglang")

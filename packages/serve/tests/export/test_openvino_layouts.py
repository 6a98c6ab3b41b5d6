"""OpenVINO's layouts: the layers that an IR names, the linter's findings, and what OpenVINO
cannot decode.
"""

from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.export import export_command
from spectrain.config.build import GroupSpec
from spectrain.errors import UserError
from spectrain.export.converter import convert, read_drafter
from spectrain.export.layouts import detect_layout, read_files
from spectrain.export.linter import check_files
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain_serve.engines.openvino_ir import IR_NAME, IrConverter, read_openvino_environment
from spectrain_serve.layouts.openvino import read_fused_layers, write_fused_layers
from tests.export.test_converter import DFLASH, ours

from .stand_ins_cases import IR

TINY = TargetFiles("tiny")


def find_faults(folder: Path, target: TargetFiles | None = TINY) -> list[str]:
    files = read_files(folder)
    return [finding.name for finding in check_files(files, detect_layout(files), target)]


@pytest.mark.parametrize("layers, named", [(None, [2, 4, 5]), ([1, 3, 6], [1, 3, 6])])
def test_the_ir_names_the_layers_of_the_drafter(
    layers: list[int] | None, named: list[int], tiny: Target, tmp_path: Path
) -> None:
    """The IR names the fused layers, also the default ones, by the layer after which the stream
    is read.
    """
    start = ours(tmp_path / "start", tiny, "eagle3", layers=layers)
    out = convert(start, tmp_path / "out", "openvino", TINY)
    ids = " ".join(str(layer - 1) for layer in named)
    assert f'<hidden_layers_list value="{ids}" />' in (out / f"{IR_NAME}.xml").read_text()
    assert read_fused_layers(out) == named
    assert find_faults(out) == []
    # OpenVINO needs the map of a full vocabulary, too.
    assert "d2t" in read_files(out).tensors
    assert read_drafter(out, TINY).drafter["layers"] == named


def test_the_layer_trap_is_an_error(tiny: Target, tmp_path: Path) -> None:
    """An IR as optimum-intel leaves it, and one with other layers than the drafter's, are
    errors.
    """
    out = convert(ours(tmp_path / "start", tiny, "eagle3"), tmp_path / "out", "openvino", TINY)
    (out / f"{IR_NAME}.xml").write_text(IR)
    assert find_faults(out, None) == ["openvino-layers"]
    write_fused_layers(out, [1, 3, 6])
    assert find_faults(out, None) == [] and find_faults(out) == ["openvino-layers"]
    # Reading the folder and writing it again mends it.
    mended = convert(out, tmp_path / "mended", "openvino", TINY)
    assert read_fused_layers(mended) == [2, 4, 5] and find_faults(mended) == []


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "norm flag": (
        "eagle3",
        {"architecture": {"norm_before_residual": True}},
        "norm_before_residual=false",
    ),
    "head norms": ("eagle3", {"architecture": {"qk_norm": True}}, "qk_norm=false"),
    "four layers": ("eagle3", {"layers": [1, 2, 4, 5]}, "exactly three layers"),
    "layer 0": ("eagle3", {"layers": [0, 2, 4]}, "none of them 0"),
    "two layers of its own": ("eagle3", {"num_layers": 2}, "OpenVINO's EAGLE-3 is one"),
    "a window": ("dflash", {**DFLASH, "window": 16, "causal": True}, "drafter.window=null"),
    "causal blocks": ("dflash", {**DFLASH, "causal": True}, "drafter.causal=false"),
    "a part of the vocabulary": (
        "dflash",
        {**DFLASH, "vocab_size": 256},
        "drafter.vocab_size=null",
    ),
    "another family": ("medusa", {}, "format=openvino: it does not support drafter=medusa"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_openvino_cannot_decode_is_named(case: str, tiny: Target, tmp_path: Path) -> None:
    family, settings, words = REFUSED[case]
    start = ours(tmp_path / "start", tiny, family, **settings)
    with pytest.raises(UserError, match=words):
        convert(start, tmp_path / "out", "openvino", TINY)
    assert not (tmp_path / "out").exists()


def test_the_card_says_how_to_decode(tiny: Target, tmp_path: Path) -> None:
    """The card has chain and tree for an EAGLE-3, and no prefix caching for DFlash, with which
    OpenVINO refuses it.
    """
    out = export_command(
        str(ours(tmp_path / "eagle3", tiny, "eagle3")), "openvino", str(tmp_path / "a")
    )
    card = (out / "README.md").read_text()
    assert (
        f"spectrain export target=hf target.model={tiny.path} format=openvino out=TARGET_IR" in card
    )
    assert "config.max_new_tokens, config.num_assistant_tokens = 256, 3" in card
    out = export_command(
        str(ours(tmp_path / "dflash", tiny, "dflash", **DFLASH)), "openvino", str(tmp_path / "b")
    )
    assert "enable_prefix_caching = False" in (out / "README.md").read_text()


def test_a_target_is_written_too(tmp_path: Path) -> None:
    out = export_command(
        None, "openvino", str(tmp_path / "out"), target=GroupSpec("target", "tiny"), dtype="int8"
    )
    assert (out / f"{IR_NAME}.xml").exists()


def test_a_missing_engine_is_named(tiny: Target, tmp_path: Path) -> None:
    """An interpreter that does not exist is refused before anything runs; other formats need no
    engine.
    """
    with pytest.raises(
        UserError,
        match=r"engine_python=/nowhere/python: .* are not installed there; run make openvino",
    ):
        read_openvino_environment("/nowhere/python", "engine_python")
    with pytest.raises(
        UserError, match="engine_python=x: this format, .* is written without an engine"
    ):
        export_command(
            str(ours(tmp_path / "start", tiny, "eagle3")),
            "vllm",
            str(tmp_path / "out"),
            engine_python="x",
        )
    with pytest.raises(
        UserError, match="dtype=q8_0: OpenVINO's files have float32, float16, int8, int4 weights"
    ):
        IrConverter(dtype="q8_0")

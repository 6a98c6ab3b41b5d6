"""Exports with quantized weights: what files hold, what they are read as, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("compressed_tensors")

from spectrain.cli.export import export_command
from spectrain.config.build import GroupSpec
from spectrain.decoding.generation import Generation
from spectrain.errors import RunError, UserError
from spectrain.eval.quantization_loss import compare_sides
from spectrain.export.converter import convert, read_drafter
from spectrain.export.layouts import detect_layout, read_files
from spectrain.export.linter import check_files
from spectrain.export.quantization import Fp8Weights, Int4Weights, Int8Weights
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from tests.installed import select_formats

from .test_converter import ours

TINY = TargetFiles("tiny")
SCHEMES = {"int8": Int8Weights, "w4a16": Int4Weights, "fp8": Fp8Weights}
# Steps of the rounded values: half a step is the largest error, as a share of a row's or a group's
# largest weight; 8-bit floats have 3 bits behind the first one.
LARGEST_ERROR = {"int8": 0.5 / 127, "w4a16": 0.5 / 7, "fp8": 1 / 16}


@pytest.fixture(scope="module")
def drafter(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ours(tmp_path_factory.mktemp("drafter") / "d", tiny, "eagle3", vocab_size=256)


def find_faults(folder: Path) -> list[str]:
    files = read_files(folder)
    return [finding.name for finding in check_files(files, detect_layout(files), TINY)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_folder_reads_as_rounded_weights(
    scheme: str, drafter: Path, tmp_path: Path
) -> None:
    """Every weight comes back within half a step, other tensors bit for bit, and the linter finds
    nothing."""
    plain = convert(drafter, tmp_path / "plain", "vllm", TINY)
    folder = convert(drafter, tmp_path / "quantized", "vllm", TINY)
    names = SCHEMES[scheme]().quantize_folder(folder)
    assert len(names) == 7 and all(name.endswith("_proj.weight") for name in names)
    stored = load_file(folder / "model.safetensors")
    assert not any(stored[name].is_floating_point() for name in names if name in stored) or (
        scheme == "fp8"
    )
    before, after = read_files(plain).tensors, read_files(folder).tensors
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if name not in names:
            assert torch.equal(weight, after[name])
            continue
        error = (weight - after[name]).abs().amax()
        assert 0 < error <= 1.01 * LARGEST_ERROR[scheme] * weight.abs().max()
    assert read_files(folder).quantized == sorted(names)
    assert find_faults(folder) == find_faults(plain) == []
    # A drafter that is read and written again has ordinary weights.
    again = convert(folder, tmp_path / "again", "sglang", TINY)
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    assert find_faults(again) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_export_is_scored_and_says_so(
    scheme: str, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers before and after are in spectrain.json, on the card and in the terminal."""
    spec = quantize(scheme, tolerance=0.99, prompts=4, max_new_tokens=8)
    out = export_command(str(drafter), "vllm", str(tmp_path / "out"), quantize=spec)
    content = json.loads((out / "spectrain.json").read_text())["quantization"]
    assert content["choice"] == scheme and content["kept"] == ["lm_head", "fc"]
    assert content["readers"] == ["vLLM"] and len(content["by_position"]) == 3
    assert f"quantize={scheme}: " in (out / "README.md").read_text()
    assert f"quantize={scheme}: " in capsys.readouterr().out
    assert read_drafter(out, TINY).drafter == read_drafter(drafter, TINY).drafter


def test_a_larger_loss_than_the_tolerance_is_refused(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written where the rounded weights lose more."""
    before = [make_generation([4, 4, 4]), make_generation([3, 4])]
    after = [make_generation([3, 4, 3]), make_generation([3, 3])]
    loss = compare_sides(before, after, 3, 8)
    assert loss.loss == pytest.approx(1 - (16 / 5) / (19 / 5), abs=1e-4)
    assert [(rate.before, rate.after) for rate in loss.by_position] == [(1, 1), (1, 1), (0.8, 0.2)]
    monkeypatch.setattr("spectrain.cli.export.measure_quantization_loss", lambda *arguments: loss)
    spec = quantize("int8", tolerance=0.15)
    with pytest.raises(RunError, match=r"from 3.80 to 3.20, by 15.8%"):
        export_command(str(drafter), "vllm", str(tmp_path / "out"), quantize=spec)
    assert not (tmp_path / "out").exists()


def test_what_no_engine_reads_is_refused(tiny: Target, drafter: Path, tmp_path: Path) -> None:
    """Formats, layers and widths that engines do not take; and formats with a `dtype`."""

    def refuse(match: str, format_name: str, scheme: str = "int8", **settings: Any) -> None:
        with pytest.raises(UserError, match=match):
            export_command(
                str(drafter),
                format_name,
                str(tmp_path / "out"),
                quantize=quantize(scheme, **settings),
            )

    for name in select_formats("gguf"):
        refuse("choose one with dtype", name)
    refuse("no engine reads this format", "spectrain")
    refuse("leave it out", "vllm", "int8", group_size=64)
    refuse("use 128, 64, 32 or null", "vllm", "w4a16", group_size=48)
    with pytest.raises(UserError, match="quantize=int8: no engine reads"):
        export_command(
            str(ours(tmp_path / "medusa", tiny, "medusa")),
            "vllm",
            str(tmp_path / "out"),
            quantize=quantize("int8"),
        )


def test_damaged_files_are_named(drafter: Path, tmp_path: Path) -> None:
    """A scale that is missing or of another shape, and the words of another library."""
    folder = convert(drafter, tmp_path / "out", "vllm", TINY)
    Int8Weights(fc=True).quantize_folder(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert find_faults(folder) == []
    name = "layers.0.mlp.down_proj"
    save_file({**tensors, f"{name}.weight_scale": torch.ones(3, 1)}, path)
    with pytest.raises(UserError, match="down_proj.weight does not fit its scales"):
        read_files(folder)
    save_file({key: value for key, value in tensors.items() if key != f"{name}.weight"}, path)
    with pytest.raises(UserError, match="down_proj.weight is missing"):
        read_files(folder)
    config = json.loads((folder / "config.json").read_text())
    for settings, match in (
        ({"quant_method": "gptq"}, "quantized by gptq"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "is not what"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "has 0 groups"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        with pytest.raises(UserError, match=match):
            read_files(folder)


def test_the_linter_knows_what_engines_read(drafter: Path, tmp_path: Path) -> None:
    """A quantized fc in SGLang's layout is read by vLLM alone; one of a kind that none reads is an
    error, and so is a scheme without scales."""
    folder = convert(drafter, tmp_path / "out", "sglang", TINY)
    original = load_file(folder / "model.safetensors")
    Int8Weights().quantize_folder(folder)
    assert find_faults(folder) == []
    config = json.loads((folder / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]
    weights["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert find_faults(folder) == ["quantized"]
    save_file(original, folder / "model.safetensors")
    assert find_faults(folder) == ["quantized-nothing"]


def quantize(scheme: str, **settings: Any) -> GroupSpec:
    return GroupSpec("quantize", scheme, settings)


def make_generation(lengths: list[int]) -> Generation:
    """Return a generation of complete rounds of these lengths."""
    return Generation([1], round_lengths=lengths, depths=[3] * len(lengths))

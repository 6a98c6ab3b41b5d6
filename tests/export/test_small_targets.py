"""Targets of few layers: three layers are fused where there are three, and refusals speak of the
user's settings.
"""

from pathlib import Path

import pytest

from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.eagle_layers import default_layers, engine_layers
from spectrain.errors import RunError, UserError
from spectrain.export.converter import convert, read_drafter, write_checked
from spectrain.export.layouts import select_layout
from spectrain.export.linter import lint
from spectrain.export.targets import TargetFiles
from spectrain.files import atomic_write
from tests.installed import select_formats

from .small_targets import make_target, save_random


def test_default_layers_differ_where_the_target_has_enough() -> None:
    """With 4 to 6 layers, the engines' default repeats one; other targets keep theirs."""
    assert [default_layers(count) for count in range(1, 9)] == [
        [0, 1],
        [0, 1, 2],
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
        [2, 3, 4],
        [2, 3, 4],
        [2, 4, 5],
    ]
    assert [engine_layers(count) for count in (1, 2, 4, 5, 6)] == [None] * 5
    assert all(engine_layers(count) == default_layers(count) for count in (3, *range(7, 100)))


@pytest.mark.sweep(2, free=("count", "layout"))
@pytest.mark.parametrize("count", [4, 5, 6, 7])
@pytest.mark.parametrize("layout", select_formats("sglang", "vllm", "gguf", "tensorrt"))
def test_an_export_names_the_layers_that_were_trained(
    count: int, layout: str, tmp_path: Path
) -> None:
    """Reading the files with their target gives the trained layers, which engines would not
    choose by themselves.
    """
    target = make_target(tmp_path / "target", num_hidden_layers=count)
    save_random(tmp_path / "run", target, "eagle3", vocab_size=256)
    files = TargetFiles(target.path)
    with atomic_write(tmp_path / "out", folder=True) as scratch:
        write_checked(
            read_drafter(tmp_path / "run", files), select_layout("eagle3", layout), files, scratch
        )
    assert read_drafter(tmp_path / "out", files).drafter["layers"] == default_layers(count)


def test_another_number_of_layers_is_refused_by_number(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", num_hidden_layers=4)
    save_random(tmp_path / "run", target, "eagle3", vocab_size=256, layers=[1, 2])
    engines = {"sglang": "SGLang", "gguf": "llama.cpp's EAGLE-3"}
    for layout in select_formats(*engines):
        engine = engines[layout]
        message = (
            f"{engine} fuses exactly three layers of the target and this drafter 2 \\(1, "
            "2\\); train with drafter.layers="
        )
        with pytest.raises(UserError, match=message + r"\[1, 2, 3\], or use the format vllm"):
            convert(tmp_path / "run", tmp_path / "out", layout, TargetFiles(target.path))
    assert convert(tmp_path / "run", tmp_path / "vllm", "vllm", TargetFiles(target.path)).is_dir()


def test_a_drafter_of_another_target_is_a_fault_in_a_sentence(tmp_path: Path) -> None:
    """Its three heads do not divide the width of the target that it is linted with."""
    target = make_target(tmp_path / "target", hidden_size=48, num_attention_heads=3)
    save_random(tmp_path / "run", target, "eagle3", vocab_size=256)
    (finding,) = lint(tmp_path / "run", TargetFiles("tiny"))
    assert finding.name == "wrong-shape" and finding.consequence == "it is of another target"
    assert "hidden size (128) is not a multiple of the number of attention heads (3)" in (
        finding.problem
    )


def test_heads_that_do_not_divide_the_width_are_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    with pytest.raises(UserError, match=r"drafter\.architecture: .*heads \(5\); correct it"):
        Eagle3(target, vocab_size=256, architecture={"num_attention_heads": 5})


def test_errors_while_writing_name_the_users_folder(tmp_path: Path) -> None:
    """The name of a scratch folder is in no refusal."""
    for kind in (UserError, RunError):
        with (
            pytest.raises(kind, match="out: it would not serve") as caught,
            atomic_write(tmp_path / "out", folder=True) as path,
        ):
            raise kind(f"{path}: it would not serve")
        assert ".part" not in str(caught.value)

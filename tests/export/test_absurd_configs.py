"""Configurations of drafters with absurd sizes: refused by lint and by whoever reads them, before anything is built."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain.export.converter import convert, read_drafter
from spectrain.export.linter import lint
from spectrain.export.targets import TargetFiles
from spectrain.models.loading import load_hf
from spectrain.models.target import Target

from .test_converter import ours

LONG = list(range(20_000))
Edit = Callable[[dict[str, Any]], Any]


def set_value(*keys: str, value: Any) -> Edit:
    """Return an edit that sets a value in nested groups."""

    def edit(config: dict[str, Any]) -> dict[str, Any]:
        node = config
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value
        return config

    return edit


LONG_LIST = "20000 values, and no setting has more than 10000"
EVERYWHERE: dict[str, tuple[Edit, str]] = {
    "an unknown list": (set_value("x", value=LONG), LONG_LIST),
    "a list of classes": (set_value("architectures", value=["x"] * 20_000), LONG_LIST),
    "a large group": (set_value("x", value={str(number): 1 for number in LONG}), LONG_LIST),
    "a list in a list": (set_value("x", value=[[LONG]]), LONG_LIST),
    "10^6 layers": (set_value("num_hidden_layers", value=10**6), "num_hidden_layers=1000000: use 4096 or less"),
    "10^9 wide": (set_value("x", "hidden_size", value=10**9), "hidden_size=1000000000: use 1048576 or less"),
    "deep brackets": (lambda config: '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "deep groups": (lambda config: '{"x":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "a long number": (lambda config: '{"x": ' + "9" * 5000 + "}", "this is not JSON"),
    "no settings": (lambda config: [1], "it holds no settings"),
    "nothing": (lambda config: "", "this is not JSON"),
    "half of it": (lambda config: json.dumps(config)[:100], "this is not JSON"),
}
OWN: dict[str, tuple[Edit, str]] = {
    "fused layers": (set_value("drafter", "layers", value=LONG), LONG_LIST),
    "a tree": (set_value("tree", "x", value=LONG), LONG_LIST),
    "300 layers": (set_value("drafter", "num_layers", value=300), "use 256 or less"),
    "a wide head": (set_value("drafter", "head_rank", value=10**9), "use 65536 or less"),
    "true": (set_value("drafter", "ttt_steps", value=True), "write a number"),
}
CASES = [(layout, name) for layout in ("own", "vllm", "sglang", "medusa") for name in EVERYWHERE]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory, tiny: Target) -> dict[str, Path]:
    """Return drafters by layout."""
    folder = tmp_path_factory.mktemp("layouts")
    own = ours(folder / "own", tiny, "eagle3", vocab_size=64)
    medusa = ours(folder / "heads", tiny, "medusa", vocab_size=2048, num_heads=1)
    target = TargetFiles("tiny")
    sources = {"vllm": own, "sglang": own, "medusa": medusa}
    return {"own": own, **{name: convert(source, folder / name, name, target) for name, source in sources.items()}}


def copy_with(source: Path, folder: Path, edit: Edit) -> Path:
    """Return a folder with links to the files of another, and a changed config.json."""
    folder.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    content = edit(json.loads((source / "config.json").read_text()))
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def lint_errors(folder: Path) -> list[str]:
    """Return the errors that lint finds, or the sentence with which it refuses to read the files."""
    try:
        return [finding.problem for finding in lint(folder, None) if finding.level == "error"]
    except UserError as error:
        return [str(error)]


def check_refused(folder: Path, problem: str) -> None:
    """Check that lint and whoever reads the drafter name the problem."""
    errors = lint_errors(folder)
    assert any(problem in error for error in errors), errors
    with pytest.raises(UserError) as refused:
        read_drafter(folder)
    assert problem in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("layout, name", CASES)
def test_absurd_configurations_are_refused(layouts: dict[str, Path], tmp_path: Path, layout: str, name: str) -> None:
    edit, problem = EVERYWHERE[name]
    check_refused(copy_with(layouts[layout], tmp_path / "drafter", edit), problem)


@pytest.mark.parametrize("name", OWN)
def test_absurd_settings_of_our_own_layout_are_refused(layouts: dict[str, Path], tmp_path: Path, name: str) -> None:
    edit, problem = OWN[name]
    check_refused(copy_with(layouts["own"], tmp_path / "drafter", edit), problem)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_pipes_and_huge_files_are_not_read(layouts: dict[str, Path], tmp_path: Path, name: str) -> None:
    """A pipe would never end, and a sparse file of 10 GB takes as much memory; neither is opened."""
    folder = copy_with(layouts["vllm"], tmp_path / "drafter", lambda config: config)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    check_refused(folder, "this is no file")
    if name.endswith(".json"):
        (folder / name).unlink()
        (folder / name).touch()
        os.truncate(folder / name, 10**10)
        check_refused(folder, "MB, which no")


@pytest.mark.parametrize("change, problem", [
    ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000: use 4096 or less"),
    ({"vocab_size": 10**12}, "vocab_size=1000000000000: use 10000000 or less"),
])  # fmt: skip
def test_targets_of_impossible_sizes_are_refused(tmp_path: Path, change: dict[str, int], problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **change}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=problem):
        TargetFiles(str(tmp_path)).full_config  # noqa: B018
    with pytest.raises(UserError, match=problem):
        load_hf(str(tmp_path))
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="this is no file"):
        load_hf(str(tmp_path))

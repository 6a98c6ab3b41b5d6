"""The rules of packages/research/README.md that a test can hold."""

import ast
import re
from pathlib import Path

import pytest

from tests.test_house import ROOT, imports, inside, tree

PACKAGE = ROOT / "packages" / "research"
SHELF = PACKAGE / "spectrain_research"
IDEAS = sorted(
    path.name
    for path in SHELF.iterdir()
    if (path / "__init__.py").exists() and path.name not in ("shared", "conf")
)


def list_sources(idea: str) -> list[Path]:
    return sorted((SHELF / idea).rglob("*.py"))


@pytest.mark.parametrize("idea", IDEAS)
def test_readme_names_papers_command_and_proof(idea: str) -> None:
    """The proofs that it names are files under the tests of the package or of the core."""
    text = (SHELF / idea / "README.md").read_text()
    assert all(
        f"\n- {part}" in text
        for part in ("Papers: ", "Use: ", "Proof: ", "It moves to the core when ")
    )
    proofs = re.findall(r"`((?:packages/research/)?tests/\S+\.py)`", text)
    assert proofs and all((ROOT / proof).is_file() for proof in proofs)


@pytest.mark.parametrize("idea", IDEAS)
def test_idea_imports_only_the_core_itself_and_what_is_shared(idea: str) -> None:
    modules = {
        name
        for path in list_sources(idea)
        for name in imports(path)
        if name.startswith("spectrain_research.")
    }
    assert not {name for name in modules if name.split(".")[1] not in (idea, "shared")}


@pytest.mark.parametrize("idea", IDEAS)
def test_idea_uses_the_public_contract_of_the_core(idea: str) -> None:
    """No name with an underscore is imported from a module outside of the idea."""
    for path in list_sources(idea):
        private = {
            name
            for name in imports(path)
            if name.split(".")[-1].startswith("_") and not name.endswith("__")
        }
        assert all(name.startswith(f"spectrain_research.{idea}.") for name in private), inside(path)


def test_no_folder_is_left_empty() -> None:
    assert all(any(ast.unparse(tree(path)) for path in list_sources(idea)) for idea in IDEAS)

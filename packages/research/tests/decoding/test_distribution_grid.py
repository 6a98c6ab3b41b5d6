"""The grid of rules, trees and modes in docs/random-draws.md is that of the cases."""

from packages.research.tests.decoding.known_variants import list_grid
from tests.decoding.known_target import CASES
from tests.decoding.test_known_distribution import CHAINS, TREES
from tests.docs.test_docs import ROOT


def test_the_grid_of_the_documents_is_that_of_the_cases() -> None:
    """After a change, replace the table by the lines that this test prints."""
    grid = "\n".join(list_grid([*CASES, *CHAINS, *TREES]))
    print(grid)
    assert f"\n{grid}\n" in (ROOT / "docs/random-draws.md").read_text()

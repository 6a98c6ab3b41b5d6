"""Which families work with which tree builders, as README and docs/trees.md say it."""

from pathlib import Path

import pytest
import torch

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.loop import decode
from spectrain.decoding.session import check_compatibility
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.trees import TreeBuilder
from tests.drafters.test_contract import FAMILIES, prepare_drafter
from tests.targets import cut_tiny
from tests.trees.test_every import FILES, make_builder

PROMPT = [5, 6, 7, 8, 5, 6]


def find_refusal(name: str, drafter: Drafter, builder: TreeBuilder) -> str | None:
    """Return what the refusal of a family with a tree says; None where they work together."""
    abilities = drafter.capabilities
    if abilities.has_no_q and not abilities.is_copier and builder.children != "deterministic":
        return "copied tokens are not drawn"
    if name == "union" and (builder.requirements or builder.children == "without_replacement"):
        return "grows trees of several drafters"
    return None


@pytest.mark.sweep(2, free=("name",))
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_works_with_every_tree(name: str) -> None:
    """With greedy decoding and with sampling by acceptance=match, but for the refusals that the
    documents name.
    """
    torch.manual_seed(0)
    target = cut_tiny(3)
    drafter, _ = prepare_drafter(name, target)
    drafter.eval()
    rules: tuple[AcceptanceRule, ...] = (Greedy(), Match(temperature=0.8))
    for file in FILES:
        for rule in rules:
            builder = make_builder(file)
            assert builder is not None
            refusal = find_refusal(name, drafter, builder)
            if refusal is not None:
                with pytest.raises(UserError, match=refusal):
                    check_compatibility(drafter.capabilities, builder, rule)
                    decode(target, [PROMPT], rule, 6, drafter, builder)
                continue
            check_compatibility(drafter.capabilities, builder, rule)
            assert decode(target, [PROMPT], rule, 6, drafter, builder)[0].output


@pytest.mark.slow
def test_the_documents_name_the_refusals() -> None:
    """The families whose drafts have no probability are those that docs/trees.md lists."""
    copying = {
        name for name in FAMILIES if prepare_drafter(name, cut_tiny(3))[0].capabilities.has_no_q
    }
    page = (Path(__file__).parents[2] / "docs" / "trees.md").read_text()
    (line,) = [
        line for line in page.splitlines() if line.startswith("Drafts without a probability:")
    ]
    assert {word.strip("`., ") for word in line.partition(":")[2].split(",")} == copying

"""Cases of the ideas for tests/decoding/known_target.py."""

from typing import Any

from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.transport.linear_program import TruncatedLinearProgram
from spectrain_research.transport.rules import ImportanceSampling, KSeq, SpecHub, Transport
from spectrain_research.traversal.rule import Traversal
from spectrain_research.union.rule import MultiStepSampling
from tests.decoding.known_target import Case, chain, static


def make_union(target: Target) -> Drafter:
    """Make the union of two tables; its module is loaded later, because it imports what these
    cases belong to.
    """
    from packages.research.tests.decoding.union_of_tables import UnionOfTables

    return UnionOfTables()


CASES: dict[str, Any] = {
    "CASES": [
        Case("recursive, dyspec", RecursiveRejection, lambda seed: DySpec(3, 5, seed=seed)),
        Case("traversal, chain of 3", Traversal, chain(3)),
        Case("traversal, sampled tree", Traversal, static("sampled")),
        Case("traversal, tree without replacement", Traversal, static("without_replacement")),
        Case("traversal, top and sampled", Traversal, static("top_and_sampled")),
        Case("traversal, dyspec", Traversal, lambda seed: DySpec(3, 6, seed=seed)),
        Case("kseq, sampled tree", KSeq, static("sampled")),
        Case("importance, sampled tree", ImportanceSampling, static("sampled")),
        Case("programme, sampled tree", TruncatedLinearProgram, static("sampled")),
        Case("transport, top and sampled", Transport, static("top_and_sampled")),
        Case("spechub, top and sampled", SpecHub, static("top_and_sampled")),
        Case("specinfer, chain of 3", MultiStepSampling, chain(3)),
        Case("specinfer, union of two", MultiStepSampling, chain(2), make_union),
    ]
}

"""The union of two drafters that look their distribution up in a table."""

from torch import nn

from spectrain.drafters.base import Drafter
from spectrain_research.union.drafter import UnionDrafter
from tests.decoding.known_target import OTHER_Q, Table


class UnionOfTables(UnionDrafter):
    """The union of two tables' trees."""

    def __init__(self) -> None:
        Drafter.__init__(self)
        self.inner = nn.ModuleList([Table(), Table(OTHER_Q.log())])
        self.layers = ()

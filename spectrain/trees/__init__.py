"""Tree builders: how many nodes are drafted, and where."""

from .base import Rollout, TreeBuilder
from .chain import Chain
from .dynamic import Eagle2, OptTree
from .fixed import Cartesian, Sequoia, Static
from .measured import Auto

__all__ = [
    "Auto",
    "Cartesian",
    "Chain",
    "Eagle2",
    "OptTree",
    "Rollout",
    "Sequoia",
    "Static",
    "TreeBuilder",
]

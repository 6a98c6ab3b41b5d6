"""Tree builders: how many nodes are drafted, and where."""

from .base import Rollout, TreeBuilder
from .chain import Chain
from .dynamic import Beam, DySpec, Eagle2, Entropy, OptTree
from .fixed import Cartesian, Sequoia, Static
from .measured import Auto, Cast

__all__ = [
    "Auto",
    "Beam",
    "Cartesian",
    "Cast",
    "Chain",
    "DySpec",
    "Eagle2",
    "Entropy",
    "OptTree",
    "Rollout",
    "Sequoia",
    "Static",
    "TreeBuilder",
]

"""Tree builders: how many nodes are drafted, and where."""

from .base import TreeBuilder
from .chain import Chain
from .dynamic import Eagle2
from .fixed import Static
from .measured import Auto
from .rollout import Rollout

__all__ = [
    "Auto",
    "Chain",
    "Eagle2",
    "Rollout",
    "Static",
    "TreeBuilder",
]

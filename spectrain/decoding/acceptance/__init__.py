"""Acceptance rules: which path of a verified tree is kept, and which token follows it."""

from spectrain.trees.token_tree import Accepted

from .base import AcceptanceRule, Siblings
from .lossy import Interleaved, Typical
from .matching import Greedy, Match, OpenSampling, SamplingRule
from .walking import Dice, VerifiedTree, Walking
from .weighing import Block, Recursive, SpeculativeSampling, Traversal

__all__ = [
    "AcceptanceRule",
    "Accepted",
    "Block",
    "Dice",
    "Greedy",
    "Interleaved",
    "Match",
    "OpenSampling",
    "Recursive",
    "SamplingRule",
    "Siblings",
    "SpeculativeSampling",
    "Traversal",
    "Typical",
    "VerifiedTree",
    "Walking",
]

"""Acceptance rules: which path of a verified tree is kept, and which token follows it."""

from spectrain.trees.token_tree import Accepted

from .base import AcceptanceRule, Siblings
from .blending import Blending, Bounded, Deferral, Sigmoid
from .judging import Judge
from .lossy import Interleaved, Typical
from .matching import Greedy, Match, OpenSampling, SamplingRule
from .programme import TruncatedProgramme
from .relaxed import Loose, Relaxed, Rollback
from .transport import ImportanceSampling, KSeq, SpecHub, Transport
from .walking import Dice, VerifiedTree, Walking
from .weighing import Block, Recursive, SpeculativeSampling, Traversal

__all__ = [
    "AcceptanceRule",
    "Accepted",
    "Blending",
    "Block",
    "Bounded",
    "Deferral",
    "Dice",
    "Greedy",
    "ImportanceSampling",
    "Interleaved",
    "Judge",
    "KSeq",
    "Loose",
    "Match",
    "OpenSampling",
    "Recursive",
    "Relaxed",
    "Rollback",
    "SamplingRule",
    "Siblings",
    "Sigmoid",
    "SpecHub",
    "SpeculativeSampling",
    "Transport",
    "Traversal",
    "TruncatedProgramme",
    "Typical",
    "VerifiedTree",
    "Walking",
]

"""Acceptance rules: which path of a verified tree is kept, and which token follows it."""

from spectrain.trees.token_tree import AcceptedPath

from .base import AcceptanceRule, Siblings
from .matching import Greedy, Match, OpenSampling, SamplingRule
from .rejection import Block, RecursiveRejection, SpeculativeSampling
from .sequential import RandomSource, SequentialRule, VerifiedTree
from .typical import TypicalAcceptance

__all__ = [
    "AcceptanceRule",
    "AcceptedPath",
    "Block",
    "Greedy",
    "Match",
    "OpenSampling",
    "RandomSource",
    "RecursiveRejection",
    "SamplingRule",
    "SequentialRule",
    "Siblings",
    "SpeculativeSampling",
    "TypicalAcceptance",
    "VerifiedTree",
]

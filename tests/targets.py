"""Targets with few layers, for tests that ask whether two ways of computing agree: a forward's layers are most of its cost."""

from spectrain.models.loading import load_tiny
from spectrain.models.target import Target


def cut_tiny(num_layers: int) -> Target:
    """The tiny target's first layers, its final norm and its head; its path is the whole one's. With three layers its answers
    are as varied as the whole one's, with four or more they repeat themselves."""
    target = load_tiny()
    target.decoder.layers = target.layers[:num_layers]
    target.config.num_hidden_layers = num_layers
    target.config.layer_types = None
    return target

"""Files that the connectors of hs-connectors write are read: float8 states with one scale per
token.
"""

from pathlib import Path

import pytest
import torch

pytest.importorskip("hs_connectors")

from hs_connectors.fp8_hidden_states_connector import FP8HiddenStatesConnector

from spectrain.data.chat import Example
from spectrain.features.speculators import SpeculatorsCache
from spectrain.models.target import Target


class FinishedCopy:
    """The event that the connector waits for."""

    def synchronize(self) -> None: ...


def test_float8_files_of_the_connector(tiny: Target, tmp_path: Path) -> None:
    """The layers are identified, and the states are the target's to the rounding of float8."""
    torch.manual_seed(3)
    tokens = torch.randint(3, 2000, (50,))
    layers = (2, 4, 5, "final")
    states = tiny.features(tokens[None], (2, 4, 5, 8)).hidden[0].contiguous()
    tensors = {"hidden_states": states, "token_ids": tokens}
    file = tmp_path / "hs_0.safetensors"
    FP8HiddenStatesConnector._write_tensors(tensors, FinishedCopy(), str(file), None)
    cache = SpeculatorsCache(tmp_path, tiny)
    assert cache.stored_layers == (2, 4, 5, 8)
    read = cache.read_states(Example(tokens.tolist(), []), layers, tiny)
    exact = tiny.features(tokens[None], layers).hidden[0]
    assert read is not None
    assert ((read - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.05

"""Cases of the ideas for tests/decoding/test_sampling.py."""

from typing import Any

import pytest

from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.trees import Static
from spectrain_research.controllers.builders import Policy, Thompson
from spectrain_research.domino.drafter import Domino, DominoConfig
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.transport.linear_program import TruncatedLinearProgram
from spectrain_research.transport.rules import ImportanceSampling, KSeq, SpecHub, Transport
from spectrain_research.traversal.rule import Traversal
from spectrain_research.xpress.drafter import XPress, XPressConfig
from tests.decoding.test_sampling import FEW, PATHS, SEED, assume_costs

CASES: dict[str, Any] = {
    "PAIRS": [
        pytest.param(
            SpeculativeSampling,
            assume_costs(Thompson(3, "sampled", seed=SEED)),
            id="chain-thompson",
        ),
        pytest.param(Block, assume_costs(Policy(3, "sampled", seed=SEED)), id="block-policy"),
        pytest.param(
            Traversal,
            Static(paths=PATHS, children="without_replacement", seed=SEED),
            id="traversal-without",
        ),
        pytest.param(
            Traversal, Static(paths=PATHS, children="sampled", seed=SEED), id="traversal-sampled"
        ),
        pytest.param(RecursiveRejection, DySpec(2, 5, seed=SEED), id="recursive-dyspec"),
        pytest.param(KSeq, Static(paths=PATHS, children="sampled", seed=SEED), id="kseq"),
        pytest.param(
            ImportanceSampling, Static(paths=PATHS, children="sampled", seed=SEED), id="importance"
        ),
        pytest.param(
            TruncatedLinearProgram,
            Static(paths=PATHS, children="sampled", seed=SEED),
            id="programme",
        ),
        pytest.param(
            Transport, Static(paths=PATHS, children="top_and_sampled", seed=SEED), id="transport"
        ),
        pytest.param(
            SpecHub, Static(paths=PATHS, children="top_and_sampled", seed=SEED), id="spechub"
        ),
        pytest.param(
            Traversal,
            Static(paths=PATHS, children="top_and_sampled", seed=SEED),
            id="traversal-top-and-sampled",
        ),
    ],
    "test_autoregressive_decoding_draws_from_the_target": [Traversal],
    "FAMILIES": {
        "domino": lambda target: Domino(
            target, DominoConfig(block_size=4, num_layers=1, vocab_size=FEW, gru_width=8, rank=8)
        ),
        "xpress": lambda target: XPress(
            target, XPressConfig(block_size=4, num_layers=1, vocab_size=FEW, rank=8, num_passes=1)
        ),
    },
    "DRAWN": [
        pytest.param(Traversal, Static(paths=PATHS, children="sampled", seed=SEED), id="traversal"),
        pytest.param(RecursiveRejection, DySpec(2, 5, seed=SEED), id="dyspec"),
    ],
}

"""Why a server does not draft as our own chain does: broken drafters, each named, with our own
chain as the server.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config.spec import RunSpec
from spectrain.data.readers import EmbeddedReader
from spectrain.decoding.generation import Generation
from spectrain.drafters.eagle3 import Eagle3
from spectrain.eval.metrics import Turn
from spectrain.eval.prompts import read_prompts
from spectrain.export.converter import read_drafter
from spectrain.export.layout import DrafterCheckpoint
from spectrain.export.measure import load_drafter, with_changes
from spectrain.export.targets import TargetFiles
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.runs.drafters import save_drafter
from spectrain.training.trainer import Trainer
from spectrain.trees import Chain
from spectrain_serve.layouts.gguf_layout import convert_heads
from spectrain_serve.scoring.agreement import decode_prompts
from spectrain_serve.scoring.causes import CauseFinder
from spectrain_serve.scoring.own_chain import OwnChain

TINY = TargetFiles("tiny")
OPTIONS = {"vocab_size": 1024, "ttt_steps": 3}
STEPS = 300
NUM_PROMPTS = 4
NUM_TOKENS = 48

Change = Callable[[DrafterCheckpoint], DrafterCheckpoint]


def change_flag(**flags: Any) -> Change:
    return lambda drafter: with_changes(drafter, {"architecture": flags}, {})


def shift_layers(by: int) -> Change:
    return lambda drafter: with_changes(
        drafter, {"layers": [layer + by for layer in drafter.drafter["layers"]]}, {}
    )


def permute_heads(drafter: DrafterCheckpoint) -> DrafterCheckpoint:
    return with_changes(
        drafter, {}, convert_heads(drafter.tensors, drafter.drafter["architecture"], to_file=True)
    )


def read_offsets_as_ids(drafter: DrafterCheckpoint) -> DrafterCheckpoint:
    return with_changes(
        drafter, {}, {"d2t": drafter.tensors["d2t"] - torch.arange(len(drafter.tensors["d2t"]))}
    )


FAULTS: dict[str, tuple[str | None, Change]] = {
    "nothing wrong": (None, lambda drafter: drafter),
    "layers one lower": ("layer-ids-off-by-one", shift_layers(-1)),
    "layers one higher": ("layer-ids-off-by-one", shift_layers(1)),
    "the other residual": ("norm-before-residual-swapped", change_flag(norm_before_residual=True)),
    "normed feedback": ("norm-output-swapped", change_flag(norm_output=True)),
    "queries and keys permuted": ("heads-permuted", permute_heads),
    "offsets read as ids": ("d2t-as-ids", read_offsets_as_ids),
    "a window of 48": ("context-window", lambda drafter: with_changes(drafter, {"window": 48}, {})),
}


@pytest.fixture(scope="module")
def checkpoint(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> DrafterCheckpoint:
    """An EAGLE-3 drafter that has learnt something."""
    torch.manual_seed(0)
    folder, drafter = tmp_path_factory.mktemp("eagle3"), Eagle3(tiny, **OPTIONS)  # type: ignore[arg-type]
    dataset = EmbeddedReader(limit=STEPS).make_dataset(tiny.template)
    drafter.prepare(tiny, dataset.token_counts(tiny.head.vocab_size))
    Trainer(lr=3e-3, max_steps=STEPS, batch_tokens=1024).fit(
        drafter, tiny, dataset, LiveSource(), folder / "fit"
    )
    settings = {"_target_": "spectrain.drafters.eagle3.Eagle3", **OPTIONS}
    spec = RunSpec.from_nodes(
        {"drafter": settings, "target": TINY.settings, "recipe_name": "eagle3"}
    )
    save_drafter(folder / "drafter", drafter, spec)
    return read_drafter(folder / "drafter", TINY)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, checkpoint: DrafterCheckpoint, tiny: Target) -> None:
    """A server with one fault is compared with the drafter as it is: the fault is named, and
    explains every round.
    """
    name, change = FAULTS[fault]
    finder = CauseFinder(checkpoint, TINY, tiny)
    own = OwnChain(tiny, load_drafter(checkpoint, tiny), finder.list_causes)
    prompts = [
        Generation(prompt.tokenize_for(tiny)) for prompt in read_prompts(None, NUM_PROMPTS).prompts
    ]
    served = decode_prompts(
        tiny, load_drafter(change(checkpoint), tiny), Chain(3), prompts, NUM_TOKENS
    )
    turns = [
        Turn(str(row), 0, "all", Generation(each.prompt, [0]), each)
        for row, each in enumerate(served)
    ]
    result = own.compare(turns, NUM_TOKENS)
    if name is None:
        assert result["equal"] == result["checked"] == NUM_PROMPTS
        return
    assert result["equal"] < result["checked"] and result["cause"]["name"] == name
    assert result["cause"]["agreement"]["share"] == 1


def test_a_drafter_without_layers_has_few_causes(tiny: Target, tmp_path: Path) -> None:
    """Only number types are tested where no layout is known."""
    checkpoint = DrafterCheckpoint("ngram", {}, {})
    finder = CauseFinder(checkpoint, TINY, tiny)
    assert {cause.name for cause in finder.list_causes(5)} == {"dtype"}

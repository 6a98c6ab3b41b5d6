"""The tests of packages/studies/tests/comparison/test_compare.py that are about ideas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from packages.studies.tests.comparison.test_compare import run_compare
from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.memory import extra_memory, own_bytes
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_research.less_cache.drafter import SelfDraft
from spectrain_studies.comparison.compare import Contest


def test_extra_memory_is_the_drafters(tiny: Target) -> None:
    """A drafter's weights are those that the target does not lend; n-gram lookup has none."""
    drafter = Eagle3(tiny, ttt_steps=2, vocab_size=256)
    drafter.prepare(tiny, torch.arange(tiny.head.vocab_size))
    own = sum(t.numel() * t.element_size() for t in (*drafter.parameters(), *drafter.buffers()))
    assert own_bytes(tiny, drafter.eval()) == own
    # A quantized weight wraps its numbers and their scales.
    wrapped = nn.Module()
    wrapped.weight = nn.Parameter(TwoTensor(torch.zeros(4), torch.ones(4)), requires_grad=False)
    assert own_bytes(tiny, wrapped) == 32
    prompt = list(range(5, 30))
    memory = extra_memory(tiny, drafter, Chain(3), Greedy(), prompt)
    assert memory["extra"] == memory["weights"] + memory["working"] and memory["working"] > 0
    assert extra_memory(tiny, Ngram(tiny), Chain(3), Greedy(), prompt)["weights"] == 0
    # A quantized copy of the target's weights is memory too, although it is no parameter.
    coded = SelfDraft(tiny, "full", weights="int4")
    codes = extra_memory(tiny, coded, Chain(3), Greedy(), prompt)["weights"]
    assert coded.quantized_weights is not None
    assert (
        codes
        == sum(part.numel() * part.element_size() for part in coded.quantized_weights.tensors)
        > 0
    )


def test_recipes_that_copy_text_are_scored_as_chains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that is searched over a drafter's steps would be refused after their training."""
    trees: dict[str, str] = {}
    compose_settings = Contest.compose_settings

    def record_tree(self: Contest, group: str, name: str) -> Any:
        composed = compose_settings(self, group, name)
        trees[name] = composed.tree.path.rpartition(".")[2]
        return composed

    def stop_contest(self: Contest) -> None:
        raise UserError("seen enough")

    monkeypatch.setattr(Contest, "compose_settings", record_tree)
    monkeypatch.setattr(Contest, "write_settings", stop_contest)
    words = "recipes=cllm,medusa1", "compare.training_free=[ngram]", "tree=static"
    assert run_compare(*words, "target=tiny", f"run={tmp_path / 'out'}")[0] == 2
    assert trees == {"cllm": "Chain", "medusa1": "Static", "ngram": "Chain"}

"""Adapters in a drafter whose training continues: what they change, how a run resumes, and what
is refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config.spec import RunSpec
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.runs.init_drafter import adapt_drafter
from spectrain.training.adapters import LoraAdapter
from spectrain.training.trainer import Trainer
from tests.factories import dataset_with_spans

LORA = "spectrain.training.adapters.LoraAdapter"


def make_drafter(target: Target) -> Eagle3:
    torch.manual_seed(0)
    drafter = Eagle3(target, ttt_steps=2)
    drafter.prepare(target, torch.arange(target.head.vocab_size))
    return drafter


def fit_drafter(
    target: Target, run: Path, adapter: LoraAdapter, **options: Any
) -> dict[str, torch.Tensor]:
    """Return the tensors of a drafter after four steps of its adapters."""
    drafter = make_drafter(target)
    adapter.adapt_drafter(drafter, target.head.vocab_size)
    trainer = Trainer(lr=1e-2, max_steps=4, batch_tokens=60, save_every=2)
    trainer.fit(drafter, target, dataset_with_spans(8), LiveSource(), run, **options)
    return drafter.state_dict()


class Killed(Exception):
    """Stands for a kill between two steps."""


def test_a_resumed_run_ends_in_the_same_low_rank_update(shallow: Target, tmp_path: Path) -> None:
    """A resumed run equals an uninterrupted one; the named layers change by a matrix of the
    rank, and nothing else changes.
    """
    adapter = LoraAdapter(rank=3, modules=["q_proj", "down_proj"])
    before = make_drafter(shallow).state_dict()
    after = fit_drafter(shallow, tmp_path / "whole", adapter)

    def kill_at_step(step: int) -> None:
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        fit_drafter(shallow, tmp_path / "cut", adapter, on_step=kill_at_step)
    resumed = fit_drafter(shallow, tmp_path / "cut", adapter)
    assert after.keys() == before.keys() and all(
        torch.equal(after[name], resumed[name]) for name in after
    )
    ranks = {
        name: int(torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4))
        for name in after
        if not torch.equal(after[name], before[name])
    }
    assert ranks == {"self_attn.q_proj.weight": 3, "mlp.down_proj.weight": 3}


@pytest.mark.parametrize(
    "init, settings, words",
    [
        (None, {}, "drafter.init=runs/NAME"),
        ("runs/old", {"modules": ["q_prj"]}, "adapter.modules: q_prj .*q_proj"),
        ("runs/old", {"rank": 4096}, "adapter.rank=4096"),
    ],
)
def test_what_takes_no_adapter_is_refused(
    shallow: Target, init: str | None, settings: dict[str, Any], words: str
) -> None:
    """An untrained drafter, an unknown layer, and a rank above that of every layer are refused."""
    drafter = {
        "_target_": "spectrain.drafters.eagle3.Eagle3",
        **({} if init is None else {"init": init}),
    }
    spec = RunSpec.from_nodes({"drafter": drafter, "adapter": {"_target_": LORA, **settings}})
    with pytest.raises(UserError, match=words):
        adapt_drafter(spec, make_drafter(shallow), shallow)

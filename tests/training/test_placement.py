"""Where tensors are made: nothing in a training step or a round is made on the default device.

The default device is set to "meta", whose tensors have no values, and the models are on the CPU, as
they would be on a GPU while the default is the CPU. Whatever a step makes without naming a device
then meets the model's tensors on another one, and fails.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.loop import Request
from spectrain.decoding.static_rounds import RoundTimer
from spectrain.drafters.eagle3 import Eagle3
from spectrain.features.live_source import LiveSource
from spectrain.kernels import dispatch
from spectrain.models.loading import load_hf
from spectrain.training.parallel.base import ParallelStrategy
from spectrain.training.trainer import Trainer
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.fixed import Static
from tests.targets import cut_tiny
from tests.training import worker
from tests.training.test_processes import FAMILIES


@contextmanager
def make_nothing_by_default() -> Iterator[None]:
    """Set a default device on which nothing can be computed with a model's tensors. Kernels of a
    CPU, which write to addresses, are left out: a GPU does not run them.
    """
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "cpu_kernel_sources", lambda: ())
        yield


def run_elsewhere(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let a method run while nothing may be made on the default device."""
    method = getattr(owner, name)

    def run(*arguments: Any, **options: Any) -> Any:
        with make_nothing_by_default():
            return method(*arguments, **options)

    monkeypatch.setattr(owner, name, run)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_makes_tensors_where_its_model_is(
    family: str,
    recompute: bool,
    shallow_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses and gradients of every family, with gradient checkpointing and without."""
    target = load_hf(str(shallow_folder))
    drafter = worker.make(family, target)
    if recompute and drafter.capabilities.adapts_layers:
        pytest.skip("a family that adds to the target's layers recomputes nothing")
    run_elsewhere(monkeypatch, ParallelStrategy, "loss")
    run_elsewhere(monkeypatch, ParallelStrategy, "backward")
    steps: list[int] = []
    Trainer(
        max_steps=2, batch_tokens=48, save_every=None, gradient_checkpointing=recompute, warmup=0.0
    ).fit(drafter, target, worker.dataset(), LiveSource(), tmp_path / "run", on_step=steps.append)
    assert steps == [1, 2]
    assert {tensor.device.type for tensor in drafter.state_dict().values()} <= {"cpu"}


@pytest.mark.parametrize(
    ("rule", "builder"),
    [
        (Greedy(), Chain(3)),
        (Match(0.8, top_p=0.9), Eagle2(3, 10, 3)),
        (Greedy(), Static(paths=[[0], [1], [0, 0]], children="sampled")),
    ],
)
def test_a_round_makes_tensors_where_its_model_is(rule: Any, builder: TreeBuilder) -> None:
    """Rounds after the first, which a GPU would replay."""
    target = cut_tiny(2)
    drafter = Eagle3(target, vocab_size=512).eval()
    engine = CapturedRunner(target, rule, drafter, builder)
    with torch.inference_mode():
        engine.start_batch(Request([[5, 6, 7], [9]], 12, [0, 1], frozenset()))
        engine.run_uncaptured_round(RoundTimer(target.device))
        with make_nothing_by_default():
            engine.run_uncaptured_round(RoundTimer(target.device))
    assert engine.state.context.log is not None
    assert engine.state.context.log.lines.device.type == "cpu"


def test_a_tensor_on_the_default_device_fails() -> None:
    """The proof can fail: what is made without a device cannot be computed with."""
    with make_nothing_by_default(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(2, device="cpu").copy_(torch.ones(2) + torch.zeros(2, device="cpu")).sum()


TRAINING = """
import os, sys, spectrain
settings = {"trainer.sharding": "fsdp2", "trainer.max_steps": 1, "data.limit": 8, "eval": "none"}
spectrain.train("eagle3", target="tiny", run=sys.argv[1], **settings, **{"drafter.start": "random"})
assert "LOCAL_RANK" not in os.environ
"""


@pytest.mark.slow
def test_a_sharded_training_of_one_process_leaves_it_without_a_rank(tmp_path: Path) -> None:
    """A program that it starts afterwards would look for the other processes."""
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "run")]
    subprocess.run(command, check=True, env=environment)

"""The expected accepted length: its value, its derivatives, and its gradient through a drafter."""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrain.cli.main import dispatch_command
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.losses import acceptance_rate, forward_kl
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain_research.expected_length.drafter import ExpectedLength
from spectrain_research.expected_length.loss import expected_length, length_gradient
from tests.drafters.forced import shaken
from tests.export.test_converter import ours
from tests.factories import random_batch

EAGLE3 = {"choice": "eagle3"}


def test_the_length_is_that_of_all_outcomes() -> None:
    """The mean number of accepted drafts before the first rejection, over every outcome."""
    torch.manual_seed(0)
    rates = torch.rand(3, 4, dtype=torch.float64)
    for row, expected in zip(rates.tolist(), expected_length(rates).tolist()):
        total = 0.0
        for outcome in product([0, 1], repeat=4):
            chance = 1.0
            for rate, accepted in zip(row, outcome):
                chance *= rate if accepted else 1 - rate
            total += chance * (outcome.index(0) if 0 in outcome else 4)
        assert abs(total - expected) < 1e-12


def test_derivatives_are_autograds() -> None:
    """Also where a rate is 0."""
    torch.manual_seed(1)
    rates = torch.rand(5, 4, dtype=torch.float64)
    rates[0, 1] = rates[1, 0] = 0.0
    leaf = rates.clone().requires_grad_()
    expected_length(leaf).sum().backward()
    torch.testing.assert_close(length_gradient(rates), leaf.grad)


def compute_loss(drafter: ExpectedLength, target: Target, batch: Batch) -> Tensor:
    """Compute the loss chain by chain, by autograd through the product of the rates."""
    supervision = Supervision(drafter, batch)
    states = [*drafter.unroll_steps(batch, drafter.num_steps, TrainingState())]
    assert supervision.target_log_probs is not None
    log_p = supervision.target_log_probs(slice(0, len(supervision.labels)))
    total = torch.zeros(())
    for row in range(batch.tokens.shape[0]):
        for index in range(batch.tokens.shape[1]):
            survival = torch.ones(())
            is_open = True
            for step, hidden in enumerate(states):
                is_judged = bool(supervision.is_supervised(step)[row, index])
                if is_judged:
                    label = int(supervision.row_index[row, index + 1 + step])
                    log_q = drafter.log_q(hidden[row, index])
                    kl = forward_kl(log_p[label], log_q)
                    total = total + drafter.kl * drafter.step_decay**step * kl
                is_open &= is_judged
                if is_open:
                    survival = survival * acceptance_rate(log_p[label], log_q)
                    total = total + 1 - survival
    return total


def test_loss_and_gradient_are_those_of_the_definition(shallow: Target) -> None:
    """With gaps in what is supervised, where chains end, and with tokens outside of the draft
    vocabulary."""
    drafter = shaken(ExpectedLength(shallow, kl=0.5, vocab_size=300, ttt_steps=3), shallow)
    batch = random_batch(shallow, drafter.layers, (2, 18), has_prompt=True)
    results = []
    for compute in (
        lambda: drafter.loss(batch, shallow, TrainingState()).total,
        lambda: compute_loss(drafter, shallow, batch),
    ):
        drafter.zero_grad()
        loss = compute()
        loss.backward()
        gradients = {
            name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None
        }
        results.append((loss.detach(), gradients))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("format_name", ["vllm", "sglang"])
def test_its_files_are_those_of_eagle3(tiny: Target, tmp_path: Path, format_name: str) -> None:
    """An export holds the same configuration and tensors as that of EAGLE-3 with its weights."""
    source = ours(tmp_path / "drafter", tiny, "expected_length", vocab_size=256)
    copy = tmp_path / "eagle3"
    shutil.copytree(source, copy)
    config = json.loads((copy / "config.json").read_text())
    settings = config["drafter"]
    (copy / "config.json").write_text(json.dumps({**config, "drafter": {**settings, **EAGLE3}}))
    for folder in (source, copy):
        words = [f"format={format_name}", f"out={folder}-out"]
        dispatch_command(["export", f"run={folder}", *words])
    outs = [Path(f"{folder}-out") for folder in (source, copy)]
    assert (outs[0] / "config.json").read_text() == (outs[1] / "config.json").read_text()
    tensors = [load_file(out / "model.safetensors") for out in outs]
    torch.testing.assert_close(tensors[0], tensors[1], rtol=0, atol=0)

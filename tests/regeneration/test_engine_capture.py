"""Answers of our own engine and their states from the same pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from spectrain.cli.overrides import write_overrides
from spectrain.config.spec import read_run
from spectrain.data.readers import JsonlReader
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.features.store import FeatureStore
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.regeneration.command import regenerate_command
from tests.factories import random_batch
from tests.features.test_capture import composed
from tests.regeneration.capturing import chats, train_on  # noqa: F401
from tests.regeneration.test_regenerate import load_poolable

LAYERS = (2, 4, 5, "final")


def regenerate(out: Path, questions: Path, *more: str) -> None:
    words = [
        "target=tiny",
        "capture=true",
        "recipe=eagle3",
        f"out={out}",
        "data=jsonl",
        f"data.path={questions}",
        "sampling.max_new_tokens=12",
        *more,
    ]
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("regenerate", overrides=write_overrides(words))
    spec, settings = read_run(
        config, ("writer", "sampling", "regenerate", "out", "check", "capture"), words
    )
    regenerate_command(spec, **settings)


def compare_states(out: Path, target: Target, tolerance: float) -> None:
    """Assert that the store holds the training sequences of the answers, with the states that a
    forward of the target yields wherever a loss reads them.
    """
    dataset = JsonlReader(str(out)).make_dataset(target.template)
    store = FeatureStore(out / "features")
    assert {*store.shard_names} == {example.content_hash for example in dataset.examples}
    for example in dataset.examples:
        states = store.read_states(example, LAYERS, target)
        assert states is not None
        own = target.features(torch.tensor([example.tokens]), LAYERS).hidden[0]
        last = max(number for number, supervised in enumerate(example.mask) if supervised)
        largest = own[:last].abs().max()
        assert (states[:last] - own[:last]).abs().max() <= tolerance * largest


def test_a_training_reads_what_was_captured(
    tmp_path: Path,
    chats: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where texts are decoded in batches, the target runs every finished answer once more. A
    training that may not capture has the losses of one that runs the target."""
    out = tmp_path / "out"
    regenerate(out, chats)
    counts = "6 sequences; 0 while their answers were written, 6 by a forward of their own"
    assert counts in capsys.readouterr().out
    compare_states(out, load_tiny(), tolerance=1e-6)
    stored = train_on(
        out,
        tmp_path / "stored",
        "source=store",
        f"+source.path={out / 'features'}",
        "+source.capture=false",
    )
    assert stored == pytest.approx(train_on(out, tmp_path / "live"), rel=1e-5)


def test_continuous_batches_give_states_as_they_decode(
    tmp_path: Path,
    chats: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every conversation's states are stored with its answers, those of two turns too; they equal
    the target's up to the rounding of bfloat16."""
    target = load_poolable()
    out = tmp_path / "out"
    regenerate(out, chats, "target.dtype=bfloat16", "sampling.temperature=0.7")
    counts = "6 sequences; 6 while their answers were written, 0 by a forward of their own"
    assert counts in capsys.readouterr().out
    compare_states(out, target, tolerance=0.02)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("run=runs/any", "answers are captured without a drafter"),
        ("tree=chain", "nothing is drafted without a drafter"),
    ],
)
def test_what_drafts_is_refused(word: str, sentence: str, tmp_path: Path, chats: Path) -> None:  # noqa: F811
    with pytest.raises(UserError, match=sentence):
        regenerate(tmp_path / "out", chats, word)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "recipe", ["eagle1", "eagle3", "hass", "dflash", "peagle", "medusa1", "pard", "gkd"]
)
def test_no_loss_reads_states_after_the_last_that_precedes_loss(recipe: str, tiny: Target) -> None:
    """Where the last token and the template's end have padding in place of states, loss and
    gradients are the same.
    """
    drafter: Drafter = composed(f"recipe={recipe}", "target=tiny").drafter.build(target=tiny)
    layers = drafter.stages[0].layers
    batch = random_batch(tiny, layers, (2, 32), has_prompt=True)
    batch.loss_mask[:, 27:] = False
    assert batch.features is not None
    results = []
    for cut in (False, True):
        hidden = batch.features.hidden.clone()
        if cut:
            hidden[:, 26:] = 0.0
        results.append(loss_and_gradients(drafter, tiny, replace_states(batch, hidden)))
    assert results[0] == results[1]


def replace_states(batch: Batch, hidden: torch.Tensor) -> Batch:
    assert batch.features is not None
    return replace(batch, features=replace(batch.features, hidden=hidden))


def loss_and_gradients(drafter: Drafter, target: Target, batch: Batch) -> tuple[float, list[float]]:
    """Return the loss, and the norm of every parameter's gradient."""
    torch.manual_seed(3)
    drafter.zero_grad(set_to_none=True)
    drafter.train()
    losses: Any = drafter.loss(batch, target, TrainingState(0, 0.0, False))
    losses.total.backward()
    return float(losses.total.detach()), [
        float(p.grad.norm()) for p in drafter.parameters() if p.grad is not None
    ]

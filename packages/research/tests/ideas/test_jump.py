"""Jump drafting: a right prediction drafts what the target predicts, and training is decoding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.fitted_start import label_positions
from spectrain.drafters.layers.vocabulary import Supervision, embed_as_target
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain_research.jump.drafter import Jump
from tests.drafters.forced import shaken, walk
from tests.factories import random_batch

STEPS = 3


def make_drafter(target: Target, **options: Any) -> Jump:
    drafter: Jump = shaken(Jump(target, num_steps=STEPS, num_units=16, **options), target)
    return drafter


def training_log_q(
    drafter: Jump, target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Return log q [B, T, V] of every draft step of the training loss."""
    outputs: list[Tensor] = []
    run_step = Jump.run_step

    def record(*arguments: Any) -> Any:
        result = run_step(*arguments)
        outputs.append(drafter.log_q(result[0]))
        return result

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Jump, "run_step", record)
        drafter.loss(batch, target, TrainingState())
    return outputs


@pytest.mark.parametrize(
    "options", [{}, {"jump_layer": 1, "sources": [1, 2, 3], "vocab_size": 512}], ids=str
)
def test_training_equals_decoding_along_the_true_path(
    shallow: Target, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after rounds without a draft, and with texts of unequal length in one batch."""
    drafter = make_drafter(shallow, **options)
    batch = random_batch(shallow, drafter.layers)
    trained = training_log_q(drafter, shallow, batch, monkeypatch)
    assert len(trained) == STEPS
    for row, index, log_q in walk(drafter, shallow, batch.tokens, STEPS):
        for step in range(STEPS):
            torch.testing.assert_close(log_q[step], trained[step][row, index], rtol=1e-3, atol=1e-3)


def test_a_right_prediction_drafts_what_the_target_predicts(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the states that the target really has, the later layers return its own distribution, at
    every draft step."""
    drafter = make_drafter(shallow, jump_layer=2)
    batch = random_batch(shallow, drafter.layers)
    assert batch.features is not None
    true_states = batch.features.at_layer(2)
    step = iter(range(1, STEPS + 1))
    monkeypatch.setattr(
        Jump, "predict_states", lambda self, tokens, sources: true_states.roll(-next(step), dims=1)
    )
    final = shallow.run(batch.tokens, ForwardPlan(layers=("final",))).at_layer("final")
    expected = shallow.head.logits(final).log_softmax(-1)
    outputs = training_log_q(drafter, shallow, batch, monkeypatch)
    length = batch.tokens.shape[1]
    for number, log_q in enumerate(outputs, 1):
        torch.testing.assert_close(
            log_q[:, : length - number], expected[:, number:], rtol=1e-3, atol=1e-3
        )


def test_packed_equals_padded(shallow: Target) -> None:
    """Loss and gradients of two texts do not depend on how they lie in a batch."""
    drafter = make_drafter(shallow, vocab_size=512)
    padded = random_batch(shallow, drafter.layers, (2, 12), has_prompt=True)
    tokens = padded.tokens.view(1, -1)
    lengths = (12, 12)
    packed = Batch(
        tokens,
        padded.loss_mask.view(1, -1),
        shallow.features(tokens, drafter.layers, lengths),
        lengths,
    )
    results = []
    for batch in (padded, packed):
        drafter.zero_grad()
        loss = drafter.loss(batch, shallow, TrainingState()).total
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in drafter.predictor.named_parameters()}
        results.append((loss.detach(), gradients))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)
    assert all(parameter.grad is None for parameter in shallow.parameters())


def test_the_fit_leaves_less_of_the_states_than_their_mean(shallow: Target) -> None:
    """Over the rows of the fit, by the linear map, and then by the units."""
    torch.manual_seed(0)
    drafter = Jump(shallow, num_units=16)
    drafter.prepare(shallow, torch.ones(shallow.head.vocab_size))
    batch = random_batch(shallow, drafter.layers, (4, 96))
    drafter.fit_start([batch], shallow)
    rows = label_positions(batch, 0)
    assert batch.features is not None
    states = batch.features.at_layer(drafter.jump_layer).roll(-1, dims=1)[rows]
    tokens = batch.tokens.roll(-1, dims=1)
    predictor = drafter.predictor
    with torch.no_grad():
        inputs = predictor.read_inputs(
            embed_as_target(drafter, tokens), drafter.read_sources(batch.features)
        )
        linear_error = (predictor.fc(inputs)[rows] - states).square().mean()
        predicted = drafter.predict_states(tokens, drafter.read_sources(batch.features))[rows]
        error = (predicted - states).square().mean()
    assert error < linear_error < states.var(0).mean()


def test_without_rows_the_fit_changes_nothing(shallow: Target) -> None:
    drafter = Jump(shallow, num_units=16)
    batch = random_batch(shallow, drafter.layers)
    before = drafter.predictor.fc.weight.clone()
    nothing = Batch(batch.tokens, torch.zeros_like(batch.loss_mask), batch.features)
    drafter.fit_start([nothing], shallow)
    assert torch.equal(drafter.predictor.fc.weight, before) and not drafter.starts_trained
    assert not Supervision(drafter, nothing).labels.numel()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"jump_layer": 3}, "use 1 to 2"),
        ({"jump_layer": 2, "sources": [1]}, "from drafter.jump_layer=2"),
        ({"sources": []}, "name layers from"),
    ],
    ids=str,
)
def test_layers_that_no_draft_step_has_are_refused(
    shallow: Target, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        Jump(shallow, **options)

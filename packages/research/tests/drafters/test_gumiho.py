"""Gumiho: without parallel heads it is its serial part, and what is trained is what is decoded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.gumiho.drafter import Gumiho
from tests.decoding.rounds import begun, proposed
from tests.drafters.forced import Probe, shaken, walk
from tests.factories import random_batch


def make_drafter(target: Target, **options: Any) -> Gumiho:
    drafter = Gumiho(
        target,
        **{"num_parallel": 2, "num_blocks": 1, "num_layers": 1, "vocab_size": 512, **options},
    )
    return shaken(drafter, target)  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_serial", [1, 3])
def test_without_parallel_heads_it_is_its_serial_part(shallow: Target, num_serial: int) -> None:
    """Loss, gradients and drafts are those of EAGLE-3 with as many unrolled steps and the same
    weights.
    """
    drafter = make_drafter(shallow, num_serial=num_serial, num_parallel=0)
    eagle3 = Eagle3(shallow, ttt_steps=num_serial, vocab_size=512)
    eagle3.load_state_dict(drafter.state_dict(), strict=True)
    batch = random_batch(shallow, drafter.layers)
    results = []
    for candidate in (drafter, eagle3):
        losses = candidate.loss(batch, shallow, TrainingState())
        losses.total.backward()
        gradients = {name: p.grad for name, p in candidate.named_parameters()}
        generation = decode(
            shallow, [[5, 6, 7, 8]], Greedy(), 12, candidate.eval(), Eagle2(num_serial, 6, 3)
        )[0]
        results.append(
            (losses.total, losses.hits, gradients, generation.node_counts, generation.round_lengths)
        )
    torch.testing.assert_close(results[0][:3], results[1][:3], rtol=0, atol=0)
    assert results[0][3:] == results[1][3:]


def compute_training_log_q(
    drafter: Gumiho, target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> list[dict[Any, Tensor]]:
    """Return log q of every step at every (row, index), out of the training loss."""
    states: list[Tensor] = []
    judge = Gumiho.judge_steps
    monkeypatch.setattr(
        Gumiho,
        "judge_steps",
        lambda self, s, step_states: states.extend(step_states) or judge(self, s, step_states),
    )
    with torch.no_grad():
        drafter.loss(batch, target, TrainingState())
        supervision = Supervision(drafter, batch)
        positions = [
            [(int(b), int(t)) for b, t in supervision.is_supervised(step).nonzero()]
            for step in range(len(states))
        ]
        return [
            dict(zip(keys, drafter.log_q(state), strict=True))
            for keys, state in zip(positions, states)
        ]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_serial": 1, "num_parallel": 3}, {"num_serial": 3, "num_layers": 2}],
    ids=str,
)
def test_training_equals_decoding_along_the_true_path(
    shallow: Target, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log q of serial steps and parallel heads is the same in training and in decoding."""
    drafter = make_drafter(shallow, **options)
    batch = random_batch(shallow, drafter.layers)
    trained = compute_training_log_q(drafter, shallow, batch, monkeypatch)
    assert len(trained) == drafter.num_steps
    for row, index, log_q in walk(drafter, shallow, batch.tokens, drafter.num_steps):
        for step in range(drafter.num_steps):
            torch.testing.assert_close(log_q[step], trained[step][row, index], rtol=1e-3, atol=1e-3)


def test_nodes_are_the_same_level_by_level_or_not(shallow: Target) -> None:
    """Nodes of unlike depths in one call have the log q of level-by-level calls, and heads read
    the path's first tokens.
    """
    drafter = make_drafter(shallow)
    context = begun(shallow, [[5, 6, 7, 8]], drafter, Chain(1), 40)
    levels = Probe(([[20, 30]], [[0, 0]]), ([[40, 41]], [[1, 2]]), ([[50, 51]], [[3, 4]]))
    mixed = Probe(
        ([[20]], [[0]]),
        ([[40, 30]], [[1, 0]]),
        ([[41, 50]], [[3, 2]]),
        ([[51]], [[4]]),
        by_level=False,
    )
    with torch.no_grad():
        proposed(drafter, context, levels)
        proposed(drafter, begun(shallow, [[5, 6, 7, 8]], drafter, Chain(1), 40), mixed)
    _, first, second, third = levels.log_q
    expected_levels = [
        [first[0, 0]],
        [second[0, 0], first[0, 1]],
        [second[0, 1], third[0, 0]],
        [third[0, 1]],
    ]
    for log_q, expected in zip(mixed.log_q[1:], expected_levels, strict=True):
        torch.testing.assert_close(log_q[0], torch.stack(expected), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(third[0, 0], third[0, 1], atol=1e-2)


@pytest.mark.parametrize(
    "builder",
    [Chain(7), Eagle2(6, 16, 4), DySpec(6, 12, children="deterministic")],
    ids=lambda b: b.name,
)
def test_trees_end_at_the_last_head(shallow: Target, builder: Any) -> None:
    """A builder that would go deeper stops at the last parallel head, and the output is the
    target's.
    """
    drafter = make_drafter(shallow)
    prompts = [[5, 6, 7, 8], [9, 10]]
    expected = [decode(shallow, [prompt], Greedy(), 10)[0].output for prompt in prompts]
    generations = decode(shallow, prompts, Greedy(), 10, drafter, builder)
    assert [generation.output for generation in generations] == expected
    assert (
        max(depth for generation in generations for depth in generation.depths) == drafter.num_steps
    )

"""CTC drafting: losses and probabilities are those of an enumeration of all slot sequences."""

from itertools import groupby, product
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.vocabulary import embed_as_target
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain_research.ctc.drafter import Ctc, Prefixes
from tests.decoding.rounds import begun, proposed
from tests.drafters.forced import Probe, shaken, walk
from tests.factories import random_batch

V = 3
K = 4


def collapse_path(path: tuple[int, ...]) -> tuple[int, ...]:
    """Merge repeats, then leave blanks out."""
    return tuple(token for token, _ in groupby(path) if token != V)


def compute_text_probs(slots: Tensor) -> dict[tuple[int, ...], float]:
    """Sum, for every text, the probabilities of all slot sequences that collapse to it; slots
    [K, V + 1] in float64.
    """
    probs: dict[tuple[int, ...], float] = {}
    for path in product(range(V + 1), repeat=len(slots)):
        weight = float(slots[range(len(slots)), list(path)].sum().exp())
        probs[collapse_path(path)] = probs.get(collapse_path(path), 0.0) + weight
    return probs


def test_the_chance_of_a_next_token_is_what_enumeration_finds() -> None:
    """After every path, the probability of a token is its share of all texts that begin with the
    path and go on.
    """
    slots = torch.randn(2, K, V + 1, dtype=torch.float64).log_softmax(-1)
    for row in range(2):
        texts = compute_text_probs(slots[row])
        for depth in range(3):
            for path in product(range(V), repeat=depth):
                prefixes = Prefixes.from_slots(slots)
                for token in path:
                    prefixes = prefixes.extend_paths(
                        torch.full((2, 1), token), torch.zeros(2, 1, dtype=torch.int64)
                    )
                weights = [
                    sum(w for text, w in texts.items() if text[: depth + 1] == (*path, token))
                    for token in range(V)
                ]
                expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
                torch.testing.assert_close(
                    prefixes.next_log_probs()[row, 0].exp(), expected, rtol=1e-6, atol=1e-9
                )


def test_nodes_of_a_tree_depend_on_their_paths() -> None:
    """A node's distribution is that of its path fed alone."""
    slots = torch.randn(1, K, V + 1).log_softmax(-1)
    tree = Prefixes.from_slots(slots)
    tree = tree.concat_nodes(tree.extend_paths(torch.tensor([[0, 2]]), torch.tensor([[0, 0]])))
    new = tree.extend_paths(torch.tensor([[1, 0, 1]]), torch.tensor([[2, 1, 1]]))
    for node, path in enumerate([(2, 1), (0, 0), (0, 1)]):
        alone = Prefixes.from_slots(slots)
        for token in path:
            alone = alone.extend_paths(
                torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.int64)
            )
        torch.testing.assert_close(new.next_log_probs()[:, node], alone.next_log_probs()[:, 0])


def make_drafter(target: Target, **options: Any) -> Ctc:
    return shaken(
        Ctc(target, **{"num_drafts": 3, "num_slots": 5, "vocab_size": 512, **options}), target
    )  # type: ignore[no-any-return]


def test_loss_is_the_chance_of_all_that_collapses_to_the_data(shallow: Target) -> None:
    """Over a vocabulary of three the loss is minus the logarithm of the enumerated probability,
    summed over every index before an assistant's token; a token that cannot be drafted ends the
    learned text."""
    drafter = make_drafter(shallow, num_slots=K, vocab_size=V)
    counts = torch.zeros(shallow.head.vocab_size)
    counts[[10, 20, 30]] = 1
    drafter.choose_vocabulary(counts)
    tokens = torch.tensor([[5, 6, 10, 20, 20, 30, 99, 10, 30]])
    mask = torch.tensor([[False, False, False, True, True, True, True, True, True]])
    batch = Batch(tokens, mask, shallow.features(tokens, ("final",)))
    recorded: list[Tensor] = []
    slot_log_probs = Ctc.slot_log_probs
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(
            Ctc,
            "slot_log_probs",
            lambda self, stage: recorded.append(slot_log_probs(self, stage)) or recorded[-1],
        )
        losses = drafter.loss(batch, shallow, TrainingState())
    texts = [(1, 1, 2), (1, 2), (2,), (), (0, 2), (2,)]  # after indices 1 to 6, in draft ids
    expected = [
        -torch.tensor(compute_text_probs(slots.double())[text]).log()
        for slots, text in zip(recorded[0], texts, strict=True)
    ]
    torch.testing.assert_close(
        losses.total, torch.stack(expected).sum().float(), rtol=1e-4, atol=1e-4
    )
    assert losses.counts.tolist() == [6, 5, 4]


def test_a_single_slot_is_a_next_token_head(shallow: Target) -> None:
    """The loss is the cross-entropy over the vocabulary and the blank, and q the softmax over
    the vocabulary.
    """
    drafter = make_drafter(
        shallow, num_drafts=1, num_slots=1, vocab_size=2048, attention_layers=0, adaptation_layers=0
    )
    batch = random_batch(shallow, ("final",), has_prompt=True)
    assert batch.features is not None
    final = batch.features.at_layer("final")
    slots = drafter.slot_log_probs(final.flatten(0, 1))[:, 0].unflatten(0, final.shape[:2])
    mask = batch.loss_mask[:, 2:]
    expected_loss = -slots[:, :-2].gather(-1, batch.tokens[:, 2:, None])[..., 0][mask].sum()
    torch.testing.assert_close(
        drafter.loss(batch, shallow, TrainingState()).total, expected_loss, rtol=1e-4, atol=1e-3
    )
    probe = Probe()
    with torch.no_grad():
        context = begun(shallow, [[5, 6, 7]], drafter, probe)
        proposed(drafter, context, probe)
    expected = drafter.slot_log_probs(context.new_features.at_layer("final")[:, -1])[
        0, 0, :-1
    ].log_softmax(-1)
    torch.testing.assert_close(probe.log_q[0][0, 0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("attention", "adaptation"), [(1, 1), (0, 2)])
def test_training_equals_decoding(shallow: Target, attention: int, adaptation: int) -> None:
    """Over rounds that commit unequally many tokens, some of them undrafted, log q of training
    and of decoding are equal.
    """
    drafter = make_drafter(
        shallow, attention_layers=attention, adaptation_layers=adaptation, vocab_size=2048
    )
    batch = random_batch(shallow, ("final",), has_prompt=True)
    assert batch.features is not None
    following = embed_as_target(drafter, batch.tokens.roll(-1, dims=1))
    with torch.no_grad():
        stage = drafter.adaptation(batch.features.at_layer("final"), following, batch.positions)[-1]
    for row, index, log_q in walk(drafter, shallow, batch.tokens, 3):
        prefix = Prefixes.from_slots(drafter.slot_log_probs(stage[row, index][None]))
        for step in range(3):
            torch.testing.assert_close(
                log_q[step], prefix.next_log_probs()[0, 0], rtol=1e-3, atol=1e-3
            )
            prefix = prefix.extend_paths(
                batch.tokens[row, index + 2 + step].view(1, 1), torch.zeros(1, 1, dtype=torch.int64)
            )


def test_loss_does_not_depend_on_how_many_rows_are_held_at_a_time(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(shallow)
    batch = random_batch(shallow, ("final",), has_prompt=True)
    results = []
    for entries in (2**26, 5 * 513 * 7):
        monkeypatch.setattr("spectrain_research.ctc.drafter.MAX_LOGITS", entries)
        drafter.zero_grad()
        losses = drafter.loss(batch, shallow, TrainingState())
        losses.total.backward()
        results.append(
            (
                losses.total.detach(),
                losses.hits,
                losses.counts,
                [p.grad for p in drafter.parameters()],
            )
        )
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_fewer_slots_than_drafts_are_refused(shallow: Target) -> None:
    with pytest.raises(UserError, match="drafter.num_slots=2: 3 drafts need a slot each"):
        Ctc(shallow, num_drafts=3, num_slots=2)

"""Replayed drafts: what is recorded, which sequences it makes, and that the target is asked behind the drafted tokens."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.decoding.replay import KEPT, Recorder, Replay, collate_replays, replays
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.shared.losses import split_loss
from spectrain.drafters.shared.vocabulary import Supervision
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live import Live
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.training.on_policy import Generated
from spectrain.trees import Auto, Chain, DySpec, Eagle2, Static, TreeBuilder
from spectrain.trees.base import Round

PROMPTS = [[5, 900, 71, 4, 333], [17, 1200, 8]]
LOSSES = ["forward_kl", "cross_entropy"]  # whatever the drafter's own loss is, replayed drafts are judged by the split one


class Noting(Chain):
    """A chain that keeps every round it is told of."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.told: list[Round] = []

    def observe(self, round: Round) -> None:
        self.told.append(round)


# The recorder


@pytest.mark.parametrize(
    "builder",
    [Chain(4, "sampled", 0.7, 5, 0.1), Eagle2(4, 9, 3), Static(3, 6), DySpec(3, 7, seed=3), Auto(3, 8, 2)],
    ids=lambda builder: str(builder.name),
)
def test_a_recorder_looks_like_its_builder(builder: TreeBuilder) -> None:
    """Attributes of the builder's interface and settings are those of the builder within; but it looks at numbers."""
    recorder = Recorder(builder)
    for name in TreeBuilder.__annotations__.keys() - {"is_fixed"}:
        assert getattr(recorder, name) == getattr(builder, name), name
    assert not recorder.is_fixed
    assert recorder.settings() == builder.settings()


@pytest.mark.parametrize("count", [1, 2])
def test_recording_changes_nothing_and_notes_every_round(shallow: Target, count: int) -> None:
    """The output is the builder's own, which hears of every round; drafts and emitted tokens are those of the decoding."""
    drafter, builder = Causal(shallow, num_layers=2), Noting(3)
    recorder = Recorder(builder)
    plain = decode(shallow, PROMPTS[:count], Greedy(), 14, drafter, Chain(3))
    found = decode(shallow, PROMPTS[:count], Greedy(), 14, drafter, recorder)
    assert [one.output for one in found] == [one.output for one in plain]
    assert len(builder.told) == max(len(one.accepted) for one in found)
    assert [[emitted for _, emitted in rounds] for rounds in recorder.rounds] == [one.accepted for one in found]
    for row, (one, rounds) in enumerate(zip(found, recorder.rounds)):
        assert [drafted for drafted, _ in rounds] == [told.tree.tokens[row, 1:].tolist() for told in builder.told][
            : len(rounds)
        ]
        end = 1
        for drafted, emitted in rounds:
            draft = decode(drafter.model, [one.prompt + one.output[:end]], Greedy(), 3, ignore_eos=True)[0].output
            assert drafted == draft
            assert one.output[end : end + emitted - 1] == drafted[: emitted - 1][: len(one.output) - end]
            end += emitted


def test_padding_is_not_drafted(shallow: Target) -> None:
    """A chain that stops early is recorded as far as it was drafted."""
    recorder = Recorder(Chain(4, stop=0.3))
    found = decode(shallow, PROMPTS, Greedy(), 14, Causal(shallow, num_layers=2), recorder)
    depths = [[len(drafted) for drafted, _ in rounds] for rounds in recorder.rounds]
    assert depths == [one.depths for one in found] and len({depth for row in depths for depth in row}) > 1


# Replays


GENERATION = Generation([1, 2], [10, 11, 12, 13, 14, 15, 16], [3, 1, 1, 2], [2, 3, 0, 2])
ROUNDS = [([11, 12], 3), ([99, 98, 97], 1), ([], 1), ([16, 77], 2)]
BY_HAND = [
    Replay(Example([1, 2, 10, 11, 12], [False] * 2 + [True] * 3), [-1] * 5),
    Replay(Example([1, 2, 10, 11, 12, 13, 99, 98, 97], [False] * 2 + [True] * 7), [-1] * 6 + [0, 1, 2]),
    Replay(Example([1, 2, 10, 11, 12, 13, 14, 15, 16, 77], [False] * 2 + [True] * 8), [-1] * 9 + [0]),
]


@pytest.mark.parametrize("seed", range(6))
def test_replays_by_hand(seed: int) -> None:
    """Each draft behind the answer so far, with its distances; rejected ones first, no draft no replay, at most `limit`."""
    found = replays(GENERATION, ROUNDS, 9, Random(seed))
    assert len(found) == 3 and found[2] == BY_HAND[0]
    assert found[:2] in (BY_HAND[1:], BY_HAND[:0:-1])
    for limit in (0, 1, 2):
        assert replays(GENERATION, ROUNDS, limit, Random(seed)) == found[:limit]


def test_replays_of_equal_standing_come_by_chance() -> None:
    """Which of the rejected drafts comes first is drawn."""
    assert {tuple(replays(GENERATION, ROUNDS, 1, Random(seed))[0].distance) for seed in range(20)} == {
        tuple(replay.distance) for replay in BY_HAND[1:]
    }


def test_a_round_behind_the_end_is_left_out() -> None:
    """Where the answer is shorter than a round needs, nothing is replayed from it."""
    short = Generation([1, 2], [10, 11], [3, 1], [2, 1])
    assert replays(short, [([11, 12], 3), ([5], 1)], 9, Random(0)) == BY_HAND[:1]


def test_collate_pads_on_the_right() -> None:
    """Tokens are padded with 0, the mask with False, distances as kept."""
    batch = collate_replays(BY_HAND[:2])
    assert batch.tokens.tolist() == [[1, 2, 10, 11, 12, 0, 0, 0, 0], BY_HAND[1].example.tokens]
    assert batch.loss_mask.tolist() == [[False] * 2 + [True] * 3 + [False] * 4, BY_HAND[1].example.mask]
    assert batch.distance is not None
    assert batch.distance.tolist() == [[KEPT] * 9, BY_HAND[1].distance]
    assert batch.to("cpu").distance is not None and batch.num_supervised == 10


# Learning from them


def make(family: str, shallow: Target, loss: Any = "forward_kl") -> Drafter:
    torch.manual_seed(1)
    if family == "causal":
        return Causal(shallow, num_layers=2, loss=loss)
    drafter = Eagle3(shallow, ttt_steps=3, vocab_size=512, loss=loss)
    drafter.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    return drafter


def replayed(shallow: Target, drafter: Drafter) -> Batch:
    """Real drafts of a decoding, at least one of them rejected, with the target's features."""
    recorder = Recorder(Chain(4))
    written = decode(shallow, PROMPTS, Greedy(), 14, drafter, recorder)
    found = [replay for one, rounds in zip(written, recorder.rounds) for replay in replays(one, rounds, 2, Random(0))]
    batch = collate_replays(found)
    assert batch.distance is not None and (batch.distance >= 1).any() and (batch.distance == KEPT).any()
    return Batch(batch.tokens, batch.loss_mask, shallow.features(batch.tokens, drafter.stages[0].layers), batch.distance)


def after(model: Target, text: list[int]) -> Tensor:
    """A model's logits after a text, by itself."""
    logits = model.run(torch.tensor([text]), ForwardPlan(logits=True)).logits
    assert logits is not None
    return logits[0, -1]


@pytest.mark.parametrize("loss", LOSSES)
def test_causal_loss_equals_brute_force(shallow: Target, loss: str) -> None:
    """Half the forward KL where a token was kept, half of 0.8^k the reverse one k behind the first wrong one, p being what
    the target says after the drafted tokens."""
    drafter = make("causal", shallow, loss)
    assert isinstance(drafter, Causal)
    batch = replayed(shallow, drafter)
    assert batch.distance is not None
    total, hits = torch.zeros(()), 0
    for b, t in batch.loss_mask.nonzero().tolist():
        text, k = batch.tokens[b, :t].tolist(), int(batch.distance[b, t])
        p, q = after(shallow, text).softmax(-1), after(drafter.model, text).softmax(-1)
        total = total + 0.5 * ((p * (p / q).log()).sum() if k < 0 else 0.8**k * (q * (q / p).log()).sum())
        hits += int(p.argmax() == q.argmax())
    losses = drafter.loss(batch, shallow, TrainingState())
    torch.testing.assert_close(losses.total.detach(), total, rtol=1e-3, atol=1e-3)
    assert losses.hits.tolist() == [hits] and losses.counts.tolist() == [batch.num_supervised]


@pytest.mark.parametrize("loss", LOSSES)
def test_supervised_rows_are_the_targets_after_the_draft(shallow: Target, loss: str) -> None:
    """Row by row, log p over the draft vocabulary is the target's after the drafted tokens, and the distance the token's."""
    drafter = make("eagle3", shallow, loss)
    assert isinstance(drafter, Eagle3)
    batch = replayed(shallow, drafter)
    supervision = Supervision(drafter, batch)
    assert batch.distance is not None and supervision.distance is not None and supervision.target_log_probs is not None
    log_p = supervision.target_log_probs(slice(0, len(supervision.best)))
    places = [(b, t) for b, t in batch.loss_mask.nonzero().tolist() if t >= 2]
    assert len(log_p) == len(places)
    for row, (b, t) in enumerate(places):
        logits = after(shallow, batch.tokens[b, :t].tolist())
        torch.testing.assert_close(log_p[row], logits[drafter.draft_ids].log_softmax(-1), rtol=1e-3, atol=1e-3)
        assert int(supervision.best[row]) == int(logits.argmax())
        assert int(supervision.distance[row]) == int(batch.distance[b, t])


@pytest.mark.parametrize("loss", LOSSES)
def test_eagle3_loss_equals_brute_force(shallow: Target, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step the split loss of what the drafter says, where the right token can be drafted, weighted by the step."""
    drafter = make("eagle3", shallow, loss)
    assert isinstance(drafter, Eagle3)
    batch = replayed(shallow, drafter)
    assert batch.distance is not None
    said: list[Tensor] = []
    judge = Supervision.judge

    def watched(self: Supervision, hidden: Tensor, lm_head: Any, answers: Tensor, row_weight: Tensor) -> Any:
        log_q = lm_head(hidden).detach().log_softmax(-1)
        said.extend(log_q[row_weight == weight] for weight in row_weight.unique(sorted=True).flip(0))
        return judge(self, hidden, lm_head, answers, row_weight)

    monkeypatch.setattr(Supervision, "judge", watched)
    losses = drafter.loss(batch, shallow, TrainingState())
    total, outside = torch.zeros(()), 0
    for step, log_q in enumerate(said):
        places = [(b, t) for b, t in batch.loss_mask.nonzero().tolist() if t >= 2 + step]
        assert len(places) == len(log_q) == losses.counts[step]
        for (b, t), row in zip(places, log_q):
            logits = after(shallow, batch.tokens[b, :t].tolist())
            if not drafter.t2d[logits.argmax()]:
                outside += 1
                continue
            log_p = logits[drafter.draft_ids].log_softmax(-1)
            total = total + 0.8**step * split_loss(log_p[None], row[None], batch.distance[b, t][None])[0]
    assert outside > 0
    torch.testing.assert_close(losses.total.detach(), total, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["causal", "eagle3"])
def test_with_nothing_rejected_it_is_half_the_forward_kl(shallow: Target, family: str) -> None:
    """Distances of kept tokens only: loss and gradient are half of those of forward_kl."""
    rows = torch.randint(3, 2000, (3, 20)).tolist()
    data = Dataset([Example(row, [place >= 5 for place in range(20)]) for row in rows], 3, 0, 0)
    found = []
    for source in (Live(), Generated(0.0, "replay")):
        drafter = make(family, shallow)
        losses = drafter.loss(
            source.batch(BatchRequest(data[[0, 1, 2]], shallow, drafter.stages[0].layers)), shallow, TrainingState()
        )
        losses.total.backward()
        found.append((losses.total.detach(), [p.grad for p in drafter.parameters() if p.grad is not None]))
    torch.testing.assert_close(0.5 * found[0][0], found[1][0])
    for whole, half in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(0.5 * whole, half, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["causal", "eagle3"])
def test_replayed_batches_train(shallow: Target, family: str) -> None:
    """source.by=replay gives a batch with rejected tokens, a finite loss and a gradient for every parameter."""
    rows = torch.randint(3, 2000, (3, 20)).tolist()
    data = Dataset([Example(row, [place >= 5 for place in range(20)]) for row in rows], 3, 0, 0)
    drafter = make(family, shallow).train()
    batch = Generated(1.0, "replay", max_new_tokens=12, block=3, seed=2).batch(
        BatchRequest(data[[0, 1, 2]], shallow, drafter.stages[0].layers, step=0, drafter=drafter)
    )
    assert batch.distance is not None and int(batch.distance.max()) in (0, 1, 2)
    assert [row[:5] for row in batch.tokens.tolist()] == [row[:5] for row in rows] and not batch.loss_mask[:, :5].any()
    losses = drafter.loss(batch, shallow, TrainingState())
    losses.total.backward()
    assert torch.isfinite(losses.total) and losses.total > 0
    for parameter in drafter.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()

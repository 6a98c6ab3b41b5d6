"""Replayed drafts: what is recorded, which sequences it makes, and that the target's logits come
after the drafted tokens.
"""

import math
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.causal import Causal
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Auto, Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.base import RoundResult
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.hydra.drafter import Hydra
from spectrain_research.on_policy import policy
from spectrain_research.on_policy.groups import (
    DrawnDraft,
    DrawnDraftRecorder,
    draw_window_group,
    normalize_rewards,
    window_reward,
)
from spectrain_research.on_policy.source import DraftedAnswer, GeneratedSource
from spectrain_research.shared.draft_replay import (
    NOT_PAST_ERROR,
    DraftRecorder,
    DraftWindow,
    Replay,
    ReplayBatch,
    collate_branched,
    collate_replays,
    collate_windows,
    join_branches,
    make_unbranched,
    make_windows,
    select_replays,
    split_loss,
)
from tests.decoding.rounds import begun
from tests.drafters.blocks import block_states
from tests.drafters.forced import shaken
from tests.drafters.test_losses import compute_kl, draw_log_probs

PROMPTS = [[5, 900, 71, 4, 333], [17, 1200, 8]]
# whatever the drafter's own loss is, replayed drafts are judged by the split one
LOSSES = ["forward_kl", pytest.param("cross_entropy", marks=pytest.mark.slow)]


class RecordingChain(Chain):
    """A chain that records every round that it observes."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.results: list[RoundResult] = []

    def observe(self, round: RoundResult) -> None:
        self.results.append(round)


# The loss


@pytest.mark.parametrize("decay", [0.8, 0.5, 1.0])
def test_split_loss_equals_a_loop_over_rows(decay: float) -> None:
    """The loss is half of forward KL on accepted rows and half of decay^k reverse KL on row k
    after the first wrong token.
    """
    log_p, log_q = draw_log_probs()
    distance = torch.tensor([-1, 0, 1, 5, -1])
    expected = []
    for p, q, k in zip(log_p.exp(), log_q.exp(), distance.tolist(), strict=True):
        expected.append(0.5 * compute_kl(p, q) if k < 0 else 0.5 * decay**k * compute_kl(q, p))
    torch.testing.assert_close(split_loss(log_p, log_q, distance, decay), torch.stack(expected))
    assert torch.equal(split_loss(log_p, log_q, distance), split_loss(log_p, log_q, distance, 0.8))
    assert torch.autograd.gradcheck(
        lambda logits: split_loss(log_p, logits.log_softmax(-1), distance, decay),
        log_q.requires_grad_(True),
    )


# The recorder


@pytest.mark.parametrize(
    "builder",
    [
        Chain(4, "sampled", 0.7, 5, 0.1),
        Eagle2(4, 9, 3),
        Static(3, 6),
        DySpec(3, 7, seed=3),
        Auto(3, 8, 2),
    ],
    ids=lambda builder: str(builder.name),
)
def test_recorder_has_the_properties_of_its_builder(builder: TreeBuilder) -> None:
    """Attributes of the builder's interface and settings are those of the builder within; but it
    looks at numbers.
    """
    recorder = DraftRecorder(builder)
    for name in TreeBuilder.__annotations__.keys() - {"traits"}:
        assert getattr(recorder, name) == getattr(builder, name), name
    assert recorder.traits == replace(builder.traits, is_fixed=False)
    assert recorder.report_settings() == builder.report_settings()


@pytest.mark.parametrize("count", [1, 2])
def test_recorder_records_every_round_unchanged(shallow: Target, count: int) -> None:
    """The output is the builder's own, which observes every round; drafts and emitted tokens are
    those of the decoding.
    """
    drafter = Causal(shallow, num_layers=2)
    builder = RecordingChain(3)
    recorder = DraftRecorder(builder)
    plain = decode(shallow, PROMPTS[:count], Greedy(), 14, drafter, Chain(3))
    result = decode(shallow, PROMPTS[:count], Greedy(), 14, drafter, recorder)
    assert [generation.output for generation in result] == [
        generation.output for generation in plain
    ]
    assert len(builder.results) == max(len(generation.round_lengths) for generation in result)
    assert [[emitted for _, emitted in rounds] for rounds in recorder.rounds] == [
        generation.round_lengths for generation in result
    ]
    for row, (generation, rounds) in enumerate(zip(result, recorder.rounds)):
        assert [drafted for drafted, _ in rounds] == [
            round_result.tree.tokens[row, 1:].tolist() for round_result in builder.results
        ][: len(rounds)]
        end = 1
        for drafted, emitted in rounds:
            draft = decode(
                drafter.model,
                [generation.prompt + generation.output[:end]],
                Greedy(),
                3,
                ignore_eos=True,
            )[0].output
            assert drafted == draft
            assert (
                generation.output[end : end + emitted - 1]
                == drafted[: emitted - 1][: len(generation.output) - end]
            )
            end += emitted


def test_recorded_drafts_exclude_padding(shallow: Target) -> None:
    """A chain that stops early is recorded as far as it was drafted."""
    recorder = DraftRecorder(Chain(4, stop=0.3))
    result = decode(shallow, PROMPTS, Greedy(), 14, Causal(shallow, num_layers=2), recorder)
    depths = [[len(drafted) for drafted, _ in rounds] for rounds in recorder.rounds]
    assert (
        depths == [generation.depths for generation in result]
        and len({depth for row in depths for depth in row}) > 1
    )


# Replays


GENERATION = Generation([1, 2], [10, 11, 12, 13, 14, 15, 16], [3, 1, 1, 2], [2, 3, 0, 2])
ROUNDS = [([11, 12], 3), ([99, 98, 97], 1), ([], 1), ([16, 77], 2)]
BY_HAND = [
    Replay(Example([1, 2, 10, 11, 12], [False] * 2 + [True] * 3), [-1] * 5),
    Replay(
        Example([1, 2, 10, 11, 12, 13, 99, 98, 97], [False] * 2 + [True] * 7), [-1] * 6 + [0, 1, 2]
    ),
    Replay(
        Example([1, 2, 10, 11, 12, 13, 14, 15, 16, 77], [False] * 2 + [True] * 8), [-1] * 9 + [0]
    ),
]


@pytest.mark.parametrize("seed", range(6))
def test_replays_equal_hand_made_ones(seed: int) -> None:
    """Each draft comes after the answer so far, with its distances; rejected ones first, no replay
    without a draft, at most `limit`."""
    result = select_replays(GENERATION, ROUNDS, 9, Random(seed))
    assert len(result) == 3 and result[2] == BY_HAND[0]
    assert result[:2] in (BY_HAND[1:], BY_HAND[:0:-1])
    for limit in (0, 1, 2):
        assert select_replays(GENERATION, ROUNDS, limit, Random(seed)) == result[:limit]


def test_equal_replays_are_selected_at_random() -> None:
    """A random draw decides which of the rejected drafts comes first."""
    assert {
        tuple(select_replays(GENERATION, ROUNDS, 1, Random(seed))[0].tokens_past_error)
        for seed in range(20)
    } == {tuple(replay.tokens_past_error) for replay in BY_HAND[1:]}


def test_round_past_the_end_is_omitted() -> None:
    """Where the answer is shorter than a round needs, nothing is replayed from it."""
    short = Generation([1, 2], [10, 11], [3, 1], [2, 1])
    assert select_replays(short, [([11, 12], 3), ([5], 1)], 9, Random(0)) == BY_HAND[:1]


def test_collate_pads_on_the_right() -> None:
    """Tokens are padded with 0, the mask with False, distances with NOT_PAST_ERROR."""
    batch = collate_replays(BY_HAND[:2])
    assert batch.tokens.tolist() == [[1, 2, 10, 11, 12, 0, 0, 0, 0], BY_HAND[1].example.tokens]
    assert batch.loss_mask.tolist() == [
        [False] * 2 + [True] * 3 + [False] * 4,
        BY_HAND[1].example.mask,
    ]
    assert batch.tokens_past_error.tolist() == [[NOT_PAST_ERROR] * 9, BY_HAND[1].tokens_past_error]
    moved = batch.to("cpu")
    assert isinstance(moved, ReplayBatch) and moved.num_supervised == 10


# Learning from them


def make_drafter(family: str, shallow: Target, loss: Any = "forward_kl") -> Drafter:
    torch.manual_seed(1)
    if family == "causal":
        return Causal(shallow, num_layers=2, loss=loss)
    drafter = Eagle3(shallow, ttt_steps=3, vocab_size=512, loss=loss)
    drafter.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    return drafter


def replay_drafts(shallow: Target, drafter: Drafter) -> ReplayBatch:
    """Real drafts of a decoding, at least one of them rejected, with the target's features."""
    recorder = DraftRecorder(Chain(4))
    written = decode(shallow, PROMPTS, Greedy(), 14, drafter, recorder)
    result = [
        replay
        for item, rounds in zip(written, recorder.rounds)
        for replay in select_replays(item, rounds, 2, Random(0))
    ]
    batch = collate_replays(result)
    assert (batch.tokens_past_error >= 1).any()
    assert (batch.tokens_past_error == NOT_PAST_ERROR).any()
    features = shallow.features(batch.tokens, drafter.stages[0].layers)
    return replace(batch, features=features)


def next_logits(model: Target, text: list[int]) -> Tensor:
    """A model's logits after a text, by itself."""
    logits = model.run(torch.tensor([text]), ForwardPlan(logits=True)).logits
    assert logits is not None
    return logits[0, -1]


@pytest.mark.parametrize("loss", LOSSES)
def test_causal_loss_equals_brute_force(shallow: Target, loss: str) -> None:
    """The loss is half the forward KL where a token was accepted, half of 0.8^k the reverse one k
    after the first wrong one, p being the target's after the drafted tokens."""
    drafter = make_drafter("causal", shallow, loss)
    assert isinstance(drafter, Causal)
    batch = replay_drafts(shallow, drafter)
    total = torch.zeros(())
    hits = 0
    for b, t in batch.loss_mask.nonzero().tolist():
        text = batch.tokens[b, :t].tolist()
        k = int(batch.tokens_past_error[b, t])
        p = next_logits(shallow, text).softmax(-1)
        q = next_logits(drafter.model, text).softmax(-1)
        total = total + 0.5 * (
            (p * (p / q).log()).sum() if k < 0 else 0.8**k * (q * (q / p).log()).sum()
        )
        hits += int(p.argmax() == q.argmax())
    losses = drafter.loss(batch, shallow, TrainingState())
    torch.testing.assert_close(losses.total.detach(), total, rtol=1e-3, atol=1e-3)
    assert losses.hits.tolist() == [hits] and losses.counts.tolist() == [batch.num_supervised]


# Side branches


def test_branches_equal_hand_made_ones() -> None:
    """A rejected draft judges the text's next token at distance 0, and its own from the second on;
    of a draft at the end, or one that is accepted completely, nothing is rejected; where texts are
    short the branch is cut."""
    result = join_branches(GENERATION, ROUNDS, 99)
    assert result.replay.example.tokens == [1, 2, *GENERATION.output, 99, 98, 97]
    assert result.replay.example.mask == [False] * 2 + [True] * 7 + [False, True, True]
    assert result.replay.tokens_past_error == [-1] * 6 + [0] + [-1] * 3 + [1, 2]
    assert result.position_ids == [*range(9), 6, 7, 8] and result.branches == [(3, 6)]
    expected = [[*range(index + 1)] for index in range(9)] + [
        [*range(6), *range(9, 9 + number)] for number in (1, 2, 3)
    ]
    assert [row.nonzero()[:, 0].tolist() for row in result.visibility] == expected
    cut = join_branches(GENERATION, ROUNDS, 8)
    assert cut.replay.example.tokens[9:] == [99, 98] and cut.position_ids[9:] == [6, 7]
    full = make_unbranched(BY_HAND[0].example)
    assert (full.replay, full.branches) == (BY_HAND[0], [])


@pytest.mark.parametrize("packed", [False, True])
def test_forward_with_branches_equals_separate_forwards(shallow: Target, packed: bool) -> None:
    """The loss over answers with all their rejected drafts is that of every position by itself,
    after the text and the wrong tokens before it."""
    drafter = make_drafter("causal", shallow)
    assert isinstance(drafter, Causal)
    recorder = DraftRecorder(Chain(4))
    written = decode(shallow, PROMPTS, Greedy(), 14, drafter, recorder)
    result = [join_branches(item, rounds, 99) for item, rounds in zip(written, recorder.rounds)]
    batch = collate_branched(result, packed)
    plan = batch.plan_forward(ForwardPlan(layers=("final",)))
    batch = replace(batch, features=shallow.run(batch.tokens, plan)).to("cpu")
    total = torch.zeros(())
    wrong = 0
    for item, generation in zip(result, written):
        text = generation.prompt + generation.output
        indices = [
            (text[:t], item.replay.tokens_past_error[t])
            for t in range(len(generation.prompt), len(text))
        ]
        end = len(text)
        for size, prefix_length in item.branches:
            tail = item.replay.example.tokens[end : end + size]
            indices += [(text[:prefix_length] + tail[:number], number) for number in range(1, size)]
            end += size
        for before, k in indices:
            p = next_logits(shallow, before).softmax(-1)
            q = next_logits(drafter.model, before).softmax(-1)
            total = total + 0.5 * (
                (p * (p / q).log()).sum() if k < 0 else 0.8**k * (q * (q / p).log()).sum()
            )
            wrong += k > 0
    assert wrong > 3
    losses = drafter.loss(batch, shallow, TrainingState())
    torch.testing.assert_close(losses.total.detach(), total, rtol=1e-3, atol=1e-3)
    assert int(losses.counts.sum()) == batch.num_supervised


def test_source_yields_branches(shallow: Target) -> None:
    """source.branches=true lays out the drafts of the target's decoding, and the data's texts as
    they are; it is refused where nothing is replayed and where a family cannot run it."""
    rows = torch.randint(3, 2000, (3, 20), generator=torch.Generator().manual_seed(4)).tolist()
    data = Dataset([Example(row, [index >= 5 for index in range(20)]) for row in rows], 3, 0, 0)
    drafter = make_drafter("causal", shallow)
    request = BatchRequest(data[[0, 1, 2]], shallow, ("final",), step=1, drafter=drafter)
    source = GeneratedSource(0.5, "replay", branches=True, max_new_tokens=12)
    batch = source.make_batch(request)
    plain = replace(source.make_batch(request))
    assert (
        batch.position_ids is not None
        and batch.features is not None
        and torch.equal(batch.tokens, plain.tokens)
    )
    assert (batch.position_ids[:, 1:] < batch.position_ids[:, :-1]).any()
    accepted = LiveSource().make_batch(request)
    unchanged = [row for row in range(3) if batch.tokens[row, :20].tolist() == rows[row]]
    assert unchanged
    for row in unchanged:
        torch.testing.assert_close(
            batch.features.hidden[row, :20], accepted.features.hidden[row], rtol=1e-3, atol=1e-3
        )  # type: ignore[union-attr]
    losses = drafter.loss(batch, shallow, TrainingState())
    assert losses.total.isfinite()
    with pytest.raises(UserError, match=r"source\.branches=true: .*source\.by=replay"):
        GeneratedSource(0.5, "drafter", branches=True)
    with pytest.raises(UserError, match=r"source\.branches=true: this family"):
        GeneratedSource(1.0, "replay", branches=True).make_batch(
            replace(request, drafter=make_drafter("eagle3", shallow))
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_supervised_rows_are_the_targets_after_the_draft(shallow: Target, loss: str) -> None:
    """Row by row, log p over the draft vocabulary is the target's after the drafted tokens, and
    the distance the token's.
    """
    drafter = make_drafter("eagle3", shallow, loss)
    assert isinstance(drafter, Eagle3)
    batch = replay_drafts(shallow, drafter)
    supervision = Supervision(drafter, batch)
    (distance,) = supervision.rows.inputs
    assert supervision.rows.divergence is split_loss
    assert supervision.target_log_probs is not None
    log_p = supervision.target_log_probs(slice(0, len(supervision.labels)))
    indices = [(b, t) for b, t in batch.loss_mask.nonzero().tolist() if t >= 2]
    assert len(log_p) == len(indices)
    for row, (b, t) in enumerate(indices):
        logits = next_logits(shallow, batch.tokens[b, :t].tolist())
        torch.testing.assert_close(
            log_p[row], logits[drafter.draft_ids].log_softmax(-1), rtol=1e-3, atol=1e-3
        )
        assert int(supervision.labels[row]) == int(logits.argmax())
        assert int(distance[row]) == int(batch.tokens_past_error[b, t])


@pytest.mark.parametrize("loss", LOSSES)
def test_eagle3_loss_equals_brute_force(
    shallow: Target, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step it is the split loss of the drafter's q, where the right token can be
    drafted, weighted by the step.
    """
    drafter = make_drafter("eagle3", shallow, loss)
    assert isinstance(drafter, Eagle3)
    batch = replay_drafts(shallow, drafter)
    judged: list[Tensor] = []
    judge = Supervision.judge_states

    def record_judged(
        self: Supervision, hidden: Tensor, lm_head: Any, answers: Tensor, row_weight: Tensor
    ) -> Any:
        log_q = lm_head(hidden).detach().log_softmax(-1)
        judged.extend(
            log_q[row_weight == weight] for weight in row_weight.unique(sorted=True).flip(0)
        )
        return judge(self, hidden, lm_head, answers, row_weight)

    monkeypatch.setattr(Supervision, "judge_states", record_judged)
    losses = drafter.loss(batch, shallow, TrainingState())
    total = torch.zeros(())
    outside = 0
    for step, log_q in enumerate(judged):
        indices = [(b, t) for b, t in batch.loss_mask.nonzero().tolist() if t >= 2 + step]
        assert len(indices) == len(log_q) == losses.counts[step]
        for (b, t), row in zip(indices, log_q):
            logits = next_logits(shallow, batch.tokens[b, :t].tolist())
            if not drafter.t2d[logits.argmax()]:
                outside += 1
                continue
            log_p = logits[drafter.draft_ids].log_softmax(-1)
            total = (
                total
                + 0.8**step
                * split_loss(log_p[None], row[None], batch.tokens_past_error[b, t][None])[0]
            )
    assert outside > 0
    torch.testing.assert_close(losses.total.detach(), total, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["causal", "eagle3"])
def test_balanced_loss_without_rejections_is_half_the_forward_kl(
    shallow: Target, family: str
) -> None:
    """With distances of accepted tokens only, loss and gradient are half of those of forward_kl."""
    rows = torch.randint(3, 2000, (3, 20)).tolist()
    data = Dataset([Example(row, [index >= 5 for index in range(20)]) for row in rows], 3, 0, 0)
    result = []
    for source in (LiveSource(), GeneratedSource(0.0, "replay")):
        drafter = make_drafter(family, shallow)
        losses = drafter.loss(
            source.make_batch(BatchRequest(data[[0, 1, 2]], shallow, drafter.stages[0].layers)),
            shallow,
            TrainingState(),
        )
        losses.total.backward()
        result.append(
            (losses.total.detach(), [p.grad for p in drafter.parameters() if p.grad is not None])
        )
    torch.testing.assert_close(0.5 * result[0][0], result[1][0])
    for full, half in zip(result[0][1], result[1][1], strict=True):
        torch.testing.assert_close(0.5 * full, half, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["causal", "eagle3"])
def test_replayed_batches_train(shallow: Target, family: str) -> None:
    """source.by=replay gives a batch with rejected tokens, a finite loss and a gradient for
    every parameter.
    """
    rows = torch.randint(3, 2000, (3, 20)).tolist()
    data = Dataset([Example(row, [index >= 5 for index in range(20)]) for row in rows], 3, 0, 0)
    drafter = make_drafter(family, shallow).train()
    batch = GeneratedSource(1.0, "replay", max_new_tokens=12, block=3, seed=2).make_batch(
        BatchRequest(data[[0, 1, 2]], shallow, drafter.stages[0].layers, step=0, drafter=drafter)
    )
    assert int(batch.tokens_past_error.max()) in (0, 1, 2)
    assert [row[:5] for row in batch.tokens.tolist()] == [
        row[:5] for row in rows
    ] and not batch.loss_mask[:, :5].any()
    losses = drafter.loss(batch, shallow, TrainingState())
    losses.total.backward()
    assert torch.isfinite(losses.total) and losses.total > 0
    for parameter in drafter.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


# Windows


# what the target says, and what a drafted token costs
RIGHT = (1, 0)
COST = 0.25


def drawn_rounds(*drafts: tuple[int, ...]) -> tuple[Generation, list[tuple[list[int], int]]]:
    """A decoding whose rounds drew these drafts of two tokens; the text does not matter."""
    accepted = [
        next((n for n, pair in enumerate(zip(item, RIGHT)) if pair[0] != pair[1]), 2)
        for item in drafts
    ]
    counts = [item + 1 for item in accepted]
    generation = Generation([5], [7] * (1 + sum(counts)), counts, [2] * len(drafts))
    return generation, [(list(item), count) for item, count in zip(drafts, counts)]


def log_chances(logits: Tensor, draft: tuple[int, ...]) -> list[Tensor]:
    """Return log q of both tokens, of logits [3, 2]: at the root, after a 0, after a 1."""
    return [logits[0].log_softmax(-1)[draft[0]], logits[1 + draft[0]].log_softmax(-1)[draft[1]]]


@pytest.mark.parametrize(
    "earlier", [((0, 0),), ((1, 0),), ((1, 1), (0, 1)), ((1, 0), (1, 1), (0, 0))], ids=str
)
def test_policy_gradient_equals_enumeration(earlier: tuple[tuple[int, ...], ...]) -> None:
    """Over two tokens, whatever was drawn before, E[sum of A log q] over all drafts has the
    gradient of E[reward].
    """
    logits = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    estimated = torch.zeros_like(logits)
    expected = torch.zeros((), dtype=torch.float64)
    for draft in product((0, 1), repeat=2):
        generation, rounds = drawn_rounds(*earlier, draft)
        parts = log_chances(logits, draft)
        chance = torch.stack(parts).sum().exp()
        expected = expected + chance * generation.round_lengths[-1] / (1 + COST * 2)
        advantage = make_windows(generation, rounds, COST)[-1].advantage
        gains = advantage[len(advantage) - min(generation.round_lengths[-1], 2) :]
        score = sum(gain * part for gain, part in zip(gains, parts))
        estimated += chance.detach() * torch.autograd.grad(score, logits, retain_graph=True)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(estimated, torch.autograd.grad(expected, logits)[0])
    assert estimated.abs().max() > 0.01


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_reference_penalty_subtracts_the_divergence_gradient(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a position, over every token that may be drawn there, E[A log q] has the gradient of
    E[reward] - weight KL(q || r).
    """
    draw = torch.Generator().manual_seed(5)
    logits, other = (torch.randn(4, dtype=torch.float64, generator=draw) for _ in range(2))
    logits.requires_grad_()
    gains = [0.5, -0.25, 1.0, 0.0]
    log_probs = {"mine": logits.detach().log_softmax(-1), "theirs": other.log_softmax(-1)}
    monkeypatch.setattr(
        policy,
        "log_probs",
        lambda model, text, temperature=1.0: log_probs[model].expand(len(text), -1),
    )
    estimated = torch.zeros_like(logits)
    q = logits.log_softmax(-1)
    for token, gain in enumerate(gains):
        window = DraftWindow(Example([2, 1, token], [False, True, True]), [0.0, 0.0, gain], 2)
        result = policy.penalize_divergence(window, "mine", "theirs", weight, 1.0).advantage  # type: ignore[arg-type]
        assert result[:2] == [0.0, 0.0]
        estimated += (
            float(q[token].detach().exp())
            * torch.autograd.grad(result[2] * q[token], logits, retain_graph=True)[0]
        )
    expected = (q.exp() * torch.tensor(gains)).sum() - weight * (
        q.exp() * (q - log_probs["theirs"])
    ).sum()
    torch.testing.assert_close(
        estimated, torch.autograd.grad(expected, logits)[0], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("family", ["causal", "eagle3", "hydra"])
def test_windows_come_from_missed_certain_tokens(shallow: Target, family: str) -> None:
    """A window's weight is the mean of (1 - H / log V) KL(p || q) over its tokens, each after the
    text before it.

    p is the target's after plain forwards over the text; q is what the tokens were drawn from,
    which for a language model is a plain forward too. The weights differ, so a window is drawn more
    often than another.
    """
    drafter = (
        shaken(Hydra(shallow, num_heads=3, vocab_size=512), shallow)
        if family == "hydra"
        else make_drafter(family, shallow)
    )
    ids = getattr(drafter, "draft_ids", torch.arange(shallow.head.vocab_size))
    drawn: list[Tensor] = []

    class NotingRecorder(policy.CriticalityRecorder):
        def observe(self, round: RoundResult) -> None:
            super().observe(round)
            assert round.tree.q is not None
            drawn.append(round.tree.q[0])

    recorder = NotingRecorder(Chain(3, "sampled", 1.0, 2))
    (generation,) = decode(shallow, PROMPTS[:1], Greedy(), 14, drafter, recorder)
    result = make_windows(generation, recorder.rounds[0], 0.1)
    text = generation.prompt + generation.output
    assert len(result) > 2 and len({window.start for window in result}) == len(result)
    expected = []
    for window, after_nodes in zip(result, drawn[1:]):
        parts = []
        for index in range(window.start, len(window.example.tokens)):
            assert window.example.tokens[:index] == text[:index]
            q = after_nodes[index - window.start].double()
            if isinstance(drafter, Causal):
                torch.testing.assert_close(
                    q,
                    next_logits(drafter.model, text[:index]).double().softmax(-1),
                    atol=1e-5,
                    rtol=0,
                )
            p = next_logits(shallow, text[:index])[ids].double().softmax(-1)
            entropy = float(-(p * p.log()).sum())
            parts.append((1 - entropy / math.log(len(p))) * float((p * (p / q).log()).sum()))
        expected.append(sum(parts) / len(parts))
    weights = policy.weigh_windows(result, recorder.criticality[0])
    assert weights == pytest.approx(expected, rel=1e-3) and max(weights) > 1.1 * min(weights)


def test_nothing_is_critical_where_the_drafter_is_right() -> None:
    """The criticality of equal distributions is 0, also where a probability is 0; a sure
    target's error counts in full.
    """
    log_p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).clamp(min=policy.MIN_PROB).log()
    assert policy.compute_criticality(log_p, log_p).abs().max() == 0
    even = torch.full((3,), 1 / 3).log()
    assert float(policy.compute_criticality(log_p[1], even)) == pytest.approx(math.log(3))
    assert float(policy.compute_criticality(even, log_p[1])) == pytest.approx(0.0, abs=1e-4)


def test_source_samples_and_caches_windows(shallow: Target) -> None:
    """By divergence it draws among the windows of the same decoding; held near its beginning
    nothing changes there, and once the drafter has moved, what the drawn tokens bring does; either
    is a policy's."""
    drafter = make_drafter("causal", shallow)
    assert isinstance(drafter, Causal)
    data = Dataset(
        [Example([*prompt, 9, 9], [False] * len(prompt) + [True] * 2) for prompt in PROMPTS],
        2,
        0,
        0,
    )
    request = BatchRequest(data[[0, 1]], shallow, (), drafter=drafter)
    settings: dict[str, Any] = {"max_new_tokens": 12, "draft_cost": 0.0, "windows": "divergence"}
    free = GeneratedSource(1.0, "policy", **settings)
    tied = GeneratedSource(1.0, "policy", **settings, near=3.0)
    tied.begin(drafter)
    loose, held = (source.make_batch(request).advantage for source in (free, tied))
    assert loose is not None and held is not None and loose.abs().max() > 0
    torch.testing.assert_close(loose, held, atol=1e-4, rtol=0)
    with torch.no_grad():
        for parameter in drafter.model.parameters():
            parameter.mul_(1.05)
    loose, held = (source.make_batch(request).advantage for source in (free, tied))
    assert loose is not None and held is not None and (held - loose).abs().max() > 0.01
    for words in ({"windows": "divergence"}, {"near": 0.1}):
        with pytest.raises(UserError, match=r"source\.(windows|near)=.*source\.by=policy"):
            GeneratedSource(1.0, "drafter", **words)  # type: ignore[arg-type]


def test_windows_equal_hand_made_ones() -> None:
    """All rounds but the first give a window, with the accepted tokens and the first wrong one; a
    baseline is the mean reward so far."""
    generation, rounds = drawn_rounds((0, 0), (1, 0), (1, 1))
    result = make_windows(generation, rounds, 0.0)
    assert [item.example.tokens for item in result] == [[5, 7, 7, 1, 0], [5, 7, 7, 7, 7, 7, 1, 1]]
    assert [item.advantage for item in result] == [[0.0] * 3 + [2.0, 2.0], [0.0] * 6 + [0.0, -1.0]]
    assert result[0].example.mask == [False, True, True, True, True]
    batch = collate_windows(result)
    assert batch.advantage is not None and batch.to("cpu").advantage is not None
    assert batch.advantage.tolist() == [[0.0] * 3 + [2.0, 2.0] + [0.0] * 3, [0.0] * 7 + [-1.0]]


@pytest.mark.parametrize("packed", [False, True])
def test_policy_learns_from_its_own_samples(shallow: Target, packed: bool) -> None:
    """source.by=policy adds -A log q of every drawn token to the loss, q being the model's own
    after the tokens before it.
    """
    drafter = make_drafter("causal", shallow)
    assert isinstance(drafter, Causal)
    data = Dataset(
        [Example([*prompt, 9, 9], [False] * len(prompt) + [True] * 2) for prompt in PROMPTS],
        2,
        0,
        0,
    )
    source = GeneratedSource(1.0, "policy", max_new_tokens=12, draft_cost=0.0)
    request = BatchRequest(data[[0, 1]], shallow, drafter.stages[0].layers, packed, drafter=drafter)
    batch = source.make_batch(request)
    assert (
        batch.advantage is not None
        and batch.advantage.abs().max() > 0
        and not batch.advantage[~batch.loss_mask].any()
    )
    losses = drafter.loss(batch, shallow, TrainingState())
    total = 0.0
    rest = 0
    with torch.no_grad():
        for row, (tokens, _) in enumerate(batch.split_documents()):
            advantage = (
                batch.advantage[row]
                if batch.lengths is None
                else batch.advantage[0].split(batch.lengths)[row]
            )
            for index in advantage.nonzero()[:, 0].tolist():
                log_q = next_logits(drafter.model, tokens[:index].tolist()).log_softmax(-1)
                total -= float(advantage[index] * log_q[tokens[index]])
                rest += 1
    assert rest and float(losses.terms["policy"].detach()) == pytest.approx(total, rel=1e-4)
    alone = source.make_batch(replace(request, examples=data[[1]], packed=False))
    assert alone.advantage is not None
    length = alone.tokens.shape[1]
    own_values = (
        batch.tokens[1][:length]
        if batch.lengths is None
        else batch.tokens[0].split(batch.lengths)[1]
    )
    assert torch.equal(alone.tokens[0], own_values)


def forced_log_probs(drafter: Drafter, target: Target, text: list[int], draft: list[int]) -> Tensor:
    """log q of every token of a draft after a text, as drafting computes it, with gradients."""
    context = begun(target, [text[:-1]], drafter, Chain(len(draft)))
    context.tokens[0, len(text) - 1] = text[-1]
    rollout = drafter.draft(context).rollout
    assert rollout is not None and rollout.draft_ids is not None
    log_q = rollout.start()
    parts = []
    for number, token in enumerate(draft):
        parts.append(log_q[0, -1, torch.searchsorted(rollout.draft_ids, torch.tensor(token))])
        if number + 1 < len(draft):
            log_q = rollout.extend(torch.tensor([[token]]), torch.tensor([[number]]))
    return torch.stack(parts)


@pytest.mark.parametrize("family", ["eagle3", "hydra"])
def test_window_gradient_of_features_equals_enumeration(shallow: Target, family: str) -> None:
    """Over every draft of two tokens of three, the policy term has the gradient of the expected
    reward, with the q that decoding draws from; other pairs of position and step weigh nothing."""
    drafter: Any = (
        Eagle3(shallow, ttt_steps=2, vocab_size=3)
        if family == "eagle3"
        else Hydra(shallow, num_heads=2, vocab_size=3)
    )
    drafter = shaken(drafter, shallow)
    text = PROMPTS[0]
    ids = drafter.draft_ids.tolist()
    rewards = {draft: 1.0 + 0.7 * number for number, draft in enumerate(product(ids, repeat=2))}
    windows = []
    expected = torch.zeros(())
    for draft, reward in rewards.items():
        log_q = forced_log_probs(drafter, shallow, text, list(draft)).sum()
        expected = expected + log_q.exp() * reward
        weight = float(log_q.detach().exp()) * reward
        example = Example([*text, *draft], [False] * len(text) + [True] * 2)
        windows.append(DraftWindow(example, [0.0] * len(text) + [weight] * 2, len(text)))
    batch = collate_windows(windows, packed=family == "hydra")
    features = shallow.run(
        batch.tokens, ForwardPlan(layers=drafter.stages[0].layers, lengths=batch.lengths)
    )
    term = drafter.loss(replace(batch, features=features), shallow, TrainingState()).terms["policy"]
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    estimated, enumerated = (
        torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        for value in (-term, expected)
    )
    for gradient, reference in zip(estimated, enumerated):
        torch.testing.assert_close(gradient, reference, rtol=2e-3, atol=2e-4)
    assert max(float(part.abs().max()) for part in enumerated) > 0.01


def test_groups_are_normalized_window_rewards(shallow: Target) -> None:
    """The reward is k / (1 + c k) of accepted tokens, and of none the least overlap, which is sum
    min(p, q) after the drafted tokens; a group's rewards have mean 0 and deviation 1."""
    drafter = make_drafter("causal", shallow)
    assert isinstance(drafter, Causal)
    chain = DrawnDraftRecorder(Chain(3, "sampled", 1.0, 4))
    generation = decode(shallow, PROMPTS, Greedy(), 8, drafter, chain)
    text = PROMPTS[0] + generation[0].output[:1]
    draft = chain.drafts[0]
    for number, overlap in enumerate(draft.overlaps):
        p, q = (
            next_logits(model, text + draft.tokens[:number]).softmax(-1)
            for model in (shallow, drafter.model)
        )
        assert overlap == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-3)
    assert draft.num_accepted == generation[0].round_lengths[0] - 1
    assert window_reward(DrawnDraft([1, 2, 3], 2, [0.1, 0.2, 0.3]), 0.25) == 2 / 1.5
    assert window_reward(DrawnDraft([1, 2], 0, [0.4, 0.2]), 0.25) == 0.2
    gains = normalize_rewards([0.0, 1.0, 1.0, 3.0])
    assert sum(gains) == pytest.approx(0, abs=1e-6) and sum(
        gain**2 for gain in gains
    ) == pytest.approx(4, rel=1e-4)
    windows = draw_window_group(shallow, drafter, Chain(3, "sampled", 1.0, 9), text, 6, 0.1)
    assert len(windows) == 6 and len({tuple(window.example.tokens) for window in windows}) > 1
    assert all(
        window.example.tokens[: len(text)] == text and window.start == len(text)
        for window in windows
    )
    data = Dataset([Example([*PROMPTS[0], 9, 9], [False] * 5 + [True] * 2)], 1, 0, 0)
    kinds: list[tuple[str, Literal["alike", "divergence"]]] = [
        ("causal", "alike"),
        ("eagle3", "alike"),
        ("eagle3", "divergence"),
    ]
    for family, kind in kinds:
        drafter = make_drafter(family, shallow)
        request = BatchRequest(data[[0]], shallow, drafter.stages[0].layers, drafter=drafter)
        batch = GeneratedSource(1.0, "policy", max_new_tokens=10, group=4, windows=kind).make_batch(
            request
        )
        assert (
            len(batch.tokens) == 5
            and batch.advantage is not None
            and batch.advantage.abs().max() > 0.5
        )
        assert torch.isfinite(drafter.loss(batch, shallow, TrainingState()).total)


def test_block_replays_are_judged_after_their_roots(shallow: Target) -> None:
    """The loss over replayed drafts is that of the block after every root alone: the split loss of
    each slot, p being what the target predicts after the drafted tokens."""
    torch.manual_seed(1)
    config = DFlashConfig(num_layers=1, block_size=4, decay=2.0, loss="forward_kl")
    drafter = DFlash(shallow, config).eval()
    drafter.prepare(shallow, torch.zeros(shallow.head.vocab_size))
    recorder = DraftRecorder(Chain(3))
    written = decode(shallow, PROMPTS, Greedy(), 14, drafter, recorder)
    replays = [
        replay
        for item, rounds in zip(written, recorder.rounds)
        for replay in select_replays(item, rounds, 2, Random(0), True)
    ]
    assert all(max(replay.tokens_past_error) >= 0 for replay in replays) and len(replays) == 4
    batch = collate_replays(replays)
    batch = replace(batch, features=shallow.features(batch.tokens, drafter.layers))
    total = torch.zeros(())
    for replay in replays:
        tokens = replay.example.tokens
        size = sum(replay.example.mask)
        root = len(tokens) - size
        log_q = drafter.log_q(
            drafter.compute_products(block_states(drafter, shallow, tokens[:root])[None])
        )[0]
        weights = torch.exp(-torch.arange(size) / 2.0)
        weights = weights * size / weights.sum()
        for slot in range(size):
            log_p = next_logits(shallow, tokens[: root + slot]).log_softmax(-1)
            distance = torch.tensor([replay.tokens_past_error[root + slot]])
            total = total + weights[slot] * split_loss(log_p[None], log_q[slot][None], distance)[0]
    losses = drafter.loss(batch, shallow, TrainingState())
    torch.testing.assert_close(losses.total.detach(), total.detach(), rtol=1e-3, atol=1e-3)
    assert losses.counts.tolist() == [4, 4, 4]


def test_a_window_is_drawn_by_its_criticality() -> None:
    """Without recorded criticality all windows of an answer are drawn alike; with it the
    critical ones are drawn.
    """
    generation, rounds = drawn_rounds((0, 0), (1, 0), (1, 1), (0, 1))
    windows = make_windows(generation, rounds, 0.0)
    answer = DraftedAnswer(generation, rounds, Random(0))
    alike = [answer.draw_window(windows).start for _ in range(300)]
    assert all(80 < alike.count(window.start) < 120 for window in windows)
    critical = replace(answer, criticality=[[9.0, 9.0], [0.0, 0.0], [0.5, 2.5], [0.5, 9.0]])
    # The last draft's second token comes after its first rejected one and does not count.
    drawn = [critical.draw_window(windows).start for _ in range(300)]
    counts = [drawn.count(window.start) for window in windows]
    assert counts[0] == 0 and 75 < counts[1] - counts[2] < 225


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("eagle3", {}, "source.group=1: .* use source.group=8, or recipe=gkd"),
        ("eagle3", {"near": 0.1}, "source.near=0.1: .* use recipe=gkd"),
        ("dflash", {"group": 8}, "source.by=policy: .* use recipe=gkd, eagle3 or hydra"),
    ],
)
def test_families_without_a_policy_are_refused(
    shallow: Target, family: str, settings: dict[str, Any], message: str
) -> None:
    """A family that cannot learn from the drafts is refused, with settings or recipes that can."""
    drafter = (
        DFlash(shallow, DFlashConfig(num_layers=1, block_size=4))
        if family == "dflash"
        else make_drafter(family, shallow)
    )
    data = Dataset([Example([*PROMPTS[0], 9, 9], [False] * 5 + [True] * 2)], 1, 0, 0)
    request = BatchRequest(data[[0]], shallow, drafter.stages[0].layers, drafter=drafter)
    with pytest.raises(UserError, match=message):
        GeneratedSource(1.0, "policy", **settings).make_batch(request)


@pytest.mark.parametrize("family", ["causal", "eagle3"])
def test_balanced_weights_give_half_to_rejected_tokens(shallow: Target, family: str) -> None:
    """Accepted and rejected tokens of a replay weigh as much as all its supervised tokens each, so
    that over their number it is the sum of both means; and the loss is linear in these weights, 1
    where none are given."""
    drafter = make_drafter(family, shallow)
    batch = replay_drafts(shallow, drafter)
    result = [
        Replay(Example(t.tolist(), m.tolist()), d.tolist())
        for (t, m), d in zip(batch.split_documents(), batch.tokens_past_error)
    ]  # type: ignore[arg-type]
    balanced = collate_replays(result, balanced=True)
    assert balanced.weight is not None
    for item, distance, weight in zip(result, batch.tokens_past_error, balanced.weight):
        supervised = torch.tensor(item.example.mask)
        for kind in (
            supervised & (distance == NOT_PAST_ERROR),
            supervised & (distance != NOT_PAST_ERROR),
        ):
            if kind.any():
                assert float(weight[kind].sum()) == pytest.approx(int(supervised.sum()))
        assert not weight[~supervised].any()
    accepted = batch.tokens_past_error == NOT_PAST_ERROR
    weights = (
        balanced.weight,
        balanced.weight * accepted,
        balanced.weight * ~accepted,
        torch.ones_like(balanced.weight),
        None,
    )
    both, right, wrong, ones, plain = (
        drafter.loss(replace(batch, weight=weight), shallow, TrainingState()).total.detach()
        for weight in weights
    )
    torch.testing.assert_close(both, right + wrong, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ones, plain)
    assert min(right, wrong) > 0

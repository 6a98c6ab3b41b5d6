"""Of several drafters the one that pays drafts: it is found soon, those that rest catch up, and
the output is the target's.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrain.config.build import GroupSpec, build
from spectrain.config.spec import RunSpec
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import SpeculativeSampling
from spectrain.decoding.loop import decode, make_request, prefill_context
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.runs.drafters import build_drafter, load_weights, save_drafter
from spectrain.trees import Chain, Eagle2, Rollout
from spectrain.trees.rollout import Draft
from spectrain_research.router.arms import Arm, Hedge
from spectrain_research.router.drafter import MAX_UNREAD, NUM_TRIALS, DrafterRouter
from spectrain_research.router.voting import VotingRollout
from spectrain_research.shared.guard import Guard
from tests.decoding.rounds import proposed
from tests.drafters.test_contract import composed

LIMIT = 16
EVERY: list[Any] = [
    "ngram",
    {"choice": "causal", "num_layers": 1},
    {"choice": "eagle3", "vocab_size": 512},
    {"choice": "medusa", "num_heads": 2},
]


class Expert(Drafter):
    """A drafter that knows the texts of one domain; elsewhere it drafts the same token always."""

    def __init__(self, texts: list[list[int]], vocab_size: int) -> None:
        super().__init__()
        self.texts, self.vocab_size = texts, vocab_size

    def draft(self, context: Context) -> Draft:
        return Draft(_ReplayRollout(self, context))


class _ReplayRollout(Rollout):
    def __init__(self, expert: Expert, context: Context) -> None:
        self.expert = expert
        length = int(context.lengths[0])
        self.paths = [context.tokens[0, : length + 1].tolist()]

    def start(self) -> Tensor:
        return self._log_q([0])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        first = len(self.paths)
        self.paths += [
            [*self.paths[parent], token]
            for token, parent in zip(tokens[0].tolist(), parents[0].tolist())
        ]
        return self._log_q(range(first, len(self.paths)))

    def _log_q(self, nodes: Any) -> Tensor:
        log_q = torch.full((1, len(nodes), self.expert.vocab_size), -20.0)
        for at, node in enumerate(nodes):
            path = self.paths[node]
            continuations = [
                text[len(path)]
                for text in self.expert.texts
                if text[: len(path)] == path and len(text) > len(path)
            ]
            log_q[0, at, continuations[0] if continuations else 7] = 0.0
        return log_q.log_softmax(-1)


@pytest.fixture(scope="module")
def prompts(shallow: Target) -> list[list[int]]:
    texts = (
        "one two three four one two three four one two",
        "The bees find the hive. The bees",
        "What is it?",
    )
    return [shallow.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def make_router(target: Target, inner: list[Any] = EVERY, **settings: Any) -> DrafterRouter:
    torch.manual_seed(0)
    drafter: DrafterRouter = build(
        {"_target_": "spectrain_research.router.drafter.DrafterRouter", "inner": inner, **settings},
        target=target,
    )
    return drafter.eval()


def make_expert_router(
    target: Target, texts: list[list[list[int]]], costs: list[float], **settings: Any
) -> DrafterRouter:
    """Make a drafter that chooses between experts of these texts, with a clock that each
    expert's step advances by its cost.
    """
    router = make_router(target, ["ngram"] * len(texts), **settings)
    now = [0.0]
    router.clock = lambda: now[0]
    for index, (expert_texts, cost) in enumerate(zip(texts, costs)):
        expert = Expert(expert_texts, target.head.vocab_size)
        draft = expert.draft

        def draft_at_cost(context: Context, draft: Any = draft, cost: float = cost) -> Draft:
            now[0] += cost
            return draft(context)  # type: ignore[no-any-return]

        expert.draft = draft_at_cost  # type: ignore[method-assign]
        router.inner[index] = expert
    return router


@pytest.fixture(scope="module")
def stream(shallow: Target) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts whose answers by the target differ, and their texts."""
    prompts = [[5 + 7 * number, 11 + number, 3 + 5 * number] for number in range(6)]
    answers = decode(shallow, prompts, Greedy(), 90, ignore_eos=True)
    return prompts, [prompt + answer.output for prompt, answer in zip(prompts, answers)]


Stream = tuple[list[list[int]], list[list[int]]]


def test_in_a_stream_of_two_domains_the_better_drafter_is_used(
    shallow: Target, stream: Stream
) -> None:
    """Texts of two domains follow each other, and each drafter knows one of them: after 50 rounds,
    three of four are drafted by the drafter that knows the text, rounds after the three changes of
    the domain included."""
    prompts, texts = stream
    domains = [0, 0, 1, 1, 0, 1]
    domain_texts = [
        [text for text, domain in zip(texts, domains) if domain == number] for number in (0, 1)
    ]
    drafter = make_expert_router(shallow, domain_texts, [0.2, 0.2], score_every=1, memory=4)
    used = []
    for prompt, text, domain in zip(prompts, texts, domains):
        before = len(drafter.picks)
        (generation,) = decode(shallow, [prompt], Greedy(), 90, drafter, Chain(2), ignore_eos=True)
        assert prompt + generation.output == text
        used += [pick == domain for pick in drafter.picks[before:]]
    assert len(used) > 150 and sum(used[50:]) >= 0.75 * len(used[50:])


@pytest.mark.parametrize("by", ["hedge", "bandit"])
def test_seconds_count(shallow: Target, stream: Stream, by: Any) -> None:
    """Of two drafters that are equally right, the drafter that takes a fifth of the other's time
    is used.
    """
    prompts, texts = stream
    drafter = make_expert_router(shallow, [texts, texts], [5.0, 1.0], by=by)
    for prompt in prompts[:2]:
        decode(shallow, [prompt], Greedy(), 60, drafter, Chain(2), ignore_eos=True)
    late = drafter.picks[2 * NUM_TRIALS + 8 :]
    assert sum(late) >= 0.9 * len(late)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("by", ["hedge", "bandit", "vote"])
@pytest.mark.parametrize("rule", [Greedy(), Match(seed=3)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 8, 3)], ids=lambda builder: builder.name)
@pytest.mark.parametrize("batch", [1, 3])
def test_output_is_the_targets(
    shallow: Target, prompts: list[list[int]], by: Any, rule: Any, builder: Any, batch: int
) -> None:
    """Whichever drafter drafts or catches up, the tokens of every decoding are those of decoding
    without a drafter.
    """
    drafter = make_router(shallow, by=by, score_every=3)
    for texts in (prompts[:batch], prompts[-batch:]):
        expected = [
            generation.output for generation in decode(shallow, texts, rule, 30, ignore_eos=True)
        ]
        assert [
            generation.output
            for generation in decode(shallow, texts, rule, 30, drafter, builder, ignore_eos=True)
        ] == expected
    assert by == "vote" or set(drafter.picks) == set(range(4))


def record_log_q(target: Target, prompts: list[list[int]], score_every: int) -> list[Tensor]:
    """Record every drafter's log q at the start of every fifth round; the first one drafts
    always.
    """
    drafter = make_router(target, EVERY[1:], score_every=score_every)
    recorded = list[Tensor]()
    drafter._pick_arm = lambda context: 0  # type: ignore[method-assign]

    def record_drafts(arm: Any) -> Any:
        make_draft = arm.make_draft

        def draft_and_record(*arguments: Any) -> None:
            make_draft(*arguments)
            if len(drafter.picks) % 5 == 0:
                # Log q of a text that is done is arbitrary.
                recorded.append(arm.recording.recorded_log_q[0][arguments[1].active])

        return draft_and_record

    for arm in drafter.arms:
        arm.make_draft = record_drafts(arm)  # type: ignore[method-assign]
    decode(target, prompts, Greedy(), 30, drafter, Chain(3), ignore_eos=True)
    return recorded


def test_who_rested_drafts_as_if_it_had_not(shallow: Target, prompts: list[list[int]]) -> None:
    """A drafter's log q after rounds without it equals that after rounds in which it drafted."""
    always, rested = (record_log_q(shallow, prompts, score_every) for score_every in (1, 5))
    assert len(always) == len(rested) >= 9
    for expected, actual in zip(always, rested):
        torch.testing.assert_close(expected, actual, atol=1e-4, rtol=1e-4)


def test_unread_tokens_stay_within_their_limit(shallow: Target, prompts: list[list[int]]) -> None:
    """A drafter that is never scored and never picked reads deferred tokens before it needs more
    slots than it has.
    """
    drafter = make_router(shallow, EVERY[:2], score_every=1000)
    drafter._pick_arm = lambda context: 0  # type: ignore[method-assign]
    unread_counts: list[int] = []
    make_draft = drafter.arms[1].make_draft
    drafter.arms[1].make_draft = lambda *arguments: (
        unread_counts.append(drafter.arms[1].num_unread) or make_draft(*arguments)
    )  # type: ignore
    decode(shallow, prompts[:2], Greedy(), 150, drafter, Chain(3), ignore_eos=True)
    assert len(unread_counts) > 2 and max(unread_counts[1:]) <= MAX_UNREAD


def test_a_guard_may_leave_all_of_them_out(shallow: Target, prompts: list[list[int]]) -> None:
    session = Session(
        shallow,
        Greedy(),
        make_router(shallow),
        Chain(3),
        changes=(Guard(window=2, cost=lambda nodes: float(nodes)),),
    )
    expected = [generation.output for generation in decode(shallow, prompts, Greedy(), 40)]
    assert [generation.output for generation in session.decode(prompts, 40)] == expected


def test_votes_are_counted(shallow: Target, prompts: list[list[int]]) -> None:
    """q of a token is the weight of the drafters whose first choice it is; drafters that know
    nothing do not vote.
    """

    class FixedRollout(Rollout):
        def __init__(self, token: int, knows: bool = True) -> None:
            self.token = token
            self.stop_mask = None if knows else torch.ones(1, 1, dtype=torch.bool)

        def start(self) -> Tensor:
            return torch.zeros(1, 1, 9).scatter(-1, torch.tensor([[[self.token]]]), 1.0)

        def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
            return self.start()

    votes = VotingRollout(
        [FixedRollout(3), FixedRollout(5), FixedRollout(3), FixedRollout(8, knows=False)],
        [0.25, 0.5, 0.125, 0.125],
        9,
    )
    expected = torch.zeros(1, 1, 9)
    expected[0, 0, 3], expected[0, 0, 5] = 0.375 / 0.875, 0.5 / 0.875
    torch.testing.assert_close(votes.start().exp(), expected)
    silent = VotingRollout([FixedRollout(8, knows=False)], [1.0], 9)
    torch.testing.assert_close(silent.start().exp(), torch.full((1, 1, 9), 1 / 9))
    assert silent.stop_mask is not None and silent.stop_mask.all()


def make_speeds(count: int, rounds: int) -> list[np.ndarray]:
    """Make speeds [rounds, arms] that are hard to choose by: nearly equal, alternating, random, and
    such as turn against the arm that is ahead."""
    noise = np.random.default_rng(3)
    equal = np.full((rounds, count), 0.97)
    turning = np.zeros((rounds, count))
    equal[:, -1] = 1.0
    hedge = Hedge(count, None)
    for speeds in turning:
        speeds[:] = np.where(np.arange(count) == hedge.weights.argmax(), 0.2, 1.0)
        hedge.add_gains(speeds)
    return [
        equal,
        0.1 + (np.arange(rounds)[:, None] + np.arange(count)) % 2,
        noise.random((rounds, count)) + 0.01,
        turning,
    ]


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("memory", [None, 16])
def test_hedge_regrets_no_more_than_the_theory_allows(count: int, memory: int | None) -> None:
    """The faded gain of the weights is below the best arm's by at most the bound, after every
    round; without fading an arm that is always 3 % slower ends with less than a hundredth of the
    weight."""
    for speeds in make_speeds(count, 3000):
        hedge = Hedge(count, memory)
        earned = 0.0
        best = np.zeros(count)
        for number, row in enumerate(speeds, 1):
            gains = row / row.max()
            weights = hedge.weights
            earned = hedge.fade * earned + float(weights @ gains)
            best = hedge.fade * best + gains
            hedge.add_gains(row)
            rounds = number if memory is None else memory
            assert best.max() - earned <= 2 * np.sqrt(rounds * np.log(count) / 2) + np.sqrt(
                np.log(count) / 8
            )
    if memory is None:
        hedge = Hedge(count, None)
        for row in make_speeds(count, 30000)[0][:, :]:
            hedge.add_gains(row)
        assert hedge.weights[:-1].max() < 0.01


def test_nothing_is_promised_deeper_than_a_drafter_drafts() -> None:
    """Heads that are always right predict as many tokens as there are heads, however deep the
    tree is.
    """
    arm = Arm(0.9, 3)
    arm.depth_limit = 2
    arm.hits = np.full(2, 1e9)
    arm.misses = np.zeros(2)
    assert arm.acceptance_rates(5).round(3).tolist() == [1, 1, 0, 0, 0]
    assert arm.sample_rates(np.random.default_rng(0), 5).round(3).tolist() == [1, 1, 0, 0, 0]
    arm.depth_limit = None
    assert (arm.acceptance_rates(5) > 0).all()


def test_drawn_drafts_of_the_chosen_can_be_weighed(
    shallow: Target, prompts: list[list[int]]
) -> None:
    """A drawn chain of any drafter, copies too, has the q that it was drawn from, as rules that
    weigh p against q need.
    """
    drafter = make_router(shallow, ["ngram", *EVERY[1:3]])
    generations = decode(
        shallow,
        prompts,
        SpeculativeSampling(),
        LIMIT,
        drafter,
        Chain(3, "sampled"),
        ignore_eos=True,
    )
    assert all(len(generation.output) == LIMIT for generation in generations)


def test_each_is_taken_by_its_directory(shallow: Target, tmp_path: Path) -> None:
    """drafter.inner=[ngram,DIR] loads the weights in DIR, and a saved router loads alone."""
    inner = build({"_target_": "spectrain.drafters.causal.Causal", "num_layers": 1}, target=shallow)
    save_drafter(
        tmp_path / "inner",
        inner,
        RunSpec.from_nodes(composed("drafter=causal", "+drafter.num_layers=1", "target=tiny")),
    )
    node = {
        "_target_": "spectrain_research.router.drafter.DrafterRouter",
        "inner": ["ngram", str(tmp_path / "inner")],
    }
    drafter: Any = build_drafter(GroupSpec.from_node("drafter", node), shallow)
    weights = inner.state_dict()
    assert all(
        torch.equal(value, drafter.inner[1].state_dict()[key]) for key, value in weights.items()
    )
    save_drafter(
        tmp_path / "whole", drafter, RunSpec.from_nodes(composed("drafter=chosen", "target=tiny"))
    )
    reloaded: Any = build({**node, "inner": drafter.saved.settings["inner"]}, target=shallow)
    load_weights(reloaded, tmp_path / "whole")
    assert all(
        torch.equal(value, reloaded.inner[1].state_dict()[key]) for key, value in weights.items()
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("drawn_at", [0.7, 1.0])
def test_drawn_drafts_are_worth_what_the_rule_keeps(
    shallow: Target, prompts: list[list[int]], drawn_at: float, temperature: float
) -> None:
    """Before anything fades, the hits of a drafter are the sum over accepted positions of sum_v
    min(p, q), with p at the rule's temperature and q at that of the drawn children."""
    drafter = make_router(shallow, [{"choice": "causal", "num_layers": 1}] * 2, score_every=1000)
    rule = SpeculativeSampling(temperature=temperature)
    builder = Chain(2, "sampled", drawn_at)
    with torch.inference_mode():
        context = prefill_context(
            shallow,
            rule,
            make_request(shallow, prompts[:1], LIMIT, ignore_eos=True),
            drafter,
            builder,
        )
        tree = proposed(drafter, context, builder)
        features = drafter.verify(context, tree)
        accepted = rule.accept(tree, features, context.sequence_ids, context.positions(tree) + 1)
        context.commit(tree, features, accepted)
        recording = drafter.arms[0].recording
        assert recording is not None and features.logits is not None
        level_log_q = [recorded[0] for recorded in recording.recorded_log_q]
        drafter.commit(context, accepted)
    num_accepted = int(accepted.counts[0])
    p = rule.target_distribution(features.logits[0])
    q = [(log_q / drawn_at).softmax(-1) for log_q in level_log_q[: min(num_accepted, 2)]]
    expected = [
        float(torch.minimum(p[node], distribution.double()).sum())
        for node, distribution in enumerate(q)
    ]
    assert drafter.arms[0].hits[: len(expected)].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"inner": ["ngram"]}, "drafter.inner: name two drafters or more"),
        ({"inner": ["ngram", "lookahead"]}, "drafter.inner=lookahead: it runs the target"),
        ({"inner": ["ngram", "self"]}, "drafter.inner=self: it runs the target"),
        ({"score_every": 0}, "drafter.score_every=0: use 1 or more"),
        ({"memory": 0}, "drafter.memory=0: use 1 or more"),
    ],
)
def test_choosing_refuses(shallow: Target, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_router(shallow, **settings)

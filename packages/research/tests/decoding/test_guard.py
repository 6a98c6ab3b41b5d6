"""The guard keeps decoding from being much slower, and switching drafting on and off changes
nothing else.
"""

import math
from collections.abc import Callable
from random import Random

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain_research.shared.guard import Guard
from tests.decoding.test_loop import Oracle, assert_same, stop_at

# seconds of a round without a draft
STEP = 0.02
LIMIT = 16
TEXTS = (
    "The bees find the hive. The bees",
    "one two three four one two three four one two",
    "What is it?",
)
BUILDERS = (Chain(3), Eagle2(depth=4, budget=8, top_k=3))


def run_stream(guard: Guard, gain: float, cost: float, num_tokens: int) -> tuple[list[bool], float]:
    """Return which rounds of so many tokens drafted, and the cost of all in steps; a drafted round
    emits `gain` tokens for `cost`."""
    drafted = []
    emitted = 0.0
    spent = 0.0
    while emitted < num_tokens:
        drafted.append(guard.should_draft())
        tokens, steps = (gain, cost) if drafted[-1] else (1.0, 1.0)
        guard.record_round(drafted[-1], tokens, steps * STEP)
        emitted = emitted + tokens
        spent = spent + steps
    return drafted, spent


@pytest.mark.parametrize("gain, cost", [(1.2, 1.1), (3.0, 1.5), (4.0, 3.9)])
def test_gaining_rounds_never_stop_drafting(gain: float, cost: float) -> None:
    """After two rounds that measure a step, all rounds draft but one after every 32, which measures
    it again; that costs a little more than 1 % at most."""
    drafted, spent = run_stream(Guard(), gain, cost, 3000)
    pattern = [False] + ([False] + [True] * 32) * (len(drafted) // 33 + 1)
    assert drafted == pattern[: len(drafted)]
    assert spent <= 1.015 * 3000 / gain * cost


def long_start(emitted: float, rounds: int) -> float:
    """Return the seconds of a step, half as many again after a long first prompt."""
    return 1.5 if emitted < 150 else 1.0


def slow_start(emitted: float, rounds: int) -> float:
    """The first two steps, by which a guard starts, were slowed by something else."""
    return 1.5 if rounds < 2 else 1.0


@pytest.mark.parametrize("step", [slow_start, long_start], ids=lambda step: step.__name__)
@pytest.mark.parametrize("cost", [1.1, 1.25, 1.4])
@pytest.mark.parametrize("spread", [0.0, 0.15])
def test_slow_first_steps_are_measured_again(
    step: Callable[[float, int], float], cost: float, spread: float
) -> None:
    """A drafter of which nothing is accepted, dearer than a step and cheaper than the steps at the
    start, costs 5 % at most over 2,000 tokens, also where the times of rounds scatter; timed once,
    it would cost what it costs for ever."""
    guard = Guard()
    draw = Random(1)
    spent = plain = emitted = 0.0
    drafted = 0
    while emitted < 2000:
        drafts = guard.should_draft()
        now = step(emitted, drafted + guard.num_undrafted)
        own = max(cost, 0.9 * now) if step is slow_start else cost  # less than a step at the start
        taken = (own if drafts else now) * draw.lognormvariate(0, spread)
        guard.record_round(drafts, 1.0, STEP * taken)
        spent = spent + taken
        plain = plain + step(emitted, 9)
        emitted = emitted + 1
        drafted = drafted + drafts
    assert drafted > 32 and guard.is_stopped
    assert spent <= 1.05 * plain * math.exp(spread**2 / 2)


@pytest.mark.parametrize("cost", [1.05, 1.2, 1.5, 3.0, 16.0])
def test_losing_rounds_cost_little(cost: float) -> None:
    """Over 2,000 tokens a drafter of which nothing is accepted costs at most 5 % of decoding
    without it, and is tried again.
    """
    drafted, spent = run_stream(Guard(), 1.0, cost, 2000)
    assert any(drafted[1000:])
    assert spent <= 1.05 * 2000


@pytest.mark.parametrize("allowance", [0.02, 0.2])
def test_losses_stay_within_the_allowance(allowance: float) -> None:
    """The same holds for other allowances, over as many tokens as it takes for the first rounds
    not to count.
    """
    _, spent = run_stream(Guard(allowance), 1.0, 1.5, 4000)
    assert spent <= (1 + allowance) * 4000


@pytest.mark.parametrize("bad", [1.2, 3.0, 16.0])
def test_drafting_resumes_when_it_gains(bad: float) -> None:
    """After a stretch that does not pay one that does is drafted again, to its end."""
    guard = Guard()
    before, _ = run_stream(guard, 1.0, bad, 600)
    after, _ = run_stream(guard, 3.0, 1.5, 3000)
    assert sum(before) < len(before) / 2
    assert after[-900:].count(False) <= 900 / 32 and not guard.is_stopped


@pytest.mark.parametrize("allowance", [0.0, 1.0, -0.1])
def test_guard_refuses_invalid_allowances(allowance: float) -> None:
    """An allowance that is no share is refused."""
    with pytest.raises(UserError, match=f"guard allowance={allowance}"):
        Guard(allowance)


class Switch(Guard):
    """A guard that drafts by a fixed pattern and records the rounds."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern
        self.recorded: list[tuple[bool, float]] = []

    def should_draft(self) -> bool:
        return self.pattern[len(self.recorded) % len(self.pattern)] == "d"

    def record_round(
        self, drafted: bool, tokens: float, cost: float, proposed: bool = True
    ) -> None:
        assert cost > 0
        self.recorded.append((drafted, tokens))


@pytest.fixture(scope="module")
def prompts(shallow: Target) -> list[list[int]]:
    """Three prompts of different lengths."""
    return [shallow.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def eagle3(shallow: Target) -> Eagle3:
    """A drafter that guesses badly."""
    torch.manual_seed(0)
    drafter = Eagle3(shallow, vocab_size=512)
    drafter.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    return drafter.to(shallow.device, shallow.dtype).eval()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("pattern", ["..d", "d.", ".d..dd", "...."])
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
@pytest.mark.parametrize("batch", [1, 3])
def test_guard_does_not_change_the_output(
    shallow: Target, prompts: list, eagle3: Eagle3, pattern: str, builder: TreeBuilder, batch: int
) -> None:
    """Output is greedy whichever rounds draft; a round that does not has a tree of depth 0 and
    emits one token.
    """
    switch = Switch(pattern)
    plain = decode(shallow, prompts[:batch], Greedy(), LIMIT)
    result = Session(shallow, Greedy(), eagle3, builder, changes=(switch,)).decode(
        prompts[:batch], LIMIT
    )
    for prompt, alone, drafted in zip(prompts, plain, result):
        assert_same(shallow, prompt, drafted.output, alone.output)
        for turn, (depth, count) in enumerate(zip(drafted.depths, drafted.round_lengths)):
            assert (depth > 0) == switch.recorded[turn][0] and count <= depth + 1
    for turn, (_, tokens) in enumerate(switch.recorded):
        counts = [row.round_lengths[turn] for row in result if turn < len(row.round_lengths)]
        assert tokens == pytest.approx(sum(counts) / len(counts))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("pattern", ["..d", "d.", ".d..dd"])
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
@pytest.mark.parametrize("batch", [1, 3])
def test_proposals_after_skipped_rounds_depend_on_the_tokens_only(
    shallow: Target,
    prompts: list,
    eagle3: Eagle3,
    monkeypatch: pytest.MonkeyPatch,
    pattern: str,
    builder: TreeBuilder,
    batch: int,
) -> None:
    """Where rows keep several tokens or none and rounds are skipped, a tree is that of a fresh
    decode of its prefix.
    """
    stop_at(monkeypatch)
    prompts = prompts[:batch]
    switch = Switch(pattern)
    plain = decode(shallow, prompts, Greedy(), LIMIT + builder.depth + 1)
    texts = [prompt + result.output for prompt, result in zip(prompts, plain)]
    followed = Oracle(texts, slips=True, inner=eagle3)
    generations = Session(shallow, Greedy(), followed, builder, changes=(switch,)).decode(
        prompts, LIMIT
    )
    turns = [turn for turn, (drafted, _) in enumerate(switch.recorded) if drafted]
    assert len(turns) == len(followed.trees) > 2
    for row, result in enumerate(generations):
        assert (
            result.output == texts[row][len(prompts[row]) :][:LIMIT]
            and max(result.round_lengths) > 1
        )
        for turn, tree in zip(turns, followed.trees):
            if turn < len(result.round_lengths):
                prefix = texts[row][: len(prompts[row]) + sum(result.round_lengths[:turn])]
                oracle = Oracle([texts[row]], inner=eagle3)
                decode(shallow, [prefix], Greedy(), 2, oracle, builder)
                assert torch.equal(tree.tokens[row], oracle.trees[0].tokens[0])
                assert torch.equal(tree.parents[row], oracle.trees[0].parents[0])


@pytest.mark.slow
def test_random_tokens_cost_little(shallow: Target) -> None:
    """After prompts of random tokens, an untrained drafter with a dear tree costs at most 5 %
    more target work than none.
    """
    torch.manual_seed(3)
    drafter = Eagle3(shallow, vocab_size=512).eval()
    drafter.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))

    def cost(nodes: int) -> float:
        return 1 + 0.05 * (nodes - 1)

    guard = Guard(cost=cost)
    builder = Eagle2(4, 16, 4)
    work = unguarded = steps = 0.0
    for row in range(10):
        prompt = torch.randint(3, shallow.head.vocab_size, (20,)).tolist()
        (plain,) = Session(shallow, Greedy()).decode([prompt], 48, [row], ignore_eos=True)
        (free,) = Session(shallow, Greedy(), drafter, builder).decode(
            [prompt], 48, [row], ignore_eos=True
        )
        (result,) = Session(shallow, Greedy(), drafter, builder, changes=(guard,)).decode(
            [prompt], 48, [row], ignore_eos=True
        )
        assert result.output == plain.output == free.output
        work += sum(map(cost, result.node_counts))
        unguarded += sum(map(cost, free.node_counts))
        steps += len(plain.node_counts)
    assert work <= 1.05 * steps < unguarded


def test_preparing_round_counts_with_the_next_round() -> None:
    """A drafter that needs a round before it can draft, and then pays, is tried again and goes
    on drafting.
    """
    guard = Guard(window=4)
    ready = False
    drafted = 0
    for number in range(400):
        pays = number > 100
        if guard.should_draft():
            guard.record_round(
                True, (3.0 if pays else 1.0) if ready else 1.0, 1.5, has_proposal=ready
            )
            drafted = drafted + (number > 300)
            ready = True
        else:
            guard.record_round(False, 1.0, 1.0)
            ready = False  # a plain round leaves it with nothing
    assert 90 <= drafted <= 99 and not guard.is_stopped


def test_a_drafter_that_never_proposes_costs_no_more_than_the_allowance() -> None:
    """Rounds that propose nothing and cost more than a step are counted like any others."""
    guard = Guard()
    cost = 0.0
    for _ in range(4000):
        drafts = guard.should_draft()
        guard.record_round(drafts, 1.0, 1.5 if drafts else 1.0, has_proposal=False)
        cost += 1.5 if drafts else 1.0
    assert cost <= 1.05 * 4000

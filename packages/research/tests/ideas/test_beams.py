"""Beams: drafted beam search is transformers' own, and drafted sampling draws what plain
sampling draws.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency
from torch import Tensor

from spectrain.decoding.acceptance.base import Vector
from spectrain.decoding.acceptance.sequential import RandomSource
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain_research.beams import session as session_module
from spectrain_research.beams.drawing import choose_width, draw_candidates
from spectrain_research.beams.evaluation import generate_beams
from spectrain_research.beams.forest import Forest
from spectrain_research.beams.items import ItemTrie
from spectrain_research.beams.search import SearchSettings
from spectrain_research.beams.session import (
    BeamEnd,
    BeamRounds,
    BeamSession,
    Method,
    collect_drafts,
)
from tests.decoding.test_lossless import Joint, Path, every, models, taken_out, target_joint
from tests.targets import make_random_target

PROMPTS = [[5, 3, 9, 1, 14, 2], [7, 7, 2]]
VOCAB = 16


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target of three layers and 16 tokens."""
    return make_random_target(VOCAB, num_layers=3, sharpness=3.0)


@pytest.fixture(scope="module")
def drafters(target: Target) -> dict[str, Drafter]:
    """Two of the target's layers, and an untrained EAGLE-3."""
    torch.manual_seed(1)
    causal = Causal(target, num_layers=2)
    eagle3 = Eagle3(target, vocab_size=VOCAB, layers=[1, 2, 3])
    eagle3.prepare(target, torch.ones(VOCAB))
    return {"causal": causal.eval(), "eagle3": eagle3.eval()}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ["plain", "causal", "eagle3"])
@pytest.mark.parametrize(
    "stops",
    [frozenset[int](), frozenset({3}), frozenset({3, 4})],
    ids=["endless", "a-stop", "two-stops"],
)
def test_strict_beams_equal_generate(
    target: Target, drafters: dict[str, Drafter], stops: frozenset[int], name: str
) -> None:
    """All K hypotheses, token by token and in their order, whatever drafts; drafts save
    forwards.
    """
    settings = SearchSettings(num_beams=3, max_new_tokens=9, stop_ids=stops)
    session = BeamSession(target, settings, drafter=drafters.get(name), depth=3, width=6)
    steps = forwards = 0
    for prompt in PROMPTS:
        answer = session.decode(prompt)
        assert answer.hypotheses == generate_beams(target, prompt, settings)
        steps = steps + answer.num_steps
        forwards = forwards + answer.num_forwards
    assert (steps - len(PROMPTS) > forwards) == (name != "plain")


@pytest.mark.parametrize("name", ["plain", "causal"])
def test_beams_of_items_equal_generate(
    target: Target, drafters: dict[str, Drafter], name: str
) -> None:
    """Restricted to codes of three tokens, beams are those of `generate` with the same
    restriction, and all are items.
    """
    torch.manual_seed(2)
    items = torch.randint(4, 12, (40, 3)).tolist()
    trie = ItemTrie(items)
    settings = SearchSettings(num_beams=4, max_new_tokens=3, constraint=trie)
    for prompt in PROMPTS:
        answer = BeamSession(target, settings, drafter=drafters.get(name), depth=2, width=8).decode(
            prompt
        )
        assert answer.hypotheses == generate_beams(target, prompt, settings)
        assert all(item in items for item in answer.hypotheses)


# Drawing without replacement


def weights_of(kind: str, count: int, seed: int) -> Vector:
    draw = Random(f"{kind} {seed}")
    numbers = [draw.randint(int(kind == "dense"), 4) for _ in range(count)]
    numbers[draw.randrange(count)] += 1
    return np.array([Fraction(number, sum(numbers)) for number in numbers], dtype=object)


def draw_plainly(p: Vector, count: int, dice: RandomSource) -> Path:
    """Draws without replacement, by definition."""
    drawn: list[int] = []
    while len(drawn) < count and sum(p) > 0:
        drawn.append(dice.draw_token(p, 0))
        p = taken_out(p, drawn[-1])
    return tuple(drawn)


def outcome_chances(draw_path: Callable[[RandomSource], Path]) -> Joint:
    joint: Joint = defaultdict(Fraction)
    for chance, outcome in every(draw_path):
        joint[outcome] += chance
    return dict(joint)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_drafted_draws_have_the_distribution_of_draws_without_replacement(
    num_drafts: int, kind: str
) -> None:
    """In fractions, over every draft and coin: two candidates of four, in the order of the draw."""
    for seed in range(2):
        p = weights_of(kind, 4, seed)
        q = weights_of(kind, 4, seed + 10)

        def draw_path(dice: RandomSource, p: Vector = p, q: Vector = q) -> Path:
            drafts = draw_plainly(q, num_drafts, dice)
            return tuple(draw_candidates(p, q, drafts, 2, dice))

        assert outcome_chances(draw_path) == outcome_chances(
            lambda dice, p=p: draw_plainly(p, 2, dice)
        )  # type: ignore[misc]


def test_beams_of_two_steps_are_drawn_exactly() -> None:
    """In fractions: two drafts of each depth are drawn over all continuations, also those after
    drafts that were rejected. What is left of them after the one beam that goes on serves its next
    step, and both tokens have the target's distribution."""
    vocab = 3
    p, q = models("dense", vocab, 2)

    def draw_path(dice: RandomSource) -> Path:
        first = draw_plainly(q[()], 2, dice)
        flat = np.array(
            [q[()][token] * q[token,][after] for token in first for after in range(vocab)],
            dtype=object,
        )
        second = draw_plainly(flat / flat.sum(), 2, dice)
        (beam,) = draw_candidates(p[()], q[()], first, 1, dice)
        if beam not in first:
            return beam, dice.draw_token(p[beam,], 0)
        at = first.index(beam)
        drafts = [index - at * vocab for index in second if index // vocab == at]
        return beam, *draw_candidates(p[beam,], q[beam,], drafts, 1, dice)

    assert outcome_chances(draw_path) == target_joint(p, 2)


def test_width_depends_on_agreement() -> None:
    """Equal distributions keep all beams, disjoint ones a single one, and a rate of one half as
    many as the binomial allows.
    """
    even = torch.tensor([0.5, 0.5, 0.0, 0.0])
    other = torch.tensor([0.0, 0.0, 0.5, 0.5])
    half = torch.tensor([0.5, 0.0, 0.5, 0.0])
    assert choose_width(even, even, 4, 3, 0.7) == 3
    assert choose_width(even, other, 4, 3, 0.7) == 1
    # At least one of four: 15/16; two: 11/16; three: 5/16.
    assert [choose_width(even, half, 4, 3, threshold) for threshold in (0.9, 0.7, 0.6, 0.3)] == [
        1,
        1,
        2,
        3,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["relaxed", "sample", "dynamic"])
def test_sampled_beams_are_drawn_from_the_target(method: Method) -> None:
    """Real decoding: the best hypotheses of many drafted runs are distributed as those of plain
    runs.
    """
    target = make_random_target(4, num_layers=3, sharpness=2.0)
    torch.manual_seed(1)
    drafter = Causal(target, num_layers=2).eval()
    settings = SearchSettings(num_beams=2, max_new_tokens=3)
    threshold = 0.0 if method == "dynamic" else 0.7
    plain = BeamSession(target, settings, method, seed=1)
    drafted = BeamSession(
        target, settings, method, drafter, depth=2, width=4, threshold=threshold, seed=2
    )
    results = []
    num_saved = 0
    for session in (plain, drafted):
        answers = [session.decode([1, 2, 3], row) for row in range(400)]
        results.append(Counter(tuple(map(tuple, answer.hypotheses)) for answer in answers))
        num_saved += sum(answer.num_steps - 1 - answer.num_forwards for answer in answers)
    assert num_saved > 100
    names = sorted(
        {*results[0], *results[1]}, key=lambda name: -results[0][name] - results[1][name]
    )
    table = np.array([[result[name] for name in names] for result in results])
    table = np.concatenate([table[:, :8], table[:, 8:].sum(1, keepdims=True)], axis=1)
    assert chi2_contingency(table[:, table.sum(0) > 10]).pvalue > 1e-4


def test_drafts_have_the_q_that_draws_judge(
    target: Target, drafters: dict[str, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By forwards of the drafter over all of a text: q of a beam's continuations is its score and
    the drafter's distribution, over all beams; no draft comes twice."""
    drafter = drafters["causal"]
    prompt = PROMPTS[0]
    assert isinstance(drafter, Causal)
    settings = SearchSettings(num_beams=3, max_new_tokens=8)
    rounds = BeamRounds(
        BeamSession(target, settings, "relaxed", drafter, depth=2, width=6), prompt, 0
    )
    checked = [0, 0]

    def check_offer(
        forest: Forest | None, ends: list[BeamEnd], alive: list[bool], vocab_size: int
    ) -> tuple[Tensor, list[int]]:
        q, drafts = collect_drafts(forest, ends, alive, vocab_size)
        if forest is not None and q.sum() > 0:
            texts = [prompt + beam for beam in rounds.search.beams]
            logits = [
                drafter.model.run(torch.tensor([text]), ForwardPlan(logits=True)).logits
                for text in texts
            ]
            log_q = torch.stack(
                [part[0, -1].double().log_softmax(-1) for part in logits if part is not None]
            )
            depth = forest.depths[ends[0].node]
            scores = torch.tensor(
                [float(forest.scores[end.row, end.node]) for end in ends]
            ).double()
            expected = (scores[:, None] + log_q).flatten().softmax(-1)
            torch.testing.assert_close(q, expected, rtol=1e-4, atol=1e-6)
            assert len(drafts) == len(set(drafts))
            checked[depth] += len(drafts)
        return q, drafts

    monkeypatch.setattr(session_module, "collect_drafts", check_offer)
    while not rounds.search.is_done:
        rounds.run_round()
    assert min(checked) > 0

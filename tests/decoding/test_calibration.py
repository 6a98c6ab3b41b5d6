"""The measurements that builders are prepared with equal counts by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.decoding import latency as timing
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match, OpenSampling
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.calibration import resolve_rule
from spectrain.decoding.generation import Generation
from spectrain.decoding.latency import LatencyProbe, measure_latency
from spectrain.decoding.loop import decode
from spectrain.decoding.teacher_forcing import TeacherForcedBuilder, run_teacher_forced
from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.eval.notes import describe_rules
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.measurements import Calibration, Latency, RuleForecast, _interpolate_nodes
from spectrain.trees.token_tree import Children
from tests.decoding.test_loop import stop_at
from tests.installed import load_cases
from tests.trees.tables import VOCAB, Table, soft_scores

LIMIT = 24
TEXTS = (
    "The bees find the hive. The bees",
    "one two three four one two three four one two",
    "What is it?",
)


@pytest.fixture(scope="module")
def prompts(shallow: Target) -> list[list[int]]:
    """Three prompts of different lengths."""
    return [shallow.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


def make_lucky_drafter(target: Target, prompts: list[list[int]]) -> Eagle3:
    """A drafter that guesses badly among few tokens, those of the greedy answers, so that some
    guesses hit.
    """
    torch.manual_seed(5)  # a drafter whose first guess is right now and then at every depth
    counts = torch.zeros(target.head.vocab_size)
    for result in decode(target, prompts, Greedy(), LIMIT, ignore_eos=True):
        counts[result.output] = 1
    drafter = Eagle3(target, ttt_steps=4, vocab_size=int(counts.sum()) - 2)
    drafter.prepare(target, counts)
    return drafter.to(target.device, target.dtype).eval()


@pytest.fixture(scope="module")
def eagle3(shallow: Target, prompts: list[list[int]]) -> Eagle3:
    return make_lucky_drafter(shallow, prompts)


def test_latency_interpolation_is_exact_and_linear() -> None:
    """Measured sizes give what was measured, others lie on the line through their neighbours,
    also beyond the ends.
    """
    table = {8: 3.0, 1: 1.0, 4: 7.0}
    assert [_interpolate_nodes(table, size) for size in (1, 4, 8)] == [1.0, 7.0, 3.0]
    assert [_interpolate_nodes(table, size) for size in (2, 2.5, 5, 7)] == [3.0, 4.0, 6.0, 4.0]
    assert [_interpolate_nodes(table, size) for size in (0, 9, 10)] == [-1.0, 2.0, 1.0]
    assert _interpolate_nodes({5: 2.5}, 1) == _interpolate_nodes({5: 2.5}, 40) == 2.5


def test_latency_between_contexts_is_linear() -> None:
    """So is that of a tree's size after every context; beyond the measured lengths the nearest
    counts.
    """
    latency = Latency(
        {100: {1: 10.0, 3: 12.0}, 300: {1: 20.0, 3: 26.0}}, {100: {1: 1.0}, 300: {1: 3.0}}, 0.0
    )
    assert [latency.estimate_verify(1, length) for length in (0, 100, 150, 200, 300, 999)] == [
        10.0,
        10.0,
        12.5,
        15.0,
        20.0,
        20.0,
    ]
    assert [latency.estimate_verify(2, length) for length in (100, 200, 300)] == [11.0, 17.0, 23.0]
    assert [latency.estimate_step(7, length) for length in (0, 250, 999)] == [1.0, 2.5, 3.0]


def test_draft_latency_sums_start_and_steps() -> None:
    """A draft is its first step and, for every further level, a step of that width, each after
    its own context.
    """
    latency = Latency(
        {10: {1: 1.0, 3: 2.0}, 50: {1: 4.0, 3: 8.0}},
        {10: {1: 0.1, 3: 0.3}, 50: {1: 0.5, 3: 0.9}},
        0.25,
    )
    assert (
        latency.estimate_verify(2),
        latency.estimate_verify(2, 30),
        latency.estimate_verify(5, 99),
    ) == (1.5, 3.75, 12.0)
    assert latency.estimate_draft(1, 3) == 0.25 and latency.estimate_draft(4, 2) == pytest.approx(
        0.25 + 3 * 0.2
    )
    assert latency.estimate_draft(3, 2, 30) == pytest.approx(0.25 + 2 * 0.45)


def test_pooled_hits_are_weighted_by_positions(tmp_path: Path) -> None:
    """Hits of all depths together, as if counted in one; and a calibration is saved as it is."""
    calibration = Calibration([[0.5, 0.25], [0.2, 0.0], [0.9, 0.9]], [6, 2, 0])
    assert calibration.pooled_hits == pytest.approx([(3 + 0.4) / 8, 1.5 / 8])
    calibration.save(tmp_path / "calibration.json")
    assert json.loads((tmp_path / "calibration.json").read_text()) == vars(calibration)


def forced_decode(
    shallow: Target,
    prompts: list[list[int]],
    drafter: Eagle3,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    batch: int = 1,
) -> tuple[TeacherForcedBuilder, list[Generation], list[Generation]]:
    """Autoregressive answers, and decoding with every draft right."""
    free = rule.matching_rule()
    answers = decode(shallow, prompts, free, LIMIT)
    forced = TeacherForcedBuilder(
        {row: answer.prompt + answer.output for row, answer in enumerate(answers)}, builder, rule
    )
    runs = []
    for row in range(0, len(prompts), batch):
        rows = list(range(row, row + batch))
        runs += decode(
            shallow, prompts[row : row + batch], free, LIMIT, drafter, forced, sequence_ids=rows
        )
    return forced, runs, answers


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "rule",
    [Greedy(), Match(temperature=2.0, seed=7), RecursiveRejection(seed=2)],
    ids=lambda rule: rule.name,
)
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_teacher_forced_rounds_accept_everything(
    shallow: Target,
    prompts: list,
    eagle3: Eagle3,
    monkeypatch: pytest.MonkeyPatch,
    rule: AcceptanceRule,
    depth: int,
    batch: int,
) -> None:
    """Every round but the last emits depth + 1 tokens, and the output is that without a drafter."""
    stop_at(monkeypatch)
    _, runs, answers = forced_decode(shallow, prompts, eagle3, Chain(depth), rule, batch)
    for result, expected in zip(runs, answers):
        assert result.output == expected.output and len(result.output) == LIMIT
        full, rest = divmod(LIMIT - 1, depth + 1)
        assert result.round_lengths[:full] == [depth + 1] * full and len(
            result.round_lengths
        ) == full + (rest > 0)


def rank_tokens(shallow: Target, eagle3: Eagle3, text: list[int], step: int) -> list[int]:
    """Return the drafter's tokens, the most likely first, after a text whose last `step` tokens are
    drafted; by the training loss."""
    return eagle3.draft_ids[
        draft_logits(shallow, eagle3, text, step).argsort(descending=True)
    ].tolist()


@torch.no_grad()
def draft_logits(shallow: Target, eagle3: Eagle3, text: list[int], step: int = 0) -> Tensor:
    """The drafter's logits after a text whose last `step` tokens are drafted; by the training
    loss.
    """
    logits: list[Tensor] = []
    hook = eagle3.norm.register_forward_hook(
        lambda module, args, output: logits.append(eagle3.lm_head(output))
    )
    tokens = torch.tensor([[*text, 0]])
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, -1] = True  # every step then has one row
    eagle3.loss(
        Batch(tokens, mask, shallow.features(tokens, eagle3.layers)), shallow, TrainingState()
    )
    hook.remove()
    return torch.cat(logits)[step]


@pytest.mark.sweep(1, free=("depth",))
@pytest.mark.parametrize("depth", [3, 1])
def test_hits_equal_a_count_by_hand(
    tiny: Target, prompts: list, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Hits count, at each depth and rank, how often the drafter's token there is the greedy one,
    over all rounds.
    """
    # with three layers' answers none is lucky at every depth
    eagle3 = make_lucky_drafter(tiny, prompts)
    stop_at(monkeypatch)
    forced, runs, _ = forced_decode(tiny, prompts, eagle3, Chain(depth), Greedy())
    sums = torch.zeros_like(forced.hit_sums)
    counts = [0] * depth
    for result in runs:
        for start in range(0, LIMIT - 1, depth + 1):
            for step in range(min(depth, LIMIT - 1 - start)):
                end = start + step + 1
                guesses = rank_tokens(tiny, eagle3, result.prompt + result.output[:end], step)[
                    : forced.width
                ]
                counts[step] += 1
                if result.output[end] in guesses:
                    sums[step, guesses.index(result.output[end])] += 1
    assert (sums[:, 0] > 0).all() and (sums[:, 1:].sum(1) > 0).all()
    assert forced.hit_sums.tolist() == sums.tolist() and forced.counts == counts
    expected = [[hit / count for hit in row] for row, count in zip(sums.tolist(), counts)]
    assert forced.hit_rates == [pytest.approx(row) for row in expected]
    again = run_teacher_forced(tiny, eagle3, Chain(depth), Greedy(), prompts, LIMIT)
    assert again.hit_rates == forced.hit_rates and again.counts == forced.counts


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "rule", [Greedy(), Match(seed=7), RecursiveRejection(seed=2)], ids=lambda rule: rule.name
)
@pytest.mark.parametrize("children", ["deterministic", "without_replacement"])
def test_hits_of_distinct_children_sum_to_at_most_1(
    shallow: Target, prompts: list, eagle3: Eagle3, rule: AcceptanceRule, children: Children
) -> None:
    """At every depth they are no less than 0 and add up to 1 at most, for one child is accepted
    or none; some are accepted.
    """
    forced = run_teacher_forced(shallow, eagle3, Chain(3, children), rule, prompts, LIMIT)
    hits = torch.tensor(forced.hit_rates)
    assert hits.shape == (3, forced.width) and (hits >= 0).all() and (hits.sum(1) <= 1 + 1e-6).all()
    assert hits.sum() > 0 and min(forced.counts) > 0


def child_chances(
    rule: AcceptanceRule, children: Children, logits: Tensor, number: int, width: int = VOCAB
) -> list[float]:
    """The chances of the children that are drawn from a table the `number`th time."""
    forced = TeacherForcedBuilder({}, Chain(1, children), rule, width)
    forced.rollout = Table(soft_scores)
    forced.counts = [number]
    siblings, _ = forced._make_siblings(
        logits, torch.tensor(soft_scores(0, ())), 0, (children, 1.0)
    )
    return [float(chance) for chance in rule.acceptance_chances(siblings)]


# Cases of installed packages.
CASES = load_cases(__name__)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "rule",
    [
        SpeculativeSampling(),
        RecursiveRejection(),
        Block(),
        *CASES.get("test_first_child_is_accepted_with_the_overlap", ()),
    ],
    ids=lambda rule: rule.name,
)
@pytest.mark.parametrize("children", ["sampled", "without_replacement"])
def test_first_child_is_accepted_with_the_overlap(rule: AcceptanceRule, children: Children) -> None:
    """On average over draws, every rule that weighs p against q accepts the first child with the
    summed min(p, q).
    """
    logits = torch.randn(7 * VOCAB)
    p = logits.double().softmax(-1)
    q = torch.zeros(7 * VOCAB, dtype=torch.float64)
    q[7 * torch.arange(VOCAB) + 3] = torch.tensor(soft_scores(0, ()), dtype=torch.float64).exp()
    result = torch.tensor(
        [child_chances(rule, children, logits, number)[0] for number in range(400)]
    )
    assert abs(result.mean() - torch.minimum(p, q).sum()) < 4 * result.std() / 400**0.5


def test_all_tokens_without_replacement_always_accept_a_child() -> None:
    """Where the target has no mass outside the draft vocabulary and all of it is drawn, some
    child is accepted for sure.
    """
    logits = torch.full((7 * VOCAB,), float("-inf"))
    logits[7 * torch.arange(VOCAB) + 3] = torch.randn(VOCAB)
    for number in range(50):
        result = child_chances(RecursiveRejection(), "without_replacement", logits, number)
        assert min(result) >= 0 and sum(result) == pytest.approx(1)
        assert sum(child_chances(Match(), "without_replacement", logits, number)) == pytest.approx(
            1
        )


@pytest.mark.parametrize("rule", [Greedy(), Block(0.7, seed=2)], ids=lambda rule: rule.name)
def test_overlap_and_first_equal_a_count_by_hand(
    shallow: Target,
    prompts: list,
    eagle3: Eagle3,
    monkeypatch: pytest.MonkeyPatch,
    rule: AcceptanceRule,
) -> None:
    """At depth 1 the sum of min(p, q) and the equality of the two likeliest tokens are means over
    the target's own text, p at the rule's temperature, or at 1 where it draws nothing, and q at the
    builder's."""
    stop_at(monkeypatch)
    forced, runs, _ = forced_decode(
        shallow, prompts[:2], eagle3, Chain(1, "sampled", temperature=0.5), rule
    )
    overlap = []
    first = []
    for result in runs:
        for end in range(1, LIMIT, 2):
            text = result.prompt + result.output[:end]
            logits = shallow.run(torch.tensor([text]), ForwardPlan(logits=True)).logits
            assert logits is not None
            log_q = torch.full((shallow.head.vocab_size,), -torch.inf)
            log_q[eagle3.draft_ids] = draft_logits(shallow, eagle3, text)
            p = (logits[0, -1] / getattr(rule, "temperature", 1.0)).softmax(-1)
            overlap.append(float(torch.minimum(p, (log_q / 0.5).softmax(-1)).sum()))
            first.append(float(log_q.argmax() == logits[0, -1].argmax()))
    assert (
        forced.mean_overlap == pytest.approx([sum(overlap) / len(overlap)], abs=1e-4)
        and 0 < forced.mean_overlap[0] < 1
    )
    assert forced.top1_agreement == pytest.approx([sum(first) / len(first)])


@pytest.mark.parametrize("builder", [Chain(2), Eagle2(2, 8, 4)], ids=lambda builder: builder.name)
def test_sampling_rules_are_forecast(
    shallow: Target, prompts: list, eagle3: Eagle3, builder: TreeBuilder
) -> None:
    """With sample-and-match, what both rules would accept is measured over the same positions: of
    one child of a chain and of four of a tree, as forced decoding with either rule measures; no
    other rule is compared."""
    forced = run_teacher_forced(shallow, eagle3, builder, Match(seed=3), prompts[:2], LIMIT)
    rules = forced.rule_forecast
    assert rules is not None and rules.children == (1 if builder.traits.is_chain else 4)
    assert rules.matched == pytest.approx(
        [sum(hits[: rules.children]) for hits in forced.hit_rates]
    )
    drawn = run_teacher_forced(
        shallow,
        eagle3,
        Chain(2, "without_replacement"),
        RecursiveRejection(seed=3),
        prompts[:2],
        LIMIT,
    )
    assert drawn.counts == forced.counts
    assert rules.weighed == pytest.approx([sum(hits[: rules.children]) for hits in drawn.hit_rates])
    assert (
        run_teacher_forced(shallow, eagle3, builder, Greedy(), prompts[:1], LIMIT).rule_forecast
        is None
        and drawn.rule_forecast is None
    )


def test_forecast_prefers_the_rule_that_accepts_more() -> None:
    """Where four drawn children are accepted at 0.7 and the four most likely at 0.45, drawing is
    recommended, else not.
    """
    weak = RuleForecast(4, [0.445, 0.4], [0.704, 0.7])
    sure = RuleForecast(1, [0.9], [0.91])
    assert weak.forecast_lengths == pytest.approx((1 + 0.445 + 0.178, 1 + 0.704 + 0.4928))
    assert weak.summary()["better"] == "recursive" and sure.summary()["better"] == "match"
    assert (
        "acceptance=recursive tree.children=without_replacement at 0.70 0.70: use the latter"
        in describe_rules(weak.summary())
    )


@pytest.mark.parametrize("pays", [True, False])
def test_unresolved_rule_is_resolved_by_the_forecast(
    shallow: Target, prompts: list, eagle3: Eagle3, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """acceptance=sample becomes recursive rejection over the same tree, drawn, where that promises
    more, else sample-and-match; a tree that cannot be drawn stays, one that is drawn already is
    weighed, and other rules are left alone."""
    monkeypatch.setattr(RuleForecast, "prefers_rejection", pays)
    rule = OpenSampling(0.7, 9, 0.9, 4)
    sampling = (0.7, 9, 0.9, 4)
    for builder in (Chain(2, seed=6), Static(2, 5, [[0], [1], [0, 0]], seed=6)):
        result, tree, forecast = resolve_rule(shallow, eagle3, builder, rule, lambda: prompts[:1])
        assert (
            forecast is not None
            and result.sampling_settings == sampling
            and tree.depth == 2
            and tree.seed == 6
        )
        assert (result.name, tree.temperature) == (("recursive", 0.7) if pays else ("match", 1.0))
        result.check_children(tree.children, tree.traits.is_chain)
        assert (tree is builder) is not pays and builder.children == "deterministic"
    result, tree, _ = resolve_rule(shallow, eagle3, other := Eagle2(2, 6, 2), rule, lambda: [])
    assert (result.name, tree) == ("match", other)
    result, tree, _ = resolve_rule(shallow, eagle3, other := Chain(2, "sampled"), rule, lambda: [])
    assert (result.name, tree) == ("recursive", other)
    assert resolve_rule(shallow, eagle3, other, greedy := Greedy(), lambda: []) == (
        greedy,
        other,
        None,
    )
    assert Static(2, 4, [[0], [2]]).sampled_variant(1.0) is None


@pytest.mark.parametrize("budget, sizes", [(2, [1, 2]), (4, [1, 2, 4]), (11, [1, 2, 4, 8, 11])])
def test_every_size_is_timed(
    shallow: Target, prompts: list, eagle3: Eagle3, budget: int, sizes: list[int]
) -> None:
    """After the shortest prompt, and after the longest or a text of the requested length, each size
    up to the budget has a positive time."""
    lengths = sorted(map(len, prompts))
    longest = lengths[-1] + 7 if budget == 4 else 2
    latency = measure_latency(shallow, eagle3, prompts, Eagle2(3, budget), longest, repeats=2)
    contexts = [length + 3 * len(sizes) for length in (lengths[0], max(longest, lengths[-1]))]
    for table in (latency.verify_seconds, latency.step_seconds):
        assert sorted(table) == contexts
        for seconds in table.values():
            assert list(seconds) == sizes and min(seconds.values()) > 0
    assert latency.start_seconds > 0


@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_slow_rounds_are_timed_twice(
    shallow: Target,
    eagle3: Eagle3,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    """After the time of a probe every size has a time beside its first one, and no more follow."""
    probes: list[LatencyProbe] = []

    def make_probe(*args: Any) -> LatencyProbe:
        probes.append(LatencyProbe(*args))
        return probes[-1]

    monkeypatch.setattr(timing, "LatencyProbe", make_probe)
    monkeypatch.setattr(timing, "MAX_PROBE_SECONDS", seconds)
    measure_latency(shallow, eagle3, prompts, Eagle2(3, 4), 2, repeats=4)
    counts = {len(times) for probe in probes for times in probe.verify_seconds.values()}
    assert len(probes) == 2 and (counts == {2} if seconds == 0 else min(counts) > 4)

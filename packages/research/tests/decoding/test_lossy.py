"""Rules that change the output, by what they promise of it: nothing at the strict end, elsewhere
what their equations say.

Those that draw are run over every random outcome, in fractions, as the lossless ones are. V
vocabulary.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Siblings
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.acceptance.sequential import SequentialRule
from spectrain.decoding.loop import decode
from spectrain.drafters.causal import Causal
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain.trees.token_tree import TokenTree
from spectrain_research.lossy_rules.blending import (
    BlendingRule,
    BoundedSampling,
    Deferral,
    Fuzzy,
    Sigmoid,
)
from spectrain_research.lossy_rules.relaxed import LooseMatch, Rollback
from spectrain_research.shared.relaxed_rule import RelaxedRule
from tests.decoding.test_lossless import (
    KINDS,
    SHAPES,
    Joint,
    Vector,
    acceptance_by_node,
    accepted_lengths,
    continued,
    drawn,
    emitted,
    every,
    expected_value,
    models,
    round_outcomes,
    siblings_of,
    target_joint,
)
from tests.targets import cut_tiny

THIRD = Fraction(1, 3)
BLENDS: list[BlendingRule] = [
    *(Deferral(defer=defer, alpha=Fraction(1, 4)) for defer in ("chow", "diff", "opt", "token")),  # type: ignore[arg-type]
    BoundedSampling(bias=Fraction(1, 5)),  # type: ignore[arg-type]
    Fuzzy(divergence=0.08),
]


def rule_name(rule: Any) -> str:
    return f"{rule.name}-{getattr(rule, 'defer', '')}".rstrip("-")


def total_variation(p: Vector, q: Vector) -> Fraction:
    """Half the distance, by its definition."""
    return sum((abs(a - b) for a, b in zip(p, q)), start=Fraction(0)) / 2


def marginal_vector(joint: Joint, vocab: int) -> Vector:
    """A joint distribution of one token as a vector."""
    return np.array([joint.get((token,), Fraction(0)) for token in range(vocab)], dtype=object)


# Blending p and q


@pytest.mark.sweep(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("children", ["sampled", "without_replacement"])
@pytest.mark.parametrize("name", ["1", "1-1", "2", "2-1"])
@pytest.mark.parametrize("rule", BLENDS, ids=rule_name)
def test_output_has_the_blended_distribution(
    rule: BlendingRule, name: str, children: Any, kind: str
) -> None:
    """Over every position that had drafts, what a round emits, going on with pi, has pi's joint
    distribution exactly.
    """
    depth = max(map(len, SHAPES[name]))
    for seed in range(3):
        p, q = models(kind, 3, depth + 1, seed)
        pi = {path: rule.blend_distributions(p[path], q[path]) for path in p}
        assert all(sum(vector) == 1 and min(vector) >= 0 for vector in pi.values())
        heads: Joint = defaultdict(Fraction)
        for chance, accepted, bonus in round_outcomes(
            rule, drawn(SHAPES[name], children), p, q, children == "without_replacement"
        ):
            heads[(*accepted, bonus)[:depth]] += chance
        assert continued(heads, pi, depth) == target_joint(pi, depth)


STRICT = [
    *(Deferral(defer=defer, alpha=-2) for defer in ("chow", "diff", "opt", "token")),
    BoundedSampling(bias=0),
    Fuzzy(divergence=0),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", STRICT, ids=rule_name)
def test_blend_without_the_drafter_is_lossless(rule: SequentialRule, kind: str) -> None:
    """At its strict end such a rule emits the target's joint distribution, and accepts what
    recursive rejection accepts.
    """
    draft = drawn(SHAPES["2"], "sampled")
    for seed in range(3):
        p, q = models(kind, 3, 2, seed)
        assert emitted(rule, draft, p, q, False, 2) == target_joint(p, 2)
        assert accepted_lengths(rule, draft, p, q, False) == accepted_lengths(
            RecursiveRejection(), draft, p, q, False
        )


def deferral_distribution(defer: str, p: Vector, q: Vector, alpha: Fraction) -> Vector:
    """The papers' closed forms, token by token."""
    if defer == "token":
        left = {v for v in range(len(p)) if p[v] < (1 - alpha) * max(p)}
        deferred_mass = sum((q[v] for v in left), start=Fraction(0))
        return np.array(
            [q[v] * (v not in left) + p[v] * deferred_mass for v in range(len(p))], dtype=object
        )
    least = {
        "chow": 1 - alpha,
        "diff": max(p) - alpha,
        "opt": max(p) - alpha * total_variation(p, q),
    }[defer]
    return p if max(q) < least else q


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("defer", ["chow", "diff", "opt", "token"])
def test_cascade_emits_its_deferral_distribution(defer: Any, kind: str) -> None:
    """The first token of a drafted chain has the closed form of the deferral rule; over the
    trials both models are used.
    """
    models_used = set()
    for seed, alpha in itertools.product(range(8), (Fraction(0), Fraction(1, 4), Fraction(3, 5))):
        p, q = models(kind, 3, 2, seed)
        heads: Joint = defaultdict(Fraction)
        for chance, accepted, bonus in round_outcomes(
            Deferral(defer=defer, alpha=alpha), drawn(SHAPES["1"], "sampled"), p, q, False
        ):
            heads[(*accepted, bonus)[:1]] += chance
        expected = deferral_distribution(defer, p[()], q[()], alpha)
        assert list(marginal_vector(heads, 3)) == list(expected)
        models_used |= {
            name for name, vector in (("p", p[()]), ("q", q[()])) if list(vector) == list(expected)
        }
    assert models_used == {"p", "q"} or defer == "token"


def divergence(p: Vector, q: Vector) -> float:
    """The Jensen-Shannon divergence by its definition: the mean of two divergences from the
    mean.
    """
    pairs = [(float(x), float(x + y) / 2) for a, b in ((p, q), (q, p)) for x, y in zip(a, b)]
    return sum(x * math.log(x / mean) for x, mean in pairs if x) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_fuzzy_acceptance_emits_the_drafters_tokens_where_the_models_hardly_diverge(
    kind: str,
) -> None:
    """The first token of a drafted chain has q where the divergence is below the threshold, and
    p elsewhere; in the first case every draft is accepted.
    """
    trusted = []
    for seed, limit in itertools.product(range(6), (0.005, 0.05, 0.3)):
        p, q = models(kind, 3, 2, seed)
        rule, draft = Fuzzy(divergence=limit), drawn(SHAPES["1"], "sampled")
        heads: Joint = defaultdict(Fraction)
        for chance, accepted, bonus in round_outcomes(rule, draft, p, q, False):
            heads[(*accepted, bonus)[:1]] += chance
        trusted.append(divergence(p[()], q[()]) <= limit)
        expected = q[()] if trusted[-1] else p[()]
        assert list(marginal_vector(heads, 3)) == list(expected)
        if trusted[-1]:
            assert accepted_lengths(rule, draft, p, q, False) == {1: 1}
    assert len({*trusted}) == 2 or kind != "dense"


@pytest.mark.parametrize("kind", KINDS)
def test_bias_is_bounded_and_gains_as_much_acceptance(kind: str) -> None:
    """Yin's bound, by enumeration: the output's total variation from p is min(bias, TV(p, q)), with
    any number of children, and with one, rejection and bias add up to TV(p, q), the least that they
    can."""
    for seed, bias in itertools.product(
        range(6), (Fraction(0), Fraction(1, 10), THIRD, Fraction(1))
    ):
        p, q = models(kind, 3, 2, seed)
        distance, rule = total_variation(p[()], q[()]), BoundedSampling(bias=bias)  # type: ignore[arg-type]
        for name in ("1", "2"):
            draft = drawn(SHAPES[name], "sampled")
            heads: Joint = defaultdict(Fraction)
            for chance, accepted, bonus in round_outcomes(rule, draft, p, q, False):
                heads[(*accepted, bonus)[:1]] += chance
            result = total_variation(marginal_vector(heads, 3), p[()])
            assert result == min(bias, distance)
            if name == "1":
                rejected = accepted_lengths(rule, draft, p, q, False).get(0, Fraction(0))
                assert rejected + result == distance


LOOSENED: dict[str, Callable[[Fraction], BlendingRule]] = {
    **{
        defer: partial(lambda defer, x: Deferral(defer=defer, alpha=x), defer)
        for defer in ("chow", "diff", "opt")
    },
    "bounded": lambda x: BoundedSampling(bias=x),  # type: ignore[arg-type]
    "fuzzy": lambda x: Fuzzy(divergence=float(x) * math.log(2)),
}


@pytest.mark.parametrize("name", LOOSENED)
def test_acceptance_rises_with_alpha(name: str) -> None:
    """On fixed rounds the expected number of accepted drafts never falls with the threshold, and
    rises from end to end.
    """
    steps = [Fraction(0), Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(1)]
    ends = []
    for seed in range(6):
        p, q = models("dense", 3, 3, seed)
        draft = drawn(SHAPES["1-1"], "sampled")
        accepted = [
            expected_value(accepted_lengths(LOOSENED[name](step), draft, p, q, False))
            for step in steps
        ]
        assert accepted == sorted(accepted)
        ends.append(accepted[-1] - accepted[0])
    assert max(ends) > 0


@pytest.mark.parametrize("children", ["sampled", "without_replacement"])
@pytest.mark.parametrize("rule", BLENDS, ids=rule_name)
def test_acceptance_chances_of_blends_equal_enumeration(rule: BlendingRule, children: Any) -> None:
    """A blend's acceptance chances of siblings are how often it accepts each."""
    drop = children == "without_replacement"
    for seed in range(2):
        p, q = models("dense", 3, 2, seed)
        for _, tree in every(partial(drawn(SHAPES["2"], children), q)):
            accepted = acceptance_by_node(rule, tree, p, q, drop)
            assert [accepted[child] for child in tree.children[0]] == rule.acceptance_chances(
                siblings_of(tree, 0, p, q, drop)
            )


# A sigmoid in place of the softmax


class Rational(Sigmoid):
    """The sigmoid of log w - c, which is w / (w + e^c), in fractions."""

    odds = Fraction(1)

    def _apply_sigmoid(self, weights: Any) -> Any:
        return weights / (weights + self.odds)


def test_shifted_sigmoid_equals_a_ratio() -> None:
    """With a range of 1 the sigmoid of log w is w / (w + e^low)."""
    weights = torch.tensor([0.0, 0.1, 0.3, 0.6], dtype=torch.float64)
    for low in (-2.0, 0.0, 3.0):
        torch.testing.assert_close(
            Sigmoid(low=low, high=low + 1)._apply_sigmoid(weights),
            weights / (weights + math.exp(low)),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_sigmoid_rule_emits_its_distribution(kind: str) -> None:
    """A drafted position has q min(1, p'/q') + (its rejections) norm(max(p' - q', 0)); far to
    the right that is p.
    """
    for seed, odds in itertools.product(range(4), (Fraction(1, 2), Fraction(10**12))):
        p, q = models(kind, 3, 2, seed)
        rule = Rational()
        rule.odds = odds
        heads: Joint = defaultdict(Fraction)
        for chance, accepted, bonus in round_outcomes(
            rule, drawn(SHAPES["1"], "sampled"), p, q, False
        ):
            heads[(*accepted, bonus)[:1]] += chance
        own_values = p[()] / (p[()] + odds)
        target_values = q[()] / (q[()] + odds)
        keep = np.array(
            [Fraction(1) if a >= b else a / b for a, b in zip(own_values, target_values)],
            dtype=object,
        )
        rest = np.array(
            [max(a - b, Fraction(0)) for a, b in zip(own_values, target_values)], dtype=object
        )
        rejected = 1 - sum(q[()] * keep)
        again = rest / sum(rest) if sum(rest) else p[()]
        result = marginal_vector(heads, 3)
        assert list(result) == list(q[()] * keep + rejected * again)
        if odds > 10**6:
            assert total_variation(result, p[()]) < Fraction(1, 10**9)


def test_wider_sigmoid_range_accepts_more() -> None:
    """The chance of every draft rises with `high`."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.1, 0.2, 0.7], [0.6, 0.3, 0.1]))
    for token in range(3):
        accepted = [
            float(Sigmoid(high=high).acceptance_chances(Siblings([token], p, q))[0])
            for high in (0.5, 1.0, 10.0, 1000.0)
        ]
        assert accepted == sorted(accepted) and accepted[-1] > 0.99


# Greedy decoding that forgives


def random_rounds(
    chain: bool, count: int = 40, vocab: int = 9, nodes: int = 9
) -> tuple[TokenTree, Tensor]:
    """Random trees of distinct siblings, many of whose nodes are the likeliest token, with logits
    [B, N, V], some nearly flat."""
    logits = torch.randn(count, nodes, vocab) * torch.rand(count, nodes, 1) * 3
    order = logits.argsort(-1, descending=True).tolist()
    tokens = torch.zeros(count, nodes, dtype=torch.int64)
    parents = torch.full((count, nodes), -1)
    for row in range(count):
        left = [list(ranked) for ranked in order[row]]  # what each node's children may still be
        for node in range(1, nodes):
            above = node - 1 if chain else int(torch.randint(0, node, ()))
            index = (
                0 if torch.rand(()) < 0.6 else int(torch.randint(0, min(3, len(left[above])), ()))
            )
            tokens[row, node], parents[row, node] = (
                left[above].pop(min(index, len(left[above]) - 1)),
                above,
            )
    tree = TokenTree.from_parents(tokens, parents)
    return tree, logits


def judge_tree(
    rule: AcceptanceRule, tree: TokenTree, logits: Tensor
) -> list[tuple[list[int], int]]:
    """Return the accepted nodes of every row, and the token after them."""
    result = rule(tree, logits, torch.arange(len(logits)), tree.depths)
    return [
        (path[:count], bonus)
        for path, count, bonus in zip(
            result.path.tolist(), result.counts.tolist(), result.bonus.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize(
    "rule, chain",
    [(Rollback(0), False), (Rollback(0), True), (LooseMatch(entropy=1.0, window=1), True)],
)
def test_relaxed_rule_without_forgiveness_is_greedy(rule: RelaxedRule, chain: bool) -> None:
    """At the strict end paths and tokens are those of the greedy rule."""
    tree, logits = random_rounds(chain)
    greedy = judge_tree(Greedy(), tree, logits)
    assert judge_tree(rule, tree, logits) == greedy
    assert len({len(path) for path, _ in greedy}) > 2


@pytest.mark.parametrize(
    "rules, chain",
    [
        ([Rollback(x) for x in (0, 0.5, 1, 2, 9)], False),
        ([LooseMatch(entropy=x, window=2) for x in (1.0, 0.8, 0.5, 0.2, 0.0)], True),
        ([LooseMatch(entropy=0.3, window=x) for x in (9, 4, 2, 1)], True),
    ],
    ids=["bild", "entropy", "window"],
)
def test_looser_threshold_accepts_a_superset(rules: list[RelaxedRule], chain: bool) -> None:
    """On fixed rounds every path goes on where that of the stricter threshold ended, and some
    do.
    """
    tree, logits = random_rounds(chain)
    result = [judge_tree(rule, tree, logits) for rule in rules]
    for strict, loose in itertools.pairwise(result):
        assert all(longer[: len(path)] == path for (path, _), (longer, _) in zip(strict, loose))
    assert sum(len(path) for path, _ in result[-1]) > sum(len(path) for path, _ in result[0])


def test_rollback_ends_at_the_first_distant_draft() -> None:
    """A chain is accepted up to the first draft with -log p beyond the threshold that is not the
    most likely token.
    """
    tree, logits = random_rounds(True)
    log_p = logits.log_softmax(-1)
    for row, (path, bonus) in enumerate(judge_tree(Rollback(1.2), tree, logits)):
        tokens = tree.tokens[row].tolist()
        far = [
            node
            for node in range(1, len(tokens))
            if -log_p[row, node - 1, tokens[node]] > 1.2
            and tokens[node] != int(logits[row, node - 1].argmax())
        ]
        accepted = min(far, default=len(tokens))
        assert path == list(range(accepted)) and bonus == int(logits[row, accepted - 1].argmax())


def decode_by_hand(
    small: Target, large: Target, prompt: list[int], count: int, fallback: float, rollback: float
) -> list[int]:
    """Decode as BiLD's paper does: the small model goes on, up to four tokens, until it is unsure;
    the large one reads them, goes back to the first that is too far from its own prediction, if
    any, and adds the next token."""

    def log_p_after(model: Target, text: list[int]) -> Tensor:
        logits = model.run(torch.tensor([text]), ForwardPlan(logits=True)).logits
        assert logits is not None
        return logits[0].log_softmax(-1)

    text = [*prompt, int(log_p_after(large, prompt)[-1].argmax())]
    while len(text) < len(prompt) + count:
        drafts: list[int] = []
        while (
            len(drafts) < 4
            and (likely := log_p_after(small, text + drafts)[-1].max(0)).values.exp() >= fallback
        ):
            drafts.append(int(likely.indices))
        log_p = log_p_after(large, text + drafts)[len(text) - 1 :]
        own = log_p.argmax(-1).tolist()
        far = [
            n for n, draft in enumerate(drafts) if -log_p[n, draft] > rollback and draft != own[n]
        ]
        accepted = min(far, default=len(drafts))
        text += [*drafts[:accepted], own[accepted]]
    return text[len(prompt) : len(prompt) + count]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("fallback", [0.0, 0.3])
@pytest.mark.parametrize("rollback", [0.0, 3.0])
def test_bild_applies_both_thresholds(fallback: float, rollback: float) -> None:
    """Decoding with acceptance=bild and tree.stop writes what BiLD writes, and at rollback 0
    what the target writes.
    """
    target = cut_tiny(3)
    drafter = Causal(target, num_layers=2).eval()
    chain = Chain(4, stop=fallback, stop_on="token")
    depths = set()
    for prompt in ([5, 6, 7, 8], [40, 41]):
        (result,) = decode(
            target, [prompt], Rollback(rollback), 16, drafter, chain, ignore_eos=True
        )
        assert result.output == decode_by_hand(
            drafter.model, target, prompt, 16, fallback, rollback
        )
        depths |= set(result.depths)
        if rollback == 0:
            assert (
                result.output == decode(target, [prompt], Greedy(), 16, ignore_eos=True)[0].output
            )
    assert (len(depths) > 1) == bool(fallback)


@pytest.mark.parametrize("entropy, window", [(0.0, 1), (0.5, 2), (0.7, 1)])
def test_deviation_is_forgiven_where_the_target_agrees_afterwards(
    entropy: float, window: int
) -> None:
    """A chain is accepted up to the first deviation where the target was sure, or whose window has
    another deviation or is incomplete."""
    tree, logits = random_rounds(True)
    forgiven = 0
    for row, (path, _) in enumerate(judge_tree(LooseMatch(entropy, window), tree, logits)):
        tokens = tree.tokens[row].tolist()
        right = [
            True,
            *(
                tokens[node] == int(logits[row, node - 1].argmax())
                for node in range(1, len(tokens))
            ),
        ]
        accepted = 1
        while accepted < len(tokens):
            p = logits[row, accepted - 1].softmax(-1)
            doubt = float(-(p * p.log()).sum()) / math.log(len(p))
            later = right[accepted + 1 : accepted + 1 + window]
            if not right[accepted] and not (
                doubt > entropy and len(later) == window and all(later)
            ):
                break
            forgiven += not right[accepted]
            accepted += 1
        assert path == list(range(accepted))
    assert forgiven


def test_likeliest_forgiven_child_is_accepted() -> None:
    """The most likely token's child comes first, then the child with most chance; nodes that
    only draft are never accepted.
    """
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 4, -1)
    tree = TokenTree.from_parents(torch.tensor([[0, 2, 1, 1]]), torch.tensor([[-1, 0, 0, 0]]))
    assert judge_tree(Rollback(2.0), tree, logits) == [([0, 2], 0)]
    with_right = TokenTree.from_parents(torch.tensor([[0, 2, 1, 0]]), torch.tensor([[-1, 0, 0, 0]]))
    assert judge_tree(Rollback(2.0), with_right, logits) == [([0, 3], 0)]
    hidden = TokenTree(
        tree.tokens, tree.parents, tree.valid, torch.tensor([[True, True, False, False]])
    )
    assert judge_tree(Rollback(2.0), hidden, logits) == [([0, 1], 0)]


def test_rules_without_features_need_logits_only() -> None:
    """Judging by logits and by all outputs of the target is the same."""
    tree, logits = random_rounds(False, count=5)
    features = Features(tree.tokens, ("final",), torch.randn(*tree.tokens.shape, 1, 7), logits)
    for rule in (Greedy(), Rollback(1.0)):
        result = rule.accept(tree, features, torch.arange(5), tree.depths)
        assert torch.equal(result.path, rule(tree, logits, torch.arange(5), tree.depths).path)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Deferral(alpha=math.nan), r"acceptance\.alpha=nan: use a number"),
        (
            lambda: BoundedSampling(bias=1.1),
            r"acceptance\.bias=1\.1: it is a total variation; use 0 to 1",
        ),
        (
            lambda: Sigmoid(low=1.0, high=1.0),
            r"acceptance\.high=1\.0: use more than acceptance\.low=1\.0",
        ),
        (lambda: Fuzzy(divergence=-0.1), r"acceptance\.divergence=-0\.1: use 0 nats or more"),
        (lambda: Rollback(-1), r"acceptance\.rollback=-1: use 0 nats or more"),
        (lambda: LooseMatch(entropy=1.5), r"acceptance\.entropy=1\.5: it is a share"),
        (lambda: LooseMatch(window=0), r"acceptance\.window=0: use 1 or more"),
    ],
)
def test_invalid_settings_of_lossy_rules_are_refused(
    make: Callable[[], AcceptanceRule], words: str
) -> None:
    """A setting out of its range is refused under its own name, with what to use."""
    with pytest.raises(UserError, match=words):
        make()

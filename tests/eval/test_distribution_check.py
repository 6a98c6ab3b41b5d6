"""The check of distributions by real decoding, on a target whose next-token table is enumerated."""

from typing import Any

import pytest

from spectrain.decoding.acceptance import AcceptanceRule, Match, TypicalAcceptance
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.sequential import (
    RandomSource,
    SequentialRule,
    VerifiedTree,
    normalize_weights,
)
from spectrain.eval import distribution_check
from spectrain.eval.columns import format_identical
from spectrain.eval.distribution_check import DistributionCheck, enumerate_texts
from spectrain.eval.identity import Identity
from spectrain.eval.notes import describe_distribution, describe_identity
from spectrain.eval.systems import Decoder, System
from spectrain.trees import Chain, Static, TreeBuilder
from tests.decoding.known_target import PATHS, P, Table, speed_up
from tests.decoding.known_target import make_known_target as make_target

PROMPTS = [[0], [1, 0]]


def check_rule(
    rule: AcceptanceRule, builder: TreeBuilder, num_texts: int, batch_size: int = 2500
) -> dict[str, Any]:
    target = make_target()
    system = System("drafter", "drafter", Table(), builder, rule)
    decoder = Decoder(target, rule.matching_rule())
    return DistributionCheck(decoder, PROMPTS, num_texts, batch_size).run([system])["drafter"]


def p_values(entry: dict[str, Any]) -> dict[str, float]:
    return {test["name"]: test["p_value"] for test in entry["tests"]}


def test_enumerated_texts_have_the_tables_of_the_target() -> None:
    """Every text's probability is the product of its tokens' rows, and all add up to 1."""
    enumerated = enumerate_texts(make_target(), Match(temperature=0.7), [0], 3)
    assert enumerated is not None
    rows = (P.double() ** (1 / 0.7)).div((P.double() ** (1 / 0.7)).sum(-1, keepdim=True))
    assert len(enumerated.joint) == 27 and sum(enumerated.joint.values()) == pytest.approx(1)
    for (first, second, third), chance in enumerated.joint.items():
        expected = rows[0, first] * rows[first, second] * rows[second, third]
        assert chance == pytest.approx(float(expected), rel=1e-5)
    assert enumerated.marginal(0)[1,] == pytest.approx(float(rows[0, 1]), rel=1e-5)


@pytest.mark.parametrize("is_enumerated", [True, False])
def test_lossless_rules_pass_and_lossy_rules_do_not(
    is_enumerated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against tables and against a second sample; what the score says follows."""
    if not is_enumerated:
        monkeypatch.setattr(distribution_check, "MAX_CONTEXTS", 5)
    exact = check_rule(speed_up(SpeculativeSampling)(seed=3), Chain(3, "sampled"), 600)
    reference = "known next-token tables" if is_enumerated else "plain sampling"
    assert exact["verdict"] == "same" and exact["reference"] == reference
    assert exact["drafted_rounds"] > 0 and 0 < exact["visible_distance"] < 0.5
    identity = Identity("chain", True, "the target's distribution", distribution=exact).summary()
    assert identity["lossless"] is True and identity["checked"] == 600
    assert identity["evidence"] == "distribution" and format_identical(identity) == (
        "in distribution"
    )
    assert "No difference from the target's" in next(describe_distribution(identity))
    lossy = check_rule(TypicalAcceptance(epsilon=0.01), Chain(3, "sampled"), 600)
    assert lossy["verdict"] == "different" and "text" in lossy["different"]
    low, high = lossy["total_variation_ci95"]
    assert 0.1 < low < lossy["total_variation"] < high < 1
    identity = Identity("typical", False, "none", distribution=lossy).summary()
    assert identity["lossless"] is False and format_identical(identity) == "lossy"
    assert "DIFFERENT from the target's" in next(describe_distribution(identity))


class DrawsAgainFromTarget(SpeculativeSampling):
    """Forgets the residual: after a rejected draft it draws from p, so that drafts are too
    frequent.
    """

    __call__ = SequentialRule.__call__

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path, _ = super().select_path(tree, random)
        return path, random.draw_token(tree.p(path[-1]), path[-1])


class KeepsToken(SpeculativeSampling):
    """Judges a draft by the square root of p / q, as with a q of another temperature."""

    __call__ = SequentialRule.__call__

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while tree.children[path[-1]]:
            node = path[-1]
            (child,) = tree.children[node]
            p, q, token = tree.p(node), tree.q(node), tree.tokens[child]
            if not random.flip_coin(min(1.0, float(p[token] / q[token])) ** 0.5, node, 0):
                return path, random.draw_token(normalize_weights((p - q).clip(0), p), node)
            path.append(child)
        return path, random.draw_token(tree.p(path[-1]), path[-1])


@pytest.mark.parametrize("rule", [DrawsAgainFromTarget, KeepsToken])
def test_a_wrong_rule_that_calls_itself_lossless_is_caught(rule: type[SpeculativeSampling]) -> None:
    """The score says so in all places where it speaks of losslessness."""
    entry = check_rule(speed_up(rule)(seed=2), Chain(3, "sampled"), 600)
    assert rule.lossless and entry["verdict"] == "different", p_values(entry)
    identity = Identity("chain", True, "the target's distribution", distribution=entry).summary()
    assert identity["lossless"] is False and format_identical(identity) == "DIFFERENT"


def test_texts_without_drafts_check_nothing() -> None:
    """They agree, but say nothing about the rule."""
    entry = check_rule(speed_up(SpeculativeSampling)(seed=3), Chain(3, "sampled", stop=0.999), 200)
    assert entry["verdict"] == "unknown" and entry["drafted_rounds"] == 0
    identity = Identity("chain", True, "the target's distribution", distribution=entry).summary()
    assert identity["lossless"] is None and format_identical(identity) == "not checked"
    assert "says nothing about the rule" in next(describe_distribution(identity))


def test_nothing_is_called_lossless_unchecked() -> None:
    """Without a comparison the answer is null; a difference in distribution makes it false."""
    unchecked = Identity("block", True, "the target's distribution").summary()
    assert unchecked["lossless"] is None and unchecked["declared"] is True
    assert unchecked["evidence"] == "by construction" and unchecked["checked"] == 0
    assert "eval.check=distribution" in describe_identity(unchecked)
    different = {"verdict": "different", "texts": 100}
    entry = Identity("block", True, "the target's distribution", distribution=different).summary()
    assert entry["lossless"] is False and "NOT LOSSLESS" in describe_identity(entry)
    assert format_identical(entry) == "DIFFERENT"


@pytest.mark.slow
@pytest.mark.parametrize("is_enumerated", [True, False])
def test_a_coin_that_two_rounds_share_is_detected(
    is_enumerated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With coins keyed by position alone, block verification uses a failed coin again in the next
    round. The check calls that different; the rule as it is passes with the same seeds.
    """
    if not is_enumerated:
        monkeypatch.setattr(distribution_check, "MAX_CONTEXTS", 5)
    count = 4_000 if is_enumerated else 10_000
    rule = speed_up(Block)
    assert check_rule(rule(seed=5), Chain(3, "sampled"), count)["verdict"] == "same"
    monkeypatch.setattr(Block, "revisits_positions", False)
    planted = check_rule(rule(seed=5), Chain(3, "sampled"), count)
    assert planted["verdict"] == "different", p_values(planted)
    assert planted["total_variation_ci95"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("rule", "builder"),
    [
        (Block(seed=1), Chain(3, "sampled", seed=1)),
        (RecursiveRejection(seed=1), Static(paths=PATHS, children="without_replacement", seed=1)),
    ],
    ids=["block", "recursive"],
)
def test_rules_pass_in_batches_of_any_size(
    rule: AcceptanceRule, builder: TreeBuilder, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution_check, "TEXTS_TOGETHER", 1)
    assert check_rule(rule, builder, 1_000, batch_size)["verdict"] == "same"

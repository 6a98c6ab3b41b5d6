"""An inner drafter with a helper drafts what it drafts alone, in fewer forwards; past the
handover the helper drafts.
"""

from typing import Any

import pytest
import torch

from spectrain.config.build import build
from spectrain.config.choices import list_constructors
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import SpeculativeSampling
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.token_tree import TokenTree
from spectrain_research.dyspec.builder import DySpec
from tests.decoding.rounds import Keeping, begun, proposed
from tests.drafters.forced import Probe

LIMIT = 16
SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
INNER = {"choice": "causal", "num_layers": 2}
EAGLE3 = {"choice": "eagle3", "vocab_size": 512}
HELPERS: dict[str, Any] = {
    "copies": "ngram",
    "store": "retrieval",
    "one alike": INNER,
    "small model": {"choice": "causal", "architecture": SMALL},
    "features": {"choice": "medusa", "num_heads": 4, "vocab_size": 512},
    "cascade": {
        "choice": "cascade",
        "inner": {"choice": "causal", "num_layers": 1},
        "helper": "ngram",
        "ahead": 2,
    },
}


@pytest.fixture(scope="module")
def prompts(shallow: Target) -> list[list[int]]:
    texts = (
        "one two three four one two three four one two",
        "The bees find the hive. The bees",
        "What is it?",
    )
    return [shallow.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def make_drafter(target: Target, family: str = "cascade", **settings: Any) -> Any:
    torch.manual_seed(0)
    return build(
        {"_target_": list_constructors("drafter")[family], **settings}, target=target
    ).eval()


def collect_trees(
    target: Target, prompts: list[list[int]], drafter: Drafter, builder: TreeBuilder, rule: Any
) -> list[TokenTree]:
    recorder = Keeping(builder)
    decode(target, prompts, rule, LIMIT, drafter, recorder, ignore_eos=True)
    return recorder.trees


def record_forwards(drafter: Any) -> list[int]:
    """Record the number of nodes of every forward of a small model from now on."""
    node_counts: list[int] = []
    run = drafter.model.run
    drafter.model.run = lambda tokens, plan: (
        node_counts.append(tokens.shape[1]) or run(tokens, plan)
    )
    return node_counts


@pytest.mark.sweep(1)
@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "builder, rule",
    [
        (Chain(5), Greedy()),
        (Chain(5, "sampled"), SpeculativeSampling()),
        (Eagle2(3, 8, 3), Match()),
        (DySpec(3, 6), Match()),
        (Chain(5, stop=0.05), Greedy()),
    ],
    ids=["chain", "drawn", "eagle2", "dyspec", "stopping"],
)
def test_what_is_drafted_for_says_the_same(
    shallow: Target,
    prompts: list[list[int]],
    helper: str,
    batch: int,
    builder: TreeBuilder,
    rule: Any,
) -> None:
    """Every tree of the decoding, and its q, is that of the inner drafter alone, whichever
    helper guesses.
    """
    reference = collect_trees(
        shallow, prompts[:batch], make_drafter(shallow, "causal", num_layers=2), builder, rule
    )
    actual = collect_trees(
        shallow,
        prompts[:batch],
        make_drafter(shallow, inner=INNER, helper=HELPERS[helper], ahead=3),
        builder,
        rule,
    )
    assert len(actual) == len(reference)
    for tree, expected in zip(actual, reference):
        assert torch.equal(tree.tokens, expected.tokens) and torch.equal(
            tree.parents, expected.parents
        )
        assert torch.equal(tree.valid, expected.valid)
        if expected.q is not None and tree.q is not None:
            torch.testing.assert_close(tree.q, expected.q, atol=1e-5, rtol=1e-4)


def test_right_guesses_save_forwards(shallow: Target, prompts: list[list[int]]) -> None:
    """A helper that is the inner drafter itself guesses right: for a chain of 7 with 3 guesses per
    forward, three forwards remain of seven, that of the root and two more, which run four nodes and
    two."""
    drafter = make_drafter(shallow, inner=INNER, helper=INNER, ahead=3)
    drafter.helper.load_state_dict(drafter.inner.state_dict())
    builder = Chain(7)
    context = begun(shallow, prompts[:1], drafter, builder)
    node_counts = record_forwards(drafter.inner)
    proposed(drafter, context, builder)
    assert node_counts[1:] == [4, 2]
    alone = make_drafter(shallow, "causal", num_layers=2)
    context = begun(shallow, prompts[:1], alone, builder)
    node_counts = record_forwards(alone)
    proposed(alone, context, builder)
    assert node_counts[1:] == [1] * 6


def test_right_guesses_save_forwards_of_trees(shallow: Target, prompts: list[list[int]]) -> None:
    """With dynamic trees a helper that is the inner drafter itself guesses with which nodes the
    tree goes on, so the four forwards of a tree of depth 5, of three nodes each, become two."""
    drafter = make_drafter(shallow, inner=INNER, helper=INNER, ahead=2)
    builder = Eagle2(5, 12, 3)
    drafter.helper.load_state_dict(drafter.inner.state_dict())
    context = begun(shallow, prompts[:2], drafter, builder)
    node_counts = record_forwards(drafter.inner)
    tree = proposed(drafter, context, builder)
    assert node_counts[1:] == [9, 3]
    alone = make_drafter(shallow, "causal", num_layers=2)
    context = begun(shallow, prompts[:2], alone, builder)
    node_counts = record_forwards(alone)
    assert (
        torch.equal(proposed(alone, context, builder).tokens, tree.tokens)
        and node_counts[1:] == [3] * 4
    )


@pytest.mark.parametrize("helper", ["copies", "small model", "features"])
def test_deeper_than_the_handover_the_helper_speaks(
    shallow: Target, prompts: list[list[int]], helper: str
) -> None:
    """Along a path, log q is the inner drafter's down to the depth of `handover`, and the
    helper's from there on.
    """
    path = [[40], [41], [42]], [[0], [1], [2]]
    probe = Probe(*(([token], [parent]) for token, parent in zip(*path)))

    def draft_log_q(drafter: Any) -> list[torch.Tensor]:
        proposed(drafter, begun(shallow, prompts[:1], drafter, probe), probe)
        return probe.log_q

    drafter = make_drafter(shallow, inner=INNER, helper=HELPERS[helper], ahead=2, handover=2)
    cascade_log_q = draft_log_q(drafter)
    inner_log_q = draft_log_q(drafter.inner)
    other = make_drafter(shallow, inner=HELPERS[helper], helper="ngram", ahead=0, handover=4)
    other.inner.load_state_dict(drafter.helper.state_dict())
    helper_log_q = draft_log_q(other)
    for depth, log_q in enumerate(cascade_log_q):
        torch.testing.assert_close(
            log_q.exp(),
            (inner_log_q if depth < 2 else helper_log_q)[depth].exp(),
            atol=1e-5,
            rtol=1e-4,
        )
    assert not torch.allclose(cascade_log_q[2].exp(), inner_log_q[2].exp())


def test_the_helper_takes_over_where_inner_ends(shallow: Target, prompts: list[list[int]]) -> None:
    """Two heads draft two tokens, so the chain of a later handover is that of a handover at
    their end.
    """
    heads = {"choice": "medusa", "num_heads": 2, "vocab_size": 512}
    drafters = [
        make_drafter(shallow, inner=heads, helper=INNER, ahead=0, handover=depth)
        for depth in (2, 4)
    ]
    drafters[1].load_state_dict(drafters[0].state_dict())
    builder = Chain(5)
    trees = [
        proposed(drafter, begun(shallow, prompts[:1], drafter, builder), builder)
        for drafter in drafters
    ]
    assert trees[0].tokens.shape == (1, 6) and torch.equal(trees[0].tokens, trees[1].tokens)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("rule", [Greedy(), Match(seed=3)], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    "settings",
    [
        {"handover": 2},
        {"qualify": 0.01},
        {"divergence": 0.7, "helper": HELPERS["small model"]},
        {"handover": 1, "ahead": 0, "inner": "medusa"},
    ],
    ids=str,
)
def test_output_is_the_targets(
    shallow: Target, prompts: list[list[int]], settings: dict[str, Any], rule: Any
) -> None:
    """Drafts of the helper and qualified drafts are verified: the tokens are those of decoding
    without a drafter.
    """
    expected = [generation.output for generation in decode(shallow, prompts, rule, LIMIT)]
    drafter = make_drafter(shallow, **{"inner": INNER, **settings})
    for builder in (Chain(4), Eagle2(3, 8, 3)):
        assert [
            generation.output
            for generation in decode(shallow, prompts, rule, LIMIT, drafter, builder)
        ] == expected


def test_the_qualifier_lets_good_guesses_pass(shallow: Target, prompts: list[list[int]]) -> None:
    """If every guess passes, the chain is the helper's, and q is the inner drafter's with two
    probabilities exchanged.
    """
    builder = Chain(4)

    def draft_chain(drafter: Any) -> list[int]:
        tokens: list[int] = (
            proposed(drafter, begun(shallow, prompts[:1], drafter, builder), builder)
            .tokens[0]
            .tolist()
        )
        return tokens

    helper = HELPERS["small model"]
    lenient, strict = (
        make_drafter(shallow, inner=INNER, helper=helper, qualify=share) for share in (1e-30, 1.0)
    )
    assert (
        draft_chain(lenient)
        == draft_chain(lenient.helper)
        != draft_chain(strict)
        == draft_chain(strict.inner)
    )
    probe = Probe(([[40]], [[0]]))
    sorted_log_q = []
    for drafter in (lenient, strict):
        proposed(drafter, begun(shallow, prompts[:1], drafter, probe), probe)
        sorted_log_q.append([log_q.sort().values for log_q in probe.log_q])
    for lenient_log_q, strict_log_q in zip(*sorted_log_q):
        torch.testing.assert_close(lenient_log_q, strict_log_q)


def test_a_helper_is_trusted_where_the_two_hardly_diverge(
    shallow: Target, prompts: list[list[int]]
) -> None:
    """At every node q is the helper's where the Jensen-Shannon divergence of the two, computed
    alone, is at most the threshold, and inner's elsewhere.
    """
    path = [[40], [41], [42], [43]], [[0], [1], [2], [3]]
    probe = Probe(*(([token], [parent]) for token, parent in zip(*path)))

    def draft_log_q(drafter: Any) -> list[torch.Tensor]:
        proposed(drafter, begun(shallow, prompts[:1], drafter, probe), probe)
        return list(probe.log_q)

    helper = HELPERS["small model"]
    strict = make_drafter(shallow, inner=INNER, helper=helper)
    turned = make_drafter(shallow, inner=helper, helper=INNER)
    for own, other in ((turned.inner, strict.helper), (turned.helper, strict.inner)):
        own.load_state_dict(other.state_dict())
    inner_log_q, helper_log_q = draft_log_q(strict), draft_log_q(turned)
    divergences = []
    for p, q in zip(inner_log_q, helper_log_q):
        mean = ((p.exp() + q.exp()) / 2).double()
        parts = [(x.double().exp() * (x.double() - mean.log())).sum().detach() for x in (p, q)]
        divergences.append(float(sum(parts)) / 2)
    # Between the second and the third of five.
    middle = sum(sorted(divergences)[1:3]) / 2
    for threshold in (0.0, middle, 0.7):
        drafter = make_drafter(shallow, inner=INNER, helper=helper, divergence=threshold)
        drafter.load_state_dict(strict.state_dict())
        for log_q, p, q, distance in zip(
            draft_log_q(drafter), inner_log_q, helper_log_q, divergences, strict=True
        ):
            expected = q if distance <= threshold else p
            torch.testing.assert_close(log_q.exp(), expected.exp(), atol=1e-5, rtol=1e-4)


def test_a_part_of_the_vocabulary_cannot_be_compared(
    shallow: Target, prompts: list[list[int]]
) -> None:
    drafter = make_drafter(shallow, inner=EAGLE3, helper=INNER, ahead=0, handover=2, divergence=0.1)
    with pytest.raises(UserError, match="inner drafts from a part of the vocabulary"):
        decode(shallow, prompts[:1], Greedy(), 4, drafter, Chain(3))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"divergence": -1.0}, "drafter.divergence=-1.0: use 0 nats or more"),
        ({"divergence": 0.1, "qualify": 0.5}, "drafter.qualify=0.5: a guess passes by a ratio"),
        ({"inner": EAGLE3}, "drafter.ahead=4: eagle3 cannot run several tokens"),
        ({"ahead": 0}, "drafter.ahead=0: the helper would not run"),
        ({"ahead": -1}, "drafter.ahead=-1: use 0 or more"),
        ({"handover": 0}, "drafter.handover=0: use 1 or more"),
        ({"qualify": 0.0}, "drafter.qualify=0.0: use more than 0"),
        ({"helper": "early_exit"}, "drafter.helper=early_exit: it runs the target"),
        (
            {"helper": {"choice": "hybrid", "inner": EAGLE3}},
            "drafter.helper=hybrid: it runs the target, .* or adds nodes",
        ),
        ({"ahead": 0, "handover": 2, "inner": "self"}, "drafter.inner=self: it runs the target"),
        (
            {"ahead": 0, "handover": 2, "inner": "jacobi"},
            "drafter.inner=jacobi: it runs the target",
        ),
        (
            {"ahead": 0, "handover": 2, "inner": "chosen"},
            "drafter.inner=chosen: it runs the target",
        ),
    ],
)
def test_cascades_refuse(shallow: Target, settings: dict[str, Any], message: str) -> None:
    """A setting that cannot work is refused under its key."""
    with pytest.raises(UserError, match=message):
        make_drafter(shallow, **settings)

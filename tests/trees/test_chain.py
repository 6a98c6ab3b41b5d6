"""Chains equal a plain Python walk over random probability tables."""

from collections.abc import Callable

import pytest
import torch

from spectrain.errors import UserError
from spectrain.trees import Chain
from spectrain.trees.token_tree import Children
from tests.trees.tables import (
    ROWS,
    VOCAB,
    Path,
    Table,
    assert_rows_alone,
    context,
    grow_tree,
    node_noise,
    paths,
    random_scores,
    soft_scores,
    to_target,
)


def draft_chain(row: int, builder: Chain) -> list[Path]:
    """Return the chain of a row, which ends before the product of the largest q falls below
    `stop`.
    """
    result: list[Path] = [()]
    confidence = 1.0
    for node in range(builder.depth):
        log_q = (torch.tensor(random_scores(row, result[-1])) / builder.temperature).log_softmax(-1)
        confidence *= float(log_q.exp().max())
        if confidence < builder.stop:
            break
        if builder.children != "deterministic":
            log_q = log_q + node_noise(
                row, builder.seed, node, 0 if builder.children == "sampled" else None
            )
        result.append(result[-1] + (to_target(int(log_q.argmax())),))
    return result


@pytest.mark.sweep(8)
@pytest.mark.parametrize("children", ["deterministic", "sampled", "without_replacement"])
@pytest.mark.parametrize("stop", [0.0, 0.2, 0.5, 0.7])
@pytest.mark.parametrize("depth, temperature, seed", [(1, 1.0, 0), (2, 0.6, 1), (5, 1.0, 2)])
def test_chain_equals_plain_python(
    children: Children, stop: float, depth: int, temperature: float, seed: int
) -> None:
    """Each token is the likeliest or the drawn one, and a row ends exactly where its confidence
    does.
    """

    def make_chain() -> Chain:
        return Chain(depth, children, temperature, seed, stop)

    tree = grow_tree(make_chain)
    assert tree.is_chain and make_chain().budget == depth + 1
    for row in ROWS:
        assert paths(tree, row) == draft_chain(row, make_chain())
    assert_rows_alone(make_chain)


def test_rows_stop_at_different_depths() -> None:
    """The tables above do make one row of a batch stop before the other."""
    assert len({len(draft_chain(row, Chain(5, stop=0.2))) for row in ROWS}) == 2


def test_empty_draft_gives_the_root_alone() -> None:
    """Where no row is sure enough of its first token, the tree is the root and the drafter runs
    no further node.
    """
    table = Table(soft_scores)
    tree = Chain(3, stop=0.999).expand(context(), table)
    assert (
        tree.tokens.tolist() == [[101], [102]]
        and tree.valid.all()
        and len(table.evaluated_paths[0]) == 1
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_chain_is_distributed_as_q(temperature: float) -> None:
    """Over many rows, the pairs of tokens come as often as q at the first times q at the second,
    by chi-squared.
    """
    rows = range(6000)
    tree = Chain(2, "sampled", temperature).expand(
        context(rows), Table(lambda row, path: soft_scores(0, path), rows)
    )
    observed = torch.zeros(VOCAB, VOCAB)
    expected = torch.zeros(VOCAB, VOCAB)
    first = (torch.tensor(soft_scores(0, ())) / temperature).softmax(-1)
    for v in range(VOCAB):
        expected[v] = (
            len(rows)
            * first[v]
            * (torch.tensor(soft_scores(0, (to_target(v),))) / temperature).softmax(-1)
        )
    for token, following in ((tree.tokens[:, 1:] - 3) // 7).tolist():
        observed[token, following] += 1
    # 35 degrees of freedom, one run in 10,000 is above
    assert ((observed - expected) ** 2 / expected).sum() < 74.9


@pytest.mark.parametrize(
    "build, key",
    [
        (lambda: Chain(0), "tree.depth=0"),
        (lambda: Chain(stop=1.0), "tree.stop=1.0"),
        (lambda: Chain(stop=-0.1), "tree.stop=-0.1"),
        (lambda: Chain(children="sampled", temperature=0.0), "tree.temperature=0.0"),
    ],
)
def test_chain_refuses_invalid_settings(build: Callable[[], object], key: str) -> None:
    """Settings that mean nothing are refused under their key."""
    with pytest.raises(UserError, match=key):
        build()

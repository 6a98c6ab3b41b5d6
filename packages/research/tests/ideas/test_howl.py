"""HOWL: each round and text has copies or the drafter's tree, by a plain version of the choice,
and the output is greedy.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from spectrain.copying.trie import Trie
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.owl.howl import FIRST_ROUNDS, Howl, make_tries, promised_tokens
from tests.decoding.rounds import Keeping

PROMPTS = [[5, 7, 9, 5, 7, 9, 5, 7], [40, 50, 60, 40]]
LIMIT = 40
OWL = {"choice": "owl"}
CAUSAL = {"choice": "causal", "num_layers": 1}


class RecordingHowl(Howl):
    """Records, by round, what copies promised, the active texts, the choices, and what was
    emitted.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.records: list[tuple[list[float], list[bool], list[bool], list[int], bool]] = []

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        promised = [
            promised_tokens(proposal.trie, context.builder) for proposal in self.copying.proposals
        ]
        emitted = context.num_new.tolist()
        active = [count > 0 for count in emitted]
        self.records.append((promised, active, self.uses_copies, emitted, self.skippable.is_active))
        super().commit(context, accepted)


@pytest.mark.parametrize("builder", [Chain(4), Eagle2(4, 10, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("inner", [OWL, CAUSAL], ids=["owl", "causal"])
def test_rounds_have_what_promises_more(
    shallow: Target, inner: dict[str, Any], builder: Chain
) -> None:
    """The choices are those of a plain version; OWL is never skipped, because its masks follow
    copies too.
    """
    torch.manual_seed(0)
    drafter = RecordingHowl(shallow, inner).eval()
    generations = decode(
        shallow, PROMPTS, Greedy(), LIMIT, drafter, Keeping(builder), ignore_eos=True
    )
    assert [row.output for row in generations] == [
        row.output for row in decode(shallow, PROMPTS, Greedy(), LIMIT, ignore_eos=True)
    ]
    drafted: list[int] = []
    num_copied = 0
    for promised, active, uses, emitted, ran in drafter.records:
        mean = sum(drafted) / max(1, len(drafted))
        expected = [
            is_copied and len(drafted) >= FIRST_ROUNDS and tokens > mean
            for is_copied, tokens in zip(active, promised)
        ]
        assert [is_copied for is_copied, is_active in zip(uses, active) if is_active] == [
            is_copied for is_copied, is_active in zip(expected, active) if is_active
        ]
        assert ran == (inner is OWL or expected != active)
        drafted += [count for count, is_copied in zip(emitted, expected) if count and not is_copied]
        assert len(drafted) < drafter.memory, "the mean is over all of them"
        num_copied += sum(expected)
    assert drafter.num_copied >= num_copied > 0 and len(drafted) > FIRST_ROUNDS


def test_a_trees_trie_has_its_nodes() -> None:
    """Weights are the path's probabilities, padding is left out, and a chain promises its
    heaviest path.
    """
    tree = TokenTree.from_parents(
        torch.tensor([[9, 1, 2, 3]]),
        torch.tensor([[-1, 0, 0, 1]]),
        torch.tensor([[True, True, True, False]]),
    )
    trie = make_tries(replace(tree, scores=torch.tensor([[1.0, 0.5, 0.25, 0.1]]).log()))[0]
    assert trie.tokens == [-1, 1, 2] and trie.parents == [-1, 0, 0]
    assert trie.weights == pytest.approx([1.0, 0.5, 0.25])
    assert promised_tokens(trie, Chain(3)) == pytest.approx(1.5)
    assert (
        promised_tokens(trie, Eagle2(3, 8, 2)) == pytest.approx(1.75)
        and promised_tokens(Trie(), Chain(3)) == 1.0
    )


def test_a_copier_is_refused(shallow: Target) -> None:
    with pytest.raises(UserError, match="drafter.inner=ngram: it copies too"):
        Howl(shallow, "ngram")

"""Lookahead decoding: its tree is the paper's, its pool holds n-grams of text and answers, and
its output is the target's.
"""

import pytest
import torch
from torch import Tensor

from spectrain.copying.trie import Trie
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.base import drafting_cost
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.forward_plan import DEFAULT_PLAN, ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.lookahead.drafter import Lookahead
from spectrain_research.shared.guard import Guard
from spectrain_research.shared.phrase_pool import PhrasePool
from tests.trees.tables import check_structure

LIMIT = 28
TEXTS = (
    "The bees find the hive. The bees",
    "one two three four one two three four one two",
    "What is it?",
)
SIZES = [(1, 2, 1), (5, 4, 5), (3, 3, 2), (7, 5, 4)]
BUILDER = Eagle2(depth=4, budget=12)


class RecordingLookahead(Lookahead):
    """A drafter that records every tree, the target's token at each of its nodes, and the
    accepted path.
    """

    def __init__(self, target: Target, *options: int, pool_from_prompt: bool = True) -> None:
        super().__init__(target, *options, pool_from_prompt=pool_from_prompt)
        self.trees: list[TokenTree] = []
        self.target_tokens: list[Tensor] = []
        self.accepted: list[AcceptedPath] = []
        self.columns: list[list[list[list[int]]]] = []  # of every round and row

    def draft(self, context: Context) -> Draft:
        draft = super().draft(context)
        self.columns.append([[list(column) for column in row.columns] for row in self.sequences])
        return draft

    def verify(self, context: Context, tree: TokenTree) -> Features:
        self.trees.append(tree)
        features = super().verify(context, tree)
        assert features.logits is not None
        self.target_tokens.append(features.logits.argmax(-1))
        return features

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        super().commit(context, accepted)
        self.accepted.append(accepted)


class Bigram(Target):
    """A target whose greedy answer is a function of the last token alone, so that texts loop."""

    def __init__(self, shallow: Target, period: int) -> None:
        self.__dict__ = {**shallow.__dict__}
        self.period = period

    def run(self, tokens: Tensor, plan: ForwardPlan = DEFAULT_PLAN) -> Features:
        features = super().run(tokens, plan)
        if features.logits is None:
            return features
        next_tokens = 10 + (tokens[:, -features.logits.shape[1] :] + 1) % self.period
        logits = torch.zeros_like(features.logits).scatter_(2, next_tokens[..., None], 1.0)
        return Features(features.tokens, features.layers, features.hidden, logits)


@pytest.fixture(scope="module")
def prompts(shallow: Target) -> list[list[int]]:
    """Three prompts of different lengths."""
    return [shallow.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "builder", [BUILDER, Chain(3), Eagle2(depth=1, budget=3)], ids=["tree", "chain", "shallow"]
)
@pytest.mark.parametrize("batch, pool_from_prompt", [(1, False), (3, True)])
@pytest.mark.parametrize(
    "rule", [Greedy(), Match(temperature=0.8, seed=5)], ids=lambda rule: rule.name
)
def test_output_is_the_target_s(
    shallow: Target,
    prompts: list,
    sizes: tuple,
    pool_from_prompt: bool,
    builder: TreeBuilder,
    batch: int,
    rule: AcceptanceRule,
) -> None:
    """Greedy and sampled output equals autoregressive output, and no tree is larger than its
    stated size.
    """
    drafter = RecordingLookahead(shallow, *sizes, pool_from_prompt=pool_from_prompt)
    plain = decode(shallow, prompts[:batch], rule, LIMIT)
    generations = decode(shallow, prompts[:batch], rule, LIMIT, drafter, builder)
    assert [row.output for row in generations] == [row.output for row in plain]
    window, ngram, guesses = sizes
    for tree in drafter.trees:
        check_structure(tree)
        verified = tree.valid & tree.can_emit
        assert (tree.valid & ~tree.can_emit).sum(1).tolist() == [window * (ngram - 1)] * batch
        assert int((verified.sum(1)).max()) <= min(builder.budget, 1 + guesses * (ngram - 1))
        assert int((tree.depths * verified).max()) <= min(builder.depth, ngram - 1)
        assert tree.tokens.shape[1] <= builder.budget + drafting_cost(drafter).extra_nodes(builder)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_window_is_never_emitted(shallow: Target, prompts: list, sizes: tuple) -> None:
    """Every accepted node is one of the verified nodes, even where the window was right."""
    drafter = RecordingLookahead(shallow, *sizes, pool_from_prompt=False)
    target = Bigram(shallow, 1)  # it repeats one token, and so does the window soon
    decode(target, prompts, Greedy(), LIMIT, drafter, BUILDER, ignore_eos=True)
    is_right = False
    for tree, answers, accepted in zip(drafter.trees, drafter.target_tokens, drafter.accepted):
        assert tree.can_emit.gather(1, accepted.path).all()
        first = int(tree.can_emit[0].sum())  # the window's first node, a child of the root
        is_right |= bool((tree.tokens[:, first] == answers[:, 0]).all())
    assert is_right


@pytest.mark.sweep(2, free=("sizes",))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_mask_is_lookahead_s(shallow: Target, prompts: list, sizes: tuple) -> None:
    """A window token sees the text, level 0 up to its column and its own column above it; a
    guess sees its own path.
    """
    window, ngram, _ = sizes
    drafter = RecordingLookahead(shallow, *sizes)
    decode(shallow, prompts, Greedy(), LIMIT, drafter, BUILDER)
    for tree, columns in zip(drafter.trees, drafter.columns):
        first = tree.tokens.shape[1] - drafter.window_nodes
        for row in range(len(prompts)):
            for level in range(ngram - 1):
                for column in range(window):
                    node = first + level * window + column
                    visible = {0, *(first + i for i in range(column + 1))}
                    visible |= {first + j * window + column for j in range(level + 1)}
                    assert set(tree.ancestors[row, node].nonzero()[:, 0].tolist()) == visible
                    assert int(tree.depths[row, node]) == 1 + column + level
                    assert int(tree.tokens[row, node]) == columns[row][column][level]
        assert not tree.ancestors[:, :first, first:].any()


@pytest.mark.sweep(2, free=("sizes",))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_window_moves_by_a_jacobi_step(shallow: Target, prompts: list, sizes: tuple) -> None:
    """Level j takes the tokens of level j + 1, the last level the target's answers, and the
    window begins with the prompt's.
    """
    window, _, _ = sizes
    drafter = RecordingLookahead(shallow, *sizes)
    generations = decode(shallow, prompts, Greedy(), LIMIT, drafter, BUILDER, ignore_eos=True)
    for row, prompt in enumerate(prompts):
        assert {token for column in drafter.columns[0][row] for token in column} <= {
            *prompt,
            generations[row].output[0],
        }
        for turn in range(len(generations[row].round_lengths) - 1):
            answers = drafter.target_tokens[turn][row, -window:].tolist()
            expected = [
                [*column[1:], answer] for column, answer in zip(drafter.columns[turn][row], answers)
            ]
            assert drafter.columns[turn + 1][row] == expected


@pytest.mark.sweep(1)
@pytest.mark.parametrize("pool_from_prompt", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_pool_holds_what_was_said(
    shallow: Target, prompts: list, sizes: tuple, pool_from_prompt: bool
) -> None:
    """Each n-gram of the pool is from the text, or N answers of the target, one after another in
    a column.
    """
    window, ngram, guesses = sizes
    drafter = RecordingLookahead(shallow, *sizes, pool_from_prompt=pool_from_prompt)
    generations = decode(shallow, prompts, Greedy(), LIMIT, drafter, BUILDER, ignore_eos=True)
    # the last round may pass the limit
    plain = decode(shallow, prompts, Greedy(), LIMIT + ngram, ignore_eos=True)
    for row, prompt in enumerate(prompts):
        text = prompt + plain[row].output
        allowed = (
            {tuple(text[end - ngram : end]) for end in range(ngram, len(text) + 1)}
            if pool_from_prompt
            else set()
        )
        answers = [
            target_tokens[row, -window:].tolist()
            for target_tokens in drafter.target_tokens[: len(generations[row].round_lengths)]
        ]
        for turn in range(ngram, len(answers) + 1):
            allowed |= set(zip(*answers[turn - ngram : turn]))
        pool = drafter.sequences[row].pool.phrases
        assert {ngram for phrases in pool.values() for ngram in phrases} <= allowed and pool
        for token, phrases in pool.items():
            assert len(set(phrases)) == len(phrases) <= guesses and {
                ngram[0] for ngram in phrases
            } == {token}


def test_the_newest_guesses_remain(shallow: Target) -> None:
    """A first token keeps its newest n-grams, each once; the trie merges equal beginnings and
    stops at its budget.
    """
    drafter = Lookahead(shallow, window=1, ngram=3, guesses=3)
    decode(shallow, [[7, 8]], Greedy(), 2, drafter, BUILDER)
    (row,) = drafter.sequences
    row.pool = PhrasePool(3, 3)
    for ngram in [(5, 1, 2), (5, 3, 4), (5, 1, 6), (5, 3, 4), (5, 9, 9), (6, 1, 1)]:
        row.pool.add_phrase(ngram)
    assert row.pool.phrases == {5: [(5, 1, 6), (5, 3, 4), (5, 9, 9)], 6: [(6, 1, 1)]}
    row.pool.phrases[5].append((5, 3, 8))
    row.root = 5
    drafter.max_guesses = 4
    trie = Trie.from_continuations(row.find_guesses())
    nodes = {
        (depth, budget): trie.best_nodes(depth, budget)
        for depth, budget in ((2, 10), (2, 3), (1, 10), (2, 1))
    }
    assert [trie.tokens[node] for node in nodes[2, 10]] == [-1, 3, 8, 9, 9, 4, 1, 6]
    assert trie.parents == [-1, 0, 1, 0, 3, 1, 0, 6]
    assert [trie.tokens[node] for node in nodes[2, 3]] == [-1, 3, 8] and nodes[2, 1] == [0]
    assert [trie.tokens[node] for node in nodes[1, 10]] == [-1, 3, 9, 1]


@pytest.mark.parametrize("pool_from_prompt", [True, False])
def test_a_text_that_repeats_is_guessed(shallow: Target, pool_from_prompt: bool) -> None:
    """Where the answer is a loop of six tokens, full n-grams are soon accepted."""
    drafter = Lookahead(shallow, 5, 4, 5, pool_from_prompt)
    (generation,) = decode(
        Bigram(shallow, 6), [[40, 50, 60]], Greedy(), LIMIT * 2, drafter, BUILDER, ignore_eos=True
    )
    assert len(generation.output) == LIMIT * 2 and max(generation.round_lengths) == drafter.ngram
    assert sum(generation.complete_round_lengths) / len(generation.complete_round_lengths) > 2.5


@pytest.mark.sweep(2, free=("sizes",))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_batch_equals_its_rows_alone(shallow: Target, prompts: list, sizes: tuple) -> None:
    """Window and pool belong to one row, and a new decoding begins without them."""
    drafter = RecordingLookahead(shallow, *sizes)
    together = decode(
        shallow, prompts, Greedy(), LIMIT, drafter, BUILDER, sequence_ids=[4, 9, 2], ignore_eos=True
    )
    trees = drafter.trees
    for row, key in enumerate([4, 9, 2]):
        drafter.trees = []
        (alone,) = decode(
            shallow,
            [prompts[row]],
            Greedy(),
            LIMIT,
            drafter,
            BUILDER,
            sequence_ids=[key],
            ignore_eos=True,
        )
        assert (alone.output, alone.round_lengths) == (
            together[row].output,
            together[row].round_lengths,
        )
        for tree, expected in zip(drafter.trees, trees):
            assert torch.equal(tree.tokens[0], expected.tokens[row][expected.valid[row]])


class EveryOther(Guard):
    """A guard that drafts in every other round."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def should_draft(self) -> bool:
        self.turn += 1
        return self.turn % 2 == 0


def test_rounds_without_a_draft_are_caught_up_with(shallow: Target, prompts: list) -> None:
    """Text that was decoded without a draft is read too: the output does not change, and the
    pool has the text's n-grams.
    """
    drafter = Lookahead(shallow, 3, 3, 1000)
    plain = decode(shallow, prompts, Greedy(), LIMIT)
    generations = Session(shallow, Greedy(), drafter, BUILDER, changes=(EveryOther(),)).decode(
        prompts, LIMIT
    )
    for row, (prompt, generation) in enumerate(zip(prompts, generations)):
        assert generation.output == plain[row].output
        text = prompt + generation.output[: 1 + sum(generation.round_lengths[:-2])]
        pool = {
            ngram for phrases in drafter.sequences[row].pool.phrases.values() for ngram in phrases
        }
        assert {tuple(text[end - 3 : end]) for end in range(3, len(text) + 1)} <= pool


@pytest.mark.parametrize("option, value", [("window", 0), ("ngram", 1), ("guesses", 0)])
def test_settings_that_cannot_work_are_refused(shallow: Target, option: str, value: int) -> None:
    """The message names the setting and its least value."""
    with pytest.raises(UserError, match=rf"drafter.{option}={value}: use {value + 1} or more"):
        Lookahead(shallow, **{option: value})

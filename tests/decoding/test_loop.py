"""Drafted decoding gives the very tokens of autoregressive decoding, and counts them right."""

import pytest
import torch
from torch import Tensor

from spectrain.copying.trie import Trie
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.context import Context
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.identity import first_difference, logit_gap
from spectrain.features.batch import Batch
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Rollout, TreeBuilder
from spectrain.trees.base import Prefix
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from tests.decoding.rounds import placed, proposed
from tests.trees.tables import check_structure

LIMIT = 24
TEXTS = (
    "The bees find the hive. The bees",
    "one two three four one two three four one two",
    "What is it?",
)
RULES = (Greedy(), Match(seed=3))
BUILDERS = (Chain(3), Eagle2(depth=4, budget=8, top_k=3))


class Oracle(Drafter):
    """Proposes what it was told comes next, with a wrong token now and then where it `slips`.

    With an `inner` drafter it asks that one too, as any drafter is asked, and keeps its trees.
    """

    def __init__(
        self, texts: list[list[int]], slips: bool = False, inner: Drafter | None = None
    ) -> None:
        super().__init__()
        self.texts, self.slips, self.inner = texts, slips, inner
        self.layers = () if inner is None else inner.layers
        self.trees: list[TokenTree] = []

    def draft(self, context: Context) -> Draft:
        if self.inner is not None:
            self.trees.append(proposed(self.inner, context, context.builder))
        rows = []
        depth = context.builder.depth
        for row, (text, length) in enumerate(zip(self.texts, context.cache.lengths.tolist())):
            rows.append(text[length + 1 : length + 1 + depth])
            if self.slips:
                rows[-1][(context.round + 2 * row) % depth] ^= 1
        return Draft(continuations=[Trie.from_continuations([tokens]) for tokens in rows])

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        if self.inner is not None:
            self.inner.commit(context, accepted)


@pytest.fixture(scope="module")
def prompts(shallow: Target) -> list[list[int]]:
    """Three prompts of different lengths."""
    encoded = [shallow.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert len(set(map(len, encoded))) == 3
    return encoded


@pytest.fixture(scope="module")
def greedy(shallow: Target, prompts: list[list[int]]) -> list[list[int]]:
    """Return the outputs of transformers' own generate after each prompt."""
    with reference_model(shallow) as model:
        return [generate(model, prompt, LIMIT, shallow.stop_ids) for prompt in prompts]


@pytest.fixture(scope="module")
def drafters(shallow: Target) -> dict[str, Drafter]:
    """Drafters that guess badly."""
    torch.manual_seed(0)
    eagle3 = Eagle3(shallow, vocab_size=512)
    eagle3.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    return {"ngram": Ngram(shallow), "eagle3": eagle3.to(shallow.device, shallow.dtype).eval()}


def stop_at(monkeypatch: pytest.MonkeyPatch, *ids: int) -> None:
    """Let these tokens, and no others, end an answer."""
    monkeypatch.setattr(Target, "stop_ids", frozenset(ids))


def assert_same(target: Target, prompt: list[int], output: list[int], expected: list[int]) -> None:
    """Two greedy outputs are equal, but for a first difference between two nearly equal logits."""
    position = first_difference(output, expected)
    assert position is None or logit_gap(target, prompt + expected[:position]).is_tie


def assert_counted(generation: Generation, limit: int, stop_ids: frozenset[int]) -> None:
    """Rounds, output and the cut belong together, and nothing passes EOS or the limit."""
    output = generation.output
    accepted = generation.round_lengths
    assert all(
        1 <= count <= depth + 1 for count, depth in zip(accepted, generation.depths, strict=True)
    )
    assert 1 + sum(accepted[:-1]) < len(output) <= 1 + sum(accepted) or (
        not accepted and len(output) == 1
    )
    assert generation.is_cut == (len(output) < 1 + sum(accepted))
    assert len(output) <= limit and not stop_ids & set(output[:-1])
    assert len(output) == limit or output[-1] in stop_ids


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["ngram", "eagle3"])
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_drafting_equals_generate(
    shallow: Target,
    prompts: list,
    greedy: list,
    drafters: dict,
    name: str,
    builder: TreeBuilder,
    batch: int,
) -> None:
    """Drafted greedy output is that of transformers' generate and of autoregressive decoding,
    alone and in a batch.
    """
    plain = decode(shallow, prompts[:batch], Greedy(), LIMIT)
    drafted = decode(shallow, prompts[:batch], Greedy(), LIMIT, drafters[name], builder)
    for prompt, expected, alone, result in zip(prompts, greedy, plain, drafted):
        assert_same(shallow, prompt, alone.output, expected)
        assert_same(shallow, prompt, result.output, expected)
        assert_same(shallow, prompt, result.output, alone.output)
        assert_counted(result, LIMIT, shallow.stop_ids)
        assert alone.round_lengths == [1] * (len(alone.output) - 1) and alone.depths == [0] * (
            len(alone.output) - 1
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["ngram", "eagle3"])
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
@pytest.mark.parametrize("batch", [1, 3])
def test_match_drafting_equals_autoregressive_sampling(
    shallow: Target, prompts: list, drafters: dict, name: str, builder: TreeBuilder, batch: int
) -> None:
    """With the same seed, drafted sampling draws the tokens of autoregressive sampling."""
    rule = Match(temperature=0.8, top_k=50, top_p=0.95, seed=5)
    plain = decode(shallow, prompts[:batch], rule, LIMIT)
    drafted = decode(shallow, prompts[:batch], rule, LIMIT, drafters[name], builder)
    assert [result.output for result in drafted] == [alone.output for alone in plain]
    for result in drafted:
        assert_counted(result, LIMIT, shallow.stop_ids)


def test_a_batch_equals_its_rows_alone(shallow: Target, prompts: list, drafters: dict) -> None:
    """Sampling depends on the row key, not on what else is in the batch; other keys draw other
    tokens.
    """
    rule = Match(seed=1)
    together = decode(
        shallow, prompts, rule, LIMIT, drafters["eagle3"], BUILDERS[1], sequence_ids=[4, 9, 2]
    )
    for prompt, row, result in zip(prompts, [4, 9, 2], together):
        (alone,) = decode(
            shallow, [prompt], rule, LIMIT, drafters["eagle3"], BUILDERS[1], sequence_ids=[row]
        )
        assert (result.output, result.round_lengths) == (alone.output, alone.round_lengths)
    assert [result.output for result in decode(shallow, prompts, rule, LIMIT)] != [
        result.output for result in together
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("batch", [1, 3])
def test_perfect_drafter_fills_every_round(
    shallow: Target,
    prompts: list,
    monkeypatch: pytest.MonkeyPatch,
    rule: AcceptanceRule,
    batch: int,
) -> None:
    """An oracle of depth d emits d + 1 tokens a round, and the output does not change."""
    stop_at(monkeypatch)
    depth = 3
    prompts = prompts[:batch]
    plain = [result.output for result in decode(shallow, prompts, rule, LIMIT + depth + 1)]
    oracle = Oracle([prompt + output for prompt, output in zip(prompts, plain)])
    limit = 1 + 5 * (depth + 1)
    for result, expected in zip(decode(shallow, prompts, rule, limit, oracle, Chain(depth)), plain):
        assert (
            result.output == expected[:limit]
            and result.round_lengths == [depth + 1] * 5
            and not result.is_cut
        )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_partly_right_drafts_do_not_change_the_output(
    shallow: Target, prompts: list, monkeypatch: pytest.MonkeyPatch, rule: AcceptanceRule
) -> None:
    """Where each row of a ragged batch accepts its own number of drafted tokens, counts and
    outputs are as expected.
    """
    stop_at(monkeypatch)
    depth = 3
    plain = [result.output for result in decode(shallow, prompts, rule, LIMIT + depth + 1)]
    oracle = Oracle([prompt + output for prompt, output in zip(prompts, plain)], slips=True)
    for row, result in enumerate(decode(shallow, prompts, rule, LIMIT, oracle, Chain(depth))):
        assert result.output == plain[row][:LIMIT]
        assert result.round_lengths == [
            1 + (turn + 2 * row) % depth for turn in range(len(result.round_lengths))
        ]
        assert_counted(result, LIMIT, frozenset())


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7])
def test_output_ends_at_the_limit(
    shallow: Target, prompts: list, monkeypatch: pytest.MonkeyPatch, depth: int, limit: int
) -> None:
    """Output stops at the limit; the last round is cut where it would have gone past it."""
    stop_at(monkeypatch)
    (plain,) = decode(shallow, prompts[:1], Greedy(), limit + depth + 1)
    (result,) = decode(
        shallow, prompts[:1], Greedy(), limit, Oracle([prompts[0] + plain.output]), Chain(depth)
    )
    assert result.output == plain.output[:limit]
    assert result.round_lengths == [depth + 1] * -(-(limit - 1) // (depth + 1))
    assert result.is_cut == ((limit - 1) % (depth + 1) != 0)
    assert result.complete_round_lengths == [depth + 1] * ((limit - 1) // (depth + 1))


@pytest.mark.parametrize("index", range(8))
def test_eos_inside_an_accepted_path_ends_the_text(
    shallow: Target, prompts: list, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """EOS is the last token wherever in a round it falls, and the round is cut unless EOS was
    its last token.
    """
    stop_at(monkeypatch)
    # hot, so that tokens do not repeat
    rule = Match(temperature=2.0, seed=7)
    depth = 3
    (plain,) = decode(shallow, prompts[:1], rule, 20)
    index = plain.output.index(plain.output[index])
    stop_at(monkeypatch, plain.output[index])
    (result,) = decode(
        shallow, prompts[:1], rule, 12, Oracle([prompts[0] + plain.output]), Chain(depth)
    )
    assert result.output == plain.output[: index + 1]
    assert result.round_lengths == [depth + 1] * -(-index // (depth + 1))
    assert result.is_cut == (index % (depth + 1) != 0)
    assert_counted(result, 12, shallow.stop_ids)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["ngram", "eagle3"])
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
def test_finished_row_does_not_change_the_others(
    shallow: Target,
    prompts: list,
    drafters: dict,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    builder: TreeBuilder,
) -> None:
    """Rows that end at once, after a few tokens and at the limit give what each gives alone."""
    stop_at(monkeypatch)
    rule = Match(temperature=2.0, seed=7)
    plain = decode(shallow, prompts, rule, LIMIT)
    stop_at(monkeypatch, plain[0].output[0], plain[1].output[4])
    drafted = decode(shallow, prompts, rule, LIMIT, drafters[name], builder)
    assert drafted[0].output == plain[0].output[:1] and drafted[0].round_lengths == []
    assert len(drafted[1].output) <= 5
    for row, result in enumerate(drafted):
        assert result.output == plain[row].output[: len(result.output)]
        assert_counted(result, LIMIT, shallow.stop_ids)


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
def test_eagle3_proposals_depend_on_the_tokens_only(
    shallow: Target,
    prompts: list,
    drafters: dict,
    monkeypatch: pytest.MonkeyPatch,
    builder: TreeBuilder,
) -> None:
    """Whatever rounds led there, a proposal is the one that is made straight after the same
    tokens.
    """
    stop_at(monkeypatch)
    texts = [
        prompt + result.output
        for prompt, result in zip(
            prompts, decode(shallow, prompts, Greedy(), LIMIT + builder.depth + 1)
        )
    ]
    followed = Oracle(texts, slips=True, inner=drafters["eagle3"])
    generations = decode(shallow, prompts, Greedy(), LIMIT, followed, builder)
    assert {count for result in generations for count in result.complete_round_lengths} == set(
        range(1, builder.depth + 1)
    )
    for row, result in enumerate(generations):
        for turn in range(len(result.round_lengths)):
            prefix = texts[row][: len(prompts[row]) + sum(result.round_lengths[:turn])]
            oracle = Oracle([texts[row]], inner=drafters["eagle3"])
            decode(shallow, [prefix], Greedy(), 2, oracle, builder)
            assert torch.equal(followed.trees[turn].tokens[row], oracle.trees[0].tokens[0])
            assert torch.equal(followed.trees[turn].parents[row], oracle.trees[0].parents[0])


class FixedTree(Eagle2):
    """Drafts a fixed tree, two levels below the root, and stores the drafter's distribution
    after every path.
    """

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        after = torch.cat(
            [
                rollout.start(),
                rollout.extend(torch.tensor([[20, 21]]), torch.tensor([[0, 0]])),
                rollout.extend(torch.tensor([[30, 31, 32]]), torch.tensor([[2, 1, 2]])),
            ],
            dim=1,
        )[0]
        self.log_q = dict(zip([(), (20,), (21,), (21, 30), (20, 31), (21, 32)], after))
        return TokenTree.from_chain(prefix.root[:, None])


@pytest.mark.parametrize("num_rounds", [1, 4])
def test_eagle3_decodes_as_it_was_trained(
    shallow: Target, prompts: list, drafters: dict, monkeypatch: pytest.MonkeyPatch, num_rounds: int
) -> None:
    """After every path of a tree, the cached distribution is the one that the loss unrolls over
    the whole sequence.
    """
    stop_at(monkeypatch)
    eagle3 = drafters["eagle3"]
    builder = FixedTree(depth=2, budget=6, top_k=3)
    (result,) = decode(shallow, prompts[:1], Greedy(), num_rounds + 1, eagle3, builder)
    logits: list[Tensor] = []
    hook = eagle3.norm.register_forward_hook(
        lambda module, args, output: logits.append(eagle3.lm_head(output))
    )
    for path, log_q in builder.log_q.items():
        tokens = torch.tensor([prompts[0] + result.output[:-1] + list(path) + [0]])
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, -1] = True  # step k then has one row, whose index lies k + 2 before the end
        logits.clear()
        with torch.no_grad():
            eagle3.loss(
                Batch(tokens, mask, shallow.features(tokens, eagle3.layers)),
                shallow,
                TrainingState(),
            )
        torch.testing.assert_close(
            torch.cat(logits)[len(path)].log_softmax(-1), log_q, rtol=1e-4, atol=1e-4
        )
    hook.remove()


class Recording(Greedy):
    """Greedy, which records for which sequence and position each token of a path could be
    chosen.
    """

    is_random = True  # so that it is given positions

    def __init__(self) -> None:
        self.choices: dict[tuple[int, int], int] = {}

    def choose_tokens(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        choice = super().choose_tokens(logits, rows, positions)
        for row, row_positions, tokens in zip(rows.tolist(), positions.tolist(), choice.tolist()):
            self.choices |= {
                (row, position): token for position, token in zip(row_positions, tokens)
            }
        return choice

    def __call__(
        self, tree: TokenTree, logits: Tensor, rows: Tensor, positions: Tensor
    ) -> AcceptedPath:
        self.choose_tokens(logits, rows, positions)
        return super().__call__(tree, logits, rows, positions)


def test_a_token_is_drawn_at_its_own_position(
    shallow: Target, prompts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random draws are keyed by the position of the token in its sequence, so no two tokens
    share one.
    """
    stop_at(monkeypatch)
    plain = [result.output for result in decode(shallow, prompts, Greedy(), 11)]
    oracle = Oracle([prompt + output for prompt, output in zip(prompts, plain)])
    for drafter, builder in ((None, None), (oracle, Chain(1))):
        rule = Recording()
        decode(shallow, prompts, rule, 9, drafter, builder, sequence_ids=[4, 0, 7])
        assert rule.choices == {
            (row, len(prompt) + i): output[i]
            for row, prompt, output in zip([4, 0, 7], prompts, plain)
            for i in range(9)
        }


def test_eagle3_drafts_within_its_vocabulary(
    shallow: Target, prompts: list, drafters: dict
) -> None:
    """Every drafted token is one that `prepare` chose."""
    eagle3 = drafters["eagle3"]
    recorder = Oracle([prompt + [0] * 8 for prompt in prompts], inner=eagle3)
    decode(shallow, prompts, Greedy(), 3, recorder, BUILDERS[1])
    assert len(eagle3.draft_ids) == 512 and set(eagle3.draft_ids.tolist()) == set(
        eagle3.t2d.nonzero()[:, 0].tolist()
    )
    for tree in recorder.trees:
        check_structure(tree)
        assert tree.tokens.shape == (3, 8)
        assert eagle3.t2d[tree.tokens[:, 1:]].all()


def test_tree_wider_than_its_budget_fits_the_cache(
    shallow: Target, prompts: list, drafters: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that drafts many more nodes than it keeps decodes up to the limit."""
    stop_at(monkeypatch)
    builder = Eagle2(depth=6, budget=4, top_k=8)
    plain = decode(shallow, prompts[:1], Greedy(), LIMIT)
    drafted = decode(shallow, prompts[:1], Greedy(), LIMIT, drafters["eagle3"], builder)
    assert_same(shallow, prompts[0], drafted[0].output, plain[0].output)


@pytest.mark.parametrize(
    "builder", [Chain(5), Eagle2(depth=5, budget=4)], ids=lambda builder: builder.name
)
def test_ngram_tree_stays_within_its_budget(shallow: Target, builder: TreeBuilder) -> None:
    """The draft is a chain as long as the depth and the budget allow."""
    prompt = [5, 6, 7, 8, 9, 10, 11] * 3
    tree = proposed(Ngram(shallow), placed(shallow, [prompt], builder), builder)
    check_structure(tree)
    drafted = min(builder.depth, builder.budget - 1)
    assert tree.tokens.tolist() == [[11, *prompt[:drafted]]] and tree.valid.all()


@pytest.mark.parametrize("new_tokens", [1, 30])
def test_prompt_longer_than_the_context_is_refused(shallow: Target, new_tokens: int) -> None:
    """A prompt that leaves no room for its answer stops with a sentence that names both lengths."""
    prompt = [5] * (shallow.max_length - new_tokens + 1)
    with pytest.raises(
        UserError, match=rf"prompt of {len(prompt)} tokens.*{shallow.max_length} tokens"
    ):
        decode(shallow, [prompt], Greedy(), new_tokens)

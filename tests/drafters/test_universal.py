"""Small models with other tokenizers as drafters: what they draft, and that the output stays the target's.

Shapes: V drafter's vocabulary, U tokens that both vocabularies have.
"""

import itertools
import json
import random
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGeneratorDifferentTokenizers as TheirUniversal

from spectrain.data.readers import EmbeddedReader
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.sequential import SequentialRule, VerifiedTree
from spectrain.decoding.loop import decode
from spectrain.decoding.session import check_compatibility
from spectrain.errors import UserError
from spectrain.experimental.cross_vocabulary.drafter import DraftPath, Universal, list_paths
from spectrain.experimental.cross_vocabulary.spelling import RetokenizedText
from spectrain.experimental.cross_vocabulary.warping import align_tokens, carry_probabilities, uncovered_bytes
from spectrain.experimental.dyspec.builder import DySpec
from spectrain.experimental.traversal.rule import Traversal
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.token_tree import TokenTree
from tests.decoding.rounds import Keeping, watching

from ..decoding.test_lossless import SHAPES, Joint, Model, continued, drawn, emitted, every, models, scaled, target_joint
from .bilingual import byte_level, random_model, sentencepiece

LIMIT = 12
MATCHES = ("intersection", "text", "timewarp")
QUESTIONS = ["The bees find the", "What is a tree of 12 tokens? \u00c4pfel", "Hello,<|im_end|>\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bilingual")


@pytest.fixture(scope="module")
def speakers(shallow: Target, folder: Path) -> dict[str, str]:
    """Directories of small models: random ones with other tokenizers, and the target's own network with its ids shuffled."""
    texts = [message["content"] for chat in EmbeddedReader(limit=15).load_conversations() for message in chat.messages]
    torch.manual_seed(3)
    return {
        "bytes": random_model(byte_level(700, texts, ("<|end|>", "<|im_end|>")), folder / "bytes"),
        "sentencepiece": random_model(sentencepiece(900, texts), folder / "sentencepiece"),
        "shuffled": shuffled(shallow, folder / "shuffled"),
    }


def shuffled(target: Target, folder: Path) -> str:
    """The same model, but that its ordinary tokens have other ids."""
    target.save(folder)
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text())
    vocab: dict[str, int] = made["model"]["vocab"]
    special = {one["id"] for one in made["added_tokens"]}
    old = [token for token in vocab.values() if token not in special]
    new = dict(zip(old, random.Random(0).sample(old, len(old))))
    made["model"]["vocab"] = {name: new.get(token, token) for name, token in vocab.items()}
    file.write_text(json.dumps(made))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[torch.tensor([*new.values()])] = weight[torch.tensor([*new])].clone()
    model.save_pretrained(folder)
    return str(folder)


def prompts_of(target: Target, count: int = 3) -> list[list[int]]:
    return [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in QUESTIONS[:count]]


# What is drafted


@pytest.mark.sweep(3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 6, 2), DySpec(3, 6), Chain(3, "sampled")], ids=lambda one: one.name)
@pytest.mark.parametrize("speaker", ["bytes", "sentencepiece", "shuffled"])
def test_shared_tokens_are_drafted_by_what_the_small_model_says(
    shallow: Target, speakers: dict[str, str], speaker: str, builder: TreeBuilder, count: int
) -> None:
    """After every node, over ragged rounds whose texts are encoded anew, log q is that of the small model over the whole text,
    without a cache, restricted to the tokens that both vocabularies have and renormalised."""
    drafter = Universal(shallow, speakers[speaker]).eval()
    seen, kept = watching(builder)
    decode(shallow, prompts_of(shallow, count), Greedy(), LIMIT, drafter, kept, ignore_eos=True)
    shared = dict(zip(drafter.shared_target_ids.tolist(), drafter.shared_drafter_ids.tolist()))
    assert len(seen) > 8 and (speaker != "shuffled" or len(shared) == shallow.head.vocab_size)
    unshared = [{*drafted} - {*shared} for _, drafted, _ in seen]
    assert all(tokens <= {0} for tokens in unshared)  # rows that are shorter than others are padded with that
    real = [one for one, padding in zip(seen, unshared) if not padding]
    for text, drafted, log_q in real[:: max(1, len(real) // 40)]:
        whole = RetokenizedText(drafter.drafter_tokenizer, drafter.target_tokenizer, drafter.special_map)
        whole.append_tokens(text)
        tokens = whole.encode_text(10**6) + [shared[token] for token in drafted]
        logits = drafter.model.run(torch.tensor([tokens]), ForwardPlan(logits=True)).logits
        assert logits is not None
        q = logits[0, -1].double().softmax(-1)[drafter.shared_drafter_ids]
        torch.testing.assert_close(log_q.exp().double(), q / q.sum(), rtol=1e-3, atol=1e-5)
    assert all({*tree.tokens[:, 1:][tree.valid[:, 1:]].tolist()} <= {*shared} for tree in kept.trees)


@pytest.mark.parametrize("match", MATCHES)
def test_the_target_itself_with_other_ids_keeps_nearly_all(shallow: Target, speakers: dict[str, str], match: Any) -> None:
    """The target's own network under shuffled ids drafts what the target says, wherever its text is encoded as it wrote it."""
    drafter = Universal(shallow, speakers["shuffled"], match).eval()
    found = decode(shallow, prompts_of(shallow, 2), Greedy(), 24, drafter, Chain(3), ignore_eos=True)
    rounds = [length for one in found for length in one.complete_round_lengths]
    assert sum(rounds) > 0.9 * 4 * len(rounds)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rule", [Greedy(), Match(temperature=1.5)], ids=lambda one: one.name)
@pytest.mark.parametrize("builder", [Chain(4), Eagle2(3, 8, 3), DySpec(4, 8)], ids=lambda one: one.name)
@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize("speaker", ["bytes", "sentencepiece", "shuffled"])
def test_drafted_equals_greedy(
    shallow: Target, speakers: dict[str, str], speaker: str, match: Any, builder: TreeBuilder, rule: Any, count: int
) -> None:
    """Chains and trees of any match give the target's greedy output; so do its samples by sample-and-match."""
    drafter = Universal(shallow, speakers[speaker], match).eval()
    prompts = prompts_of(shallow, count)
    expected = [decode(shallow, [prompt], rule, LIMIT, sequence_ids=[n])[0].output for n, prompt in enumerate(prompts)]
    assert [one.output for one in decode(shallow, prompts, rule, LIMIT, drafter, builder)] == expected


def test_texts_that_grow_past_the_cache_are_read_again(shallow: Target, speakers: dict[str, str]) -> None:
    """Where a text takes more of the drafter's tokens than there was room for, a larger cache holds what the smaller did."""
    sizes = set()

    class Noting(Universal):
        def _catch_up(self, context: Any) -> Tensor:
            if context.round == 1:  # as if there had been little room
                self.cache = TreeCache(self.model.num_layers, 1, len(self.cached[0]) + 4, "cpu")
                self.cached = [[]]
            state = super()._catch_up(context)
            assert self.cache is not None
            sizes.add(self.cache.max_length)
            return state

    prompt = prompts_of(shallow, 1)
    found = [
        decode(shallow, prompt, Greedy(), LIMIT, kind(shallow, speakers["shuffled"]).eval(), Chain(3), ignore_eos=True)[0]
        for kind in (Universal, Noting)
    ]
    assert found[0].round_lengths == found[1].round_lengths and len(sizes) > 1


def test_drafts_go_by_the_drafters_own_tokens(shallow: Target, speakers: dict[str, str]) -> None:
    """drafter.tokens bounds what the drafter says in a round, the tree's depth what of it the target checks."""
    prompts = prompts_of(shallow, 1)
    for match, most in (("intersection", 2), ("text", 8)):
        drafter = Universal(shallow, speakers["bytes"], match, tokens=2).eval()  # type: ignore[arg-type]
        kept = Keeping(Chain(8))
        decode(shallow, prompts, Greedy(), LIMIT, drafter, kept)
        assert max(tree.tokens.shape[1] - 1 for tree in kept.trees) <= most
        assert drafter.cache is not None and kept.trees


# Texts


def path(drafter: Universal, text: str, extra: tuple[int, ...] = ()) -> DraftPath:
    """A draft that spells a text, all of whose tokens are sure but for the last, and special tokens behind it."""
    tokens = [*drafter.drafter_tokenizer.encode_bytes(text.encode()), *extra]
    return DraftPath(tokens, [0.5] * len(tokens), 1.0)


@pytest.fixture(scope="module")
def teller(shallow: Target, speakers: dict[str, str]) -> Universal:
    return Universal(shallow, speakers["bytes"], "timewarp")


def test_a_draft_is_encoded_as_the_target_does(shallow: Target, teller: Universal) -> None:
    """Behind a text, a drafted text becomes the tokens that the target's tokenizer has for both, if it has a border there."""
    text = RetokenizedText(teller.drafter_tokenizer, teller.target_tokenizer, teller.special_map)
    text.append_tokens(shallow.tokenizer("The bees", add_special_tokens=False)["input_ids"])
    whole = shallow.tokenizer("The bees find honey, 24", add_special_tokens=False)["input_ids"]
    found, chances = teller._to_target_tokens(text, path(teller, " find honey, 24"))
    assert found == whole[text.num_read :]
    assert np.isclose(np.prod(chances), 0.5 ** len(path(teller, " find honey, 24").tokens))


def test_what_is_not_complete_is_not_drafted(shallow: Target, teller: Universal) -> None:
    """The beginning of a character at a draft's end is left out; a special token that both have is drafted, and one that the
    target lacks ends the draft before it."""
    text = RetokenizedText(teller.drafter_tokenizer, teller.target_tokenizer, teller.special_map)
    text.append_tokens(prompts_of(shallow, 1)[0])
    euro = teller.drafter_tokenizer.encode_bytes("\u20ac".encode())
    assert len(euro) == 3  # a token a byte
    tokens = [*teller.drafter_tokenizer.encode_bytes(b" a"), *euro[:2]]
    found, _ = teller._to_target_tokens(text, DraftPath(tokens, [0.5] * len(tokens), 1.0))
    assert teller.target_tokenizer.decode_bytes(found) == b" a"
    end, stop = (
        next(token for token, name in teller.drafter_tokenizer.special_tokens.items() if name == "<|im_end|>"),
        teller.drafter_tokenizer.eos_token,
    )
    assert stop is not None and stop != end
    found, _ = teller._to_target_tokens(text, path(teller, " a", (end, *euro)))
    assert found[-1] == shallow.tokenizer.eos_token_id and teller.target_tokenizer.decode_bytes(found) == b" a"
    found, _ = teller._to_target_tokens(text, path(teller, " a", (stop, *euro)))
    assert found == teller.target_tokenizer.encode_bytes(b" a")


def test_paths_share_what_their_tree_weighs() -> None:
    """Of a tree every node's path, weighing what goes no further; of a chain its leaf. Chances of a path make its score."""
    tree = TokenTree.from_parents(
        torch.tensor([[9, 5, 6, 7, 0]]), torch.tensor([[-1, 0, 0, 1, 0]]), torch.tensor([[True] * 4 + [False]])
    )
    tree = replace(tree, scores=torch.tensor([[1.0, 0.5, 0.25, 0.125, 1.0]]).log())
    (found,) = list_paths(tree, leaves_alone=False)
    assert [one.tokens for one in found] == [[5], [6], [5, 7]]
    assert np.allclose([one.share for one in found], [0.375, 0.25, 0.125])
    assert np.allclose([np.prod(one.probabilities) for one in found], [0.5, 0.25, 0.125])
    (leaves,) = list_paths(tree, leaves_alone=True)
    assert [one.tokens for one in leaves] == [[6], [5, 7]]


# What is lossless


def restricted(q: Model, share: dict[int, int]) -> Model:
    """The drafter's q after paths of the target's tokens, restricted to tokens that it shares and renormalised, in the target's
    ids; `share`: target's -> drafter's. A path that holds other tokens is never drafted."""
    found = {}
    for target_path in q:
        weights = q[tuple(share.get(token, 0) for token in target_path)]
        mine = np.array(
            [weights[share[token]] if token in share else Fraction(0) for token in range(len(weights))], dtype=object
        )
        found[target_path] = scaled(mine) if sum(mine) else mine
    return found


@pytest.mark.sweep(8)
@pytest.mark.parametrize("share", [{0: 2, 1: 0}, {0: 1, 1: 2, 2: 0}, {2: 2}], ids=str)
@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *((rule, "1-1") for rule in (SpeculativeSampling(), RecursiveRejection(), Block(), Traversal())),
        *((rule, name) for rule in (RecursiveRejection(), Traversal()) for name in ("2", "2-1", "1-2")),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_shared_tokens_are_lossless(rule: SequentialRule, name: str, share: dict[int, int]) -> None:
    """Drawing from q over the shared tokens alone, in chains and trees, leaves the target's joint distribution exact."""
    length = max(map(len, SHAPES[name])) + 1
    for seed in range(3):
        p, q = models("dense", 3, length, seed)
        mapped = restricted(q, share)
        for children in ("sampled", "without_replacement"):
            found = emitted(rule, drawn(SHAPES[name], children), p, mapped, children == "without_replacement", length)
            assert found == target_joint(p, length)


def test_what_is_carried_over_must_not_be_weighed() -> None:
    """Of a drafter that spells a and b a target that has also ab: draws of two letters, encoded as the target does. Weighing p
    against the q that warping carries over does not give the target's distribution; matching its draws does."""
    pieces = [b"a", b"b", b"ab"]
    draw = random.Random(5)
    p, q = (np.array([Fraction(draw.randint(1, 5)) for _ in range(3)], dtype=object) for _ in "pq")
    p, q = p / sum(p), np.append(q[:2] / sum(q[:2]), Fraction(0))
    weighed: Joint = defaultdict(Fraction)
    matched: Joint = defaultdict(Fraction)
    for letters in itertools.product(range(2), repeat=2):
        chance = q[letters[0]] * q[letters[1]]
        tokens = [2] if letters == (0, 1) else list(letters)
        pairs = align_tokens(uncovered_bytes([1, 1], [len(pieces[token]) for token in tokens]))
        over = carry_probabilities([float(q[letter]) for letter in letters], pairs, len(tokens))
        said = q + 0
        said[tokens[0]] = Fraction(over[0])  # TokenTiming's q at the place of the first token
        tree = VerifiedTree([0, tokens[0]], [[1], []], lambda node: p, lambda node, said=said: said)
        for share, (kept, bonus) in every(lambda dice, tree=tree: SpeculativeSampling().select_path(tree, dice)):
            weighed[(tree.tokens[1] if len(kept) > 1 else bonus,)] += chance * share
        for token, share in enumerate(p):  # the target's own draw, whatever was drafted
            matched[(token,)] += chance * share
    truth = continued({(): Fraction(1)}, {(): p}, 1)
    assert dict(matched) == truth
    assert max(abs(float(weighed[token] - truth[token])) for token in truth) > 0.02


@pytest.mark.parametrize(
    "rule", [SpeculativeSampling(), RecursiveRejection(), Block(), Traversal()], ids=lambda rule: rule.name
)
def test_rules_that_weigh_refuse_matched_texts(shallow: Target, speakers: dict[str, str], rule: SequentialRule) -> None:
    """Only shared tokens are drawn from a q that is known."""
    drawn_chain = Chain(3, "sampled")
    check_compatibility(Universal(shallow, speakers["bytes"]), drawn_chain, rule)
    for match in ("text", "timewarp"):
        with pytest.raises(UserError, match=f"acceptance={rule.name}: it weighs p against the q"):
            check_compatibility(Universal(shallow, speakers["bytes"], match), drawn_chain, rule)  # type: ignore[arg-type]


# Settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "/nowhere/at/all"}, r"drafter\.model=/nowhere/at/all: it cannot be loaded"),
        ({"match": "sound"}, r"drafter\.match=sound: choose from"),
        ({"tokens": 0}, r"drafter\.tokens=0"),
        ({"width": 0}, r"drafter\.width=0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(shallow: Target, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Universal(shallow, **options)


# As an assistant of transformers' own


@pytest.mark.slow
def test_as_much_is_kept_as_of_transformers_drafts(smollm2: Target, tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate's universal assistant, tiny for SmolLM2, at as many drafted tokens: the same output, and no more kept of it."""
    depth, limit, kept = 4, 24, list[int]()
    update = TheirUniversal.update_candidate_strategy

    def counted(self: Any, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        kept.append(1 + int(num_matches))
        update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(TheirUniversal, "update_candidate_strategy", counted)
    assistant: Any = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32).eval()
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = depth, "constant"
    settings.assistant_confidence_threshold = 0.0
    how = {"assistant_model": assistant, "tokenizer": smollm2.tokenizer, "assistant_tokenizer": tiny.tokenizer}
    drafter, theirs, ours = Universal(smollm2, "tiny", "text", tokens=depth).eval(), list[int](), list[int]()
    prompts = [smollm2.tokenizer(text, add_special_tokens=False)["input_ids"] for text in QUESTIONS[:2]]
    for prompt in prompts:
        with reference_model(smollm2) as model:
            expected = generate(model, prompt, limit, frozenset())
            kept.clear()
            assert generate(model, prompt, limit, frozenset(), **how) == expected
        theirs += kept[1:-1]
        (found,) = decode(smollm2, [prompt], Greedy(), limit, drafter, Chain(2 * depth), ignore_eos=True)
        assert found.output == expected
        ours += found.complete_round_lengths
    assert sum(ours) / len(ours) >= 0.98 * sum(theirs) / len(theirs)

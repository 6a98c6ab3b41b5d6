"""Small models with other tokenizers as drafters: their drafts, and the target's unchanged output.

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
from transformers.generation.candidate_generator import (
    AssistedCandidateGeneratorDifferentTokenizers as TheirUniversal,
)

from spectrain.data.readers import EmbeddedReader
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.sequential import SequentialRule, VerifiedTree
from spectrain.decoding.loop import decode
from spectrain.decoding.session import check_compatibility
from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.token_tree import TokenTree
from spectrain_research.cross_vocabulary.drafter import DraftPath, Universal, list_paths
from spectrain_research.cross_vocabulary.spelling import RetokenizedText
from spectrain_research.cross_vocabulary.warping import (
    align_tokens,
    carry_probabilities,
    uncovered_bytes,
)
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.traversal.rule import Traversal
from tests.decoding.rounds import Keeping, watching
from tests.decoding.test_lossless import (
    SHAPES,
    Joint,
    Model,
    continued,
    drawn,
    emitted,
    every,
    models,
    scaled,
    target_joint,
)
from tests.drafters.bilingual import byte_level, random_model, sentencepiece

LIMIT = 12
MATCHES = ("intersection", "text", "timewarp")
QUESTIONS = ["The bees find the", "What is a tree of 12 tokens? \u00c4pfel", "Hello,<|im_end|>\n"]


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bilingual")


@pytest.fixture(scope="module")
def model_paths(shallow: Target, models_folder: Path) -> dict[str, str]:
    """Save small models: random ones with other tokenizers, and the target's own network with
    its ids shuffled.
    """
    texts = [
        message["content"]
        for chat in EmbeddedReader(limit=15).load_conversations()
        for message in chat.messages
    ]
    torch.manual_seed(3)
    return {
        "bytes": random_model(
            byte_level(700, texts, ("<|end|>", "<|im_end|>")), models_folder / "bytes"
        ),
        "sentencepiece": random_model(sentencepiece(900, texts), models_folder / "sentencepiece"),
        "shuffled": save_shuffled(shallow, models_folder / "shuffled"),
    }


def save_shuffled(target: Target, folder: Path) -> str:
    """Save the same model with other ids for its ordinary tokens."""
    target.save(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab: dict[str, int] = content["model"]["vocab"]
    special = {token["id"] for token in content["added_tokens"]}
    old = [token for token in vocab.values() if token not in special]
    new = dict(zip(old, random.Random(0).sample(old, len(old))))
    content["model"]["vocab"] = {name: new.get(token, token) for name, token in vocab.items()}
    file.write_text(json.dumps(content))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[torch.tensor([*new.values()])] = weight[torch.tensor([*new])].clone()
    model.save_pretrained(folder)
    return str(folder)


def prompts_of(target: Target, count: int = 3) -> list[list[int]]:
    return [
        target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in QUESTIONS[:count]
    ]


# Drafts


@pytest.mark.sweep(3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "builder",
    [Chain(3), Eagle2(3, 6, 2), DySpec(3, 6), Chain(3, "sampled")],
    ids=lambda record: record.name,
)
@pytest.mark.parametrize("model_name", ["bytes", "sentencepiece", "shuffled"])
def test_shared_tokens_are_drafted_by_what_the_small_model_says(
    shallow: Target, model_paths: dict[str, str], model_name: str, builder: TreeBuilder, count: int
) -> None:
    """After every node, over ragged rounds whose texts are re-encoded, log q is that of the small
    model over the full text, without a cache, restricted to the shared tokens and renormalised."""
    drafter = Universal(shallow, model_paths[model_name]).eval()
    records, recorder = watching(builder)
    decode(shallow, prompts_of(shallow, count), Greedy(), LIMIT, drafter, recorder, ignore_eos=True)
    shared = dict(zip(drafter.shared_target_ids.tolist(), drafter.shared_drafter_ids.tolist()))
    assert len(records) > 8 and (model_name != "shuffled" or len(shared) == shallow.head.vocab_size)
    unshared = [{*drafted} - {*shared} for _, drafted, _ in records]
    assert all(tokens <= {0} for tokens in unshared)  # shorter rows are padded with 0
    unpadded = [record for record, padding in zip(records, unshared) if not padding]
    for text, drafted, log_q in unpadded[:: max(1, len(unpadded) // 40)]:
        text_tokens = RetokenizedText(
            drafter.drafter_tokenizer, drafter.target_tokenizer, drafter.special_map
        )
        text_tokens.append_tokens(text)
        tokens = text_tokens.encode_text(10**6) + [shared[token] for token in drafted]
        logits = drafter.model.run(torch.tensor([tokens]), ForwardPlan(logits=True)).logits
        assert logits is not None
        q = logits[0, -1].double().softmax(-1)[drafter.shared_drafter_ids]
        torch.testing.assert_close(log_q.exp().double(), q / q.sum(), rtol=1e-3, atol=1e-5)
    assert all(
        {*tree.tokens[:, 1:][tree.valid[:, 1:]].tolist()} <= {*shared} for tree in recorder.trees
    )


@pytest.mark.parametrize("match", MATCHES)
def test_the_target_itself_with_other_ids_keeps_nearly_all(
    shallow: Target, model_paths: dict[str, str], match: Any
) -> None:
    """With the target's own network under shuffled ids more than 90 % of all drafts are
    accepted.
    """
    drafter = Universal(shallow, model_paths["shuffled"], match).eval()
    generations = decode(
        shallow, prompts_of(shallow, 2), Greedy(), 24, drafter, Chain(3), ignore_eos=True
    )
    rounds = [length for generation in generations for length in generation.complete_round_lengths]
    assert sum(rounds) > 0.9 * 4 * len(rounds)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rule", [Greedy(), Match(temperature=1.5)], ids=lambda row: row.name)
@pytest.mark.parametrize(
    "builder", [Chain(4), Eagle2(3, 8, 3), DySpec(4, 8)], ids=lambda row: row.name
)
@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize("model_name", ["bytes", "sentencepiece", "shuffled"])
def test_drafted_equals_greedy(
    shallow: Target,
    model_paths: dict[str, str],
    model_name: str,
    match: Any,
    builder: TreeBuilder,
    rule: Any,
    count: int,
) -> None:
    """Chains and trees of any match give the target's greedy output; so do its samples by
    sample-and-match.
    """
    drafter = Universal(shallow, model_paths[model_name], match).eval()
    prompts = prompts_of(shallow, count)
    expected = [
        decode(shallow, [prompt], rule, LIMIT, sequence_ids=[n])[0].output
        for n, prompt in enumerate(prompts)
    ]
    assert [
        row.output for row in decode(shallow, prompts, rule, LIMIT, drafter, builder)
    ] == expected


def test_texts_that_grow_past_the_cache_are_read_again(
    shallow: Target, model_paths: dict[str, str]
) -> None:
    """If a text outgrows the drafter's cache, a larger cache gives the same rounds."""
    sizes = set()

    class RecordingUniversal(Universal):
        def _catch_up(self, context: Any) -> Tensor:
            if context.round == 1:  # as if the cache had been small
                self.cache = TreeCache(self.model.num_layers, 1, len(self.cached[0]) + 4, "cpu")
                self.cached = [[]]
            state = super()._catch_up(context)
            assert self.cache is not None
            sizes.add(self.cache.max_length)
            return state

    prompt = prompts_of(shallow, 1)
    generations = [
        decode(
            shallow,
            prompt,
            Greedy(),
            LIMIT,
            kind(shallow, model_paths["shuffled"]).eval(),
            Chain(3),
            ignore_eos=True,
        )[0]
        for kind in (Universal, RecordingUniversal)
    ]
    assert generations[0].round_lengths == generations[1].round_lengths and len(sizes) > 1


def test_drafts_go_by_the_drafters_own_tokens(shallow: Target, model_paths: dict[str, str]) -> None:
    """drafter.tokens limits the drafter's tokens in a round, the tree's depth the target's
    tokens.
    """
    prompts = prompts_of(shallow, 1)
    for match, most in (("intersection", 2), ("text", 8)):
        drafter = Universal(shallow, model_paths["bytes"], match, tokens=2).eval()  # type: ignore[arg-type]
        recorder = Keeping(Chain(8))
        decode(shallow, prompts, Greedy(), LIMIT, drafter, recorder)
        assert max(tree.tokens.shape[1] - 1 for tree in recorder.trees) <= most
        assert drafter.cache is not None and recorder.trees


# Texts


def make_path(drafter: Universal, text: str, extra: tuple[int, ...] = ()) -> DraftPath:
    """Make a draft that spells a text, whose tokens all have probability 0.5, with special
    tokens behind it.
    """
    tokens = [*drafter.drafter_tokenizer.encode_bytes(text.encode()), *extra]
    return DraftPath(tokens, [0.5] * len(tokens), 1.0)


@pytest.fixture(scope="module")
def warping_drafter(shallow: Target, model_paths: dict[str, str]) -> Universal:
    return Universal(shallow, model_paths["bytes"], "timewarp")


def test_a_draft_is_encoded_as_the_target_does(shallow: Target, warping_drafter: Universal) -> None:
    """A text drafted behind another is encoded as the target's tokenizer encodes both, if they
    have a token border there.
    """
    text = RetokenizedText(
        warping_drafter.drafter_tokenizer,
        warping_drafter.target_tokenizer,
        warping_drafter.special_map,
    )
    text.append_tokens(shallow.tokenizer("The bees", add_special_tokens=False)["input_ids"])
    full = shallow.tokenizer("The bees find honey, 24", add_special_tokens=False)["input_ids"]
    tokens, chances = warping_drafter._to_target_tokens(
        text, make_path(warping_drafter, " find honey, 24")
    )
    assert tokens == full[text.num_read :]
    assert np.isclose(
        np.prod(chances), 0.5 ** len(make_path(warping_drafter, " find honey, 24").tokens)
    )


def test_what_is_not_complete_is_not_drafted(shallow: Target, warping_drafter: Universal) -> None:
    """The beginning of a character at a draft's end is dropped; a shared special token is drafted,
    and one that the target lacks ends the draft before it."""
    text = RetokenizedText(
        warping_drafter.drafter_tokenizer,
        warping_drafter.target_tokenizer,
        warping_drafter.special_map,
    )
    text.append_tokens(prompts_of(shallow, 1)[0])
    euro = warping_drafter.drafter_tokenizer.encode_bytes("\u20ac".encode())
    assert len(euro) == 3  # one token per byte
    tokens = [*warping_drafter.drafter_tokenizer.encode_bytes(b" a"), *euro[:2]]
    target_tokens, _ = warping_drafter._to_target_tokens(
        text, DraftPath(tokens, [0.5] * len(tokens), 1.0)
    )
    assert warping_drafter.target_tokenizer.decode_bytes(target_tokens) == b" a"
    end = next(
        token
        for token, name in warping_drafter.drafter_tokenizer.special_tokens.items()
        if name == "<|im_end|>"
    )
    stop = warping_drafter.drafter_tokenizer.eos_token
    assert stop is not None and stop != end
    target_tokens, _ = warping_drafter._to_target_tokens(
        text, make_path(warping_drafter, " a", (end, *euro))
    )
    assert (
        target_tokens[-1] == shallow.tokenizer.eos_token_id
        and warping_drafter.target_tokenizer.decode_bytes(target_tokens) == b" a"
    )
    target_tokens, _ = warping_drafter._to_target_tokens(
        text, make_path(warping_drafter, " a", (stop, *euro))
    )
    assert target_tokens == warping_drafter.target_tokenizer.encode_bytes(b" a")


def test_paths_share_what_their_tree_weighs() -> None:
    """A tree gives every node's path with the weight that goes no further, or its leaves' paths
    alone; probabilities multiply to the score."""
    tree = TokenTree.from_parents(
        torch.tensor([[9, 5, 6, 7, 0]]),
        torch.tensor([[-1, 0, 0, 1, 0]]),
        torch.tensor([[True] * 4 + [False]]),
    )
    tree = replace(tree, scores=torch.tensor([[1.0, 0.5, 0.25, 0.125, 1.0]]).log())
    (paths,) = list_paths(tree, leaves_alone=False)
    assert [draft_path.tokens for draft_path in paths] == [[5], [6], [5, 7]]
    assert np.allclose([draft_path.share for draft_path in paths], [0.375, 0.25, 0.125])
    assert np.allclose(
        [np.prod(draft_path.probabilities) for draft_path in paths], [0.5, 0.25, 0.125]
    )
    (leaves,) = list_paths(tree, leaves_alone=True)
    assert [draft_path.tokens for draft_path in leaves] == [[6], [5, 7]]


# Losslessness


def restrict_model(q: Model, share: dict[int, int]) -> Model:
    """Return q after paths of the target's tokens, restricted to shared tokens and renormalised, in
    the target's ids. `share` maps the target's ids to the drafter's; a path with other tokens is
    never drafted."""
    result = {}
    for target_path in q:
        weights = q[tuple(share.get(token, 0) for token in target_path)]
        mapped = np.array(
            [
                weights[share[token]] if token in share else Fraction(0)
                for token in range(len(weights))
            ],
            dtype=object,
        )
        result[target_path] = scaled(mapped) if sum(mapped) else mapped
    return result


@pytest.mark.sweep(8)
@pytest.mark.parametrize("share", [{0: 2, 1: 0}, {0: 1, 1: 2, 2: 0}, {2: 2}], ids=str)
@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *(
            (rule, "1-1")
            for rule in (SpeculativeSampling(), RecursiveRejection(), Block(), Traversal())
        ),
        *(
            (rule, name)
            for rule in (RecursiveRejection(), Traversal())
            for name in ("2", "2-1", "1-2")
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_shared_tokens_are_lossless(rule: SequentialRule, name: str, share: dict[int, int]) -> None:
    """Drawing from q over the shared tokens, in chains and trees, leaves the target's joint
    distribution exact.
    """
    length = max(map(len, SHAPES[name])) + 1
    for seed in range(3):
        p, q = models("dense", 3, length, seed)
        mapped = restrict_model(q, share)
        for children in ("sampled", "without_replacement"):
            actual = emitted(
                rule,
                drawn(SHAPES[name], children),
                p,
                mapped,
                children == "without_replacement",
                length,
            )
            assert actual == target_joint(p, length)


def test_what_is_carried_over_must_not_be_weighed() -> None:
    """A drafter draws letters a and b for a target that also has the token ab. Weighing p against
    the q that warping carries over does not give the target's distribution; matching the target's
    own draws does."""
    pieces = [b"a", b"b", b"ab"]
    draw = random.Random(5)
    p, q = (np.array([Fraction(draw.randint(1, 5)) for _ in range(3)], dtype=object) for _ in "pq")
    p = p / sum(p)
    q = np.append(q[:2] / sum(q[:2]), Fraction(0))
    weighed: Joint = defaultdict(Fraction)
    matched: Joint = defaultdict(Fraction)
    for letters in itertools.product(range(2), repeat=2):
        chance = q[letters[0]] * q[letters[1]]
        tokens = [2] if letters == (0, 1) else list(letters)
        pairs = align_tokens(uncovered_bytes([1, 1], [len(pieces[token]) for token in tokens]))
        carried = carry_probabilities([float(q[letter]) for letter in letters], pairs, len(tokens))
        carried_q = q + 0
        carried_q[tokens[0]] = Fraction(carried[0])  # TokenTiming's q at the first token
        tree = VerifiedTree(
            [0, tokens[0]], [[1], []], lambda node: p, lambda node, carried_q=carried_q: carried_q
        )
        for share, (path, bonus) in every(
            lambda dice, tree=tree: SpeculativeSampling().select_path(tree, dice)
        ):
            weighed[(tree.tokens[1] if len(path) > 1 else bonus,)] += chance * share
        for token, share in enumerate(p):  # the target's own draw, whatever was drafted
            matched[(token,)] += chance * share
    truth = continued({(): Fraction(1)}, {(): p}, 1)
    assert dict(matched) == truth
    assert max(abs(float(weighed[token] - truth[token])) for token in truth) > 0.02


@pytest.mark.parametrize(
    "rule",
    [SpeculativeSampling(), RecursiveRejection(), Block(), Traversal()],
    ids=lambda rule: rule.name,
)
def test_rules_that_weigh_refuse_matched_texts(
    shallow: Target, model_paths: dict[str, str], rule: SequentialRule
) -> None:
    """Rules that weigh p against q accept shared tokens alone, because only their q is known."""
    drawn_chain = Chain(3, "sampled")
    check_compatibility(Universal(shallow, model_paths["bytes"]).capabilities, drawn_chain, rule)
    for match in ("text", "timewarp"):
        with pytest.raises(UserError, match=f"acceptance={rule.name}: it weighs p against the q"):
            check_compatibility(
                Universal(shallow, model_paths["bytes"], match).capabilities, drawn_chain, rule
            )  # type: ignore[arg-type]


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere/at/all"}, r"drafter\.model=/nowhere/at/all: it cannot be loaded"),
        ({"match": "sound"}, r"drafter\.match=sound: choose from"),
        ({"tokens": 0}, r"drafter\.tokens=0"),
        ({"width": 0}, r"drafter\.width=0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(shallow: Target, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Universal(shallow, **options)


# As an assistant of transformers' own


@pytest.mark.slow
def test_as_many_drafts_are_accepted_as_of_transformers(
    smollm2: Target, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At equally many drafted tokens, the output is that of generate's universal assistant, and no
    fewer drafts are accepted."""
    depth = 4
    limit = 24
    accepted_counts = list[int]()
    update = TheirUniversal.update_candidate_strategy

    def record_count(self: Any, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        accepted_counts.append(1 + int(num_matches))
        update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(TheirUniversal, "update_candidate_strategy", record_count)
    assistant: Any = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32).eval()
    settings = assistant.generation_config
    settings.num_assistant_tokens = depth
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    options = {
        "assistant_model": assistant,
        "tokenizer": smollm2.tokenizer,
        "assistant_tokenizer": tiny.tokenizer,
    }
    drafter = Universal(smollm2, "tiny", "text", tokens=depth).eval()
    reference = list[int]()
    actual = list[int]()
    prompts = [
        smollm2.tokenizer(text, add_special_tokens=False)["input_ids"] for text in QUESTIONS[:2]
    ]
    for prompt in prompts:
        with reference_model(smollm2) as model:
            expected = generate(model, prompt, limit, frozenset())
            accepted_counts.clear()
            assert generate(model, prompt, limit, frozenset(), **options) == expected
        reference += accepted_counts[1:-1]
        (generation,) = decode(
            smollm2, [prompt], Greedy(), limit, drafter, Chain(2 * depth), ignore_eos=True
        )
        assert generation.output == expected
        actual += generation.complete_round_lengths
    assert sum(actual) / len(actual) >= 0.98 * sum(reference) / len(reference)

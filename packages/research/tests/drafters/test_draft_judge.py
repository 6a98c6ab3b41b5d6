"""The judge of drafts: the meaning of its labels, and decoding with a trained judge and any
drafter.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import collate
from spectrain.features.live_source import LiveSource
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.runs.drafters import save_drafter
from spectrain.training.trainer import Trainer
from spectrain.trees import Chain, Eagle2
from spectrain.trees.token_tree import TokenTree
from spectrain_research.gated_lora.drafter import GatedLora, GatedLoraConfig
from spectrain_research.lossy_rules.judge import Judge
from spectrain_research.lossy_rules.judge_drafter import DraftJudge
from tests.drafters.test_contract import composed
from tests.targets import cut_tiny

PROMPTS = [[5, 6, 7, 8, 5, 6], [40, 41, 42, 40]]


@pytest.fixture(scope="module")
def target() -> Target:
    return cut_tiny(3)


def make_examples(target: Target) -> list[Example]:
    """Make texts of which the second part is the target's own greedy answer, and one that is too
    short to judge.
    """
    texts = [
        prompt + decode(target, [prompt], Greedy(), count, ignore_eos=True)[0].output
        for prompt, count in zip(PROMPTS, (20, 12))
    ]
    examples = [
        Example(text, [i >= len(prompt) for i in range(len(text))])
        for text, prompt in zip(texts, PROMPTS)
    ]
    return [*examples, Example([9, 8, 7], [False, True, True])]


@pytest.mark.parametrize("packed", [False, True])
def test_an_alternative_is_right_where_the_rest_of_the_answer_stays(
    target: Target, packed: bool
) -> None:
    """States and labels are those of running each changed text by itself: on greedy answers, right
    means that the most likely tokens after the alternative are still the answer's own."""
    judge = DraftJudge(target, window=2, places=30, alternatives=3)
    examples = make_examples(target)
    batch = LiveSource().make_batch(BatchRequest(examples, target, ("final",), packed))
    states, right, weights = judge.judge_alternatives(batch, target, TrainingState())
    judged = iter(zip(states, right.tolist(), strict=True))
    for example, prompt in zip(examples, PROMPTS):
        text = example.tokens
        target_logits = target.head.logits(
            target.features(torch.tensor([text]), ("final",)).at_layer("final")
        )[0]
        assert target_logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == text[len(prompt) :]
        for position in range(len(prompt), len(text) - 2):
            others = [
                token
                for token in target_logits[position - 1].topk(4).indices.tolist()
                if token != text[position]
            ][:3]
            for other in others:
                changed = [*text[:position], other, *text[position + 1 : position + 3]]
                final = target.features(torch.tensor([changed]), ("final",)).at_layer("final")[0]
                most_likely = target.head.logits(final[position : position + 3]).argmax(-1).tolist()
                state, label = next(judged)
                torch.testing.assert_close(state, final[position], atol=1e-4, rtol=1e-3)
                assert label == (
                    most_likely == target_logits.argmax(-1)[position : position + 3].tolist()
                )
    assert next(judged, None) is None and len(set(right.tolist())) == 2
    sizes = [sum(example.mask) for example in examples[:2]]
    assert weights.sum() == pytest.approx(sum(sizes))


def test_a_loss_without_anything_to_judge_is_nothing(target: Target) -> None:
    """Documents shorter than a window give a loss of 0 that still has gradients."""
    judge = DraftJudge(target)
    losses = judge.loss(
        LiveSource().make_batch(BatchRequest(make_examples(target)[2:], target, ("final",))),
        target,
        TrainingState(),
    )
    losses.total.backward()
    assert float(losses.total.detach()) == 0 and judge.probe.weight.grad is not None


def test_a_training_that_judges_nothing_says_so(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A window longer than every answer leaves nothing to learn from, which a loss of 0 alone
    would not show.
    """
    trainer = Trainer(max_steps=1, batch_tokens=512)
    for window, has_warning in ((2, False), (200, True)):
        dataset = Dataset(make_examples(target), 3, 0, 0)
        trainer.fit(
            DraftJudge(target, window=window), target, dataset, LiveSource(), tmp_path / str(window)
        )
        assert (
            "training: no supervised draft position up to step 1" in capsys.readouterr().err
        ) == has_warning


def save_judge(folder: Path, weight: torch.Tensor, bias: float = 0.0) -> str:
    folder.mkdir(parents=True)
    save_file(
        {"probe.weight": weight[None], "probe.bias": torch.tensor([bias])},
        folder / "model.safetensors",
    )
    return str(folder)


@pytest.fixture(scope="module")
def judge(target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A judge with random weights, for rules to load."""
    return save_judge(
        tmp_path_factory.mktemp("judge") / "drafter", torch.randn(target.width) / target.width**0.5
    )


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "ngram": Ngram,
    "eagle3": lambda target: Eagle3(target, vocab_size=512),
    "medusa": Medusa,
    "causal": lambda target: Causal(target, num_layers=1),
    "early_exit": lambda target: EarlyExit(target, exit_layer=1),
    "gated_lora": lambda target: GatedLora(target, GatedLoraConfig(num_masks=3)),
}


CHAIN = Chain(3)
TREE = Eagle2(depth=3, budget=8, top_k=3)
FAST_CASES = [
    *((name, CHAIN) for name in ("eagle3", "early_exit", "gated_lora")),
    *((name, TREE) for name in ("ngram", "medusa", "causal")),
]
SLOW_CASES = [(name, TREE if builder is CHAIN else CHAIN) for name, builder in FAST_CASES]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "name, builder",
    [*FAST_CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_it_judges_beside_any_drafter(target: Target, judge: str, name: str, builder: Any) -> None:
    """At threshold 1 the output is the greedy one, at 0 a full branch is accepted, and between them
    the saved probe decides by the states of the answer itself."""
    drafter = DRAFTERS[name](target)
    drafter.prepare(target, torch.ones(target.head.vocab_size, dtype=torch.int64))
    drafter.eval()
    greedy = decode(target, PROMPTS, Greedy(), 8, drafter, builder)
    strict, half, none = (
        decode(target, PROMPTS, Judge(judge, x), 8, drafter, builder) for x in (1.0, 0.5, 0.0)
    )
    assert [(generation.output, generation.round_lengths) for generation in strict] == [
        (generation.output, generation.round_lengths) for generation in greedy
    ]
    for generation in none:  # of a tree, the branch with the highest score
        assert all(
            count == depth + 1 if builder.traits.is_chain else count > 1 or not depth
            for count, depth in zip(generation.round_lengths, generation.depths)
        )
    rule = Judge(judge)
    for generation in half:
        text = generation.prompt + generation.output
        final = target.features(torch.tensor([text]), ("final",)).at_layer("final")[0]
        most_likely = [
            *[-1] * len(generation.prompt),
            *target.head.logits(final).argmax(-1)[len(generation.prompt) - 1 : -1].tolist(),
        ]
        sure = (final @ rule.weight[0] + rule.bias).sigmoid()
        for position in range(len(generation.prompt), len(text)):
            assert text[position] == most_likely[position] or sure[position] > 0.5 - 1e-4


def test_captured_rounds_judge_the_same(target: Target, judge: str) -> None:
    """The same rounds without host synchronization emit the same tokens."""
    drafter = DRAFTERS["eagle3"](target)
    drafter.prepare(target, torch.ones(target.head.vocab_size, dtype=torch.int64))
    drafter.eval()
    eager = decode(target, PROMPTS, Judge(judge), 12, drafter, Chain(3))
    captured = CapturedRunner(target, Judge(judge), drafter, Chain(3)).decode(PROMPTS, 12)
    assert [(generation.output, generation.round_lengths) for generation in captured] == [
        (generation.output, generation.round_lengths) for generation in eager
    ]


def test_a_lower_threshold_keeps_the_same_and_more(judge: str, target: Target) -> None:
    """On fixed rounds every path extends that of the stricter threshold."""
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 3, 5]]).expand(30, -1)
    tree = TokenTree.from_parents(torch.arange(9).expand(30, -1), parents)
    logits = torch.randn(30, 9, 9)
    features = Features(tree.tokens, ("final",), torch.randn(30, 9, 1, target.width), logits)
    paths_by_threshold = []
    for threshold in (1.0, 0.7, 0.5, 0.3, 0.0):
        accepted = Judge(judge, threshold).accept(tree, features, torch.arange(30), tree.depths)
        paths_by_threshold.append(
            [path[:count] for path, count in zip(accepted.path.tolist(), accepted.counts.tolist())]
        )
    for strict, loose in itertools.pairwise(paths_by_threshold):
        assert all(longer[: len(path)] == path for path, longer in zip(strict, loose))
    lengths = [sum(map(len, paths)) for paths in paths_by_threshold]
    assert lengths == sorted(lengths) and len(set(lengths)) > 2


def test_the_rule_loads_the_trained_judge(target: Target, tmp_path: Path) -> None:
    """What training saves is what the rule reads, bit by bit; training lowers its loss."""
    dataset = Dataset(make_examples(target)[:2] * 4, 8, 0, 0)
    judge = DraftJudge(target, window=2, places=30)
    batch = LiveSource().make_batch(BatchRequest(dataset[[0, 1]], target, ("final",)))
    before = judge.loss(batch, target, TrainingState()).total
    Trainer(lr=3e-3, max_steps=5, batch_tokens=512).fit(
        judge, target, dataset, LiveSource(), tmp_path / "run"
    )
    assert judge.loss(batch, target, TrainingState()).total < before
    save_drafter(
        tmp_path / "run" / "drafter",
        judge,
        RunSpec.from_nodes(composed("drafter=draft_judge", "target=tiny")),
    )
    for folder in ("run", "run/drafter"):
        rule = Judge(str(tmp_path / folder))
        assert torch.equal(rule.weight, judge.probe.weight) and torch.equal(
            rule.bias, judge.probe.bias
        )


def test_what_is_no_judge_is_refused(target: Target, tmp_path: Path) -> None:
    """The message names the wrong setting, and what to write."""
    other = save_judge(tmp_path / "other", torch.randn(7))
    with pytest.raises(
        UserError,
        match=r"^acceptance\.path=.*other: it judges states of width 7, and the target's have",
    ):
        decode(target, PROMPTS, Judge(other), 4, Ngram(target), Chain(2))
    (tmp_path / "drafter").mkdir()
    save_file({"heads": torch.zeros(1)}, tmp_path / "drafter" / "model.safetensors")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_text("?")
    for path, words in {
        None: r"^acceptance\.path: name a judge",
        str(tmp_path / "none"): "there is no judge in it",
        str(tmp_path): "a drafter, not a judge",
        str(tmp_path / "broken"): "cannot be read",
    }.items():
        with pytest.raises(UserError, match=words):
            Judge(path)
    with pytest.raises(UserError, match=r"^acceptance\.threshold=1\.1: it is a probability"):
        Judge(other, 1.1)
    for key, value in (
        ("window", 0),
        ("places", 0),
        ("alternatives", 0),
        ("wrong_weight", 0.0),
        ("alternatives", target.head.vocab_size),
    ):
        with pytest.raises(UserError, match=rf"^drafter\.{key}={value}: .*use "):
            DraftJudge(target, **{key: value})


def test_batches_of_any_kind_are_judged_alike(target: Target) -> None:
    """The loss of documents in a batch, padded or packed, is the sum of their losses alone."""
    judge = DraftJudge(target, window=2, places=4)
    examples = make_examples(target)[:2]
    with torch.no_grad():
        judge.probe.weight.normal_(std=target.width**-0.5)
    batches = [
        collate(examples),
        collate(examples, packed=True),
        collate(examples[:1]),
        collate(examples[1:]),
    ]
    losses = []
    for batch in batches:
        features = target.features(batch.tokens, ("final",), batch.lengths)
        judged = replace(batch, features=features)
        losses.append(judge.loss(judged, target, TrainingState()).total.item())
    assert (
        losses[0]
        == pytest.approx(losses[2] + losses[3], rel=1e-4)
        == pytest.approx(losses[1], rel=1e-4)
    )

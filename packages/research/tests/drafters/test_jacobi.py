"""Jacobi decoding: a round's verification is the iteration, whose fixed point is the greedy
output; and CLLM's loss.
"""

from collections import Counter, defaultdict
from fractions import Fraction
from itertools import count, product
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.acceptance.rejection import SpeculativeSampling
from spectrain.decoding.acceptance.sequential import RandomSource, VerifiedTree
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.losses import forward_kl
from spectrain.errors import UserError
from spectrain.features.batch import Batch, collate
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.jacobi.drafter import Jacobi
from spectrain_research.jacobi.sampled_window import shift_window
from spectrain_research.jacobi.trajectories import Trajectories
from tests.decoding.rounds import Keeping
from tests.decoding.test_lossless import Joint, Path, every, models, target_joint
from tests.decoding.test_sampling import p_value
from tests.targets import cut_tiny, make_random_target
from tests.training.worker import dataset

METHODS: list[Literal["jacobi", "gauss_seidel"]] = ["jacobi", "gauss_seidel"]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [9, 10], [100, 3, 44, 8]]


def get_logits(target: Target, tokens: list[int]) -> Tensor:
    """Compute the target's logits [T, V]."""
    return target.head.logits(
        target.features(torch.tensor([tokens]), ("final",)).at_layer("final")[0]
    )


def compute_answers(target: Target, text: list[int], guesses: list[int]) -> list[int]:
    """Compute the target's answers at the end of a text and after each guess, by a forward over
    all of it.
    """
    best: list[int] = get_logits(target, text + guesses)[len(text) - 1 :].argmax(-1).tolist()
    return best


@pytest.mark.parametrize(
    "rule", [Greedy(), Match(temperature=0.8, seed=5)], ids=lambda rule: rule.name
)
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_round_is_an_iteration(
    shallow: Target, method: Literal["jacobi", "gauss_seidel"], rule: AcceptanceRule
) -> None:
    """The output is the target's, and every guess but new ones is the last forward's answer at
    the same position.
    """
    recorder = Keeping(Chain(4))
    window = 4
    generations = decode(
        shallow, PROMPTS, rule, 12, Jacobi(shallow, method), recorder, ignore_eos=True
    )
    assert [generation.output for generation in generations] == [
        generation.output for generation in decode(shallow, PROMPTS, rule, 12, ignore_eos=True)
    ]
    sizes = set()
    for (before, tree), (after, later) in zip(
        zip(recorder.texts, recorder.trees), zip(recorder.texts[1:], recorder.trees[1:])
    ):
        for row in range(len(PROMPTS)):
            count = len(after[row]) - len(before[row])
            if count == 0:  # done
                continue
            guesses = tree.tokens[row, 1:][tree.valid[row, 1:]].tolist()
            answers = compute_answers(shallow, before[row], guesses)[count:]
            answers = answers if method == "jacobi" else answers[: len(guesses) - count]
            new = later.tokens[row, 1:][later.valid[row, 1:]].tolist()
            assert new[: len(answers)] == answers[:window]
            is_full = method == "jacobi" or not answers  # a finished block gives way to a full one
            assert len(new) == (window if is_full else len(answers))
            sizes.add(len(new))
    assert (len(sizes) > 1) == (method == "gauss_seidel")


# Sampling


@pytest.mark.parametrize("kind", ["dense", "apart"])
def test_speculative_jacobi_has_the_target_distribution(kind: str) -> None:
    """Over every draw of the windows and every coin of three or more rounds, in fractions, the
    first three tokens have the target's joint distribution. Windows are drawn from the target's
    last distributions, which the tested code shifts."""
    length = 3
    width = 2
    vocab = 2
    p, _ = models(kind, vocab, length + width)
    initial = np.array([Fraction(1, 3), Fraction(2, 3)], dtype=object)

    def play_rounds(dice: RandomSource) -> tuple[Path, int]:
        text: Path = ()
        last: list[object] = []
        num_emitted = rounds = 0
        while len(text) < length:
            q = shift_window(last, num_emitted, width, initial)
            guesses = [dice.draw_token(weights, 0) for weights in q]
            prefixes = [(*text, *guesses[:size]) for size in range(width + 1)]
            after = [p[prefix] for prefix in prefixes]
            tree = VerifiedTree([0, *guesses], [[1], [2], []], after.__getitem__, q.__getitem__)
            path, bonus = SpeculativeSampling().select_path(tree, dice)
            last = after
            num_emitted = len(path)
            rounds = rounds + 1
            text = (*text, *guesses[: len(path) - 1], bonus)
        return text[:length], rounds

    joint: Joint = defaultdict(Fraction)
    numbers = set()
    for chance, (text, rounds) in every(play_rounds):
        joint[text] += chance
        numbers.add(rounds)
    assert joint == target_joint(p, length) and numbers == {1, 2, 3}


@pytest.fixture(scope="module")
def random_target() -> Target:
    return make_random_target(vocab_size=4, sharpness=2.0)


@torch.no_grad()
def test_windows_are_drawn_from_the_last_distributions(random_target: Target) -> None:
    """With forwards over full texts, q at each position is p at that position after the last
    window, at the rule's temperature, and the tokens of the text where no iteration has been."""
    recorder = Keeping(Chain(3, "sampled"))
    prompts = [[1, 2, 3, 1], [2, 2]]
    temperature = 0.7
    rule = SpeculativeSampling(temperature=temperature)
    decode(
        random_target,
        prompts,
        rule,
        10,
        Jacobi(random_target, "speculative"),
        recorder,
        ignore_eos=True,
    )
    num_reused = 0
    for number, (texts_after, tree) in enumerate(zip(recorder.texts, recorder.trees)):
        assert tree.q is not None
        for row, text in enumerate(texts_after):
            reused: list[Tensor] = []
            if number:
                before = recorder.texts[number - 1][row]
                window = recorder.trees[number - 1].tokens[row, 1:].tolist()
                p = (get_logits(random_target, before + window) / temperature).softmax(-1)[
                    len(before) - 1 :
                ]
                if len(text) == len(before):  # done
                    continue
                reused = list(p[len(text) - len(before) :])
            initial = torch.bincount(torch.tensor(text), minlength=4) / len(text)
            expected = torch.stack([*reused, *[initial] * 3][:3])
            torch.testing.assert_close(tree.q[row, :3], expected)
            num_reused += len(reused[:3])
    assert num_reused > 5


def test_speculative_jacobi_samples_from_the_target(random_target: Target) -> None:
    """In decoding, 1,500 texts of four tokens have the target's joint distribution; drafts were
    accepted and rejected.
    """
    prompt = [1, 2, 3, 1]
    length = 4
    paths = list(product(range(4), repeat=length))
    logits = random_target.run(
        torch.tensor([[*prompt, *path] for path in paths]), ForwardPlan(logits=True)
    ).logits
    assert logits is not None
    log_p = logits[:, len(prompt) - 1 : -1].double().log_softmax(-1)
    chances = log_p.gather(-1, torch.tensor(paths)[..., None]).sum((1, 2)).exp().tolist()
    builder = Chain(2, "sampled", seed=3)
    drafter = Jacobi(random_target, "speculative")
    generations = decode(
        random_target,
        [prompt] * 1500,
        SpeculativeSampling(seed=3),
        length,
        drafter,
        builder,
        ignore_eos=True,
    )
    assert (
        p_value([tuple(generation.output) for generation in generations], dict(zip(paths, chances)))
        > 1e-4
    )
    accepted = Counter(size for generation in generations for size in generation.round_lengths)
    assert min(accepted[1], accepted[2]) > 200


def test_speculative_jacobi_refuses_trees_that_branch(random_target: Target) -> None:
    with pytest.raises(UserError, match="drafter.method=speculative: .*use tree=chain"):
        decode(
            random_target,
            [[1, 2]],
            Greedy(),
            4,
            Jacobi(random_target, "speculative"),
            Eagle2(2, 4, 2),
            ignore_eos=True,
        )


def make_texts(packed: bool = False) -> Batch:
    data = dataset(3, 16)
    return collate([data[[n]][0] for n in range(3)], packed)


@torch.no_grad()
def test_the_fixed_point_is_the_greedy_answer(shallow: Target) -> None:
    """Every trajectory ends in greedy decoding after the root, and has its first j tokens after j
    steps; the same in a packed batch and alone."""
    roots, states = Trajectories(4, 2, 0).get_trajectories(make_texts(), shallow)
    texts_of_blocks = [
        tokens[: root + 1].tolist()
        for (tokens, _), row in zip(make_texts().split_documents(), roots)
        for root in row
    ]
    assert states.shape == (5, len(texts_of_blocks), 4) and len(texts_of_blocks) == 6
    for number, text in enumerate(texts_of_blocks):
        expected = decode(shallow, [text], Greedy(), 4, ignore_eos=True)[0].output
        for step in range(5):
            assert states[step, number, :step].tolist() == expected[:step]
        assert {*states[0, number].tolist()} <= {*text} and states[1, number].tolist() != expected
    packed_roots, packed = Trajectories(4, 2, 0).get_trajectories(make_texts(packed=True), shallow)
    assert packed_roots == roots and torch.equal(packed, states)


@torch.no_grad()
def test_cached_trajectories_are_not_run_again(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second epoch does not run the target for trajectories."""
    trajectories = Trajectories(4, 2, 0)
    roots, states = trajectories.get_trajectories(make_texts(), shallow)
    monkeypatch.setattr(Target, "run", lambda *args: pytest.fail("the target was run"))
    cached = trajectories.get_trajectories(make_texts(), shallow)
    assert cached[0] == roots and torch.equal(cached[1], states)


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_is_cllms(packed: bool) -> None:
    """The loss is KL(p(. | x, y*) || p(. | x, y)) of every block, by forwards over it alone, plus
    the text's KL(original || trained)."""
    target = cut_tiny(3)
    original = cut_tiny(3)
    drafter = Jacobi(
        target, block=4, num_blocks=2, self_distillation=True, language_model_weight=0.5
    )
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    with torch.no_grad():
        for parameter in drafter.target_training.parameters:
            parameter.add_(0.02 * torch.randn_like(parameter))
    batch = make_texts(packed)
    with torch.no_grad():
        losses = drafter.loss(batch, target, TrainingState(step=2))
        (roots, states), modelled = drafter.trajectories.get_trajectories(batch, original), 0.0
        steps = []
        numbers = count()
        for (tokens, mask), row in zip(batch.split_documents(), roots):
            text = tokens.tolist()
            total = [0.0] * 4
            for root, number in zip(row, numbers):
                fixed = get_logits(target, text[: root + 1] + states[-1, number].tolist())[
                    root + 1 :
                ].log_softmax(-1)
                for step in range(4):
                    log_q = get_logits(target, text[: root + 1] + states[step, number].tolist())[
                        root + 1 :
                    ].log_softmax(-1)
                    total[step] += float(forward_kl(fixed, log_q).sum())
            share = int(mask.sum()) / (4 * len(row))  # as many terms as tokens that carry loss
            steps.append([share * value for value in total])
            supervised = mask[1:].nonzero()[:, 0]
            log_p, log_q = (
                get_logits(model, text)[supervised].log_softmax(-1) for model in (original, target)
            )
            modelled += float(forward_kl(log_p, log_q).sum())
    sums = [0.0]
    for row in steps:  # one state of each text was drawn
        sums = [value + more for value in sums for more in row]
    consistency = float(losses.terms["consistency"])
    assert consistency > 0 and min(abs(consistency - value) for value in sums) < 1e-3 * consistency
    assert float(losses.terms["language_model"]) == pytest.approx(0.5 * modelled, rel=1e-3)
    assert losses.counts.sum() == 4 * states.shape[1]

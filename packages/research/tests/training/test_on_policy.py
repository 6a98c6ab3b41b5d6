"""On-policy text is that of the target, the drafter or both, and everything else is the data's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.acceptance.sequential import VerifiedTree
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from spectrain.training.validation import evaluation_mode
from spectrain.trees import Chain
from spectrain_research.on_policy.interleaved import InterleavedSampling
from spectrain_research.on_policy.source import GeneratedSource
from spectrain_research.shared.draft_replay import DraftRecorder, ReplayBatch

COLD = 1e-4
ANSWER = 10
LENGTHS = (5, 9, 7, 6)
WRITERS = ["drafter", "target", "interleaved"]


def make_dataset(answers: tuple[int, ...] = (ANSWER,) * 4) -> Dataset:
    """Make prompts of unequal length with answers of these lengths; the first example has a
    second turn.
    """
    torch.manual_seed(5)
    examples = []
    for number, (prompt, answer) in enumerate(zip(LENGTHS, answers)):
        tokens = torch.randint(3, 2000, (prompt + answer,)).tolist()
        mask = [position >= prompt for position in range(len(tokens))]
        if number == 0 and answer > 6:
            mask[prompt + 3 : prompt + 5] = [False, False]
        examples.append(Example(tokens, mask))
    return Dataset(examples, len(examples), 0, 0)


PROMPTS = [example.tokens[:length] for example, length in zip(make_dataset().examples, LENGTHS)]
ALL_ROWS = list(range(4))


def make_drafter(shallow: Target) -> Causal:
    """Make a drafter that is often right: the target without its last layers."""
    return Causal(shallow, num_layers=2)


def read_answers(batch: Batch) -> list[list[int]]:
    """Return the new answers: the supervised tokens, which must all follow the prompt."""
    answers = []
    for tokens, mask, length in zip(batch.tokens.tolist(), batch.loss_mask.tolist(), LENGTHS):
        end = length + sum(mask)
        assert mask == [length <= position < end for position in range(len(mask))]
        answers.append(tokens[length:end])
    return answers


def write_greedily(
    target: Target, prompts: list[list[int]], limit: int = ANSWER
) -> list[list[int]]:
    """Return a model's own greedy output, each prompt alone."""
    return [decode(target, [prompt], Greedy(), limit)[0].output for prompt in prompts]


# Generated text


@pytest.mark.parametrize("by", [*WRITERS, "replay"])
def test_without_a_fraction_it_is_the_data(shallow: Target, by: Any) -> None:
    """fraction=0 gives the tokens, mask and features of source=live; with by=replay no token is
    past an error.
    """
    layers = ("final",)
    actual = GeneratedSource(0.0, by, max_new_tokens=10).make_batch(
        BatchRequest(
            make_dataset()[ALL_ROWS], shallow, layers, step=3, drafter=make_drafter(shallow)
        )
    )
    expected = LiveSource().make_batch(BatchRequest(make_dataset()[ALL_ROWS], shallow, layers))
    assert torch.equal(actual.tokens, expected.tokens) and torch.equal(
        actual.loss_mask, expected.loss_mask
    )
    assert actual.features is not None and expected.features is not None
    assert torch.equal(actual.features.hidden, expected.features.hidden)
    assert isinstance(actual, ReplayBatch) == (by == "replay")
    assert not isinstance(actual, ReplayBatch) or bool((actual.tokens_past_error == -1).all())


@pytest.mark.parametrize("by", ["target", "drafter", "interleaved"])
def test_a_cold_writer_writes_greedily(shallow: Target, by: Any) -> None:
    """Near temperature 0 each writer gives its greedy text; interleaved with top_k=1 gives the
    target's.
    """
    drafter = make_drafter(shallow)
    batch = GeneratedSource(1.0, by, temperature=COLD, top_k=1, max_new_tokens=10).make_batch(
        BatchRequest(make_dataset()[ALL_ROWS], shallow, (), step=2, drafter=drafter)
    )
    assert [row[:length] for row, length in zip(batch.tokens.tolist(), LENGTHS)] == PROMPTS
    assert read_answers(batch) == write_greedily(
        drafter.model if by == "drafter" else shallow, PROMPTS
    )
    assert write_greedily(drafter.model, PROMPTS) != write_greedily(shallow, PROMPTS)
    assert batch.features is None and not isinstance(batch, ReplayBatch)


@pytest.mark.sweep(1, free=("by",))
@pytest.mark.parametrize("by", [*WRITERS, "replay"])
def test_features_are_those_of_the_new_tokens(shallow: Target, by: Any) -> None:
    """Features are the target's over the generated text."""
    batch = GeneratedSource(1.0, by, max_new_tokens=10).make_batch(
        BatchRequest(
            make_dataset()[ALL_ROWS], shallow, (2, "final"), step=2, drafter=make_drafter(shallow)
        )
    )
    assert batch.features is not None and torch.equal(batch.features.tokens, batch.tokens)
    for row, tokens in enumerate(batch.tokens):
        length = int(batch.loss_mask[row].nonzero().max()) + 1
        alone = shallow.features(tokens[None, :length], (2, "final"))
        torch.testing.assert_close(
            batch.features.hidden[row, :length], alone.hidden[0], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("by", WRITERS)
@pytest.mark.parametrize(
    ("answers", "most", "expected"), [((4, 4, 4, 4), 7, 7), ((9, 9, 9, 9), 3, 3)]
)
def test_answers_have_a_limit(
    shallow: Target, by: Any, answers: tuple[int, ...], most: int, expected: int
) -> None:
    """An answer has at most max_new_tokens, whatever the data's length."""
    batch = GeneratedSource(1.0, by, max_new_tokens=most).make_batch(
        BatchRequest(
            make_dataset(answers)[ALL_ROWS], shallow, (), step=1, drafter=make_drafter(shallow)
        )
    )
    for answer in read_answers(batch):
        assert len(answer) == expected or (
            answer[-1] in shallow.stop_ids and len(answer) < expected
        )


@pytest.mark.parametrize("by", [*WRITERS, "replay"])
def test_a_prompt_that_nearly_fills_the_context_is_no_accident(shallow: Target, by: Any) -> None:
    """A prompt as long as the target's context allows, cut right behind it, raises no error."""
    length = shallow.max_length
    data = Dataset(
        [Example([5, 6] * (length // 2), [position == length - 1 for position in range(length)])],
        1,
        0,
        0,
    )
    batch = GeneratedSource(1.0, by, max_new_tokens=10).make_batch(
        BatchRequest(data[[0]], shallow, (), step=0, drafter=make_drafter(shallow))
    )
    assert batch.tokens[0, : length - 1].tolist() == data.examples[0].tokens[:-1]


def rounds_of(
    shallow: Target, drafter: Causal, source: GeneratedSource, step: int
) -> tuple[list[Generation], DraftRecorder]:
    """Decode as a source does in a step, and record every round."""
    seed = source.seed + 1_000_003 * step
    recorder = DraftRecorder(Chain(source.block, "sampled", source.temperature, seed))
    rule = InterleavedSampling(source.temperature, source.top_k, seed)
    rows = [int(example.content_hash[:7], 16) for example in make_dataset().examples]
    return decode(shallow, PROMPTS, rule, ANSWER, drafter, recorder, rows), recorder


@pytest.mark.parametrize("top_k", [3, 25])
def test_interleaved_keeps_what_is_among_the_top_k(shallow: Target, top_k: int) -> None:
    """In every round drafted tokens are accepted while they are among the target's top_k, and the
    replaced one is not among them."""
    drafter = make_drafter(shallow).eval()
    num_replaced = 0
    num_accepted = 0
    source = GeneratedSource(1.0, "interleaved", top_k=top_k, block=3, max_new_tokens=10)
    generations, recorder = rounds_of(shallow, drafter, source, 4)
    assert read_answers(
        source.make_batch(
            BatchRequest(make_dataset()[ALL_ROWS], shallow, (), step=4, drafter=drafter)
        )
    ) == [generation.output for generation in generations]
    for generation, rounds in zip(generations, recorder.rounds):
        text = generation.prompt + generation.output
        end = len(generation.prompt) + 1
        for drafted, count in rounds:
            logits = shallow.run(
                torch.tensor([text[:end] + drafted]), ForwardPlan(logits=True)
            ).logits
            assert logits is not None
            ranks = [
                int((logits[0, end - 1 + n] > logits[0, end - 1 + n, token]).sum())
                for n, token in enumerate(drafted)
            ]
            num_own = next(
                (index for index, rank in enumerate(ranks) if rank >= top_k), len(drafted)
            )
            assert count == min(num_own + 1, len(drafted))
            assert text[end : end + num_own] == drafted[:num_own][: len(text) - end]
            num_accepted = num_accepted + num_own
            num_replaced = num_replaced + (num_own < len(drafted))
            end = end + count
    assert num_accepted > 3 and num_replaced > 3


def test_interleaved_with_every_token_allowed_is_the_drafters_text(shallow: Target) -> None:
    """With top_k=vocabulary nothing is replaced: all tokens after the prefill's are the
    drafter's own.
    """
    drafter = make_drafter(shallow).eval()
    block = 3
    source = GeneratedSource(
        1.0,
        "interleaved",
        temperature=COLD,
        top_k=shallow.head.vocab_size,
        block=block,
        max_new_tokens=10,
    )
    generations, _ = rounds_of(shallow, drafter, source, 0)
    answers = read_answers(
        source.make_batch(
            BatchRequest(make_dataset()[ALL_ROWS], shallow, (), step=0, drafter=drafter)
        )
    )
    assert answers == [generation.output for generation in generations]
    for generation in generations:
        assert set(generation.round_lengths) == {block}
        assert generation.output[:1] == write_greedily(shallow, [generation.prompt], 2)[0][:1]
        own = write_greedily(
            drafter.model, [generation.prompt + generation.output[:1]], len(generation.output)
        )[0]
        assert generation.output[1:] == own[: len(generation.output) - 1]


# Draws


@pytest.mark.sweep(1, free=("by",))
@pytest.mark.parametrize("by", WRITERS)
def test_a_step_repeats_and_steps_differ(shallow: Target, by: Any) -> None:
    """The same step gives the same batch from another source of the same seed; another step or
    seed gives another.
    """
    drafter = make_drafter(shallow)

    def write_tokens(seed: int, step: int) -> list[list[int]]:
        return read_answers(
            GeneratedSource(1.0, by, temperature=2.0, seed=seed, max_new_tokens=10).make_batch(
                BatchRequest(make_dataset()[ALL_ROWS], shallow, (), step=step, drafter=drafter)
            )
        )

    first = write_tokens(0, 3)
    assert write_tokens(0, 3) == first
    for other in (write_tokens(0, 4), write_tokens(1, 3)):
        assert all(answer != other_answer for answer, other_answer in zip(first, other))


@pytest.mark.sweep(1, free=("by",))
@pytest.mark.parametrize("by", WRITERS)
def test_an_answer_does_not_depend_on_its_batch(shallow: Target, by: Any) -> None:
    """Each sequence has its own draws: alone in a batch it is the same, and equal prompts
    differ.
    """
    drafter = make_drafter(shallow)
    source = GeneratedSource(1.0, by, temperature=2.0, max_new_tokens=10)
    batched = read_answers(
        source.make_batch(
            BatchRequest(make_dataset()[ALL_ROWS], shallow, (), step=1, drafter=drafter)
        )
    )
    for index in ALL_ROWS:
        alone = source.make_batch(
            BatchRequest(make_dataset()[[index]], shallow, (), step=1, drafter=drafter)
        )
        assert alone.tokens[0, LENGTHS[index] :].tolist() == batched[index]
    example = make_dataset().examples[1]
    twin = Example([*example.tokens[:-1], 5], example.mask)  # the same prompt
    twins = source.make_batch(
        BatchRequest([example, twin], shallow, (), step=1, drafter=drafter)
    ).tokens
    assert not torch.equal(twins[0], twins[1])


class Marked(GeneratedSource):
    """Writes 7 in every position of an answer's text."""

    def _write_answers(
        self, examples: list[Example], target: Target, drafter: Any, step: int
    ) -> list[Example]:
        return [Example([7] * len(example.tokens), example.mask) for example in examples]


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_a_fraction_of_the_sequences_is_new(shallow: Target, fraction: float) -> None:
    """Each sequence is drawn independently: the number of new ones has the binomial's mean and
    variance.
    """
    source = Marked(fraction)
    data = make_dataset()
    drafter = make_drafter(shallow)
    batches = [
        source.make_batch(BatchRequest(data[ALL_ROWS], shallow, (), step=step, drafter=drafter))
        for step in range(400)
    ]
    new = torch.stack([(batch.tokens[:, 0] == 7) for batch in batches]).float()
    assert new.mean().item() == pytest.approx(fraction, abs=0.04)
    assert new.sum(1).var().item() == pytest.approx(4 * fraction * (1 - fraction), rel=0.25)
    assert (new.mean(0) - fraction).abs().max() < 0.08
    for batch, flags in zip(batches[:20], new):
        for row, example in enumerate(data.examples):
            old = batch.tokens[row, : len(example.tokens)].tolist() == example.tokens
            assert old == (flags[row] == 0)


def test_only_what_was_drawn_is_written(shallow: Target) -> None:
    """In a mixed batch the sequences that were not drawn are the data's, in their order."""
    drafter = make_drafter(shallow)
    data = make_dataset()
    for step in range(10):
        batch = GeneratedSource(0.5, "target", temperature=COLD, max_new_tokens=10).make_batch(
            BatchRequest(data[ALL_ROWS], shallow, (), step=step, drafter=drafter)
        )
        marked = Marked(0.5).make_batch(
            BatchRequest(data[ALL_ROWS], shallow, (), step=step, drafter=drafter)
        )
        for row, example in enumerate(data.examples):
            expected = example.tokens
            if marked.tokens[row, 0] == 7:
                expected = PROMPTS[row] + write_greedily(shallow, [PROMPTS[row]])[0]
            assert batch.tokens[row, : len(expected)].tolist() == expected


# The drafter that writes


@pytest.mark.sweep(3)
@pytest.mark.parametrize("by", [*WRITERS, "replay"])
@pytest.mark.parametrize("training", [True, False])
def test_the_drafters_mode_is_restored(shallow: Target, by: Any, training: bool) -> None:
    """The drafter generates in evaluation mode, and its mode is restored."""
    drafter = make_drafter(shallow).train(training)
    modes = []
    handle = drafter.model.decoder.register_forward_hook(lambda *_: modes.append(drafter.training))
    GeneratedSource(1.0, by, max_new_tokens=10).make_batch(
        BatchRequest(make_dataset()[ALL_ROWS], shallow, (), step=0, drafter=drafter)
    )
    handle.remove()
    assert drafter.training is training and drafter.model.model.training is training
    assert not any(modes) and bool(modes) == (by != "target")


def test_the_mode_is_restored_after_an_error(shallow: Target) -> None:
    """After an error while generating, the drafter is in training mode."""
    drafter = make_drafter(shallow).train()
    with pytest.raises(KeyError), evaluation_mode(drafter):
        assert not drafter.training
        raise KeyError
    assert drafter.training


def test_a_family_that_cannot_write_is_refused(shallow: Target) -> None:
    """source.by=drafter needs a drafter that is a model by itself; other writers take any."""
    drafter = Eagle3(shallow, vocab_size=2048)
    with pytest.raises(UserError, match=r"source\.by=drafter: this family cannot write"):
        GeneratedSource(1.0, "drafter", max_new_tokens=10).make_batch(
            BatchRequest(make_dataset()[ALL_ROWS], shallow, (), step=0, drafter=drafter)
        )
    batch = GeneratedSource(
        1.0, "interleaved", temperature=COLD, top_k=1, max_new_tokens=10
    ).make_batch(BatchRequest(make_dataset()[ALL_ROWS], shallow, (), step=0, drafter=drafter))
    assert read_answers(batch) == write_greedily(shallow, PROMPTS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fraction", -0.1),
        ("fraction", 1.1),
        ("temperature", 0.0),
        ("max_new_tokens", 0),
        ("top_k", 0),
        ("block", 0),
    ],
)
def test_bad_settings_are_refused(key: str, value: Any) -> None:
    """A setting out of range is refused under its own key."""
    with pytest.raises(UserError, match=rf"source\.{key}={value}"):
        GeneratedSource(**{key: value})


# Training


def fit_drafter(shallow: Target, run: Path, source: Source, kill: int | None = None) -> Causal:
    """Train four steps over small batches; with `kill`, stop after that step and resume with a
    new drafter.
    """
    trainer = Trainer(lr=1e-3, max_steps=4, batch_tokens=60, log_every=1, save_every=2)
    torch.manual_seed(3)
    drafter = Causal(shallow, num_layers=2)

    def stop_at_step(step: int) -> None:
        if step == kill:
            raise InterruptedError

    if kill is not None:
        with pytest.raises(InterruptedError):
            trainer.fit(drafter, shallow, make_dataset(), source, run, on_step=stop_at_step)
        drafter = Causal(shallow, num_layers=2)
    trainer.fit(drafter, shallow, make_dataset(), source, run)
    return drafter


@pytest.fixture(scope="module")
def live_drafter(shallow: Target, tmp_path_factory: pytest.TempPathFactory) -> Causal:
    """Train a drafter on the data alone."""
    return fit_drafter(shallow, tmp_path_factory.mktemp("live"), LiveSource())


@pytest.mark.sweep(2, free=("by",))
@pytest.mark.parametrize("by", [*WRITERS, "replay"])
def test_trainings_repeat_and_resume(
    shallow: Target, live_drafter: Causal, tmp_path: Path, by: Any
) -> None:
    """Two runs of one seed end in identical weights, and so does one that was killed on the way."""
    runs = [
        fit_drafter(shallow, tmp_path / str(n), GeneratedSource(0.7, by, max_new_tokens=6), kill)
        for n, kill in enumerate((None, None, 3))
    ]
    for name, value in runs[0].state_dict().items():
        assert torch.equal(value, runs[1].state_dict()[name]) and torch.equal(
            value, runs[2].state_dict()[name]
        ), name
    assert any(
        not torch.equal(value, live_drafter.state_dict()[name])
        for name, value in runs[0].state_dict().items()
    )


# The rule


def make_chain(
    tokens: list[int], logits: list[list[float]], temperature: float = 1.0
) -> VerifiedTree:
    """Make a chain of drafted tokens behind a root, with the target's logits after every node."""
    count = len(tokens) + 1
    scores = torch.tensor(logits, dtype=torch.float64) / temperature
    children = [[node + 1] if node + 1 < count else [] for node in range(count)]
    return VerifiedTree(
        [9, *tokens],
        children,
        lambda node: scores[node].softmax(-1),
        lambda node: scores[node].softmax(-1),
        False,
        lambda node: scores[node],
    )


class LikeliestDice:
    """Dice that always draw the likeliest token and never flip a coin."""

    def flip_coin(self, chance: Any, node: int, number: int = 0) -> bool:
        raise AssertionError("the rule tosses no coin")

    def draw_token(self, weights: Tensor, node: int) -> int:
        return int(weights.argmax())


FALLING = [4.0, 3.0, 2.0, 1.0]  # token v is the target's choice number v
RISING = FALLING[::-1]
CASES = [
    # all likeliest: accepted, and the last one ends the round
    ([0, 0], [FALLING, FALLING, RISING], 1, 2, 0),
    ([1, 0], [FALLING, FALLING, RISING], 1, 1, 0),  # the second choice is not among the top 1
    ([1, 0], [FALLING, FALLING, RISING], 2, 2, 0),
    # what follows the replaced token is dropped
    ([0, 1, 3, 0], [FALLING, FALLING, RISING, FALLING, RISING], 1, 2, 0),
    ([2, 2, 3], [FALLING, FALLING, FALLING, RISING], 3, 3, 0),
    ([3, 3], [FALLING, FALLING, RISING], 4, 2, 3),  # everything is among the top of the vocabulary
    ([], [RISING], 1, 1, 3),  # a root alone
    ([2, 0], [[1.0, 1.0, 1.0, 0.0], FALLING, RISING], 1, 2, 0),  # of equal ones none is likelier
]


@pytest.mark.parametrize(("tokens", "logits", "top_k", "num_accepted", "following"), CASES)
def test_interleaved_on_rows_by_hand(
    tokens: list[int], logits: Any, top_k: int, num_accepted: int, following: int
) -> None:
    """A path is accepted up to the first token outside the top_k, which the target's own draw
    replaces, or to its end.
    """
    assert InterleavedSampling(top_k=top_k).select_path(
        make_chain(tokens, logits), LikeliestDice()
    ) == (
        list(range(num_accepted)),
        following,
    )


@pytest.mark.parametrize("temperature", [5.0, 1.0, 0.1, 1e-2, 1e-3])
def test_interleaved_judges_by_rank_at_any_temperature(temperature: float) -> None:
    """Temperature changes the target's draw only: the accepted path is the same, however small
    probabilities become.
    """
    logits = [[20.0, 10.0, 5.0, 0.0]] * 4
    tree = make_chain([1, 3, 0], logits, temperature)
    assert InterleavedSampling(temperature, top_k=2).select_path(tree, LikeliestDice())[0] == [0, 1]


def test_interleaved_draws_from_the_tempered_target() -> None:
    """The replacement is drawn from the target's full distribution, without top_k."""
    recorded_weights: list[Tensor] = []

    class RecordingDice(LikeliestDice):
        def draw_token(self, weights: Tensor, node: int) -> int:
            recorded_weights.append(weights)
            return 0

    InterleavedSampling(2.0, top_k=1).select_path(
        make_chain([1], [FALLING, RISING], 2.0), RecordingDice()
    )
    torch.testing.assert_close(
        recorded_weights[0], (torch.tensor(FALLING, dtype=torch.float64) / 2).softmax(-1)
    )
    assert InterleavedSampling(2.0, top_k=1).shape_logits(torch.tensor(FALLING)).isfinite().all()


def test_interleaved_says_what_it_is() -> None:
    """The rule is lossy, judges drawn and deterministic chains, and refuses a tree that
    branches.
    """
    rule = InterleavedSampling()
    assert not rule.lossless
    rule.check_children("deterministic", True)
    rule.check_children("sampled", True)
    with pytest.raises(UserError, match="judges one path"):
        rule.check_children("sampled", False)

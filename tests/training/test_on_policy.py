"""On-policy text is what the target, the drafter or both would write, and everything else is the data's."""

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
from spectrain.experimental.on_policy.interleaved import InterleavedSampling
from spectrain.experimental.on_policy.source import GeneratedSource
from spectrain.experimental.shared.draft_replay import DraftRecorder
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from spectrain.training.validation import evaluation_mode
from spectrain.trees import Chain

COLD = 1e-4
ANSWER = 10
LENGTHS = (5, 9, 7, 6)
WAYS = ["drafter", "target", "interleaved"]


def dataset(answers: tuple[int, ...] = (ANSWER,) * 4) -> Dataset:
    """Prompts of unequal length with answers of these lengths; the first example goes on with a second turn."""
    torch.manual_seed(5)
    found = []
    for number, (prompt, answer) in enumerate(zip(LENGTHS, answers)):
        row = torch.randint(3, 2000, (prompt + answer,)).tolist()
        mask = [place >= prompt for place in range(len(row))]
        if number == 0 and answer > 6:
            mask[prompt + 3 : prompt + 5] = [False, False]
        found.append(Example(row, mask))
    return Dataset(found, len(found), 0, 0)


PROMPTS = [example.tokens[:length] for example, length in zip(dataset().examples, LENGTHS)]
EVERY = list(range(4))


def make(shallow: Target) -> Causal:
    """A drafter that is often right: the target without the last of its layers."""
    return Causal(shallow, num_layers=2)


def written(batch: Batch) -> list[list[int]]:
    """The new answers: what is supervised, which must be all behind the prompt."""
    found = []
    for tokens, mask, length in zip(batch.tokens.tolist(), batch.loss_mask.tolist(), LENGTHS):
        end = length + sum(mask)
        assert mask == [length <= place < end for place in range(len(mask))]
        found.append(tokens[length:end])
    return found


def greedy(target: Target, prompts: list[list[int]], limit: int = ANSWER) -> list[list[int]]:
    """What a model writes by itself at temperature 0, each prompt alone."""
    return [decode(target, [prompt], Greedy(), limit)[0].output for prompt in prompts]


# What is written


@pytest.mark.parametrize("by", [*WAYS, "replay"])
def test_without_a_fraction_it_is_the_data(shallow: Target, by: Any) -> None:
    """fraction=0 gives the tokens, the mask and the features of source=live; by=replay, nothing of it rejected."""
    layers = ("final",)
    mine = GeneratedSource(0.0, by, max_new_tokens=10).make_batch(
        BatchRequest(dataset()[EVERY], shallow, layers, step=3, drafter=make(shallow))
    )
    theirs = LiveSource().make_batch(BatchRequest(dataset()[EVERY], shallow, layers))
    assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.loss_mask, theirs.loss_mask)
    assert mine.features is not None and theirs.features is not None
    assert torch.equal(mine.features.hidden, theirs.features.hidden)
    assert (mine.tokens_past_error is None) == (by != "replay") and (
        mine.tokens_past_error is None or bool((mine.tokens_past_error == -1).all())
    )


@pytest.mark.parametrize("by", ["target", "drafter", "interleaved"])
def test_a_cold_writer_writes_greedily(shallow: Target, by: Any) -> None:
    """Near temperature 0 each writes its greedy text; interleaved with top_k=1, that is the target's."""
    drafter = make(shallow)
    batch = GeneratedSource(1.0, by, temperature=COLD, top_k=1, max_new_tokens=10).make_batch(
        BatchRequest(dataset()[EVERY], shallow, (), step=2, drafter=drafter)
    )
    assert [row[:length] for row, length in zip(batch.tokens.tolist(), LENGTHS)] == PROMPTS
    assert written(batch) == greedy(drafter.model if by == "drafter" else shallow, PROMPTS)
    assert greedy(drafter.model, PROMPTS) != greedy(shallow, PROMPTS)
    assert batch.features is None and batch.tokens_past_error is None


@pytest.mark.sweep(1, free=("by",))
@pytest.mark.parametrize("by", [*WAYS, "replay"])
def test_features_are_those_of_the_new_tokens(shallow: Target, by: Any) -> None:
    """A drafter that reads features gets the target's over what was written."""
    batch = GeneratedSource(1.0, by, max_new_tokens=10).make_batch(
        BatchRequest(dataset()[EVERY], shallow, (2, "final"), step=2, drafter=make(shallow))
    )
    assert batch.features is not None and torch.equal(batch.features.tokens, batch.tokens)
    for row, tokens in enumerate(batch.tokens):
        length = int(batch.loss_mask[row].nonzero().max()) + 1
        alone = shallow.features(tokens[None, :length], (2, "final"))
        torch.testing.assert_close(batch.features.hidden[row, :length], alone.hidden[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize(("answers", "most", "expected"), [((4, 4, 4, 4), 7, 7), ((9, 9, 9, 9), 3, 3)])
def test_answers_have_a_limit(shallow: Target, by: Any, answers: tuple[int, ...], most: int, expected: int) -> None:
    """An answer has max_new_tokens, whatever the data's length, unless it ends before."""
    batch = GeneratedSource(1.0, by, max_new_tokens=most).make_batch(
        BatchRequest(dataset(answers)[EVERY], shallow, (), step=1, drafter=make(shallow))
    )
    for answer in written(batch):
        assert len(answer) == expected or (answer[-1] in shallow.stop_ids and len(answer) < expected)


@pytest.mark.parametrize("by", [*WAYS, "replay"])
def test_a_prompt_that_nearly_fills_the_context_is_no_accident(shallow: Target, by: Any) -> None:
    """Training does not stop at a conversation that the data cut right behind its prompt, at the target's longest."""
    length = shallow.max_length
    data = Dataset([Example([5, 6] * (length // 2), [place == length - 1 for place in range(length)])], 1, 0, 0)
    batch = GeneratedSource(1.0, by, max_new_tokens=10).make_batch(
        BatchRequest(data[[0]], shallow, (), step=0, drafter=make(shallow))
    )
    assert batch.tokens[0, : length - 1].tolist() == data.examples[0].tokens[:-1]


def rounds_of(shallow: Target, drafter: Causal, source: GeneratedSource, step: int) -> tuple[list[Generation], DraftRecorder]:
    """The decoding that a source does in a step, with every round on record."""
    seed = source.seed + 1_000_003 * step
    recorder = DraftRecorder(Chain(source.block, "sampled", source.temperature, seed))
    rule = InterleavedSampling(source.temperature, source.top_k, seed)
    rows = [int(example.content_hash[:7], 16) for example in dataset().examples]
    return decode(shallow, PROMPTS, rule, ANSWER, drafter, recorder, rows), recorder


@pytest.mark.parametrize("top_k", [3, 25])
def test_interleaved_keeps_what_is_among_the_top_k(shallow: Target, top_k: int) -> None:
    """In every round the drafted tokens are the drafter's as long as they are among the target's top_k, and the one that it
    replaced is not."""
    drafter, replaced, kept = make(shallow).eval(), 0, 0
    source = GeneratedSource(1.0, "interleaved", top_k=top_k, block=3, max_new_tokens=10)
    found, recorder = rounds_of(shallow, drafter, source, 4)
    assert written(source.make_batch(BatchRequest(dataset()[EVERY], shallow, (), step=4, drafter=drafter))) == [
        one.output for one in found
    ]
    for one, rounds in zip(found, recorder.rounds):
        text = one.prompt + one.output
        end = len(one.prompt) + 1
        for drafted, count in rounds:
            logits = shallow.run(torch.tensor([text[:end] + drafted]), ForwardPlan(logits=True)).logits
            assert logits is not None
            ranks = [int((logits[0, end - 1 + n] > logits[0, end - 1 + n, token]).sum()) for n, token in enumerate(drafted)]
            own = next((place for place, rank in enumerate(ranks) if rank >= top_k), len(drafted))
            assert count == min(own + 1, len(drafted))
            assert text[end : end + own] == drafted[:own][: len(text) - end]
            kept, replaced, end = kept + own, replaced + (own < len(drafted)), end + count
    assert kept > 3 and replaced > 3


def test_interleaved_with_every_token_allowed_is_the_drafters_text(shallow: Target) -> None:
    """With top_k the whole vocabulary nothing is replaced: behind the prefill's token all are the drafter's own."""
    drafter, block = make(shallow).eval(), 3
    source = GeneratedSource(
        1.0, "interleaved", temperature=COLD, top_k=shallow.head.vocab_size, block=block, max_new_tokens=10
    )
    found, _ = rounds_of(shallow, drafter, source, 0)
    answers = written(source.make_batch(BatchRequest(dataset()[EVERY], shallow, (), step=0, drafter=drafter)))
    assert answers == [one.output for one in found]
    for one in found:
        assert set(one.round_lengths) == {block}
        assert one.output[:1] == greedy(shallow, [one.prompt], 2)[0][:1]
        own = greedy(drafter.model, [one.prompt + one.output[:1]], len(one.output))[0]
        assert one.output[1:] == own[: len(one.output) - 1]


# Chance


@pytest.mark.sweep(1, free=("by",))
@pytest.mark.parametrize("by", WAYS)
def test_a_step_repeats_and_steps_differ(shallow: Target, by: Any) -> None:
    """The same step gives the same batch from another source of the same seed; another step or seed gives another."""
    drafter = make(shallow)

    def tokens(seed: int, step: int) -> list[list[int]]:
        return written(
            GeneratedSource(1.0, by, temperature=2.0, seed=seed, max_new_tokens=10).make_batch(
                BatchRequest(dataset()[EVERY], shallow, (), step=step, drafter=drafter)
            )
        )

    first = tokens(0, 3)
    assert tokens(0, 3) == first
    for other in (tokens(0, 4), tokens(1, 3)):
        assert all(mine != theirs for mine, theirs in zip(first, other))


@pytest.mark.sweep(1, free=("by",))
@pytest.mark.parametrize("by", WAYS)
def test_an_answer_does_not_depend_on_its_batch(shallow: Target, by: Any) -> None:
    """Each sequence's draws are its own: alone in a batch it is written the same, and no two share their draws."""
    drafter, source = make(shallow), GeneratedSource(1.0, by, temperature=2.0, max_new_tokens=10)
    together = written(source.make_batch(BatchRequest(dataset()[EVERY], shallow, (), step=1, drafter=drafter)))
    for index in EVERY:
        alone = source.make_batch(BatchRequest(dataset()[[index]], shallow, (), step=1, drafter=drafter))
        assert alone.tokens[0, LENGTHS[index] :].tolist() == together[index]
    one = dataset().examples[1]
    other = Example([*one.tokens[:-1], 5], one.mask)  # the same prompt
    twins = source.make_batch(BatchRequest([one, other], shallow, (), step=1, drafter=drafter)).tokens
    assert not torch.equal(twins[0], twins[1])


class Marked(GeneratedSource):
    """Writes 7 in place of every answer."""

    def _write_answers(self, examples: list[Example], target: Target, drafter: Any, step: int) -> list[Example]:
        return [Example([7] * len(example.tokens), example.mask) for example in examples]


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_a_fraction_of_the_sequences_is_new(shallow: Target, fraction: float) -> None:
    """Each sequence is drawn by itself: the number of new ones in a batch of 4 has the binomial's mean and variance."""
    source, data, drafter = Marked(fraction), dataset(), make(shallow)
    batches = [source.make_batch(BatchRequest(data[EVERY], shallow, (), step=step, drafter=drafter)) for step in range(400)]
    new = torch.stack([(batch.tokens[:, 0] == 7) for batch in batches]).float()
    assert new.mean().item() == pytest.approx(fraction, abs=0.04)
    assert new.sum(1).var().item() == pytest.approx(4 * fraction * (1 - fraction), rel=0.25)
    assert (new.mean(0) - fraction).abs().max() < 0.08
    for batch, flags in zip(batches[:20], new):
        for row, example in enumerate(data.examples):
            old = batch.tokens[row, : len(example.tokens)].tolist() == example.tokens
            assert old == (flags[row] == 0)


def test_only_what_was_drawn_is_written(shallow: Target) -> None:
    """In a mixed batch the other sequences are the data's, in their order."""
    drafter, data = make(shallow), dataset()
    for step in range(10):
        batch = GeneratedSource(0.5, "target", temperature=COLD, max_new_tokens=10).make_batch(
            BatchRequest(data[EVERY], shallow, (), step=step, drafter=drafter)
        )
        marked = Marked(0.5).make_batch(BatchRequest(data[EVERY], shallow, (), step=step, drafter=drafter))
        for row, example in enumerate(data.examples):
            expected = example.tokens
            if marked.tokens[row, 0] == 7:
                expected = PROMPTS[row] + greedy(shallow, [PROMPTS[row]])[0]
            assert batch.tokens[row, : len(expected)].tolist() == expected


# The drafter that writes


@pytest.mark.sweep(3)
@pytest.mark.parametrize("by", [*WAYS, "replay"])
@pytest.mark.parametrize("training", [True, False])
def test_the_drafters_mode_is_restored(shallow: Target, by: Any, training: bool) -> None:
    """It writes in evaluation mode, and comes back as it was."""
    drafter, modes = make(shallow).train(training), []
    handle = drafter.model.decoder.register_forward_hook(lambda *_: modes.append(drafter.training))
    GeneratedSource(1.0, by, max_new_tokens=10).make_batch(BatchRequest(dataset()[EVERY], shallow, (), step=0, drafter=drafter))
    handle.remove()
    assert drafter.training is training and drafter.model.model.training is training
    assert not any(modes) and bool(modes) == (by != "target")


def test_the_mode_is_restored_after_an_error(shallow: Target) -> None:
    """An error while writing leaves the drafter in training mode."""
    drafter = make(shallow).train()
    with pytest.raises(KeyError), evaluation_mode(drafter):
        assert not drafter.training
        raise KeyError
    assert drafter.training


def test_a_family_that_cannot_write_is_refused(shallow: Target) -> None:
    """source.by=drafter wants a drafter that is a model by itself; the other ways take any."""
    drafter = Eagle3(shallow, vocab_size=2048)
    with pytest.raises(UserError, match=r"source\.by=drafter: this family cannot write"):
        GeneratedSource(1.0, "drafter", max_new_tokens=10).make_batch(
            BatchRequest(dataset()[EVERY], shallow, (), step=0, drafter=drafter)
        )
    batch = GeneratedSource(1.0, "interleaved", temperature=COLD, top_k=1, max_new_tokens=10).make_batch(
        BatchRequest(dataset()[EVERY], shallow, (), step=0, drafter=drafter)
    )
    assert written(batch) == greedy(shallow, PROMPTS)


@pytest.mark.parametrize(
    ("key", "value"),
    [("fraction", -0.1), ("fraction", 1.1), ("temperature", 0.0), ("max_new_tokens", 0), ("top_k", 0), ("block", 0)],
)
def test_bad_settings_are_refused(key: str, value: Any) -> None:
    """A setting out of range is refused under its own key."""
    with pytest.raises(UserError, match=rf"source\.{key}={value}"):
        GeneratedSource(**{key: value})


# Training


def fit(shallow: Target, run: Path, source: Source, kill: int | None = None) -> Causal:
    """Four steps over small batches; with `kill`, broken off after that step and gone on with by a fresh drafter."""
    trainer = Trainer(lr=1e-3, max_steps=4, batch_tokens=60, log_every=1, save_every=2)
    torch.manual_seed(3)
    drafter = Causal(shallow, num_layers=2)

    def stop(step: int) -> None:
        if step == kill:
            raise InterruptedError

    if kill is not None:
        with pytest.raises(InterruptedError):
            trainer.fit(drafter, shallow, dataset(), source, run, on_step=stop)
        drafter = Causal(shallow, num_layers=2)
    trainer.fit(drafter, shallow, dataset(), source, run)
    return drafter


@pytest.fixture(scope="module")
def live(shallow: Target, tmp_path_factory: pytest.TempPathFactory) -> Causal:
    """A drafter trained on the data alone."""
    return fit(shallow, tmp_path_factory.mktemp("live"), LiveSource())


@pytest.mark.sweep(2, free=("by",))
@pytest.mark.parametrize("by", [*WAYS, "replay"])
def test_trainings_repeat_and_resume(shallow: Target, live: Causal, tmp_path: Path, by: Any) -> None:
    """Two runs of one seed end in identical weights, and so does one that was killed on the way."""
    runs = [
        fit(shallow, tmp_path / str(n), GeneratedSource(0.7, by, max_new_tokens=6), kill)
        for n, kill in enumerate((None, None, 3))
    ]
    for name, value in runs[0].state_dict().items():
        assert torch.equal(value, runs[1].state_dict()[name]) and torch.equal(value, runs[2].state_dict()[name]), name
    assert any(not torch.equal(value, live.state_dict()[name]) for name, value in runs[0].state_dict().items())


# The rule


def row(tokens: list[int], logits: list[list[float]], temperature: float = 1.0) -> VerifiedTree:
    """A chain of drafted tokens behind a root, and the target's logits after every node."""
    count = len(tokens) + 1
    scores = torch.tensor(logits, dtype=torch.float64) / temperature
    children = [[node + 1] if node + 1 < count else [] for node in range(count)]
    return VerifiedTree([9, *tokens], children, lambda node: scores[node].softmax(-1), lambda node: scores[node].softmax(-1),
               False, lambda node: scores[node])  # fmt: skip


class Likeliest:
    """Dice that always give the likeliest token and never toss a coin."""

    def flip_coin(self, chance: Any, node: int, number: int = 0) -> bool:
        raise AssertionError("the rule tosses no coin")

    def draw_token(self, weights: Tensor, node: int) -> int:
        return int(weights.argmax())


FALLING = [4.0, 3.0, 2.0, 1.0]  # token v is the target's choice number v
RISING = FALLING[::-1]
CASES = [
    ([0, 0], [FALLING, FALLING, RISING], 1, 2, 0),  # all likeliest: kept, and the last one ends the round
    ([1, 0], [FALLING, FALLING, RISING], 1, 1, 0),  # the second choice is not among the top 1
    ([1, 0], [FALLING, FALLING, RISING], 2, 2, 0),
    ([0, 1, 3, 0], [FALLING, FALLING, RISING, FALLING, RISING], 1, 2, 0),  # what follows the replaced token is dropped
    ([2, 2, 3], [FALLING, FALLING, FALLING, RISING], 3, 3, 0),
    ([3, 3], [FALLING, FALLING, RISING], 4, 2, 3),  # everything is among the top of the vocabulary
    ([], [RISING], 1, 1, 3),  # a root alone
    ([2, 0], [[1.0, 1.0, 1.0, 0.0], FALLING, RISING], 1, 2, 0),  # of equal ones none is likelier
]


@pytest.mark.parametrize(("tokens", "logits", "top_k", "kept", "following"), CASES)
def test_interleaved_on_rows_by_hand(tokens: list[int], logits: Any, top_k: int, kept: int, following: int) -> None:
    """A path is kept up to the first token outside the top_k, which the target's own draw replaces, or to its end."""
    assert InterleavedSampling(top_k=top_k).select_path(row(tokens, logits), Likeliest()) == (list(range(kept)), following)


@pytest.mark.parametrize("temperature", [5.0, 1.0, 0.1, 1e-2, 1e-3])
def test_interleaved_judges_by_rank_at_any_temperature(temperature: float) -> None:
    """Temperature shapes the target's draw only: what is kept does not depend on it, however small probabilities become."""
    logits = [[20.0, 10.0, 5.0, 0.0]] * 4
    assert InterleavedSampling(temperature, top_k=2).select_path(row([1, 3, 0], logits, temperature), Likeliest())[0] == [0, 1]


def test_interleaved_draws_from_the_tempered_target() -> None:
    """The replacement is drawn from the target's whole distribution, top_k left out of it."""
    seen: list[Tensor] = []

    class Asked(Likeliest):
        def draw_token(self, weights: Tensor, node: int) -> int:
            seen.append(weights)
            return 0

    InterleavedSampling(2.0, top_k=1).select_path(row([1], [FALLING, RISING], 2.0), Asked())
    torch.testing.assert_close(seen[0], (torch.tensor(FALLING, dtype=torch.float64) / 2).softmax(-1))
    assert InterleavedSampling(2.0, top_k=1).shape_logits(torch.tensor(FALLING)).isfinite().all()


def test_interleaved_says_what_it_is() -> None:
    """It is not lossless, judges drawn and deterministic chains, and refuses a tree that branches."""
    rule = InterleavedSampling()
    assert not rule.lossless
    rule.check_children("deterministic", True)
    rule.check_children("sampled", True)
    with pytest.raises(UserError, match="judges one path"):
        rule.check_children("sampled", False)

"""Batches: every example once an epoch, within the token budget, the same again after a resume."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import spectrain
from spectrain.data.chat import Example, tokenize_conversation
from spectrain.data.chat_template import ChatTemplate, Message
from spectrain.data.dataset import Batching, Dataset, choose_held_out_share
from spectrain.data.messages import Conversation
from spectrain.data.readers import ConversationReader, EmbeddedReader, load_embedded
from spectrain.errors import UserError
from spectrain.features.batch import collate


class ListReader(ConversationReader):
    """Reads conversations from a list."""

    name = "fixed"

    def __init__(self, rows: list[list[Message]], max_length: int = 2048) -> None:
        super().__init__(max_length=max_length)
        self.rows = [Conversation(messages) for messages in rows]

    def read_conversations(self):  # type: ignore[no-untyped-def]
        return iter(self.rows)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        Path(spectrain.__file__).parent / "data" / "tiny"
    )
    return loaded


def make_dataset(count: int, longest: int = 40) -> Dataset:
    """Make a data set of random examples of 2 to `longest` tokens."""
    random = Random(0)
    examples = []
    for _ in range(count):
        length = random.randint(2, longest)
        examples.append(
            Example(
                [random.randrange(1, 99) for _ in range(length)], [n >= 1 for n in range(length)]
            )
        )
    return Dataset(examples, count, 0, 0)


def make_chat(answer: str) -> list[Message]:
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]


PACKED = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


@PACKED
@pytest.mark.parametrize("count", [1, 5, 256, 257, 600])
@pytest.mark.parametrize("batch_tokens", [1, 16, 64, 1000])
def test_every_example_once_and_within_the_budget(
    count: int, batch_tokens: int, packed: bool
) -> None:
    """Padding included a batch keeps the budget, save where one example alone exceeds it; no
    example is lost or doubled.
    """
    dataset = make_dataset(count)
    batches = dataset.make_batches(0, Batching(batch_tokens, 1, packed))
    assert sorted(index for batch in batches for index in batch) == list(range(count))
    for batch in batches:
        assert len(batch) == 1 or collate(dataset[batch], packed).tokens.numel() <= batch_tokens


def test_efficiency_is_what_a_count_by_hand_finds() -> None:
    """Lengths 6, 5, 4, 3, 2 in batches of 10: best fit makes 6 + 4 and 5 + 3 + 2, buckets 2 + 3
    + (pad), 4 + 5 and 6.
    """
    dataset = Dataset(
        [Example([7] * length, [True] * length) for length in (5, 3, 6, 2, 4)], 5, 0, 0
    )
    packed = dataset.measure_efficiency(Batching(10, 0, packed=True))
    padded = dataset.measure_efficiency(Batching(10, 0))
    lengths = [
        [len(example.tokens) for example in dataset[batch]]
        for batch in dataset.make_batches(0, Batching(10, 0, packed=True))
    ]
    assert sorted(map(sorted, lengths)) == [[2, 3, 5], [4, 6]]
    assert (packed.num_batches, packed.filled_share, packed.real_share) == (2, 1.0, 1.0)
    assert (padded.num_batches, padded.filled_share, padded.real_share) == (
        3,
        20 / 30,
        20 / (2 * 3 + 2 * 5 + 6),
    )
    assert str(padded) == "3 batches, 66.7% full, 9.1% padding"


def test_packing_wastes_less_than_padding() -> None:
    """Best fit leaves fewer positions of a window empty than buckets of similar length do."""
    dataset = make_dataset(1500, 300)
    packed = dataset.measure_efficiency(Batching(1024, 0, packed=True))
    padded = dataset.measure_efficiency(Batching(1024, 0))
    assert (
        packed.filled_share > 0.99 > padded.filled_share and packed.num_batches < padded.num_batches
    )


def test_epochs_and_seeds_differ_and_repeat() -> None:
    """The order depends on epoch and seed, and on nothing else."""
    dataset = make_dataset(300)
    orders = {
        key: dataset.make_batches(key[0], Batching(64, key[1])) for key in [(0, 0), (1, 0), (0, 1)]
    }
    assert len({repr(order) for order in orders.values()}) == 3
    assert all(
        make_dataset(300).make_batches(epoch, Batching(64, seed)) == order
        for (epoch, seed), order in orders.items()
    )


def merge_batches(
    dataset: Dataset, packed: bool, plan: list[tuple[int, int]], accumulate: int = 2
) -> list[list[Example]]:
    """Return the batches of a run that changes its number of processes at checkpoints; the plan
    has (processes, steps).
    """
    batches = []
    state = None
    for processes, steps in plan:
        streams = [
            dataset.stream_batches(Batching(100, 3, packed), process, processes, state)
            for process in range(processes)
        ]
        for _ in range(steps * accumulate):
            batches += [next(stream) for stream in streams]
        state = json.loads(
            json.dumps(streams[0].merge_states([stream.state_dict() for stream in streams]))
        )
    return batches


@PACKED
@pytest.mark.parametrize(
    "plan",
    [
        [(1, 24)],
        [(2, 12)],
        [(3, 8)],
        [(4, 6)],
        [(1, 1), (1, 23)],
        [(2, 3), (3, 2), (1, 12)],
        [(4, 1), (1, 20)],
        [(8, 3)],
    ],
    ids=str,
)
def test_order_does_not_depend_on_processes_or_resumes(
    plan: list[tuple[int, int]], packed: bool
) -> None:
    """On any number of processes, resumed on any other, the batches are those of one process
    that never stopped.
    """
    dataset = make_dataset(30)
    # so that several epochs go by
    assert len(dataset.make_batches(0, Batching(100, 3, packed))) < 20
    assert merge_batches(dataset, packed, plan) == [
        next(stream)
        for stream in [dataset.stream_batches(Batching(100, 3, packed))]
        for _ in range(48)
    ]


@pytest.mark.parametrize("processes", [3, 5])
def test_a_step_keeps_its_batches_on_a_number_of_processes_that_does_not_divide_them(
    processes: int,
) -> None:
    """Four batches a step are those of one process in the same order, whether three or five
    processes share them.
    """
    dataset = make_dataset(30)
    order = iter(make_dataset(30).stream_batches(Batching(100, 3)))
    state = {"batches_done": 4 * 2}
    expected = list(islice(order, 4 * 5))[8:]
    streams = [
        dataset.stream_batches(Batching(100, 3), rank, processes, state, 4)
        for rank in range(processes)
    ]
    for step in range(3):
        shares = [
            [next(stream) for _ in range(rank, max(4, rank + 1), processes)]
            for rank, stream in enumerate(streams)
        ]
        batches = [shares[number % processes][number // processes] for number in range(4)]
        assert batches == expected[4 * step : 4 * step + 4]
        assert {stream.state_dict()["batches_done"] for stream in streams} == {8 + 4 * (step + 1)}


def test_batch_pads_on_the_right_without_loss() -> None:
    """Rows are the examples, then zeros that carry no loss."""
    dataset = make_dataset(9)
    batch = collate(dataset[[4, 0, 7]])
    for row, index in enumerate([4, 0, 7]):
        example = dataset.examples[index]
        length = len(example.tokens)
        assert batch.tokens[row, :length].tolist() == example.tokens
        assert batch.loss_mask[row, :length].tolist() == example.mask
        assert not batch.tokens[row, length:].any() and not batch.loss_mask[row, length:].any()
    assert batch.num_supervised == sum(sum(dataset.examples[index].mask) for index in [4, 0, 7])


def test_cut_and_dropped_are_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    """An example over max_length is cut, and dropped where nothing of its answer is left."""
    late = [
        {"role": "user", "content": "long question " * 40},
        {"role": "assistant", "content": "Yes."},
    ]
    rows = [make_chat("Hello!"), make_chat("word " * 100), late]
    dataset = ListReader(rows, max_length=32).make_dataset(ChatTemplate(tokenizer))
    assert (dataset.num_conversations, dataset.num_cut, dataset.num_dropped) == (3, 2, 1)
    (short,), (long,) = (tokenize_conversation(ChatTemplate(tokenizer), row) for row in rows[:2])
    assert dataset.examples == [short, long.cut(32)]
    assert dataset.num_tokens == len(short.tokens) + 32
    assert dataset.num_supervised == sum(short.mask) + sum(long.mask[:32])


def test_data_that_is_all_cut_away_stops(tokenizer: PreTrainedTokenizerBase) -> None:
    """The message names the setting that cut every answer off."""
    rows = [
        [
            {"role": "user", "content": "long question " * 40},
            {"role": "assistant", "content": "Yes."},
        ]
    ]
    with pytest.raises(UserError, match=r"data\.max_length=8"):
        ListReader(rows, max_length=8).make_dataset(ChatTemplate(tokenizer))


def test_fingerprint_sees_every_token_and_mask() -> None:
    """Equal data has equal fingerprints; one mask bit, one token or another order changes it."""
    dataset = make_dataset(5)
    first, *others = dataset.examples
    changed = [
        replace(
            dataset, examples=[Example(first.tokens, [not first.mask[0], *first.mask[1:]]), *others]
        ),
        replace(
            dataset,
            examples=[Example([first.tokens[0] + 1, *first.tokens[1:]], first.mask), *others],
        ),
        replace(dataset, examples=[*others, first]),
        replace(dataset, examples=others),
    ]
    assert make_dataset(5).fingerprint == dataset.fingerprint
    assert len({dataset.fingerprint, *(other.fingerprint for other in changed)}) == 5


def test_token_counts_are_the_supervised_tokens() -> None:
    """Each token is counted as often as it carries loss."""
    dataset = make_dataset(20)
    expected = torch.zeros(100, dtype=torch.int64)
    for example in dataset.examples:
        for token, is_supervised in zip(example.tokens, example.mask):
            expected[token] += is_supervised
    assert torch.equal(dataset.token_counts(100), expected)
    assert int(expected.sum()) == dataset.num_supervised


@pytest.mark.parametrize(
    ("count", "expected"), [(99, 2), (100, 10), (240, 24), (1200, 24), (6000, 120)]
)
def test_auto_holds_out_as_many_as_a_validation_reads(count: int, expected: int) -> None:
    """Evenly spread draws: 24 conversations, a tenth or 2 % where that is less or more, and 2 % of
    few conversations.
    """
    draws = [index / count for index in range(count)]
    Random(0).shuffle(draws)
    limit = choose_held_out_share(draws)
    assert sum(draw < limit for draw in draws) == expected


def test_of_the_embedded_conversations_auto_holds_out_24(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    dataset = EmbeddedReader(limit=320, held_out="auto").make_dataset(ChatTemplate(tokenizer))
    assert len(dataset.held_out) == 24


def test_a_vocabulary_is_chosen_from_all_that_is_embedded(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Counts are those of the examples and of the answers behind data.limit; what is held out
    adds nothing.
    """
    few = EmbeddedReader(limit=40, held_out=0.1).make_dataset(ChatTemplate(tokenizer))
    counts = few.token_counts(len(tokenizer))
    for example in few.examples:
        counts -= torch.bincount(
            torch.tensor(example.tokens)[torch.tensor(example.mask)], minlength=len(tokenizer)
        )
    answers = few.extra_texts()
    assert torch.equal(
        counts,
        torch.bincount(
            torch.tensor([token for text in answers for token in text]), minlength=len(tokenizer)
        ),
    )
    assert few.held_out and len(answers) == len(load_embedded()) - 40
    answer = "\n".join(
        message["content"]
        for message in load_embedded()[50].messages
        if message["role"] == "assistant"
    )
    assert answers[10] == tokenizer(answer, add_special_tokens=False)["input_ids"]
    full_reader = EmbeddedReader()
    full_reader.load_conversations()
    assert full_reader.extra_texts(tokenizer) == []

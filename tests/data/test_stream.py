"""Streams: one order of batches on any number of processes and after any resume, and no row is
read before it is needed.
"""

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import spectrain
from spectrain.config.build import build
from spectrain.data.chat import Example, tokenize_conversation
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.dataset import Batching, BatchStream
from spectrain.data.stream import StreamedDataset, StreamReader
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import RunError, UserError
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        Path(spectrain.__file__).parent / "data" / "tiny"
    )
    return loaded


def make_chat(number: int) -> dict[str, Any]:
    """Make a conversation of its own length that names its row."""
    words = " word" * Random(number).randrange(12)
    return {
        "messages": [
            {"role": "user", "content": f"row {number}"},
            {"role": "assistant", "content": f"{number}{words}"},
        ]
    }


class CountingReader(StreamReader):
    """Counts the rows that are read."""

    def __init__(self, rows: list[dict[str, Any]], **options: Any) -> None:
        super().__init__("counted", **{"shards": 4, "window": 6, "sample": 8, **options})
        self.source_rows = rows
        self.count = 0

    def open_rows(self) -> datasets.IterableDataset:
        def rows() -> Iterator[dict[str, Any]]:
            for row in self.source_rows:
                self.count += 1
                yield {"line": json.dumps(row)}

        return datasets.IterableDataset.from_generator(rows).rename_column("line", "text")


ROWS = [make_chat(number) for number in range(75)]


def make_dataset(
    tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]] = ROWS, **options: Any
) -> StreamedDataset:
    return CountingReader(rows, **options).make_dataset(ChatTemplate(tokenizer))


def list_batches(
    tokenizer: PreTrainedTokenizerBase, plan: list[tuple[int, int]], packed: bool, **options: Any
) -> list[list[Example]]:
    """Return the batches of a run that changes its number of processes at checkpoints, by
    (processes, batches of each).
    """
    batches = []
    state = None
    for processes, count in plan:
        streams: list[BatchStream] = [
            make_dataset(tokenizer, **options).stream_batches(
                Batching(60, 3, packed), process, processes, state
            )
            for process in range(processes)
        ]
        for _ in range(count):
            batches += [next(stream) for stream in streams]
        state = json.loads(
            json.dumps(streams[0].merge_states([stream.state_dict() for stream in streams]))
        )
    return batches


@cache
def list_uninterrupted_batches(
    tokenizer: PreTrainedTokenizerBase, packed: bool
) -> list[list[Example]]:
    return list_batches(tokenizer, [(1, 72)], packed)


@pytest.mark.sweep(3, free=("packed", "plan"))
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "plan",
    [
        [(2, 36)],
        [(3, 24)],
        [(4, 18)],
        [(5, 14), (1, 2)],
        [(1, 7), (1, 65)],
        [(2, 9), (3, 10), (1, 24)],
        [(4, 17), (2, 2)],
    ],
    ids=str,
)
def test_order_does_not_depend_on_processes_or_resumes(
    tokenizer: PreTrainedTokenizerBase, plan: list[tuple[int, int]], packed: bool
) -> None:
    """The batches are those of one process that never stopped, across the ends of epochs."""
    expected = list_uninterrupted_batches(tokenizer, packed)
    assert sum(len(batch) for batch in expected) > len(ROWS)
    assert list_batches(tokenizer, plan, packed) == expected


def test_every_row_once_an_epoch(tokenizer: PreTrainedTokenizerBase) -> None:
    """Windows lose and double nothing."""
    # four windows an epoch, one for each shard
    stream = make_dataset(tokenizer, ROWS[:24]).stream_batches(Batching(60, 0))
    batches = [next(stream) for _ in range(40)]
    by_shard = [
        [example.tokens for batch in batches[shard::4] for example in batch] for shard in range(4)
    ]
    # a window's batches come before the next window's
    tokens_read = [tokens for rows in by_shard for tokens in rows[:6]]
    assert sorted(tokens_read) == sorted(
        tokenize_conversation(ChatTemplate(tokenizer), make_chat(number)["messages"])[0].tokens
        for number in range(24)
    )


def test_no_row_is_read_before_it_is_needed(tokenizer: PreTrainedTokenizerBase) -> None:
    """The sample reads its rows; then each window is read when a shard first comes to it."""
    rows = [make_chat(number) for number in range(1000)]
    data = CountingReader(rows)
    dataset = data.make_dataset(ChatTemplate(tokenizer))
    ahead = 1  # `datasets` looks one row ahead
    assert data.count <= 8 + ahead
    # every window is one batch
    stream = dataset.stream_batches(Batching(1000, 0, packed=True))
    before = data.count
    for taken in range(1, 30):
        next(stream)
        assert data.count - before <= 6 * taken + ahead


def test_a_process_tokenises_its_own_shards_only(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With n dividing the shards, each conversation is tokenised by one process."""
    tokenised: list[str] = []
    replicas = [
        make_dataset(tokenizer, [make_chat(number) for number in range(400)]) for _ in range(2)
    ]
    for process, dataset in enumerate(replicas):
        original = dataset.data.try_tokenize
        monkeypatch.setattr(
            dataset.data,
            "try_tokenize",
            lambda t, m, original=original: (
                tokenised.append(m.messages[0]["content"]) or original(t, m)
            ),
        )
        stream = dataset.stream_batches(Batching(1000, 0, True), process, 2)
        for _ in range(10):
            next(stream)
    assert len(tokenised) == len(set(tokenised)) == 2 * 10 * 6


BAD: list[Any] = [
    {"messages": None},
    {"other": 1},
    {"messages": [{"role": "user", "content": "no answer"}]},
    7,
    "not JSON {",
]


def test_bad_rows_are_left_out_and_counted(
    tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad rows are reported once, and counted alike on any number of processes and after a
    resume.
    """
    # two epochs of shards' windows
    rows = [BAD[number % 5] if number % 4 == 3 else make_chat(number) for number in range(48)]
    dataset = make_dataset(tokenizer, rows)
    assert dataset.data.num_left_out == 2 and dataset.num_conversations == 6
    single = dataset.stream_batches(Batching(1000, 0, True))
    batches = [next(single) for _ in range(8)]
    assert sorted(len(batch) for batch in batches) == [4] * 4 + [5] * 4
    assert single.data_metrics(single.state_dict()) == {"left_out": 12}
    assert capsys.readouterr().err.count("rows are left out") == 1
    pair = [
        make_dataset(tokenizer, rows).stream_batches(Batching(1000, 0, True), process, 2)
        for process in range(2)
    ]
    for _ in range(3):
        for stream in pair:
            next(stream)
    state = pair[0].merge_states([stream.state_dict() for stream in pair])
    three = [
        make_dataset(tokenizer, rows).stream_batches(Batching(1000, 0, True), process, 3, state)
        for process in range(3)
    ]
    assert [next(stream) for stream in three[:2]] == batches[6:]
    assert [next(single)] == [three[2].take_batch(8)]
    assert single.data_metrics(single.state_dict()) == single.data_metrics(
        single.merge_states([stream.state_dict() for stream in three])
    )


def test_only_bad_rows_stop(tokenizer: PreTrainedTokenizerBase) -> None:
    """Only bad rows at the start, or in many windows in a row, stop the run."""
    with pytest.raises(UserError, match=r"none of its first 8 rows.*no conversation"):
        make_dataset(tokenizer, [{"other": n} for n in range(50)])
    good = [make_chat(number) for number in range(12)]
    stream = make_dataset(
        tokenizer, [*good, *({"other": n} for n in range(12 * 130))], window=2
    ).stream_batches(Batching(1000, 0))
    with pytest.raises(RunError, match=r"128 of its rows in a row.*no conversation"):
        for _ in range(100):
            next(stream)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "pattern", "saved"])
def test_files_are_streamed(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: str) -> None:
    """Lines, compressed lines, parquet, several files, and a directory that `datasets` saved,
    give the same batches.
    """
    lines = [json.dumps(row) for row in ROWS]
    path = tmp_path / f"chats.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(lines) + "\n")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    elif kind == "parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    elif kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    else:
        for number in range(3):
            (tmp_path / f"part-{number}.jsonl").write_text(
                "\n".join(lines[25 * number : 25 * number + 25]) + "\n"
            )
        path = tmp_path / "part-*.jsonl"
    config = {
        "_target_": "spectrain.data.stream.StreamReader",
        "path": str(path),
        "shards": 4,
        "window": 6,
    }
    stream = build(config).make_dataset(ChatTemplate(tokenizer)).stream_batches(Batching(60, 3))
    assert [next(stream) for _ in range(40)] == list_batches(tokenizer, [(1, 40)], False)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no.jsonl", "no such file"),
        ("*.parquet", "no such file"),
        ("chats.csv", "files are read that end in"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tmp_path: Path, path: str, reason: str) -> None:
    """The error names the path."""
    (tmp_path / "chats.csv").write_text("a,b\n")
    with pytest.raises(UserError, match=f"data.path=.*{reason}"):
        StreamReader(str(tmp_path / path)).load_conversations()


def test_a_folder_of_unlike_files_must_be_named_by_them(tmp_path: Path) -> None:
    """Files of both layouts in one folder have unlike columns; a pattern reads them as lines,
    which may differ.
    """
    messages = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    }
    turns = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(messages) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(turns) + "\n")
    with pytest.raises(UserError, match=r"or name its files, as in data\.path='.*/\*\.jsonl'"):
        StreamReader(str(tmp_path)).load_conversations()
    assert len(StreamReader(str(tmp_path / "*.jsonl")).load_conversations()) == 2


def test_steps_must_be_set(tokenizer: PreTrainedTokenizerBase) -> None:
    """A stream has no epochs to count."""
    with pytest.raises(UserError, match=r"trainer\.max_steps"):
        make_dataset(tokenizer).num_batches(Batching(100, 0))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_training_on_a_stream_resumes_where_it_was_killed(
    shallow: Target, tmp_path: Path, packing: bool
) -> None:
    """Killed between two steps and gone on with, it ends in the metrics of a run that was not,
    rows left out included.
    """
    rows = [BAD[0] if number % 7 == 5 else make_chat(number) for number in range(60)]
    trainer = Trainer(
        lr=1e-3,
        max_steps=8,
        batch_tokens=60,
        accumulate=2,
        log_every=1,
        save_every=3,
        packing=packing,
    )

    def train_drafter(run: str, kill: int | None = None) -> list[dict[str, Any]]:
        def on_step(step: int) -> None:
            if step == kill:
                raise InterruptedError

        drafter = Eagle3(shallow, ttt_steps=2, vocab_size=256)
        drafter.load_state_dict(start)
        trainer.fit(
            drafter,
            shallow,
            make_dataset(shallow.tokenizer, rows),
            LiveSource(),
            tmp_path / run,
            on_step=on_step,
        )
        return [
            json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]

    drafter = Eagle3(shallow, ttt_steps=2, vocab_size=256)
    drafter.prepare(
        shallow, make_dataset(shallow.tokenizer, rows).token_counts(shallow.head.vocab_size)
    )
    start = drafter.state_dict()
    full = train_drafter("whole")
    with pytest.raises(InterruptedError):
        train_drafter("cut", kill=7)
    cut = train_drafter("cut")
    assert [(line["step"], line["loss"], line["left_out"]) for line in cut] == [
        (line["step"], line["loss"], line["left_out"]) for line in full
    ]
    assert full[-1]["left_out"] > 0


def test_packed_training_is_padded_training(shallow: Target, tmp_path: Path) -> None:
    """A step on the same conversations has the same loss, however they are laid out."""
    losses = []
    for packing in (False, True):
        torch.manual_seed(0)
        drafter = Eagle3(shallow, ttt_steps=2, vocab_size=256)
        trainer = Trainer(max_steps=2, batch_tokens=10_000, log_every=1, packing=packing)
        trainer.fit(
            drafter, shallow, make_dataset(shallow.tokenizer), LiveSource(), tmp_path / str(packing)
        )
        metrics = (tmp_path / str(packing) / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in metrics])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_sample_counts_what_was_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    """The sample counts cut and dropped conversations as a complete data set does."""
    long = {
        "messages": [
            {"role": "user", "content": "long question " * 40},
            {"role": "assistant", "content": "Yes."},
        ]
    }
    rows = [
        make_chat(0),
        {
            "messages": [
                make_chat(1)["messages"][0],
                {"role": "assistant", "content": "word " * 100},
            ]
        },
        long,
    ]
    sample = make_dataset(tokenizer, rows, max_length=32)
    assert (sample.num_conversations, sample.num_cut, sample.num_dropped) == (3, 2, 1)
    assert "2 cut to data.max_length, 1 without an answer left out" in sample.summary_line()


def test_a_small_set_has_one_order_on_more_processes_than_windows(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """A process that begins past the end of four windows counts them from the first."""
    options: dict[str, Any] = {"rows": ROWS[:24], "shards": 8}
    single = list_batches(tokenizer, [(1, 48)], False, **options)
    assert (
        list_batches(tokenizer, [(8, 6)], False, **options)
        == list_batches(tokenizer, [(8, 2), (4, 8)], False, **options)
        == single
    )


def test_token_ids_beyond_the_vocabulary_are_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    dataset = make_dataset(
        tokenizer, [make_chat(0), {"input_ids": [1, 10**6], "loss_mask": [0, 1]}]
    )
    assert dataset.data.num_left_out == 1 and max(dataset.examples[0].tokens) < len(tokenizer)
    assert "row 2: it holds the token id 1000000" in dataset.data.first_skip_reason


def test_a_line_that_is_nested_too_deeply_is_left_out(tmp_path: Path) -> None:
    lines = [json.dumps(make_chat(0)), '{"messages": ' + "[" * 200_000, json.dumps(make_chat(1))]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    reader = StreamReader(str(tmp_path / "chats.jsonl"))
    assert len(reader.load_conversations()) == 2 and "nested too deeply" in reader.first_skip_reason


def test_null_columns_hide_no_other(tmp_path: Path) -> None:
    """Tables fill gaps with null, so a row is what its other columns say."""
    rows = [
        {"messages": make_chat(0)["messages"], "text": None},
        {"messages": None, "text": "A document."},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    chat, document = StreamReader(str(tmp_path / "rows.parquet")).load_conversations()
    assert chat.messages == make_chat(0)["messages"] and document.text == "A document."

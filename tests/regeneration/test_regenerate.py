"""Regeneration by our engine: an answer is the target's own, and the set is the same however
often it was interrupted.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from spectrain.config.build import build
from spectrain.config.spec import RunSpec, read_run
from spectrain.data.chat import Example, tokenize_prompt
from spectrain.data.messages import Conversation
from spectrain.data.readers import ConversationReader, EmbeddedReader, JsonlReader
from spectrain.data.shards import Row, Shard, ShardSet
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.ngram import Ngram
from spectrain.errors import RunError, RunInterrupted, UserError
from spectrain.models.accelerator import accelerator
from spectrain.models.fingerprint import hash_target
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.regeneration.chat_progress import AnswerError
from spectrain.regeneration.command import regenerate_command
from spectrain.regeneration.regenerate import Regeneration
from spectrain.regeneration.sampling import Sampling
from spectrain.regeneration.writers import (
    AnswerWriter,
    EngineWriter,
    OutcomeCallback,
    collect_prompts,
)
from spectrain.runs.drafters import save_drafter
from spectrain.trees import Chain

LIMIT = 10
SHORT: dict[str, Any] = {"max_new_tokens": 6, "seed": 3}


def regenerate(
    out: Path, target: Target, data: ConversationReader | None = None, **settings: Any
) -> dict[int, Row]:
    """Regenerate into a folder; return the rows by number."""
    sampling = Sampling(**{**SHORT, **settings.pop("sampling", {})})
    writer = EngineWriter(sampling, target, **settings.pop("writer", {}))
    Regeneration(**{"shard_size": 4, **settings}).run(
        out, data or EmbeddedReader(limit=LIMIT), sampling, writer
    )
    return read_rows(out)


def read_rows(out: Path) -> dict[int, Row]:
    shards = ShardSet(out)
    return {row.id: row for name in shards.shard_names for row in shards.read_shard(name)}


def read_shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("part-*"))}


class StuckWriter(EngineWriter):
    """Gets no further than two conversations."""

    def answer_batch(self, batch: list[Any]) -> Any:
        self.answered = [*getattr(self, "answered", []), *batch]
        if len(self.answered) > 2:
            time.sleep(600)
        return super().answer_batch(batch)


def fork_rank(out: Path, target: Target, rank: int) -> Any:
    """Start one of two ranks, with a batch for each conversation; the second gets stuck, to be
    killed.
    """

    def child() -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        sampling = Sampling(**SHORT)
        writer = (StuckWriter if rank else EngineWriter)(sampling, target, batch_tokens=1)
        Regeneration(shard_size=4).run(out, EmbeddedReader(limit=LIMIT), sampling, writer)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


RUN_COMMAND = """
import sys, time
from spectrain.cli.main import main
from spectrain.regeneration.writers import EngineWriter

answer_batch, answered = EngineWriter.answer_batch, []

def answer_two(self, batch):
    answered.extend(batch)
    if len(answered) > 2:
        time.sleep(600)
    return answer_batch(self, batch)

if sys.argv.pop(1) == "1":
    EngineWriter.answer_batch = answer_two
main()
"""
"""Runs the command of the arguments; rank 1 gets no further than two conversations."""


class CommandRank:
    """The same rank as a command, with the interface of a forked process."""

    def __init__(self, out: Path, target: Target, rank: int) -> None:
        command = [
            sys.executable,
            "-c",
            RUN_COMMAND,
            str(rank),
            "data",
            "regenerate",
            "target=tiny",
            f"data.limit={LIMIT}",
            f"out={out}",
            "regenerate.shard_size=4",
            "sampling.max_new_tokens=6",
            "sampling.seed=3",
            "writer.batch_tokens=1",
        ]
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=env)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()

    def join(self) -> None:
        self.process.wait(timeout=600)

    @property
    def exitcode(self) -> int | None:
        return self.process.returncode


class ListReader(ConversationReader):
    """Reads conversations from a list."""

    name = "listed"

    def __init__(self, chats: list[list[dict[str, str]]]) -> None:
        super().__init__()
        self.chats = chats

    def read_conversations(self) -> Iterator[Conversation]:
        yield from map(Conversation, self.chats)


@pytest.fixture(scope="session")
def complete_set(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Regenerate the set in one process without an interruption."""
    out = tmp_path_factory.mktemp("regenerated") / "whole"
    regenerate(out, tiny)
    return out


def load_poolable() -> Target:
    """Load the tiny target in bfloat16, or skip the test where its rows depend on others."""
    target = load_tiny(dtype="bfloat16")
    target.pack_weights()
    if not accelerator().runs_texts_alone(target):
        pytest.skip("no installed package has kernels that give a row the bits of a text alone")
    return target


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [("float32", 0.0), ("float32", 0.8), ("bfloat16", 0.0), ("bfloat16", 0.8)],
)
def test_answers_are_the_targets_own(
    tmp_path: Path, tiny: Target, dtype: str, temperature: float
) -> None:
    """Every answer is what decoding that conversation alone gives, turn by turn, greedy or drawn
    with the same key; in bfloat16 by continuous batching, where kernels serve it."""
    regeneration = Regeneration()
    data = EmbeddedReader(limit=LIMIT)
    if dtype == "bfloat16":
        tiny = load_poolable()
    rows = regenerate(tmp_path / "out", tiny, sampling={"temperature": temperature})
    rule = Match(temperature, seed=SHORT["seed"]) if temperature else Greedy()
    assert sorted(rows) == list(range(LIMIT)) and any(
        len(row.num_tokens) > 1 for row in rows.values()
    )
    for number, source in enumerate(data.load_conversations()):
        pending = regeneration.make_pending_row(number, source)
        row = rows[number]
        assert [message["role"] for message in row.messages] == [
            message["role"] for message in source.messages
        ]
        positions = [
            position
            for position, message in enumerate(source.messages)
            if message["role"] == "assistant"
        ]
        for position, size, reason in zip(
            positions, row.num_tokens, row.finish_reason, strict=True
        ):
            answer_ids = dict(zip(positions, row.answer_ids or [], strict=True))
            earlier = Conversation(row.messages, answer_ids=answer_ids).up_to(position)  # type: ignore[arg-type]
            prompt = tokenize_prompt(tiny.template, earlier)
            (single,) = decode(
                tiny, [prompt], rule, SHORT["max_new_tokens"], sequence_ids=[pending.key]
            )
            assert answer_ids[position] == single.output
            text = tiny.tokenizer.decode(
                single.output, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            ended = single.output[-1] in tiny.stop_ids
            assert (row.messages[position]["content"], size, reason) == (
                text,
                len(single.output),
                "stop" if ended else "length",
            )


@pytest.mark.sweep(2, free=("change",))
@pytest.mark.parametrize("change", ["shards", "batches", "drafted", "captured"])
def test_answers_depend_on_no_batching_and_no_drafter(
    change: str, tmp_path: Path, tiny: Target, complete_set: Path
) -> None:
    """Other shards, other batches, a drafter or captured rounds give the same rows."""
    changes: dict[str, Any] = {
        "shards": {"shard_size": 7},
        "batches": {"writer": {"batch_tokens": 1}},
        "drafted": {"writer": {"drafter": Ngram(tiny), "builder": Chain(3)}},
        "captured": {"writer": {"engine": "captured"}},
    }
    assert regenerate(tmp_path / "out", tiny, **changes[change]) == read_rows(complete_set)


def run_command(*overrides: str) -> None:
    """Run `spectrain data regenerate` in this process."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("regenerate", overrides=list(overrides))
        spec, settings = read_run(
            config, ("writer", "sampling", "regenerate", "out", "check", "capture")
        )
        regenerate_command(spec, **settings)


@pytest.mark.slow
def test_a_run_drafts_and_names_its_target(
    tmp_path: Path, tiny: Target, complete_set: Path
) -> None:
    """With run=DIR target, drafter and tree are the run's, and the answers those without it; a
    tree without it is refused.
    """
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        began = compose("train", overrides=["recipe=eagle3", "target=tiny"])
    drafter = build(began.drafter, target=tiny)
    drafter.prepare(
        tiny,
        EmbeddedReader(limit=LIMIT).make_dataset(tiny.template).token_counts(tiny.head.vocab_size),
    )
    save_drafter(tmp_path / "drafter", drafter, RunSpec.from_nodes(began))
    settings = [
        "++sampling.max_new_tokens=6",
        "++sampling.seed=3",
        "++regenerate.shard_size=4",
        f"++data.limit={LIMIT}",
    ]
    run_command(f"++run={tmp_path / 'drafter'}", f"++out={tmp_path / 'out'}", *settings)
    assert read_rows(tmp_path / "out") == read_rows(complete_set)
    with pytest.raises(UserError, match=r"^tree: .*run=runs/NAME"):
        run_command("target=tiny", "tree=chain", f"++out={tmp_path / 'other'}", *settings)


def test_check_only_looks(tmp_path: Path, tiny: Target, capsys: pytest.CaptureFixture[str]) -> None:
    """check=true names what is incomplete, fails if anything is, and writes nothing."""
    regenerate(tmp_path / "out", tiny)
    check = (f"++out={tmp_path / 'out'}", "++check=true")
    run_command(*check)
    (tmp_path / "out" / "part-00002.jsonl").unlink()
    with pytest.raises(RunError, match="incomplete: part-00002.jsonl;"):
        run_command(*check)
    assert f"{tmp_path / 'out' / 'part-00002.jsonl'}: missing" in capsys.readouterr().out
    assert len(read_shards(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    "start",
    [fork_rank, pytest.param(CommandRank, marks=pytest.mark.slow)],
    ids=["forked", "commands"],
)
def test_killed_processes_leave_the_set_of_a_single_process(
    start: Any,
    tmp_path: Path,
    tiny: Target,
    complete_set: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks share the shards; one is killed by SIGKILL in the middle of a shard. What is
    finished is not made again, a torn line is dropped, and in the end the bytes are those of one
    process that nothing interrupted."""
    out = tmp_path / "out"
    # As the command records it.
    monkeypatch.setattr(tiny, "weights_hash", hash_target(load_tiny()))
    ranks = [start(out, tiny, rank) for rank in range(2)]
    journal = out / "unfinished" / "part-00001.jsonl"  # of the second rank
    while ranks[1].is_alive() and (not journal.exists() or journal.read_bytes().count(b"\n") < 2):
        time.sleep(0.0002)
    ranks[1].kill()
    ranks[1].join()
    finished_lines = journal.read_bytes() if journal.exists() else b""
    if finished_lines:
        journal.write_bytes(finished_lines + b'{"id": 7, "messa')
    ranks[0].join()
    assert (ranks[0].exitcode, ranks[1].exitcode) == (0, -signal.SIGKILL)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    answered: list[int] = []

    class CountingWriter(EngineWriter):
        def answer_batch(self, batch: list[Any]) -> Any:
            answered.extend(row.id for row in batch)
            return super().answer_batch(batch)

    sampling = Sampling(**SHORT)
    Regeneration(shard_size=4).run(
        out, EmbeddedReader(limit=LIMIT), sampling, CountingWriter(sampling, tiny, batch_tokens=1)
    )
    assert read_shards(out) == read_shards(complete_set)
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before and len(before) >= 2
    assert len(answered) <= 4 - finished_lines.count(b"\n") <= 2


@pytest.mark.slow
def test_terminated_softly(tmp_path: Path, tiny: Target, complete_set: Path) -> None:
    """SIGTERM ends the run in one sentence, keeps every finished row, and leaves the set to be
    finished.
    """

    class TerminatedWriter(EngineWriter):
        def answer_batch(self, batch: list[Any]) -> Any:
            yield from super().answer_batch(batch)
            if batch[0].id >= 4:
                os.kill(os.getpid(), signal.SIGTERM)

    out = tmp_path / "out"
    sampling = Sampling(**SHORT)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunInterrupted, match="stopped; what is finished is kept") as ended:
        Regeneration(shard_size=4).run(
            out,
            EmbeddedReader(limit=LIMIT),
            sampling,
            TerminatedWriter(sampling, tiny, batch_tokens=1),
        )
    assert ended.value.status == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert (out / "unfinished" / "part-00001.jsonl").read_bytes().count(b"\n") == 1
    regenerate(out, tiny)
    assert read_shards(out) == read_shards(complete_set)


def test_broken_shards_are_named_and_regenerated(
    tmp_path: Path, tiny: Target, complete_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A deleted shard and one with a single bit turned are named; they, and no others, are
    written again as they were.
    """
    out = tmp_path / "out"
    regenerate(out, tiny)
    modified = (out / "part-00001.jsonl").stat().st_mtime_ns
    (out / "part-00000.jsonl").unlink()
    turned = bytearray((out / "part-00002.jsonl").read_bytes())
    turned[40] ^= 1
    (out / "part-00002.jsonl").write_bytes(turned)
    assert ShardSet(out).find_faults() == {
        "part-00000.jsonl": "missing",
        "part-00002.jsonl": "corrupt",
    }
    with pytest.raises(UserError, match=r"part-00000\.jsonl: this shard is missing, and 1 more"):
        JsonlReader(str(out)).load_conversations()
    capsys.readouterr()
    regenerate(out, tiny)
    stdout = capsys.readouterr().out
    assert (
        f"{out / 'part-00000.jsonl'}: missing" in stdout
        and f"{out / 'part-00002.jsonl'}: corrupt" in stdout
    )
    assert read_shards(out) == read_shards(complete_set)
    assert (out / "part-00001.jsonl").stat().st_mtime_ns == modified
    assert not ShardSet(out).find_faults()


def test_killed_before_the_journal_is_gone(
    tmp_path: Path, tiny: Target, complete_set: Path
) -> None:
    """A kill between the last steps of a shard costs nothing: its rows are not asked for again,
    and what was left over goes.
    """
    out = tmp_path / "out"
    regenerate(out, tiny)
    journals = [out / "unfinished" / f"part-0000{number}.jsonl" for number in range(2)]
    for journal in journals:  # killed with the first noted in the manifest, and the second not
        journal.write_bytes((out / journal.name).read_bytes())
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["shards"]["part-00001.jsonl"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    sampling = Sampling(**SHORT)

    class UnusedWriter(EngineWriter):
        def answer_batch(self, batch: list[Any]) -> Any:
            raise AssertionError

    Regeneration(shard_size=4).run(
        out, EmbeddedReader(limit=LIMIT), sampling, UnusedWriter(sampling, tiny)
    )
    assert read_shards(out) == read_shards(complete_set) and not ShardSet(out).find_faults()
    assert not any(journal.exists() for journal in journals)


def test_shard_of_another_process_is_left_to_it(
    tmp_path: Path, tiny: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard that is being made elsewhere is not made twice, and the last line names it."""
    out = tmp_path / "out"
    regenerate(out, tiny)
    (out / "part-00001.jsonl").unlink()
    shards = ShardSet(out)
    claim = shards.claim_shard("part-00001.jsonl", [])
    assert claim is not None
    regenerate(out, tiny)
    assert ShardSet(out).find_faults() == {"part-00001.jsonl": "missing"}
    stdout = capsys.readouterr().out
    assert (
        f"{LIMIT - 4} of {LIMIT} conversations" in stdout
        and "other processes are at part-00001.jsonl" in stdout
    )
    shards.release_shard(claim)
    regenerate(out, tiny)
    assert not ShardSet(out).find_faults()


def test_bad_conversations_take_nothing_with_them(
    tmp_path: Path, tiny: Target, complete_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that is too long and one on which the model fails are reported; the other
    rows are unchanged.
    """
    good = [chat.to_row() for chat in EmbeddedReader(limit=LIMIT).load_conversations()]
    user = {"role": "user", "content": "poison"}
    bad = [
        {
            "messages": [
                {**user, "content": "word " * tiny.max_length},
                {"role": "assistant", "content": "No."},
            ]
        },
        {"messages": [user, {"role": "assistant", "content": "No."}]},
    ]
    mixed = [*good[:3], bad[0], *good[3:6], bad[1], *good[6:]]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    original, (poison,) = (
        Session.decode,
        tiny.tokenizer(["poison"], add_special_tokens=False)["input_ids"],
    )

    def fail_on_poison(session: Session, prompts: list[list[int]], *rest: Any) -> Any:
        if any(
            prompt[at : at + len(poison)] == poison
            for prompt in prompts
            for at in range(len(prompt))
        ):
            raise RuntimeError("no memory")
        return original(session, prompts, *rest)

    monkeypatch.setattr(Session, "decode", fail_on_poison)
    rows = regenerate(
        tmp_path / "out",
        tiny,
        JsonlReader(str(tmp_path / "chats.jsonl")),
        shard_size=100,
        max_failed=0.2,
    )
    assert [row.messages for row in rows.values()] == [
        row.messages for row in read_rows(complete_set).values()
    ]
    failed = [
        json.loads(line)
        for line in (tmp_path / "out" / "failed" / "part-00000.jsonl").read_text().splitlines()
    ]
    assert [(row["id"], row["kind"], row["messages"]) for row in failed] == [
        (3, "too_long", bad[0]["messages"]),
        (7, "failed", bad[1]["messages"]),
    ]
    assert "no memory" in failed[1]["error"]
    monkeypatch.undo()
    again = regenerate(
        tmp_path / "out",
        tiny,
        JsonlReader(str(tmp_path / "chats.jsonl")),
        shard_size=100,
        retry_failed=True,
    )
    assert (
        sorted(set(again) - set(rows)) == [7] and {number: again[number] for number in rows} == rows
    )


def test_too_many_failures_fail_the_run(
    tmp_path: Path, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where everything fails the run stops at once, and with a patience for that it ends as a
    failed one.
    """

    def raise_error(*_: Any) -> Any:
        raise RuntimeError("no device")

    monkeypatch.setattr(Session, "decode", raise_error)
    with pytest.raises(RunError, match=r"3 conversations failed one after another.*no device"):
        regenerate(tmp_path / "out", tiny, stop_after=3)
    assert not ShardSet(tmp_path / "out").manifest["shards"]
    with pytest.raises(RunError, match=f"none of {LIMIT}"):
        regenerate(tmp_path / "out", tiny, stop_after=100)


def test_first_turn_and_system_prompt(tmp_path: Path, tiny: Target) -> None:
    """turns=first ends after one answer; a system prompt is asked with and written down."""
    rows = regenerate(tmp_path / "out", tiny, turns="first", system="Be brief.")
    sources = EmbeddedReader(limit=LIMIT).load_conversations()
    for number, row in rows.items():
        assert row.messages[:-1] == [
            {"role": "system", "content": "Be brief."},
            sources[number].messages[0],
        ]
        assert len(row.num_tokens) == 1


def test_cut_answers_are_marked_or_left_out(tmp_path: Path, tiny: Target) -> None:
    """What max_new_tokens cuts is marked "length"; with keep_cut=false exactly these
    conversations are left out.
    """
    questions = [
        "Please describe supply and demand using a lemonade stand.",
        "Say this in plain words: 'The committee met.'",
        "In simple terms, what does a catalyst do in a chemical reaction?",
    ]
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "No."}]
        for text in questions * 3
    ]
    data = ListReader(
        [
            [{**chat[0], "content": f"{chat[0]['content']}{' Please.' * (n // 3)}"}, chat[1]]
            for n, chat in enumerate(chats)
        ]
    )
    rows = regenerate(tmp_path / "kept", tiny, data, sampling={"max_new_tokens": 24})
    cut = {number for number, row in rows.items() if "length" in row.finish_reason}
    assert 0 < len(cut) < len(rows) == 9
    assert all(sum(rows[number].num_tokens) == 24 for number in cut)
    dropped = regenerate(
        tmp_path / "dropped", tiny, data, sampling={"max_new_tokens": 24, "keep_cut": False}
    )
    assert dropped == {number: row for number, row in rows.items() if number not in cut}


def test_result_is_data(tiny: Target, complete_set: Path) -> None:
    """data=jsonl data.path=DIR trains on it: every conversation, in its order, with the target's
    answers supervised.
    """
    data = JsonlReader(str(complete_set))
    assert [chat.messages for chat in data.load_conversations()] == [
        row.messages for row in read_rows(complete_set).values()
    ]
    dataset = data.make_dataset(tiny.template)
    assert dataset.num_conversations == LIMIT and dataset.num_supervised > 0


CHANGES: dict[str, dict[str, Any]] = {
    "sampling.seed=4": {"sampling": {"seed": 4}},
    "sampling.temperature=0.1": {"sampling": {"temperature": 0.1}},
    "regenerate.turns=first": {"turns": "first"},
    "regenerate.shard_size=5": {"shard_size": 5},
    "data=9 conversations": {"data": EmbeddedReader(limit=LIMIT - 1)},
}


@pytest.mark.parametrize("setting", list(CHANGES))
def test_other_settings_are_refused(setting: str, tiny: Target, complete_set: Path) -> None:
    """A set is of one kind: another setting stops with its name and what the set was begun with,
    and nothing is touched.
    """
    before = read_shards(complete_set)
    with pytest.raises(UserError) as caught:
        regenerate(complete_set, tiny, **CHANGES[setting])
    assert str(caught.value).startswith(setting) and "was begun with" in str(caught.value)
    assert read_shards(complete_set) == before


TARGET_CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Target], None]] = {
    "target.quantization=gguf_int8": lambda patch, target: patch.setattr(
        target, "quantization", "gguf_int8"
    ),
    "target.weights=1234": lambda patch, target: patch.setattr(target, "weights_hash", "1234"),
    "target.chat_template=": lambda patch, target: patch.setattr(
        target, "template", target.template.with_arguments({"enable_thinking": False})
    ),
}


@pytest.mark.parametrize("setting", TARGET_CHANGES)
def test_another_target_under_the_same_name_is_refused(
    setting: str, tiny: Target, complete_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its quantization, its weights and its chat template decide the answers too."""
    TARGET_CHANGES[setting](monkeypatch, tiny)
    with pytest.raises(UserError, match="was begun with") as caught:
        regenerate(complete_set, tiny)
    assert str(caught.value).startswith(setting)


def test_a_set_that_an_earlier_version_began_goes_on(
    tiny: Target, complete_set: Path, tmp_path: Path
) -> None:
    """Its manifest does not name weights, chat template and quantization."""
    folder = tmp_path / "earlier"
    shutil.copytree(complete_set, folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for key in ("target.weights", "target.chat_template", "target.quantization"):
        del manifest["settings"][key]
    path.write_text(json.dumps(manifest))
    assert regenerate(folder, tiny) == read_rows(complete_set)


def test_manifest_says_how_it_was_made(tiny: Target, complete_set: Path) -> None:
    """The manifest has the target, the sampling, the versions, the source, and the rows of every
    shard.
    """
    manifest = ShardSet(complete_set).manifest
    settings = manifest["settings"]
    records = manifest["shards"].values()
    assert {
        "target": "tiny",
        "sampling.temperature": 0.7,
        "sampling.seed": 3,
    }.items() <= settings.items()
    assert {
        "sampling.top_p",
        "sampling.top_k",
        "sampling.max_new_tokens",
        "regenerate.system",
        "target.dtype",
    } <= set(settings)
    assert (
        settings["data"].startswith(f"{LIMIT} conversations, sha256")
        and "torch" in manifest["made_with"]["versions"]
    )
    assert [record["rows"] for record in records] == [4, 4, 2]
    assert sum(record["tokens"] for record in records) == sum(
        sum(row.num_tokens) for row in read_rows(complete_set).values()
    )


def test_folder_with_other_files_is_refused(tmp_path: Path, tiny: Target) -> None:
    """Conversations of somebody else are not mixed with ours."""
    (tmp_path / "chats.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"holds chats\.jsonl but no manifest"):
        regenerate(tmp_path, tiny)


class UnreadyWriter(AnswerWriter):
    """Is never ready to write, and must not be called."""

    needs_target = False

    def recorded_settings(self) -> dict[str, Any]:
        return {}

    def check_ready(self) -> None:
        raise UserError("there is nothing to write with")

    def write_answers(self, shards: Iterable[Shard], add: OutcomeCallback) -> None:
        raise AssertionError


def test_nothing_is_written_where_nothing_can_be(tmp_path: Path) -> None:
    """A writer that cannot work stops the run before the folder exists."""
    with pytest.raises(UserError, match="nothing to write with"):
        Regeneration().run(tmp_path / "out", EmbeddedReader(limit=2), Sampling(), UnreadyWriter())
    assert not (tmp_path / "out").exists()


def test_questions_alone_will_do(tiny: Target, tmp_path: Path) -> None:
    """Bare questions, of one turn or several, get the answers that the same questions get in
    whole conversations.
    """
    conversations = [
        [message for message in chat.messages if message["role"] != "system"][:4]
        for chat in EmbeddedReader(limit=6).load_conversations()
    ]
    questions = [
        [message["content"] for message in messages if message["role"] == "user"]
        for messages in conversations
    ]
    lines = [{"turns": texts} if len(texts) > 1 else {"prompt": texts[0]} for texts in questions]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "whole.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    )
    reader = JsonlReader(str(tmp_path / "asked.jsonl"))
    with pytest.raises(UserError, match="holds no conversation"):
        reader.load_conversations()  # there is nothing to learn from
    reader.allows_unanswered = True
    rows = regenerate(tmp_path / "one", tiny, reader)
    assert {key: row.messages for key, row in rows.items()} == {
        key: row.messages
        for key, row in regenerate(
            tmp_path / "two", tiny, JsonlReader(str(tmp_path / "whole.jsonl"))
        ).items()
    }


def test_the_command_answers_questions_alone(tmp_path: Path) -> None:
    """A mixture of questions without answers is read, answered, and readable as conversations."""
    (tmp_path / "asked.jsonl").write_text('{"prompt": "What is a bee?"}\n')
    sources = (
        f"data.sources=[{{data:jsonl,path:{tmp_path / 'asked.jsonl'}}},{{data:embedded,limit:1}}]"
    )
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        words = [
            "target=tiny",
            "data=mix",
            sources,
            f"out={tmp_path / 'out'}",
            "++sampling.max_new_tokens=6",
        ]
        config = compose("regenerate", overrides=words)
        spec, settings = read_run(
            config, ("writer", "sampling", "regenerate", "out", "check", "capture")
        )
        regenerate_command(spec, **settings)
    chats = JsonlReader(str(tmp_path / "out")).load_conversations()
    assert (
        len(chats) == 2
        and chats[0].messages[0]["content"] == "What is a bee?"
        and chats[0].messages[1]["content"]
    )


def test_a_stream_is_refused(tmp_path: Path) -> None:
    """A stream reads a sample of its rows, and a set of a sample looks complete."""
    with pytest.raises(
        UserError, match="regeneration needs all conversations, a stream reads data.sample rows"
    ):
        run_command(
            "target=tiny",
            "data=stream",
            f"data.path={tmp_path / 'a.jsonl'}",
            f"++out={tmp_path / 'out'}",
        )


def test_texts_and_token_ids_are_refused() -> None:
    """Both are named, with what to use."""
    unfit: dict[str, Any] = {
        "plain text": Conversation([], text="Once"),
        "token ids": Example([1, 2], [False, True]),
    }
    for form, conversation in unfit.items():
        with pytest.raises(UserError, match=f"these are {form}; use data=jsonl with messages"):
            Regeneration().make_pending_row(0, conversation)


def test_calibration_needs_a_prompt_that_can_be_answered() -> None:
    def refuse_prompt(conversation: Conversation) -> list[int]:
        raise AnswerError("too_long", "the prompt leaves no room")

    pending = Regeneration().make_pending_row(0, EmbeddedReader(limit=1).load_conversations()[0])
    with pytest.raises(
        UserError,
        match=r"none of its first 1 conversations can be answered \(the prompt leaves no room\)",
    ):
        collect_prompts(refuse_prompt, Sampling(), [pending])

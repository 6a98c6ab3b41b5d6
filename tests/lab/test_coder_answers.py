"""Committed answers of the coding model: packed as generated, in a fixed order, and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lab.coder import answers as module
from lab.coder.answers import (
    PARTS,
    SOURCES,
    Answer,
    PackAnswers,
    list_ordered_prompts,
    make_id,
    read_part,
    read_parts,
    write_part,
)
from lab.coder.make_prompts import list_evaluation_phrases, list_phrases
from spectrain.data.readers import JsonlReader
from spectrain.data.shards import Row, ShardSet
from spectrain.data.tokens import TokensReader
from spectrain.errors import UserError
from spectrain.models.target import Target

TASKS = {
    "tasks": ["sorts a list", "counts words"],
    "languages": ["Python", "Go"],
    "wordings": ["Write {language} code that {task}.", "Show {language} code which {task}."],
}
OTHERS = {
    **TASKS,
    "concepts": ["closures"],
    "concept_wordings": ["Explain {concept}.", "Show {concept}."],
    "problems": ["Why does my loop not end?"],
    "questions": ["Explain this."],
    "completions": ["Complete this."],
}
SETTINGS = {
    "data": "4 conversations",
    "target": "qwen2.5-coder-1.5b",
    "target.model": "/somewhere/model.gguf",
    "sampling.temperature": 0.5,
    "regenerate.shard_size": 2,
}
FACTS = {
    "data": "prompts.jsonl",
    "conversations": 4,
    "shard_size": 2,
    "made_with": {"commit": "abc", "command": "spectrain data data.path=/somewhere/prompts.jsonl"},
}


def write_set(folder: Path, tiny: Target, prompts: list[str], num_finished: int) -> None:
    """Write a set that was stopped: the first prompts are answered, some in an open shard."""
    shards = ShardSet(folder)
    shards.begin_or_resume(SETTINGS, FACTS)
    for first in range(0, num_finished, 2):
        name = f"part-{first // 2:05d}.jsonl"
        shard = shards.claim_shard(name, [])
        assert shard is not None
        shard.restore_rows([])
        numbers = range(first, min(first + 2, num_finished))
        for number in numbers:
            shard.add_outcome(make_row(number, prompts[number], tiny))
        if len(numbers) == 2:
            shards.finish_shard(shard)
        else:
            shards.release_shard(shard)


def make_row(number: int, prompt: str, tiny: Target) -> Row:
    """Return an answer whose ids are not those of its text; one is cut, the others end."""
    is_cut = number == 1
    ids = [65 + number, 66, *tiny.tokenizer.encode(" ab")[::-1]]
    if not is_cut:
        ids.append(sorted(tiny.stop_ids)[0])
    text = tiny.tokenizer.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    return Row(number, messages, ["length" if is_cut else "stop"], [len(ids)], [ids])


@pytest.fixture
def prompts(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    order = list_ordered_prompts(TASKS, [])
    monkeypatch.setattr(module, "list_ordered_prompts", lambda: order)
    monkeypatch.setattr(module, "load_template", lambda: tiny.template)
    return order


def test_the_order_takes_every_task_before_any_twice() -> None:
    order = list_ordered_prompts(TASKS, [])
    assert len(order) == 8 and len(set(order)) == 8
    for first in range(0, 8, 2):
        assert {prompt.split()[-1] for prompt in order[first : first + 2]} == {"list.", "words."}
    shuffled = {key: values[::-1] for key, values in TASKS.items()}
    assert list_ordered_prompts(shuffled, []) == order


def test_a_round_asks_for_every_task_concept_and_problem_and_as_many_functions(
    tmp_path: Path,
) -> None:
    """Functions of a test are left out, and what decides a question is the function's text."""
    body = "".join(f"    total += {number} * values[0]\n" for number in range(12))
    for name in ("sums.py", "test_sums.py"):
        texts = [f"def sum_{at}(values):\n    total = 0\n{body}" for at in range(6)]
        (tmp_path / name).write_text("\n\n".join(texts))
    order = list_ordered_prompts(OTHERS, [tmp_path])
    assert len(order) == len(set(order)) == 8 + 2 + 1 + 6
    first, second = order[:8], order[8:13]
    assert "Why does my loop not end?" in first
    for prompts, num_functions in ((first, 4), (second, 2)):
        assert sum("```python\ndef sum_" in prompt for prompt in prompts) == num_functions
        assert sum("closures" in prompt for prompt in prompts) == 1
        assert sum(prompt.endswith(("a list.", "words.")) for prompt in prompts) == 2


@pytest.fixture(scope="module")
def all_prompts() -> list[str]:
    """The order of all tasks, with the functions of one folder."""
    return list_ordered_prompts(folders=[SOURCES[0] / "trees"])


def test_the_order_leaves_out_what_an_evaluation_asks(all_prompts: list[str]) -> None:
    evaluation = list_evaluation_phrases()
    assert len(all_prompts) > 30_000 and len(set(all_prompts)) == len(all_prompts)
    assert not any(evaluation & list_phrases(prompt) for prompt in all_prompts[::7])


def test_a_part_holds_the_training_sequences_of_its_set(
    tmp_path: Path, tiny: Target, prompts: list[str]
) -> None:
    """Its ids and masks are those that training reads of the set itself, cut answers included."""
    write_set(tmp_path / "set", tiny, prompts, 4)
    PackAnswers(answered=str(tmp_path / "set"), parts=str(tmp_path / "parts")).run()
    packed = TokensReader(str(tmp_path / "parts")).make_dataset(tiny.template)
    read = JsonlReader(str(tmp_path / "set")).make_dataset(tiny.template)
    assert [(example.tokens, example.mask) for example in packed.examples] == [
        (example.tokens, example.mask) for example in read.examples
    ]
    assert len(packed.examples) == 4 and not packed.unread
    (part,) = read_parts(tmp_path / "parts")
    assert [answer.id for answer in part.answers] == [make_id(prompt) for prompt in prompts[:4]]
    facts = pq.read_schema(part.path).metadata[b"spectrain"].decode()
    assert json.loads(facts)["settings"] == part.settings and "somewhere" not in facts
    assert part.settings == {"target": "qwen2.5-coder-1.5b", "sampling.temperature": 0.5}


def test_a_stopped_set_gives_a_part_and_then_only_what_is_new(
    tmp_path: Path, tiny: Target, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answered, parts = str(tmp_path / "set"), str(tmp_path / "parts")
    write_set(tmp_path / "set", tiny, prompts, 3)
    PackAnswers(answered=answered, parts=parts).run()
    assert "3 answers, prompts 0 to 2" in capsys.readouterr().out
    with pytest.raises(UserError, match="it has no answer that no part has"):
        PackAnswers(answered=answered, parts=parts).run()
    unanswered = tmp_path / "new" / "prompts.jsonl"
    PackAnswers(prompts=str(unanswered), parts=parts).run()
    left = [json.loads(line)["prompt"] for line in unanswered.open()]
    assert left == prompts[3:]
    write_set(tmp_path / "more", tiny, prompts, 4)
    PackAnswers(answered=str(tmp_path / "more"), parts=parts).run()
    assert "part-001.parquet: 1 answers, prompts 3 to 3" in capsys.readouterr().out


def test_a_shard_that_is_finished_meanwhile_is_read(
    tmp_path: Path, tiny: Target, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path / "set", tiny, prompts, 3)
    faults = {f"part-0000{number}.jsonl": "unfinished" for number in range(2)}
    monkeypatch.setattr(ShardSet, "find_faults", lambda _: faults)
    rows = module.read_answered_rows(ShardSet(tmp_path / "set"))
    assert [row.id for row in rows] == [0, 1, 2]


def test_a_prompt_of_no_task_is_refused(tmp_path: Path, tiny: Target, prompts: list[str]) -> None:
    write_set(tmp_path / "set", tiny, ["Who are you?", *prompts], 2)
    with pytest.raises(UserError, match="conversation 0 is no prompt of this order"):
        PackAnswers(answered=str(tmp_path / "set"), parts=str(tmp_path / "parts")).run()


def test_a_corrupt_shard_is_refused(tmp_path: Path, tiny: Target, prompts: list[str]) -> None:
    write_set(tmp_path / "set", tiny, prompts, 2)
    shard = tmp_path / "set" / "part-00000.jsonl"
    shard.write_text(shard.read_text().replace("stop", "done", 1))
    with pytest.raises(UserError, match=r"part-00000\.jsonl: this shard is corrupt"):
        PackAnswers(answered=str(tmp_path / "set"), parts=str(tmp_path / "parts")).run()


ANSWERS = [Answer("a", [5, 6, 7], [False, True, True]), Answer("b", [8, 9], [False, True])]


def test_reading_is_the_inverse_of_writing(tmp_path: Path) -> None:
    path = tmp_path / "part-000.parquet"
    write_part(path, ANSWERS, {"settings": {"seed": 0}})
    part = read_part(path)
    assert part.answers == ANSWERS and part.settings == {"seed": 0}
    assert (part.num_generated, part.num_tokens) == (3, 5)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    """Whether an id is another one, bytes are missing, or the file is another table."""
    path = tmp_path / "part-000.parquet"
    write_part(path, ANSWERS, {"settings": {}})
    table, content = pq.read_table(path), path.read_bytes()
    others = pa.array([[5, 6, 8], [8, 9]], pa.list_(pa.int32()))
    damages: list[Callable[[], object]] = [
        lambda: pq.write_table(table.set_column(1, "input_ids", others), path),
        lambda: path.write_bytes(content[:-20]),
        lambda: pq.write_table(pa.table({"id": ["a"]}), path),
    ]
    for damage in damages:
        damage()
        with pytest.raises(UserError, match=r"part-000\.parquet: this part is damaged"):
            read_parts(tmp_path)


def test_no_changed_byte_changes_what_is_read(tmp_path: Path) -> None:
    """A part with one changed byte is named as damaged, or the byte is one that nothing reads."""
    path = tmp_path / "part-000.parquet"
    write_part(path, ANSWERS, {"settings": {"seed": 0}})
    content = path.read_bytes()
    num_named = 0
    for at in range(0, len(content), 11):
        path.write_bytes(content[:at] + bytes([content[at] ^ 21]) + content[at + 1 :])
        try:
            part = read_part(path)
        except UserError:
            num_named += 1
        else:
            assert part.answers == ANSWERS and part.settings == {"seed": 0}
    assert num_named > len(content) / 22


@pytest.mark.parametrize(
    ("seed", "problem"),
    [(0, r"part-001\.parquet: .*part-000\.parquet answers its prompt a too"), (1, "its settings")],
)
def test_parts_that_do_not_fit_together_are_refused(
    tmp_path: Path, seed: int, problem: str
) -> None:
    write_part(tmp_path / "part-000.parquet", ANSWERS, {"settings": {"seed": 0}})
    write_part(tmp_path / "part-001.parquet", ANSWERS[:1], {"settings": {"seed": seed}})
    with pytest.raises(UserError, match=problem):
        read_parts(tmp_path)


def test_the_committed_parts_can_be_read(all_prompts: list[str]) -> None:
    """The first four answer tasks of today's order; later ones also functions, which change."""
    ids = {make_id(prompt) for prompt in all_prompts}
    for number, part in enumerate(read_parts(PARTS)):
        if number < 4:
            assert {answer.id for answer in part.answers} <= ids
        assert all(any(answer.mask) and not answer.mask[0] for answer in part.answers)

"""The measurement of the coder pair: what it reads of a folder, and its last line."""

from pathlib import Path

import pytest

from lab.benchmarks.coder_pair import (
    Decoder,
    describe_result,
    make_table,
    mix_prompts,
    read_code,
    split_code,
)
from spectrain.decoding.generation import Generation
from spectrain.errors import UserError
from spectrain.models.target import Target


def make_decoder(name: str, seconds: list[float], outputs: list[list[int]]) -> Decoder:
    answers = [Generation([1], output, [len(output)]) for output in outputs]
    for answer in answers:
        answer.round_seconds = [{"draft": 0.01, "verify": 0.02}]
    return Decoder(name, answers=answers, seconds=seconds)


def test_source_files_of_a_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.RS").write_text("fn main() {}\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "notes.txt").write_text("no code\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c.py").write_text("c = 1\n")
    assert read_code(tmp_path) == ["a = 1\n", "fn main() {}\n"]
    with pytest.raises(UserError, match="fewer than two source files"):
        read_code(tmp_path / "inner")
    with pytest.raises(UserError, match="there is no such folder"):
        read_code(tmp_path / "none")


def test_what_is_continued_is_not_trained_on() -> None:
    texts = ["a" * 5, "b" * 9, "c" * 7, "d" * 1, "e" * 8]
    code = split_code(texts, num_prompts=8)
    assert code.continued == ["b" * 9, "e" * 8]
    assert code.others == ["c" * 7, "a" * 5, "d"]
    assert split_code(texts, num_prompts=2).continued == ["b" * 9]


def test_questions_and_files_take_turns(tiny: Target) -> None:
    text = "one two three four five six seven eight nine ten"
    tokens = tiny.tokenizer.encode(text)
    questions = [[1], [2], [3], [4]]
    prompts = mix_prompts(tiny, [text], questions)
    assert prompts == [tokens[: len(tokens) // 2], [1], [2], [3]]


def test_the_last_line_counts_prompts_that_did_not_choose() -> None:
    outputs = [[1, 2]] * 4
    plain = make_decoder("plain", [4.0, 4.0, 4.0, 4.0], outputs)
    fast_first = make_decoder("first", [1.0, 1.0, 4.0, 2.0], outputs)
    fast_later = make_decoder("later", [2.0, 2.0, 1.0, 1.0], outputs)
    line = describe_result([plain, fast_later, fast_first])
    # 8 seconds of plain decoding over 6 of the drafter that was faster on the first two prompts.
    assert line.startswith("first: 1.33 times as fast")
    assert "outputs identical, on 2 prompts" in line and "does not pay" not in line


def test_the_last_line_says_where_drafting_does_not_pay() -> None:
    plain = make_decoder("plain", [1.0] * 3, [[1, 2]] * 3)
    slow = make_decoder("slow", [2.0] * 3, [[1, 2], [1, 3], [1, 2]])
    line = describe_result([plain, slow])
    assert line.startswith("slow: 0.50 times as fast, 1 outputs differ, on 1 prompts")
    assert line.endswith("; drafting does not pay on this machine")
    assert make_table([plain, slow]).row_count == 2

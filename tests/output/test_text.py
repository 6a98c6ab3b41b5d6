"""What leaves the process holds no secrets and no control sequences, and no text from outside is
read as markup.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from spectrain.cli import main as command_line
from spectrain.errors import RunError, UserError, describe_error
from spectrain.output.console import make_console
from spectrain.output.streams import CleanStream, clean_output, print_text, print_warning
from spectrain.output.text import clean_text, escape_controls, mask_secrets, mask_settings
from spectrain.training.metrics import Tracker, track_run

HOSTILE = {
    "colours": "a\x1b[31mb",
    "cleared screen": "a\x1b[2J\x1b[Hb",
    "window title": "a\x1b]0;title\x07b",
    "link": "a\x1b]8;;http://x\x1b\\b",
    "clipboard": "a\x1b]52;c;AAAA\x07b",
    "eight bits": "a\x9b31mb\x9d0;t\x9c",
    "carriage return": "harmful\rharmless",
    "backspaces": "bad\b\b\bgood",
    "reversed": "a\u202egpj.exe",
    "isolated": "a\u2066b\u2069",
    "separators": "a\u2028b\u2029c",
    "markup": "m[/b].jsonl",
    "bold": "a[bold]b",
    "link markup": "a[link=http://x]b[/link]",
    "emoji": "a:smile:b",
}
CONTROLS = "\x1b\x9b\x9d\x07\x08\r\u202e\u2066\u2028"
SECRETS = {
    "address": ("http://user:Pa55word@host:8000/v1", "http://***@host:8000/v1"),
    "address without a user": ("https://:Pa55word@host/v1", "https://***@host/v1"),
    "assignment": ("server.extra={api_key: Pa55word}", "server.extra={api_key: ***}"),
    "json": ('{"X-Api-Key": "Pa55word"}', '{"X-Api-Key": "***"}'),
    "option": ("vllm serve m --api-key Pa55word --port 1", "vllm serve m --api-key *** --port 1"),
    "list of words": ("['--api-key', 'Pa55word']", "['--api-key', '***']"),
    "bearer": ("authorization: Bearer Pa55word", None),
    "hub": ("token hf_abcdefghijklmnopPa55word", "token ***"),
    "provider": ("key sk-proj-abcdefghijPa55word is wrong", "key *** is wrong"),
    "environment": ("the value is in-the-environment-Pa55word", "the value is ***"),
    "longer value": ("in-the-environment-2-Pa55word", "***"),
    "sign in address": ("http://user:p@Pa55word@host/v1", "http://***@host/v1"),
    "quote in address": ("http://user:p'Pa55word@host/v1", "http://***@host/v1"),
    "query": ("http://host/v1?limit=3&token=Pa55word", "http://host/v1?limit=3&token=***"),
    "key in query": ("http://host/follow?key=Pa55word&a=1", "http://host/follow?key=***&a=1"),
    "signed address": ("https://host/f?sv=1&sig=Pa55word", "https://host/f?sv=1&sig=***"),
    "cloud's address": ("s3://f?X-Amz-Security-Token=Pa55word", "s3://f?X-Amz-Security-Token=***"),
    "other scheme": ("Authorization: Token Pa55word1", "Authorization: ***"),
    "digest": ('Authorization: Digest username="x", response="Pa55word"', "Authorization: ***"),
    "cookies": ("Cookie: a=b; session=Pa55word", "Cookie: ***"),
    "header": ("[('X-Api-Key', 'Pa55word')]", "[('X-Api-Key', '***')]"),
    "quoted words": ('password: "my Pa55word x", a: 1', 'password: "***", a: 1'),
    "escaped quote": ('{"api_key": "a\\"Pa55word"}', '{"api_key": "***"}'),
    "variable": ("SOME_CONTROL_KEY=Pa55word a=b", "SOME_CONTROL_KEY=*** a=b"),
    "named token": ("hub.token=abcdefghPa55word1", "hub.token=***"),
    "private key": ("-----BEGIN PRIVATE KEY-----\nPa55word", "-----BEGIN PRIVATE KEY-----***"),
    "fine-grained": ("github_pat_abcdefghijklmnopPa55word", "***"),
    "other clouds": ("glpat-abcdefghijPa55word AIzaabcdefghijklmnopqrstuvwxPa55word", "*** ***"),
    "signed token": ("eyJhbGciOiJI.eyJzdWIiOiJ.Pa55word", "***"),
}
HARMLESS = (
    "max_tokens=64, num_tokens: 3, tokens/s",
    "server.api_key_variable: http://host refuses the key",
    "a@b.c, http://host/a@b",
    "mask_token: <m>, key=3",
    "the password is wrong",
    "http://host:8000/a@b, http://[::1]:8000/a@b, http://host/v1?max_tokens=3",
    "the token spectrain/drafters/eagle3_layers, drafter.mask_token=runs/eagle3-tiny-2/drafter",
    "valid are 'api_key', 'url', 'name'",
    "authorization is needed, and no cookie is set",
)


@pytest.fixture(autouse=True)
def secret_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "in-the-environment-Pa55word")
    monkeypatch.setenv("OTHER_SERVICE_TOKEN", "in-the-environment-2-Pa55word")
    monkeypatch.setenv("ANOTHER_TOKEN", "in-the-environment-2")
    monkeypatch.setenv("PGPASSWORD", "of-a-database")
    monkeypatch.setenv("service_api_key", "in-small-letters")


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_masked_everywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, expected = SECRETS[name]
    assert "Pa55word" not in mask_secrets(text) and (
        expected is None or mask_secrets(text) == expected
    )
    assert mask_secrets(mask_secrets(text)) == mask_secrets(text)
    for error in (UserError(f"server.url={text}: no"), RunError(text)):
        assert "Pa55word" not in f"{error}"
    with clean_output():
        print(text)
        print(text, file=sys.stderr)
    printed = capsys.readouterr()
    assert "Pa55word" not in printed.out + printed.err
    assert "Pa55word" not in json.dumps(mask_settings({"a": [{"b": text}]}))


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_text_stays(text: str) -> None:
    assert clean_text(text) == text


@pytest.mark.sweep(2, free=("part",))
@pytest.mark.parametrize(
    "part",
    [
        "a",
        "a.",
        "a-",
        "--",
        "auth-",
        "x://",
        "x://a:",
        "?a",
        "eyJa.",
        "token",
        "cookie:",
        "password:'",
        "('api_key',",
    ],
)
def test_long_words_are_read_once(part: str) -> None:
    """A text of 300,000 characters without a space, which patterns that begin anywhere would read
    10^10 times, and a secret behind it."""
    text = part * (300_000 // len(part))
    assert mask_secrets(text) == text
    assert mask_secrets(f"{text} my-api-key=abc") == f"{text} my-api-key=***"


@pytest.mark.parametrize("value", ["of-a-database", "in-small-letters"])
def test_names_of_variables_are_read_in_any_spelling(value: str) -> None:
    assert mask_secrets(f"it is {value}") == "it is ***"


def test_a_cut_leaves_no_half_of_a_secret() -> None:
    secret = "in-the-environment-Pa55word"
    for length in range(700, 760):
        for describe in (UserError, lambda text: describe_error(ValueError(text))):
            shown = str(describe("x " * (length // 2) + secret + " y" * 1000))
            assert "in-the" not in shown and "word" not in shown


def test_an_error_is_one_short_line() -> None:
    """Line breaks and control characters of a file are visible, and a very long value loses its
    middle.
    """
    assert (
        str(UserError("x=a\nspectrain: done\x1b[2J: use b"))
        == "x=a\\nspectrain: done\\x1b[2J: use b"
    )
    text = str(RunError(f"x={'a' * 100_000}: use b"))
    assert text.startswith("x=aaa") and text.endswith("aaa: use b") and len(text) < 2000


def test_settings_keep_what_is_no_secret() -> None:
    kept = {"max_tokens": 3, "mask_token": "<m>", "n": None, "api_key_variable": "MY_KEY"}
    settings = {**kept, "api_key": "x", "headers": {"Authorization": "y", "X-Org": "z"}}
    assert mask_settings(settings) == {
        **kept,
        "api_key": "***",
        "headers": {"Authorization": "***", "X-Org": "z"},
    }


def test_everything_below_the_name_of_a_secret_is_masked() -> None:
    settings = {
        "token": ["x", 3],
        "password": {"value": "x"},
        "headers": [["X-Api-Key", "x"], ["X-Org", "z"]],
        "http://user:x@host": 1,
    }
    assert mask_settings(settings) == {
        "token": ["***", 3],
        "password": {"value": "***"},
        "headers": [["X-Api-Key", "***"], ["X-Org", "z"]],
        "http://***@host": 1,
    }


def test_trackers_hold_no_keys(tmp_path: Path) -> None:
    extra = {"api_key": "Pa55word", "top_k": 3}
    seen: list[Mapping[str, Any]] = []

    class Recording(Tracker):
        def start_run(
            self, run: Path, config: dict[str, Any], kind: Any = "train", step: int = 0
        ) -> None:
            seen.append(config)

    with track_run(
        Recording(), tmp_path, {"server": {"extra": extra, "url": "http://u:Pa55word@h"}}
    ):
        pass
    assert seen == [{"server": {"extra": {"api_key": "***", "top_k": 3}, "url": "http://***@h"}}]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_control_sequence_and_no_markup_is_printed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By print, by a console, in tables, rules, titles and styled texts; what is printed still
    shows every character.
    """
    text = HOSTILE[name]
    shown = escape_controls(text)
    assert not set(CONTROLS) & set(shown)
    table = Table("column", title=text)
    table.add_row(text)
    with clean_output():
        print(text)
        print(text, file=sys.stderr)
        console = make_console(width=200)
        console.print(text)
        console.print(Text(text, style="bold"))
        console.print(table)
        console.rule(text)
    printed = capsys.readouterr()
    assert not set(CONTROLS) & set(printed.out + printed.err)
    # A styled text of rich loses some control characters, and the five others show them.
    assert printed.out.count(shown) >= 5 and printed.err == f"{shown}\n"


def test_progress_bars_of_a_terminal_still_move() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for keeps_bars, expected in (
        (True, "\r 3% \x1b[A\\x1b[2J"),
        (False, "\\x0d 3% \\x1b[A\\x1b[2J"),
    ):
        stream = Terminal()
        CleanStream(stream, keeps_bars).write("\r 3% \x1b[A\x1b[2J")
        assert stream.getvalue() == expected


def test_the_end_of_colours_alone_passes_to_a_terminal() -> None:
    """colorama writes it when a process ends; a file and a longer text show it."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, text, expected in (
        (Terminal(), "\x1b[0m", "\x1b[0m"),
        (Terminal(), "a \x1b[0m", "a \\x1b[0m"),
        (io.StringIO(), "\x1b[0m", "\\x1b[0m"),
    ):
        CleanStream(stream).write(text)
        assert stream.getvalue() == expected


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_sentences_break_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """A path stays whole, and a file gets every sentence in one line."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path = "runs/" + "deep/" * 12
    sentence = f"nothing has followed this run; start with the command spectrain follow run={path}"
    monkeypatch.setenv("COLUMNS", str(columns))
    for make, is_terminal in ((Terminal, True), (io.StringIO, False)):
        out, err = make(), make()
        with redirect_stdout(out), redirect_stderr(err):
            print_text(f"short\n{sentence}")
            print_warning(sentence)
        for shown, text in (
            (out.getvalue(), f"short\n{sentence}"),
            (err.getvalue(), f"spectrain: {sentence}"),
        ):
            lines = shown.splitlines()
            assert " ".join(lines) == text.replace("\n", " ")
            assert len(lines) == text.count("\n") + 1 or is_terminal
            if is_terminal:
                assert all(len(line) <= columns for line in lines if path not in line)
                assert max(map(len, lines)) < len(sentence)


@contextmanager
def captured_command(*words: str) -> Iterator[tuple[io.StringIO, list[int]]]:
    """Run the command line with these words; yield what it prints and its exit status."""
    output = io.StringIO()
    status = [0]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(output):
        patch.setattr(sys, "argv", ["spectrain", *words])
        try:
            command_line.main()
        except SystemExit as ended:
            status[0] = int(ended.code or 0)
        yield output, status


def test_commands_print_names_and_contents_of_files_as_they_are(tmp_path: Path) -> None:
    """Row, file name, name of a choice, and an error that quotes a file."""
    text = " ".join(HOSTILE.values())
    rows = tmp_path / text.replace("/", "-")
    drafter = tmp_path / "drafter"
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": f"{text} it is"},
    ]
    rows.write_text(json.dumps({"messages": messages, text: 1}) + "\n")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"messages": [{"role": text, "content": "x"}]}) + "\n")
    drafter.mkdir()
    save_file({text: torch.full((2,), float("nan"))}, drafter / "model.safetensors")
    (drafter / "config.json").write_text(
        json.dumps({"drafter": {"choice": text}, "target": {"choice": "tiny"}})
    )
    for words in (
        (
            "data",
            "inspect",
            "target=tiny",
            "data=jsonl",
            f"data.path={json.dumps(str(rows), ensure_ascii=False)}",
        ),
        ("data", "inspect", "target=tiny", "data=jsonl", f"data.path={broken}"),
        ("lint", str(drafter)),
    ):
        with captured_command(*words) as (output, status):
            printed = output.getvalue()
        assert not set(CONTROLS) & set(printed), words
        assert "Traceback" not in printed and status[0] in (0, 1, 2)
    assert escape_controls(text) in printed


def test_a_traceback_holds_no_secrets_and_no_control_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python prints an error that nobody expected once the command has ended."""

    def fail(arguments: list[str]) -> None:
        raise ArithmeticError("http://user:Pa55word@host \x1b[2J")

    monkeypatch.setattr(command_line, "dispatch_command", fail)
    with captured_command("runs") as (output, status):
        printed = output.getvalue()
    assert status[0] == 1 and "Traceback" in printed
    assert "ArithmeticError: http://***@host \\x1b[2J" in printed and "Pa55word" not in printed


def test_names_that_are_no_text_are_printed_and_refused_as_words(tmp_path: Path) -> None:
    """A file's name may hold any bytes; a terminal may lack characters."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")
    output = tmp_path / "output"
    with output.open("w", encoding="ascii") as file, redirect_stdout(file), clean_output():
        print(f"{path}: é")
    assert output.read_text().endswith("/\\udcff.txt: \\xe9\n")
    with pytest.raises(UserError, match="it is no UTF-8 text, so no file can hold it"):
        command_line.dispatch_command(["runs", path])

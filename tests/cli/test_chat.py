"""A conversation in the terminal says what decoding says, shows it as it comes, and remembers it."""

import io
import os
import pty
import re
import select
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from spectrain.cli import chat
from spectrain.cli import main as cli
from spectrain.cli.chat import Chat, PlainOutput, TerminalChat, TerminalOutput, TextPiece, TextStream
from spectrain.config.spec import RunSpec
from spectrain.data.chat import render_chat, tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.runs.drafters import save_drafter
from spectrain.trees import Chain
from tests.drafters.test_contract import composed

QUESTION = "one two three four one two three four one two"


class Heard(PlainOutput):
    """What was shown and said, kept."""

    def __init__(self) -> None:
        self.pieces: list[TextPiece] = []
        self.notes: list[str] = []
        self.console = Console(file=io.StringIO())

    def show_pieces(self, pieces: list[TextPiece], status: str) -> None:
        self.pieces += pieces

    def show_note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def asked(target: Target, *texts: str) -> list[int]:
    """The prompt of a conversation of user and assistant in turn."""
    return tokenize_prompt(
        target.template, [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    )


def answered(target: Target, tokens: list[int], limit: int) -> str:
    """What the target says by itself."""
    (alone,) = decode(target, [tokens], Greedy(), limit)
    return said(target, alone.output)


def said(target: Target, output: list[int]) -> str:
    return str(target.tokenizer.decode([token for token in output if token not in target.stop_ids]))


@pytest.fixture
def talk(tiny: Target) -> TerminalChat:
    """A conversation with the tiny target through n-gram lookup."""
    return TerminalChat(Chat(max_new_tokens=24), Session(tiny, Greedy(), Ngram(tiny), Chain(3)), Heard())


def heard(talk: TerminalChat) -> Heard:
    assert isinstance(talk.output, Heard)
    return talk.output


@pytest.mark.parametrize("captured", [False, True], ids=["loop", "engine"])
def test_a_watcher_sees_every_round_and_changes_nothing(tiny: Target, captured: bool) -> None:
    """The output grows round by round to what is returned, which is what comes without a watcher."""
    prompts = [asked(tiny, QUESTION), asked(tiny, "Hi")]
    seen: list[list[list[int]]] = []
    watch = lambda generations: seen.append([list(one.output) for one in generations])  # noqa: E731
    if captured:
        watched = CapturedRunner(tiny, Greedy()).decode(prompts, 24, on_round=watch)
    else:
        watched = Session(tiny, Greedy(), Ngram(tiny), Chain(3)).decode(prompts, 24, on_round=watch)
    plain = decode(tiny, prompts, Greedy(), 24, Ngram(tiny), Chain(3))
    assert [one.output for one in watched] == [one.output for one in plain] == seen[-1]
    for row, generation in enumerate(watched):
        lengths = [len(outputs[row]) for outputs in seen]
        assert lengths[0] == 1 and lengths == sorted(lengths)
        if not captured:  # the engine looks every few rounds
            assert lengths[1 : 1 + len(generation.round_lengths)] == [
                min(1 + sum(generation.round_lengths[:n]), len(generation.output))
                for n in range(1, 1 + len(generation.round_lengths))
            ]
        assert all(generation.output[: len(outputs[row])] == outputs[row] for outputs in seen)


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


@pytest.mark.parametrize(
    "text", ["caf\u00e9 \U0001f389 na\u00efve", f"\u4e2d\u6587 \u03b1\u03b2 {FAMILY}", " two  spaces\n\n\tand tabs "]
)  # fmt: skip
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_characters_are_never_torn(tiny: Target, text: str, cut: int) -> None:
    """Streamed pieces hold whole characters and join to the text of all tokens, whatever the rounds; a cut one comes last."""
    tokens = tiny.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = tokens[: len(tokens) - cut]
    for width in (1, 2, 3):
        stream, generation, pieces = TextStream(tiny), Generation([]), list[TextPiece]()
        for first in range(0, len(tokens), width):
            generation.output += tokens[first : first + width]
            generation.round_lengths.append(width)
            pieces += stream.read_pieces(generation)
        streamed = "".join(piece.text for piece in pieces)
        assert "\ufffd" not in streamed
        assert streamed + stream.remaining_text() == tiny.tokenizer.decode(tokens)


def test_pieces_tell_who_proposed_them(tiny: Target, talk: TerminalChat) -> None:
    """The first token is the prefill's; in each round all but the last were drafted; the end token is not shown."""
    generation = talk.answer_question(QUESTION)
    assert generation is not None and max(generation.round_lengths) > 1
    pieces = heard(talk).pieces[:-1]  # without the rest, which is empty
    assert (pieces[0].round, pieces[0].is_drafted) == (0, False)
    for number, count in enumerate(generation.complete_round_lengths, 1):
        assert [piece.is_drafted for piece in pieces if piece.round == number] == [True] * (count - 1) + [False]
    assert heard(talk).text == said(tiny, generation.output)


def test_an_answer_is_the_targets_own_with_the_conversation_before_it(tiny: Target, talk: TerminalChat) -> None:
    """Each answer is what the target says by itself to all that was said; without the drafter, and once more, too."""
    first, second = "What is a bee?", "And a bear?"
    talk.answer_question(first)
    answer = heard(talk).text
    assert answer == answered(tiny, asked(tiny, first), 24)
    following = answered(tiny, asked(tiny, first, answer, second), 24)
    for line in (second, "/drafter", "/again"):
        heard(talk).pieces = []
        talk.run_command(line) if line.startswith("/") else talk.answer_question(line)
        assert heard(talk).text == ("" if line == "/drafter" else following)
    assert [message["content"] for message in talk.messages] == [first, answer, second, following]
    assert talk.speeds[False].answers == 1 and talk.speeds[False].tokens_per_forward == 1
    talk.run_command("/stats")
    assert "ratio" in heard(talk).console.file.getvalue()  # type: ignore[attr-defined]
    talk.run_command("/reset")
    talk.answer_question(first)
    assert len(talk.messages) == 2


def test_the_oldest_turns_are_forgotten_where_the_context_ends(tiny: Target, talk: TerminalChat) -> None:
    """What no longer fits goes, in pairs and with a word; the system message and the question stay."""
    talk.system_messages = [{"role": "system", "content": "Be brief."}]
    long = "honey " * 60
    room = tiny.max_length - 24
    for _ in range(12):
        assert talk.answer_question(long) is not None
    kept = [*talk.system_messages, *talk.messages]
    assert kept[0]["role"] == "system" and [one["role"] for one in talk.messages[::2]] == ["user"] * (len(talk.messages) // 2)
    assert len(talk.messages) < 24 and len(tokenize_prompt(tiny.template, kept[:-1])) <= room
    assert any("left out" in note for note in heard(talk).notes)


def test_what_leaves_no_room_is_not_asked(tiny: Target, talk: TerminalChat) -> None:
    """A text as long as the context is refused with a word, and forgotten."""
    assert talk.answer_question("honey " * 2000) is None
    assert talk.messages == [] and "fewer words" in heard(talk).notes[-1]


def test_an_interrupt_keeps_what_was_said(tiny: Target, talk: TerminalChat) -> None:
    """Ctrl-C ends the answer; its beginning is the answer that is remembered."""
    show = heard(talk).show_pieces

    def stop(pieces: list[TextPiece], status: str) -> None:
        show(pieces, status)
        if len(heard(talk).pieces) > 5 and not heard(talk).notes:
            heard(talk).show_note("Ctrl-C")
            raise KeyboardInterrupt

    talk.output.show_pieces = stop  # type: ignore[method-assign]
    talk.answer_question("What is a bee?")
    assert "stopped" in heard(talk).notes[-1]
    assert talk.messages[-1] == {"role": "assistant", "content": heard(talk).text}
    assert answered(tiny, asked(tiny, "What is a bee?"), 24).startswith(heard(talk).text)


@pytest.mark.parametrize(
    "line, word",
    [("/hlep", "/help"), ("/drafter of", "/drafter off"), ("/again", "nothing was asked"), ("/stats now", "say /stats")],
)
def test_a_wrong_command_is_told(talk: TerminalChat, line: str, word: str) -> None:
    """It names the nearest, and the conversation goes on."""
    talk.run_command(line)
    assert word in heard(talk).notes[-1]


def picture(shown: str, width: int) -> list[str]:
    """What a terminal shows, of the few codes that are used: colours, up a line, an emptied line."""
    lines, row, column = [""], 0, 0
    for code, char in re.findall(r"(\x1b\[[\d;?]*[A-Za-z])|(.|\n|\r)", shown):
        if code.endswith("A"):
            row -= int(code[2:-1])
        elif code.endswith("K"):
            lines[row] = ""
        elif char == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif char == "\r":
            column = 0
        elif char:
            lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
            column += 1
    assert all(len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def test_a_terminal_shows_the_answer_and_one_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment the screen holds what was said so far, wrapped, and below it the newest status; at the end the answer."""
    monkeypatch.setattr(chat, "REFRESH_SECONDS", -1.0)
    console = Console(file=io.StringIO(), force_terminal=True, width=24, color_system="standard")
    screen, text = TerminalOutput(console), ""
    words = re.findall(r"\s*\S+", "The bees find\nthe hive. \n\nAll of them come home unreasonably often, and sing.")
    with screen.open_answer():
        for number, word in enumerate(words):
            screen.show_pieces([TextPiece(word, number, number % 2 == 0)], f"{number} tokens")
            text += word
            *lines, status = [line for line in picture(console.file.getvalue(), 24) if line]  # type: ignore[attr-defined]
            assert status == f"{number} tokens"
            assert " ".join(lines).split() == text.split()
    assert " ".join(picture(console.file.getvalue(), 24)).split() == text.split()  # type: ignore[attr-defined]


def test_tokens_of_a_round_share_a_colour() -> None:
    """Rounds that follow each other differ, and the target's own token looks unlike all drafted ones."""
    drafted = [chat.piece_style(TextPiece("", number, True)) for number in range(1, 7)]
    assert all(one != other for one, other in zip(drafted, drafted[1:]))
    assert chat.piece_style(TextPiece("", 1, False)) not in drafted


def spoken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, stdin: str = ""
) -> tuple[Any, str, str]:
    """Exit status, stdout and stderr of a chat."""
    monkeypatch.setattr(sys, "argv", ["spectrain", "chat", "target=tiny", "chat.max_new_tokens=24", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    status = 0
    try:
        cli.main()
    except SystemExit as stopped:
        status = stopped.code  # type: ignore[assignment]
    return status, *capsys.readouterr()


def test_scripts_get_the_answers_alone(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Off a terminal stdout holds the answers: one for --once, one for every line of stdin."""
    text = "Don't sing, [bees]!"
    expected = answered(tiny, asked(tiny, text), 24)
    status, out, err = spoken(monkeypatch, capsys, "drafter=ngram", "--once", text)
    assert (status, out) == (0, expected + "\n") and "tokens/s" in err
    lines = f"{text}\n\n/reset\n{text}\n/exit\nnever asked\n"
    assert spoken(monkeypatch, capsys, "drafter=ngram", stdin=lines)[:2] == (0, f"{expected}\n" * 2)


@pytest.mark.parametrize(
    "words, how",
    [
        ((), "Eagle3 + retrieval, auto, up to 16 nodes, acceptance greedy"),
        (("acceptance=match",), "Eagle3 + retrieval, auto, up to 16 nodes, acceptance match"),
        (("tree.budget=5",), "Eagle3, eagle2, 5 nodes, acceptance greedy"),
        (("chat.measured=false",), "Eagle3, eagle2, 16 nodes, acceptance greedy"),
        (("tree=chain", "tree.depth=2"), "Eagle3, chain of 2, acceptance greedy"),
        (("tree=chain", "chat.measured=true"), "Eagle3 + retrieval, auto, up to 16 nodes, acceptance greedy"),
    ],
)
def test_a_drafter_chats_by_what_pays_here(
    tiny: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    how: str,
) -> None:
    """With copies and a measured tree, unless a tree is asked for or the rule needs drawn children; the answer is the same."""
    torch.manual_seed(0)
    drafter = Eagle3(tiny, vocab_size=512)
    save_drafter(
        tmp_path,
        drafter,
        RunSpec.from_nodes(composed("drafter=eagle3", "+drafter.vocab_size=512", "target=tiny", "tree=eagle2")),
    )
    greetings, seen = [], TerminalChat.answer_question

    def ask(self: TerminalChat, text: str) -> Generation | None:
        greetings.append(self.greeting_text)
        return seen(self, text)

    monkeypatch.setattr(TerminalChat, "answer_question", ask)
    status, out, err = spoken(monkeypatch, capsys, f"run={tmp_path}", *words, "--once", "What is a bee?")
    assert status == 0, err
    assert f"through {how}" in greetings[0]
    if "greedy" in how:
        assert out == answered(tiny, asked(tiny, "What is a bee?"), 24) + "\n"


def test_a_system_message_is_a_sentence(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """chat.system may hold what hydra's grammar does not: apostrophes, commas, brackets."""
    system, text = "Don't be long, (please)!", "Hi"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    assert system in render_chat(tiny.template, messages)
    status, out, _ = spoken(monkeypatch, capsys, "drafter=ngram", f"chat.system={system}", "--once", text)
    assert (status, out) == (0, answered(tiny, tokenize_prompt(tiny.template, messages), 24) + "\n")


@pytest.mark.parametrize(
    "words, expected",
    [
        ((), ("run=", "drafter=ngram")),
        (("drafter=ngram", "chat.max_tokens=3"), ("chat.max_tokens", "max_new_tokens")),
        (("drafter=ngram", "chat.max_new_tokens=1"), ("chat.max_new_tokens=1",)),
        (("drafter=ngram", "chat.max_new_tokens=4000"), ("chat.max_new_tokens=4000", "1024")),
        (("drafter=ngram", "--once"), ("--once",)),
        (("drafter=ngram", "--once", "honey " * 2000), ("--once", "room")),
        (("run=nowhere",), ("run=nowhere", "drafter")),
        (("drafter=ngram", "tre=chain"), ("tre", "tree")),
    ],
)
def test_a_mistake_is_one_sentence(
    words: tuple[str, ...], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names what, and how to mend it."""
    status, out, err = spoken(monkeypatch, capsys, *words)
    assert (status, out) == (2, "") and all(word in err for word in expected), err


def test_only_a_chat_template_makes_a_chat(tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base model is refused."""
    monkeypatch.setattr(chat, "load_target", lambda config, folder: tiny)
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="chat template"):
        Chat().run(None, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_template", [True, False])
def test_plain_text_is_continued(
    shallow: Target,
    shallow_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_template: bool,
) -> None:
    """With --raw the output is what generate writes after the text's own tokens, with and without a chat template, for --once
    and for every line of stdin, which keeps its spaces and knows nothing of the lines before it."""
    folder = tmp_path / "model"
    shutil.copytree(shallow_folder, folder)
    if not has_template:
        (folder / "chat_template.jinja").unlink()
    texts = ["  one two three one two", "The bee said "]
    with reference_model(shallow) as model:
        prompts = [list(shallow.tokenizer(text)["input_ids"]) for text in texts]
        expected = [said(shallow, generate(model, prompt, 24, shallow.stop_ids)) for prompt in prompts]
    words = ["target=hf", f"target.model={folder}", "drafter=ngram", "--raw"]
    assert spoken(monkeypatch, capsys, *words, "--once", texts[0])[:2] == (0, f"{expected[0]}\n")
    lines = f"{texts[0]}\n \n{texts[1]}\n /again\n/exit\n"
    assert spoken(monkeypatch, capsys, *words, stdin=lines)[:2] == (0, f"{expected[0]}\n{expected[1]}\n{expected[1]}\n")
    if not has_template:
        status, out, err = spoken(monkeypatch, capsys, *words[:-1], "--once", texts[0])
        assert (status, out) == (2, "") and "continue plain text with --raw" in err


def test_plain_text_has_no_system_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the key and the flag."""
    status, out, err = spoken(monkeypatch, capsys, "drafter=ngram", "--raw", "chat.system=Be short.")
    assert (status, out) == (2, "") and "chat.system: plain text has no system message" in err and "--raw" in err


@pytest.mark.slow
def test_keys_of_a_terminal() -> None:
    """In a real terminal Ctrl-C stops an answer, and at the prompt says how to leave; Ctrl-D leaves with status 0."""
    words = ["chat", "drafter=ngram", "target=tiny", "chat.max_new_tokens=900"]
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a job in the background was started without
        os.environ.update(TERM="xterm", COLUMNS="80")
        os.execv(sys.executable, [sys.executable, "-m", "spectrain", *words])
    shown = b""

    def wait_for(mark: bytes, key: bytes = b"") -> None:
        """Press the key, and again after a second without a word: one that comes just before readline waits is lost."""
        nonlocal shown
        start = len(shown)
        for _ in range(120):
            if mark in shown[start:]:
                return
            os.write(terminal, key)
            while select.select([terminal], [], [], 1)[0] and mark not in shown[start:]:
                shown += os.read(terminal, 65536)
        raise AssertionError(shown)

    try:
        wait_for(b"> ")
        os.write(terminal, b"Count from one to a thousand: one two three one two three\n")
        wait_for(b"tokens/s")
        os.write(terminal, b"\x03")
        wait_for(b"> ")
        assert b"stopped; " in shown
        wait_for(b"Ctrl-D leaves", key=b"\x03")
        with pytest.raises(OSError, match="Input/output"):  # the other side of the terminal is closed
            wait_for(b"the end", key=b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)

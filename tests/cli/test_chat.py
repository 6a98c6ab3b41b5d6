"""A conversation in the terminal says what decoding says, shows it as it comes, and remembers
it.
"""

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

from spectrain.cli import chat, chat_output
from spectrain.cli import main as cli
from spectrain.cli.chat import Chat, TerminalChat
from spectrain.cli.chat_output import PlainOutput, TerminalOutput, TextPiece, TextStream
from spectrain.config.spec import RunSpec
from spectrain.data.chat import render_chat, tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import Terminated, UserError
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.runs.drafters import save_drafter
from spectrain.trees import Chain
from tests.drafters.test_contract import composed

QUESTION = "one two three four one two three four one two"


class RecordingOutput(PlainOutput):
    """Records the pieces and notes that are shown."""

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


def make_prompt(target: Target, *texts: str) -> list[int]:
    """Return the prompt of a conversation of user and assistant in turn."""
    return tokenize_prompt(
        target.template,
        [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)],
    )


def decode_alone(target: Target, tokens: list[int], limit: int) -> str:
    """Return the text that the target decodes without a drafter."""
    (alone,) = decode(target, [tokens], Greedy(), limit)
    return decode_text(target, alone.output)


def decode_text(target: Target, output: list[int]) -> str:
    return str(target.tokenizer.decode([token for token in output if token not in target.stop_ids]))


@pytest.fixture
def chat_session(tiny: Target) -> TerminalChat:
    """Return a conversation with the tiny target through n-gram lookup."""
    return TerminalChat(
        Chat(max_new_tokens=24), Session(tiny, Greedy(), Ngram(tiny), Chain(3)), RecordingOutput()
    )


def get_output(chat_session: TerminalChat) -> RecordingOutput:
    assert isinstance(chat_session.output, RecordingOutput)
    return chat_session.output


@pytest.mark.parametrize("captured", [False, True], ids=["loop", "engine"])
def test_a_watcher_sees_every_round_and_changes_nothing(tiny: Target, captured: bool) -> None:
    """The output grows round by round to what is returned, which is what comes without a
    watcher.
    """
    prompts = [make_prompt(tiny, QUESTION), make_prompt(tiny, "Hi")]
    outputs_by_round: list[list[list[int]]] = []

    def record_outputs(generations):
        return outputs_by_round.append([list(generation.output) for generation in generations])

    if captured:
        generations = CapturedRunner(tiny, Greedy()).decode(prompts, 24, on_round=record_outputs)
    else:
        generations = Session(tiny, Greedy(), Ngram(tiny), Chain(3)).decode(
            prompts, 24, on_round=record_outputs
        )
    plain = decode(tiny, prompts, Greedy(), 24, Ngram(tiny), Chain(3))
    assert (
        [generation.output for generation in generations]
        == [generation.output for generation in plain]
        == outputs_by_round[-1]
    )
    for row, answer in enumerate(generations):
        lengths = [len(texts[row]) for texts in outputs_by_round]
        assert lengths[0] == 1 and lengths == sorted(lengths)
        if not captured:  # the engine looks every few rounds
            assert lengths[1 : 1 + len(answer.round_lengths)] == [
                min(1 + sum(answer.round_lengths[:n]), len(answer.output))
                for n in range(1, 1 + len(answer.round_lengths))
            ]
        assert all(answer.output[: len(texts[row])] == texts[row] for texts in outputs_by_round)


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


@pytest.mark.parametrize(
    "text",
    [
        "caf\u00e9 \U0001f389 na\u00efve",
        f"\u4e2d\u6587 \u03b1\u03b2 {FAMILY}",
        " two  spaces\n\n\tand tabs ",
    ],
)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_characters_are_never_torn(tiny: Target, text: str, cut: int) -> None:
    """Streamed pieces hold whole characters and join to the text of all tokens, whatever the
    rounds; a cut one comes last.
    """
    tokens = tiny.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = tokens[: len(tokens) - cut]
    for width in (1, 2, 3):
        stream = TextStream(tiny)
        generation = Generation([])
        pieces = list[TextPiece]()
        for first in range(0, len(tokens), width):
            generation.output += tokens[first : first + width]
            generation.round_lengths.append(width)
            pieces += stream.read_pieces(generation)
        streamed = "".join(piece.text for piece in pieces)
        assert "\ufffd" not in streamed
        assert streamed + stream.remaining_text() == tiny.tokenizer.decode(tokens)


def test_pieces_tell_who_proposed_them(tiny: Target, chat_session: TerminalChat) -> None:
    """The first token is the prefill's; in each round all but the last were drafted; the end
    token is not shown.
    """
    generation = chat_session.answer_question(QUESTION)
    assert generation is not None and max(generation.round_lengths) > 1
    pieces = get_output(chat_session).pieces[:-1]  # without the rest, which is empty
    assert (pieces[0].round, pieces[0].is_drafted) == (0, False)
    for number, count in enumerate(generation.complete_round_lengths, 1):
        assert [piece.is_drafted for piece in pieces if piece.round == number] == [True] * (
            count - 1
        ) + [False]
    assert get_output(chat_session).text == decode_text(tiny, generation.output)


def test_an_answer_is_the_targets_own_with_the_conversation_before_it(
    tiny: Target, chat_session: TerminalChat
) -> None:
    """Each answer is what the target says by itself to all that was said; without the drafter,
    and once more, too.
    """
    first = "What is a bee?"
    second = "And a bear?"
    chat_session.answer_question(first)
    answer = get_output(chat_session).text
    assert answer == decode_alone(tiny, make_prompt(tiny, first), 24)
    following = decode_alone(tiny, make_prompt(tiny, first, answer, second), 24)
    for line in (second, "/drafter", "/again"):
        get_output(chat_session).pieces = []
        chat_session.run_command(line) if line.startswith("/") else chat_session.answer_question(
            line
        )
        assert get_output(chat_session).text == ("" if line == "/drafter" else following)
    assert [message["content"] for message in chat_session.messages] == [
        first,
        answer,
        second,
        following,
    ]
    assert (
        chat_session.speeds[False].answers == 1
        and chat_session.speeds[False].tokens_per_forward == 1
    )
    chat_session.run_command("/stats")
    assert "ratio" in get_output(chat_session).console.file.getvalue()  # type: ignore[attr-defined]
    chat_session.run_command("/reset")
    chat_session.answer_question(first)
    assert len(chat_session.messages) == 2


def test_the_oldest_turns_are_forgotten_where_the_context_ends(
    tiny: Target, chat_session: TerminalChat
) -> None:
    """What no longer fits goes, in pairs and with a word; the system message and the question
    stay.
    """
    chat_session.system_messages = [{"role": "system", "content": "Be brief."}]
    long = "honey " * 60
    room = tiny.max_length - 24
    for _ in range(12):
        assert chat_session.answer_question(long) is not None
    messages = [*chat_session.system_messages, *chat_session.messages]
    assert messages[0]["role"] == "system" and [
        message["role"] for message in chat_session.messages[::2]
    ] == ["user"] * (len(chat_session.messages) // 2)
    assert (
        len(chat_session.messages) < 24
        and len(tokenize_prompt(tiny.template, messages[:-1])) <= room
    )
    assert any("left out" in note for note in get_output(chat_session).notes)


def test_questions_that_leave_no_room_are_refused(tiny: Target, chat_session: TerminalChat) -> None:
    """A text as long as the context is refused with a word, and forgotten."""
    assert chat_session.answer_question("honey " * 2000) is None
    assert chat_session.messages == [] and "fewer words" in get_output(chat_session).notes[-1]


def test_a_short_answer_needs_no_more_room_than_it_takes(tiny: Target) -> None:
    """With a limit of a few tokens, a question is answered with so many."""
    chat = TerminalChat(
        Chat(max_new_tokens=4), Session(tiny, Greedy(), Ngram(tiny), Chain(3)), RecordingOutput()
    )
    generation = chat.answer_question("What is a bee?")
    assert generation is not None and len(generation.output) == 4


def test_an_interrupt_keeps_the_beginning(tiny: Target, chat_session: TerminalChat) -> None:
    """Ctrl-C ends the answer; its beginning is the answer that is remembered."""
    show = get_output(chat_session).show_pieces

    def stop(pieces: list[TextPiece], status: str) -> None:
        show(pieces, status)
        if len(get_output(chat_session).pieces) > 5 and not get_output(chat_session).notes:
            get_output(chat_session).show_note("Ctrl-C")
            raise KeyboardInterrupt

    chat_session.output.show_pieces = stop  # type: ignore[method-assign]
    chat_session.answer_question("What is a bee?")
    assert "stopped" in get_output(chat_session).notes[-1]
    assert chat_session.messages[-1] == {
        "role": "assistant",
        "content": get_output(chat_session).text,
    }
    assert decode_alone(tiny, make_prompt(tiny, "What is a bee?"), 24).startswith(
        get_output(chat_session).text
    )


def test_chat_ends_by_a_signal_and_not_by_an_interrupt(
    chat_session: TerminalChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends an answer; a signal that ends the process ends the chat."""

    def stop(*_: object) -> None:
        raise Terminated(signal.SIGTERM)

    monkeypatch.setattr(chat_session.output, "show_pieces", stop)
    with pytest.raises(Terminated):
        chat_session.answer_question("What is a bee?")


@pytest.mark.parametrize(
    "line, word",
    [
        ("/hlep", "/help"),
        ("/drafter of", "/drafter off"),
        ("/again", "nothing was asked"),
        ("/stats now", "say /stats"),
    ],
)
def test_a_wrong_command_is_named(chat_session: TerminalChat, line: str, word: str) -> None:
    """The note names the nearest command, and the conversation goes on."""
    chat_session.run_command(line)
    assert word in get_output(chat_session).notes[-1]


def render_terminal(shown: str, width: int) -> list[str]:
    """Return the lines that a terminal shows, from the few codes that are used: colours, up a
    line, an emptied line.
    """
    lines = [""]
    row = 0
    column = 0
    for code, char in re.findall(r"(\x1b\[[\d;?]*[A-Za-z])|(.|\n|\r)", shown):
        if code.endswith("A"):
            row -= int(code[2:-1])
        elif code.endswith("K"):
            lines[row] = ""
        elif char == "\n":
            row = row + 1
            column = 0
            lines += [""] * (row == len(lines))
        elif char == "\r":
            column = 0
        elif char:
            lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
            column += 1
    assert all(len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def test_a_terminal_shows_the_answer_and_a_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment the screen holds the text so far, wrapped, and below it the newest status;
    at the end only the answer.
    """
    monkeypatch.setattr(chat_output, "REFRESH_SECONDS", -1.0)
    console = Console(file=io.StringIO(), force_terminal=True, width=24, color_system="standard")
    screen = TerminalOutput(console)
    text = ""
    words = re.findall(
        r"\s*\S+",
        "The bees find\nthe hive. \n\nAll of them come home unreasonably often, and sing.",
    )
    with screen.open_answer():
        for number, word in enumerate(words):
            screen.show_pieces([TextPiece(word, number, number % 2 == 0)], f"{number} tokens")
            text += word
            *lines, status = [line for line in render_terminal(console.file.getvalue(), 24) if line]  # type: ignore[attr-defined]
            assert status == f"{number} tokens"
            assert " ".join(lines).split() == text.split()
    assert " ".join(render_terminal(console.file.getvalue(), 24)).split() == text.split()  # type: ignore[attr-defined]


def test_tokens_of_a_round_share_a_colour() -> None:
    """Rounds that follow each other differ, and the target's own token looks unlike all drafted
    ones.
    """
    drafted = [chat_output.piece_style(TextPiece("", number, True)) for number in range(1, 7)]
    assert all(style != following for style, following in zip(drafted, drafted[1:]))
    assert chat_output.piece_style(TextPiece("", 1, False)) not in drafted


def run_chat(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *words: str,
    stdin: str = "",
) -> tuple[Any, str, str]:
    """Return exit status, stdout and stderr of a chat."""
    monkeypatch.setattr(
        sys, "argv", ["spectrain", "chat", "target=tiny", "chat.max_new_tokens=24", *words]
    )
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
    """Without a terminal stdout holds only the answers, to --once or to every line of stdin."""
    text = "Don't sing, [bees]!"
    expected = decode_alone(tiny, make_prompt(tiny, text), 24)
    status, out, err = run_chat(monkeypatch, capsys, "drafter=ngram", "--once", text)
    assert (status, out) == (0, expected + "\n") and "tokens/s" in err
    assert "target=tiny has 2 million parameters and writes nonsense" in " ".join(err.split())
    lines = f"{text}\n\n/reset\n{text}\n/exit\nnever asked\n"
    assert run_chat(monkeypatch, capsys, "drafter=ngram", stdin=lines)[:2] == (
        0,
        f"{expected}\n" * 2,
    )


@pytest.mark.sweep(3, free=("words", "description"))
@pytest.mark.parametrize(
    "words, description",
    [
        ((), "Eagle3 + retrieval, auto, up to 16 nodes, acceptance greedy"),
        (("acceptance=match",), "Eagle3 + retrieval, auto, up to 16 nodes, acceptance match"),
        (("tree.budget=5",), "Eagle3, eagle2, 5 nodes, acceptance greedy"),
        (("chat.measured=false",), "Eagle3, eagle2, 16 nodes, acceptance greedy"),
        (("tree=chain", "tree.depth=2"), "Eagle3, chain of 2, acceptance greedy"),
        (
            ("tree=chain", "chat.measured=true"),
            "Eagle3 + retrieval, auto, up to 16 nodes, acceptance greedy",
        ),
    ],
)
def test_a_drafter_chats_by_what_pays_here(
    tiny: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    description: str,
) -> None:
    """A chat uses copies and a measured tree, unless a tree is set or the rule needs drawn
    children; the answer is the same.
    """
    torch.manual_seed(0)
    drafter = Eagle3(tiny, vocab_size=512)
    save_drafter(
        tmp_path,
        drafter,
        RunSpec.from_nodes(
            composed("drafter=eagle3", "+drafter.vocab_size=512", "target=tiny", "tree=eagle2")
        ),
    )
    greetings = []
    answer_question = TerminalChat.answer_question

    def record_greeting(self: TerminalChat, text: str) -> Generation | None:
        greetings.append(self.greeting_text)
        return answer_question(self, text)

    monkeypatch.setattr(TerminalChat, "answer_question", record_greeting)
    status, out, err = run_chat(
        monkeypatch, capsys, f"run={tmp_path}", *words, "--once", "What is a bee?"
    )
    assert status == 0, err
    assert f"through {description}" in greetings[0]
    if "greedy" in description:
        assert out == decode_alone(tiny, make_prompt(tiny, "What is a bee?"), 24) + "\n"


def test_a_system_message_is_a_sentence(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """chat.system may hold what hydra's grammar does not: apostrophes, commas, brackets."""
    system = "Don't be long, (please)!"
    text = "Hi"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    assert system in render_chat(tiny.template, messages)
    status, out, _ = run_chat(
        monkeypatch, capsys, "drafter=ngram", f"chat.system={system}", "--once", text
    )
    assert (status, out) == (
        0,
        decode_alone(tiny, tokenize_prompt(tiny.template, messages), 24) + "\n",
    )


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
def test_a_mistake_is_a_single_sentence(
    words: tuple[str, ...],
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error names the setting and how to mend it."""
    status, out, err = run_chat(monkeypatch, capsys, *words)
    assert (status, out) == (2, "") and all(word in err for word in expected), err


def test_only_a_chat_template_makes_a_chat(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model without a chat template is refused."""
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
    """With --raw the output is what generate writes after the text's own tokens, with and without a
    chat template, for --once and for every line of stdin, which keeps its spaces and knows nothing
    of the lines before it."""
    folder = tmp_path / "model"
    shutil.copytree(shallow_folder, folder)
    if not has_template:
        (folder / "chat_template.jinja").unlink()
    texts = ["  one two three one two", "The bee said "]
    with reference_model(shallow) as model:
        prompts = [list(shallow.tokenizer(text)["input_ids"]) for text in texts]
        expected = [
            decode_text(shallow, generate(model, prompt, 24, shallow.stop_ids))
            for prompt in prompts
        ]
    words = ["target=hf", f"target.model={folder}", "drafter=ngram", "--raw"]
    assert run_chat(monkeypatch, capsys, *words, "--once", texts[0])[:2] == (0, f"{expected[0]}\n")
    lines = f"{texts[0]}\n \n{texts[1]}\n /again\n/exit\n"
    assert run_chat(monkeypatch, capsys, *words, stdin=lines)[:2] == (
        0,
        f"{expected[0]}\n{expected[1]}\n{expected[1]}\n",
    )
    if not has_template:
        status, out, err = run_chat(monkeypatch, capsys, *words[:-1], "--once", texts[0])
        assert (status, out) == (2, "") and "continue plain text with --raw" in err


def test_plain_text_has_no_system_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the key and the flag."""
    status, out, err = run_chat(
        monkeypatch, capsys, "drafter=ngram", "--raw", "chat.system=Be short."
    )
    assert (
        (status, out) == (2, "")
        and "chat.system: plain text has no system message" in err
        and "--raw" in err
    )


@pytest.mark.slow
def test_keys_of_a_terminal() -> None:
    """In a real terminal Ctrl-C stops an answer, and at the prompt says how to leave; Ctrl-D
    leaves with status 0.
    """
    words = ["chat", "drafter=ngram", "target=tiny", "chat.max_new_tokens=900"]
    child, terminal = pty.fork()
    if child == 0:
        # which a job in the background was started without
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.update(TERM="xterm", COLUMNS="80")
        os.execv(sys.executable, [sys.executable, "-m", "spectrain", *words])
    shown = b""

    def wait_for(mark: bytes, key: bytes = b"") -> None:
        """Press the key, and again after a second without a word: one that comes just before
        readline waits is lost.
        """
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
        # the other side of the terminal is closed
        with pytest.raises(OSError, match="Input/output"):
            wait_for(b"the end", key=b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)

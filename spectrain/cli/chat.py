"""`spectrain chat`: a conversation with the target through a drafter, with the tokens that each
round accepts in colour.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from spectrain.config.spec import RunSpec
from spectrain.data.chat import tokenize_prompt, tokenize_question
from spectrain.data.messages import Conversation, check_text
from spectrain.data.readers import EmbeddedReader
from spectrain.decoding.acceptance.typical import lossy_warning
from spectrain.decoding.generation import Generation
from spectrain.decoding.session import EngineChoice, Session, check_compatibility, require_capture
from spectrain.drafters.base import Drafter
from spectrain.drafters.hybrid import DrafterWithCopies
from spectrain.drafters.layers.copies import CopySource
from spectrain.errors import Terminated, UserError, suggest_nearest
from spectrain.eval.baselines import supports_auto_tree
from spectrain.eval.systems import describe_tree
from spectrain.models.target import Target
from spectrain.output.console import make_console
from spectrain.output.verbosity import is_quiet, print_json
from spectrain.runs.drafters import load_drafter
from spectrain.runs.score import load_target, open_answer_store
from spectrain.trees import Auto

from .chat_output import DecodingSpeed, PlainOutput, TerminalOutput, TextPiece, TextStream
from .results import Answer

# Maximum number of nodes of a tree whose size is measured: no larger one pays without a GPU, and
# timing each takes a while.
MAX_TREE_NODES = 16
# Name of the target for tests, whose answers make no sense.
TINY = "tiny"
# Minimum number of tokens that the context must leave for an answer.
MIN_ANSWER_TOKENS = 16
SLASH_COMMANDS = {
    "/help": "this list",
    "/drafter": "switch drafting off, and on again (/drafter on, /drafter off)",
    "/again": "the last answer anew: after /drafter, the same words at another speed",
    "/stats": "tokens per second and per forward so far, with the drafter and without",
    "/reset": "forget the conversation",
    "/exit": "leave; so does Ctrl-D, while Ctrl-C stops an answer",
}


@dataclass
class Chat:
    """A conversation in the terminal."""

    # Maximum length of an answer, in tokens.
    max_new_tokens: int = 512
    # System message that precedes the conversation; null sends none.
    system: str | None = None
    # Decoding engine: captured replays rounds as CUDA graphs, eager runs a loop, auto captures on a
    # GPU.
    engine: EngineChoice = "auto"
    # Message to answer before the program exits; null starts a conversation.
    once: str | None = None
    # Use the tree and the retrieved continuations that are fastest on this machine, unless a tree
    # is given.
    measured: bool = True
    # Continue each text as it is, without the chat template and without the earlier texts. A target
    # without a chat template needs this.
    raw: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise UserError(f"chat.max_new_tokens={self.max_new_tokens}: use 2 or more")
        for where, text in (("--once", self.once), ("chat.system", self.system)):
            if text is not None:
                check_text(text, where)
        if self.once is not None and not self.once.strip():
            raise UserError("--once: the text is empty; say what to answer")
        if self.raw and self.system is not None:
            raise UserError(
                "chat.system: plain text has no system message; leave it out, or chat without --raw"
            )

    def run(self, spec: RunSpec, folder: Path) -> None:
        """Load what `spec` names, then answer line by line, or only the message of `once`."""
        target = load_target(spec, folder)
        target.require_layers("chat")
        target.template = target.template.with_clock()
        if not self.raw and not target.template.exists:
            raise UserError(
                "target: its tokenizer has no chat template; continue plain text with --raw, use "
                "an instruction-tuned model, or give a template with target.chat_template=FILE"
            )
        if not target.tokenizer.is_fast:
            raise UserError(
                "target: its tokenizer cannot be read token by token; save it as a fast tokenizer"
            )
        if self.max_new_tokens + MIN_ANSWER_TOKENS > target.max_length:
            raise UserError(
                f"chat.max_new_tokens={self.max_new_tokens}: the context of {target.name} has "
                f"{target.max_length}; use less"
            )
        session = self.prepare_session(spec, folder, target)
        console = make_console(highlight=False)
        screen = (
            TerminalOutput(console)
            if console.is_terminal and not console.is_dumb_terminal
            else PlainOutput()
        )
        talk = TerminalChat(self, session, screen)
        if not session.rule.lossless:
            screen.show_note(lossy_warning(session.rule.name))
        if target.name == TINY or target.name.startswith(f"{TINY},"):
            screen.show_note(
                f"target={TINY} has 2 million parameters and writes nonsense, with every drafter; "
                "spectrain chat drafter=smollm2-eagle3 answers in sentences"
            )
        if self.once is not None:
            answer = talk.answer_question(self.once)
            if answer is None:
                raise UserError(
                    f"--once: the text leaves no room for an answer in the {target.max_length} "
                    "tokens of the context"
                )
        else:
            talk.answer_lines()
        print_json({"target": target.name, "answers": talk.answers})

    def prepare_session(self, spec: RunSpec, folder: Path, target: Target) -> Session:
        """Return a session with the target, drafter, tree and rule that `spec` names, ready to
        decode.
        """

        def prompts() -> list[list[int]]:
            return [
                tokenize_question(target.template, conversation)
                for conversation in EmbeddedReader(limit=8).load_conversations()
            ]

        rule = spec.acceptance.build()
        builder = spec.tree.build()
        drafter = load_drafter(spec, folder, target)
        if (
            self.measured
            and rule.lossless
            and not Session(target, rule, engine=self.engine).prefers_capture
        ):
            check_compatibility(drafter.capabilities, builder, rule)
            if supports_auto_tree(target, drafter, builder) and not drafter.capabilities.has_no_q:
                drafter = DrafterWithCopies(
                    drafter, CopySource(open_answer_store(spec, folder, target, None))
                )
                builder = Auto(budget=MAX_TREE_NODES)
                rule = rule.matching_rule()
        return Session.from_drafter(target, drafter, builder, rule, prompts, self.engine)


def drafter_title(drafter: Drafter | None) -> str:
    """Return a short name of a drafter."""
    if isinstance(drafter, DrafterWithCopies):
        return f"{type(drafter.inner).__name__} + retrieval"
    return type(drafter).__name__


@dataclass
class TerminalChat:
    """One conversation: its messages and its speed."""

    settings: Chat
    session: Session
    output: PlainOutput
    is_drafting: bool = True
    # The turn seeds the random draws of an answer.
    turn: int = 0
    # The answers so far, as plain values.
    answers: list[dict[str, Any]] = field(default_factory=list)
    speeds: dict[bool, DecodingSpeed] = field(
        default_factory=lambda: {True: DecodingSpeed(), False: DecodingSpeed()}
    )  # drafting or not

    def __post_init__(self) -> None:
        self.system_messages = (
            []
            if self.settings.system is None
            else [{"role": "system", "content": self.settings.system}]
        )
        self.messages: list[dict[str, str]] = []
        self.target = self.session.target
        self.target_session = Session(
            self.target, self.session.rule.matching_rule(), engine=self.settings.engine
        )
        require_capture(self.session, "chat.engine")

    def answer_lines(self) -> None:
        """Answer line by line until the end of the input or /exit."""
        asks = sys.stdin.isatty()
        if asks:
            # not everywhere; it gives input() its line editing and its history
            with suppress(ImportError):
                import readline  # noqa: F401
            self.output.show_note(self.greeting_text)
        while True:
            try:
                if asks:
                    print()
                line = input("> " if asks else "")
            except EOFError:
                return
            except UnicodeDecodeError as error:
                raise UserError(
                    f"standard input: it is no text ({error.reason}); write it in UTF-8"
                ) from error
            except Terminated:
                raise
            except KeyboardInterrupt:
                if not asks:
                    raise
                self.output.show_note("\n/exit or Ctrl-D leaves")
                continue
            line = line if self.settings.raw and not line.lstrip().startswith("/") else line.strip()
            if re.fullmatch(r"/[a-z]+( \w+)?", line):
                if line == "/exit":
                    return
                self.run_command(line)
            elif line.strip():
                check_text(line, "standard input")
                self.answer_question(line)

    @property
    def greeting_text(self) -> str:
        session, builder = self.session, self.session.builder
        assert builder is not None, "it was prepared with one"
        slow = (
            "; the first answers take a while, as rounds are compiled"
            if session.eager_reason is None
            else ""
        )
        return (
            f"{self.target.name} through {drafter_title(session.drafter)}, "
            f"{describe_tree(builder)}, acceptance {session.rule.name}{slow}.\nTokens in one "
            "colour were drafted and accepted together; dim and underlined ones are the target's "
            "own. /help lists what else there is."
        )

    def answer_question(self, text: str) -> Generation | None:
        """Answer and keep both messages; return None if the context has no room for an answer."""
        if self.settings.raw:
            self.messages = []
        self.messages.append({"role": "user", "content": text})
        prompt = self.fit_prompt()
        limit = min(self.settings.max_new_tokens, self.target.max_length - len(prompt))
        if limit < min(MIN_ANSWER_TOKENS, self.settings.max_new_tokens):
            self.messages.pop()
            self.output.show_note(
                f"{len(prompt)} tokens leave no room for an answer in {self.target.max_length}; "
                "say it in fewer words"
            )
            return None
        self.turn += 1
        return self.decode_answer(prompt, limit, text)

    def fit_prompt(self) -> list[int]:
        """Return the conversation's tokens. If they exceed the target's context, the oldest
        turns are dropped, with a note.
        """
        if self.settings.raw:
            return tokenize_prompt(
                self.target.template, Conversation([], text=self.messages[-1]["content"])
            )
        forgotten = 0
        while True:
            prompt = tokenize_prompt(self.target.template, [*self.system_messages, *self.messages])
            if (
                len(self.messages) < 3
                or len(prompt) + self.settings.max_new_tokens <= self.target.max_length
            ):
                break
            self.messages = self.messages[2:]
            forgotten = forgotten + 1
        if forgotten:
            turns = f"{forgotten} oldest turns were" if forgotten > 1 else "oldest turn was"
            self.output.show_note(
                f"(the {turns} left out: the conversation has outgrown {self.target.max_length} "
                "tokens)"
            )
        return prompt

    def decode_answer(self, prompt: list[int], limit: int, text: str) -> Generation:
        """Decode an answer to a text and show it as it arrives; after an interrupt, the part that
        exists counts as the answer.
        """
        session = self.session if self.is_drafting else self.target_session
        stream = TextStream(self.target)
        latest = Generation(prompt)
        stopped = False

        def watch(generations: list[Generation]) -> None:
            nonlocal latest
            latest = generations[0]
            self.output.show_pieces(stream.read_pieces(latest), self.status_line(latest))

        with self.output.open_answer():
            try:
                (latest,) = session.decode([prompt], limit, [self.turn], on_round=watch)
            except Terminated:
                raise
            except KeyboardInterrupt:
                stopped = True
            self.output.show_pieces(
                [TextPiece(stream.remaining_text(), 0, False)], self.status_line(latest)
            )
        tokens = [token for token in latest.output if token not in self.target.stop_ids]
        if tokens:
            self.messages.append(
                {"role": "assistant", "content": str(self.target.tokenizer.decode(tokens))}
            )
        else:
            self.messages.pop()
        ending = (
            "stopped; "
            if stopped
            else ""
            if latest.output[-1:] != tokens[-1:]
            else f"cut at {limit} tokens; "
        )
        if not is_quiet():
            self.output.show_note(ending + self.status_line(latest))
        self.speeds[self.is_drafting].add_generation(latest)
        answer = Answer.from_generation(latest, self.target)
        self.answers.append({"question": text, **answer.to_dict(), "stopped": stopped})
        return latest

    def status_line(self, generation: Generation) -> str:
        how = "" if self.is_drafting else ", drafter off"
        return f"{len(generation.output)} tokens, {DecodingSpeed().add_generation(generation)}{how}"

    def run_command(self, line: str) -> None:
        """Run a command, a line that begins with a slash."""
        name, _, word = line.partition(" ")
        if name not in SLASH_COMMANDS:
            self.output.show_note(
                f"{name}: there is no such command; {suggest_nearest(name, SLASH_COMMANDS)}"
            )
        elif word and (name != "/drafter" or word not in ("on", "off")):
            self.output.show_note(
                f"{line}: say {name}"
                + (", /drafter on or /drafter off" if name == "/drafter" else "")
            )
        elif name == "/drafter":
            self.is_drafting = word == "on" if word else not self.is_drafting
            self.output.show_note(
                "drafting" if self.is_drafting else "the target alone, a forward for every token"
            )
        elif name == "/again":
            self.repeat_answer()
        elif name == "/reset":
            self.messages = []
            self.output.show_note("forgotten")
        elif name == "/stats":
            self.output.console.print(self.speed_table())
        else:
            for command, meaning in SLASH_COMMANDS.items():
                self.output.show_note(f"{command:10}{meaning}")

    def repeat_answer(self) -> None:
        """Answer the last question again, with the same random draws."""
        if not self.messages:
            return self.output.show_note("/again: nothing was asked yet")
        self.messages.pop()
        question = self.messages.pop()["content"]
        self.turn -= 1
        self.answer_question(question)

    def speed_table(self) -> Table:
        table = Table(box=None, header_style="dim")
        for title in ("", "answers", "tokens", "tokens/s", "tokens/forward"):
            table.add_column(title, justify="right" if title else "left")
        rows: dict[str, Any] = {"drafter": self.speeds[True], "target alone": self.speeds[False]}
        for name, speed in rows.items():
            table.add_row(
                name,
                f"{speed.answers}",
                f"{speed.tokens}",
                f"{speed.tokens_per_second:.1f}",
                f"{speed.tokens_per_forward:.2f}",
            )
        if all(speed.tokens_per_second for speed in rows.values()):
            table.add_row(
                "ratio",
                "",
                "",
                f"{self.speeds[True].tokens_per_second / self.speeds[False].tokens_per_second:.2f}",
                "",
            )
        return table

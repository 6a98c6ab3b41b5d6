"""Regeneration by a server: a stand-in on this machine that refuses, stalls and talks nonsense
as real ones do.
"""

import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.serve.tests.servers.stand_in import Reply, StandIn, hasten_retries
from spectrain.data.messages import Conversation
from spectrain.data.readers import JsonlReader
from spectrain.data.shards import Row, ShardSet
from spectrain.errors import RunError, RunInterrupted, UserError
from spectrain.regeneration.regenerate import Regeneration
from spectrain.regeneration.sampling import Sampling
from spectrain_serve.servers.base import RequestTimes
from spectrain_serve.servers.openai import OpenAIServer, conversation_body
from spectrain_serve.servers.settings import ClientSettings
from spectrain_serve.training.server_writer import ServerWriter, to_answer
from tests.regeneration.test_tools import ASK, CALL, TOOLS

LIMIT = 12


def completion(text: str, reason: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "choices": [{"message": message, "finish_reason": reason}],
        "usage": {"completion_tokens": len(text.split())},
    }


class EchoStandIn(StandIn):
    """Answers "you said X" to X; `answer_question` may reply otherwise, given the last question
    and its attempt.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attempts: Counter[str] = Counter()
        self.answer_question: Callable[[str, int], Reply | None] = lambda question, attempt: None

    def reply_to_post(self, path: str, body: dict[str, Any]) -> Reply:
        question = body["messages"][-1]["content"]
        self.attempts[question] += 1
        reply = self.answer_question(question, self.attempts[question])
        return reply or (200, completion(f"you said {question}"), {})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EchoStandIn]:
    hasten_retries(monkeypatch)
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-this-server")
    standing = EchoStandIn()
    yield standing
    standing.stop()


@pytest.fixture
def chats(tmp_path: Path) -> JsonlReader:
    """Write conversations of one or two questions."""
    read_rows = [
        [f"question {number}"] + [f"and {number}"] * (number % 2) for number in range(LIMIT)
    ]
    messages = [
        [
            turn
            for text in row
            for turn in ({"role": "user", "content": text}, {"role": "assistant", "content": "?"})
        ]
        for row in read_rows
    ]
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in messages)
    )
    return JsonlReader(str(tmp_path / "chats.jsonl"))


def regenerate(
    out: Path,
    server: EchoStandIn,
    chats: JsonlReader,
    sampling: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[int, Row]:
    """Regenerate by the server; return the rows by number."""
    regeneration = {
        key: settings.pop(key)
        for key in ("stop_after", "max_failed", "retry_failed")
        if key in settings
    }
    options = Sampling(**(sampling or {}))
    config = ClientSettings(
        **{"url": server.url, "model": "little", "retries": 3, "concurrency": 4, **settings}
    )
    writer = ServerWriter(options, OpenAIServer(config))
    Regeneration(shard_size=5, **regeneration).run(out, chats, options, writer)
    return read_rows(out)


def read_rows(out: Path) -> dict[int, Row]:
    shards = ShardSet(out)
    return {row.id: row for name in shards.shard_names for row in shards.read_shard(name)}


def echo_answers(chats: JsonlReader) -> list[list[dict[str, str]]]:
    return [
        [
            turn
            if turn["role"] == "user"
            else {"role": "assistant", "content": f"you said {chat.messages[at - 1]['content']}"}
            for at, turn in enumerate(chat.messages)
        ]
        for chat in chats.load_conversations()
    ]


def read_failures(out: Path) -> dict[int, tuple[str, str]]:
    rows = [
        json.loads(line)
        for path in (out / "failed").iterdir()
        for line in path.read_text().splitlines()
    ]
    return {row["id"]: (row["kind"], row["error"]) for row in rows}


def test_every_turn_is_requested_with_the_answers_before_it(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """Rows keep the source's order; requests hold the messages, the sampling settings and a seed
    of their own.
    """
    rows = regenerate(
        tmp_path / "out", server, chats, {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7}
    )
    assert [rows[number].messages for number in range(LIMIT)] == echo_answers(chats)
    assert all(
        row.finish_reason == ["stop"] * len(row.num_tokens) and set(row.num_tokens) <= {4}
        for row in rows.values()
    )
    assert sorted((body["messages"] for body in server.bodies), key=str) == sorted(
        (messages[:at] for messages in echo_answers(chats) for at in range(1, len(messages), 2)),
        key=str,
    )
    for body in server.bodies:
        assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == (
            "little",
            0.5,
            0.9,
            7,
        )
        assert "top_k" not in body
    seeds = {body["seed"] for body in server.bodies}
    assert len(seeds) == len(server.bodies) == LIMIT + LIMIT // 2
    server.bodies.clear()
    regenerate(
        tmp_path / "again",
        server,
        chats,
        {"temperature": 0.5, "top_k": 3},
        extra={"min_p": 0.1},
        concurrency=1,
    )
    assert {body["seed"] for body in server.bodies} == seeds
    assert all((body["top_k"], body["min_p"]) == (3, 0.1) for body in server.bodies)


GARBAGE: dict[str, Reply] = {
    "429": (429, "slow down", {"Retry-After": "0"}),
    "500": (500, "oops", {}),
    "503 until a date": (503, "soon", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
    "no JSON": (200, "<html>gateway</html>", {}),
    "no choices": (200, {"choices": []}, {}),
    "not an object": (200, [1], {}),
    "broken off": (200, '{"choices"', {"Content-Length": "400", "Connection": "close"}),
}


@pytest.mark.sweep(3, free=("kind",))
@pytest.mark.parametrize("kind", list(GARBAGE))
def test_passing_failures_are_tried_again(
    kind: str, tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """Each question fails twice, then is answered: nothing is lost, and nothing is asked more
    often than needed.
    """
    server.answer_question = lambda question, attempt: GARBAGE[kind] if attempt <= 2 else None
    rows = regenerate(tmp_path / "out", server, chats)
    assert [rows[number].messages for number in range(LIMIT)] == echo_answers(chats)
    assert set(server.attempts.values()) == {3} and not read_failures(tmp_path / "out")


def test_a_stalled_request_is_given_up(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """A server that does not answer in time is asked again. Others may be late too on a busy
    machine, and are asked again.
    """
    repeated = threading.Event()

    def stall(question: str, attempt: int) -> None:
        if question == "question 3":
            repeated.wait(60) if attempt == 1 else repeated.set()

    server.answer_question = stall
    rows = regenerate(tmp_path / "out", server, chats, timeout=1, retries=20)
    assert [rows[number].messages for number in range(LIMIT)] == echo_answers(
        chats
    ) and repeated.is_set()


def test_a_bad_conversation_takes_nothing_with_it(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """Refused, too long, without text, always failing: each is recorded with its error and its
    attempts.
    """
    replies: dict[str, Reply] = {
        "question 2": (400, "bad role", {}),
        "and 5": (400, "This model's maximum context length is 8 tokens", {}),
        "question 6": (
            200,
            {"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]},
            {},
        ),
        "question 9": (500, "always", {}),
    }
    server.answer_question = lambda question, attempt: replies.get(question)
    rows = regenerate(tmp_path / "out", server, chats, max_failed=0.5)
    assert [rows[number].messages for number in sorted(rows)] == [
        messages
        for number, messages in enumerate(echo_answers(chats))
        if number not in (2, 5, 6, 9)
    ]
    failures = read_failures(tmp_path / "out")
    assert {number: kind for number, (kind, _) in failures.items()} == {
        2: "failed",
        5: "too_long",
        6: "failed",
        9: "failed",
    }
    assert (
        "status 400: bad role" in failures[2][1]
        and "tool_calls" in failures[6][1]
        and "4 attempts" in failures[9][1]
    )
    assert [server.attempts[question] for question in replies] == [1, 1, 1, 4]
    server.answer_question = lambda question, attempt: None
    server.attempts.clear()
    rows = regenerate(tmp_path / "out", server, chats, retry_failed=True)
    assert [rows[number].messages for number in range(LIMIT)] == echo_answers(
        chats
    ) and not read_failures(tmp_path / "out")
    assert set(server.attempts) == {
        "question 2",
        "question 5",
        "and 5",
        "question 6",
        "question 9",
        "and 9",
    }


def test_too_many_failures_end_as_a_failed_run(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """Above max_failed the run fails in the end, with every other row in place."""
    server.answer_question = lambda question, attempt: (
        (400, "no", {}) if question.endswith(("1", "2", "3")) else None
    )
    with pytest.raises(RunError, match=r"4 of 12 conversations failed.*retry_failed=true"):
        regenerate(tmp_path / "out", server, chats)
    assert (
        len(read_rows(tmp_path / "out")) == LIMIT - 4
        and not ShardSet(tmp_path / "out").find_faults()
    )


def test_a_server_that_dies_is_not_held_against_the_rows(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """Failures one after another stop the run; the same command asks for what is missing and for
    nothing else.
    """
    server.answer_question = lambda question, attempt: (
        (503, "gone", {}) if len(server.attempts) > 7 else None
    )
    with pytest.raises(
        RunError, match=r"3 conversations failed one after another.*gone.*same command"
    ):
        regenerate(tmp_path / "out", server, chats, stop_after=3, retries=0, concurrency=1)
    assert not read_failures(tmp_path / "out")
    answered = {
        question for question in list(server.attempts)[:7] if question.startswith("question")
    }
    server.answer_question = lambda question, attempt: None
    server.attempts.clear()
    rows = regenerate(tmp_path / "out", server, chats, stop_after=3, retries=0, concurrency=1)
    assert [rows[number].messages for number in range(LIMIT)] == echo_answers(chats)
    # the last may have been in its second turn
    assert len(answered - set(server.attempts)) >= len(answered) - 1


def test_stopped_in_flight(tmp_path: Path, server: EchoStandIn, chats: JsonlReader) -> None:
    """SIGTERM drops what is in flight at once and keeps what is finished."""
    stopped = threading.Event()

    def stop(question: str, attempt: int) -> None:
        if question == "question 8":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            stopped.wait(60)

    server.answer_question = stop
    with pytest.raises(RunInterrupted, match="stopped; what is finished is kept") as ended:
        regenerate(tmp_path / "out", server, chats, concurrency=1)
    stopped.set()
    assert ended.value.status == 128 + signal.SIGTERM
    server.answer_question = lambda question, attempt: None
    server.attempts.clear()
    rows = regenerate(tmp_path / "out", server, chats)
    assert [rows[number].messages for number in range(LIMIT)] == echo_answers(chats)
    assert "question 7" not in server.attempts and "question 8" in server.attempts


WRONG: dict[str, tuple[dict[str, Any], Reply | None, str]] = {
    "model": (
        {"model": "litle"},
        None,
        r"server\.model=litle: the server has no such model; the nearest is little",
    ),
    "address without an interface": ({"url": "/v2"}, None, r"server\.url=.*status 404.*/v1"),
    "nobody there": (
        {"url": "http://127.0.0.1:9/v1"},
        None,
        r"server\.url=.*no server answers there",
    ),
    "key": (
        {},
        (401, "who are you?", {}),
        r"server\.api_key_variable: .*refuses the key.*who are you",
    ),
    "not a list of models": ({}, (200, "<html>", {}), r"server\.url=.*no list of models"),
}


@pytest.mark.parametrize("kind", list(WRONG))
def test_a_wrong_server_stops_at_once(
    kind: str, tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """One sentence, before the folder exists and before any conversation is asked."""
    settings, models, message = WRONG[kind]
    server.models = models or server.models
    if settings.get("url") == "/v2":
        settings = {"url": server.url.replace("/v1", "/v2")}
    with pytest.raises(UserError, match=message) as caught:
        regenerate(tmp_path / "out", server, chats, **settings)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists() and not server.bodies


def test_a_key_that_expires_stops_at_once(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """A refusal of the key is nobody's row: the run stops, keeps what it has and holds nothing
    against the others.
    """
    server.answer_question = lambda question, attempt: (
        (401, "expired", {}) if len(server.attempts) > 5 else None
    )
    with pytest.raises(UserError, match="expired"):
        regenerate(tmp_path / "out", server, chats, concurrency=1)
    assert sum(server.attempts.values()) == 6 and not read_failures(tmp_path / "out")


def test_the_key_comes_from_the_environment(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is sent and written nowhere; a variable that is not set is named."""
    monkeypatch.setenv("LITTLE_KEY", "s3cret")
    regenerate(tmp_path / "out", server, chats, api_key_variable="LITTLE_KEY")
    assert set(server.keys) == {"Bearer s3cret"}
    server.keys.clear()
    regenerate(tmp_path / "without", server, chats)
    assert set(server.keys) == {None}  # OPENAI_API_KEY is for OpenAI alone
    assert all(
        "s3cret" not in path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()
    )
    with pytest.raises(UserError, match=r"server\.api_key_variable=NO_KEY: .*not set"):
        regenerate(tmp_path / "other", server, chats, api_key_variable="NO_KEY")


def test_the_server_says_how_long_to_wait(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader, monkeypatch: Any
) -> None:
    """Retry-After is waited for, however long it is up to two minutes; where it asks for more,
    the attempts end.
    """
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("anyio.sleep", sleep)
    waits = {"question 2": "90", "question 4": "600"}

    def refuse(question: str, attempt: int) -> Reply | None:
        return (
            (429, "busy", {"Retry-After": waits[question]})
            if question in waits and attempt == 1
            else None
        )

    server.answer_question = refuse
    rows = regenerate(tmp_path / "out", server, chats, max_failed=0.5)
    assert pauses == [90.0] and 2 in rows and 4 not in rows
    failure = (
        "failed",
        f"{tmp_path / 'chats.jsonl'}, line 5: 1 attempts, the last: status 429: busy",
    )
    assert read_failures(tmp_path / "out")[4] == failure


def test_attempts_are_counted_over_errors_and_nonsense(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """A server that errs, then talks nonsense, then errs again is asked `retries` times more and
    not once above.
    """
    server.answer_question = lambda question, attempt: (
        GARBAGE["no choices" if attempt % 2 else "500"] if question == "question 2" else None
    )
    regenerate(tmp_path / "out", server, chats, retries=4, max_failed=0.5)
    assert (
        server.attempts["question 2"] == 5
        and "line 3: 5 attempts, the last: " in read_failures(tmp_path / "out")[2][1]
    )


def test_what_the_server_alone_knows_is_recorded(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """The model and further fields of the requests are settings of the set; its address is not,
    for a server may move.
    """
    regenerate(tmp_path / "out", server, chats, extra={"min_p": 0.1})
    settings = ShardSet(tmp_path / "out").manifest["settings"]
    assert (settings["writer"], settings["server.model"], settings["server.extra"]) == (
        "server",
        "little",
        {"min_p": 0.1},
    )
    with pytest.raises(UserError, match=r"server\.extra=\{\}: the set in .* was begun with"):
        regenerate(tmp_path / "out", server, chats)


def test_an_empty_answer_is_a_failure(
    tmp_path: Path, server: EchoStandIn, chats: JsonlReader
) -> None:
    """The set stays readable as conversations."""
    server.answer_question = lambda question, attempt: (
        (200, completion(" "), {}) if question == "question 2" else None
    )
    rows = regenerate(tmp_path / "out", server, chats)
    assert 2 not in rows and "gave no text" in read_failures(tmp_path / "out")[2][1]
    assert len(JsonlReader(str(tmp_path / "out")).load_conversations()) == LIMIT - 1


def test_a_retry_counts_every_conversation_once(
    tmp_path: Path,
    server: EchoStandIn,
    chats: JsonlReader,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The progress of a retry never exceeds the number of conversations."""
    server.answer_question = lambda question, attempt: (
        (400, "no", {}) if question == "question 2" else None
    )
    regenerate(tmp_path / "out", server, chats)
    server.answer_question = lambda question, attempt: None
    monkeypatch.setattr("spectrain.training.metrics.LOG_SECONDS", -1)
    capsys.readouterr()
    regenerate(tmp_path / "out", server, chats, retry_failed=True)
    assert re.findall(rf"conversation (\d+) of {LIMIT}", capsys.readouterr().out) == [str(LIMIT)]


def test_a_servers_answer_has_reasoning_calls_and_ids() -> None:
    """Everything that the server parsed comes back together with the ids; requests hold
    arguments as JSON text.
    """
    call = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Quito"}'}}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I look it up.",
        "tool_calls": [call],
    }
    choice = {"message": message, "finish_reason": "tool_calls", "token_ids": [7, 8, 9]}
    response = {"choices": [choice], "usage": {"completion_tokens": 3}}
    answer = to_answer(
        OpenAIServer(ClientSettings()).parse_response(response, True, RequestTimes(1.0))
    )
    assert answer.token_ids == [7, 8, 9] and answer.message["reasoning_content"] == "I look it up."
    assert answer.message["tool_calls"] == [CALL]
    body = conversation_body(Conversation([ASK, answer.message], TOOLS))
    assert json.loads(body["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "Quito"
    }
    assert body["tools"] == TOOLS


def test_manifests_hold_no_keys() -> None:
    extra = {"api_key": "Pa55word", "top_k": 3}
    server = OpenAIServer(
        ClientSettings(url="http://u:Pa55word@127.0.0.1:1/v1", model="m", extra=extra)
    )
    settings = ServerWriter(Sampling(), server).recorded_settings()
    assert settings["server.extra"] == {"api_key": "***", "top_k": 3}

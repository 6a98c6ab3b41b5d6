"""The interface of this project's engine: every refusal is one sentence, and no request blocks
the others.
"""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from spectrain.errors import UserError
from spectrain_serve.follow import own_engine
from spectrain_serve.follow.completion_body import parse_completion
from spectrain_serve.follow.own_engine import EngineOptions, OwnEngine

KEY = "a-key-of-the-tests-0123"
CONTROL = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


class NotedThread:
    """Notes in which threads prompts are tokenized and which drafters are loaded; it decodes
    nothing.
    """

    def __init__(self) -> None:
        self.tokenizing = set[threading.Thread]()
        self.folder, self.swaps, self.jobs = "first", list[str](), SimpleNamespace(put=self.answer)
        tokenizer = SimpleNamespace(
            get_vocab=lambda: {"abcd": 0}, decode=lambda tokens, **options: "x" * len(tokens)
        )
        self.target = SimpleNamespace(
            tokenizer=Tokenizer(self, tokenizer),
            max_length=100,
            head=SimpleNamespace(vocab_size=50),
            stop_ids=[1],
            template=None,
        )

    def answer(self, job: Any) -> None:
        job.generation = SimpleNamespace(
            prompt=job.prompt, output=[5] * job.max_new_tokens, round_lengths=[2], node_counts=[4]
        )
        job.hand_over(job.generation.output)
        job.hand_over(None)

    def swap(self, folder: str) -> None:
        if folder != "second":
            raise UserError(f"path={folder}: there is no drafter")
        self.swaps.append(folder)


class Tokenizer:
    """Takes a character for a token."""

    def __init__(self, thread: NotedThread, others: Any) -> None:
        self.thread, self.get_vocab, self.decode = thread, others.get_vocab, others.decode

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        self.thread.tokenizing.add(threading.current_thread())
        return {"input_ids": [7] * len(text)}


def send(*requests: tuple[str, bytes, dict[str, str]]) -> tuple[list[httpx.Response], NotedThread]:
    """Send POST requests of a path, a body and headers to an engine; return its answers."""
    thread: Any = NotedThread()
    application: Any = OwnEngine(thread, "spectrain", KEY).make_application()

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(application), base_url="http://127.0.0.1"
        ) as client:
            return [
                await client.post(path, content=body, headers=headers)
                for path, body, headers in requests
            ]

    return asyncio.run(run()), thread


def complete(**fields: Any) -> tuple[httpx.Response, NotedThread]:
    (reply,), thread = send(
        ("/v1/completions", json.dumps({"prompt": "Hi", **fields}).encode(), {})
    )
    return reply, thread


def test_a_prompt_is_answered_and_tokenized_beside_the_event_loop() -> None:
    reply, thread = complete(max_tokens=3)
    assert reply.status_code == 200 and reply.json()["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
    }
    assert thread.tokenizing and threading.main_thread() not in thread.tokenizing


@pytest.mark.parametrize("stream", [False, True])
def test_as_many_tokens_as_requested_or_as_fit(stream: bool) -> None:
    reply, _ = complete(prompt=[3] * 90, stream=stream)
    assert (
        reply.text.count("5") == 10 if stream else reply.json()["usage"]["completion_tokens"] == 10
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [50]},
        {"prompt": [-1]},
        {"prompt": [10**30]},
        {"prompt": "a" * 101},
        {"max_tokens": 99},
        {"prompt": "a" * 1000},
        {"prompt": [1] * 100},
    ],
)
def test_prompts_that_do_not_fit(fields: dict[str, Any]) -> None:
    reply, thread = complete(**fields)
    assert reply.status_code == 400 and reply.json()["error"]["message"].count("\n") == 0
    # A text that cannot fit is not even tokenized.
    assert len(fields.get("prompt", "")) < 500 or not thread.tokenizing


@pytest.mark.parametrize("shows", [True, False])
def test_documents_that_the_template_does_not_show_are_refused(
    shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        own_engine,
        "tokenize_prompt",
        lambda template, conversation: [1] * (5 if conversation.documents and shows else 4),
    )
    body = {"messages": [{"role": "user", "content": "Hi"}], "documents": [{"text": "a"}]}
    (reply,), _ = send(("/v1/chat/completions", json.dumps(body).encode(), {}))
    assert reply.status_code == (200 if shows else 400) and ("documents: " in reply.text) != shows


@pytest.mark.parametrize("reads", [True, False])
def test_template_arguments_that_nothing_reads_are_refused(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = SimpleNamespace(reads=lambda name: reads)
    monkeypatch.setattr(own_engine, "tokenize_prompt", lambda *arguments: [1] * 4)
    engine: Any = SimpleNamespace(thread=SimpleNamespace(target=SimpleNamespace(template=template)))
    body = parse_completion(
        b'{"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"a": 1}}', True
    )
    if reads:
        assert OwnEngine.tokenize(engine, body) == [1] * 4
        return
    with pytest.raises(UserError, match=r"^chat_template_kwargs\.a: the chat template of this"):
        OwnEngine.tokenize(engine, body)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/completions", 200),
        ("/v1/completions/", 404),
        ("/v1/load_lora_adapter", 404),
        ("/docs", 404),
        ("/health", 405),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "[", "x/chat/completions?"])
def test_paths_are_read_whatever_host_and_query_hold(path: str, status: int, host: str) -> None:
    """The address of a request is made of its Host header and its query too, and bytes of a query
    may be no text."""
    thread: Any = NotedThread()
    application = OwnEngine(thread, "spectrain", KEY).make_application()
    body = b'{"prompt": "Hi"}'
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def note(message: Any) -> None:
        sent.append(message)

    scope: Any = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"\xff",
        "headers": [(b"host", host.encode())],
    }
    asyncio.run(application(scope, receive, note))  # type: ignore[arg-type]
    assert sent[0]["status"] == status
    answer = json.loads(b"".join(message.get("body", b"") for message in sent))
    assert ("error" in answer) == (status != 200)


def test_another_model_is_not_served() -> None:
    assert (
        complete(model="gpt-4")[0].status_code == 404
        and complete(model="spectrain")[0].status_code == 200
    )


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (200, b'{"path": "second"}', CONTROL),
        (400, b'{"path": "third"}', CONTROL),
        (400, b'{"path": "second", "force": true}', CONTROL),
        (400, b'{"path": ["second"]}', CONTROL),
        (400, b'{"path": "\\ud800"}', CONTROL),
        (400, b"[]", CONTROL),
        (400, b"[" * 100_000, CONTROL),
        (401, b'{"path": "second"}', {"Content-Type": "application/json"}),
        (401, b'{"path": "second"}', {**CONTROL, "Authorization": "Bearer another-key-0123"}),
        (403, b'{"path": "second"}', {**CONTROL, "Origin": "http://evil.example"}),
        (403, b'{"path": "second"}', {**CONTROL, "Origin": "null"}),
        (403, b'{"path": "second"}', {**CONTROL, "Host": "evil.example"}),
        (415, b'{"path": "second"}', {**CONTROL, "Content-Type": "text/plain"}),
        (415, b'{"path": "second"}', {"Authorization": CONTROL["Authorization"]}),
    ],
)
def test_who_may_swap(status: int, body: bytes, headers: dict[str, str]) -> None:
    (reply,), thread = send(("/swap_drafter", body, headers))
    assert reply.status_code == status and thread.swaps == (["second"] if status == 200 else [])


def test_the_key_is_not_taken_from_the_address_of_a_swap() -> None:
    (reply,), thread = send(
        (f"/swap_drafter?key={KEY}", b'{"path": "second"}', {"Content-Type": "application/json"})
    )
    assert reply.status_code == 401 and not thread.swaps


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["run"],
        ["run=a", "port=x"],
        ["run=a", "port=0"],
        ["run=a", "port=70000"],
        ["run=a", "tokens=-1"],
        ["run=a", "other=1"],
        ["run=a", "--help"],
    ],
)
def test_a_wrong_word_of_the_command_is_named(words: list[str]) -> None:
    with pytest.raises(UserError, match=f"^{words[-1].split('=')[0] if words else 'run'}"):
        EngineOptions.parse(words)


def test_the_words_of_the_command() -> None:
    assert EngineOptions.parse(["run=a", "port=8001"]) == EngineOptions("a", port=8001)


def test_errors_show_the_control_characters_of_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"drafter": {"choice": "\\u001b]0;x\\u0007"}}')
    with pytest.raises(SystemExit) as stopped:
        own_engine.main([f"run={tmp_path}"])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and "\x1b" not in printed and "\\x1b]0;x\\x07" in printed

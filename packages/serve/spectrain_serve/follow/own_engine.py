"""This project's engine behind OpenAI's interface: `python -m spectrain_serve.follow.own_engine
run=DIR port=8001`.

A thread decodes one request at a time; requests wait in a queue. Answers hold token ids and the
rounds of each answer, and POST /swap_drafter loads other weights of the drafter between two
requests, after a check of all of them. That endpoint and /drafter need the control key. What a
request may hold is in `completion_body.py`, and all limits are in `limits.py`.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from spectrain.config.build import register_resolvers
from spectrain.data.chat import tokenize_prompt
from spectrain.data.messages import Conversation
from spectrain.data.template_arguments import check_template_arguments
from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import EagerRunner, decode_steps, make_request
from spectrain.drafters.base import Drafter
from spectrain.errors import RunError, UserError
from spectrain.models.target import Target
from spectrain.output.streams import clean_output
from spectrain.runs.drafters import load_description, load_for_decoding
from spectrain.runs.folder import require_drafter_directory
from spectrain.trees import Chain

from ..engines.control_key import read_control_key
from .bodies import Application, BoundedApplication, format_error
from .completion_body import ChatBody, TextBody, parse_completion
from .control import check_control_request
from .http_server import allow_open_files, make_http_server
from .limits import DEFAULT_TOKENS, MAX_ENGINE_REQUESTS
from .requests import Refusal, parse_body
from .settings import ListenSettings

BIG_BODY = 2**16
"""A larger body is parsed and tokenized one after the other, so that memory stays bounded."""


@dataclass
class EngineJob:
    """A request that is decoded. Each step puts its new tokens into `steps`, and the end puts
    None.
    """

    prompt: list[int]
    max_new_tokens: int
    rule: AcceptanceRule
    loop: asyncio.AbstractEventLoop
    steps: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    is_cancelled: bool = False
    generation: Generation | None = None

    def hand_over(self, item: Any) -> None:
        """Hand an item to the event loop."""
        self.loop.call_soon_threadsafe(self.steps.put_nowait, item)


class DecodingThread:
    """A target with a drafter, and the thread that decodes with them."""

    def __init__(self, run: str, num_tokens: int) -> None:
        self.folder = str(require_drafter_directory("run", run))
        target = load_description(Path(self.folder), None).target
        self.target: Target = target.named_by(self.folder).build()
        self.target.template = self.target.template.with_clock()
        self.target.pack_weights()
        self.drafter = self.load(self.folder)
        self.builder = Chain(num_tokens)
        # The interface bounds how many requests there are.
        self.jobs: queue.Queue[EngineJob | Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def load(self, folder: str) -> Drafter:
        """Return the drafter of a folder, ready to decode; an error is raised for files that are
        damaged or do not fit.
        """
        return load_for_decoding(require_drafter_directory("path", folder), self.target)

    def swap(self, folder: str) -> None:
        """Use the drafter of another folder from the next request on."""
        drafter = self.load(folder)
        done = threading.Event()

        def exchange() -> None:
            self.drafter, self.folder = drafter, folder
            done.set()

        self.jobs.put(exchange)
        done.wait()

    def _run(self) -> None:
        while True:
            job = self.jobs.get()
            if not isinstance(job, EngineJob):
                job()
            elif not job.is_cancelled:
                try:
                    self._decode(job)
                except Exception as error:
                    job.hand_over(error)
                job.hand_over(None)

    def _decode(self, job: EngineJob) -> None:
        request = make_request(self.target, [job.prompt], job.max_new_tokens)
        num_sent = 0
        for generations in decode_steps(
            EagerRunner(self.target, job.rule, self.drafter, self.builder), request
        ):
            job.generation = generations[0]
            if len(job.generation.output) > num_sent:
                job.hand_over(job.generation.output[num_sent:])
                num_sent = len(job.generation.output)
            if job.is_cancelled:
                return


class OwnEngine:
    """The interface of the engine."""

    def __init__(self, thread: DecodingThread, name: str, key: str) -> None:
        self.thread, self.name, self.key = thread, name, key
        self._tokenizing = asyncio.Lock()
        self._swapping = asyncio.Lock()
        # No token has more characters, so that a longer prompt than this times the context cannot
        # fit.
        self.longest_token = max(map(len, thread.target.tokenizer.get_vocab()))

    def make_application(self) -> Application:
        """Return the ASGI application, with the proxy's limits for bodies."""
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/health", self.list_models),
            Route("/drafter", self.describe_drafter),
            Route("/swap_drafter", self.swap_drafter, methods=["POST"]),
        ]
        limits = ListenSettings()
        handlers: Any = {Refusal: answer_refusal, HTTPException: answer_unknown}
        application: Any = Starlette(routes=routes, exception_handlers=handlers)
        # A path with a slash more is another one; what it would lead to stands in the Host header.
        application.router.redirect_slashes = False
        return BoundedApplication(
            application, limits.max_body_bytes, limits.max_total_bytes, MAX_ENGINE_REQUESTS
        )

    async def list_models(self, request: Request) -> Response:
        """Name the served model."""
        model = {"id": self.name, "object": "model", "max_model_len": self.thread.target.max_length}
        return JSONResponse({"object": "list", "data": [model]})

    async def describe_drafter(self, request: Request) -> Response:
        """Name the folder of the active drafter."""
        check_control_request(request.scope, self.key)
        return JSONResponse({"path": self.thread.folder})

    async def swap_drafter(self, request: Request) -> Response:
        """Load other weights of the drafter."""
        check_control_request(request.scope, self.key)
        folder = parse_swap(await request.body())
        if self._swapping.locked():
            raise Refusal(503, "another drafter is being loaded; try again later")
        async with self._swapping:
            try:
                await asyncio.to_thread(self.thread.swap, folder)
            except (ValueError, KeyError, TypeError, RunError, OSError) as error:
                raise Refusal(400, f"the drafter was not swapped: {error}") from error
        return JSONResponse({"path": folder})

    async def complete(self, request: Request) -> Response:
        """Answer a prompt."""
        # The request's address also holds Host and query, which may be malformed.
        is_chat = request.scope["path"].endswith("chat/completions")
        content = await request.body()
        loop = asyncio.get_running_loop()
        async with self._tokenizing if len(content) > BIG_BODY else nullcontext():
            body, job = await asyncio.to_thread(self.make_job, content, is_chat, loop)
        self.thread.jobs.put(job)
        if body.stream:
            return StreamingResponse(self.stream(job, is_chat), media_type="text/event-stream")
        try:
            async for _ in read_steps(job):
                if await request.is_disconnected():
                    break
        except Exception as error:
            return error_response(500, f"{type(error).__name__}: {error}")
        finally:
            job.is_cancelled = True
        return JSONResponse(self.make_answer(job, is_chat))

    def make_job(
        self, content: bytes, is_chat: bool, loop: asyncio.AbstractEventLoop
    ) -> tuple[ChatBody | TextBody, EngineJob]:
        """Return the checked body of a request, and its job."""
        body = parse_completion(content, is_chat)
        target = self.thread.target
        if body.model is not None and body.model != self.name:
            raise Refusal(
                404, f'model: this engine serves {self.name} alone; send "model": "{self.name}"'
            )
        too_long = (
            f"the prompt and its answer exceed the context of {target.max_length} tokens; "
            "shorten them"
        )
        if body.num_characters > target.max_length * self.longest_token:
            raise Refusal(400, too_long)
        try:
            prompt = self.tokenize(body)
        except UserError as error:
            raise Refusal(400, str(error)) from error
        room = target.max_length - len(prompt)
        limit = body.find_limit(max(1, min(DEFAULT_TOKENS, room)))
        if limit > room:
            raise Refusal(400, too_long)
        return body, EngineJob(prompt, limit, body.make_rule(target.head.vocab_size), loop)

    def tokenize(self, body: ChatBody | TextBody) -> list[int]:
        """Return the token ids of a prompt."""
        if isinstance(body, ChatBody):
            messages = [message.to_message() for message in body.messages]
            arguments = check_template_arguments(body.chat_template_kwargs, "request")
            template = self.thread.target.template
            unread = next((name for name in arguments if not (name and template.reads(name))), None)
            if unread is not None:
                raise UserError(
                    f"chat_template_kwargs.{unread[:60]}: the chat template of this model does not "
                    "read it; leave it out"
                )
            prompt_ids = tokenize_prompt(
                template, Conversation(messages, None, body.documents, arguments)
            )
            if body.documents and prompt_ids == tokenize_prompt(
                template, Conversation(messages, None, None, arguments)
            ):
                raise UserError(
                    "documents: the chat template of this model does not show them; leave them out"
                )
            return prompt_ids
        prompt: Any = body.prompt
        if isinstance(prompt, str):
            prompt = self.thread.target.tokenizer(
                prompt, add_special_tokens=body.add_special_tokens
            )["input_ids"]
        vocabulary = self.thread.target.head.vocab_size
        if not prompt:
            raise UserError("prompt: it is empty; give a text or a list of token ids")
        if not all(0 <= token < vocabulary for token in prompt):
            raise UserError("prompt: a token id is not in the vocabulary")
        return list(prompt)

    def decode_text(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        text: str = self.thread.target.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def make_answer(self, job: EngineJob, is_chat: bool) -> dict[str, Any]:
        """Return the whole response."""
        generation = job.generation
        assert generation is not None
        text = self.decode_text(generation.output)
        answer = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {
            "index": 0,
            "finish_reason": self.finish_reason(generation),
            "token_ids": generation.output,
            **answer,
        }
        return {
            "object": "chat.completion" if is_chat else "text_completion",
            "model": self.name,
            "choices": [choice],
            **end_fields(generation),
        }

    def finish_reason(self, generation: Generation) -> str:
        """Return why an answer ended."""
        return "stop" if generation.output[-1] in self.thread.target.stop_ids else "length"

    async def stream(self, job: EngineJob, is_chat: bool) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer."""
        tokens = list[int]()
        sent = ""
        try:
            async for step in read_steps(job):
                tokens += step
                text = self.decode_text(tokens)
                # The bytes of an unfinished character come with the next step.
                added = "" if text.endswith("\ufffd") else text[len(sent) :]
                sent += added
                answer = {"delta": {"content": added}} if is_chat else {"text": added}
                yield format_event(
                    {"choices": [{"index": 0, "finish_reason": None, "token_ids": step, **answer}]}
                )
            assert job.generation is not None
            end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
            last = {"index": 0, "finish_reason": self.finish_reason(job.generation), **end}
            yield format_event(
                {"model": self.name, "choices": [last], **end_fields(job.generation)}
            )
        except Exception as error:
            yield format_event({"error": {"message": f"{type(error).__name__}: {error}"}})
        finally:
            job.is_cancelled = True
        yield b"data: [DONE]\n\n"


def parse_swap(content: bytes) -> str:
    """Return the folder that the body of a swap names."""
    body = parse_body(content)
    if body.keys() != {"path"} or not isinstance(body["path"], str):
        raise Refusal(
            400,
            'give the folder of the drafter and nothing else, as in {"path": "runs/NAME/drafter"}',
        )
    return body["path"]


async def read_steps(job: EngineJob) -> AsyncIterator[list[int]]:
    """Yield the new tokens of each step."""
    while (step := await job.steps.get()) is not None:
        if isinstance(step, Exception):
            raise step
        yield step


def end_fields(generation: Generation) -> dict[str, Any]:
    """Return what is known at the end of an answer: usage, prompt, and rounds."""
    accepted = [length - 1 for length in generation.round_lengths]
    drafted = [nodes - 1 for nodes in generation.node_counts]
    return {
        "usage": {
            "prompt_tokens": len(generation.prompt),
            "completion_tokens": len(generation.output),
        },
        "prompt_token_ids": generation.prompt,
        "metrics": {"rounds": {"accepted": accepted, "drafted": drafted}},
    }


def format_event(content: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return f"data: {json.dumps(content)}\n\n".encode()


async def answer_refusal(request: Request, refusal: Exception) -> Response:
    """Answer a request that is refused."""
    assert isinstance(refusal, Refusal)
    return error_response(refusal.status, str(refusal))


async def answer_unknown(request: Request, error: Exception) -> Response:
    """Answer a request with a path or a method that this engine does not have."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return error_response(405, "this path takes another method; docs/follow.md lists them")
    return error_response(
        error.status_code, "this engine has no such path; send requests to /v1/chat/completions"
    )


def error_response(status: int, message: str) -> Response:
    """Return an error in OpenAI's form."""
    return Response(
        format_error(status, message), status_code=status, media_type="application/json"
    )


@dataclass(frozen=True)
class EngineOptions:
    """The words of the command."""

    run: str
    host: str = "127.0.0.1"
    port: int = 8000
    # Tokens of a draft.
    tokens: int = 3
    name: str = "spectrain"

    @classmethod
    def parse(cls, words: list[str]) -> EngineOptions:
        """Return the options of a command line; a UserError names the word that is wrong."""
        given: dict[str, Any] = {
            key: value for key, _, value in (word.partition("=") for word in words)
        }
        known = [entry.name for entry in fields(cls)]
        if unknown := [key for key in given if key not in known]:
            raise UserError(
                f"{unknown[0]}: there is no such option; use "
                f"{', '.join(f'{name}=' for name in known)}"
            )
        if not given.get("run"):
            raise UserError("run: say whose drafter is served, as in run=runs/NAME")
        for key, largest in (("port", 65535), ("tokens", 64)):
            if key in given:
                if not (given[key].isdecimal() and 1 <= int(given[key][:9]) <= largest):
                    raise UserError(f"{key}={given[key]}: use 1 to {largest}")
                given[key] = int(given[key])
        return cls(**given)


def main(words: list[str]) -> None:
    """Serve until a signal ends the process; open requests are answered first."""
    # Errors name what is in files, which may hold control sequences of terminals.
    with clean_output():
        serve(words)


def serve(words: list[str]) -> None:
    """Serve the drafter that the words of the command name."""
    register_resolvers()
    try:
        options = EngineOptions.parse(words)
        thread = DecodingThread(options.run, options.tokens)
        key = read_control_key()
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    allow_open_files()
    make_http_server(
        OwnEngine(thread, options.name, key).make_application(), options.host, options.port
    ).run()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Serves OpenVINO GenAI over HTTP. It runs in OpenVINO's environment, which needs neither spectrain
nor another package.

A thread steps the pipeline, with all open requests together. One step of a request is one round:
its first tokens are the prefill's, those of every later step are the accepted drafts and one more.
The interface is OpenAI's, with token ids as prompts and in answers, and two additions:
`metrics.rounds` in an answer, and the totals at /counters.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

DRAFTING = ("num_assistant_tokens", "branching_factor", "tree_depth")
# Gigabytes of the cache of keys and values.
CACHE_SIZE = 2
# Limits: bytes of a body, seconds in which nothing of it comes, and requests that are open.
MAX_BODY_BYTES = 16 * 2**20
PAUSE_SECONDS = 60.0
MAX_OPEN = 1024
NUMBERS: dict[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, 2**31),
    "temperature": (float, 0, 100),
    "top_p": (float, 1e-6, 1),
    "top_k": (int, -1, 2**31),
    "seed": (int, 0, 2**63 - 1),
    **dict.fromkeys(DRAFTING, (int, 0, 4096)),
}
"""Settings of a request that are numbers: whether they are whole, the least and the largest."""
FLAGS = {"stream", "ignore_eos", "return_token_ids"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ("", []),
    "echo": (False,),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
}
"""Settings that this server does not have, with the values by which they change nothing."""
OTHER_KEYS = {
    "model",
    "prompt",
    "messages",
    "tools",
    "chat_template_kwargs",
    "stream_options",
    "user",
}
"""Keys that are read elsewhere, or that change no answer."""
REASONS = {"STOP": "stop", "LENGTH": "length"}


class RefusedRequest(Exception):
    """A request that is refused before its body is read, with the status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class OpenRequest:
    """A request that is decoded, and the steps that are ready."""

    ids: list[int]
    config: Any
    handle: Any = None
    # Tokens of each step; an exception or None at the end.
    steps: queue.Queue[Any] = field(default_factory=queue.Queue)
    # When each step ended, in seconds of a clock of this process.
    step_ends: list[float] = field(default_factory=list)
    reason: str = "length"


@dataclass
class Counters:
    """Rounds, drafted tokens, and accepted tokens by position since the start."""

    num_rounds: int = 0
    num_drafted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    def add(self, accepted: list[int], drafted: list[int]) -> None:
        self.num_rounds += len(accepted)
        self.num_drafted += sum(drafted)
        for count in accepted:
            self.accepted_by_position += [0] * (count - len(self.accepted_by_position))
            for position in range(count):
                self.accepted_by_position[position] += 1


class PipelineThread:
    """The pipeline of a target and its drafter, and the thread that steps it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        properties = device_properties(options)
        scheduler = genai.SchedulerConfig()
        # Cached prefixes would hide the prefill from timings, and DFlash refuses them.
        scheduler.cache_size = CACHE_SIZE
        scheduler.enable_prefix_caching = False
        # A prompt is one step, so that a step is a round.
        scheduler.dynamic_split_fuse = False
        scheduler.max_num_batched_tokens = sys.maxsize
        if options.drafter:
            properties["draft_model"] = genai.draft_model(
                options.drafter, options.device, **device_properties(options)
            )
        if options.lookup_match:
            properties["prompt_lookup"] = True
        self.pipeline = genai.ContinuousBatchingPipeline(
            options.target, scheduler, options.device, properties
        )
        self.tokenizer = self.pipeline.get_tokenizer()
        self.stop_ids = read_stop_ids(Path(options.target))
        self.max_length = options.max_length or read_size(
            Path(options.target), "max_position_embeddings"
        )
        self.vocab_size = read_size(Path(options.target), "vocab_size")
        self.counters = Counters()
        self._lock = threading.Condition()
        self._added: list[OpenRequest] = []
        self._open: list[OpenRequest] = []
        self._count = 0
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def drafts(self) -> bool:
        return bool(self.options.drafter or self.options.lookup_match)

    def make_config(self, body: dict[str, Any], num_prompt: int) -> Any:
        """Return the generation settings of a request; a ValueError says what is wrong with it."""
        config = genai.GenerationConfig()
        config.max_new_tokens = int(body.get("max_tokens", 16))
        if num_prompt + config.max_new_tokens > self.max_length:
            raise ValueError(
                f"{num_prompt} prompt tokens and {config.max_new_tokens} new ones exceed the "
                f"context length, {self.max_length}"
            )
        config.apply_chat_template = False
        config.do_sample = float(body.get("temperature", 1.0)) > 0
        if config.do_sample:
            config.temperature = float(body.get("temperature", 1.0))
            config.top_p = float(body.get("top_p", 1.0))
            top_k = int(body.get("top_k", 0))
            config.top_k = top_k if top_k > 0 else sys.maxsize
            config.rng_seed = int(body.get("seed", time.time_ns() % 2**31))
        if self.stop_ids and not body.get("ignore_eos"):
            config.eos_token_id = min(self.stop_ids)
            config.stop_token_ids = self.stop_ids
        if self.options.lookup_match:
            config.max_ngram_size = self.options.lookup_match
        if self.drafts:
            for key in DRAFTING:
                value = body.get(key, getattr(self.options, key))
                if value is not None:
                    setattr(config, key, int(value))
        config.validate()
        return config

    def submit(self, ids: list[int], config: Any) -> OpenRequest:
        """Add a request to those that are decoded."""
        request = OpenRequest(ids, config)
        with self._lock:
            if len(self._added) + len(self._open) >= MAX_OPEN:
                raise RefusedRequest(503, f"{MAX_OPEN} requests are open; try again later")
            self._added.append(request)
            self._lock.notify()
        return request

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._added and not self._open:
                    self._lock.wait()
                added = self._take_requests()
            for request in added:
                self._add(request)
            try:
                if self._open:
                    self.pipeline.step()
                    self._pass_on()
            except Exception as error:
                for request in self._open:
                    request.steps.put(error)
                self._open = []

    def _add(self, request: OpenRequest) -> None:
        """Give a request to the pipeline; one that it refuses ends by itself, and no other one."""
        self._count += 1
        try:
            prompt = openvino.Tensor(np.array([request.ids], dtype=np.int64))
            request.handle = self.pipeline.add_request(self._count, prompt, request.config)
        except Exception as error:
            self._open = [other for other in self._open if other is not request]
            request.steps.put(error)

    def _take_requests(self) -> list[OpenRequest]:
        """Open the requests that are decoded from now on. OpenVINO fails with a tree beside
        other requests, so it is alone.
        """
        taken: list[OpenRequest] = []
        while self._added:
            together = [*self._open, self._added[0]]
            has_tree = any(getattr(request.config, "tree_depth", 0) for request in together)
            if len(together) > (1 if has_tree else self.options.max_requests or sys.maxsize):
                break
            taken.append(self._added.pop(0))
            self._open.append(taken[-1])
        return taken

    def _pass_on(self) -> None:
        """Give each request the tokens of the last step, and end those that are done."""
        for request in self._open:
            while request.handle.can_read():
                for output in request.handle.read().values():
                    request.steps.put(list(output.generated_ids))
                    request.step_ends.append(time.perf_counter())
                    request.reason = REASONS.get(output.finish_reason.name, request.reason)
        running = genai.GenerationStatus.RUNNING
        for request in [
            request for request in self._open if request.handle.get_status() != running
        ]:
            self._open.remove(request)
            request.steps.put(None)

    def read_steps(self, request: OpenRequest) -> Iterator[list[int]]:
        """Yield the tokens of each step of a request."""
        while (step := request.steps.get()) is not None:
            if isinstance(step, Exception):
                raise step
            yield step

    def count_rounds(
        self, request: OpenRequest, steps: list[list[int]]
    ) -> dict[str, list[int]] | None:
        """Return the rounds of an answer, and add them to the totals; None without a drafter.

        The last round has the tokens that it emitted; an end token or the limit may have cut it.
        """
        if not self.drafts:
            return None
        accepted = [len(step) - 1 for step in steps[1:]]
        # A lookup may draft fewer tokens, or none; OpenVINO does not tell how many, so that only
        # accepted ones are certain.
        drafted = (
            accepted
            if self.options.lookup_match
            else [int(request.config.num_assistant_tokens)] * len(accepted)
        )
        with self._lock:
            self.counters.add(accepted, drafted)
        return {"accepted": accepted, "drafted": drafted}


def device_properties(options: argparse.Namespace) -> dict[str, Any]:
    """Return OpenVINO's properties. A chosen precision holds for keys and values too, without
    quantization while decoding.
    """
    properties: dict[str, Any] = (
        {} if options.threads is None else {"INFERENCE_NUM_THREADS": options.threads}
    )
    if options.precision is not None:
        properties |= {
            "INFERENCE_PRECISION_HINT": options.precision,
            "KV_CACHE_PRECISION": options.precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
    return properties


def read_stop_ids(target: Path) -> set[int]:
    """Return the end tokens of a model."""
    for name in ("generation_config.json", "config.json"):
        ids = (
            json.loads((target / name).read_text()).get("eos_token_id")
            if (target / name).exists()
            else None
        )
        if ids is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    return set()


def read_size(target: Path, key: str) -> int:
    """Return a size of the model's config.json, which may lack it."""
    config = json.loads((target / "config.json").read_text())
    return int((config.get("text_config") or config).get(key, sys.maxsize))


def parse_body(content: bytes) -> dict[str, Any]:
    """Return the settings of a request; a ValueError names one that this server does not have, or
    whose value it cannot mean.
    """
    body = json.loads(content, parse_constant=refuse_constant)
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    body = {key: value for key, value in body.items() if value is not None}
    for key, value in body.items():
        if key in NUMBERS:
            check_number(key, value)
        elif key in FLAGS:
            if not isinstance(value, bool):
                raise ValueError(f"{key}: use true or false")
        elif key in NEUTRAL:
            if not any(type(value) is type(same) and value == same for same in NEUTRAL[key]):
                raise ValueError(f"{key}: this server does not support it; leave it out")
        elif key not in OTHER_KEYS:
            raise ValueError(f"{key}: this server has no such setting; leave it out")
    return body


def check_number(key: str, value: Any) -> None:
    """Raise ValueError for a value that is no number of its setting."""
    kind, least, most = NUMBERS[key]
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        whole = "a whole number" if kind is int else "a number"
        raise ValueError(f"{key}: use {whole} from {least:g} to {most:g}")


def refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which are no JSON."""
    raise ValueError(f"{name} is no number")


class Handler(BaseHTTPRequestHandler):
    """OpenAI's interface: models, completions and chat completions, whole or streamed."""

    protocol_version = "HTTP/1.1"
    # Of the socket: a client that sends or reads nothing for so long has gone.
    timeout = PAUSE_SECONDS
    engine: PipelineThread

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        options = self.engine.options
        if self.path == "/v1/models":
            model = {
                "id": options.model_name,
                "root": options.target,
                "max_model_len": self.engine.max_length,
            }
            self.reply(200, {"object": "list", "data": [{"object": "model", **model}]})
        elif self.path == "/counters":
            self.reply(200, vars(self.engine.counters) if self.engine.drafts else None)
        elif self.path == "/health":
            self.reply(200, {})
        else:
            self.reply(404, {"error": {"message": f"there is no {self.path}"}})

    def do_POST(self) -> None:
        try:
            self.answer_post()
        except RefusedRequest as refusal:
            # What is left of the body is not the next request.
            self.close_connection = True
            self.reply(refusal.status, {"error": {"message": str(refusal)}})

    def answer_post(self) -> None:
        """Answer a prompt; a RefusedRequest is raised before the body of the request is read."""
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            raise RefusedRequest(404, f"there is no {self.path}")
        is_chat = self.path.endswith("chat/completions")
        content = self.read_body()
        try:
            body = parse_body(content)
            ids = self.tokenize(body, is_chat)
            config = self.engine.make_config(body, len(ids))
        except Exception as error:
            self.reply(400, {"error": {"message": str(error)}})
            return
        request = self.engine.submit(ids, config)
        try:
            if body.get("stream"):
                self.stream(request, is_chat)
            else:
                steps = list(self.engine.read_steps(request))
                self.reply(200, self.make_answer(request, steps, is_chat))
        except OSError:
            # The client has gone.
            request.handle.stop()
        except Exception as error:
            self.reply(500, {"error": {"message": str(error)}})

    def read_body(self) -> bytes:
        """Return the body of a request, whose length its headers give once."""
        lengths = set(self.headers.get_all("Content-Length") or ())
        length = lengths.pop() if len(lengths) == 1 else ""
        is_number = length.isascii() and length.isdecimal()
        if not is_number or "Transfer-Encoding" in self.headers:
            raise RefusedRequest(411, "send the body with one Content-Length")
        if int(length[:20]) > MAX_BODY_BYTES:
            raise RefusedRequest(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def tokenize(self, body: dict[str, Any], is_chat: bool) -> list[int]:
        """Return the token ids of a prompt."""
        prompt = body.get("prompt")
        if is_chat:
            arguments = body.get("chat_template_kwargs")
            prompt = self.engine.tokenizer.apply_chat_template(
                body["messages"], True, tools=body.get("tools"), extra_context=arguments
            )
        if isinstance(prompt, str):
            return [
                int(id)
                for id in self.engine.tokenizer.encode(
                    prompt, add_special_tokens=not is_chat
                ).input_ids.data[0]
            ]
        if (
            not isinstance(prompt, list)
            or not prompt
            or not all(type(id) is int and 0 <= id < self.engine.vocab_size for id in prompt)
        ):
            raise ValueError("prompt: give a text or a list of token ids of the vocabulary")
        return prompt

    def make_answer(
        self, request: OpenRequest, steps: list[list[int]], is_chat: bool
    ) -> dict[str, Any]:
        ids = [id for step in steps for id in step]
        text = self.engine.tokenizer.decode(ids, skip_special_tokens=True)
        answer = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {"index": 0, "finish_reason": request.reason, "token_ids": ids, **answer}
        return {
            "model": self.engine.options.model_name,
            "choices": [choice],
            **self.end_fields(request, steps),
        }

    def end_fields(self, request: OpenRequest, steps: list[list[int]]) -> dict[str, Any]:
        """Return what is known at the end of an answer: usage, prompt, and rounds."""
        usage = {"prompt_tokens": len(request.ids), "completion_tokens": sum(map(len, steps))}
        return {
            "usage": usage,
            "prompt_token_ids": request.ids,
            "metrics": {
                "rounds": self.engine.count_rounds(request, steps),
                "step_seconds": [
                    after - before
                    for before, after in zip(request.step_ends, request.step_ends[1:])
                ],
            },
        }

    def stream(self, request: OpenRequest, is_chat: bool) -> None:
        """Send the tokens of every step as an event."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        steps: list[list[int]] = []
        sent = ""
        for step in self.engine.read_steps(request):
            steps.append(step)
            text = self.engine.tokenizer.decode(
                [id for step in steps for id in step], skip_special_tokens=True
            )
            # The bytes of an unfinished character come with the next step.
            added = "" if text.endswith("�") else text[len(sent) :]
            sent += added
            answer = {"delta": {"content": added}} if is_chat else {"text": added}
            self.send_event(
                {"choices": [{"index": 0, "finish_reason": None, "token_ids": step, **answer}]}
            )
        last: dict[str, Any] = {
            "index": 0,
            "finish_reason": request.reason,
            **({"delta": {}} if is_chat else {"text": ""}),
        }
        self.send_event({"choices": [last], **self.end_fields(request, steps)})
        self.wfile.write(b"data: [DONE]\n\n")

    def send_event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def reply(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def parse_options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serves OpenVINO GenAI over HTTP.")
    for name in ("target", "model-name"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("drafter", "precision"):
        parser.add_argument(f"--{name}")
    for name in (*DRAFTING, "lookup-match", "threads", "max-length", "max-requests"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args(words)


def make_http_server(engine: PipelineThread, host: str, port: int) -> ThreadingHTTPServer:
    handler = type("PipelineHandler", (Handler,), {"engine": engine})
    server = ThreadingHTTPServer((host, port), handler)
    server.daemon_threads = True
    return server


def main() -> None:
    options = parse_options(sys.argv[1:])
    make_http_server(PipelineThread(options), options.host, options.port).serve_forever()


if __name__ == "__main__":
    main()

"""Stand-ins for servers: HTTP on this machine, with faults on request. Shapes: T tokens, L layers,
D width, V vocabulary.

`StandIn` answers by a function; `ModelStandIn` speaks vLLM's interface with the answers and states
of a target in this process.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrain.data.chat import tokenize_prompt
from spectrain.data.messages import Conversation
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain_serve.servers import client

# What recipe=eagle3 reads of the tiny target, and its last layer.
LAYERS = (2, 4, 5, 8)
# Status, content (text or JSON) and headers of an answer.
Reply = tuple[int, Any, dict[str, str]]
# Accepted and drafted tokens of each round of an answer.
Rounds = tuple[list[int], list[int]]


class StandIn:
    """An HTTP server with a list of models. `misbehave` may answer a request otherwise, given
    its body and its number.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.misbehave: Callable[[dict[str, Any], int], Reply | None] = lambda body, number: None
        self.models: Reply = (200, {"data": [{"id": "little"}]}, {})
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Listen, after a stop at the same address."""
        self.server = QuietServer(("127.0.0.1", self.port), make_handler(self))
        self.port = self.server.server_port
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def stop(self) -> None:
        """Close the address and all connections, as a killed server does."""
        if self.server is not None:
            server = self.server
            self.server = None
            server.shutdown()
            server.server_close()
            server.close_connections()

    def reply_to_get(self, path: str) -> Reply:
        return self.models if path == "/v1/models" else (404, "nothing here", {})

    def reply_to_post(self, path: str, body: dict[str, Any]) -> Reply:
        """Answer a request that no fault concerns."""
        raise NotImplementedError


class QuietServer(ThreadingHTTPServer):
    """A server that can close its connections, and prints no error for those that a test has
    closed.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def close_connections(self) -> None:
        for connection in [*self.connections]:
            with suppress(OSError):
                connection.shutdown(2)

    def handle_error(self, *_: Any) -> None:
        pass


def make_handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    """Return the handler of a stand-in's requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_reply(*stand_in.reply_to_get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stand_in.bodies.append(body)
            stand_in.keys.append(self.headers["Authorization"])
            fault = stand_in.misbehave(body, len(stand_in.bodies))
            self.send_reply(*(fault or stand_in.reply_to_post(self.path, body)))

        def send_reply(self, status: int, content: Any, headers: dict[str, str]) -> None:
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                # The client has given up, or a test has stopped the server.
                pass

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class ModelStandIn(StandIn):
    """A stand-in for vLLM that runs a target of its own: answers, token ids, hidden states, and
    counts of given rounds.

    The target is used by no other thread. `layers` are captured in ascending order; None captures
    nothing.
    """

    def __init__(
        self, target: Target, layers: tuple[int, ...] | None = None, folder: Path | None = None
    ) -> None:
        super().__init__()
        self.target, self.layers, self.folder = target, layers, folder
        self.name = "served"
        self.max_length = 1024
        # Whether files of states name their layers, as the connector of this project does.
        self.names_layers = True
        # Changes the states [T, L, D] and token ids of a request of this number before they are
        # written.
        self.alter_states: Callable[[Tensor, list[int], int], tuple[Tensor, list[int]]] = (
            lambda states, tokens, number: (
                states,
                tokens,
            )
        )
        # Changes the file of a request of this number after it is written.
        self.alter_file: Callable[[Path, int], None] = lambda path, number: None
        # The rounds of a prompt and its answer, for a server with a drafter.
        self.count_rounds: Callable[[list[int], list[int]], Rounds] | None = None
        # Whether sampled answers ignore the target, as a server does whose sampling fails.
        self.samples_wrongly = False
        # Seconds that each request takes beside its computation.
        self.delay = 0.0
        self.accepted: Counter[int] = Counter()
        self.num_rounds = self.num_drafted = self.num_captured = 0
        self.lock = threading.Lock()

    def reply_to_get(self, path: str) -> Reply:
        if path == "/metrics":
            return 200, self.metrics_text(), {}
        if path == "/v1/models" and self.models[0] == 200:
            model = {"id": self.name, "max_model_len": self.max_length, "root": self.target.path}
            return 200, {"data": [model]}, {}
        return super().reply_to_get(path)

    def reply_to_post(self, path: str, body: dict[str, Any]) -> Reply:
        time.sleep(self.delay)
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return 404, "nothing here", {}
        is_chat = path.endswith("chat/completions")
        prompt = self.render_messages(body) if is_chat else body["prompt"]
        if len(prompt) >= self.max_length:
            return (
                400,
                f"This model's maximum context length is {self.max_length} tokens, the prompt has "
                f"{len(prompt)}",
                {},
            )
        with self.lock, torch.no_grad():
            answer = self.generate(prompt, body)
            response = self.make_response(prompt, answer, body, is_chat)
        if not body.get("stream"):
            return 200, response, {}
        return (
            200,
            "".join(self.stream_parts(response, answer, is_chat)),
            {"Content-Type": "text/event-stream"},
        )

    def render_messages(self, body: dict[str, Any]) -> list[int]:
        arguments = body.get("chat_template_kwargs") or {}
        conversation = Conversation(
            body["messages"], body.get("tools"), body.get("documents"), arguments
        )
        return tokenize_prompt(self.target.template, conversation)

    def generate(self, prompt: list[int], body: dict[str, Any]) -> list[int]:
        """Return the answer, its stop token included; it is sampled one full forward at a time."""
        generator = torch.Generator().manual_seed(int(body.get("seed") or 0))
        temperature = float(body.get("temperature", 1.0))
        answer = list[int]()
        while len(answer) < min(body["max_tokens"], self.max_length - len(prompt)):
            last = self.target.features(torch.tensor([prompt + answer]), ("final",)).hidden[
                :, -1:, 0
            ]
            logits = self.target.head.logits(last)[0, 0]
            if temperature and self.samples_wrongly:
                token = int(torch.randint(3, len(logits), (1,), generator=generator))
            elif temperature:
                token = int(
                    torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
                )
            else:
                token = int(logits.argmax())
            answer.append(token)
            if token in self.target.stop_ids and not body.get("ignore_eos"):
                break
        return answer

    def make_response(
        self, prompt: list[int], answer: list[int], body: dict[str, Any], is_chat: bool
    ) -> dict[str, Any]:
        stopped = answer[-1] in self.target.stop_ids
        decoded: Any = self.target.tokenizer.decode(
            answer, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if stopped else "length"}
        choice |= (
            {"message": {"role": "assistant", "content": decoded}} if is_chat else {"text": decoded}
        )
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer)}
        response: dict[str, Any] = {"model": self.name, "choices": [choice], "usage": usage}
        if body.get("return_token_ids"):
            choice["token_ids"] = answer
            (response if is_chat else choice)["prompt_token_ids"] = prompt
        if self.layers is not None:
            response["kv_transfer_params"] = {
                "hidden_states_path": str(self.write_states(prompt, answer, body))
            }
        if self.count_rounds is not None:
            response["metrics"] = self.add_rounds(*self.count_rounds(prompt, answer))
        return response

    def write_states(self, prompt: list[int], answer: list[int], body: dict[str, Any]) -> Path:
        """Write the states of a request as vLLM does: with output tokens, of all tokens but the
        last.
        """
        assert self.layers is not None and self.folder is not None
        with_output = (body.get("kv_transfer_params") or {}).get("include_output_tokens")
        tokens = prompt + answer[:-1] if with_output else [*prompt]
        self.num_captured += 1
        states = self.target.features(torch.tensor([tokens]), self.layers).hidden[0]
        states, tokens = self.alter_states(states, tokens, self.num_captured)
        path = self.folder / f"request-{self.num_captured}.safetensors"
        metadata = {"layers": ",".join(map(str, self.layers))} if self.names_layers else None
        Path(f"{path}.lock").touch()
        save_file(
            {"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens)},
            path,
            metadata,
        )
        self.alter_file(path, self.num_captured)
        return path

    def add_rounds(self, accepted: list[int], drafted: list[int]) -> dict[str, Any]:
        """Count the rounds of an answer, and return its metrics."""
        self.num_rounds += len(accepted)
        self.num_drafted += sum(drafted)
        for count in accepted:
            self.accepted.update(range(count))
        counts = {"per_step_accepted": accepted, "per_step_drafted": drafted}
        times = {"time_to_first_token_ms": 5.0, "queue_time_ms": 1.0, "mean_itl_ms": 2.0}
        return {"speculative_decoding": counts, **times}

    def metrics_text(self) -> str:
        """Return the counters of /metrics; a server without a drafter has none."""
        if self.count_rounds is None:
            return "# nothing is drafted\n"
        labels = f'engine="0",model_name="{self.name}"'
        lines = [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(self.num_rounds)}",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(self.num_drafted)}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} "
            f"{float(sum(self.accepted.values()))}",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{position}"}} '
            f"{float(count)}"
            for position, count in sorted(self.accepted.items())
        ]
        return "\n".join(lines) + "\n"

    def stream_parts(
        self, response: dict[str, Any], answer: list[int], is_chat: bool
    ) -> Iterator[str]:
        """Yield the events of a streamed answer: one token each, then the usage with the
        metrics.
        """
        reason = response["choices"][0]["finish_reason"]
        for number, token in enumerate(answer):
            text = self.target.tokenizer.decode([token], skip_special_tokens=True)
            choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
            choice |= {
                "index": 0,
                "token_ids": [token],
                "finish_reason": reason if number + 1 == len(answer) else None,
            }
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        last = {key: value for key, value in response.items() if key not in ("choices", "model")}
        yield f"data: {json.dumps({'choices': [], **last})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture(name="server")
def capturing_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelStandIn]:
    """A stand-in that captures what recipe=eagle3 reads of the tiny target."""
    hasten_retries(monkeypatch)
    (tmp_path / "states").mkdir()
    standing = ModelStandIn(load_tiny(), LAYERS, tmp_path / "states")
    yield standing
    standing.stop()


def hasten_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients repeat failed requests at once, and reach this machine without a proxy."""
    monkeypatch.setattr(client, "RETRY_PAUSE", 0.01)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

"""Two kinds of traffic for the tiny target, and a client that sends them and counts the rounds of
each answer.

The first kind is an English chat, the second one questions in Spanish in another prompt template.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

CONVERSATIONS = Path(__file__).parents[2] / "spectrain" / "data" / "conversations.jsonl.gz"
NOUNS = (
    "la casa", "el perro", "la luna", "el mar", "la ciudad", "el tiempo", "la mano", "el pan",
    "la mesa", "el libro",
    "la noche", "el agua", "la vida", "el coche", "la flor", "el sol", "la puerta", "el amigo",
    "la escuela", "el camino",
    "la lluvia", "el pueblo", "la voz", "el trabajo", "la sangre", "el viento", "la tierra",
    "el fuego", "la historia",
    "el tren", "la cocina", "el rey", "la familia", "el cielo", "la nieve", "el barco", "la carta",
    "el reloj", "la calle",
    "el campo",
)  # fmt: skip
QUESTIONS = (
    "Qué es {}",
    "Dónde está {}",
    "Por qué es importante {}",
    "De qué color es {}",
    "Quién conoce {}",
    "Cuándo llega {}",
    "Cómo se llama {}",
    "Para qué sirve {}",
    "Cuánto vale {}",
    "Qué sabes de {}",
)
ANSWER_TOKENS = 32
Body = dict[str, Any]


@dataclass(frozen=True)
class SentAnswer:
    """An answer, as the client saw it."""

    kind: str
    time: float
    seconds: float
    accepted: int
    rounds: int
    digest: str
    tokens: int


def make_chats(seed: int) -> list[Body]:
    """Return the requests of the first kind, in random order."""
    bodies = []
    with gzip.open(CONVERSATIONS, "rt", encoding="utf-8") as file:
        for line in filter(str.strip, file):
            message = json.loads(line)["messages"][0]
            if message["role"] == "user" and len(message["content"]) < 200:
                bodies.append(
                    {"messages": [message], "max_tokens": ANSWER_TOKENS, "temperature": 0}
                )
    random.Random(seed).shuffle(bodies)
    return bodies


def make_questions(seed: int) -> list[Body]:
    """Return the requests of the second kind, in random order."""
    prompts = [
        f"Pregunta: ¿{question.format(noun)}?\nRespuesta:"
        for question in QUESTIONS
        for noun in NOUNS
    ]
    random.Random(seed).shuffle(prompts)
    return [{"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0} for prompt in prompts]


def send(client: httpx.Client, body: Body) -> SentAnswer:
    """Send a request and return what its answer counts."""
    is_chat = "messages" in body
    began = time.perf_counter()
    reply = client.post("/v1/chat/completions" if is_chat else "/v1/completions", json=body)
    reply.raise_for_status()
    content = reply.json()
    accepted, rounds = count_rounds(content)
    choice = content["choices"][0]
    text = choice["message"]["content"] if is_chat else choice["text"]
    seconds = time.perf_counter() - began
    kind = "chat" if is_chat else "questions"
    digest = sha256(text.encode()).hexdigest()
    tokens = int(content["usage"]["completion_tokens"])
    return SentAnswer(kind, time.time(), seconds, accepted, rounds, digest, tokens)


def count_rounds(content: dict[str, Any]) -> tuple[int, int]:
    """Return the accepted tokens and the rounds of an answer of this project's engine or of
    vLLM.
    """
    metrics = content.get("metrics") or {}
    accepted = (metrics.get("rounds") or {}).get("accepted")
    if accepted is None:
        accepted = (metrics.get("speculative_decoding") or {}).get("per_step_accepted") or []
    return sum(accepted), len(accepted)


def send_all(url: str, bodies: Iterable[Body], concurrency: int = 1) -> list[SentAnswer]:
    """Send requests and return their answers in order."""
    with (
        httpx.Client(base_url=url, timeout=600, trust_env=False) as client,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        return [*pool.map(lambda body: send(client, body), bodies)]


def tokens_per_forward(answers: Iterable[SentAnswer], kind: str) -> float | None:
    """Return 1 + accepted tokens per round of the answers of a kind."""
    chosen = [answer for answer in answers if answer.kind == kind and answer.rounds]
    rounds = sum(answer.rounds for answer in chosen)
    return 1 + sum(answer.accepted for answer in chosen) / rounds if rounds else None


def tokens_per_second(answers: Iterable[SentAnswer]) -> float | None:
    """Return the tokens of answers over the seconds that their requests took."""
    chosen = [*answers]
    return (
        sum(answer.tokens for answer in chosen) / sum(answer.seconds for answer in chosen)
        if chosen
        else None
    )

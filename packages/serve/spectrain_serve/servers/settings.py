"""The settings that all servers share, which are keys of `server`."""

import os
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from spectrain.errors import UserError
from spectrain.servers.commands import EngineLaunch


@dataclass
class ClientSettings:
    """Where a server is, and how it is asked."""

    # Address of the server's OpenAI-compatible interface, or a list of addresses of servers of the
    # same model.
    url: str | list[str] = "http://127.0.0.1:8000/v1"
    # Name of the model on the server; null takes the only one that it serves.
    model: str | None = None
    # Environment variable that holds the API key; null sends no key.
    api_key_variable: str | None = None
    # Number of requests to each server at the same time.
    concurrency: int = 32
    # Seconds to wait for an answer before the request counts as failed.
    timeout: float = 300.0
    # Number of times that a request is repeated after a temporary failure.
    retries: int = 6
    # In scoring: address of the same engine with the same target, without a drafter; null compares
    # with none.
    baseline_url: str | None = None
    # Entries that are added to the body of every request, as in {repetition_penalty:1.0}; null adds
    # none.
    extra: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for key, url in (*(("url", url) for url in self.urls), ("baseline_url", self.baseline_url)):
            if url is not None and not is_http_url(url):
                raise UserError(
                    f"server.{key}={url}: give an address, as in http://127.0.0.1:8000/v1"
                )
        for key, value, least in (
            ("concurrency", self.concurrency, 1),
            ("retries", self.retries, 0),
        ):
            if value < least:
                raise UserError(f"server.{key}={value}: use {least} or more")
        if not self.timeout > 0:
            raise UserError(f"server.timeout={self.timeout}: use more than 0 seconds")
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise UserError(
                f"server.api_key_variable={self.api_key_variable}: this environment variable is "
                "not set; export it"
            )

    @property
    def urls(self) -> list[str]:
        """Return the addresses, without a slash at the end."""
        urls = [self.url] if isinstance(self.url, str) else self.url
        if not urls:
            raise UserError(
                "server.url: the list is empty; give an address, as in http://127.0.0.1:8000/v1"
            )
        return [url.rstrip("/") for url in urls]

    @property
    def api_key(self) -> str | None:
        return None if self.api_key_variable is None else os.environ[self.api_key_variable]


@dataclass
class EngineSettings(ClientSettings):
    """What engines that spectrain can start have too."""

    # Python interpreter of the environment in which a started engine is installed; null takes the
    # one that runs spectrain.
    python: str | None = None
    # Address that a started engine listens at; 0.0.0.0 lets other machines reach it.
    host: str = "127.0.0.1"
    # Port that a started engine listens at.
    port: int = 8000
    # In scoring with serve=true: port of the same engine without a drafter, which then runs at the
    # same time, so that prompts alternate between the two; null starts one after the other.
    baseline_port: int | None = None
    # Weight type of a started engine, such as bfloat16; null takes that of target.dtype.
    dtype: str | None = None
    # Longest sequence of a started engine, in tokens; null takes the target's context.
    max_length: int | None = None
    # Number of tokens that a started engine drafts in a round; null takes what the drafter was made
    # for.
    draft_tokens: int | None = None
    # Further arguments of a started engine, as in [--max-num-seqs,8].
    arguments: list[str | int | float] = field(default_factory=list)
    # Seconds that a started engine may take until it answers.
    start_seconds: float = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("max_length", "draft_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"server.{key}={value}: use 1 or more")
        for key, port in (("port", self.port), ("baseline_port", self.baseline_port)):
            if port is not None and not 0 < port < 65536:
                raise UserError(f"server.{key}={port}: use 1 to 65535")
        if self.baseline_port == self.port:
            raise UserError(
                f"server.baseline_port={self.port}: this is server.port; use another one"
            )
        if not self.start_seconds > 0:
            raise UserError(f"server.start_seconds={self.start_seconds}: use more than 0 seconds")

    def complete_launch(self, launch: EngineLaunch) -> EngineLaunch:
        """Return a launch with what these settings say of the number of draft tokens, the served
        name and the weight type.
        """
        drafter = launch.drafter
        if drafter is not None:
            drafter = replace(drafter, num_tokens=self.draft_tokens or drafter.num_tokens)
        return replace(
            launch,
            drafter=drafter,
            served_name=self.model or launch.served_name,
            dtype=self.dtype or launch.dtype,
        )

    @property
    def started_url(self) -> str:
        """Return the address at which this machine reaches the started engine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}/v1" if ":" in host else f"http://{host}:{self.port}/v1"


def is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False

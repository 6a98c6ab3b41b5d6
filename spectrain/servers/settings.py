"""The settings that all servers share, which are keys of `server`."""

import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from spectrain.errors import UserError


@dataclass
class ClientSettings:
    """Where a server is, and how it is asked."""

    # Address of the server's OpenAI-compatible interface, or a list of addresses of servers of the same model.
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
    # Entries that are added to the body of every request, as in {repetition_penalty:1.0}; null adds none.
    extra: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for url in self.urls:
            if not is_http_url(url):
                raise UserError(f"server.url={url}: give an address, as in http://127.0.0.1:8000/v1")
        for key, value, least in (("concurrency", self.concurrency, 1), ("retries", self.retries, 0)):
            if value < least:
                raise UserError(f"server.{key}={value}: use {least} or more")
        if not self.timeout > 0:
            raise UserError(f"server.timeout={self.timeout}: use more than 0 seconds")
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise UserError(f"server.api_key_variable={self.api_key_variable}: this environment variable is not set; export it")

    @property
    def urls(self) -> list[str]:
        """Return the addresses, without a slash at the end."""
        urls = [self.url] if isinstance(self.url, str) else self.url
        if not urls:
            raise UserError("server.url: the list is empty; give an address, as in http://127.0.0.1:8000/v1")
        return [url.rstrip("/") for url in urls]

    @property
    def api_key(self) -> str | None:
        return None if self.api_key_variable is None else os.environ[self.api_key_variable]


def is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False

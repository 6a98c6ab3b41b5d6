"""What the proxy accepts: checks of paths, headers and bodies. A request that fails one never reaches the server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

KIND_HEADER, SWITCH_HEADER = b"x-spectrain-kind", b"x-spectrain-follow"
OWN_HEADERS = {KIND_HEADER, SWITCH_HEADER}
HOP_HEADERS = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"http2-settings",
}
"""Headers of one connection (RFC 9110, section 7.6.1), which a proxy does not pass on."""
HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
HEADER_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
MAX_HEADERS, MAX_HEADER_BYTES = 100, 32 * 2**10
PASSED_PATHS = re.compile(r"/(v1/[A-Za-z0-9_./:@ ~+-]+|health|version|ping)")
Headers = Iterable[tuple[bytes, bytes]]


class Refusal(Exception):
    """A request that the proxy refuses, with the status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_path(path: str, raw_path: bytes) -> None:
    """Raise a Refusal for a path that is not passed on, such as the endpoints with which a server is administered."""
    segments = path.split("/")[1:]
    if not PASSED_PATHS.fullmatch(path) or any(segment in ("", ".", "..") for segment in segments):
        raise Refusal(404, "this proxy passes on /v1/.., /health, /version and /ping")
    if b"%2e" in raw_path.lower() or b"%2f%2f" in raw_path.lower() or len(raw_path) > 2048:
        raise Refusal(400, "the path is malformed")


def check_headers(headers: Headers) -> None:
    """Raise a Refusal for headers that are too many, too long, or hold characters that could end a header."""
    total = number = 0
    lengths: set[bytes] = set()
    for name, value in headers:
        number += 1
        total += len(name) + len(value)
        if not HEADER_NAME.fullmatch(name) or not HEADER_VALUE.fullmatch(value):
            raise Refusal(400, "a header is malformed")
        if name == b"content-length":
            lengths.add(value)
    if number > MAX_HEADERS or total > MAX_HEADER_BYTES:
        raise Refusal(431, f"the headers are too long; this proxy takes {MAX_HEADERS} of {MAX_HEADER_BYTES} bytes together")
    if len(lengths) > 1:
        raise Refusal(400, "the headers name several lengths")


def select_passed_headers(headers: Headers) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers that are passed on, in order."""
    headers = [*headers]
    named = {name.strip().lower() for key, value in headers if key.lower() == b"connection" for name in value.split(b",")}
    for name, value in headers:
        lower = name.lower()
        if lower not in HOP_HEADERS and lower not in named and lower not in OWN_HEADERS:
            yield name, value


def parse_body(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; raise a Refusal for anything else, and for the name of a model that leads elsewhere."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "the body is not valid JSON") from error
    if not isinstance(body, dict):
        raise Refusal(400, "the body is no JSON object")
    model = body.get("model")
    if model is not None and not is_model_name(model):
        raise Refusal(400, "model: this is not the name of a model")
    return body


def is_model_name(model: Any) -> bool:
    """Return whether a value can be the name of a served model."""
    if not isinstance(model, str) or len(model) > 512 or any(ord(character) < 32 for character in model):
        return False
    return ".." not in re.split(r"[/\\]", model)

"""What the proxy accepts: checks of paths, headers and bodies. A request that fails one never
reaches the server.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .limits import MAX_HEADER_BYTES, MAX_HEADERS, MAX_MODEL_CHARACTERS, MAX_PATH_BYTES

KIND_HEADER = b"x-spectrain-kind"
SWITCH_HEADER = b"x-spectrain-follow"
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
CHARSET = re.compile(rb";\s*charset\s*=\s*[\"']?([^\"';\s]*)")
HEADER_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
HALF_CHARACTER = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
"""An escape that is half of a character, unless its other half is beside it."""
Headers = Iterable[tuple[bytes, bytes]]


class Refusal(Exception):
    """A request that is refused, with the status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Route:
    """A path that clients use."""

    methods: tuple[str, ...]
    # Whether a request that the server has dropped may be sent again: it computes or reads, and
    # stores nothing.
    is_repeatable: bool = True


# Browsers send OPTIONS before a request to another origin.
COMPUTED = Route(("POST", "OPTIONS"))
STORED = Route(("POST", "OPTIONS"), is_repeatable=False)
READ = Route(("GET", "HEAD", "OPTIONS"))
COMPUTED_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/tokenize", "/v1/detokenize", "/v1/rerank", "/v1/score", "/v2/rerank", "/tokenize",
    "/detokenize", "/rerank", "/score",
)  # fmt: skip
STORED_PATHS = ("/v1/responses",)
READ_PATHS = ("/v1/models", "/health", "/version", "/ping")
ROUTES = {
    **dict.fromkeys(COMPUTED_PATHS, COMPUTED),
    **dict.fromkeys(STORED_PATHS, STORED),
    **dict.fromkeys(READ_PATHS, READ),
}
MODEL_PATH = re.compile(r"/v1/models((/(?!\.{1,2}(/|$))[A-Za-z0-9_.:@~+-]+)+)")
"""The path of one model, whose name may contain slashes."""


def find_route(method: str, path: str, raw_path: bytes) -> Route:
    """Return the route of a request; raise a Refusal for a path that is not one of a client's,
    however it is written.
    """
    # The name of a model may be percent-encoded; no other path has a reason to be.
    route = ROUTES.get(path) if raw_path == path.encode("utf-8", "replace") else None
    if route is None and MODEL_PATH.fullmatch(path):
        route = READ
    if route is None or len(raw_path) > MAX_PATH_BYTES:
        raise Refusal(
            404,
            "this path is not passed on; docs/follow.md lists those that are, as "
            "/v1/chat/completions",
        )
    if method not in route.methods:
        raise Refusal(405, f"this path takes {' and '.join(route.methods)}")
    return route


def check_headers(headers: Headers) -> None:
    """Raise a Refusal for headers that are too many, too long, or hold characters that could end
    a header; for several hosts, and for a body in another coding than chunks, which two servers
    may understand differently.
    """
    total = number = num_hosts = 0
    lengths: set[bytes] = set()
    for name, value in headers:
        number += 1
        total += len(name) + len(value)
        if not HEADER_NAME.fullmatch(name) or not HEADER_VALUE.fullmatch(value):
            raise Refusal(400, "a header is malformed")
        if name == b"content-length":
            lengths.add(value)
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise Refusal(501, "the body has a transfer coding other than chunked; send it plain")
        num_hosts += name == b"host"
    if number > MAX_HEADERS or total > MAX_HEADER_BYTES:
        raise Refusal(
            431,
            f"the headers are too long; this proxy takes {MAX_HEADERS} of {MAX_HEADER_BYTES} "
            "bytes together",
        )
    if len(lengths) > 1:
        raise Refusal(400, "the headers name several lengths")
    if num_hosts > 1:
        raise Refusal(400, "the headers name several hosts")


def check_encoding(headers: Headers) -> None:
    """Raise a Refusal for a body that its headers declare to be compressed or of another
    encoding than UTF-8.
    """
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise Refusal(400, "Content-Encoding: send the body without compression")
        charset = CHARSET.search(value.lower()) if name == b"content-type" else None
        if charset is not None and charset[1] not in (b"utf-8", b"utf8", b"us-ascii"):
            raise Refusal(400, "Content-Type: send the body in UTF-8")


def select_passed_headers(headers: Headers) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers that are passed on, in order."""
    headers = [*headers]
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for name in value.split(b",")
    }
    for name, value in headers:
        lower = name.lower()
        if lower not in HOP_HEADERS and lower not in named and lower not in OWN_HEADERS:
            yield name, value


def parse_body(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; raise a Refusal for anything else, and for the name of a
    model that leads elsewhere.
    """
    try:
        # By itself, Python's parser would guess other encodings, and take halves of characters in
        # UTF-8.
        text = content.decode("utf-8")
        body = json.loads(
            text,
            object_pairs_hook=make_object,
            parse_constant=refuse_constant,
            parse_float=parse_float,
        )
        if HALF_CHARACTER.search(text):
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise Refusal(
            400, "the body is not UTF-8 text; send it in UTF-8, without half characters"
        ) from error
    except RecursionError as error:
        raise Refusal(400, "the body is not valid JSON: it is nested too deeply") from error
    except ValueError as error:
        reason = f": {error}" if isinstance(error, MalformedJson) else ""
        raise Refusal(400, f"the body is not valid JSON{reason}") from error
    if not isinstance(body, dict):
        raise Refusal(400, "the body is no JSON object")
    model = body.get("model")
    if model is not None and not is_model_name(model):
        raise Refusal(400, "model: this is not the name of a model")
    return body


class MalformedJson(ValueError):
    """Text that Python's parser takes and JSON (RFC 8259) does not."""


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; one key given twice is refused, because servers differ in which
    value they take.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise MalformedJson(f"the key {repeated[:40]!r} is given twice")
    return made


def refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity."""
    raise MalformedJson(f"{name} is no number")


def parse_float(digits: str) -> float:
    """Return a number; a MalformedJson says that it is too large to be one."""
    number = float(digits)
    if not math.isfinite(number):
        raise MalformedJson(f"{digits[:40]} is too large")
    return number


def is_model_name(model: Any) -> bool:
    """Return whether a value can be the name of a served model."""
    if (
        not isinstance(model, str)
        or len(model) > MAX_MODEL_CHARACTERS
        or any(ord(character) < 32 for character in model)
    ):
        return False
    return ".." not in re.split(r"[/\\]", model)

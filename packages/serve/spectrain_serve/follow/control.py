"""Who may use a control endpoint: a request with the key, and none of a web page that a browser
shows from elsewhere.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections import Counter
from urllib.parse import parse_qs, urlsplit

from .bodies import Scope
from .requests import Refusal

SINGLE_HEADERS = (b"host", b"origin", b"authorization", b"content-type")
"""Headers by which a request to a control endpoint is judged."""


def check_control_request(scope: Scope, key: str) -> None:
    """Raise a Refusal for a request to a control endpoint that is of a foreign web page, has no
    key, or is no JSON.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    for name, count in Counter(name for name, _ in scope["headers"]).items():
        # Of two, a browser's check and this one could read different ones.
        if count > 1 and name in SINGLE_HEADERS:
            raise Refusal(400, f"the header {name.decode()} is given {count} times; give it once")
    host = headers.get(b"host", "")
    if not is_own_host(host):
        raise Refusal(
            403,
            f"Host {host[:80]!r} is a name of another machine; use the address, as in "
            "http://127.0.0.1:9000",
        )
    origin = headers.get(b"origin")
    if origin is not None and urlsplit_host(origin) != host.lower():
        raise Refusal(
            403,
            f"Origin {origin[:80]!r} is another one than this address; no web page from elsewhere "
            "may use it",
        )
    given = find_key(scope, headers.get(b"authorization", ""))
    if not hmac.compare_digest(given.encode("utf-8", "replace"), key.encode()):
        raise Refusal(
            401,
            "give the key, as in the header 'Authorization: Bearer KEY'; docs/follow.md says "
            "where it is",
        )
    content_type = headers.get(b"content-type", "").partition(";")[0].strip().lower()
    if scope["method"] == "POST" and content_type != "application/json":
        raise Refusal(415, "send the body with the header 'Content-Type: application/json'")


def find_key(scope: Scope, authorization: str) -> str:
    """Return the key that a request gives in its header or, as a link in a browser does, in its
    query.
    """
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    query = parse_qs(scope["query_string"].decode("latin-1"))
    return query.get("key", [""])[-1] if scope["method"] == "GET" else ""


def is_own_host(host: str) -> bool:
    """Return whether a Host header names this machine. A page whose own name leads here (DNS
    rebinding) sends that name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", socket.gethostname().lower())
    return True


def urlsplit_host(origin: str) -> str:
    """Return the host and the port of an origin; empty for one that has none, such as null."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""

"""Control endpoints: only with the key, and never for a web page from elsewhere."""

from pathlib import Path

import pytest

from spectrain.errors import UserError
from spectrain_serve.engines.control_key import key_path, read_control_key
from spectrain_serve.follow.control import check_control_request
from spectrain_serve.follow.requests import Refusal

KEY = "0123456789abcdef"
HOST = (b"host", b"127.0.0.1:9000")
BEARER = (b"authorization", f"Bearer {KEY}".encode())
JSON = (b"content-type", b"application/json")


def find_status(method: str, headers: list[tuple[bytes, bytes]], query: bytes = b"") -> int:
    try:
        check_control_request({"method": method, "headers": headers, "query_string": query}, KEY)
    except Refusal as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize(
    ("expected", "method", "headers", "query"),
    [
        (200, "POST", [HOST, BEARER, JSON], b""),
        (
            200,
            "POST",
            [
                (b"host", b"localhost:1"),
                BEARER,
                (b"content-type", b"application/json; charset=utf-8"),
            ],
            b"",
        ),
        (
            200,
            "POST",
            [(b"host", b"[::1]:9000"), (b"origin", b"http://[::1]:9000"), BEARER, JSON],
            b"",
        ),
        (200, "GET", [HOST, BEARER], b""),
        (200, "GET", [HOST], f"key={KEY}".encode()),
        (401, "GET", [HOST], b""),
        (401, "GET", [HOST], b"key=0123456789abcdee"),
        (401, "POST", [HOST, JSON], f"key={KEY}".encode()),
        (401, "POST", [HOST, JSON, (b"authorization", b"Basic MDEyMzQ1Njc4OWFiY2RlZg==")], b""),
        (401, "POST", [HOST, JSON, (b"authorization", "Bearer é".encode())], b""),
        (403, "POST", [(b"host", b"evil.example"), BEARER, JSON], b""),
        (403, "POST", [(b"host", b"127.0.0.1.evil.example:9000"), BEARER, JSON], b""),
        (403, "POST", [BEARER, JSON], b""),
        (403, "POST", [(b"host", b"[:"), BEARER, JSON], b""),
        (403, "POST", [HOST, (b"origin", b"http://evil.example"), BEARER, JSON], b""),
        (403, "POST", [HOST, (b"origin", b"http://127.0.0.1:8000"), BEARER, JSON], b""),
        (403, "POST", [HOST, (b"origin", b"null"), BEARER, JSON], b""),
        (415, "POST", [HOST, BEARER, (b"content-type", b"text/plain")], b""),
        (415, "POST", [HOST, BEARER, (b"content-type", b"application/x-www-form-urlencoded")], b""),
        (415, "POST", [HOST, BEARER], b""),
        (400, "GET", [HOST, (b"host", b"evil.example"), BEARER], b""),
        (400, "GET", [(b"host", b"evil.example"), HOST, BEARER], b""),
        (400, "GET", [HOST, (b"authorization", b"Bearer x"), BEARER], b""),
        (
            400,
            "POST",
            [HOST, BEARER, JSON, *[(b"origin", b"http://evil.example")] * 2],
            b"",
        ),
    ],
)
def test_who_may_use_a_control_endpoint(
    expected: int, method: str, headers: list[tuple[bytes, bytes]], query: bytes
) -> None:
    assert find_status(method, headers, query) == expected


def test_the_key_is_made_once_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECTRAIN_CONTROL_KEY")
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    key = read_control_key()
    assert len(key) >= 32 and read_control_key() == key
    assert key_path().stat().st_mode & 0o777 == 0o600 and [*key_path().parent.iterdir()] == [
        key_path()
    ]
    key_path().chmod(0o644)
    with pytest.raises(UserError, match="other users can read this key; delete it"):
        read_control_key()
    key_path().chmod(0o600)
    for content in (b"", b"short", b"\xff\xfe" * 40, b"a key with spaces in it"):
        key_path().write_bytes(content)
        with pytest.raises(UserError, match=str(key_path())):
            read_control_key()


def test_the_key_of_the_environment_counts(
    monkeypatch: pytest.MonkeyPatch, control_key: str
) -> None:
    assert read_control_key() == control_key
    monkeypatch.setenv("SPECTRAIN_CONTROL_KEY", "short")
    with pytest.raises(UserError, match="^SPECTRAIN_CONTROL_KEY: "):
        read_control_key()

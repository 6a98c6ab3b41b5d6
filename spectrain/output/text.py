"""Text that leaves the process: without secrets, and without the control sequences of terminals."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
MIN_SECRET = 8
"""Shortest value of an environment variable that counts as a secret; shorter ones stand in
ordinary text.
"""

# A pattern that begins with any number of letters is tried at the beginning of a word alone: from
# every letter of a long word, it would take as many steps as the square of its length.
SCHEME = r"((?<![\w+.-])[\w+.-]+://)"
URL_PASSWORD = re.compile(rf"{SCHEME}[^/\s\"]*@")
SECRET_PARAMETER = re.compile(
    r"([?&#;](?:[\w.-]*(?:token|key|secret|password|passwd|passphrase|pwd|signature|credentials?|"
    r"session|auth|jwt)|sig|sid)=)[^\s&#;'\"]+",
    re.IGNORECASE,
)
"""A value in the query of an address, whose names are shorter than those in a text."""
KNOWN_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_\w{16,}|sk[-_][\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|"
    r"glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|nvapi-[\w-]{16,}|"
    r"gsk_\w{16,}|xai-[\w-]{16,}|npm_\w{30,}|pypi-[\w-]{16,}|r8_\w{30,}|"
    r"(?<!-)eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----).*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
SECRET_NAME = (
    r"[\w-]*(?:api[-_]?key|(?:secret|access|private|account|encryption)[-_]?key|"
    r"(?:access|auth|api|hf|bearer|session|refresh|secret|security)[-_]?token|"
    r"secret|password|passwd|passphrase|authorization|credentials?|cookie)"
)
QUOTED = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
ASSIGNED_SECRET = re.compile(
    rf"((?<![\w-]){SECRET_NAME}['\"]?\s*[:=]\s*)({QUOTED}|['\"]?[^\s,'\"}}\]&;]+)", re.IGNORECASE
)
# Headers whose value has several words.
SECRET_HEADER = re.compile(
    r"((?<![\w-])(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)(?:Digest\s[^\n]*|[\w-]+[ \t]+"
    r"(?=[^\s'\"]*\d)[^\s,'\"}\]&;]{6,})|((?<![\w-])(?:set-)?cookie['\"]?\s*[:=]\s*['\"]?)[^'\"\n]+",
    re.IGNORECASE,
)
SECRET_PAIR = re.compile(
    rf"([(\[]\s*b?['\"]{SECRET_NAME}['\"]\s*,\s*b?)({QUOTED})(?=\s*[)\]])", re.IGNORECASE
)
"""A header as Python prints it."""
OPTION_SECRET = re.compile(
    rf"((?<![\w-])--{SECRET_NAME}(?:\s+|['\"],\s*['\"]))[^\s'\"]+", re.IGNORECASE
)
# The name alone may be that of a token of a text, which has no such value.
NAMED_TOKEN = re.compile(
    r"((?:(?<![\w-])(?:[\w-]*[-_])?token['\"]?\s*[:=]\s*['\"]?|--(?:[\w-]*-)?token\s+))"
    r"(?=[\w~+=-]*\d)(?=[\w~+=-]*[A-Za-z])[\w~+=-]{16,}(?![\w./~+=-])",
    re.IGNORECASE,
)
ASSIGNED_VARIABLE = re.compile(
    r"((?<![\w-])[A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE)=)[^\s'\"]{8,}"
)
SECRET_KEY = re.compile(rf"(?:{SECRET_NAME}|token|auth|[\w-]*x-[\w-]*key)", re.IGNORECASE)
SECRET_VARIABLE = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN$|API_?KEY|_PWD$|(_|^)(KEY|PAT|AUTH)$", re.IGNORECASE
)

MAX_MESSAGE = 1500
"""Characters of a message; a longer one loses its middle."""
CONTROL_SEQUENCE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)
"""Controls but tab and line break: C0 with ESC and CR, C1 with CSI and OSC, and the characters
that turn or break lines.
"""


def mask_secrets(text: str) -> str:
    """Return a text without passwords and keys in addresses, known tokens, named keys, and secrets
    of the environment.
    """
    text = URL_PASSWORD.sub(rf"\1{MASK}@", text)
    text = KNOWN_TOKEN.sub(MASK, PRIVATE_KEY.sub(rf"\1{MASK}", text))
    text = SECRET_HEADER.sub(_mask_header, BEARER.sub(rf"\1 {MASK}", text))
    for pattern in (ASSIGNED_SECRET, SECRET_PAIR):
        text = pattern.sub(_mask_quoted, text)
    for pattern in (SECRET_PARAMETER, OPTION_SECRET, NAMED_TOKEN, ASSIGNED_VARIABLE):
        text = pattern.sub(rf"\1{MASK}", text)
    for value in list_environment_secrets():
        text = text.replace(value, MASK)
    return text


def _mask_header(match: re.Match[str]) -> str:
    return f"{match[1] or match[2]}{MASK}"


def _mask_quoted(match: re.Match[str]) -> str:
    """Return a name with a masked value, whose quotes stay."""
    value = match[2]
    start = value[0] if value[0] in "'\"" else ""
    end = start if len(value) > 1 and value[-1] == start else ""
    return f"{match[1]}{start}{MASK}{end}"


def list_environment_secrets() -> list[str]:
    """Return the values of this process's variables that are named as tokens, keys, secrets or
    passwords, the longest first: one may begin with another.
    """
    values = [
        value
        for name, value in os.environ.items()
        if SECRET_VARIABLE.search(name) and len(value) >= MIN_SECRET
    ]
    return sorted(values, key=len, reverse=True)


def mask_settings(value: Any, is_secret: bool = False) -> Any:
    """Return settings for a file: texts without secrets, and the texts below a key that names a
    secret masked.
    """
    if isinstance(value, Mapping):
        return {
            mask_secrets(key) if isinstance(key, str) else key: mask_settings(
                entry, is_secret or names_secret(key)
            )
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        # A header may be a list of its name and its value.
        is_pair = len(value) == 2 and names_secret(value[0])
        return [
            mask_settings(entry, is_secret or (is_pair and at == 1))
            for at, entry in enumerate(value)
        ]
    if not isinstance(value, str):
        return value
    return MASK if is_secret and value else mask_secrets(value)


def names_secret(key: Any) -> bool:
    """Tell whether a key of settings names a secret."""
    return isinstance(key, str) and SECRET_KEY.fullmatch(key) is not None


def escape_controls(text: str) -> str:
    """Return a text whose control characters are visible, as \\x1b; tabs and line breaks stay."""
    return CONTROL_SEQUENCE.sub(lambda match: _escape(ord(match[0])), text.replace("\r\n", "\n"))


def clean_line(text: str) -> str:
    """Return a message as one line: without secrets, with visible control characters and line
    breaks, and without the middle of a very long one, so that no value of a file can imitate other
    lines or fill a terminal."""
    # Half of a secret, on either side of a cut, would not be recognized.
    text = mask_secrets(text)
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} .. {text[-MAX_MESSAGE // 2 :]}"
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def clean_text(text: str) -> str:
    """Return a text as it is printed: without secrets and with visible control characters."""
    return escape_controls(mask_secrets(text))

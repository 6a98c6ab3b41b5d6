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
URL_PASSWORD = re.compile(r"((?<![\w+.-])[\w+.-]+://)[^/\s'\"@]+@")
KNOWN_TOKEN = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|xox[bap]-[\w-]{10,}|AKIA[A-Z0-9]{16})"
)
BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
SECRET_NAME = (
    r"[\w-]*(?:api[-_]?key|secret[-_]?key|access[-_]?key|(?:access|auth|api|hf|bearer|session|refresh|secret)[-_]?token|"
    r"secret|password|passwd|authorization|credentials?|cookie)"
)
ASSIGNED_SECRET = re.compile(
    rf"((?<![\w-]){SECRET_NAME}['\"]?\s*[:=]\s*['\"]?)[^\s,'\"}}\]&;]+", re.IGNORECASE
)
OPTION_SECRET = re.compile(
    rf"((?<![\w-])--{SECRET_NAME}(?:\s+|['\"],\s*['\"]))[^\s'\"]+", re.IGNORECASE
)
SECRET_KEY = re.compile(rf"(?:{SECRET_NAME}|token|[\w-]*x-[\w-]*key)", re.IGNORECASE)
SECRET_VARIABLE = re.compile(r"(_|^)(TOKEN|KEY|SECRET|PASSWORD)$")

MAX_MESSAGE = 1500
"""Characters of a message; a longer one loses its middle."""
CONTROL_SEQUENCE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)
"""Controls but tab and line break: C0 with ESC and CR, C1 with CSI and OSC, and the characters
that turn or break lines.
"""


def mask_secrets(text: str) -> str:
    """Return a text without passwords in addresses, known tokens, named keys, and secrets of the
    environment.
    """
    text = URL_PASSWORD.sub(rf"\1{MASK}@", text)
    text = BEARER.sub(rf"\1 {MASK}", KNOWN_TOKEN.sub(MASK, text))
    text = OPTION_SECRET.sub(rf"\1{MASK}", ASSIGNED_SECRET.sub(rf"\1{MASK}", text))
    for value in list_environment_secrets():
        text = text.replace(value, MASK)
    return text


def list_environment_secrets() -> list[str]:
    """Return the values of this process's variables that are named as tokens, keys, secrets or
    passwords.
    """
    return [
        value
        for name, value in os.environ.items()
        if SECRET_VARIABLE.search(name) and len(value) >= MIN_SECRET
    ]


def mask_settings(value: Any) -> Any:
    """Return settings for a file: texts without secrets, and the values of keys that name a
    secret masked.
    """
    if isinstance(value, Mapping):
        return {
            key: MASK
            if isinstance(entry, str) and entry and SECRET_KEY.fullmatch(str(key))
            else mask_settings(entry)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [mask_settings(entry) for entry in value]
    return mask_secrets(value) if isinstance(value, str) else value


def escape_controls(text: str) -> str:
    """Return a text whose control characters are visible, as \\x1b; tabs and line breaks stay."""
    return CONTROL_SEQUENCE.sub(lambda match: _escape(ord(match[0])), text.replace("\r\n", "\n"))


def clean_line(text: str) -> str:
    """Return a message as one line: without secrets, with visible control characters and line
    breaks, and without the middle of a very long one, so that no value of a file can imitate other
    lines or fill a terminal."""
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} .. {text[-MAX_MESSAGE // 2 :]}"
    return escape_controls(mask_secrets(text)).replace("\n", "\\n").replace("\t", "\\t")


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def clean_text(text: str) -> str:
    """Return a text as it is printed: without secrets and with visible control characters."""
    return escape_controls(mask_secrets(text))

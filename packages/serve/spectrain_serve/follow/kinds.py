"""Kinds of traffic: by a header, or by what a prompt template leaves equal in every prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

KIND_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
OTHER = "other"
"""The kind of all traffic beyond the number of kinds that are distinguished."""
PREFIX_CHARACTERS = 16
"""Longest first word of a text prompt that its template is recognized by."""
PREFIX_TOKENS = 4
SYSTEM_CHARACTERS = 2000


class KindRegistry:
    """Names the kind of every request; memory for names is bounded."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.names: set[str] = set()

    def classify(self, body: Mapping[str, Any], header: str | None) -> str:
        """Return the kind of a request: what its header says or, without one, its prompt
        template.
        """
        name = (
            header
            if header is not None and KIND_NAME.fullmatch(header)
            else describe_template(body)
        )
        return self.register(name)

    def register(self, name: str) -> str:
        """Return a kind's name, or "other" where the limit of kinds is reached."""
        if name not in self.names:
            if len(self.names) >= self.limit:
                return OTHER
            self.names.add(name)
        return name


def describe_template(body: Mapping[str, Any]) -> str:
    """Return a name for the prompt template of a request: a hash, so that no text of a prompt is
    shown.
    """
    messages = body.get("messages")
    prompt = body.get("prompt")
    if isinstance(messages, list):
        first = messages[0] if messages and isinstance(messages[0], dict) else {}
        system = (
            str(first.get("content"))[:SYSTEM_CHARACTERS]
            if first.get("role") in ("system", "developer")
            else ""
        )
        return (
            f"chat-{hash_pattern(system)}"
            if system
            else "chat" + "-tools" * bool(body.get("tools"))
        )
    if isinstance(prompt, list):
        return f"tokens-{hash_pattern(' '.join(map(str, prompt[:PREFIX_TOKENS])))}"
    words = str(prompt)[:SYSTEM_CHARACTERS].split(maxsplit=1)
    return f"text-{hash_pattern(words[0][:PREFIX_CHARACTERS] if words else '')}"


def hash_pattern(text: str) -> str:
    """Return a short hash of a text in which numbers, such as dates, count as equal."""
    pattern = re.sub(r"\d+", "0", text)
    return blake2b(pattern.encode(errors="replace"), digest_size=4).hexdigest()

"""Generated answers taken apart: reasoning, content and tool calls, as the chat template writes
them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .chat_template import TAG, ChatTemplate, Kind, Message

ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def parse_answer(
    template: ChatTemplate, text: str, opening: str, tools: list[dict[str, Any]] | None
) -> Message:
    """Return the message of an answer that was generated behind the text `opening`, without its end
    of turn.

    Tool calls are read in any of the forms that templates write: objects with a name and arguments,
    or a tool's name with an object or with <arg_key> and <arg_value>. Calls that cannot be read
    stay in the content, as they were written.
    """
    markers = template.markers
    first = markers.last_kind(opening[-200:]) if markers.reasoning else "content"
    parts: dict[Kind, str] = {"content": "", "reasoning": "", "tool_calls": ""}
    for begin, end, kind in markers.split_kinds(text, 0, len(text), first):
        parts[kind] += text[begin:end]
    message: Message = {"role": "assistant", "content": parts["content"]}
    if parts["reasoning"]:
        reasoning = (
            parts["reasoning"]
            .removesuffix(markers.content or "")
            .removeprefix(markers.reasoning or "")
        )
        message["reasoning_content"] = TAG.sub("", reasoning).strip()
        # What stands before the reasoning is the header of its channel.
        message["content"] = (
            TAG.sub("", parts["content"])
            if TAG.sub("", parts["content"]).strip() == ""
            else parts["content"]
        )
        message["content"] = message["content"].lstrip("\n")
    if parts["tool_calls"]:
        calls = parse_tool_calls_text(parts["tool_calls"], tools)
        if calls:
            message["tool_calls"] = calls
            message["content"] = message["content"].rstrip("\n")
        else:
            message["content"] += parts["tool_calls"]
    return message


def parse_tool_calls_text(text: str, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tool calls in a text; none where they cannot be read."""
    objects = list(_find_objects(text))
    calls = [
        (call["name"], call.get("arguments", call.get("parameters", {})))
        for _, call in objects
        if "name" in call
    ]
    if not calls:
        calls = _calls_by_name(text, objects, tools or [])
    readable = [
        (name, arguments)
        for name, arguments in calls
        if isinstance(name, str) and isinstance(arguments, dict)
    ]
    return [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in readable
    ]


def _find_objects(text: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the JSON objects of a text with where each begins; those inside of others are left
    out.
    """
    decoder = json.JSONDecoder()
    objects = []
    at = 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        # A model may write nestings and numbers without end.
        except (ValueError, RecursionError):
            at += 1
            continue
        objects.append((at, value))
        at = end
    return objects


def _calls_by_name(
    text: str, objects: list[tuple[int, dict[str, Any]]], tools: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """Return calls whose tool is named before its arguments."""
    names = sorted({tool["function"]["name"] for tool in tools}, key=len, reverse=True)
    if not names:
        return []
    calls = []
    mentions = list(re.finditer(rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)", text))
    for number, mention in enumerate(mentions):
        end = mentions[number + 1].start() if number + 1 < len(mentions) else len(text)
        inside = [value for begin, value in objects if mention.end() <= begin < end]
        pairs = {
            key: _parse_value(value) for key, value in ARGUMENT.findall(text[mention.end() : end])
        }
        if inside or pairs:
            calls.append((mention[1], inside[0] if inside else pairs))
    return calls


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

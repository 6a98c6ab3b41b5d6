"""Whether a server renders messages to the token ids that the run's chat template gives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.data.chat import tokenize_prompt
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.messages import Conversation
from spectrain.errors import UserError
from spectrain.eval.identity import first_difference
from spectrain.eval.prompts import Prompt
from spectrain.models.target import Target

from ..servers.base import CompletionRequest, Server
from ..servers.errors import ServerError

# Prompts that are sent as messages.
NUM_CHECKED = 4


@dataclass(frozen=True)
class TemplateCheck:
    """How many prompts, sent as messages, a server renders to the ids of the run's template."""

    checked: int
    equal: int
    # Smallest position of a token that differs; None where all are equal.
    first_difference: int | None = None
    # Arguments of the chat template with which the run's own template gives the server's ids; None
    # if none was found.
    server_arguments: dict[str, Any] | None = None
    # Arguments that the run's prompts are rendered with.
    run_arguments: dict[str, Any] | None = None


async def check_template(
    server: Server, prompts: Sequence[Prompt], target: Target
) -> TemplateCheck | None:
    """Send a few prompts as messages and compare their ids; None where the server does not give
    the ids of prompts.
    """
    if not target.template.exists:
        return None
    simple = [prompt for prompt in prompts if prompt.is_simple][:NUM_CHECKED]
    conversations = [prompt.continue_with([]) for prompt in simple]
    try:
        requests = [
            server.complete(CompletionRequest(conversation, 1)) for conversation in conversations
        ]
        completions = await asyncio.gather(*requests)
    except (ServerError, UserError):
        # The server answers token ids alone.
        return None
    pairs = [
        (chat, answer.prompt_ids)
        for chat, answer in zip(conversations, completions)
        if answer.prompt_ids is not None
    ]
    if not pairs:
        return None
    # The server prints the real date.
    template = target.template.with_clock()
    own = [tokenize_prompt(template, chat) for chat, _ in pairs]
    differences = [
        first_difference(ids, served) for ids, (_, served) in zip(own, pairs) if served is not None
    ]
    differing = [position for position in differences if position is not None]
    arguments = dict(target.template.arguments)
    return TemplateCheck(
        len(pairs),
        len(pairs) - len(differing),
        min(differing, default=None),
        find_arguments(target, [(chat, ids) for chat, ids in pairs if ids is not None])
        if differing
        else None,
        arguments,
    )


def find_arguments(
    target: Target, pairs: Sequence[tuple[Conversation, list[int]]]
) -> dict[str, Any] | None:
    """Return the template arguments that give the server's ids; None where no candidate does."""
    names = [
        name
        for name in ("enable_thinking", "thinking", "reasoning_effort")
        if target.template.reads(name)
    ]
    values: dict[str, tuple[Any, ...]] = {"reasoning_effort": ("low", "medium", "high")}
    candidates: list[dict[str, Any]] = [{}]
    candidates += [{name: value} for name in names for value in values.get(name, (True, False))]
    for arguments in candidates:
        template = ChatTemplate(target.tokenizer, arguments, reads_clock=True)
        if all(tokenize_prompt(template, chat) == ids for chat, ids in pairs):
            return arguments
    return None

"""Recorded conversations as token sequences: the server's own ids where it gave them, or else
those of the chat template.
"""

from __future__ import annotations

from spectrain.data.chat import Example, tokenize_prompt
from spectrain.data.messages import Conversation
from spectrain.data.template_arguments import check_template_arguments
from spectrain.errors import UserError
from spectrain.models.target import Target

from .traffic import RecordedConversation


def make_example(conversation: RecordedConversation, target: Target) -> Example | None:
    """Return the tokens of a conversation, with loss on its answer; None for one that cannot be
    used.
    """
    try:
        prompt, answer = tokenize_conversation(conversation, target)
        tokens = prompt + answer
        vocabulary = target.head.num_embeddings
        is_inside = all(isinstance(token, int) and 0 <= token < vocabulary for token in tokens)
    except (UserError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not prompt or len(answer) < 2 or not is_inside or len(tokens) > target.max_length:
        return None
    return Example(tokens, [False] * len(prompt) + [True] * len(answer))


def tokenize_conversation(
    conversation: RecordedConversation, target: Target
) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt and of its answer."""
    request = conversation.request
    prompt = conversation.prompt_ids
    if prompt is None and "messages" in request:
        arguments = check_template_arguments(
            request.get("chat_template_kwargs"), "recorded request"
        )
        prompt = tokenize_prompt(
            target.template,
            Conversation(request["messages"], request.get("tools"), None, arguments),
        )
    elif prompt is None:
        text = request["prompt"]
        # Engines add a start token to a text prompt, unless the request says otherwise.
        special = bool(request.get("add_special_tokens", True))
        prompt = (
            text
            if isinstance(text, list)
            else target.tokenizer(text, add_special_tokens=special)["input_ids"]
        )
    answer = conversation.answer_ids
    if answer is None:
        answer = target.tokenizer(conversation.answer, add_special_tokens=False)["input_ids"]
    return [*prompt], [*answer]

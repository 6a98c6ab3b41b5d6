"""Arguments of chat templates: which names data, requests and settings may give, and which
belong to the renderer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from spectrain.errors import UserError

RESERVED_NAMES = frozenset((
    "chat_template", "messages", "conversation", "conversations", "tools", "documents", "tokenize",
    "return_dict",
    "add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "processor_kwargs", "raise_exception", "strftime_now",
    *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES,
))  # fmt: skip
"""Names that decide which template is rendered, or what comes back, in any version of
`transformers`, and the functions and special tokens that the renderer itself gives a template.
"""


@cache
def reserved_names() -> frozenset[str]:
    """Return the names of the renderer's own parameters; everything else reaches the template as
    a variable.
    """
    functions = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    parameters = [
        parameter
        for function in functions
        for parameter in inspect.signature(function).parameters.values()
    ]
    return RESERVED_NAMES | {
        entry.name for entry in parameters if entry.kind is not inspect.Parameter.VAR_KEYWORD
    }


def check_template_arguments(arguments: Any, location: str) -> dict[str, Any]:
    """Return the arguments that a row, a request or a setting gives a chat template; a UserError
    names one that it may not.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise UserError(
            f'{location}: chat_template_kwargs is no object; write {{"enable_thinking": true}}'
        )
    reserved = next((str(name) for name in arguments if name in reserved_names()), None)
    if reserved is not None:
        raise UserError(
            f"{location}: chat_template_kwargs.{reserved} is an argument of the renderer and no "
            "variable of a chat template; leave it out, or give a template with "
            "target.chat_template=FILE"
        )
    return dict(arguments)

"""Chat templates with the behaviour of the families that people run, and tokenizers that have
them.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import spectrain
from spectrain.data.chat_template import ChatTemplate

SOURCES = {
    path.stem: path.read_text()
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|>|<s>|</s>|<bos>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]|<sop>|\[gMASK\]"
)


@cache
def base_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        Path(spectrain.__file__).parent / "data" / "tiny"
    )
    return tokenizer


@cache
def make_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return tiny's tokenizer with the template of a family and its special tokens; `base` has
    no template.
    """
    tokenizer = copy.deepcopy(base_tokenizer())
    source = SOURCES.get(name)
    if source is not None:
        special = [
            AddedToken(token, special=True) for token in sorted(set(SPECIAL.findall(source)))
        ]
        tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = source
    return tokenizer


def make_template(name: str, **arguments: object) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(name), arguments)

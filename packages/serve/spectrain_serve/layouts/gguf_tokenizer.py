"""The tokenizer in a GGUF file: copied from the target's own GGUF file, or made from its
tokenizer in transformers format.
"""

from __future__ import annotations

import json
from typing import Any

import gguf

from spectrain.errors import UserError
from spectrain.export.targets import TargetFiles

from .gguf_file import open_gguf, read_keys

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    (("ByteLevel", True),): "gpt-2",
    (("Digits", True), ("ByteLevel", True)): "smollm",
    (
        ("Split", rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{PUNCTUATION}"),
        ("ByteLevel", False),
    ): "llama-bpe",
    (("Split", rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{PUNCTUATION}"), ("ByteLevel", False)): "qwen2",
}
"""Steps that split a text before the merges, each with its setting -> llama.cpp's name of them."""
NAMED_TOKENS = ("bos", "eos", "unk", "pad")
GGUF_TOKEN_NAMES = {"unk": "unknown", "pad": "padding"}


def tokenizer_keys(target: TargetFiles) -> dict[str, Any]:
    """Return the keys of a target's tokenizer; raise UserError where llama.cpp has no name for
    its kind.
    """
    if target.gguf_file is not None:
        keys = read_keys(open_gguf(target.gguf_file), with_vocabulary=True)
        return {key: value for key, value in keys.items() if key.startswith("tokenizer.")}
    tokenizer = target.tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    pre_tokenizer = find_pre_tokenizer(backend)
    if pre_tokenizer is None:
        raise UserError(
            f"target {target.reference}: llama.cpp's kind of its tokenizer is not known here; "
            "give the target as a GGUF file, target=hf target.model=FILE.gguf, from which the "
            "tokenizer is copied"
        )
    tokens, kinds = list_tokens(tokenizer, target.vocab_size)
    named = {name: getattr(tokenizer, f"{name}_token_id") for name in NAMED_TOKENS}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in backend["model"]["merges"]
        ],
        **{
            f"tokenizer.ggml.{GGUF_TOKEN_NAMES.get(name, name)}_token_id": i
            for name, i in named.items()
            if i is not None
        },
        "tokenizer.ggml.add_bos_token": tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id],
        **(
            {"tokenizer.chat_template": tokenizer.chat_template}
            if isinstance(tokenizer.chat_template, str)
            else {}
        ),
    }


def find_pre_tokenizer(backend: dict[str, Any]) -> str | None:
    """Return llama.cpp's name for the way in which a byte-level BPE splits texts; None for any
    other tokenizer.
    """
    if backend["model"].get("type") != "BPE" or backend.get("pre_tokenizer") is None:
        return None
    step = backend["pre_tokenizer"]
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    return PRE_TOKENIZERS.get(tuple(describe_step(step) for step in steps))


def describe_step(step: dict[str, Any]) -> tuple[str, Any]:
    """Return the type of a step that splits texts, and the setting that tells its variants
    apart.
    """
    settings = {
        "ByteLevel": step.get("use_regex", True) and not step.get("add_prefix_space"),
        "Digits": step.get("individual_digits"),
        "Split": (step.get("pattern") or {}).get("Regex"),
    }
    return step["type"], settings.get(step["type"])


def list_tokens(tokenizer: Any, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the text and the kind of every row of the embedding; rows without a token are
    unused tokens.
    """
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [int(gguf.TokenType.UNUSED)] * vocab_size
    for text, i in tokenizer.get_vocab().items():
        if i < vocab_size:
            tokens[i], kinds[i] = text, int(gguf.TokenType.NORMAL)
    for i, added in tokenizer.added_tokens_decoder.items():
        if i < vocab_size:
            kinds[i] = int(gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED)
    return tokens, kinds

"""`spectrain data index`: the answers of a data set as a store that drafter=retrieval and drafter=hybrid copy from."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from spectrain.errors import UserError
from spectrain.provenance import provenance
from spectrain.settings.build import build

from .datastore import LONGEST, vocabulary_hash, write_store


def index(config: DictConfig) -> None:
    """Write the store, and say what is in it."""
    if not config.out:
        raise UserError("out: say where the store goes, as in out=DIR")
    if Path(config.out).exists():
        raise UserError(f"out={config.out}: it is there already; name a new folder, or delete it")
    data: Any = build(config.data)
    tokenizer: Any = build(config.target).tokenizer
    conversations = data.conversations()
    dataset = data.dataset(tokenizer)
    texts = [example.tokens[max(0, example.mask.index(True) - LONGEST) :] for example in dataset.examples]
    said: dict[str, list[str]] = {"user": [], "assistant": []}
    for messages in conversations:
        for message in messages:
            said.get(message["role"], []).append(message["content"])
    facts = {
        "data": data.name,
        "fingerprint": dataset.fingerprint,
        "conversations": len(conversations),
        "tokenizer": vocabulary_hash(tokenizer),
        **provenance(),
    }
    size = write_store(Path(config.out), texts, said["user"], said["assistant"], facts)
    print(f"{size} tokens of {len(conversations)} conversations, {data.name}, written to {config.out}")

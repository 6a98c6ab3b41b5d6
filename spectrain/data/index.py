"""`spectrain data index`: writes the answers of a data set as a store, from which drafter=retrieval and drafter=hybrid
copy."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from spectrain.config.build import build
from spectrain.errors import UserError
from spectrain.provenance import collect_provenance

from .dataset import Dataset
from .datastore import MAX_MATCH, hash_vocabulary, write_store
from .images import content_text
from .readers import ConversationReader


def index_command(config: DictConfig) -> None:
    """Write the store and print its size."""
    if not config.out:
        raise UserError("out: say where the store goes, as in out=DIR")
    if Path(config.out).exists():
        raise UserError(f"out={config.out}: it is there already; name a new folder, or delete it")
    data: ConversationReader = build(config.data)
    target: Any = build(config.target)
    tokenizer = target.tokenizer
    size = index_dataset(data, data.make_dataset(target.template, target.vision), tokenizer, Path(config.out))
    print(f"{size} tokens of {len(data.load_conversations())} conversations, {data.name}, written to {config.out}")


def index_dataset(data: ConversationReader, dataset: Dataset, tokenizer: Any, folder: Path) -> int:
    """Write the answers of `data`, tokenized in `dataset`, as a store, and return the number of its tokens."""
    texts = [example.tokens[max(0, example.mask.index(True) - MAX_MATCH) :] for example in dataset.examples]
    texts_by_role: dict[str, list[str]] = {"user": [], "assistant": []}
    for conversation in data.load_conversations():
        for message in conversation.messages:
            texts_by_role.get(message["role"], []).append(content_text(message["content"]))
    facts = {
        "data": data.name,
        "fingerprint": dataset.fingerprint,
        "conversations": len(data.load_conversations()),
        "tokenizer": hash_vocabulary(tokenizer),
        **collect_provenance(),
    }
    return write_store(folder, texts, texts_by_role["user"], texts_by_role["assistant"], facts)

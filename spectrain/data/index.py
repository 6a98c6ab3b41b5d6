"""`spectrain data index`: the answers of a data set as a store that drafter=retrieval and drafter=hybrid copy from."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from spectrain.errors import UserError
from spectrain.provenance import provenance
from spectrain.settings.build import build

from .dataset import Dataset
from .datastore import LONGEST, vocabulary_hash, write_store
from .images import text_of
from .readers import Data


def index(config: DictConfig) -> None:
    """Write the store, and say what is in it."""
    if not config.out:
        raise UserError("out: say where the store goes, as in out=DIR")
    if Path(config.out).exists():
        raise UserError(f"out={config.out}: it is there already; name a new folder, or delete it")
    data: Data = build(config.data)
    target: Any = build(config.target)
    tokenizer = target.tokenizer
    size = index_data(data, data.dataset(tokenizer, target.sight), tokenizer, Path(config.out))
    print(f"{size} tokens of {len(data.conversations())} conversations, {data.name}, written to {config.out}")


def index_data(data: Data, dataset: Dataset, tokenizer: Any, folder: Path) -> int:
    """Write the answers of `data`, which are cut in `dataset`, as a store; the number of its tokens."""
    texts = [example.tokens[max(0, example.mask.index(True) - LONGEST) :] for example in dataset.examples]
    said: dict[str, list[str]] = {"user": [], "assistant": []}
    for messages in data.conversations():
        for message in messages:
            said.get(message["role"], []).append(text_of(message["content"]))
    facts = {
        "data": data.name,
        "fingerprint": dataset.fingerprint,
        "conversations": len(data.conversations()),
        "tokenizer": vocabulary_hash(tokenizer),
        **provenance(),
    }
    return write_store(folder, texts, said["user"], said["assistant"], facts)

"""`spectrain data index`: writes the answers of a data set as a store, from which drafter=retrieval
and drafter=hybrid copy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.copying.suffixes import MAX_MATCH
from spectrain.errors import UserError
from spectrain.files import atomic_write, require_writable
from spectrain.output.streams import print_text
from spectrain.output.verbosity import print_json
from spectrain.provenance import collect_provenance

from .chat import Example
from .dataset import Dataset
from .datastore import hash_vocabulary, write_store
from .images import content_text
from .messages import Conversation
from .readers import ConversationReader


def index_command(target: GroupSpec, data: GroupSpec, out: str | None) -> None:
    """Write the store and print its size."""
    if not out:
        raise UserError("out: say where the store goes, as in out=DIR")
    require_writable(Path(out), "out")
    if Path(out).exists():
        raise UserError(f"out={out}: it is there already; name a new folder, or delete it")
    reader: ConversationReader = data.build()
    reader.require_all("a store")
    model: Any = target.build()
    dataset = reader.make_dataset(model.template, model.vision)
    with atomic_write(Path(out), folder=True, is_new=True) as scratch:
        size = index_dataset(reader, dataset, model.tokenizer, scratch)
    count = len(reader.load_conversations())
    print_json({"out": str(out), "data": reader.name, "conversations": count, "tokens": size})
    print_text(f"{size} tokens of {count} conversations, {reader.name}, written to {out}")


def index_dataset(data: ConversationReader, dataset: Dataset, tokenizer: Any, folder: Path) -> int:
    """Write the answers of `data`, tokenized in `dataset`, as a store into an empty folder;
    return the number of its tokens.
    """
    texts = [
        example.tokens[max(0, example.mask.index(True) - MAX_MATCH) :]
        for example in dataset.examples
    ]
    texts_by_role: dict[str, list[str]] = {"user": [], "assistant": []}
    conversations: Sequence[Conversation | Example] = data.load_conversations()
    for conversation in conversations:
        if isinstance(conversation, Example):
            context = [
                token
                for token, supervised in zip(conversation.tokens, conversation.mask)
                if not supervised
            ]
            texts_by_role["user"].append(tokenizer.decode(context, skip_special_tokens=True))
            continue
        for message in conversation.messages:
            texts_by_role.get(message["role"], []).append(content_text(message["content"]))
    facts = {
        "data": data.name,
        "fingerprint": dataset.fingerprint,
        "conversations": len(conversations),
        "tokenizer": hash_vocabulary(tokenizer),
        **collect_provenance(),
    }
    return write_store(folder, texts, texts_by_role["user"], texts_by_role["assistant"], facts)

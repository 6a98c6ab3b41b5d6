"""Valid items of a recommender: codes of several tokens, in a trie that restricts what may be
generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spectrain.errors import UserError
from spectrain.files import read_text


class ItemTrie:
    """The codes of all items as a tree of tokens. An answer is one item; after its last token
    only a stop token may follow.
    """

    def __init__(self, items: Iterable[Sequence[int]], stop_ids: Iterable[int] = ()) -> None:
        self.root: dict[int, Any] = {}
        self.stop_ids = sorted(stop_ids)
        self.longest = 0
        for item in items:
            node = self.root
            for token in item:
                node = node.setdefault(token, {})
            self.longest = max(self.longest, len(item))

    def __call__(self, answer: Sequence[int]) -> list[int]:
        """Return the tokens that may follow an answer so far."""
        node = self.root
        for token in answer:
            if token not in node:
                return self.stop_ids or [0]
            node = node[token]
        return sorted(node) or self.stop_ids or [0]


def read_items(path: str, stop_ids: Iterable[int]) -> ItemTrie:
    """Read the codes of items from a file of one JSON list of token ids per line; raise
    UserError for anything else.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(
            f"eval.items={path}: there is no such file; give a file of one JSON list of token ids "
            "per line"
        )
    items = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            item = None
        if (
            not isinstance(item, list)
            or not item
            or not all(isinstance(token, int) for token in item)
        ):
            raise UserError(
                f"eval.items={path}, line {number}: it is no JSON list of token ids, such as [17, "
                "40, 66]"
            )
        items.append(item)
    if not items:
        raise UserError(f"eval.items={path}: the file is empty; give one item per line")
    return ItemTrie(items, stop_ids)

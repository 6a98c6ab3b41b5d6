"""The target's own bigrams (N-Grammys, Stewart et al., 2024, arXiv 2411.03786).

Shapes: V vocabulary, k retained tokens, B texts of one token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spectrain.config.plain_files import read_json_object
from spectrain.config.values import Count
from spectrain.data.datastore import hash_vocabulary, load_array
from spectrain.drafters.layers.copies import CopySource
from spectrain.errors import UserError
from spectrain.files import make_folder_once
from spectrain.models.target import Target

from .proposals import TableDrafter, TableTree

FACTS_FILE = "table.json"
WRITE_ANEW = "delete the folder, and the next run writes it anew"
# Texts of one token that the target runs at once: logits of 64 texts take 12 MB at 50,000 tokens.
BATCH = 64


class BigramTable:
    """The `top` most likely tokens after every text of one token, by the target, with their
    probabilities.
    """

    def __init__(self, tokens: np.ndarray, probs: np.ndarray) -> None:
        # [V, k] int32 and float32
        self.tokens, self.probs = tokens, probs

    @classmethod
    def from_target(cls, target: Target, top: int) -> BigramTable:
        """Run every token alone: V forwards of one token, in batches."""
        tokens = []
        probs = []
        with torch.inference_mode():
            for batch in torch.arange(target.head.vocab_size, device=target.device).split(BATCH):
                final = target.features(batch[:, None], ("final",)).at_layer("final")[:, 0]
                best = target.head.logits(final).softmax(-1).topk(min(top, target.head.vocab_size))
                tokens.append(best.indices.int().cpu().numpy())
                probs.append(best.values.float().cpu().numpy())
        return cls(np.concatenate(tokens), np.concatenate(probs))

    @classmethod
    def load_or_make(cls, folder: str | None, target: Target, top: int) -> BigramTable:
        """Load the table of this target from a folder, or compute it and save it there; null
        computes it.
        """
        if folder is None:
            return cls.from_target(target, top)
        path = Path(folder).expanduser()
        facts = describe_target(target, top)

        def write_table(scratch: Path) -> None:
            table = cls.from_target(target, top)
            np.save(scratch / "tokens.npy", table.tokens)
            np.save(scratch / "probs.npy", table.probs)
            (scratch / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n")

        make_folder_once(path, FACTS_FILE, write_table)
        if read_json_object(path / FACTS_FILE) != facts:
            raise UserError(
                f"drafter.table={folder}: it was made with another target or drafter.top; name "
                "another folder"
            )
        tokens, probs = (
            _load_array(path / name, kind)
            for name, kind in (("tokens.npy", "iu"), ("probs.npy", "f"))
        )
        in_vocabulary = tokens.size == 0 or (
            tokens.min() >= 0 and tokens.max() < target.head.vocab_size
        )
        rows = target.head.vocab_size
        fits = tokens.shape == probs.shape == (rows, min(top, rows))
        if not fits or not in_vocabulary or not np.isfinite(probs).all():
            raise UserError(f"{path}: its arrays do not belong together; {WRITE_ANEW}")
        return cls(tokens, probs)


def _load_array(path: Path, kinds: str) -> np.ndarray:
    """Read an array of a saved table; raise a UserError where it has another type, or cannot be
    read.
    """
    array = load_array(path, WRITE_ANEW)
    if array.dtype.kind not in kinds:
        raise UserError(
            f"{path}: it cannot be read (its numbers are of the type {array.dtype}); {WRITE_ANEW}"
        )
    return np.array(array)


def describe_target(target: Target, top: int) -> dict[str, Any]:
    """Return what a saved table depends on."""
    size = {
        "vocab_size": target.head.vocab_size,
        "layers": target.num_layers,
        "width": target.width,
    }
    return {
        "target": target.name,
        "tokenizer": hash_vocabulary(target.tokenizer),
        "top": top,
        **size,
    }


class Bigrams(TableDrafter):
    """Drafts from the target's predictions after single tokens, merged with copies of the text.

    The `top` likeliest tokens after the root, each followed by the likeliest token after the last
    one, and so on: the paper's extended bigrams. With copies they are its mixed strategy; here one
    tree takes the place of a batch of drafts, and learned probabilities take the place of the order
    in which the paper fills the batch.
    """

    def __init__(
        self,
        target: Target,
        # Folder of the saved table, which is written where it is missing; null computes the table
        # for every run.
        table: str | None = None,
        # Number of tokens after the root that the table proposes.
        top: Count = 8,
        # Whether copies of the text, as of drafter=retrieval, join the table's tokens.
        copies: bool = True,
        # Folder that spectrain data index wrote, to copy from; null copies from the current text
        # only.
        store: str | None = None,
        # Largest number of final tokens of the text that are matched in the text itself.
        longest: int = 6,
        # Largest number of matching positions that are read per source.
        matches: int = 200,
    ) -> None:
        super().__init__(CopySource.open(store, target.tokenizer, longest, matches), copies)
        self.target_table = BigramTable.load_or_make(table, target, top)

    def propose_tree(self, text: list[int], depth: int, budget: int) -> TableTree:
        table = self.target_table
        tree = TableTree.from_root(text[-1])
        for token, probability in zip(
            table.tokens[text[-1]].tolist(), table.probs[text[-1]].tolist()
        ):
            node = tree.add_node(0, token, probability)
            for _ in range(depth - 1):
                node = tree.add_node(
                    node, int(table.tokens[token, 0]), float(table.probs[token, 0])
                )
                token = tree.tokens[node]
        return tree

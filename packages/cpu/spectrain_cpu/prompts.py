"""Prompts and further tokens of texts, each with the bits that it has alone. Shapes: B texts, T
tokens, N further tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.models.attention import layer_attention
from spectrain.models.features import Features, Layer
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree

from .forwards import runs_rows_alone


def runs_texts_alone(target: Target) -> bool:
    """Return whether texts of different lengths run without padding, each with the bits that it has
    alone.
    """
    architecture = target.architecture
    if target.sharding != "none" or not target.has_layers or target.device.type != "cpu":
        return False
    if architecture.output_tuple_size or architecture.kv_shapes is not None:
        return False
    return architecture.attention_ranges is None and runs_rows_alone(
        target.decoder, target.layers, layer_attention
    )


def prefill_each(
    target: Target, tokens: Tensor, lengths: Tensor, cache: TreeCache, layers: tuple[Layer, ...]
) -> Features | None:
    """Run the prompts of `Target.prefill` one after the other, each in a cache of its own whose
    slots are copied, so that a prompt has the bits of its later rows: products over many padded
    rows round otherwise. None where rows depend on each other.
    """
    if not cache.can_lend_storage or not runs_texts_alone(target):
        return None
    parts = []
    longest = tokens.shape[1]
    for row, length in enumerate(lengths.tolist()):
        alone = target.new_cache(1, length)
        parts.append(
            target.prefill(tokens[row : row + 1, :length], lengths[row : row + 1], alone, layers)
        )
        assert alone.storage is not None
        *_, num_heads, size = alone.storage.shape
        slots = cache.lend_storage(longest, num_heads, size, alone.storage.dtype)
        slots[:, :, row, :length] = alone.storage[:, :, 0, :length]
        # Layers refer to the cache, so it would keep its memory until the next collection of
        # garbage.
        alone.storage = None
    cache.add_uncommitted(longest)
    cache.commit(None, lengths)
    hidden = torch.cat(
        [F.pad(part.hidden, (0, 0, 0, 0, 0, longest - part.hidden.shape[1])) for part in parts]
    )
    logits = torch.cat([part.logits for part in parts if part.logits is not None])
    return Features(tokens, parts[0].layers, hidden, logits)


def extend_text(
    target: Target, tokens: Tensor, cache: TreeCache, layers: tuple[Layer, ...] = ()
) -> Features:
    """Run further tokens [B, N] of texts behind the committed ones, and commit them. Return
    features of the layers, and logits [B, 1, V] after the last token.
    """
    with_final = layers if "final" in layers else (*layers, "final")
    chain = TokenTree.from_chain(tokens)
    positions = cache.lengths[:, None] + chain.depths
    features = target.run(
        tokens,
        ForwardPlan(layers=with_final, positions=positions, mask=chain.ancestors, cache=cache),
    )
    cache.commit(None, torch.full_like(cache.lengths, tokens.shape[1]))
    last = features.at_layer("final")[:, -1:]
    return Features(tokens, features.layers, features.hidden, target.head.logits(last))

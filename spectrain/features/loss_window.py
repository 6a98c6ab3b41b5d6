"""Windows of the loss: only some consecutive tokens of a text carry loss, with everything before
them as context.

Attention is causal, so nothing after a window matters to its loss: the batch ends there. Shapes: B
batch, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from spectrain.randomness import LOSS_WINDOW, sequence_generator

from .batch import Batch

TokenRange = tuple[int, int]
"""The first token of a window and the token after it, in a text."""


def sample_loss_windows(batch: Batch, num_tokens: int, seed: int, step: int) -> Batch:
    """Return the batch with the loss of a random window of `num_tokens` in each text. Tokens and
    step key the draw.
    """
    return keep_loss_windows(
        batch,
        [
            sample_window(mask, num_tokens, sequence_generator(LOSS_WINDOW, seed, tokens, step))
            for tokens, mask in batch.split_documents()
        ],
    )


def sample_window(mask: Tensor, num_tokens: int, generator: torch.Generator) -> TokenRange:
    """Draw a window of a text with the loss mask [T], uniformly from those that hold a supervised
    token.

    A window may reach beyond the ends of the text, so that every supervised token has the same
    chance.
    """
    supervised = mask.nonzero()[:, 0].tolist()
    if not supervised:
        return 0, min(num_tokens, len(mask))
    first = supervised[0]
    end = supervised[-1] + 1
    if num_tokens >= end - first:
        return first, end
    starts = torch.arange(first - num_tokens + 1, end)
    counts = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    counted = counts[(starts + num_tokens).clamp(max=end)] - counts[starts.clamp(min=0)]
    starts = starts[counted > 0]
    start = int(starts[torch.randint(len(starts), (), generator=generator)])
    return max(first, start), min(start + num_tokens, end)


def keep_loss_windows(batch: Batch, windows: Sequence[TokenRange]) -> Batch:
    """Return the batch with loss in these windows only, a window for each text, cut after the last
    token of a window.

    It is for batches of plain texts, without replayed drafts.
    """
    assert type(batch) is Batch, "a window is cut from a plain text"
    ends = [end for _, end in windows]
    device = batch.tokens.device
    lengths = None if batch.lengths is None else tuple(ends)
    if batch.lengths is None:
        columns = torch.arange(max(ends), device=device)
        bounds = torch.tensor(windows, device=device)
        inside = (columns >= bounds[:, :1]) & (columns < bounds[:, 1:])
    else:
        starts = accumulate(batch.lengths[:-1], initial=0)
        columns = torch.cat(
            [torch.arange(first, first + end, device=device) for first, end in zip(starts, ends)]
        )
        inside = torch.cat([torch.arange(end, device=device) >= first for first, end in windows])[
            None
        ]
    features = batch.features
    if features is not None:
        features = replace(
            features, tokens=features.tokens[:, columns], hidden=features.hidden[:, columns]
        )
    loss_mask = batch.loss_mask[:, columns] & inside
    return Batch(
        batch.tokens[:, columns], loss_mask, features, lengths=lengths, loss_windows=tuple(windows)
    )

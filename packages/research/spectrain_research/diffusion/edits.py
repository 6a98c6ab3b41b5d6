"""ME-DLM's refinement of a complete answer by minimal edits (Ren et al., 2026, arXiv
2605.09603). Shapes: T tokens.
"""

from __future__ import annotations

import time

import torch

from .decoding import Decoded
from .model import DELETE, INSERT, KEEP, REPLACE, MaskedLM

Edit = tuple[int, int]  # what to do with a token, and the token that is written; 0 where none is


def find_edits(source: list[int], target: list[int]) -> list[Edit]:
    """Return an edit for every token of a source, by the shortest script that turns it into the
    target.

    A source begins with a token that stays, so that an insertion at the start has a place. Where
    the script inserts several tokens after one, or also replaces it, only one of these edits is
    named: the next pass finds the others. Of shortest scripts the one is taken that keeps or
    replaces rather than deletes, and deletes rather than inserts, from the end.
    """
    rows = len(source) + 1
    columns = len(target) + 1
    costs = [[0] * columns for _ in range(rows)]
    for i in range(rows):
        for j in range(columns):
            if not i or not j:
                costs[i][j] = i + j
                continue
            change = costs[i - 1][j - 1] + (source[i - 1] != target[j - 1])
            costs[i][j] = min(change, costs[i - 1][j] + 1, costs[i][j - 1] + 1)
    edits: list[Edit] = [(KEEP, 0)] * len(source)
    i = len(source)
    j = len(target)
    while i and j:
        if costs[i][j] == costs[i - 1][j - 1] + (source[i - 1] != target[j - 1]):
            i = i - 1
            j = j - 1
            if source[i] != target[j]:
                edits[i] = (REPLACE, target[j])
        elif costs[i][j] == costs[i - 1][j] + 1:
            i -= 1
            edits[i] = (DELETE, 0)
        else:
            j -= 1
            # Insertions are found from the last one on, so the one that stays is the first.
            edits[i - 1] = (INSERT, target[j])
    for at in range(i):
        edits[at] = (DELETE, 0)
    return edits


def apply_edits(source: list[int], edits: list[Edit]) -> list[int]:
    """Return the source after its edits."""
    result = []
    for token, (edit, written) in zip(source, edits, strict=True):
        if edit != DELETE:
            result.append(written if edit == REPLACE else token)
        if edit == INSERT:
            result.append(written)
    return result


@torch.inference_mode()
def refine_answer(
    model: MaskedLM, prompt: list[int], decoded: Decoded, num_passes: int, margin: float = 0.0
) -> Decoded:
    """Edit a decoded answer up to `num_passes` times, until a pass changes nothing.

    An edit is made where its probability exceeds that of keeping the token by the factor
    exp(margin). The last token of the prompt takes insertions alone.
    """
    begin = time.perf_counter()
    answer = list(decoded.tokens)
    num_forwards = decoded.num_forwards
    for _ in range(num_passes):
        states = model.run(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 :]
        edit_logits, token_logits = model.edit_logits(states)
        edit_logits[:, KEEP] += margin
        edit_logits[0, [REPLACE, DELETE]] = -torch.inf
        num_forwards += 1
        edits = list(zip(edit_logits.argmax(-1).tolist(), token_logits.argmax(-1).tolist()))
        changed = apply_edits([prompt[-1], *answer], edits)[1:]
        if changed == answer:
            break
        answer = changed
    seconds = decoded.seconds + time.perf_counter() - begin
    return Decoded(
        answer,
        num_forwards,
        decoded.num_rows + num_forwards - decoded.num_forwards,
        decoded.num_steps,
        seconds,
    )

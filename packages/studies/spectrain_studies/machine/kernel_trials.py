"""Trials of all kernels: each runs some on a tiny input and returns their maximum error against
their references. `spectrain doctor` runs them on the user's machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from spectrain.kernels import tree_walks
from spectrain.kernels.add_norm import (
    add_norm,
    add_norm_reference,
    store_states,
    store_states_reference,
)
from spectrain.kernels.append_children import (
    Nodes,
    append_children,
    append_children_reference,
)
from spectrain.kernels.draft_input import (
    DraftedRows,
    InputLayers,
    accepted_input,
    accepted_input_reference,
    node_input,
    node_input_reference,
)
from spectrain.kernels.gated_unit import gated_unit, gated_unit_reference
from spectrain.kernels.kv_append import kv_append, kv_append_reference
from spectrain.kernels.kv_commit import kv_commit, kv_commit_reference
from spectrain.kernels.later_keys import (
    add_later_keys,
    add_later_keys_reference,
    later_gradients,
    later_gradients_reference,
)
from spectrain.kernels.linear_divergence import Projection, argmax_and_log_z, linear_divergence
from spectrain.kernels.norm_gradients import join_norms, join_norms_reference
from spectrain.kernels.rotate_append import rotate_append, rotate_append_reference
from spectrain.kernels.rotate_heads import rotate_heads, rotate_heads_reference
from spectrain.kernels.round_commit import (
    LoggedTrees,
    RoundBuffers,
    Verdicts,
    round_commit,
    round_commit_reference,
)
from spectrain.kernels.token_commit import TextBatch, token_commit, token_commit_reference
from spectrain.kernels.tree_attention import (
    Visibility,
    tree_attention,
    tree_attention_reference,
)
from spectrain.kernels.tree_masks import (
    find_ancestors,
    find_ancestors_reference,
    pack_words,
    pack_words_reference,
)
from spectrain.kernels.tree_recursive import tree_recursive
from spectrain.kernels.tree_selection import (
    select_best,
    select_best_reference,
    select_frontier,
    select_frontier_reference,
)
from spectrain.kernels.tree_verify import tree_greedy, tree_match

# Maximum error of a float32 kernel against its reference; a GPU multiplies in TF32.
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-5}


def try_attention(device: torch.device) -> float:
    q, k, v = (
        torch.randn(2, heads, length, 32, device=device)
        for heads, length in ((4, 5), (2, 14), (2, 14))
    )
    tree = torch.ones(2, 5, 5, dtype=torch.bool, device=device).tril()
    positions = torch.arange(9, 14, device=device).expand(2, -1)
    visibility = Visibility(torch.tensor([9, 6], device=device), 9, tree, positions, positions)
    return max_difference(
        *(attend(q, k, v, visibility, 0.2) for attend in (tree_attention, tree_attention_reference))
    )


def try_verify(device: torch.device) -> float:
    tokens = torch.tensor([[5, 3, 7, 1]], device=device)
    parents = torch.tensor([[-1, 0, 1, 1]], device=device)
    nodes = tree_walks.TreeNodes(tokens, parents, torch.ones_like(tokens, dtype=torch.bool), 2, 2)
    logits = torch.randn(1, 4, 11, device=device)
    logits[0, 0, 3] = logits[0, 1, 1] = 9
    draws = tree_walks.SamplingSpec(
        7, torch.zeros(1, dtype=torch.int64, device=device), torch.arange(4, device=device)[None]
    )
    q = torch.full((1, 4, 11), 1 / 11, device=device)
    pairs = (
        (tree_greedy(nodes, logits), tree_walks.tree_greedy_reference(nodes, logits)),
        (tree_match(nodes, logits, draws), tree_walks.tree_match_reference(nodes, logits, draws)),
        tuple(
            judge(nodes, logits, q, None, False, draws)
            for judge in (tree_recursive, tree_walks.tree_recursive_reference)
        ),
    )
    return max(max_difference(result, other) for pair in pairs for result, other in zip(*pair))


def try_cache(device: torch.device) -> float:
    keys, values = (torch.randn(2, 2, 3, 16, device=device) for _ in "kv")
    lengths, path, counts = (
        torch.tensor(rows, device=device) for rows in ([4, 2], [[0, 2], [0, 1]], [2, 1])
    )
    results = []
    for append, commit in ((kv_append, kv_commit), (kv_append_reference, kv_commit_reference)):
        storage = torch.zeros(1, 2, 2, 12, 2, 16, device=device)
        after = lengths.clone()
        append(storage[0], keys, values, lengths, 0)
        commit(storage, after, path, counts)
        results.append((storage, after))
    return max(max_difference(result, other) for result, other in zip(*results))


def try_texts(device: torch.device) -> float:
    nodes, path = (
        torch.tensor(rows, device=device) for rows in ([[1, 2, 3], [4, 5, 6]], [[0, 2], [0, 1]])
    )
    counts = torch.tensor([2, 1], device=device)
    bonus = path[:, 1] + 6
    true = nodes > 0
    trees = LoggedTrees(nodes, true, nodes > 1)
    results = []
    for commit, end in (
        (token_commit, round_commit),
        (token_commit_reference, round_commit_reference),
    ):
        first, second = (
            TextBatch(nodes.repeat(1, 3), counts + 3, true[:, 0].clone(), counts + 1, bonus[:1])
            for _ in range(2)
        )
        lines = torch.zeros(2, 2, 6, dtype=torch.int64, device=device)
        buffers = RoundBuffers(lines, counts * 0 + 1, path.clone(), counts.clone())
        alone = commit(nodes, path, counts, bonus, first)
        ended = end(nodes, Verdicts(path, counts, bonus), trees, second, buffers)
        tensors = (*alone, *first, *ended, *second, *buffers)
        results.append([tensor for tensor in tensors if tensor is not None])
    return max(max_difference(result, other) for result, other in zip(*results))


def try_divergence(device: torch.device) -> float:
    hidden, weight = (torch.randn(rows, 16, device=device, requires_grad=True) for rows in (6, 40))
    target_log_probs = torch.randn(6, 40, device=device).log_softmax(-1)
    loss = linear_divergence(hidden, Projection(weight), lambda rows: target_log_probs[rows]).loss
    logits = hidden @ weight.T
    plain = torch.nn.functional.kl_div(
        logits.log_softmax(-1), target_log_probs, reduction="sum", log_target=True
    )
    gradients = [torch.autograd.grad(result, (hidden, weight)) for result in (loss, plain)]
    likeliest = argmax_and_log_z(hidden.detach(), Projection(weight.detach()))
    pairs = zip(
        (loss, *gradients[0], *likeliest),
        (plain, *gradients[1], logits.argmax(-1), logits.logsumexp(-1)),
    )
    return max(max_difference(result, other) for result, other in pairs)


def try_children(device: torch.device) -> float:
    logits = torch.randn(2, 3, 50, device=device)
    tokens = torch.tensor([[5, 3, 7, 1]], device=device).expand(2, -1)
    parents = torch.tensor([[-1, 0, 0, 0]], device=device).expand(2, -1)
    nodes = Nodes(tokens, parents, torch.tensor([[0.0, -1, -2, -3]], device=device).expand(2, -1))
    frontier = torch.tensor([[1, 2, 3]], device=device).expand(2, -1).contiguous()
    pairs = zip(
        append_children(logits, 4, None, frontier, nodes),
        append_children_reference(logits, 4, None, frontier, nodes),
    )
    return max(max_difference(result, other) for result, other in pairs)


def try_steps(device: torch.device) -> float:
    """Run a draft step's small kernels with and without its references."""
    x, gate = torch.randn(2, 2, 3, 16, device=device)
    weight, embedding = torch.rand(16, device=device), torch.randn(9, 16, device=device)
    tokens = torch.tensor([[5, 3, 7], [1, 0, 2]], device=device)
    lengths = torch.tensor([4, 6], device=device)
    layers = InputLayers(embedding, weight, weight + 1, 1e-5, False)
    table = torch.rand(20, 2, 4, device=device)
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]], device=device)
    nodes = Nodes(tokens, parents, -parents.clamp(min=0).float())
    by_kernels = node_input, accepted_input, add_norm, store_states, gated_unit, rotate_append
    by_torch = (
        node_input_reference,
        accepted_input_reference,
        add_norm_reference,
        store_states_reference,
        gated_unit_reference,
        rotate_append_reference,
    )
    results = []
    for inputs, accepted, add, store, unit, rotate in (by_kernels, by_torch):
        states = torch.zeros(2, 5, 16, device=device)
        words, depths = torch.zeros(2, 2, 5, dtype=torch.int64, device=device)
        rows = DraftedRows(states, words[..., None].clone(), depths.clone())
        stored = store(states, x, gate, weight, 1e-5, 0, lengths - 3, False)
        slots = torch.zeros(2, 2, 20, 1, 8, device=device)
        queries = rotate(slots, x, gate[..., :8], gate[..., 8:], table, tokens, lengths, 1)
        run = inputs(tokens, tokens * 0, lengths, rows, 1, layers)
        read = accepted(tokens.repeat(1, 4), lengths, lengths - 2, lengths, x, layers)
        sums = add(x, gate, weight, 1e-5)
        results.append((*run, *read, *rows, *sums, stored, unit(x, gate), queries, slots))
    mask = parents[..., None] >= parents[:, None]
    pairs = [
        *zip(*results),
        *zip(find_ancestors(parents, 3), find_ancestors_reference(parents, 3)),
        (pack_words(mask), pack_words_reference(mask)),
        *zip(
            select_frontier(tokens, nodes.scores, 1, 2, 0, 2),
            select_frontier_reference(tokens, nodes.scores, 1, 2, 0, 2),
        ),
        *zip(select_best(nodes, 2), select_best_reference(nodes, 2)),
    ]
    return max(max_difference(result, other) for result, other in pairs)


def try_gradients(device: torch.device) -> float:
    """Run what lies between the products of a training step, and its gradients, with and without
    the references.
    """
    rows = [torch.randn(2, 3, 16, device=device, requires_grad=True) for _ in range(2)]
    weights = [torch.rand(16, device=device, requires_grad=True) for _ in range(2)]
    angles = torch.rand(2, 3, 4, device=device).repeat(1, 1, 2)
    first, second = rows[0].detach(), rows[1].detach()
    rotation = first, second[..., :8], second[..., 8:]
    heads, grad = torch.randn(2, 2, 2, 3, 8, device=device)
    keys, values = torch.randn(2, 2, 1, 2, 3, 8, device=device)
    lse = torch.randn(2, 2, 3, device=device)
    results = []
    for by_kernels in (True, False):
        norms = join_norms if by_kernels else join_norms_reference
        unit = gated_unit if by_kernels else gated_unit_reference
        rotate = rotate_heads if by_kernels else rotate_heads_reference
        add = add_later_keys if by_kernels else add_later_keys_reference
        joined, stream = norms(rows, weights, [1e-5, 1e-5], torch.float32)
        product = unit(rows[0], rows[1])
        total = joined.square().sum() + stream.sum() + product.square().sum()
        slopes = torch.autograd.grad(total, [*rows, *weights])
        attended, log_sum, share = add(heads, grad, lse, keys, values, 0.3)
        rest = keys, values, grad.clone(), 0.3
        if share is None:
            through = later_gradients(grad, heads, attended, (log_sum, share), *rest)
        else:
            through = later_gradients_reference(grad, heads, attended, share, *rest)
        rotated = rotate(*rotation, angles.cos(), angles.sin())
        results.append((joined, product, attended, log_sum, *rotated, *slopes, *through))
    return max(max_difference(result, other) for result, other in zip(*results))


def max_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return (
        float((first.detach().double() - second.detach().double()).abs().max())
        if first.numel()
        else 0.0
    )


# A test holds that between them they launch every operation of spectrain.kernels.
KERNEL_TRIALS: dict[str, Callable[[torch.device], float]] = {
    "tree attention": try_attention,
    "tree verification": try_verify,
    "key-value cache": try_cache,
    "texts and log": try_texts,
    "linear divergence": try_divergence,
    "draft levels": try_children,
    "draft steps": try_steps,
    "training steps": try_gradients,
}

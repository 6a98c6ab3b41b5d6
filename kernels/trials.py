"""Trials of all kernels: each runs some on a tiny input and returns their maximum error against
their references. `spectrain doctor` runs them on the user's machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from spectrain.kernels import tree_walks
from spectrain.kernels.append_children import (
    Nodes,
    append_children,
    append_children_reference,
)
from spectrain.kernels.kv_append import kv_append, kv_append_reference
from spectrain.kernels.kv_commit import kv_commit, kv_commit_reference
from spectrain.kernels.linear_divergence import Projection, argmax_and_log_z, linear_divergence
from spectrain.kernels.round_log import round_log, round_log_reference
from spectrain.kernels.token_commit import TextBatch, token_commit, token_commit_reference
from spectrain.kernels.tree_attention import (
    Visibility,
    tree_attention,
    tree_attention_reference,
)
from spectrain.kernels.tree_recursive import tree_recursive
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
    results = []
    for commit, log in ((token_commit, round_log), (token_commit_reference, round_log_reference)):
        texts = TextBatch(nodes.repeat(1, 3), counts + 3, true[:, 0].clone(), counts + 1, bonus[:1])
        lines = torch.zeros(2, 2, 6, dtype=torch.int64, device=device)
        emitted, commits = commit(nodes, path, counts, bonus, texts)
        log(lines, commits[1:], emitted, commits, nodes, true, nodes > 1)
        results.append((emitted, commits, texts.tokens, texts.active, texts.tokens_left, lines))
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
}

"""Verification of token trees in torch: the references of the kernels, and the path on a CPU.

Shapes: B batch, N nodes, V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .counter import fold_key, gumbel_noise, uniform_noise
from .dispatch import run_on_cpu


@dataclass(frozen=True)
class TreeNodes:
    """Token trees: parents before children, siblings in the order they were drawn."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, -1 at the root
    can_accept: Tensor  # [B, N] bool, False where a node is padding or never emitted
    height: int  # no path is deeper
    max_children: int  # no node has more


@dataclass(frozen=True)
class SamplingSpec:
    """How tokens are drawn: their random keys and their distribution."""

    key: int  # of purpose and seed: counter.host_key
    sequence_keys: Tensor  # [B] int64, the sequences' own keys
    positions: Tensor  # [B, N] int64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def node_keys(self, nodes: Tensor) -> Tensor:
        """Return the keys [B] at one node of each tree."""
        return fold_key(
            fold_key(self.key, self.sequence_keys), self.positions.gather(1, nodes[:, None])[:, 0]
        )

    def shape_logits(self, logits: Tensor) -> Tensor:
        return shape_logits(logits, self.temperature, self.top_k, self.top_p)


def shape_logits(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Apply temperature, top-k and top-p to logits [..., V]: -inf where a token is cut. Tokens
    that tie are cut together.
    """
    scores = logits.float() / temperature
    if top_k > 0:
        kth = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if top_p < 1:
        ordered = scores.sort(dim=-1, descending=True).values
        chances = ordered.softmax(-1)
        least = ordered.masked_fill(chances.cumsum(-1) - chances >= top_p, float("inf")).amin(
            -1, keepdim=True
        )
        scores = scores.masked_fill(scores < least, float("-inf"))
    return scores


def draw_tokens(
    logits: Tensor, keys: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Draw a token of each row of logits [..., V] under its key [...] by the Gumbel-max trick,
    after the cuts of `shape_logits`."""
    if top_k == 0 and top_p >= 1:
        tokens: Tensor | None = run_on_cpu("choose_by_noise", logits, keys, temperature)
        if tokens is not None:
            return tokens
    scores = shape_logits(logits, temperature, top_k, top_p)
    return (scores + gumbel_noise(keys, logits.shape[-1])).argmax(-1)


class Verdict(NamedTuple):
    """The accepted path of each tree."""

    path: Tensor  # [B, height + 1] int64 nodes, ascending, the root first, padded with the last one
    counts: Tensor  # [B] int64 accepted nodes, the root included
    bonus: Tensor  # [B] int64, the token that follows


def tree_greedy_reference(nodes: TreeNodes, logits: Tensor) -> Verdict:
    """Accept the nodes that carry the most likely token of logits [B, N, V] after their parent,
    the first of equal ones.
    """
    return _walk_tree(nodes, lambda visited: _select_row(logits, visited).argmax(-1))


def tree_match_reference(nodes: TreeNodes, logits: Tensor, draws: SamplingSpec) -> Verdict:
    """Accept the nodes that carry the token drawn by Gumbel-max from logits [B, N, V], shaped,
    at their parent.
    """

    def choose(visited: Tensor) -> Tensor:
        return draw_tokens(
            _select_row(logits, visited),
            draws.node_keys(visited),
            draws.temperature,
            draws.top_k,
            draws.top_p,
        )

    return _walk_tree(nodes, choose)


def tree_recursive_reference(
    nodes: TreeNodes,
    logits: Tensor,
    q: Tensor,
    draft_ids: Tensor | None,
    without_replacement: bool,
    draws: SamplingSpec,
) -> Verdict:
    """Verify by recursive rejection sampling (SpecInfer, Miao et al., 2023; RSD, Jeon et al.,
    2024).

    A child x, in the order drawn, is accepted with probability min(1, P(x) / Q(x)); otherwise P
    becomes the normalised max(P - Q, 0) and, drawn without replacement, Q loses x. logits [B, N,
    V]; q [B, N, U] is the distribution that children were drawn from, over the target tokens
    `draft_ids` [U], each probability 0 or at least 1e-30, so that float32 holds the rest. Coin i of
    a node is number i of its key; the bonus token is drawn by Gumbel-max under that key folded with
    1. Where rounding leaves nothing of the residual, P is Q and the child is accepted.
    """
    batch, num_nodes = nodes.tokens.shape
    node = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    active = torch.ones_like(node, dtype=torch.bool)
    last_scores = logits.new_zeros(batch, logits.shape[-1], dtype=torch.float32)
    path = [node]
    for _ in range(nodes.height + 1):
        scores = draws.shape_logits(_select_row(logits, node))
        q_node = _select_row(q, node).float()
        if draft_ids is not None:
            q_node = torch.zeros_like(scores).scatter(1, draft_ids.expand(batch, -1), q_node)
        accepted, scores = _try_children(
            nodes, node, scores, q_node, without_replacement, draws.node_keys(node)
        )
        last_scores = torch.where(active[:, None], scores, last_scores)
        active = active & (accepted < num_nodes)
        node = torch.where(active, accepted, node)
        path.append(node)
        if _none_left(active):
            break
    path = (path + [node] * nodes.height)[: nodes.height + 1]
    counts = torch.stack(path, 1).diff(dim=1).sign().sum(1) + 1
    noise = gumbel_noise(fold_key(draws.node_keys(node), 1), logits.shape[-1])
    return Verdict(torch.stack(path, 1), counts, (last_scores + noise).argmax(-1))


def _try_children(
    nodes: TreeNodes,
    node: Tensor,
    scores: Tensor,
    q: Tensor,
    without_replacement: bool,
    key: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the accepted child [B] of nodes `here` [B], N where there is none, and the log of
    the residual of P [B, V].
    """
    num_nodes = nodes.tokens.shape[1]
    index = torch.arange(num_nodes, device=node.device)
    children = (nodes.parents == node[:, None]) & nodes.can_accept
    accepted = torch.full_like(node, num_nodes)
    p = scores.softmax(-1)
    for order in range(nodes.max_children):
        child = torch.where(children, index, num_nodes).amin(1)
        token = nodes.tokens.gather(1, child.clamp(max=num_nodes - 1)[:, None])
        p_x = p.gather(1, token)[:, 0]
        q_x = q.gather(1, token)[:, 0]
        undecided = (child < num_nodes) & (accepted == num_nodes)
        if _none_left(undecided):
            break
        rejected = (
            undecided & (p_x < q_x) & (uniform_noise(key, torch.full_like(key, order)) * q_x >= p_x)
        )
        if not _none_left(rejected):
            residual = (p - q).clamp(min=0)
            total = residual.sum(-1)
            rejected = rejected & (total > 0)
            p = torch.where(rejected[:, None], residual / total[:, None], p)
            scores = torch.where(rejected[:, None], residual.log(), scores)
            if without_replacement:
                left = q.scatter(1, token, 0)
                q = torch.where(
                    rejected[:, None], left / left.sum(-1, keepdim=True).clamp(min=1e-30), q
                )
        accepted = torch.where(undecided & ~rejected, child, accepted)
        children = children & (index != child[:, None])
    return accepted, scores


def _none_left(rows: Tensor) -> bool:
    """Tell whether no row is left; always False on a GPU, where reading it would synchronise."""
    return rows.device.type == "cpu" and not rows.any()


def _select_row(x: Tensor, nodes: Tensor) -> Tensor:
    """Select x [B, N, V] at one node [B] of each tree: [B, V]."""
    return x[torch.arange(len(x), device=x.device), nodes]


def _walk_tree(nodes: TreeNodes, choose: Callable[[Tensor], Tensor]) -> Verdict:
    """Visit accepted nodes from the root on, parents first; `choose` returns the target's token [B]
    after nodes [B].

    Siblings with equal tokens, drawn with replacement, are all accepted: the deepest path counts,
    of equal ones the first.
    """
    batch, num_nodes = nodes.tokens.shape
    index = torch.arange(num_nodes, device=nodes.tokens.device)
    pending = (index == 0).expand(batch, -1)
    depth = pending.long() - 1  # -1 where a node is not accepted
    choices = torch.zeros_like(nodes.tokens)
    for _ in range(num_nodes):
        node_column = torch.where(pending, index, num_nodes - 1).amin(1, keepdim=True)
        active = pending.any(1, keepdim=True)
        choice = choose(node_column[:, 0])[:, None]
        choices = torch.where((index == node_column) & active, choice, choices)
        accepted = (
            (nodes.parents == node_column) & (nodes.tokens == choice) & nodes.can_accept & active
        )
        depth = torch.where(accepted, depth.gather(1, node_column) + 1, depth)
        pending = (pending & (index != node_column)) | accepted
        if _none_left(pending):
            break
    counts = depth.amax(1) + 1
    node = last = (depth * num_nodes - index).argmax(1)
    path = []
    for level in range(nodes.height, -1, -1):
        path.append(node)
        up = nodes.parents.gather(1, node[:, None])[:, 0]
        node = torch.where(level < counts, up, node).clamp(min=0)
    return Verdict(torch.stack(path[::-1], 1), counts, choices.gather(1, last[:, None])[:, 0])

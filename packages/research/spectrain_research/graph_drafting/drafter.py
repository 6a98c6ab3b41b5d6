"""Graph-structured drafting (GSD, Gong et al., 2024, arXiv 2407.16207): a node that reads like an
earlier one is not run.

Shapes: B batch, F frontier nodes, R nodes that were run, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spectrain.config.values import Count
from spectrain.drafters.context import Context
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, Rollout
from spectrain_research.shared.nested_drafter import NestedDrafter


class GraphRollout(Rollout):
    """Runs a new node only where no earlier node of the round, nor the root, ends with the same
    `suffix` tokens.

    Other nodes take the distribution of that earlier node, so that a builder copies its subtree. In
    a batch, a row with fewer nodes to run than another runs some of the others again.
    """

    def __init__(self, inner: Rollout, tails: list[list[int]], suffix: int) -> None:
        self.inner, self.suffix = inner, suffix
        self.draft_ids, self.depth_limit = inner.draft_ids, inner.depth_limit
        # Of every row: the last tokens up to each node, the run node that stands for it, and run
        # nodes by their last tokens.
        self.tails = [[tuple(tail)] for tail in tails]
        self.run_index = [[0] for _ in tails]
        self.run_nodes = [{tuple(tail): 0} for tail in tails]
        # log q [B, R, V], stop marks and acceptance estimates [B, R] of run nodes
        self.results: list[Tensor | None] = []
        self.num_nodes = self.num_run = 0

    def start(self) -> Tensor:
        self.results = [self.inner.start(), self.inner.stop_mask, self.inner.accept_probs]
        return self._take_results([[0]] * len(self.tails))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        new_nodes = [
            self._add_nodes(row, *nodes)
            for row, nodes in enumerate(zip(tokens.tolist(), parents.tolist()))
        ]
        width = max(map(len, new_nodes))
        if width:
            columns = [
                nodes + nodes[-1:] * (width - len(nodes)) if nodes else [(0, 0)] * width
                for nodes in new_nodes
            ]
            # [B, width, 2] tokens and run parents
            to_run = torch.tensor(columns, device=tokens.device)
            self._append_results(
                self.inner.extend(to_run[..., 0].contiguous(), to_run[..., 1].contiguous())
            )
        self.num_run += sum(map(len, new_nodes))
        self.num_nodes += tokens.numel()
        return self._take_results([indices[-tokens.shape[1] :] for indices in self.run_index])

    def _add_nodes(self, row: int, tokens: list[int], parents: list[int]) -> list[tuple[int, int]]:
        """Add nodes to a row; return the token and the run parent of those that must be run."""
        tails = self.tails[row]
        run_index = self.run_index[row]
        run_nodes = self.run_nodes[row]
        num_run = self._num_results()
        to_run = list[tuple[int, int]]()
        for token, parent in zip(tokens, parents):
            tail = (*tails[parent], token)[-self.suffix :]
            if tail not in run_nodes:
                run_nodes[tail] = num_run + len(to_run)
                to_run.append((token, run_index[parent]))
            tails.append(tail)
            run_index.append(run_nodes[tail])
        return to_run

    def _num_results(self) -> int:
        assert self.results[0] is not None
        return self.results[0].shape[1]

    def _append_results(self, log_q: Tensor) -> None:
        """Append what the inner rollout computed for the nodes that it ran last."""
        parts = zip(
            self.results, (log_q, self.inner.stop_mask, self.inner.accept_probs), strict=True
        )
        self.results = [
            None if old is None or new is None else torch.cat([old, new], dim=1)
            for old, new in parts
        ]

    def _take_results(self, nodes: list[list[int]]) -> Tensor:
        """Return log q [B, F, V] of run nodes [B, F], and set the marks of this step."""
        log_q, stop_mask, accept_probs = self.results
        assert log_q is not None
        indices = torch.tensor(nodes, device=log_q.device)
        self.stop_mask = None if stop_mask is None else stop_mask.gather(1, indices)
        self.accept_probs = None if accept_probs is None else accept_probs.gather(1, indices)
        return log_q.gather(1, indices[..., None].expand(-1, -1, log_q.shape[-1]))


class GraphDrafting(NestedDrafter):
    """Drafts with `inner`, and lets nodes that end with the same `suffix` tokens share one
    distribution.

    The paper merges such nodes of the token graph, because a small model's predictions depend on
    little more than the last tokens. Verification unrolls the graph, so the target's output is
    unchanged. A subtree is shared while it is drafted only.
    """

    def __init__(
        self,
        target: Target,
        # Drafter whose forwards are shared: a run folder, a drafter directory, or a choice, alone
        # or with settings.
        inner: str | dict[str, Any] = "causal",
        # Number of last tokens, the node's own included, by which nodes are the same.
        suffix: Count = 2,
    ) -> None:
        super().__init__(target, inner)
        self.suffix = suffix
        self.rollouts: list[GraphRollout] = []
        self.num_nodes = self.num_run = 0

    def draft(self, context: Context) -> Draft:
        self._count_nodes()
        draft = self.inner.draft(context)
        if draft.rollout is None:
            return draft
        ends = (context.lengths + 1).tolist()
        tails = [
            tokens[max(0, end - self.suffix) : end]
            for tokens, end in zip(context.tokens.tolist(), ends)
        ]
        self.rollouts = [GraphRollout(draft.rollout, tails, self.suffix)]
        return replace(draft, rollout=self.rollouts[0])

    def _count_nodes(self) -> None:
        """Add the last round's nodes to the counts of all rounds: nodes that a builder drafted,
        and those that were run.
        """
        for rollout in self.rollouts:
            self.num_nodes += rollout.num_nodes
            self.num_run += rollout.num_run
        self.rollouts = []

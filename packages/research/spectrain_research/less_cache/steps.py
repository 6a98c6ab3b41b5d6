"""The rollout of a self-drafting target. Shapes: B batch, M nodes run so far in this round, F
frontier nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.drafters.context import Context
from spectrain.drafters.layers.copies import GrowingTexts
from spectrain.trees.rollout import Rollout


class Guesser(Protocol):
    """Guesses which tokens follow the nodes that a draft step runs."""

    def continue_paths(self, paths: list[list[int]], last_tokens: list[int], count: int) -> Tensor:
        """Return [B, count] tokens after each text, its root and a path of nodes; `last_tokens`
        are the newest of them.
        """


class StepRunner(Protocol):
    """A drafter that runs the nodes of a rollout."""

    guesses: int

    def make_guesser(self, context: Context) -> Guesser:
        """Return the guesser of this round."""

    def compute_log_probs(
        self, context: Context, tokens: Tensor, depth: Tensor, visible: Tensor
    ) -> Tensor:
        """Return log-probabilities [B, N, V] after nodes [B, N] of these depths, with their
        visibility [B, N, M + N].
        """


class CopyGuesser:
    """Copies what followed the same end of the text; where nothing did, it repeats the newest
    token.
    """

    def __init__(self, texts: GrowingTexts, device: torch.device) -> None:
        self.texts, self.device = texts, device

    def continue_paths(self, paths: list[list[int]], last_tokens: list[int], count: int) -> Tensor:
        rows = [
            text.continue_path(path, count) or [token] * count
            for text, path, token in zip(self.texts.rows, paths, last_tokens)
        ]
        return torch.tensor(rows, device=self.device)


class HelperGuesser:
    """The most likely tokens of a smaller drafter, which runs a node once: guesses that were
    right are not run again.
    """

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.best: list[Tensor] = []  # [B, 1] most likely token after each node of the rollout
        self.children: dict[tuple[int, int, int], int] = {}  # (row, node, token) -> child node

    def continue_paths(self, paths: list[list[int]], last_tokens: list[int], count: int) -> Tensor:
        if not self.best:
            self._record(self.rollout.start())
        nodes = torch.zeros(len(paths), 1, dtype=torch.int64, device=self.best[0].device)
        for step in zip(*paths):
            nodes = self._run(torch.tensor(step, device=nodes.device)[:, None], nodes)
        tokens = [self._best_after(nodes)]
        while len(tokens) < count:
            nodes = self._run(tokens[-1], nodes)
            tokens.append(self._best_after(nodes))
        return torch.cat(tokens, dim=1)

    def _run(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the nodes [B, 1] of tokens below their parents, which run unless all of them
        have.
        """
        keys = [
            (row, *key)
            for row, key in enumerate(zip(parents[:, 0].tolist(), tokens[:, 0].tolist()))
        ]
        if any(key not in self.children for key in keys):
            self.children.update(dict.fromkeys(keys, len(self.best)))
            self._record(self.rollout.extend(tokens, parents))
        return torch.tensor([[self.children[key]] for key in keys], device=tokens.device)

    def _record(self, log_q: Tensor) -> None:
        self.best.append(self.rollout.to_target_ids(log_q[:, 0].argmax(-1, keepdim=True)))

    def _best_after(self, nodes: Tensor) -> Tensor:
        return torch.cat(self.best, dim=1).gather(1, nodes)


class SelfSteps(Rollout):
    """One round: every node runs once, together with guesses after it where there are any."""

    def __init__(self, drafter: StepRunner, context: Context) -> None:
        self.drafter = drafter
        self.context = context
        self.guesser = drafter.make_guesser(context)
        empty = context.root[:, None][:, :0]
        # [B, M] of the nodes that have run
        self.tokens = empty
        self.parents = empty
        self.depth = empty
        self.visible = torch.zeros(len(empty), 0, 0, dtype=torch.bool, device=empty.device)
        self.log_q: Tensor | None = None  # [B, M, V]
        # [B, nodes of the builder] index of each among the nodes that have run
        self.node_index = empty

    def start(self) -> Tensor:
        root = self.context.root[:, None]
        return self._log_q_after(root, torch.full_like(root, -1))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._log_q_after(tokens, self.node_index.gather(1, parents))

    def _log_q_after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return log q [B, F, V] after nodes below ones that have run; the nodes run unless all
        of them were guessed.
        """
        indices = self._find_run_nodes(tokens, parents)
        if indices is None:
            indices = self.tokens.shape[1] + torch.arange(
                tokens.shape[1], device=tokens.device
            ).expand_as(tokens)
            self._run(tokens, parents)
        self.node_index = torch.cat([self.node_index, indices], dim=1)
        assert self.log_q is not None
        return self.log_q.gather(1, indices[..., None].expand(-1, -1, self.log_q.shape[-1]))

    def _find_run_nodes(self, tokens: Tensor, parents: Tensor) -> Tensor | None:
        """Return the indices [B, F] of these nodes where all of them have run, or None."""
        if not self.drafter.guesses or not self.tokens.shape[1]:
            return None
        # [B, F, M]
        same = (self.tokens[:, None] == tokens[..., None]) & (
            self.parents[:, None] == parents[..., None]
        )
        return same.long().argmax(-1) if bool(same.any(-1).all()) else None

    def _run(self, tokens: Tensor, parents: Tensor) -> None:
        """Run nodes and, after a single one, its guesses."""
        first = self.tokens.shape[1]
        num_nodes = tokens.shape[1]
        if self.drafter.guesses and num_nodes == 1:
            guesses = self._guess_tokens(tokens, parents)
            chain = torch.arange(first, first + guesses.shape[1], device=tokens.device).expand_as(
                guesses
            )
            tokens = torch.cat([tokens, guesses], dim=1)
            parents = torch.cat([parents, chain], dim=1)
        self.tokens, self.parents = (
            torch.cat([self.tokens, tokens], dim=1),
            torch.cat([self.parents, parents], dim=1),
        )
        for level in parents.split(1, dim=1) if num_nodes == 1 else (parents,):
            self._add_level(level)
        visible = self.visible[:, first:]
        depth = self.depth[:, first:]
        log_q = self.drafter.compute_log_probs(self.context, tokens, depth, visible)
        self.log_q = log_q if self.log_q is None else torch.cat([self.log_q, log_q], dim=1)

    def _add_level(self, parents: Tensor) -> None:
        """Add nodes below `parents` [B, F], -1 for the root, to depths and visibility."""
        count = parents.shape[1]
        size = self.depth.shape[1]
        if not size:
            above = self.visible.new_zeros(len(parents), count, 0)
            depth = torch.zeros_like(parents)
        else:
            above = self.visible.gather(1, parents[..., None].expand(-1, -1, size))
            depth = self.depth.gather(1, parents) + 1
        itself = torch.eye(count, dtype=torch.bool, device=parents.device).expand(
            len(parents), -1, -1
        )
        self.visible = torch.cat(
            [F.pad(self.visible, (0, count)), torch.cat([above, itself], dim=2)], dim=1
        )
        self.depth = torch.cat([self.depth, depth], dim=1)

    def _guess_tokens(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return [B, guesses] tokens after nodes [B, 1]; the root has parent -1."""
        paths: list[list[int]] = []
        run_tokens = self.tokens.tolist()
        run_parents = self.parents.tolist()
        last_tokens = tokens[:, 0].tolist()
        for row, (token, parent) in enumerate(zip(last_tokens, parents[:, 0].tolist())):
            path = [token] if parent >= 0 else []  # the root is the text's end
            while parent > 0:
                path.insert(0, run_tokens[row][parent])
                parent = run_parents[row][parent]
            paths.append(path)
        return self.guesser.continue_paths(paths, last_tokens, self.drafter.guesses)

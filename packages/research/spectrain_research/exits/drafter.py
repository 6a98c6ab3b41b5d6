"""Tokens of early exits (FREE, Bae et al., 2023; BranchyNet, Teerapittayanon et al., 2016; CALM,
Schuster et al., 2022).

Shapes: B batch, N nodes, E exits, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import Share
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.head import Head
from spectrain.models.partial_forward import NodeLevel, PartialForward
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .ladder import ExitLadder
from .threshold import ThresholdEstimator


class Exits(Drafter):
    """A token leaves the target at the first exit that is sure of it.

    At every exit the target's norm and head give a distribution. With measure=probability an exit
    is sure where its largest probability is at least `threshold`, with measure=margin where the
    difference of its two largest probabilities is (CALM; FREE's published code), with
    measure=entropy where its entropy is at most `threshold` nats (BranchyNet). The token goes on as
    the exit says, and the layers above wait. Where no exit is sure, all waiting nodes run through
    the other layers in one forward, and the target chooses the next token. With
    acceptance=unverified the exits' tokens stay, so that the output changes (LOSSY). With
    acceptance=greedy the same forward verifies them and the output is the greedy one.

    With `estimate`, the threshold follows what the target said about earlier tokens: the smallest
    confidence from which on exits agree with the probability `level` (FREE's Beta mixture). The
    target's forward runs every token through all exits, so each token of the text is observed at
    each exit, whether the exit was sure or not, and `threshold` is only where the estimate starts.
    Observations of all texts add up. It needs measure=probability or margin, and a chain.

    An exit gives one token. With a tree that branches the first exit drafts all of it, whatever it
    is sure of.
    """

    capabilities = Capabilities(nestable=False)

    def __init__(
        self,
        target: Target,
        # Numbers of layers before each exit, ascending; null takes one exit after half of the
        # layers.
        exits: tuple[int, ...] | None = None,
        # What an exit's confidence is: its largest probability, the difference of its two largest
        # ones (margin), or its entropy in nats.
        measure: Literal["probability", "margin", "entropy"] = "probability",
        # Confidence from which on an exit's token is taken: the least probability or margin, or
        # the largest entropy.
        threshold: float = 0.9,
        # Whether the threshold follows the agreement of exits with the target at all tokens decoded
        # so far.
        estimate: bool = False,
        # Probability with which exits have to agree with the target, used with estimate.
        level: Share = 0.9,
    ) -> None:
        super().__init__()
        self.exits = (max(1, target.num_layers // 2),) if exits is None else tuple(exits)
        bounds = [0, *self.exits, target.num_layers]
        if not self.exits or bounds != sorted({*bounds}):
            raise UserError(
                f"drafter.exits={list(self.exits)}: {target.name} has {target.num_layers} layers; "
                f"use ascending numbers from 1 to {target.num_layers - 1}"
            )
        if estimate and measure == "entropy":
            raise UserError(
                "drafter.estimate=true: a Beta distribution is of probabilities; use "
                "drafter.measure=probability or margin"
            )
        self.measure = measure
        self.threshold = threshold
        self.estimate = estimate
        self.level = level
        if estimate:
            self.capabilities = replace(self.capabilities, chains_only=True)
        self.head = target.head
        self.ladder: ExitLadder | None = None
        self.estimator = ThresholdEstimator()
        # Of this round's nodes [B, N, E]: the confidence of each exit, and whether the target
        # chooses the same token.
        self.confidences = self.agreed = torch.empty(0)

    def draft(self, context: Context) -> Draft:
        if not context.builder.traits.is_chain:
            if self.estimate:
                raise UserError(
                    "drafter.estimate=true: no exit has to be sure in a tree that branches; use "
                    "tree=chain"
                )
            self.ladder = None
            context.partial = PartialForward(
                context.target, context.cache, self.exits[0], layers=context.layers
            )
            return Draft(FirstExitRollout(self.head, context.partial, context.root))
        self.ladder = ExitLadder(context.target, context.cache, self.exits)
        return Draft(ExitRollout(self, self.ladder, context.root))

    def is_sure(self, log_q: Tensor) -> Tensor:
        """Mark the rows [B] whose distribution log q [B, V] is sure enough to leave."""
        if self.measure == "entropy":
            return torch.special.entr(log_q.exp()).sum(-1) <= self.threshold
        return self.measure_confidence(log_q) >= self.threshold

    def measure_confidence(self, log_q: Tensor) -> Tensor:
        """Return the largest probability of each distribution log q [.., V], or by how much it
        exceeds the second one.
        """
        if self.measure == "margin":
            first, second = log_q.topk(2).values.exp().unbind(-1)
            return first - second
        return log_q.amax(-1).exp()

    def verify(self, context: Context, tree: TokenTree) -> Features:
        if self.ladder is None:
            return context.verify(tree)
        if self.ladder.num_nodes < tree.tokens.shape[1]:
            # The last token of a chain has not been run.
            self.ladder.add_node(tree.tokens[:, -1:])
        final = self.ladder.finish_chain()
        logits = self.head.logits(final)
        if self.estimate:
            self._compare_exits(self.ladder, logits)
        return Features(tree.tokens, (), final[:, :, None, :][:, :, :0], logits)

    def _compare_exits(self, ladder: ExitLadder, logits: Tensor) -> None:
        """Note what every exit says after every node, and whether the target, by its logits [B,
        N, V], says the same.
        """
        states = torch.stack([torch.cat(parts, dim=1) for parts in ladder.exit_states], dim=2)
        log_q = self.head.logits(states).float().log_softmax(-1)  # [B, N, E, V]
        self.confidences = self.measure_confidence(log_q)
        self.agreed = log_q.argmax(-1) == logits.argmax(-1)[:, :, None]

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """Estimate the threshold anew from the nodes that stay: each token of the text is
        observed once.
        """
        if not self.estimate:
            return
        steps = torch.arange(accepted.path.shape[1], device=accepted.path.device)
        stays = steps < context.num_new[:, None]  # [B, P]
        rows = torch.arange(len(stays), device=stays.device)[:, None]
        path = accepted.path.clamp(min=0)
        self.estimator.observe(
            self.confidences[rows, path][stays].flatten(), self.agreed[rows, path][stays].flatten()
        )
        self.threshold = self.estimator.threshold(self.level) or self.threshold


class FirstExitRollout(Rollout):
    """A rollout whose distributions are those of the first exit, for trees that branch."""

    def __init__(self, head: Head, partial: PartialForward, root: Tensor) -> None:
        self.head, self.partial, self.root = head, partial, root

    def start(self) -> Tensor:
        return self._read_exit(self.partial.run_root(self.root))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._read_exit(self.partial.run_children(tokens, parents))

    def _read_exit(self, level: NodeLevel) -> Tensor:
        return self.head.logits(level.features.at_layer("final")).log_softmax(-1)


class ExitRollout(Rollout):
    """A rollout whose distribution after a node is that of the first exit that is sure;
    elsewhere it stops.
    """

    def __init__(self, drafter: Exits, ladder: ExitLadder, root: Tensor) -> None:
        self.drafter, self.ladder, self.root = drafter, ladder, root

    def start(self) -> Tensor:
        return self._run_node(self.root[:, None])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._run_node(tokens)

    def _run_node(self, tokens: Tensor) -> Tensor:
        self.ladder.add_node(tokens)
        log_q = None
        is_sure = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for part in range(len(self.drafter.exits)):
            state = self.ladder.run_part(part).at_layer("final")[:, -1]
            at_exit = self.drafter.head.logits(state[:, None])[:, 0].float().log_softmax(-1)
            log_q = at_exit if log_q is None else torch.where(is_sure[:, None], log_q, at_exit)
            is_sure = is_sure | self.drafter.is_sure(at_exit)
            if is_sure.all():
                break
        assert log_q is not None
        self.stop_mask = ~is_sure[:, None]
        return log_q[:, None]

"""Rounds by hand: contexts to draft in, what a drafter proposes there, and a builder that keeps
what it grew.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import make_context, make_request, prefill_context
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.kernels.token_commit import gather_emitted
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.base import Prefix, TreeBuilder, WrappedBuilder
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from tests.trees.tables import check_structure


def begun(
    target: Target,
    prompts: list[list[int]],
    drafter: Drafter | None,
    builder: TreeBuilder,
    limit: int = 20,
) -> Context:
    """The first round of these prompts, which were read."""
    return prefill_context(
        target, Greedy(), make_request(target, prompts, limit, ignore_eos=True), drafter, builder
    )


def placed(
    target: Target,
    texts: list[list[int]],
    builder: TreeBuilder,
    news: list[int] | None = None,
    round: int = 0,
) -> Context:
    """A context of committed `texts`, their roots included, of which the last `news` tokens are new
    in this round; nothing was run."""
    news = [0] * len(texts) if news is None else news
    context = make_context(target, builder, target.new_cache(len(texts), 256), (), 0)
    for row, text in enumerate(texts):
        context.tokens[row, : len(text)] = torch.tensor(text)
    context.cache.lengths.copy_(torch.tensor([len(text) - 1 for text in texts]))
    context.sequence_ids.copy_(torch.arange(len(texts)))
    context.new_features = Features(
        context.tokens[:, : max(news)], (), torch.zeros(len(texts), max(news), 0, 1)
    )
    context.num_new = torch.tensor(news)
    context.round = round
    return context


def proposed(drafter: Drafter, context: Context, builder: TreeBuilder) -> TokenTree:
    """The tree that a drafter and a builder make in a round."""
    context.builder = builder
    return builder.grow(context, drafter.draft(context))


def emitted_tokens(tree: TokenTree, accepted: AcceptedPath) -> Tensor:
    """The tokens of a round [B, P]: the accepted nodes after the root, the bonus, then padding."""
    return gather_emitted(tree.tokens, accepted.path, accepted.counts, accepted.bonus)


Listen = Callable[[Rollout, Prefix], Rollout]


class Keeping(WrappedBuilder):
    """Another builder, whose trees are checked and kept, each with the texts that it hangs below,
    their roots included.

    Rounds without a draft, as a guard has them, leave nothing. `listen` may put another rollout
    around every one.
    """

    def __init__(self, builder: TreeBuilder, listen: Listen | None = None) -> None:
        super().__init__(builder)
        self.traits = builder.traits
        self.listen = listen
        self.trees: list[TokenTree] = []
        self.texts: list[list[list[int]]] = []

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        if draft == Draft():
            return super().grow(prefix, draft)
        if draft.rollout is not None and self.listen is not None:
            draft = replace(draft, rollout=self.listen(draft.rollout, prefix))
        tree = super().grow(prefix, draft)
        check_structure(tree)
        assert torch.equal(tree.tokens[:, 0], prefix.root)
        self.texts.append(
            [
                tokens[: end + 1]
                for tokens, end in zip(prefix.tokens.tolist(), prefix.lengths.tolist())
            ]
        )
        self.trees.append(tree)
        return tree


RolloutLog = list[tuple[list[int], list[int], Tensor]]
"""A text, what was drafted behind it, and the log q that a rollout gave after that."""


class RecordedRollout(Rollout):
    """Another rollout, with the text and the drafted tokens before every log q that it gave."""

    def __init__(self, inner: Rollout, prefix: Prefix, log: RolloutLog) -> None:
        self.inner, self.log, self.draft_ids = inner, log, inner.draft_ids
        self.texts = [
            prefix.tokens[b, : n + 1].tolist() for b, n in enumerate(prefix.lengths.tolist())
        ]
        self.paths: list[list[list[int]]] = [[[]] for _ in self.texts]

    def start(self) -> Tensor:
        return self.record_log_q(self.inner.start(), 1)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        for b, paths in enumerate(self.paths):
            paths += [
                paths[parent] + [token]
                for token, parent in zip(tokens[b].tolist(), parents[b].tolist())
            ]
        return self.record_log_q(self.inner.extend(tokens, parents), tokens.shape[1])

    def record_log_q(self, log_q: Tensor, count: int) -> Tensor:
        for b, paths in enumerate(self.paths):
            self.log += [
                (self.texts[b], path, log_q[b, n]) for n, path in enumerate(paths[-count:])
            ]
        return log_q


def watching(builder: TreeBuilder) -> tuple[RolloutLog, Keeping]:
    """Return the list to which the rollouts of a builder log their q, and the builder in a
    wrapper that keeps its trees.
    """
    log: RolloutLog = []
    return log, Keeping(builder, lambda rollout, prefix: RecordedRollout(rollout, prefix, log))

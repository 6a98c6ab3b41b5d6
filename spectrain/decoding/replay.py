"""Replaying texts that the target wrote: a drafter drafts after every token of them, without the
target's forwards.

The target's greedy answers do not depend on the drafter, so they and the target's features are
recorded once. A family whose `capabilities.drafts_from_features` is true then drafts from the
recorded features; for others the target runs every token of the answers again. The drafts are
judged at the same places either way.

Shapes: B texts, T tokens, R roots of a text, K draft depths, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.models.features import Features, Layer
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees.base import Prefix, RootOnlyBuilder, TreeBuilder, TreeTraits
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .acceptance import Greedy
from .generation import OnRound, no_callback, run_to_end
from .loop import (
    EagerRunner,
    Request,
    decode_steps,
    make_context,
    make_request,
    prefill_context,
    required_layers,
    slots_per_round,
)


@dataclass(frozen=True)
class RecordedTexts:
    """Prompts with the target's greedy answers, and its features at every token but the last one
    of each answer.
    """

    prompts: list[list[int]]
    answers: list[list[int]]  # at least one token each
    # [B, T] of prompts and answers, padded on the right; "final" is among its layers
    features: Features

    @property
    def num_roots(self) -> list[int]:
        """The number of tokens of each answer after which a draft can be judged: all but the
        last one.
        """
        return [len(answer) - 1 for answer in self.answers]

    @property
    def prompt_lengths(self) -> Tensor:
        return torch.tensor(
            [len(prompt) for prompt in self.prompts], device=self.features.tokens.device
        )

    @property
    def answer_tokens(self) -> Tensor:
        """The tokens of the answers, [B, longest answer], padded with their last one."""
        longest = max(map(len, self.answers))
        rows = [answer + answer[-1:] * (longest - len(answer)) for answer in self.answers]
        return torch.tensor(rows, device=self.features.tokens.device)


class FeatureRecorder(Drafter):
    """Drafts nothing, and collects the features that the target computes while it decodes."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.parts: list[tuple[Features, Tensor]] = []

    def draft(self, context: Context) -> Draft:
        self.parts.append((context.new_features, context.num_new))
        return Draft()


def record_answers(
    target: Target,
    prompts: list[list[int]],
    max_new_tokens: int,
    layers: tuple[Layer, ...],
    on_round: OnRound = no_callback,
) -> RecordedTexts:
    """Decode all prompts together, greedily, and record the features of these layers and "final"
    at every token that ran.
    """
    recorder = FeatureRecorder(tuple(dict.fromkeys((*layers, "final"))))
    runner = EagerRunner(target, Greedy(), recorder, RootOnlyBuilder())
    generations = run_to_end(
        decode_steps(runner, make_request(target, prompts, max_new_tokens)), on_round
    )
    recorder.parts.append((runner.context.new_features, runner.context.num_new))
    with torch.inference_mode():
        features = Features.concat_prefixes(recorder.parts)
    return RecordedTexts(prompts, [generation.output for generation in generations], features)


@torch.inference_mode()
def record_features(
    target: Target, texts: RecordedTexts, layers: tuple[Layer, ...]
) -> RecordedTexts:
    """Return the same texts with the features that the target computes now, as where it is
    trained too.
    """
    layers = tuple(dict.fromkeys((*layers, "final")))
    lengths = texts.prompt_lengths
    roots = max(1, *texts.num_roots)
    longest = int(lengths.max())
    padded = torch.tensor(
        [prompt + [0] * (longest - len(prompt)) for prompt in texts.prompts], device=target.device
    )
    cache = target.new_cache(len(lengths), longest + roots + 1)
    prompt_features = target.prefill(padded, lengths, cache, layers, texts.prompts)
    chain = TokenTree.from_chain(texts.answer_tokens[:, :roots])
    plan = ForwardPlan(
        layers, positions=lengths[:, None] + chain.depths, mask=chain.ancestors, cache=cache
    )
    parts = [
        (prompt_features, lengths),
        (target.run(chain.tokens, plan), torch.tensor(texts.num_roots).to(lengths)),
    ]
    return RecordedTexts(texts.prompts, texts.answers, Features.concat_prefixes(parts))


@dataclass
class RecordedContext(Context):
    """A context whose verification reads recorded features instead of running the target."""

    recorded: RecordedTexts = field(kw_only=True)

    def verify(self, tree: TokenTree) -> Features:
        """Return the recorded features at the root, the only node of the tree, without logits."""
        assert tree.tokens.shape[1] == 1, "a replayed round verifies the root alone"
        return self.recorded.features.gather(
            self.cache.lengths.clamp(max=self.recorded.features.tokens.shape[1] - 1)[:, None]
        )


class ReplayBuilder(TreeBuilder):
    """Runs a drafter over the known tokens after each root, and verifies the root alone."""

    name = "replay"
    traits = TreeTraits(is_chain=True)

    def __init__(self, texts: RecordedTexts, depth: int) -> None:
        self.depth = depth
        self.budget = depth + 1
        self.max_drafted = depth
        self.answers = texts.answer_tokens
        self.starts = texts.prompt_lengths
        # log q [B, V] after each node of this round's chain
        self.level_log_probs: list[Tensor] = []
        self.rollout: Rollout | None = None

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        """Record the rollout's drafts, without the copies that would be merged with them; return
        the root.
        """
        self.level_log_probs = []
        self.rollout = draft.rollout
        root = TokenTree.from_chain(prefix.root[:, None])
        tree = root if draft.rollout is None else self.expand(prefix, draft.rollout)
        return tree if draft.add_mask_nodes is None else draft.add_mask_nodes(tree)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        steps = torch.arange(self.depth, device=prefix.root.device)
        index = (prefix.lengths - self.starts)[:, None] + 1 + steps
        tokens = self.answers.gather(1, index.clamp(max=self.answers.shape[1] - 1))
        left = self.answers.shape[1] - 1 - int((prefix.lengths - self.starts).max())
        levels = max(1, min(rollout.limit_depth(self.depth), left))
        self.level_log_probs = rollout.draft_along(tokens, levels)
        return TokenTree.from_chain(prefix.root[:, None])


@dataclass(frozen=True)
class ReplayedDrafts:
    """What a drafter would have proposed after every root, with correct drafts before the judged
    one.
    """

    is_judged: Tensor  # [B, R, K]
    hits: Tensor  # [B, R, K] whether the most likely draft is the target's most likely token
    # [B, R, K] the sum of min(p, q), which is how often a drawn draft is accepted; float64
    overlaps: Tensor

    def round_lengths(self) -> list[int]:
        """Return the tokens of every round of the chains that would draft the answers, without
        those that the end cuts.
        """
        depth = int(self.is_judged.sum(2).max()) if self.is_judged.numel() else 0
        rounds = []
        for judged, hits in zip(self.is_judged.sum(2).tolist(), self.hits.tolist()):
            root = 0
            while depth and root < len(judged) and judged[root]:
                accepted = (hits[root][: judged[root]] + [False]).index(False)
                if accepted == judged[root] < depth:
                    break
                rounds.append(1 + accepted)
                root += 1 + accepted
        return rounds


@torch.inference_mode()
def replay(target: Target, drafter: Drafter, texts: RecordedTexts, depth: int) -> ReplayedDrafts:
    """Draft `depth` tokens after every token of recorded answers and judge the drafts by the
    recorded distributions.
    """
    builder = ReplayBuilder(texts, depth)
    context = make_replay_context(target, drafter, builder, texts)
    counts = torch.tensor(texts.num_roots, device=target.device)
    target_rows = TargetDistributions(target, texts)
    shape = len(texts.prompts), max(0, *texts.num_roots), depth
    is_judged = torch.zeros(shape, dtype=torch.bool)
    hits = torch.zeros(shape, dtype=torch.bool)
    overlaps = torch.zeros(shape, dtype=torch.float64)
    answers = texts.answer_tokens
    path = torch.zeros_like(counts)[:, None]
    for root in range(shape[1]):
        current = context.lengths - texts.prompt_lengths
        context.tokens.scatter_(1, context.lengths[:, None], answers.gather(1, current[:, None]))
        context.active = root < counts
        context.tokens_left = (counts - root).clamp(min=0)
        tree = builder.grow(context, drafter.draft(context))
        verified = drafter.verify(context, tree)
        for level, log_q in enumerate(builder.level_log_probs):
            assert builder.rollout is not None
            hit, overlap = target_rows.judge(root + level, log_q, builder.rollout)
            is_judged[:, root, level] = (root + level < counts).cpu()
            hits[:, root, level], overlaps[:, root, level] = hit.cpu(), overlap.double().cpu()
        context.commit_features(verified, path, context.active.long())
        context.partial = None
        bonus = answers.gather(1, (current + 1).clamp(max=answers.shape[1] - 1)[:, None])[:, 0]
        drafter.commit(context, AcceptedPath(path, torch.ones_like(counts), bonus))
    return ReplayedDrafts(is_judged, hits & is_judged, overlaps * is_judged)


class TargetDistributions:
    """The target's distributions p after the tokens of recorded answers, each computed once
    while a replay needs it.
    """

    def __init__(self, target: Target, texts: RecordedTexts) -> None:
        self.target = target
        self.starts = texts.prompt_lengths
        self.final = texts.features.at_layer("final")
        self.computed: dict[int, Tensor] = {}

    def after_token(self, index: int) -> Tensor:
        """Return p [B, V] after the token of this index in the answers; a row that is over
        repeats its last one.
        """
        if index not in self.computed:
            position = (self.starts + index).clamp(max=self.final.shape[1] - 1)
            states = self.final.gather(
                1, position[:, None, None].expand(-1, 1, self.final.shape[-1])
            )
            self.computed = {key: value for key, value in self.computed.items() if key > index - 8}
            self.computed[index] = self.target.head.logits(states)[:, 0].float().softmax(-1)
        return self.computed[index]

    def judge(self, index: int, log_q: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return whether p and q [B, V] have the same most likely token [B], and the sum of
        min(p, q) [B].
        """
        p = self.after_token(index)
        q = log_q.float().softmax(-1)
        ids = rollout.to_target_ids(torch.arange(log_q.shape[-1], device=log_q.device))
        covered = p if rollout.draft_ids is None and len(ids) == p.shape[-1] else p[:, ids]
        return ids[log_q.argmax(-1)] == p.argmax(-1), torch.minimum(covered, q).sum(-1)


def make_replay_context(
    target: Target, drafter: Drafter, builder: TreeBuilder, texts: RecordedTexts
) -> Context:
    """Make the context of a replay with the prompts read: from the recorded features, or by the
    target.
    """
    longest = max(map(len, texts.answers))
    request = Request(texts.prompts, longest, list(range(len(texts.prompts))), frozenset())
    if not drafter.capabilities.drafts_from_features:
        return prefill_context(target, Greedy(), request, drafter, builder)
    lengths = texts.prompt_lengths
    cache = target.new_cache(
        len(lengths), request.longest_prompt + longest + 3 + slots_per_round(drafter, builder)
    )
    blank = make_context(target, builder, cache, required_layers(drafter, Greedy()), 0)
    context = RecordedContext(
        **{entry.name: getattr(blank, entry.name) for entry in fields(blank)}, recorded=texts
    )
    width = request.longest_prompt
    rows = [prompt + [0] * (width - len(prompt)) for prompt in texts.prompts]
    context.tokens[:, :width] = torch.tensor(rows, device=target.device)
    context.sequence_ids = torch.arange(len(lengths), device=target.device)
    context.texts = texts.prompts
    steps = torch.arange(width, device=target.device).expand(len(lengths), -1)
    context.new_features = texts.features.gather(steps)
    context.num_new = lengths
    cache.commit(None, lengths)
    return context

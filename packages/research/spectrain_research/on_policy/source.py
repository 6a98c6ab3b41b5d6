"""Sequences generated during training: by the drafter, by its target, or by both (on-policy
distillation).
"""

import copy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from torch import nn

from spectrain.config.values import Count, NotNegative
from spectrain.data.chat import Example
from spectrain.data.image_processor import refuse_images
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest, FeaturesRead, Source
from spectrain.features.batch import Batch, collate
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.training.validation import evaluation_mode
from spectrain.trees import Chain
from spectrain_research.shared.draft_replay import (
    NOT_PAST_ERROR,
    DraftRecorder,
    DraftWindow,
    Replay,
    collate_branched,
    collate_replays,
    collate_windows,
    join_branches,
    make_unbranched,
    make_windows,
    select_replays,
)
from spectrain_research.shared.on_policy import find_on_policy

from .groups import draw_window_group
from .interleaved import InterleavedSampling
from .policy import CriticalityRecorder, penalize_divergence, weigh_windows


@dataclass(frozen=True)
class DraftedAnswer:
    """A greedy answer with its recorded drafts, and the random draws of its example."""

    generation: Generation
    # The tokens that each round drafted, and how many it emitted.
    rounds: list[tuple[list[int], int]]
    draw: Random
    # The criticality of every drafted token of the rounds that drafted; empty unless windows are
    # drawn by it.
    criticality: list[list[float]] = field(default_factory=list)

    def draw_window(self, windows: list[DraftWindow]) -> DraftWindow:
        """Draw one of its windows, by their criticality where it was recorded."""
        return self.draw.choices(
            windows, weigh_windows(windows, self.criticality) if self.criticality else None
        )[0]


class GeneratedSource(Source):
    """Sequences written anew while training: of each batch, a `fraction` (GKD's lambda), drawn for
    each sequence by itself.

    `by` the drafter (on-policy), the target, or interleaved (speculative knowledge distillation, Xu
    et al., 2024): the drafter writes and the target replaces what is not among its `top_k`
    likeliest tokens, checked `block` tokens at a time. An answer is written for the first prompt of
    a conversation, `max_new_tokens` long at most, whatever the data's own length: a batch may grow
    beyond `batch_tokens`. A prompt that leaves no room for two tokens keeps the data's. By replay,
    the target decodes greedily with chains of `block` drafts, and a draft of that, or with
    `branches` the whole answer and all its rejected drafts, is learnt from with Draft-OPD's split
    loss. By policy (PPOW, 2026, arXiv 2605.14978) drafts are drawn, a round's reward is the tokens
    that it emits over 1 + `draft_cost` times the tokens that it drafts, and a draft of every answer
    adds to the drafter's own loss -A log q for each of its tokens, A being the reward beyond what
    the answer's earlier drafts that came so far brought. With `group` above 1, as in the paper, a
    group of drafts is drawn after one text of the answer, and A is a draft's window reward relative
    to its group's.
    """

    generates_text = True

    def __init__(
        self,
        # Share of the sequences that are generated during training; the others are those of the
        # data.
        fraction: float = 0.5,
        # What generates them: the drafter, the target, interleaved (the drafter writes, the target
        # corrects), replay (rejected drafts of greedy decoding) or policy (sampled drafts with
        # rewards).
        by: Literal["drafter", "target", "interleaved", "replay", "policy"] = "drafter",
        # Temperature of the generated tokens.
        temperature: float = 1.0,
        # Largest number of generated tokens in a sequence.
        max_new_tokens: int = 128,
        # With source.by=interleaved, number of most likely target tokens among which a draft is
        # accepted.
        top_k: int = 25,
        # Number of tokens that are drafted before the target verifies them.
        block: int = 4,
        # With source.by=replay, train on the answer and all its rejected drafts in one forward.
        branches: bool = False,
        # With source.by=replay, let the accepted and the rejected tokens of a draft carry half of
        # the loss each.
        balanced: bool = False,
        # Cost of drafting one token, in forwards of the target, in the reward of source.by=policy.
        draft_cost: NotNegative = 0.1,
        # With source.by=policy, which draft of an answer is trained on, or marks where a group
        # begins: alike picks any, divergence prefers one where the drafter differs from a target
        # that is sure.
        windows: Literal["alike", "divergence"] = "alike",
        # With source.by=policy, penalty for each nat of KL divergence from the drafter at the start
        # of training.
        near: NotNegative = 0.0,
        # With source.by=policy, number of drafts that are drawn after one text and compared with
        # each other; 1 compares the drafts of an answer's rounds.
        group: Count = 1,
        # Seed of the random draws.
        seed: int = 0,
    ) -> None:
        if not 0 <= fraction <= 1:
            raise UserError(f"source.fraction={fraction}: use 0 to 1")
        for key, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k), ("block", block)):
            if value < 1:
                raise UserError(f"source.{key}={value}: use 1 or more")
        if not temperature > 0:
            raise UserError(f"source.temperature={temperature}: use more than 0")
        self.fraction, self.by, self.temperature = fraction, by, temperature
        self.uses_drafter = by != "target"
        self.max_new_tokens = max_new_tokens
        self.top_k = top_k
        self.block = block
        self.seed = seed
        if branches and by != "replay":
            raise UserError(
                "source.branches=true: they are rejected drafts; use it with source.by=replay"
            )
        for key, is_set in (
            ("windows=divergence", windows == "divergence"),
            (f"near={near}", near > 0),
        ):
            if is_set and by != "policy":
                raise UserError(f"source.{key}: it is a policy's; use it with source.by=policy")
        self.branches, self.balanced, self.draft_cost = branches, balanced, draft_cost
        if group > 1 and (by != "policy" or near > 0):
            raise UserError(
                f"source.group={group}: groups of drafts are a policy's; use it with "
                "source.by=policy and source.near=0"
            )
        self.windows, self.near, self.group = windows, near, group
        # the policy as it was before any step, resumed or not
        self.initial_policy: Target | None = None

    def prepare(
        self, target: Target, reads: FeaturesRead, examples: list[Example] | None
    ) -> str | None:
        target.require_layers("source=generated")
        return None

    def begin(self, drafter: nn.Module) -> None:
        assert isinstance(drafter, Drafter)
        if self.near and self.initial_policy is None:
            self.initial_policy = copy.deepcopy(language_model(drafter))

    def make_batch(self, request: BatchRequest) -> Batch:
        target, layers, examples = request.target, request.layers, request.examples
        if target.sharding == "fsdp2":
            raise UserError(
                "source=generated: answers take their time, and a target with sharding=fsdp2 runs "
                "in step; use tensor"
            )
        drafter = request.drafter
        refuse_images(request.texts, "source=generated")
        assert drafter is None or isinstance(drafter, Drafter), "what learns is a drafter"
        draws = [
            Random(f"{self.seed}/{request.step}/{example.content_hash}") for example in examples
        ]  # whatever is batched with what
        anew = [
            index
            for index, example in enumerate(examples)
            if draws[index].random() < self.fraction and self._has_room(example, target, drafter)
        ]
        selected = [examples[index] for index in anew]
        assert drafter is not None or not anew
        if self.by in ("replay", "policy"):
            selected_draws = [draws[index] for index in anew]
            answers = (
                self._decode_drafts(selected, selected_draws, target, drafter, request.step)
                if drafter is not None and selected
                else []
            )
            drawn = dict(zip(anew, answers))
            if self.by == "policy":
                batch = self._make_window_batch(examples, drawn, request.packed, target, drafter)
            elif self.branches:
                batch = self._make_branched_batch(examples, drawn, request.packed, target)
            else:
                on_policy = find_on_policy(drafter)
                draft_only = on_policy is not None and on_policy.drafts_from_root
                batch = self._make_replay_batch(examples, drawn, request.packed, draft_only)
        else:
            texts = (
                self._write_answers(selected, target, drafter, request.step)
                if drafter is not None and selected
                else []
            )
            written = dict(zip(anew, texts))
            batch = collate(
                [written.get(index, example) for index, example in enumerate(examples)],
                request.packed,
            )
        batch = batch.to(target.device)
        if not layers:
            return batch
        plan = batch.plan_forward(ForwardPlan(layers=layers))
        return replace(batch, features=target.run(batch.tokens, plan))

    def _has_room(self, example: Example, target: Target, drafter: Drafter | None) -> bool:
        """Tell whether the context has room for a prompt and two new tokens."""
        writer = language_model(drafter) if self.by == "drafter" else None
        return len(example.prompt) + 2 <= min(target.max_length, (writer or target).max_length)

    def _answer_limit(self, writer: Target, prompts: list[list[int]]) -> int:
        """Return how many tokens can be generated after these prompts."""
        return max(2, min(self.max_new_tokens, writer.max_length - max(map(len, prompts))))

    def _decode_drafts(
        self,
        examples: list[Example],
        draws: list[Random],
        target: Target,
        drafter: Drafter,
        step: int,
    ) -> list[DraftedAnswer]:
        """Greedy answers to their prompts, and the drafts of every round: likeliest ones, or for
        a policy drawn ones.
        """
        prompts = [example.prompt for example in examples]
        self._check_family(drafter)
        chain = Chain(self.block)
        if self.by == "policy":
            chain = Chain(self.block, "sampled", self.temperature, self.seed + 1_000_003 * step)
        recorder = (
            CriticalityRecorder(chain) if self.windows == "divergence" else DraftRecorder(chain)
        )
        rows = [int(example.content_hash[:7], 16) for example in examples]
        with evaluation_mode(drafter):
            written = decode(
                target,
                prompts,
                Greedy(),
                self._answer_limit(target, prompts),
                drafter,
                recorder,
                rows,
            )
        criticality = (
            recorder.criticality
            if isinstance(recorder, CriticalityRecorder)
            else [[] for _ in written]
        )
        return [
            DraftedAnswer(*parts) for parts in zip(written, recorder.rounds, draws, criticality)
        ]

    def _check_family(self, drafter: Drafter) -> None:
        """Raise UserError where the family does not learn from the drafts that this source
        makes.
        """
        if self.branches and language_model(drafter) is None:
            raise UserError(
                "source.branches=true: this family does not learn from side branches; use "
                "recipe=gkd, or leave it out"
            )
        on_policy = find_on_policy(drafter)
        if on_policy is not None and (self.by == "replay" or on_policy.language_model is not None):
            return
        if self.by == "replay":
            raise UserError(
                "source.by=replay: this family does not learn from replayed drafts; use "
                "source.by=target"
            )
        if on_policy is None or not on_policy.learns_windows:
            raise UserError(
                "source.by=policy: this family does not learn from drawn drafts; use recipe=gkd, "
                "eagle3 or hydra, or source.by=target"
            )
        if self.near:
            raise UserError(
                f"source.near={self.near}: this family has no policy to stay near to; use "
                "recipe=gkd, or leave it out"
            )
        if self.group == 1:
            raise UserError(
                "source.group=1: this family learns from groups of drafts; use source.group=8, or "
                "recipe=gkd for single drafts"
            )

    def _make_replay_batch(
        self,
        examples: list[Example],
        drawn: dict[int, DraftedAnswer],
        packed: bool,
        draft_only: bool,
    ) -> Batch:
        """Of every answer a rejected draft, where there is one; of the data nothing is rejected."""
        replays = [Replay(example, [NOT_PAST_ERROR] * len(example.tokens)) for example in examples]
        for index, answer in drawn.items():
            chosen = select_replays(answer.generation, answer.rounds, 1, answer.draw, draft_only)
            replays[index] = next(iter(chosen), replays[index])
        return collate_replays(replays, packed, self.balanced)

    def _make_branched_batch(
        self, examples: list[Example], drawn: dict[int, DraftedAnswer], packed: bool, target: Target
    ) -> Batch:
        """Every answer with all its rejected drafts; of the data nothing is rejected."""
        branched = [make_unbranched(example) for example in examples]
        for index, answer in drawn.items():
            branched[index] = join_branches(answer.generation, answer.rounds, target.max_length)
        return collate_branched(branched, packed, self.balanced)

    def _make_window_batch(
        self,
        examples: list[Example],
        drawn: dict[int, DraftedAnswer],
        packed: bool,
        target: Target,
        drafter: Drafter | None,
    ) -> Batch:
        """Of every answer a draft and what it brought; the data's tokens were not drawn."""
        windows = [DraftWindow(example, [0.0] * len(example.tokens)) for example in examples]
        writer = language_model(drafter)
        groups: list[DraftWindow] = []
        for index, answer in drawn.items():
            if not (some := make_windows(answer.generation, answer.rounds, self.draft_cost)):
                continue
            assert drafter is not None
            window = answer.draw_window(some)
            if self.group > 1:
                groups += self._draw_group(window, answer.draw, target, drafter)
                continue
            if self.near:
                assert writer is not None, "a policy is a model by itself"
                with evaluation_mode(drafter):
                    self.begin(drafter)
                    assert self.initial_policy is not None
                    window = penalize_divergence(
                        window, writer, self.initial_policy, self.near, self.temperature
                    )
            windows[index] = window
        return collate_windows(windows + groups, packed)

    def _draw_group(
        self, window: DraftWindow, draw: Random, target: Target, drafter: Drafter
    ) -> list[DraftWindow]:
        """Draw a group of drafts after the text before a window."""
        chain = Chain(self.block, "sampled", self.temperature, draw.randrange(1 << 30))
        with evaluation_mode(drafter):
            return draw_window_group(
                target,
                drafter,
                chain,
                window.example.tokens[: window.start],
                self.group,
                self.draft_cost,
            )

    def _write_answers(
        self, examples: list[Example], target: Target, drafter: Drafter, step: int
    ) -> list[Example]:
        """New answers to the same prompts, each drawn by its example's key, so that no batching
        changes it.
        """
        rows = [int(example.content_hash[:7], 16) for example in examples]
        prompts = [example.prompt for example in examples]
        writer = target if self.by != "drafter" else language_model(drafter)
        if writer is None:
            raise UserError(
                "source.by=drafter: this family cannot write by itself; use source.by=target or "
                "interleaved"
            )
        limit = self._answer_limit(writer, prompts)
        seed = self.seed + 1_000_003 * step
        with evaluation_mode(drafter):
            if self.by == "interleaved":
                rule = InterleavedSampling(self.temperature, top_k=self.top_k, seed=seed)
                chain = Chain(self.block, "sampled", self.temperature, seed)
                generations = decode(target, prompts, rule, limit, drafter, chain, rows)
            else:
                generations = decode(
                    writer, prompts, Match(self.temperature, seed=seed), limit, sequence_ids=rows
                )
        return [
            Example(
                prompt + generation.output, [False] * len(prompt) + [True] * len(generation.output)
            )
            for prompt, generation in zip(prompts, generations)
        ]


def language_model(drafter: Drafter | None) -> Target | None:
    """Return the drafter as a language model that writes text by itself; None if it is not one."""
    on_policy = find_on_policy(drafter)
    return None if on_policy is None else on_policy.language_model

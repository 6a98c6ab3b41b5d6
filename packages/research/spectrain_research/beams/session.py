"""Decoding with beams: a session of K beams, which are K rows of one text. Shapes: K beams, N
nodes, P path, V vocabulary.

A round drafts continuations of all beams, verifies them in one forward of the target, and takes as
many steps of the search as the drafts allow: a step needs the target's distribution after every
beam, so that it is taken as long as all beams are nodes. The last step's tokens are the new roots.
So a round takes at least one step, and the output is that of the search itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptedPath, Greedy
from spectrain.decoding.loop import (
    NullDrafter,
    make_context,
    make_request,
    required_layers,
    run_prompts,
    slots_per_round,
)
from spectrain.drafters.base import Drafter, Drafts
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.randomness import DRAFT, SAMPLE, keyed_generator
from spectrain.trees.base import RootOnlyBuilder, TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree

from .drawing import GeneratorSource, WidthLimit, make_chooser
from .forest import Forest, ForestBuilder
from .rows import (
    repeat_row,
    select_context_rows,
    select_drafter_rows,
    select_feature_rows,
    select_tree_rows,
)
from .search import BeamSearch, Chooser, SearchSettings

Method = Literal["strict", "relaxed", "sample", "dynamic"]
"""strict: the K most likely continuations go on (AtSpeed-S). relaxed: K are drawn without
replacement (AtSpeed-R). sample: so many are drawn as transformers' beam sampling draws, of which
the K most likely go on. dynamic: as relaxed, with at most K (DSBD)."""


@dataclass
class BeamAnswer:
    """The hypotheses of a text, the best first, and the cost of finding them."""

    hypotheses: list[list[int]]
    num_steps: int
    num_forwards: int  # of the target, the prompt's forward left out
    seconds: float


@dataclass(frozen=True)
class BeamEnd:
    """A beam in the middle of a round: a node of a row."""

    row: int
    node: int


@dataclass(frozen=True)
class BeamSession:
    """Decodes one text at a time with beams, without a drafter one step per forward."""

    target: Target
    settings: SearchSettings
    method: Method = "strict"
    drafter: Drafter | None = None
    # Draft tokens of a path, and drafts of a depth over all beams.
    depth: int = 4
    width: int = 8
    temperature: float = 1.0
    # Chance with which as many drafts as beams have to be accepted, used with method dynamic.
    threshold: float = 0.7
    seed: int = 0

    @torch.inference_mode()
    def decode(self, prompt: list[int], sequence_id: int = 0) -> BeamAnswer:
        """Continue a prompt; `sequence_id` keys the random draws."""
        self._check_room(prompt)
        round_loop = BeamRounds(self, prompt, sequence_id)
        start = time.perf_counter()
        while not round_loop.search.is_done:
            round_loop.run_round()
        seconds = time.perf_counter() - start
        search = round_loop.search
        return BeamAnswer(search.hypotheses, search.num_steps, round_loop.num_forwards, seconds)

    def _check_room(self, prompt: list[int]) -> None:
        longest = len(prompt) + self.settings.max_new_tokens
        if longest > self.target.max_length:
            raise UserError(
                f"prompt of {len(prompt)} tokens: the answer does not fit the context of "
                f"{self.target.name} ({self.target.max_length} tokens); lower "
                "eval.max_new_tokens"
            )


class BeamRounds:
    """The rounds of one text."""

    def __init__(self, session: BeamSession, prompt: list[int], sequence_id: int) -> None:
        self.session = session
        self.num_forwards = 0
        self.search = BeamSearch(session.settings)
        self.random = GeneratorSource(keyed_generator(SAMPLE, session.seed, sequence_id, 0))
        self.drafts: Drafts = NullDrafter() if session.drafter is None else session.drafter
        self.builder: TreeBuilder = RootOnlyBuilder()
        if session.drafter is not None:
            self.builder = ForestBuilder(
                session.depth, session.width, session.method != "strict", session.temperature
            )
            self.builder.constraint = session.settings.constraint
            self.builder.source = keyed_generator(DRAFT, session.seed, sequence_id, 0)
        self.context = self._run_prompt(prompt)

    def _run_prompt(self, prompt: list[int]) -> Context:
        """Run the prompt once, make K rows of it, and take the first step, which belongs to no
        round.
        """
        session, drafter = self.session, self.session.drafter
        request = make_request(
            session.target, [prompt], session.settings.max_new_tokens + 1, ignore_eos=True
        )
        slots = (
            len(prompt)
            + session.settings.max_new_tokens
            + 4
            + slots_per_round(drafter, self.builder)
        )
        rule = Greedy()
        cache = session.target.new_cache(1, slots)
        context = make_context(
            session.target, self.builder, cache, required_layers(drafter, rule), 0
        )
        self.context = context
        run_prompts(context, drafter, rule, request)
        logits = session.target.head.logits(self._last_state(context, prompt))[:, 0]
        rows = repeat_row(session.settings.num_beams, session.target.device)
        select_context_rows(context, rows)
        context.new_features = select_feature_rows(context.new_features, rows)
        log_probs = logits.float().log_softmax(-1).expand(len(rows), -1)
        steps = self.search.take_step(
            log_probs, self._make_chooser([BeamEnd(row, 0) for row in range(len(rows))], None)
        )
        context.tokens.scatter_(
            1,
            context.lengths[:, None],
            torch.tensor([[token] for _, token in steps], device=rows.device),
        )
        return context

    def _last_state(self, context: Context, prompt: list[int]) -> Tensor:
        """Return the final state [1, 1, D] of the prompt's last token."""
        return context.new_features.at_layer("final")[:, len(prompt) - 1 : len(prompt)]

    def run_round(self) -> None:
        """Draft, verify, take all steps that the drafts allow, and commit the beams."""
        context = self.context
        if isinstance(self.builder, ForestBuilder):
            self.builder.beams = self.search.beams
            self.builder.beam_scores = self.search.scores
        draft = self.drafts.draft(context)
        self._check_draft(draft)
        tree = self.builder.grow(context, draft)
        features = self.drafts.verify(context, tree)
        self.num_forwards += 1
        assert features.logits is not None
        ends, steps = self._take_steps(features.logits)
        if not self.search.is_done:
            self._commit_beams(tree, features, ends, steps)

    def _check_draft(self, draft: Draft) -> None:
        if self.session.drafter is not None and (
            draft.rollout is None or draft.add_mask_nodes is not None
        ):
            raise UserError(
                "eval.beams: this drafter has no distribution of its own after every token; "
                "use drafter=causal, eagle3 or medusa"
            )

    def _take_steps(self, logits: Tensor) -> tuple[list[BeamEnd], list[tuple[int, int]]]:
        """Take steps from logits [K, N, V] until a beam is no node; return where the last step
        began, and what it chose.
        """
        forest = self.builder.forest if isinstance(self.builder, ForestBuilder) else None
        children = {} if forest is None else forest.find_children()
        ends = [BeamEnd(row, 0) for row in range(len(logits))]
        while True:
            rows = torch.tensor([end.row for end in ends], device=logits.device)
            nodes = torch.tensor([end.node for end in ends], device=logits.device)
            log_probs = logits[rows, nodes].float().log_softmax(-1)
            steps = self.search.take_step(log_probs, self._make_chooser(ends, forest))
            if self.search.is_done:
                return ends, steps
            alive = self.search.is_alive
            below = [
                children.get((ends[beam].row, ends[beam].node, token)) for beam, token in steps
            ]
            if any(node is None and lives for node, lives in zip(below, alive)):
                return ends, steps
            # A beam that does not exist stands at any node of the same depth.
            first = next(
                BeamEnd(ends[beam].row, node)
                for (beam, _), node in zip(steps, below)
                if node is not None
            )
            ends = [
                first if node is None else BeamEnd(ends[beam].row, node)
                for (beam, _), node in zip(steps, below)
            ]

    def _make_chooser(self, ends: list[BeamEnd], forest: Forest | None) -> Chooser | None:
        """Return what draws the candidates of a step; None takes the most likely ones."""
        session, settings = self.session, self.session.settings
        if session.method == "strict":
            return None
        count = settings.num_candidates if session.method == "sample" else settings.num_beams
        threshold = (
            session.threshold
            if session.method == "dynamic" and session.drafter is not None
            else None
        )
        vocab_size = session.target.head.vocab_size

        def offer() -> tuple[Tensor, list[int]]:
            return collect_drafts(forest, ends, self.alive_before, vocab_size)

        self.alive_before = self.search.is_alive
        limit = None if threshold is None else WidthLimit(threshold, session.width)
        return make_chooser(session.temperature, count, self.random, offer, limit)

    def _commit_beams(
        self, tree: TokenTree, features: Features, ends: list[BeamEnd], steps: list[tuple[int, int]]
    ) -> None:
        """Let every beam be the row that it continues, with the path to its last node, and its
        new token as the root.
        """
        device = tree.tokens.device
        parents = tree.parents.tolist()
        sources = [ends[beam] for beam, _ in steps]
        paths = [find_path(parents[end.row], end.node) for end in sources]
        rows = torch.tensor([end.row for end in sources], device=device)
        path = torch.tensor(paths, device=device)
        bonus = torch.tensor([token for _, token in steps], device=device)
        accepted = AcceptedPath(path, torch.full_like(rows, path.shape[1]), bonus)
        select_context_rows(self.context, rows)
        if self.session.drafter is not None:
            select_drafter_rows(self.session.drafter, rows)
        self.context.commit(
            select_tree_rows(tree, rows), select_feature_rows(features, rows), accepted
        )
        self.drafts.commit(self.context, accepted)


def find_path(parents: list[int], node: int) -> list[int]:
    """Return the nodes from the root to a node."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def collect_drafts(
    forest: Forest | None, ends: list[BeamEnd], is_alive: list[bool], vocab_size: int
) -> tuple[Tensor, list[int]]:
    """Return q [K V] of the continuations of the beams at these ends, and the drafts among them, in
    the order of their draw.

    A path's q counts with the score of its beam. Drafts after other nodes do not matter: what was
    drawn after these ones is a draw without replacement from q of these ones.
    """
    q = torch.zeros(len(ends), vocab_size, dtype=torch.float64)
    drafts: list[tuple[int, int]] = []
    if forest is None:
        return q.flatten(), []
    for beam, end in enumerate(ends):
        log_q = forest.node_log_q(end.row, end.node) if is_alive[beam] else None
        if log_q is None:
            continue
        ids = torch.arange(len(log_q)) if forest.draft_ids is None else forest.draft_ids.cpu()
        q[beam].index_copy_(0, ids, log_q.exp())
        for node, parent in enumerate(forest.parents[end.row].tolist()):
            if parent == end.node and (end.row, node) in forest.ranks:
                drafts.append(
                    (
                        forest.ranks[end.row, node],
                        beam * vocab_size + int(forest.tokens[end.row, node]),
                    )
                )
    total = q.sum()
    return (q / total if total > 0 else q).flatten(), [draft for _, draft in sorted(drafts)]

"""Jacobi decoding (Santilli et al., 2023): the target's answers to its last guesses are its next ones. A target may be trained
for it (CLLM, Kou et al., 2024).

Shapes: B batch, T tokens, K blocks of a text, n tokens of a block, R places of all blocks, N nodes, D target width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spectrain.config.values import Count, NotNegative, Positive, Seed, Steps
from spectrain.drafters.base import Drafter, Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.context import Context
from spectrain.drafters.layers.losses import TargetLogProbs, head_loss
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget
from spectrain.models.features import Features
from spectrain.models.lora import TargetTraining
from spectrain.randomness import DRAFT, TRAJECTORY, keyed_generator, sequence_generator
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import TokenTree
from spectrain.trees.trie import Trie

from .trajectories import Trajectories, TrajectoryBlocks

if TYPE_CHECKING:
    from spectrain.models.target import Target


class Jacobi(Drafter):
    """y_i <- argmax p(. | x, y_<i) for all tokens of a window at once: what verifies guesses makes the next ones.

    The window is as long as the tree is deep. What the iteration has fixed is kept, with one token more; what the target says
    behind a wrong guess is the next guess. With `method` jacobi the window moves on with the text, filled up with tokens drawn
    from it; with gauss_seidel it stays until the whole block is fixed, and the next block begins behind it (Santilli et al.,
    section 3.1; CLLM decodes so). The greedy output is the only fixed point.

    Training is CLLM's (section 3.2): the target says behind a guessed block y of a trajectory what it says behind the fixed
    point y* of that trajectory,

        L = sum over blocks and i of KL(sg p(. | x, y*_<i) || p(. | x, y_<i))  +  language_model_weight L_LM

    Trajectories are the untrained target's, of `num_blocks` blocks of `block` tokens in each answer, and are kept from one
    epoch to the next; which of its states is trained is drawn anew every step. L_LM is the cross-entropy of the data or, with
    self_distillation, KL(original || trained). The output is the trained target's.
    """

    capabilities = Capabilities(is_copier=True, nestable=False)

    def __init__(
        self,
        target: Target,
        method: Literal["jacobi", "gauss_seidel"] = "jacobi",  # a window that moves on, or block after block
        block: Steps = 8,  # tokens of a trained block
        num_blocks: Count = 8,  # of a conversation that are trained
        language_model_weight: NotNegative = 1.0,  # of what holds the target to what it was, against the consistency loss
        self_distillation: bool = False,
        adapt: Literal["full", "lora"] = "full",
        rank: Count = 32,
        alpha: Positive = 32.0,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.method, self.block, self.num_blocks, self.seed = method, block, num_blocks, seed
        self.language_model_weight, self.self_distillation = language_model_weight, self_distillation
        self.target_training = TargetTraining(adapt, rank, alpha, keeps_original=True)
        self.capabilities = replace(self.capabilities, target_training=self.target_training)
        self.trajectories = Trajectories(block, num_blocks, seed)
        self.guesses: list[list[int]] = []  # of each text, verified last
        self.answers: list[list[int]] = []  # what the target says at the root and behind each of them

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Open the target's weights, or the adapters that are put into it."""
        self.target_training.start_training(target)

    # Training

    @property
    def stages(self) -> list[Stage]:
        """Without features: the target runs in the loss, over guesses too."""
        return [Stage([{"params": self.target_training.parameters}], ())]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Every block twice behind its text, in one of its states and in the last; the second says what the first should."""
        with self.target_training.use_original(target) as original:
            roots, states = self.trajectories.get_trajectories(batch, original)
        drawn = []  # of every block the state that it is in
        for row, (tokens, _) in zip(roots, batch.split_documents(), strict=True):
            source = sequence_generator(TRAJECTORY, self.seed, tokens, 1 + state.step)
            drawn += [int(torch.randint(self.block, (1,), generator=source))] * len(row)
        number = torch.tensor(drawn, dtype=torch.int64, device=states.device)
        words = torch.stack([states[number, torch.arange(len(drawn), device=states.device)], states[-1]], dim=1)
        blocks = TrajectoryBlocks.from_roots(batch, [[root for root in row for _ in range(2)] for row in roots], self.block)
        final = blocks.run_target(target, words, grad=torch.is_grad_enabled(), recompute=state.recompute)
        guessed, fixed = blocks.token_index[::2], blocks.token_index[1::2]
        theirs = TargetLogProbs(HeadTarget(final[fixed.flatten()].detach(), target.head.projection))
        labels = torch.zeros(guessed.numel(), dtype=torch.int64, device=final.device)  # a divergence asks for none
        weights = blocks.loss_weights(batch, guessed)
        hidden = final[guessed.flatten()]
        judged = head_loss("forward_kl", hidden, target.head.projection, labels, theirs, row_weight=weights)
        own = final[blocks.batch_index][batch.next_is_supervised.flatten()]
        terms = {"consistency": judged.loss, "language_model": self._language_model_loss(batch, own, target)}
        depths = torch.arange(self.block, device=final.device).repeat(len(guessed))
        return Losses.by_depth(terms, judged.predictions == judged.labels, depths, self.block)

    def _language_model_loss(self, batch: Batch, own: Tensor, target: Target) -> Tensor:
        """What keeps the target good, of its states [R, D] at supervised positions."""
        tokens, theirs = batch.tokens.roll(-1, dims=1)[batch.next_is_supervised], None
        if self.self_distillation:
            with torch.no_grad(), self.target_training.use_original(target) as original:
                final = original.features(batch.tokens, ("final",), batch.lengths).at_layer("final")[batch.next_is_supervised]
                theirs = TargetLogProbs(HeadTarget(final, original.head.projection))
        name = "forward_kl" if self.self_distillation else "cross_entropy"
        return self.language_model_weight * head_loss(name, own, target.head.projection, tokens, theirs).loss

    # Decoding

    def draft(self, context: Context) -> Draft:
        """The last answers of each text, from its new root on."""
        counts, keys = context.counts.tolist(), context.sequence_ids.tolist()
        if context.round == 0:
            self.guesses = [[] for _ in counts]
            self.answers = [[] for _ in counts]
        texts = zip(context.tokens.tolist(), (context.lengths + 1).tolist())
        news = [self._next(guesses, answers, count) for guesses, answers, count in zip(self.guesses, self.answers, counts)]
        depth = context.builder.depth
        self.guesses = [self._filled(row, text[:end], key, depth) for row, (text, end), key in zip(news, texts, keys)]
        return Draft(continuations=[Trie.from_continuations([row]) for row in self.guesses])

    def _next(self, guesses: list[int], answers: list[int], count: int) -> list[int]:
        """What the target said behind the root and `guesses` of the tokens after the next root, which `count` tokens precede;
        in a block nothing beyond its end."""
        return answers[count : len(guesses) + (self.method == "jacobi")]

    def _filled(self, guesses: list[int], text: list[int], key: int, depth: int) -> list[int]:
        """As many guesses as the window is long; a block that is not done stays as it is."""
        if guesses and self.method == "gauss_seidel":
            return guesses
        picks = torch.randint(len(text), (max(depth - len(guesses), 0),), generator=keyed_generator(DRAFT, 0, key, len(text)))
        return guesses[:depth] + [text[pick] for pick in picks.tolist()]

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """The target's logits, which are the next iteration."""
        seen = super().verify(context, tree)
        assert seen.logits is not None
        self.answers = seen.logits.argmax(-1).tolist()
        return seen

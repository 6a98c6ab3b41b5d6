"""Jacobi decoding (Santilli et al., 2023): the target's predictions after its guesses are its next
guesses.

A target may be trained for it (CLLM, Kou et al., 2024), and it may be sampled (Teng et al., 2024).
Shapes: B batch, T tokens, K blocks of a text, n tokens of a block, R positions of all blocks, N
nodes, D target width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import Count, NotNegative, Positive, Seed, Steps, Width
from spectrain.copying.trie import Trie
from spectrain.drafters.base import Drafter, Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.context import Context
from spectrain.drafters.layers.language_model_loss import language_model_loss
from spectrain.drafters.layers.losses import TargetLogProbs, head_loss
from spectrain.drafters.step_cost import BatchShape, Judged, Run, StepCost
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget
from spectrain.models.features import Features
from spectrain.models.lora import TargetTraining
from spectrain.models.target import Target
from spectrain.randomness import DRAFT, keyed_generator, sequence_generator
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.purposes import TRAJECTORY

from .sampled_window import SampledWindow
from .trajectories import Trajectories, TrajectoryBlocks


class Jacobi(Drafter):
    """y_i <- argmax p(. | x, y_<i) for all tokens of a window at once: the verification of guesses
    yields the next ones.

    The window is as long as the tree is deep. Tokens that the iteration has fixed are accepted,
    with one more; the target's predictions after a wrong guess are the next guesses. With `method`
    jacobi the window moves with the text and is filled with tokens drawn from it. With gauss_seidel
    it stays until the full block is fixed, and the next block begins after it (Santilli et al.,
    section 3.1; CLLM decodes like this). The greedy output is the only fixed point.

    With speculative, it is speculative Jacobi decoding (Teng et al., 2024, arXiv 2410.01699,
    section 4): a window is drawn from the target's distributions at the same positions one round
    ago, so that acceptance=chain with tree.children=sampled weighs the target's distribution
    against the last one and the output has the target's distribution at any temperature.

    Training is CLLM's (section 3.2): after a guessed block y of a trajectory the target learns to
    predict what it predicts after the fixed point y* of that trajectory,

        L = sum over blocks and i of KL(sg p(. | x, y*_<i) || p(. | x, y_<i))  +
        language_model_weight L_LM

    Trajectories are the untrained target's, of `num_blocks` blocks of `block` tokens in each
    answer, and are cached across epochs; every step draws which of their states is trained. L_LM is
    the cross-entropy of the data or, with self_distillation, KL(original || trained). The output is
    the trained target's.
    """

    capabilities = Capabilities(is_copier=True, nestable=False)

    def __init__(
        self,
        target: Target,
        # How decoding iterates: a window that moves with the text (jacobi), block after block
        # (gauss_seidel), or a moving window that is drawn from the target's last distributions, for
        # sampling (speculative).
        method: Literal["jacobi", "gauss_seidel", "speculative"] = "jacobi",
        # Number of tokens of a trained block.
        block: Steps = 8,
        # Number of blocks per conversation that are trained.
        num_blocks: Count = 8,
        # Weight of the language-model loss, which keeps the target's quality, relative to the
        # consistency loss.
        language_model_weight: NotNegative = 1.0,
        # Whether the language-model loss is KL(original || trained) instead of the cross-entropy of
        # the data.
        self_distillation: bool = False,
        # How the target is trained: all weights (full) or LoRA adapters (lora).
        adapt: Literal["full", "lora"] = "full",
        # Rank of the LoRA adapters, used with adapt=lora.
        rank: Width = 32,
        # Scale of the LoRA adapters; their output is multiplied by alpha / rank.
        alpha: Positive = 32.0,
        # Seed of the random blocks and states.
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.method = method
        self.block = block
        self.num_blocks = num_blocks
        self.seed = seed
        self.language_model_weight, self.self_distillation = (
            language_model_weight,
            self_distillation,
        )
        self.target_training = TargetTraining(adapt, rank, alpha, keeps_original=True)
        is_copier = method != "speculative"
        self.capabilities = replace(
            self.capabilities,
            is_copier=is_copier,
            chains_only=method == "speculative",
            target_training=self.target_training,
        )
        self.trajectories = Trajectories(block, num_blocks, seed)
        self.guesses: list[list[int]] = []  # the guesses of each text that were verified last
        # the target's predictions after the root and after each guess
        self.answers: list[list[int]] = []
        self.window = SampledWindow()

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Make the target's weights trainable, or insert adapters."""
        self.target_training.start_training(target)

    # Training

    @property
    def stages(self) -> list[Stage]:
        """One stage without features: the target runs in the loss, because it also reads
        guesses.
        """
        return [Stage([{"params": self.target_training.parameters}], ())]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """The target runs over the text and over two states of every trained block."""
        guesses = 2 * self.num_blocks * self.block * batch.texts
        rows = batch.tokens + guesses
        judged = Judged(
            max(guesses / 2, batch.supervised),
            target.head.vocab_size,
            batch.supervised,
            copies=1,
            label_copies=1,
        )
        runs = [Run(target.layers, rows, rows / batch.texts, mask=rows * rows / batch.texts)]
        # The trajectories take one forward a step of Jacobi's iteration.
        iterated = self.block * (batch.tokens + guesses / 2)
        original = batch.tokens if self.self_distillation else 0
        return StepCost(runs, judged, forward_rows=original, cached_rows=iterated)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Run every block after its text in a random state and in its fixed point, whose
        predictions are the labels.
        """
        with self.target_training.use_original(target) as original:
            roots, states = self.trajectories.get_trajectories(batch, original)
        drawn = []  # index of the drawn state of every block
        for row_roots, (tokens, _) in zip(roots, batch.split_documents(), strict=True):
            source = sequence_generator(TRAJECTORY, self.seed, tokens, 1 + state.step)
            drawn += [int(torch.randint(self.block, (1,), generator=source))] * len(row_roots)
        state_index = torch.tensor(drawn, dtype=torch.int64, device=states.device)
        block_tokens = torch.stack(
            [states[state_index, torch.arange(len(drawn), device=states.device)], states[-1]], dim=1
        )
        blocks = TrajectoryBlocks.from_roots(
            batch,
            [[root for root in row_roots for _ in range(2)] for row_roots in roots],
            self.block,
        )
        final = blocks.run_target(
            target, block_tokens, grad=torch.is_grad_enabled(), recompute=state.recompute
        )
        guessed = blocks.token_index[::2]
        fixed = blocks.token_index[1::2]
        target_log_probs = TargetLogProbs(
            HeadTarget(final[fixed.flatten()].detach(), target.head.projection)
        )
        # a divergence reads none
        labels = torch.zeros(guessed.numel(), dtype=torch.int64, device=final.device)
        weights = blocks.loss_weights(batch, guessed)
        hidden = final[guessed.flatten()]
        result = head_loss(
            "forward_kl",
            hidden,
            target.head.projection,
            labels,
            target_log_probs,
            row_weight=weights,
        )
        own_states = final[blocks.batch_index][batch.next_is_supervised.flatten()]
        own_loss = language_model_loss(
            own_states, batch, target, self.target_training, self.self_distillation
        )
        terms = {
            "consistency": result.loss,
            "language_model": self.language_model_weight * own_loss,
        }
        depths = torch.arange(self.block, device=final.device).repeat(len(guessed))
        return Losses.by_depth(terms, result.predictions == result.labels, depths, self.block)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Draft the last predictions of each text, from its new root on."""
        if self.method == "speculative":
            return Draft(self.window.make_rollout(context))
        counts = context.num_new.tolist()
        keys = context.sequence_ids.tolist()
        if context.round == 0:
            self.guesses = [[] for _ in counts]
            self.answers = [[] for _ in counts]
        texts = zip(context.tokens.tolist(), (context.lengths + 1).tolist())
        next_guesses = [
            self._next_guesses(guesses, answers, count)
            for guesses, answers, count in zip(self.guesses, self.answers, counts)
        ]
        depth = context.builder.depth
        self.guesses = [
            self._fill_window(row, text[:end], key, depth)
            for row, (text, end), key in zip(next_guesses, texts, keys)
        ]
        return Draft(continuations=[Trie.from_continuations([row]) for row in self.guesses])

    def _next_guesses(self, guesses: list[int], answers: list[int], count: int) -> list[int]:
        """Return the target's predictions after the next root, which follows `count` tokens; in
        a block, none past its end.
        """
        return answers[count : len(guesses) + (self.method == "jacobi")]

    def _fill_window(self, guesses: list[int], text: list[int], key: int, depth: int) -> list[int]:
        """Fill the window with tokens drawn from the text; an unfinished block stays as it is."""
        if guesses and self.method == "gauss_seidel":
            return guesses
        picks = torch.randint(
            len(text),
            (max(depth - len(guesses), 0),),
            generator=keyed_generator(DRAFT, 0, key, len(text)),
        )
        return guesses[:depth] + [text[pick] for pick in picks.tolist()]

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """Verify as the target does, and retain its predictions, which are the next iteration."""
        features = super().verify(context, tree)
        assert features.logits is not None
        if self.method == "speculative":
            self.window.record_logits(features.logits, context.temperature)
        else:
            self.answers = features.logits.argmax(-1).tolist()
        return features

"""A drafter that learns beside a policy: it is continued on recent rollouts within a share of the
time, and a candidate is taken only where its gain on held-out prompts is proven.

FOLDER/ledger.jsonl           every decision with its numbers, and every batch of rollouts
FOLDER/candidates/0001        a candidate: data.jsonl, train.log, run/drafter
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from spectrain.config.build import register_resolvers
from spectrain.config.resolve import default_group
from spectrain.config.spec import RunSpec
from spectrain.config.values import Count, Number, Positive, Share
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.errors import RunError, RunInterrupted, UserError, describe_error
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.output.streams import print_warning
from spectrain.runs.defaults import load_saved_settings
from spectrain.runs.drafters import load_for_decoding
from spectrain.runs.folder import require_drafter_directory
from spectrain.trees import Chain
from spectrain_serve.continuation import plan_continuation, train_on_examples
from spectrain_serve.promotion import (
    LEAST_PROMPTS,
    PromotionProof,
    compare_rounds,
    decide_promotion,
    decode_prompts,
)

from .policy import make_policy_target, share_weights
from .process_state import preserve_process_state, redirect_to_file
from .rollouts import RolloutBatch, RolloutStore

TRAINED_GROUPS = ("data", "source", "trainer", "optimizer", "schedule")
PROOF_SEED = 1
"""Beside the seed of the rollouts, so that the proof draws other numbers."""
Publisher = Callable[[Path], None]
"""Receives the folder of every drafter that is promoted."""


@dataclass(frozen=True)
class DrafterLearningSettings:
    """When a drafter learns, from how much, and how it is proven."""

    # Training steps of the policy between two candidates; 0 trains none.
    every: Number = 50
    # Largest share of the time since the start that candidates and their proofs may take.
    share: Share = 0.1
    # Training steps of a candidate; null trains as long as the share of the time lasts.
    steps: Count | None = None
    # Learning rate of a candidate; null takes that of the drafter's run.
    lr: Positive | None = None
    # Number of recent rollouts that are kept for training.
    rollouts: Count = 512
    # Number of held-out prompts that the proof decodes.
    held_out: Count = 32
    # Number of new tokens of each of them.
    prove_tokens: Count = 64
    # Tokens of a draft.
    depth: Count = 3


@dataclass(frozen=True)
class RolloutSampling:
    """How rollouts are drawn, as a rule of acceptance has it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def make_rule(self, offset: int = 0) -> AcceptanceRule:
        """Return the rule by which a drafted rollout is the very one that is drawn without
        drafts.
        """
        if self.temperature == 0:
            return Greedy()
        return Match(self.temperature, self.top_k, self.top_p, self.seed + offset)


@dataclass
class DrafterLearner:
    """A drafter that drafts rollouts and learns from them."""

    # The run folder or the drafter directory that it begins with.
    run: Path
    # A new folder for candidates and the ledger.
    folder: Path
    settings: DrafterLearningSettings = field(default_factory=DrafterLearningSettings)
    publish: Publisher | None = None

    def __post_init__(self) -> None:
        if (self.folder / "ledger.jsonl").exists():
            raise UserError(
                f"folder={self.folder}: a drafter has learned there; name another folder, and as "
                "run= the drafter that its ledger names last"
            )
        register_resolvers()
        self.active = require_drafter_directory("run", self.run)
        # How often another drafter was promoted.
        self.num_promoted = 0
        self.num_candidates = 0
        self.store = RolloutStore(self.settings.rollouts, self.settings.held_out)
        self.batches: list[RolloutBatch] = []
        self.proofs: list[PromotionProof] = []
        self.began = time.monotonic()
        self.spent_seconds = 0.0
        self.last_seconds = 0.0
        self._lines: list[str] = []
        # Texts so far, which key the draws of the next one.
        self._num_texts = 0
        self._target: Target | None = None
        self._drafter: Drafter | None = None

    def start_clock(self) -> None:
        """Count the time, of which candidates take a share, from now."""
        self.began = time.monotonic()
        self.spent_seconds = 0.0

    # Rollouts

    def generate(
        self,
        policy: nn.Module,
        prompts: list[list[int]],
        sampling: RolloutSampling,
        max_new_tokens: int,
        step: int = 0,
    ) -> list[list[int]]:
        """Return the token ids that the policy writes after each prompt, with drafts.

        The draws depend on the seed and the number of the rollout alone: every drafter, and none,
        gives the same tokens but for rounding.
        """
        began = time.monotonic()
        target = self.read_policy(policy)
        with preserve_process_state():
            generations = decode(
                target,
                prompts,
                sampling.make_rule(),
                max_new_tokens,
                self._drafter,
                Chain(self.settings.depth),
                [*range(self._num_texts, self._num_texts + len(prompts))],
            )
        self._num_texts += len(prompts)
        self.record_batch(step, generations, time.monotonic() - began)
        return [generation.output for generation in generations]

    def read_policy(self, policy: nn.Module) -> Target:
        """Return the target with the weights that the policy has now; the first call loads it and
        the drafter.
        """
        if self._target is None:
            with preserve_process_state():
                self._target = make_policy_target(self.make_spec(), policy)
                self._drafter = load_for_decoding(self.active, self._target)
        share_weights(self._target, policy)
        return self._target

    def record_batch(self, step: int, generations: list[Generation], seconds: float) -> None:
        """Note how many forwards a batch of rollouts took."""
        batch = RolloutBatch(
            step,
            self.num_promoted,
            len(generations),
            sum(sum(generation.round_lengths) for generation in generations),
            sum(len(generation.round_lengths) for generation in generations),
            round(seconds, 4),
        )
        self.batches.append(batch)
        self.write_event("rollouts", **asdict(batch), tokens_per_forward=batch.tokens_per_forward)

    def make_spec(self) -> RunSpec:
        """Return the settings of the run that trained the drafter; where there is only a drafter,
        those of conf/.
        """
        defaults = {group: default_group(group).node for group in TRAINED_GROUPS}
        saved = load_saved_settings(self.run, default_group("target"), TRAINED_GROUPS)
        return RunSpec.from_nodes({**defaults, **saved, "recipe_name": None})

    # Candidates

    def is_due(self, step: int) -> bool:
        """Tell whether a candidate is to be trained after a step of the policy."""
        settings = self.settings
        if not settings.every or step % settings.every or not self.store.num_new:
            return False
        if len(self.store.held_out) < LEAST_PROMPTS:
            return False
        return self.seconds_left() > self.last_seconds

    def seconds_left(self) -> float:
        """Return the seconds that the share of the time leaves for candidates now."""
        return self.settings.share * (time.monotonic() - self.began) - self.spent_seconds

    def try_learning(self, policy: nn.Module, sampling: RolloutSampling, step: int) -> None:
        """Run `learn`; a failure of it is recorded, and the policy goes on with the active
        drafter.
        """
        began = time.monotonic()
        try:
            self.learn(policy, sampling, step)
        except RunInterrupted:
            raise
        except Exception as error:
            self.last_seconds = time.monotonic() - began
            self.spent_seconds += self.last_seconds
            self.write_event("failed", step=step, message=describe_error(error))
            print_warning(
                f"the candidate of step {step} failed ({describe_error(error)}); the "
                f"drafter stays {self.active}"
            )

    def learn(self, policy: nn.Module, sampling: RolloutSampling, step: int) -> PromotionProof:
        """Train a candidate on the recent rollouts, prove it, and use it where it is better."""
        began = time.monotonic()
        self.num_candidates += 1
        folder = self.folder / "candidates" / f"{self.num_candidates:04d}"
        folder.mkdir(parents=True)
        target = self.read_policy(policy)
        with preserve_process_state(), redirect_to_file(folder / "train.log"):
            directory = self.train_candidate(target, folder)
            trained = time.monotonic() - began
            candidate = load_for_decoding(directory, target)
            proof = self.prove(target, candidate, sampling)
        self.proofs.append(proof)
        self.store.num_new = 0
        if proof.is_promoted:
            self.active = directory
            self._drafter = candidate
            self.num_promoted += 1
            self.publish_drafter()
        self.last_seconds = time.monotonic() - began
        self.spent_seconds += self.last_seconds
        self.write_event(
            "promoted" if proof.is_promoted else "kept for inspection",
            step=step,
            candidate=folder.name,
            drafter=str(self.active),
            train_seconds=round(trained, 3),
            seconds=round(self.last_seconds, 3),
            share=round(self.spent_seconds / (time.monotonic() - self.began), 4),
            **asdict(proof),
        )
        return proof

    def publish_drafter(self) -> None:
        """Hand the active drafter to the publisher; where that fails, the policy goes on."""
        if self.publish is None:
            return
        try:
            self.publish(self.active)
        except (RunError, UserError, OSError) as error:
            self.write_event("not published", message=describe_error(error))

    def train_candidate(self, target: Target, folder: Path) -> Path:
        """Continue the active drafter on the recent rollouts; return the folder of the result."""
        settings = self.settings
        trainer: dict[str, Any] = {"save_every": None}
        if settings.lr is not None:
            trainer["lr"] = settings.lr
        if settings.steps is not None:
            trainer["max_steps"] = settings.steps
        else:
            # The proof takes a part of the time too.
            trainer["max_minutes"] = max(1.0, self.seconds_left() / 2) / 60
        spec = plan_continuation(self.make_spec(), str(self.active), trainer)
        return train_on_examples(spec, target, [*self.store.recent], folder) / "drafter"

    def prove(
        self, target: Target, candidate: Drafter, sampling: RolloutSampling
    ) -> PromotionProof:
        """Compare a candidate with the active drafter on the held-out prompts, by the policy as it
        is now and the sampling of the rollouts.
        """
        assert self._drafter is not None
        settings = self.settings
        serving, proposed = (
            decode_prompts(
                target,
                drafter,
                self.store.held_out_prompts,
                sampling.make_rule(PROOF_SEED),
                settings.depth,
                settings.prove_tokens,
            )
            for drafter in (self._drafter, candidate)
        )
        return decide_promotion(compare_rounds(serving, proposed))

    def write_event(self, event: str, **numbers: Any) -> None:
        """Add a line to the ledger."""
        self._lines.append(json.dumps({"event": event, **numbers}) + "\n")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "ledger.jsonl", "".join(self._lines))

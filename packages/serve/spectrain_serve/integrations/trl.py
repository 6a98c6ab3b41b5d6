"""A drafter that learns inside TRL's training by reinforcement learning (`GRPOTrainer`).

    from spectrain.integrations.trl import DrafterCallback

    learner = DrafterCallback(run="runs/eagle3-tiny", folder="runs/drafter-in-rl")
    trainer = GRPOTrainer(..., rollout_func=learner.generate_rollouts, callbacks=[learner])

`generate_rollouts` lets the drafter draft the rollouts in this process. Where another engine writes
them, as a server of vLLM does, `record_rollouts` collects them, and `publish` receives the folder
of every better drafter. TRL is not imported here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from spectrain.errors import UserError

from .learner import DrafterLearner, DrafterLearningSettings, Publisher, RolloutSampling

RewardFunction = Callable[..., list[float]]
NEUTRAL_SETTINGS = {"min_p": (None, 0.0), "repetition_penalty": (None, 1.0)}
"""Settings of GRPOConfig that this decoding does not have, and their values without effect."""


class DrafterCallback(TrainerCallback):
    """Continues a drafter beside the policy, proves every candidate, and drafts rollouts with the
    best one.

    It changes neither rewards nor weights of the policy: rollouts are drawn by their number and the
    seed alone, whatever drafter drafts them, and random generators are left as they were.
    """

    def __init__(
        self,
        # The run folder, drafter directory or export of the drafter that it begins with.
        run: str | os.PathLike[str],
        # A new folder for candidates and the ledger.
        folder: str | os.PathLike[str],
        # Receives the folder of every drafter that is promoted; null hands it to nobody else.
        publish: Publisher | None = None,
        **settings: Any,
    ) -> None:
        """Make the callback; `settings` are those of `DrafterLearningSettings`, as in every=20."""
        self.learner = DrafterLearner(
            Path(run), Path(folder), make_settings(settings), publish=publish
        )
        self._tokenizer: Any = None
        self._template_arguments: dict[str, Any] = {}

    def generate_rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Write one answer per prompt with drafts: what `GRPOTrainer(rollout_func=)` calls."""
        args = trainer.args
        check_single_process(args)
        prompt_ids = tokenize_prompts(
            prompts,
            trainer.processing_class,
            {
                "chat_template": getattr(trainer, "chat_template", None),
                **(getattr(args, "chat_template_kwargs", None) or {}),
            },
        )
        completion_ids = self.learner.generate(
            trainer.model,
            prompt_ids,
            read_sampling(args),
            args.max_completion_length,
            trainer.state.global_step,
        )
        if trainer.model.training:
            self.add_rollouts(prompt_ids, completion_ids)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    def record_rollouts(self, reward: RewardFunction) -> RewardFunction:
        """Return a reward function that gives the same rewards and collects the rollouts that it
        judges.
        """

        @wraps(reward)
        def judge(**given: Any) -> list[float]:
            if self._tokenizer is not None:
                prompts = tokenize_prompts(
                    given["prompts"], self._tokenizer, self._template_arguments
                )
                self.add_rollouts(prompts, given["completion_ids"])
            return reward(**given)

        return judge

    def add_rollouts(
        self, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]]
    ) -> None:
        """Add the token ids of rollouts to those that the drafter learns from."""
        for prompt, answer in zip(prompt_ids, completion_ids):
            self.learner.store.add([*prompt], [*answer])

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Check the settings of the training, and begin to count time."""
        check_single_process(args)
        read_sampling(args)
        self._tokenizer = given.get("processing_class")
        self._template_arguments = getattr(args, "chat_template_kwargs", None) or {}
        self.learner.start_clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Train and prove a candidate where one is due."""
        if self.learner.is_due(state.global_step):
            self.learner.try_learning(given["model"], read_sampling(args), state.global_step)


def make_settings(settings: dict[str, Any]) -> DrafterLearningSettings:
    """Return settings by their names; a UserError names one that does not exist or cannot be."""
    names = list(DrafterLearningSettings.__dataclass_fields__)
    for name, value in settings.items():
        if name not in names:
            raise UserError(f"{name}: there is no such setting; use {', '.join(names)}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_optional = name in ("steps", "lr") and value is None
        least = 0 if name in ("every", "share", "lr") else 1
        if not is_optional and not (is_number and value >= least):
            raise UserError(f"{name}={value}: use a number of at least {least}")
    if settings.get("share", 0) > 1:
        raise UserError(f"share={settings['share']}: use at most 1")
    return DrafterLearningSettings(**settings)


def check_single_process(args: Any) -> None:
    """Raise a UserError where several processes train the policy."""
    if args.world_size > 1:
        raise UserError(
            f"DrafterCallback: {args.world_size} processes train the policy, and it works in a "
            "single one; let spectrain follow learn from the server that writes the rollouts"
        )


def read_sampling(args: Any) -> RolloutSampling:
    """Return how a GRPOConfig samples; a UserError names a setting that drafted decoding lacks."""
    for name, neutral in NEUTRAL_SETTINGS.items():
        if getattr(args, name, None) not in neutral:
            raise UserError(
                f"{name}={getattr(args, name)}: drafted rollouts sample by temperature, top_k and "
                "top_p alone; leave it out"
            )
    if getattr(args, "generation_kwargs", None):
        raise UserError(
            "generation_kwargs: drafted rollouts sample by temperature, top_k and top_p alone; "
            "leave it out"
        )
    return RolloutSampling(
        float(args.temperature),
        max(0, getattr(args, "top_k", None) or 0),
        float(args.top_p),
        int(args.seed),
    )


def tokenize_prompts(
    prompts: list[Any], tokenizer: Any, arguments: dict[str, Any]
) -> list[list[int]]:
    """Return the token ids of prompts as TRL makes them, of texts or of lists of messages."""
    if all(isinstance(prompt, str) for prompt in prompts):
        return [[*ids] for ids in tokenizer(text=prompts)["input_ids"]]
    for prompt in prompts:
        for message in prompt:
            if not isinstance(message["content"], str):
                raise UserError(
                    "prompts: a message holds other content than text, which drafted rollouts do "
                    "not take"
                )
    rendered = tokenizer.apply_chat_template(
        conversation=prompts,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **{key: value for key, value in arguments.items() if value is not None},
    )
    return [[*ids] for ids in rendered["input_ids"]]

"""The settings of an evaluation, and the prompts that it scores."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from spectrain.errors import UserError
from spectrain.eval.columns import tracked_systems
from spectrain.eval.prompts import read_prompts
from spectrain.eval.settings import (
    AnswerLimit,
    DecodingSettings,
    OutputCheck,
    PromptSettings,
    ReportSettings,
    StatisticsSettings,
    SystemSettings,
)
from spectrain.models.target import Target


@dataclass
class PromptedEvaluation(OutputCheck, ReportSettings, AnswerLimit, PromptSettings):
    """An evaluation with its prompts: `chosen`, and in `skipped` the numbers of those left out,
    by reason.

    Its settings are those that a running server takes as well as this engine.
    """

    def __post_init__(self) -> None:
        PromptSettings.__post_init__(self)
        AnswerLimit.__post_init__(self)
        prompts = read_prompts(self.prompts, self.limit, self.categories)
        self.prompts_read = prompts
        self.chosen = prompts.prompts
        self.skipped = Counter(prompts.skipped)

    def check_prompts(self, target: Target) -> None:
        """Extend the prompts to the lengths of eval.context. Leave out those that do not fit the
        target's context with their answer, and raise UserError if none fits."""
        if self.context_filler is not None:
            self.context_filler = self.context_filler.fit_to(target, self.max_new_tokens)
            self.chosen, omitted = self.context_filler.fill_prompts(
                self.prompts_read.prompts, target
            )
            self.skipped = Counter(self.prompts_read.skipped) + Counter(omitted)
        lengths = [len(prompt.tokenize_for(target)) for prompt in self.chosen]
        room = target.max_length - self.max_new_tokens
        fitting = [prompt for prompt, length in zip(self.chosen, lengths) if length <= room]
        if not fitting:
            raise UserError(
                f"eval.prompts: the shortest prompt has {min(lengths)} tokens and, with "
                f"eval.max_new_tokens={self.max_new_tokens}, none fits the context of "
                f"{target.name} ({target.max_length} tokens); shorten one of them"
            )
        if len(fitting) < len(self.chosen):
            self.skipped["too long"] = len(self.chosen) - len(fitting)
            self.chosen = fitting
        self.skipped |= Counter(
            reason for prompt in self.chosen for reason in prompt.list_unrendered(target)
        )

    def tabulate(self, summary: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a row of values for each system of a summary, for trackers."""
        return tracked_systems(summary)


@dataclass
class EngineEvaluation(StatisticsSettings, DecodingSettings, SystemSettings, PromptedEvaluation):
    """The settings and the prompts of an evaluation with this engine."""

    def __post_init__(self) -> None:
        SystemSettings.__post_init__(self)
        StatisticsSettings.__post_init__(self)
        PromptedEvaluation.__post_init__(self)

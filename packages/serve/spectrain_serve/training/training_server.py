"""A server as trainings use it: what the core asks of it, in terms of its requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spectrain.data.chat import Example
from spectrain.data.shards import PendingRow
from spectrain.drafters.base import Stage
from spectrain.features.base import FeatureServer, StateCapture
from spectrain.models.features import Layer
from spectrain.models.target import Target
from spectrain.regeneration.answer_states import AnswerStates
from spectrain.regeneration.sampling import Sampling
from spectrain.regeneration.writers import (
    AnswerServer,
    AnswerWriter,
    collect_prompts,
    render_prompt,
)

from ..servers.base import Server
from .captured_answers import CapturingWriter
from .server_capture import ServerCapture
from .server_states import StateRequester
from .server_writer import ServerWriter


class TrainingServer(Server, FeatureServer, AnswerServer):
    """A server that writes answers and computes features for trainings."""

    def start_capture(
        self, target: Target, layers: tuple[Layer, ...], examples: list[Example]
    ) -> StateCapture:
        requester = StateRequester(self, target, layers)
        return ServerCapture(requester, requester.connect(examples))

    def make_writer(self, sampling: Sampling) -> AnswerWriter:
        return ServerWriter(sampling, self)

    def make_capturing_writer(
        self,
        sampling: Sampling,
        target: Target,
        stage: Stage,
        open_states: Callable[[str], AnswerStates],
        rows: list[PendingRow],
    ) -> AnswerWriter:
        requester = StateRequester(self, target, stage.layers)
        make_prompt = partial(render_prompt, target.template)
        prompts = collect_prompts(make_prompt, sampling, rows, count=4)
        engine = requester.connect([Example(prompt, [False] * len(prompt)) for prompt in prompts])
        writer = CapturingWriter(sampling, requester, open_states(engine))
        writer.check_sampling(prompts)
        return writer

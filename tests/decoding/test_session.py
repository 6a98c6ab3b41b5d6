"""A session decodes by whichever runner it may, and is prepared as what is scored is."""

from threading import Lock
from typing import Any

import pytest
import torch

from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.fallback import EXECUTION_MODES
from spectrain.decoding.generation import DecodingSteps
from spectrain.decoding.loop import Request, decode
from spectrain.decoding.session import Session
from spectrain.decoding.teacher_forcing import TeacherForcedBuilder
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.eval.systems import Decoder, System
from spectrain.models.target import Target
from spectrain.trees import Auto, Chain, Eagle2
from spectrain.trees.measurements import Calibration, Latency
from tests.decoding.test_captured import list_facts

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [9, 10], [100, 3, 44, 8]]


@pytest.mark.parametrize("drafted", [False, True])
def test_captured_and_eager_sessions_are_equal(shallow: Target, drafted: bool) -> None:
    """Warmed up or not, and again by what the first batch left; without capture nothing is held."""
    drafter, builder = (
        (Eagle3(shallow, vocab_size=512).eval(), Eagle2(3, 8, 3)) if drafted else (None, None)
    )
    rule = Match(0.8, seed=4)
    expected = list_facts(decode(shallow, PROMPTS, rule, 12, drafter, builder, [4, 9, 2]))
    eager, captured = (
        Session(shallow, rule, drafter, builder, engine=engine) for engine in ("eager", "captured")
    )
    assert captured.eager_reason is None and eager.eager_reason is not None
    for session in (eager, captured, captured):
        assert list_facts(session.decode(PROMPTS, 12, [4, 9, 2])) == expected
        session.warm_up(PROMPTS, 12)
    assert len(captured._captured_runners["compiled"].states) == 1 and not eager._captured_runners


@pytest.mark.parametrize("broken, way", [(0, "compiled"), (1, "captured"), (2, "eager")])
def test_failing_mode_falls_back_to_the_next(
    shallow: Target,
    broken: int,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Compiled, captured or one by one: the next where a way fails, with a word, for both that
    are compared; same output.
    """
    failing = EXECUTION_MODES[:broken]
    built = CapturedRunner.__init__

    def build(self: CapturedRunner, *args: Any, backend: str | None = "auto") -> None:
        built(self, *args, backend=backend)
        self.way = "compiled" if backend == "auto" else "captured"  # type: ignore[attr-defined]

    def steps(self: CapturedRunner, request: Request) -> DecodingSteps:
        if self.way in failing:  # type: ignore[attr-defined]
            raise RuntimeError("no kernel image")
        return ran(self, request)

    ran = CapturedRunner.decode_steps
    monkeypatch.setattr(CapturedRunner, "__init__", build)
    monkeypatch.setattr(CapturedRunner, "decode_steps", steps)
    monkeypatch.setattr("spectrain.decoding.session.Session.prefers_capture", True)
    decoder = Decoder(shallow, Greedy(), "auto")
    eagle3 = Eagle3(shallow, vocab_size=64).eval()
    system = System("drafter", "", eagle3, Chain(2), Greedy())
    plain = [generation.output for generation in decode(shallow, PROMPTS, Greedy(), 8)]
    for rows in (
        decoder.decode_interleaved(system, PROMPTS, 8, [0, 1, 2]),
        [decoder(None, PROMPTS, 8, [0, 1, 2])],
    ):
        assert all([generation.output for generation in row] == plain for row in rows)
    assert decoder.fallback.mode == way and list(decoder.fallback.failures) == list(failing)
    assert (decoder.why_eager(system) is not None) == (way == "eager")
    assert capsys.readouterr().err.count("no kernel image") == broken


def test_requested_capture_has_no_eager_fallback(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs uncompiled where it must, and fails where that fails."""
    monkeypatch.setattr(CapturedRunner, "decode_steps", lambda self, request: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Session(shallow, Greedy(), engine="captured").decode(PROMPTS, 8)


def test_warm_up_drafts_for_a_new_number_of_prompts(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that kernels for several texts are loaded before a round is timed. The builder learns
    nothing from it.
    """
    drafter = Ngram(shallow)
    builder = Chain(2)
    sizes = list[int]()
    observed = list[Any]()
    draft = drafter.draft
    monkeypatch.setattr(Chain, "observe", lambda self, _: observed.append(self))
    monkeypatch.setattr(
        drafter, "draft", lambda context: sizes.append(len(context.root)) or draft(context)
    )
    session = Session(shallow, Greedy(), drafter, builder)
    for prompts in (PROMPTS, PROMPTS[:1]):
        session.warm_up(prompts, 8)
    assert set(sizes) == {len(PROMPTS), 1} and not observed
    num_drafts = len(sizes)
    session.warm_up(PROMPTS, 8)
    assert len(sizes) == num_drafts


@pytest.mark.parametrize("cost", [0.0, 1.0])
def test_session_drafts_by_measured_times(shallow: Target, cost: float) -> None:
    """Where a draft step takes as long as many target steps, most rounds are plain; output and
    drafts are the same. Trees for three prompts are timed once."""
    builder = Auto(depth=3, budget=8, top_k=3)
    builder.prepare(
        Calibration(latency=Latency({4: {1: 1e-3, 8: 1e-3}}, {4: {1: cost, 8: cost}}, cost))
    )
    drafter = Eagle3(shallow, vocab_size=512).eval()
    session = Session(shallow, Greedy(), drafter, builder)
    plain = [generation.output for generation in decode(shallow, PROMPTS, Greedy(), 24)]
    for _ in range(2):
        session.warm_up(PROMPTS, 24)
        drafted = session.decode(PROMPTS, 24)
        assert [generation.output for generation in drafted] == plain
    assert (
        3,
        torch.get_num_threads(),
    ) in builder.round_policy.costs_by_setting and builder.round_policy.costs.is_timed
    assert set(builder.round_policy.costs.latency.verify_seconds) == {max(map(len, PROMPTS))}


def test_warming_up_copies_no_drafter(shallow: Target) -> None:
    """A builder that holds a drafter, as teacher forcing does after its first round, is neither
    copied nor told of warm-ups.
    """
    prompt = [5, 7, 9, 5, 7, 9]
    (answer,) = decode(shallow, [prompt], Greedy(), 12, sequence_ids=[0], ignore_eos=True)
    drafter = Causal(shallow, num_layers=1).eval()
    drafter.uncopied = Lock()  # type: ignore[assignment]
    forced = TeacherForcedBuilder({0: answer.prompt + answer.output}, Chain(3), Greedy())
    session = Session(shallow, Greedy(), drafter, forced)
    session.decode([prompt], 8, [0], ignore_eos=True)
    counts = list(forced.counts)
    session.warm_up([prompt], 8, [0])
    assert forced.counts == counts and any(counts)

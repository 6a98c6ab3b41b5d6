"""The tests of tests/decoding/test_calibration.py that are about ideas."""

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.calibration import calibrate_builders
from spectrain.decoding.loop import decode
from spectrain.decoding.teacher_forcing import run_teacher_forced
from spectrain.drafters.eagle3 import Eagle3
from spectrain.models.target import Target
from spectrain.trees import Chain, Static
from spectrain_research.cast.builder import Cast
from spectrain_research.sequoia.builder import Sequoia
from tests.decoding.test_calibration import (
    LIMIT,
    eagle3,  # noqa: F401  (a fixture)
    prompts,  # noqa: F401  (a fixture)
)


def test_calibrate_prepares_what_needs_it(shallow: Target, prompts: list, eagle3: Eagle3) -> None:
    """Builders that need hits share those of the deepest one and search their own trees; a chain
    needs nothing.
    """
    builders = [Static(depth=2, budget=5), Chain(7), Sequoia(depth=3, budget=6)]
    calibration = calibrate_builders(shallow, eagle3, builders, Greedy(), prompts, LIMIT)
    assert calibration is not None and calibration.latency is None
    forced = run_teacher_forced(shallow, eagle3, Chain(3), Greedy(), prompts, LIMIT)
    assert (calibration.hits, calibration.counts) == (forced.hit_rates, forced.counts)
    for builder, reference in (
        (builders[0], Static(depth=2, budget=5)),
        (builders[2], Sequoia(depth=3, budget=6)),
    ):
        assert isinstance(builder, Static) and builder.paths
        assert (
            set(builder.paths) == set(reference.search_paths(calibration))
            and len(builder.paths) < reference.budget
        )
    assert (
        calibrate_builders(
            shallow, eagle3, [Chain(2), Static(paths=[[0], [1]])], Greedy(), prompts, LIMIT
        )
        is None
    )


def test_calibrate_times_what_needs_it(shallow: Target, prompts: list, eagle3: Eagle3) -> None:
    """A builder that weighs costs gets the latency of nodes up to its budget, and then decodes
    greedily.
    """
    builder = Cast(depth=2, budget=3, top_k=2)
    calibration = calibrate_builders(shallow, eagle3, [builder, Chain(4)], Greedy(), prompts, LIMIT)
    assert calibration is not None and calibration.latency is builder.latency is not None
    assert not calibration.hits and {
        tuple(table) for table in builder.latency.verify_seconds.values()
    } == {(1, 2, 3)}
    plain = decode(shallow, prompts, Greedy(), LIMIT)
    result = decode(shallow, prompts, Greedy(), LIMIT, eagle3, builder)
    assert [drafted.output for drafted in result] == [alone.output for alone in plain]

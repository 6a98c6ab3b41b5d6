"""Training on two processes: the same result as on one, however parameters are shared, and nothing hangs in silence.

Processes are real ones, started by torchrun, with gloo between them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("worker.py")
FAMILIES = ("eagle3", "medusa", "medusa2", "hydra", "causal", "pard", "kangaroo", "gated_lora", "early_exit")
QUICK = [*((family, "ddp") for family in FAMILIES), ("eagle3", "fsdp2"), ("causal", "fsdp2"), ("medusa2", "fsdp2"),
         ("eagle3", "zero2"), ("early_exit", "zero2"), ("causal", "zero3"), ("medusa2", "zero3")]  # fmt: skip
SLOW = [(family, way) for way in ("fsdp2", "zero2", "zero3") for family in FAMILIES
        if (family, way) not in QUICK and (family, way) != ("early_exit", "fsdp2")]  # fmt: skip


def start(processes: int, jobs: list[dict[str, Any]], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the worker on so many processes."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launch, str(WORKER), json.dumps(jobs)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same(one: Path, other: Path) -> None:
    """Equal losses, and weights that went the same way: Adam's steps are large where a gradient is nearly zero."""
    assert losses(one) == pytest.approx(losses(other), rel=1e-5, abs=1e-6)
    mine, theirs = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value.float() - theirs[name].float()).abs().mean() < 1e-7, name


def job(folder: Path, family: str, name: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"family": family, "out": str(folder / f"{family}-{name}"), "options": options, **more}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each family on one process with a batch of 8, with 4 accumulated batches of 2, packed; and, shared, on two processes."""
    folder = tmp_path_factory.mktemp("processes")
    alone = [job(folder, family, "one", {"batch_tokens": 128}) for family in FAMILIES]
    alone += [job(folder, family, "accumulated", {"batch_tokens": 32, "accumulate": 4}) for family in FAMILIES]
    alone += [job(folder, family, "packed", {"batch_tokens": 64, "accumulate": 2, "packing": True}) for family in FAMILIES]
    many = [job(folder, family, way, {"batch_tokens": 64, "sharding": way}) for family, way in possible(QUICK)]
    many += [job(folder, "eagle3", way, {"batch_tokens": 64}, target=way.split("_")[1]) for way in ("target_fsdp2",)]
    many += [job(folder, "eagle3", "target_tensor", {"batch_tokens": 128}, target="tensor")]
    for processes, jobs in ((1, alone), (2, many)):
        done = start(processes, jobs)
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


def possible(ways: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without DeepSpeed's where it is not installed."""
    installed = importlib.util.find_spec("deepspeed") is not None
    return [(family, way) for family, way in ways if installed or not way.startswith("zero")]


@pytest.mark.parametrize("how", ["accumulated", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batching_changes_nothing(trained: Path, family: str, how: str) -> None:
    """A batch of 8, four accumulated batches of 2 and packed rows give the same losses and weights."""
    assert_same(trained / f"{family}-one", trained / f"{family}-{how}")


@pytest.mark.parametrize(("family", "way"), QUICK)
def test_two_processes_are_as_good_as_one(trained: Path, family: str, way: str) -> None:
    """Two processes with batches of 4 give the losses and weights of one with a batch of 8, however they share parameters."""
    if (family, way) not in possible(QUICK):
        pytest.skip("DeepSpeed is not installed")
    assert_same(trained / f"{family}-one", trained / f"{family}-{way}")


@pytest.mark.parametrize("way", ["fsdp2", "tensor"])
def test_a_target_on_two_processes(trained: Path, way: str) -> None:
    """A target whose layers are spread out, or cut through, trains the same drafter."""
    assert_same(trained / "eagle3-one", trained / f"eagle3-target_{way}")


@pytest.mark.slow
def test_every_family_shares_parameters_in_every_way(trained: Path) -> None:
    """The rest of the families and ways; early exits have no weights of their own for FSDP2 to shard."""
    ways = possible(SLOW)
    done = start(2, [job(trained, family, way, {"batch_tokens": 64, "sharding": way}) for family, way in ways])
    assert done.returncode == 0, done.stderr[-4000:]
    for family, way in ways:
        assert_same(trained / f"{family}-one", trained / f"{family}-{way}")


OPTIONS = {"batch_tokens": 32, "max_steps": 8, "save_every": 3, "log_every": 2}


@pytest.mark.parametrize(
    ("family", "way"), [("eagle3", "ddp"), ("causal", "fsdp2"), ("eagle3", "zero2"), ("medusa2", "zero2"), ("eagle3", "zero3")]
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, family: str, way: str) -> None:
    """Two processes that leave after step 7, resumed from step 6: bit-identical losses and weights, no step twice."""
    if not possible([(family, way)]):
        pytest.skip("DeepSpeed is not installed")
    options = {**OPTIONS, "sharding": way}
    jobs = [job(tmp_path, family, "whole", options, count=40), job(tmp_path, family, "cut", options, count=40, leave=7)]
    jobs.append({**jobs[1], "leave": None})
    done = start(2, jobs)
    assert done.returncode == 0, done.stderr[-4000:]
    assert losses(tmp_path / f"{family}-whole") == losses(tmp_path / f"{family}-cut")
    one, two = (load_file(tmp_path / f"{family}-{name}" / "weights.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """Begun on two, resumed on one, which takes twice the batches: the same steps on the same data, so the same losses."""
    options = {"batch_tokens": 32, "max_steps": None, "epochs": 1.0, "save_every": 3, "log_every": 1}
    first = job(tmp_path, "medusa2", "moved", options, count=32, leave=4)
    whole = job(tmp_path, "medusa2", "whole", options, count=32)
    done = start(2, [first, whole])
    assert done.returncode == 0, done.stderr[-4000:]
    done = start(1, [{**first, "leave": None}])
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(losses(tmp_path / "medusa2-whole")) == 8
    assert_same(tmp_path / "medusa2-whole", tmp_path / "medusa2-moved")


def test_a_dead_process_is_named(tmp_path: Path) -> None:
    """Where one process is killed the others say which, instead of what its silence did to them, and the run stops."""
    done = start(2, [job(tmp_path, "eagle3", "dead", {**OPTIONS, "max_steps": 50}, count=40, die=[1, 2])])
    assert done.returncode != 0
    assert "rank 1 (" in done.stderr and "died in step 3" in done.stderr and "trainer.resume=auto" in done.stderr


def test_a_slow_process_is_named(tmp_path: Path) -> None:
    """Where one keeps the others waiting they say which, and for what, and go on."""
    options = {**OPTIONS, "max_steps": 1, "patience": 1.0}
    done = start(2, [job(tmp_path, "eagle3", "slow", options, slow=True)])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 1 (" in done.stderr and "keeps the others waiting at step 1" in done.stderr
    assert "reading data" in done.stderr


def test_processes_that_cannot_find_each_other_are_refused(tmp_path: Path) -> None:
    """As accelerate starts them on CPUs: one process, told of others, that has no rank."""
    done = start(1, [job(tmp_path, "eagle3", "lost", {})], MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    assert done.returncode != 0 and "use torchrun" in done.stderr


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}, "fsdp_version: 2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {"sharding": "zero2"}, "leave one of them out"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, {}, "zero_stage: 2 or 3"),
    ],
)
def test_a_launch_that_would_not_be_followed_is_refused(
    tmp_path: Path, environment: dict[str, str], options: dict[str, Any], said: str
) -> None:
    """Sharding that is asked for and cannot be done as asked is an error, never DDP."""
    done = start(1, [job(tmp_path, "eagle3", "refused", options)], **environment)
    assert done.returncode != 0 and said in done.stderr

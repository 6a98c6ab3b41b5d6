"""Training on two processes: the same result as on one, however parameters are shared, and nothing hangs in silence.

Processes are real ones with gloo between them, started by torchrun in the slow tests, and in the quick ones, where importing
everything would take longer than training, as it starts them.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spectrain.errors import UserError
from tests import commands
from tests.training import worker
from tests.training.worker import train

WORKER = Path(__file__).with_name("worker.py")
FAMILIES = ("eagle3", "medusa", "medusa2", "hydra", "causal", "pard", "peagle", "mtp", "kangaroo", "gated_lora", "early_exit",
            "amphista", "ctc", "gumiho", "transformer_heads", "redrafter", "eagle1", "uno", "streams", "ppd")  # fmt: skip
QUICK = [("eagle3", "ddp"), ("gated_lora", "ddp"), ("causal", "fsdp2"), ("early_exit", "zero2"), ("medusa2", "zero3")]
CONTEXT = [("eagle3", "ddp"), ("dflash", "fsdp2")]
SLOW = [(family, way) for way in ("ddp", "fsdp2", "zero2", "zero3") for family in FAMILIES
        if (family, way) not in QUICK and (family, way) != ("early_exit", "fsdp2")]  # fmt: skip


def start(jobs: list[dict[str, Any]], folder: Path, shell: bool = False) -> tuple[int, str]:
    """Run the worker on two processes; its exit status and what it said on stderr. Nothing may be compiled on the way. From
    the shell each process imports everything, which takes as long as the quick tests' training."""
    extensions = folder / "extensions"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(extensions)}
    if not shell:
        status, _, said = commands.start([json.dumps(jobs)], environment, program=worker.launch).wait(900)
        assert not extensions.exists()
        return status, said
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(WORKER), json.dumps(jobs)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it started too
            raise
    assert not extensions.exists()
    return process.returncode, said


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same(one: Path, other: Path) -> None:
    """Equal losses, and weights that went the same way: Adam's steps are large where a gradient is nearly zero."""
    assert losses(one) == pytest.approx(losses(other), rel=1e-5, abs=1e-6)
    mine, theirs = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value.float() - theirs[name].float()).abs().mean() < 1e-6, name  # they went about 4e-3


OPTIONS = {"batch_tokens": 32, "max_steps": 5, "save_every": 2, "log_every": 2}
ALONE: dict[str, dict[str, Any]] = {  # a batch of 8, four accumulated batches of 2, and packed rows
    "one": {"batch_tokens": 128},
    "accumulated": {"batch_tokens": 32, "accumulate": 4},
    "packed": {"batch_tokens": 64, "accumulate": 2, "packing": True},
}
EPOCH = {"batch_tokens": 32, "max_steps": None, "epochs": 1.0, "save_every": 3, "log_every": 1}
UNEVEN = {"batch_tokens": 32, "accumulate": 3, "max_steps": 3, "save_every": 1}
RESUMED = [("medusa2", "zero2")]
SLOWLY_RESUMED = [("causal", "fsdp2"), ("eagle3", "ddp"), ("eagle3", "zero2"), ("eagle3", "zero3")]


@dataclass
class Jobs:
    """What the tests of this file train, in one folder and for one target."""

    folder: Path
    model: Path
    said: str = ""  # on stderr by two processes

    def job(self, family: str, name: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "family": family,
            "out": str(self.folder / f"{family}-{name}"),
            "options": options,
            "model": str(self.model),
            **more,
        }

    def interrupted(self, family: str, way: str) -> list[dict[str, Any]]:
        """A whole run; one that leaves after step 3; and the rest of that one."""
        options = {**OPTIONS, "sharding": way}
        cut = self.job(family, f"{way}-cut", options, count=40, leave=3)
        return [self.job(family, f"{way}-whole", options, count=40), cut, {**cut, "leave": None}]

    def by_one(self, family: str, how: str) -> Path:
        """A run on one process, this one, which is trained where it is asked for first."""
        if not (self.folder / f"{family}-{how}").exists():
            train(self.job(family, how, ALONE[how]))
        return self.run(family, how)

    def run(self, family: str, name: str) -> Path:
        """A finished run."""
        assert (self.folder / f"{family}-{name}" / "weights.safetensors").exists(), self.said[-4000:]
        return self.folder / f"{family}-{name}"


@pytest.fixture(scope="module")
def alone(shallow_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """What runs on one process."""
    return Jobs(tmp_path_factory.mktemp("processes"), shallow_folder)


@pytest.fixture(scope="module")
def trained(alone: Jobs) -> Jobs:
    """All that two processes do, in one launch, for to start one takes longer than to train: every way of sharing parameters,
    interrupted runs, the first part of one that moves to one process, a slow process and, last, a dead one."""
    many = [alone.job(family, way, {"batch_tokens": 64, "sharding": way}) for family, way in possible(QUICK)]
    many += [
        alone.job(family, "context", {"batch_tokens": 128, "sharding": way, "packing": True, "context_parallel": 2})
        for family, way in CONTEXT
    ]
    many += [alone.job("eagle3", "target_fsdp2", {"batch_tokens": 64}, target="fsdp2")]
    many += [alone.job("eagle3", "target_tensor", {"batch_tokens": 128}, target="tensor")]
    many += [job for family, way in possible(RESUMED) for job in alone.interrupted(family, way)]
    many += [alone.job("medusa2", "moved", EPOCH, count=32, leave=4), alone.job("medusa2", "unmoved", EPOCH, count=32)]
    train(alone.job("eagle3", "uneven", UNEVEN, count=32, leave=1))
    many += [alone.job("eagle3", "uneven", {**UNEVEN, "accumulate": 1}, count=32)]
    many += [alone.job("eagle3", "slow", {**OPTIONS, "max_steps": 1, "patience": 1.0}, slow=True)]
    many += [alone.job("eagle3", "dead", {**OPTIONS, "max_steps": 50}, count=40, die=[1, 2])]
    status, alone.said = start(many, alone.folder)
    assert status != 0
    return alone


def possible(ways: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without DeepSpeed's where it is not installed."""
    installed = importlib.util.find_spec("deepspeed") is not None
    return [(family, way) for family, way in ways if installed or not way.startswith("zero")]


@pytest.mark.sweep(2, free=("how", "family"))
@pytest.mark.parametrize("how", ["accumulated", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batching_changes_nothing(alone: Jobs, family: str, how: str) -> None:
    """A batch of 8, four accumulated batches of 2 and packed rows give the same losses and weights."""
    assert_same(alone.by_one(family, "one"), alone.by_one(family, how))


@pytest.mark.parametrize(("family", "way"), QUICK)
def test_two_processes_are_as_good_as_one(trained: Jobs, family: str, way: str) -> None:
    """Two processes with batches of 4 give the losses and weights of one with a batch of 8, however they share parameters."""
    if (family, way) not in possible(QUICK):
        pytest.skip("DeepSpeed is not installed")
    assert_same(trained.by_one(family, "one"), trained.run(family, way))


@pytest.mark.parametrize("family", [family for family, _ in CONTEXT])
def test_two_processes_share_texts(trained: Jobs, family: str) -> None:
    """Two processes that run half of the packed texts each give the losses and weights of one, and count what it counts."""
    assert_same(trained.by_one(family, "one"), trained.run(family, "context"))
    one, two = (json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
                for run in (trained.run(family, "one"), trained.run(family, "context")))  # fmt: skip
    assert [one[key] for key in ("agreement", "tokens")] == [two[key] for key in ("agreement", "tokens")]


@pytest.mark.parametrize("way", ["fsdp2", "tensor"])
def test_a_target_on_two_processes(trained: Jobs, way: str) -> None:
    """A target whose layers are spread out, or cut through, trains the same drafter."""
    assert_same(trained.by_one("eagle3", "one"), trained.run("eagle3", f"target_{way}"))


@pytest.mark.slow
def test_every_family_shares_parameters_in_every_way(alone: Jobs) -> None:
    """The rest of the families and ways; early exits have no weights of their own for FSDP2 to shard."""
    ways = possible(SLOW)
    status, said = start(
        [alone.job(family, way, {"batch_tokens": 64, "sharding": way}) for family, way in ways], alone.folder, True
    )
    assert status == 0, said[-4000:]
    for family, way in ways:
        assert_same(alone.by_one(family, "one"), alone.run(family, way))


def assert_resumed(jobs: Jobs, family: str, way: str) -> None:
    """Bit-identical losses and weights."""
    whole, cut = jobs.run(family, f"{way}-whole"), jobs.run(family, f"{way}-cut")
    assert losses(whole) == losses(cut)
    one, two = (load_file(run / "weights.safetensors") for run in (whole, cut))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize(("family", "way"), RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(trained: Jobs, family: str, way: str) -> None:
    """Two processes that leave after step 3, resumed from step 2: bit-identical losses and weights, no step twice."""
    if not possible([(family, way)]):
        pytest.skip("DeepSpeed is not installed")
    assert_resumed(trained, family, way)


@pytest.mark.slow
def test_other_ways_resume(alone: Jobs) -> None:
    """The same in other ways, and of drafters all of whose weights are their own."""
    ways = possible(SLOWLY_RESUMED)
    status, said = start([job for family, way in ways for job in alone.interrupted(family, way)], alone.folder, shell=True)
    assert status == 0, said[-4000:]
    for family, way in ways:
        assert_resumed(alone, family, way)


def test_a_run_goes_on_with_another_number_of_processes(trained: Jobs) -> None:
    """Begun on two, resumed on one, which takes twice the batches: the same steps on the same data, so the same losses."""
    train(trained.job("medusa2", "moved", EPOCH, count=32))
    assert len(losses(trained.run("medusa2", "unmoved"))) == 8
    assert_same(trained.run("medusa2", "unmoved"), trained.run("medusa2", "moved"))


def test_processes_share_the_batches_of_a_step_unequally(trained: Jobs) -> None:
    """Begun on one process with three batches a step, continued on two, which take two and one: the same losses and weights."""
    train(trained.job("eagle3", "even", UNEVEN, count=32))
    assert_same(trained.run("eagle3", "even"), trained.run("eagle3", "uneven"))
    lines = [json.loads(line) for line in (trained.run("eagle3", "uneven") / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [3 * 32, 6 * 32, 9 * 32]
    assert set(lines[-1]["step_seconds"]) == {"data", "target", "drafter", "others"} and lines[-1]["slowest"]["rank"] in (0, 1)


def test_a_dead_process_is_named(trained: Jobs) -> None:
    """Where one process is killed the others say which, instead of what its silence did to them, and the run stops."""
    assert len(losses(trained.folder / "eagle3-dead")) < 25
    found = re.search(r"rank 1 \([^\n]*\) died in step (\d+)[^\n]*trainer.resume=auto", trained.said)
    assert found is not None, trained.said[-4000:]
    assert found[1] in ("2", "3")  # killed behind step 2, whose last message may be lost with it


def test_a_slow_process_is_named(trained: Jobs) -> None:
    """Where one keeps the others waiting they say which, and for what, and go on."""
    trained.run("eagle3", "slow")
    for words in ("rank 1 (", "keeps the others waiting at step 1", "reading data"):
        assert words in trained.said


def test_processes_that_cannot_find_each_other_are_refused(alone: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate starts them on CPUs: one process, told of others, that has no rank."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    with pytest.raises(UserError, match="use torchrun"):
        train(alone.job("eagle3", "lost", {}))


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}, "fsdp_version: 2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {"sharding": "zero2"}, "leave one of them out"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, {}, "zero_stage: 2 or 3"),
    ],
)
def test_a_launch_that_would_not_be_followed_is_refused(
    alone: Jobs, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], options: dict[str, Any], said: str
) -> None:
    """Sharding that is asked for and cannot be done as asked is an error, never DDP."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        train(alone.job("eagle3", "refused", options))

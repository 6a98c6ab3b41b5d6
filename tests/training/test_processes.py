"""Training on two processes: the same result as on one, however parameters are shared, and nothing
hangs in silence.

Processes are real ones with gloo between them, started by torchrun in the slow tests, and in the
quick ones, where importing everything would take longer than training, as it starts them.
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

from spectrain.config.choices import list_constructors
from spectrain.errors import UserError
from tests import commands
from tests.training import worker
from tests.training.worker import train_job

ROOT = Path(__file__).parents[2]
FAMILIES = ("eagle3", "medusa", "medusa2", "hydra", "causal", "pard", "peagle", "mtp", "kangaroo",
    "gated_lora", "early_exit",
            "amphista", "ctc", "gumiho", "transformer_heads", "redrafter", "eagle1", "uno",
            "streams", "ppd", "dflash", "dflash2", "dspark", "lilicorr")  # fmt: skip
# Those of a package that is not installed are left out.
FAMILIES = tuple(
    family
    for family in FAMILIES
    if worker.FAMILIES[family][0] in list_constructors("drafter").values()
)
QUICK = [
    ("eagle3", "ddp"),
    ("gated_lora", "ddp"),
    ("causal", "fsdp2"),
    ("eagle3", "fsdp2"),
    ("early_exit", "zero2"),
    ("medusa2", "zero3"),
]
QUICK = [(family, sharding) for family, sharding in QUICK if family in FAMILIES]
CONTEXT = [("eagle3", "ddp"), ("dflash", "fsdp2")]
SLOW = [
    (family, sharding)
    for sharding in ("ddp", "fsdp2", "zero2", "zero3")
    for family in FAMILIES
    if (family, sharding) not in QUICK and (family, sharding) != ("early_exit", "fsdp2")
]


def run_workers(jobs: list[dict[str, Any]], folder: Path, shell: bool = False) -> tuple[int, str]:
    """Run the worker on two processes; return its exit status and stderr. Nothing may be compiled
    on the way. From the shell each process imports everything, which takes as long as the quick
    tests' training."""
    extensions = folder / "extensions"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(extensions)}
    if not shell:
        status, _, stderr = commands.start(
            [json.dumps(jobs)], environment, program=worker.launch_processes
        ).wait(900)
        assert not extensions.exists()
        return status, stderr
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--module",
        worker.__name__,
        json.dumps(jobs),
    ]
    with subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, stderr = process.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it started too
            raise
    assert not extensions.exists()
    # Triton names hundreds of objects where a process ends by an error.
    lines = [line for line in stderr.splitlines() if "leaked" not in line]
    return process.returncode, "\n".join(lines)


def read_losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same(first: Path, second: Path) -> None:
    """Check equal losses and nearly equal weights: Adam's steps are large where a gradient is
    nearly zero.
    """
    assert read_losses(first) == pytest.approx(read_losses(second), rel=1e-5, abs=1e-6)
    actual = load_file(first / "weights.safetensors")
    expected = load_file(second / "weights.safetensors")
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        # they moved by about 4e-3
        assert (value.float() - expected[name].float()).abs().mean() < 1e-6, name


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
    """The trainings of this file's tests, in one folder and for one target."""

    folder: Path
    model: Path
    stderr: str = ""  # of the two processes

    def make_job(
        self, family: str, name: str, options: dict[str, Any], **more: Any
    ) -> dict[str, Any]:
        return {
            "family": family,
            "out": str(self.folder / f"{family}-{name}"),
            "options": options,
            "model": str(self.model),
            **more,
        }

    def make_interrupted_jobs(self, family: str, sharding: str) -> list[dict[str, Any]]:
        """Make a complete run, one that leaves after step 3, and the rest of that one."""
        options = {**OPTIONS, "sharding": sharding}
        cut = self.make_job(family, f"{sharding}-cut", options, count=40, leave=3)
        return [
            self.make_job(family, f"{sharding}-whole", options, count=40),
            cut,
            {**cut, "leave": None},
        ]

    def train_alone(self, family: str, how: str) -> Path:
        """Return a run on this process alone, trained when it is first needed."""
        if not (self.folder / f"{family}-{how}").exists():
            train_job(self.make_job(family, how, ALONE[how]))
        return self.get_run(family, how)

    def get_run(self, family: str, name: str) -> Path:
        """Return the folder of a finished run."""
        assert (self.folder / f"{family}-{name}" / "weights.safetensors").exists(), self.stderr[
            -4000:
        ]
        return self.folder / f"{family}-{name}"


@pytest.fixture(scope="module")
def jobs(shallow_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Make the jobs that run on one process."""
    return Jobs(tmp_path_factory.mktemp("processes"), shallow_folder)


@pytest.fixture(scope="module")
def trained_jobs(jobs: Jobs) -> Jobs:
    """Train everything on two processes in one launch, which takes longer to start than to train:
    every sharding, interrupted runs, the first part of a run that moves to one process, a slow
    process and, last, a dead one."""
    all_jobs = [
        jobs.make_job(family, sharding, {"batch_tokens": 64, "sharding": sharding})
        for family, sharding in available(QUICK)
    ]
    all_jobs += [
        jobs.make_job(
            family,
            "context",
            {"batch_tokens": 128, "sharding": sharding, "packing": True, "context_parallel": 2},
        )
        for family, sharding in CONTEXT
    ]
    all_jobs += [jobs.make_job("eagle3", "target_fsdp2", {"batch_tokens": 64}, target="fsdp2")]
    all_jobs += [jobs.make_job("eagle3", "target_tensor", {"batch_tokens": 128}, target="tensor")]
    all_jobs += [
        job
        for family, sharding in available(RESUMED)
        for job in jobs.make_interrupted_jobs(family, sharding)
    ]
    all_jobs += [
        jobs.make_job("medusa2", "moved", EPOCH, count=32, leave=4),
        jobs.make_job("medusa2", "unmoved", EPOCH, count=32),
    ]
    train_job(jobs.make_job("eagle3", "uneven", UNEVEN, count=32, leave=1))
    all_jobs += [jobs.make_job("eagle3", "uneven", {**UNEVEN, "accumulate": 1}, count=32)]
    all_jobs += [
        jobs.make_job("eagle3", "slow", {**OPTIONS, "max_steps": 1, "patience": 1.0}, slow=True)
    ]
    all_jobs += [
        jobs.make_job("eagle3", "dead", {**OPTIONS, "max_steps": 50}, count=40, die=[1, 2])
    ]
    status, jobs.stderr = run_workers(all_jobs, jobs.folder)
    assert status != 0
    return jobs


def available(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out DeepSpeed's shardings if it is not installed."""
    installed = importlib.util.find_spec("deepspeed") is not None
    return [
        (family, sharding)
        for family, sharding in pairs
        if installed or not sharding.startswith("zero")
    ]


@pytest.mark.sweep(2, free=("how", "family"))
@pytest.mark.parametrize("how", ["accumulated", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batching_changes_nothing(jobs: Jobs, family: str, how: str) -> None:
    """A batch of 8, four accumulated batches of 2 and packed rows give the same losses and
    weights.
    """
    assert_same(jobs.train_alone(family, "one"), jobs.train_alone(family, how))


@pytest.mark.parametrize(("family", "sharding"), QUICK)
def test_two_processes_are_as_good_as_a_single_process(
    trained_jobs: Jobs, family: str, sharding: str
) -> None:
    """Two processes with batches of 4 give the losses and weights of one with a batch of 8,
    however they share parameters.
    """
    if (family, sharding) not in available(QUICK):
        pytest.skip("DeepSpeed is not installed")
    assert_same(trained_jobs.train_alone(family, "one"), trained_jobs.get_run(family, sharding))


@pytest.mark.parametrize("family", [family for family, _ in CONTEXT])
def test_two_processes_share_texts(trained_jobs: Jobs, family: str) -> None:
    """Two processes that each run half of the packed texts give the losses, weights and counts
    of one.
    """
    assert_same(trained_jobs.train_alone(family, "one"), trained_jobs.get_run(family, "context"))
    single, shared = (
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        for run in (trained_jobs.get_run(family, "one"), trained_jobs.get_run(family, "context"))
    )
    assert [single[key] for key in ("agreement", "tokens")] == [
        shared[key] for key in ("agreement", "tokens")
    ]


@pytest.mark.parametrize("sharding", ["fsdp2", "tensor"])
def test_a_target_on_two_processes(trained_jobs: Jobs, sharding: str) -> None:
    """A target whose layers are sharded or split by tensor parallelism trains the same drafter."""
    assert_same(
        trained_jobs.train_alone("eagle3", "one"),
        trained_jobs.get_run("eagle3", f"target_{sharding}"),
    )


@pytest.mark.slow
def test_every_family_shares_parameters_in_every_way(jobs: Jobs) -> None:
    """All other families and shardings equal one process; early exits have no own weights for
    FSDP2 to shard.
    """
    pairs = available(SLOW)
    status, stderr = run_workers(
        [
            jobs.make_job(family, sharding, {"batch_tokens": 64, "sharding": sharding})
            for family, sharding in pairs
        ],
        jobs.folder,
        True,
    )
    assert status == 0, stderr[-4000:]
    for family, sharding in pairs:
        assert_same(jobs.train_alone(family, "one"), jobs.get_run(family, sharding))


def assert_resumed(jobs: Jobs, family: str, sharding: str) -> None:
    """Check bit-identical losses and weights."""
    uninterrupted = jobs.get_run(family, f"{sharding}-whole")
    resumed = jobs.get_run(family, f"{sharding}-cut")
    assert read_losses(uninterrupted) == read_losses(resumed)
    expected, actual = (load_file(run / "weights.safetensors") for run in (uninterrupted, resumed))
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())


@pytest.mark.parametrize(("family", "sharding"), RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_run(
    trained_jobs: Jobs, family: str, sharding: str
) -> None:
    """Two processes that leave after step 3 and resume from step 2 have bit-identical losses and
    weights.
    """
    if not available([(family, sharding)]):
        pytest.skip("DeepSpeed is not installed")
    assert_resumed(trained_jobs, family, sharding)


@pytest.mark.slow
def test_other_ways_resume(jobs: Jobs) -> None:
    """Other shardings resume, too, also with drafters all of whose weights are their own."""
    pairs = available(SLOWLY_RESUMED)
    status, stderr = run_workers(
        [job for family, sharding in pairs for job in jobs.make_interrupted_jobs(family, sharding)],
        jobs.folder,
        shell=True,
    )
    assert status == 0, stderr[-4000:]
    for family, sharding in pairs:
        assert_resumed(jobs, family, sharding)


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_another_number_of_processes(jobs: Jobs) -> None:
    """Started on two processes whose FSDP2 shards are saved as full tensors, a run goes on with
    one, and one that one process began goes on with two; losses and weights are those of the
    undisturbed run."""
    options = {**EPOCH, "sharding": "fsdp2"}
    alone = {**options, "accumulate": 2}
    train_job(jobs.make_job("eagle3", "spread", alone, count=32, leave=4))
    status, stderr = run_workers(
        [
            jobs.make_job("eagle3", "gathered", options, count=32, leave=4),
            jobs.make_job("eagle3", "undisturbed", options, count=32),
            jobs.make_job("eagle3", "spread", options, count=32),
        ],
        jobs.folder,
    )
    assert status == 0, stderr[-4000:]
    train_job(jobs.make_job("eagle3", "gathered", alone, count=32))
    for name in ("gathered", "spread"):
        assert_same(jobs.get_run("eagle3", "undisturbed"), jobs.get_run("eagle3", name))


def test_a_run_goes_on_with_another_number_of_processes(trained_jobs: Jobs) -> None:
    """Started on two processes and resumed on one with twice the batches, a run has the same
    losses.
    """
    train_job(trained_jobs.make_job("medusa2", "moved", EPOCH, count=32))
    assert len(read_losses(trained_jobs.get_run("medusa2", "unmoved"))) == 8
    assert_same(
        trained_jobs.get_run("medusa2", "unmoved"), trained_jobs.get_run("medusa2", "moved")
    )


def test_processes_share_the_batches_of_a_step_unequally(trained_jobs: Jobs) -> None:
    """Started on one process with three batches a step and resumed on two with two and one,
    losses and weights are the same.
    """
    train_job(trained_jobs.make_job("eagle3", "even", UNEVEN, count=32))
    assert_same(trained_jobs.get_run("eagle3", "even"), trained_jobs.get_run("eagle3", "uneven"))
    lines = [
        json.loads(line)
        for line in (trained_jobs.get_run("eagle3", "uneven") / "metrics.jsonl")
        .read_text()
        .splitlines()
    ]
    assert [line["tokens"] for line in lines] == [3 * 32, 6 * 32, 9 * 32]
    assert set(lines[-1]["step_seconds"]) == {"data", "target", "drafter", "others"} and lines[-1][
        "slowest"
    ]["rank"] in (0, 1)


def test_a_dead_process_is_named(trained_jobs: Jobs) -> None:
    """If one process is killed, the others name it instead of the consequences, and the run
    stops.
    """
    assert len(read_losses(trained_jobs.folder / "eagle3-dead")) < 25
    match = re.search(
        r"rank 1 \([^\n]*\) died in step (\d+)[^\n]*trainer.resume=auto", trained_jobs.stderr
    )
    assert match is not None, trained_jobs.stderr[-4000:]
    assert match[1] in ("2", "3")  # killed behind step 2, whose last message may be lost with it


def test_a_slow_process_is_named(trained_jobs: Jobs) -> None:
    """If one process keeps the others waiting, they name it and its activity, and the run
    continues.
    """
    trained_jobs.get_run("eagle3", "slow")
    for words in ("rank 1 (", "keeps the others waiting at step 1", "reading data"):
        assert words in trained_jobs.stderr


def test_processes_that_cannot_find_each_other_are_refused(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process with a master address and no rank, as accelerate starts them on CPUs, is
    refused.
    """
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    with pytest.raises(UserError, match="use torchrun"):
        train_job(jobs.make_job("eagle3", "lost", {}))


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}, "fsdp_version: 2"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"sharding": "zero2"},
            "leave one of them out",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
            {},
            "zero_stage: 2 or 3",
        ),
    ],
)
def test_a_launch_that_would_not_be_followed_is_refused(
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    options: dict[str, Any],
    message: str,
) -> None:
    """Requested sharding that cannot be done is an error, never DDP."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        train_job(jobs.make_job("eagle3", "refused", options))

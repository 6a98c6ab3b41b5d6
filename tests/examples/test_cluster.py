"""Launch files for clusters: linted, run with stand-ins for Slurm's programs, checked against
what Kubernetes expects.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from tests.docs.test_docs import check_command

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "4",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_NODEID": "2",
}
# Each notes its words. srun leaves out its own and runs the rest, as it does on every machine.
STAND_INS = {
    "scontrol": 'echo "scontrol $*" >> "$NOTES"; [ "$1" != show ] || printf "node%d\\n" 1 2 3 4',
    "srun": 'while [[ $1 == --* ]]; do shift; done; "$@"',
    "torchrun": 'printf "%s\\n" torchrun "$@" >> "$NOTES"; exit "${STATUS:-0}"',
    "accelerate": 'printf "%s\\n" accelerate "$@" >> "$NOTES"',
    "spectrain": 'printf "%s\\n" spectrain "$@" >> "$NOTES"',
}
SETTINGS = ["trainer.lr=1e-3", "trainer.epochs=2"]


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """Write a folder of stand-ins."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def run_script(name: str, stand_ins: Path, **variables: str) -> tuple[int, list[str]]:
    """Run a launch file with further settings; its exit status and what the programs noted."""
    notes = stand_ins / "notes"
    environment = {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "NOTES": str(notes),
        **SLURM,
        **variables,
    }
    status = subprocess.run(
        ["bash", str(CLUSTER / name), *SETTINGS], env=environment, timeout=60
    ).returncode
    return status, notes.read_text().splitlines() if notes.exists() else []


def test_the_linter_finds_nothing() -> None:
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
        "shellcheck"
    )
    assert program, "pip install spectrain[dev] brings shellcheck"
    files = [str(path) for path in sorted(CLUSTER.iterdir()) if path.suffix in (".sbatch", ".sh")]
    done = subprocess.run([program, *files], capture_output=True, text=True, timeout=60)
    assert len(files) == 3 and done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "torchrun.sbatch",
            ["--nnodes", "1:4", "--nproc-per-node", "8", "--rdzv-endpoint", "node1:29500"],
        ),
        (
            "accelerate.sbatch",
            ["--num_processes", "32", "--machine_rank", "2", "--main_process_ip", "node1"],
        ),
    ],
)
def test_slurm_starts_what_a_user_would_type(
    name: str, expected: list[str], stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every machine starts the launcher with its own number, and spectrain gets settings that
    compose.
    """
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    (tmp_path / "run" / "drafter" / "config.json").touch()
    status, words = run_script(name, stand_ins, RUN=str(tmp_path / "run"), MODEL="ORG/NAME")
    assert status == 0 and not {"requeue", "scontrol requeue 7"} & set(words)
    assert all(
        words[words.index(flag) + 1] == value for flag, value in zip(expected[::2], expected[1::2])
    )
    command = words[words.index("spectrain") + 1 :]
    assert {
        *SETTINGS,
        "target.model=ORG/NAME",
        f"run={tmp_path / 'run'}",
        "trainer.resume=auto",
    } < set(command)
    check_command(shlex.join(command), monkeypatch)
    assert run_script(name, stand_ins, MODEL="ORG/NAME")[0] != 0  # without a run folder


def test_a_stopped_job_is_queued_again(stand_ins: Path, tmp_path: Path) -> None:
    """As long as the run has checkpoints and no drafter, and not for ever; the exit status is
    torchrun's.
    """
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    variables = {"RUN": str(tmp_path / "run"), "MODEL": "ORG/NAME", "STATUS": "3"}
    status, words = run_script("torchrun.sbatch", stand_ins, **variables)
    assert status == 3 and words[-1] == "scontrol requeue 7"
    status, words = run_script("torchrun.sbatch", stand_ins, **variables, SLURM_RESTART_COUNT="20")
    assert status == 3 and words[-1] != "scontrol requeue 7"


@pytest.mark.sweep(1, free=("launcher",))
@pytest.mark.parametrize("launcher", ["submitit_slurm", "submitit_local"])
def test_a_sweep_names_a_launcher_of_hydra(
    launcher: str, stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher has every setting that the script gives it, and the rest composes."""
    status, words = run_script(
        "sweep.sh",
        stand_ins,
        LAUNCHER=launcher,
        **({"PARTITION": "p"} if "slurm" in launcher else {}),
    )
    own = [word for word in words if word.startswith(("hydra/", "hydra."))]
    assert (
        status == 0
        and len(own) == (5 if "slurm" in launcher else 3)
        and "run=runs/sweep-${hydra:job.num}" in words
    )
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        composed = hydra.compose_config(
            "train", [*own, "recipe=eagle3"], RunMode.MULTIRUN, with_log_configuration=False
        )
    assert composed.hydra.launcher._target_.endswith(
        launcher.title().replace("Submitit_", "") + "Launcher"
    )
    check_command(shlex.join(word for word in words[1:] if word not in own), monkeypatch)


def pod_template(document: dict[str, Any]) -> dict[str, Any]:
    """Return the pods of a Job or a PyTorchJob."""
    spec: dict[str, Any] = document["spec"]
    template: dict[str, Any] = (
        spec["pytorchReplicaSpecs"]["Worker"] if document["kind"] == "PyTorchJob" else spec
    )["template"]
    return template


@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml"])
def test_pods_have_what_kubernetes_expects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that refer to one another, one process for each GPU, SIGTERM with time to save, and
    a command that composes.
    """
    *services, job = yaml.safe_load_all((CLUSTER / name).read_text())
    assert (job["apiVersion"], job["kind"]) in {
        ("batch/v1", "Job"),
        ("kubeflow.org/v1", "PyTorchJob"),
    }
    pod = pod_template(job)["spec"]
    [container] = pod["containers"]
    assert set(pod) <= {
        "subdomain",
        "restartPolicy",
        "terminationGracePeriodSeconds",
        "containers",
        "volumes",
    }
    assert set(container) == {"name", "image", "command", "env", "resources", "volumeMounts"}
    assert (
        all(isinstance(word, str) for word in container["command"])
        and pod["terminationGracePeriodSeconds"] >= 60
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert all(isinstance(variable["value"], str) for variable in container["env"])
    command = container["command"]
    check_command(shlex.join(command[command.index("spectrain") + 1 :]), monkeypatch)
    check_meeting(job, services, container)


def check_meeting(
    job: dict[str, Any], services: list[dict[str, Any]], container: dict[str, Any]
) -> None:
    """Check how many pods start, and where they meet."""
    spec = job["spec"]
    flags = dict(word.split("=", 1) for word in container["command"] if word.startswith("--"))
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    if job["kind"] == "PyTorchJob":
        elastic = spec["elasticPolicy"]
        assert (
            elastic["minReplicas"]
            <= spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
            == elastic["maxReplicas"]
        )
        assert spec["nprocPerNode"] == str(gpus) and container["name"] == "pytorch" and not flags
        return
    [service] = services
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert flags["--nnodes"].endswith(f":{spec['completions']}") and flags[
        "--nproc-per-node"
    ] == str(gpus)
    template = pod_template(job)
    assert (
        service["spec"]["clusterIP"] == "None"
        and service["metadata"]["name"] == template["spec"]["subdomain"]
    )
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    address = f"{host}:{service['spec']['ports'][0]['port']}"
    assert flags["--rdzv-endpoint"] == address

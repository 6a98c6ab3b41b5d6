"""The facts recorded with every result: commit, versions, hardware, command."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from spectrain.output.text import mask_secrets

LAUNCHERS = ("torchrun", "accelerate")
REPORTED_PACKAGES = (
    "spectrain",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "triton",
    "safetensors",
    "datasets",
    "hydra-core",
)


def collect_provenance() -> dict[str, Any]:
    """Return the facts to record with a result: commit, versions, hardware, command."""
    root = Path(__file__).resolve().parents[1]
    # Set where a checkout has no .git.
    commit = os.environ.get("SPECTRAIN_COMMIT")
    # A checkout may lie in a container without git.
    if (root / ".git").exists() and shutil.which("git"):
        revision = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain"],
            capture_output=True,
            text=True,
            check=False,
        )
        commit = (
            revision.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
            if revision.returncode == 0
            else None
        )
    return {
        "commit": commit,
        "versions": {"python": platform.python_version(), **package_versions()},
        "hardware": {
            "machine": platform.machine(),
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "command": mask_secrets(describe_command(read_launch())),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def read_launch() -> list[str]:
    """Return the words of the command that started this process: the launcher's where one
    started several processes.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun and accelerate
        with suppress(psutil.Error):
            words = psutil.Process(os.getppid()).cmdline()
            if any(Path(word).name in (*LAUNCHERS, "torch.distributed.run") for word in words):
                return words
    return sys.orig_argv


def describe_command(words: list[str]) -> str:
    """Return the command that the words of an interpreter's command line stand for: spectrain, a
    launcher, or a module.
    """
    rest = words[1:]
    # an option of the interpreter, such as torchrun's -u
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest = rest[2 if rest[0] in ("-X", "-W") else 1 :]
    if rest[:1] != ["-m"]:
        name = Path(rest[0]).name if rest else ""
        return " ".join([name if name in LAUNCHERS else "spectrain", *rest[1:]])
    program = "spectrain" if rest[1].partition(".")[0] == "spectrain" else f"python -m {rest[1]}"
    return " ".join([program, *rest[2:]])


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on; spectrain itself may run
    uninstalled, from a checkout.
    """
    result = {}
    for package in REPORTED_PACKAGES:
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def processor_name() -> str:
    """Return the name of the processor with its family and model, if the system reports them.

    Virtual machines often name a line of processors alone, such as AMD EPYC, whose generations
    differ by a factor of two.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in reversed(lines))
    }
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    numbers = ", ".join(
        f"{word} {facts[key]}"
        for word, key in (("family", "cpu family"), ("model", "model"))
        if key in facts
    )
    return f"{facts['model name']} ({numbers})" if numbers else facts["model name"]

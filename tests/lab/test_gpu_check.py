"""scripts/gpu_check.sh on a machine like the one with a GPU: what runs first imports only what is
there, and every line of the script runs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import gpu_image

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
# What stands alone on a line of a shell script and is no command.
NO_COMMAND = re.compile(r"^(#.*|[{}]|fi|done|esac|;;|\w+\(\) \{)?$")

# Bash takes no PS4 from the environment of root.
TRACED = 'PS4=\'+@${LINENO}@ \'; set -x; . "$0" "$@"'

# Writes what the commands of spectrain would leave, and runs nothing.
STAND_IN = """#!/bin/bash
run=runs/eagle3 name=
for word in "$@"; do
  case $word in run=*) run=${word#run=} ;; eval.name=*) name=${word#eval.name=} ;; esac
done
echo "$PYTHONPATH" > "$OUT/path"
case "$*" in
  *" eval "*) mkdir -p "$run/eval/$name" && echo '{}' > "$run/eval/$name/summary.json" ;;
  *" train "*) mkdir -p "$run" && echo '{}' > "$run/metrics.jsonl" ;;
esac
case "$*" in *run=broken*) exit 3 ;; esac
"""


def run_script(words: list[str], environment: dict[str, str], trace: Path) -> int:
    """Run the script with a trace of its lines; return its status."""
    with trace.open("a") as lines:
        ran = subprocess.run(
            ["bash", "-c", TRACED, str(SCRIPT), *words],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=lines,
            text=True,
            check=False,
        )
    print(ran.stdout)
    return ran.returncode


def list_commands() -> list[set[int]]:
    """Return the line numbers of every command of the script; a command may take several lines."""
    commands: list[set[int]] = []
    continues = False
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1):
        if continues:
            commands[-1].add(number)
        elif not NO_COMMAND.match(line.strip()):
            commands.append({number})
        else:
            continue
        continues = line.endswith("\\")
    return commands


@pytest.fixture
def image_environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has only the packages of the one with a GPU."""
    hidden = gpu_image.write_filter(tmp_path / "hidden")
    return {
        "PYTHONPATH": f"{hidden}:{ROOT}",
        "PYTHON": sys.executable,
        "OUT": str(tmp_path / "out"),
        "RUN": str(tmp_path / "run"),
        "LIMIT": "3000",
    }


def test_the_packages_that_are_missing_are_refused() -> None:
    """What spectrain needs and the machine lacks cannot be imported, and what it has can."""
    refused = gpu_image.list_refused()
    assert {*gpu_image.MISSING} <= refused
    assert not refused & {"torch", "transformers", "peft", "accelerate", "rich", "spectrain"}


def test_the_working_tree_can_travel() -> None:
    """Without the drafter that docs/engine.md leaves out, what git tracks is well below 64 MiB, and
    wheels fit beside it; nothing that the script runs is in that folder."""
    left_out = "packages/coder/spectrain_coder/drafter/"
    assert f"'!/{left_out}'" in (ROOT / "docs" / "engine.md").read_text()
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("the sources are no git repository")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = {path: path.lstat().st_size for path in paths if path.exists()}
    assert any(left_out in str(path) for path in paths)
    assert sum(size for path, size in sizes.items() if left_out not in str(path)) < 44 << 20


@pytest.mark.slow
def test_every_line_of_the_script_runs(image_environment: dict[str, str], tmp_path: Path) -> None:
    """What runs first is measured at toy size with the machine's packages alone, and no row fails;
    the other parts run with a stand-in for Python. Every command of the script was executed."""
    trace = tmp_path / "trace"
    assert run_script(["first", "toy"], image_environment, trace) == 0
    assert run_script(["kernels", "ceilings", "toy"], image_environment, trace) == 0
    out = tmp_path / "out"
    for name in ("kernels", "engine", "engine-1.5b", "engine-135m"):
        rows = json.loads((out / f"{name}-toy.json").read_text())["rows"]
        assert rows and not [row for row in rows.values() if "failed" in row], rows
    assert (out / "report.md").exists()
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    runs = f"{tmp_path / 'run'} {tmp_path / 'run=broken'}"
    quick = {**image_environment, "PYTHON": str(stand_in), "TARGET": "target", "RUNS": runs}
    for words in ("online toy", "families", "train", "score", "bench", "scale toy"):
        assert run_script(words.split(), quick, trace) == 0, words
    # Nothing is installed there, so every package is read from its folder.
    read_folders = (out / "path").read_text().strip().split(":")
    assert {str(path) for path in (ROOT / "packages").iterdir() if path.is_dir()} <= {*read_folders}
    for words in ("engine", "nothing"):
        assert run_script([words], quick, trace) == 2, words
    assert run_script(["families"], {**quick, "RUNS": ""}, trace) == 2
    late = {**quick, "LIMIT": "20"}
    assert run_script(["first", "toy"], late, trace) == 0
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/bash\n[[ $2 == *report ]]\n")
    failing.chmod(0o755)
    assert run_script(["first", "toy"], {**quick, "PYTHON": str(failing)}, trace) == 1
    executed = {int(number) for number in re.findall(r"@(\d+)@", trace.read_text())}
    missed = [min(lines) for lines in list_commands() if not lines & executed]
    lines = SCRIPT.read_text().splitlines()
    assert not missed, [lines[number - 1] for number in missed]


def test_the_list_of_unknowns_follows_the_script() -> None:
    """docs/engine.md lists in at most ten lines what only a card can tell, each with the part that
    asks it: first those of `first`, in its order, then parts that are called by themselves."""
    page = (ROOT / "docs" / "engine.md").read_text()
    listed = re.findall(
        r"^\d+\. (`[^:]+):", page[page.index("in the order of the script's") :], re.M
    )
    script = SCRIPT.read_text()
    body = script[script.index("\nfirst() {") : script.index("\nnext_part() {")]
    asked = list(dict.fromkeys(re.findall(r'next_part (\w+ \w+) "', body)))
    parts = [re.findall(r"`([\w ]+)`", line) for line in listed]
    assert 1 <= len(parts) <= 10
    inside = [part for line in parts for part in line if " " in part]
    assert inside == [part for part in asked if part in inside] and len(inside) > 5
    outside = [part for line in parts[len(inside) :] for part in line]
    assert outside and all(f"\n{part}() {{" in script for part in outside)

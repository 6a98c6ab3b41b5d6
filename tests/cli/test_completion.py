"""A real bash completes what the files say, and fast: nothing heavy is imported."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.cli import main as cli
from spectrain.cli.completion import SHELL_SCRIPTS, complete_word, read_script
from spectrain.cli.help import COMMANDS
from spectrain.config.choices import choice_files, conf_folders
from spectrain.config.signatures import list_keys
from spectrain.export.layouts import EXPORT_FORMATS, FORMATS

FOLDERS = conf_folders()
HEAVY = ("torch", "hydra", "omegaconf", "transformers", "numpy", "rich", "pydantic")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with runs and data, and a `spectrain` to call."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/eagle3-tiny/drafter", "runs/empty", "data/more"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "my chats.jsonl").touch()
    (tmp_path / "data" / "chats.jsonl").touch()
    command = tmp_path / "spectrain"
    root = Path(cli.__file__).parents[2]
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{root}" exec "{sys.executable}" -m spectrain "$@"\n')
    command.chmod(0o755)
    return tmp_path


def bash(place: Path, words: list[str]) -> list[str]:
    """What bash would offer for the last of these words, as it breaks them."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f'eval "$(./spectrain completion bash)"\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words) - 1}\n'
        '[[ $(complete -p spectrain) == *"-F _spectrain spectrain" ]] || exit 3\n_spectrain\n'
        'for reply in "${COMPREPLY[@]}"; do printf "%s|\\n" "$reply"; done'
    )
    shell = shutil.which("bash")
    assert shell is not None
    ran = subprocess.run([shell, "--norc", "-c", program], capture_output=True, text=True, cwd=place, check=True)
    return [line.removesuffix("|") for line in ran.stdout.splitlines()]


def offered(*words: str) -> list[str]:
    return [one.rstrip() for one in complete_word(list(words))]


def test_bash_completes_commands_choices_and_keys(place: Path) -> None:
    """Words are broken at = by bash, and what it is given back replaces what follows the break only."""
    commands = sorted({name.split()[0] for name in COMMANDS})
    assert [one.rstrip() for one in bash(place, ["./spectrain", ""])] == commands
    assert bash(place, ["./spectrain", "tra"]) == ["train "]
    assert [one.rstrip() for one in bash(place, ["./spectrain", "train", "recipe", "="])] == list(
        choice_files("recipe", FOLDERS)
    )
    assert bash(place, ["./spectrain", "train", "recipe", "=", "kang"]) == ["kangaroo "]
    assert bash(place, ["./spectrain", "train", "recipe=kang"]) == ["recipe=kangaroo "]  # where = breaks no words
    assert bash(place, ["./spectrain", "train", "recipe", "=", "medusa1", "drafter.num_h"]) == ["drafter.num_heads="]
    assert bash(place, ["./spectrain", "eval", "run", "=", "runs/ea"]) == ["runs/eagle3-tiny ", "runs/eagle3-tiny/"]
    assert bash(place, ["./spectrain", "train", "data", "=", "jsonl", "data.path", "=", "data/my"]) == [
        "data/my\\ chats.jsonl "
    ]


@pytest.mark.parametrize("group", ["recipe", "target", "drafter", "data", "tree", "acceptance", "eval", "tracker", "source"])
def test_choices_are_the_files(group: str) -> None:
    """Every file of a group is offered, and nothing else; in a sweep, after the comma too."""
    names = list(choice_files(group, FOLDERS))
    assert offered("train", f"{group}=") == [f"{group}={name}" for name in names]
    assert offered("train", "-m", f"{group}={names[0]},") == [f"{group}={names[0]},{name}" for name in names]


def test_keys_are_the_constructors() -> None:
    """The keys in a group are those of the choice among the words, of the recipe's, or of the default."""

    def wanted(group: str, target: str) -> list[str]:
        return sorted(f"{group}.{key.name}=" for key in list_keys(target))

    assert offered("train", "trainer.") == wanted("trainer", "spectrain.training.trainer.Trainer")
    assert offered("train", "recipe=eagle3", "drafter.") == wanted("drafter", "spectrain.drafters.eagle3.Eagle3")
    assert offered("train", "drafter=medusa", "drafter.") == wanted("drafter", "spectrain.drafters.medusa.Medusa")
    assert offered("train", "tree=chain", "tree.") == wanted("tree", "spectrain.trees.Chain")
    assert offered("chat", "chat.") == wanted("chat", "spectrain.cli.chat.Chat")
    assert offered("train", "drafter.") == []
    assert offered("data", "regenerate", "sampling.t") == ["sampling.temperature=", "sampling.top_k=", "sampling.top_p="]


def test_values_are_those_that_a_type_lists() -> None:
    """Literals and booleans have all their values offered."""
    assert offered("train", "trainer.packing=") == ["trainer.packing=false", "trainer.packing=true"]
    assert offered("eval", "eval.sweep=") == offered("train", "eval.sweep=")
    sweeps = ("batch", "context", "exit", "length", "prune", "temperature", "tree")
    assert offered("train", "eval.sweep=") == [f"eval.sweep={sweep}" for sweep in sweeps]
    assert offered("train", "drafter=eagle3", "drafter.start=r") == ["drafter.start=random"]
    assert offered("convert", "format=") == sorted(f"format={layout}" for layout in FORMATS)
    assert offered("export", "format=") == sorted(f"format={layout}" for layout in EXPORT_FORMATS)


def test_words_of_other_commands(place: Path) -> None:
    """Subcommands, shells, recipes, flags, formats and files."""
    assert offered("data", "") == ["audit", "index", "inspect", "regenerate", "store", "verify"]
    assert offered("completion", "") == sorted(SHELL_SCRIPTS)
    assert offered("recipes", "ea") == ["eagle1", "eagle3"]
    assert offered("doctor", "--") == ["--help", "--json"]
    assert offered("convert", "runs/eagle3-tiny", "out", "--to", "v") == ["vllm"]
    assert offered("convert", "--t") == ["--target", "--to"] and offered("lint", "target=") == offered("train", "target=")
    assert offered("lint", "run=runs/ea") == ["run=runs/eagle3-tiny", "run=runs/eagle3-tiny/"]
    assert complete_word(["lint", "runs/e"]) == ["runs/eagle3-tiny/", "runs/empty/"]
    assert complete_word(["train", "data=jsonl", "data.path=data/"]) == [
        "data.path=data/chats.jsonl ", "data.path=data/more/", "data.path=data/my chats.jsonl ",
    ]  # fmt: skip
    assert offered("nonsense", "") == offered("train", "no such key") == []


def test_a_config_dir_adds_its_choices(place: Path) -> None:
    """A family of an outside folder is offered like ours."""
    (place / "mine" / "drafter").mkdir(parents=True)
    (place / "mine" / "drafter" / "random.yaml").write_text("_target_: mine.Random\n")
    assert offered("train", "--config-dir", "mine", "drafter=ra") == ["drafter=random"]


@pytest.mark.parametrize("words", [["train", "recipe=eagle3", "drafter."], ["chat", "run="], ["", ""]])
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    """Completing waits for no torch, no hydra and no transformers."""
    program = (
        "import sys; from spectrain.cli.main import main\n"
        "sys.argv = ['spectrain', 'completion', 'words', '--', *sys.argv[1:]]\nmain()\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True, env=os.environ)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("shell, words", [("zsh", ["zsh", "-f", "-n"]), ("fish", ["fish", "--no-execute"])])
def test_other_shells_read_their_script(shell: str, words: list[str], tmp_path: Path) -> None:
    """The script has no mistake in its grammar."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(read_script(shell))
    ran = subprocess.run([*words, str(tmp_path / "script")], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")

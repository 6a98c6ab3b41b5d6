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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory with runs and data, and a `spectrain` to call."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/eagle3-tiny/drafter", "runs/empty", "data/more"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "my chats.jsonl").touch()
    (tmp_path / "data" / "chats.jsonl").touch()
    command = tmp_path / "spectrain"
    root = Path(cli.__file__).parents[2]
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH="{root}" exec "{sys.executable}" -m spectrain "$@"\n'
    )
    command.chmod(0o755)
    return tmp_path


def complete_in_bash(folder: Path, words: list[str]) -> list[str]:
    """Return what bash offers for the last of these words, as it breaks them."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        'eval "$(./spectrain completion '
        f'bash)"\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words) - 1}\n'
        '[[ $(complete -p spectrain) == *"-F _spectrain spectrain" ]] || exit 3\n_spectrain\n'
        'for reply in "${COMPREPLY[@]}"; do printf "%s|\\n" "$reply"; done'
    )
    shell = shutil.which("bash")
    assert shell is not None
    ran = subprocess.run(
        [shell, "--norc", "-c", program], capture_output=True, text=True, cwd=folder, check=True
    )
    return [line.removesuffix("|") for line in ran.stdout.splitlines()]


def complete(*words: str) -> list[str]:
    return [word.rstrip() for word in complete_word(list(words))]


def test_bash_completes_commands_choices_and_keys(folder: Path) -> None:
    """Words are broken at = by bash, and what it is given back replaces what follows the break
    only.
    """
    commands = sorted({name.split()[0] for name in COMMANDS})
    assert [word.rstrip() for word in complete_in_bash(folder, ["./spectrain", ""])] == commands
    assert complete_in_bash(folder, ["./spectrain", "tra"]) == ["train "]
    assert [
        word.rstrip() for word in complete_in_bash(folder, ["./spectrain", "train", "recipe", "="])
    ] == list(choice_files("recipe", FOLDERS))
    assert complete_in_bash(folder, ["./spectrain", "train", "recipe", "=", "lili"]) == [
        "lilicorr "
    ]
    # where = breaks no words
    assert complete_in_bash(folder, ["./spectrain", "train", "recipe=lili"]) == ["recipe=lilicorr "]
    assert complete_in_bash(
        folder, ["./spectrain", "train", "recipe", "=", "medusa1", "drafter.num_h"]
    ) == ["drafter.num_heads="]
    assert complete_in_bash(folder, ["./spectrain", "eval", "run", "=", "runs/ea"]) == [
        "runs/eagle3-tiny ",
        "runs/eagle3-tiny/",
    ]
    assert complete_in_bash(
        folder, ["./spectrain", "train", "data", "=", "jsonl", "data.path", "=", "data/my"]
    ) == ["data/my\\ chats.jsonl "]


@pytest.mark.parametrize(
    "group",
    ["recipe", "target", "drafter", "data", "tree", "acceptance", "eval", "tracker", "source"],
)
def test_choices_are_the_files(group: str) -> None:
    """Every file of a group is offered, and nothing else; in a sweep, after the comma too."""
    names = list(choice_files(group, FOLDERS))
    assert complete("train", f"{group}=") == [f"{group}={name}" for name in names]
    assert complete("train", "-m", f"{group}={names[0]},") == [
        f"{group}={names[0]},{name}" for name in names
    ]


def test_keys_are_the_constructors() -> None:
    """The keys in a group are those of the choice among the words, of the recipe's, or of the
    default.
    """

    def list_words(group: str, target: str) -> list[str]:
        return sorted(f"{group}.{key.name}=" for key in list_keys(target))

    assert complete("train", "trainer.") == list_words(
        "trainer", "spectrain.training.trainer.Trainer"
    )
    assert complete("train", "recipe=eagle3", "drafter.") == list_words(
        "drafter", "spectrain.drafters.eagle3.Eagle3"
    )
    assert complete("train", "drafter=medusa", "drafter.") == list_words(
        "drafter", "spectrain.drafters.medusa.Medusa"
    )
    assert complete("train", "tree=chain", "tree.") == list_words("tree", "spectrain.trees.Chain")
    assert complete("chat", "chat.") == list_words("chat", "spectrain.cli.chat.Chat")
    assert complete("train", "drafter.") == []
    assert complete("data", "regenerate", "sampling.t") == [
        "sampling.temperature=",
        "sampling.top_k=",
        "sampling.top_p=",
    ]


def test_values_are_those_that_a_type_lists() -> None:
    """Literals and booleans have all their values offered."""
    assert complete("train", "trainer.packing=") == [
        "trainer.packing=false",
        "trainer.packing=true",
    ]
    assert complete("eval", "eval.serve_in=") == complete("train", "eval.serve_in=")
    offered = complete("train", "eval.serve_in=")
    assert {f"eval.serve_in={engine}" for engine in ("auto", "openvino", "vllm")} <= {
        *offered
    } and offered == sorted(offered)
    assert complete("train", "drafter=eagle3", "drafter.start=r") == ["drafter.start=random"]
    assert complete("convert", "format=") == sorted(f"format={layout}" for layout in FORMATS)
    assert complete("export", "format=") == sorted(f"format={layout}" for layout in EXPORT_FORMATS)


def test_words_of_other_commands(folder: Path) -> None:
    """Subcommands, shells, recipes, flags, formats and files are offered."""
    inside = [name for name in complete("data", "") if name not in ("audit", "inspect")]
    assert inside == ["index", "regenerate", "store", "verify"]
    assert complete("completion", "") == sorted(SHELL_SCRIPTS)
    assert complete("recipes", "ea") == ["eagle1", "eagle3"]
    assert complete("runs", "--") == ["--help", "--json", "--quiet"]
    assert complete("convert", "runs/eagle3-tiny", "out", "--to", "v") == ["vllm"]
    assert complete("convert", "--t") == ["--target", "--to"] and complete(
        "lint", "target="
    ) == complete("train", "target=")
    assert complete("lint", "run=runs/ea") == ["run=runs/eagle3-tiny", "run=runs/eagle3-tiny/"]
    assert complete_word(["lint", "runs/e"]) == ["runs/eagle3-tiny/", "runs/empty/"]
    assert complete_word(["train", "data=jsonl", "data.path=data/"]) == [
        "data.path=data/chats.jsonl ",
        "data.path=data/more/",
        "data.path=data/my chats.jsonl ",
    ]
    assert complete("nonsense", "") == complete("train", "no such key") == []


def test_a_config_dir_adds_its_choices(folder: Path) -> None:
    """A family of an outside folder is offered like ours."""
    (folder / "mine" / "drafter").mkdir(parents=True)
    (folder / "mine" / "drafter" / "random.yaml").write_text("_target_: mine.Random\n")
    assert complete("train", "--config-dir", "mine", "drafter=ra") == ["drafter=random"]


@pytest.mark.parametrize(
    "words", [["train", "recipe=eagle3", "drafter."], ["chat", "run="], ["", ""]]
)
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    """Completing waits for no torch, no hydra and no transformers."""
    program = (
        "import sys; from spectrain.cli.main import main\n"
        "sys.argv = ['spectrain', 'completion', 'words', '--', *sys.argv[1:]]\nmain()\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "shell, words", [("zsh", ["zsh", "-f", "-n"]), ("fish", ["fish", "--no-execute"])]
)
def test_other_shells_read_their_script(shell: str, words: list[str], tmp_path: Path) -> None:
    """The script has no mistake in its grammar."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(read_script(shell))
    ran = subprocess.run(
        [*words, str(tmp_path / "script")], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_settings_files_are_offered(folder: Path) -> None:
    (folder / "data" / "my.yaml").touch()
    assert complete("train", "data/") == ["data/more/", "data/my.yaml"]


def test_columns_and_folders_of_runs_are_offered(folder: Path) -> None:
    assert complete("runs", "sort=s") == ["sort=speedup", "sort=state"]
    assert complete("runs", "ru") == ["runs/"]

"""The command line: a mistake of the user's ends in one sentence and status 2, and leaves no run
folder behind.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from spectrain.cli import main as cli
from spectrain.cli.overrides import find_repeated, to_settings, write_overrides
from spectrain.config.check import check_config
from spectrain.config.choices import (
    conf_folders,
    list_config_groups,
    named_folders,
    set_choice_folders,
)
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError

GOOD = json.dumps(
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
)
TRAIN = ("train", "recipe=eagle3", "target=tiny", "eval=none", "trainer.max_steps=1", "run=out")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the working directory: good and bad data, a folder that holds a run, and a target
    without weights.
    """
    (tmp_path / "good.jsonl").write_text(GOOD + "\n")
    (tmp_path / "bad.jsonl").write_text(GOOD + "\nnot JSON\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").write_text("run: taken\n")
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_words(*changes: str) -> tuple[str, ...]:
    """Return a training command with some settings changed; KEY alone leaves a setting out."""
    keys = {change.split("=")[0] for change in changes}
    return (
        *(word for word in TRAIN if word.split("=")[0] not in keys),
        *(change for change in changes if "=" in change),
    )


def regenerate_words(*changes: str) -> tuple[str, ...]:
    """Return a regeneration command with some settings changed; KEY alone leaves a setting out."""
    words = ("target=tiny", "data.limit=2", "out=out")
    keys = {change.split("=")[0] for change in changes}
    remaining = (word for word in words if word.split("=")[0] not in keys)
    return ("data", "regenerate", *remaining, *(change for change in changes if "=" in change))


MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no command": (("trian", "recipe=eagle3"), ("trian", "train")),
    "no data command": (("data", "verfy"), ("data verfy", "data verify")),
    "no recipe": (("train", "target=tiny", "run=out"), ("recipe=eagle3",)),
    "unknown recipe": (train_words("recipe=eagel3"), ("recipe=eagel3", "eagle3")),
    "unknown target": (train_words("target=tiney"), ("target=tiney", "tiny")),
    "unknown drafter": (train_words("recipe", "drafter=eagle4"), ("drafter=eagle4", "eagle3")),
    "unknown tree": (train_words("tree=chian"), ("tree=chian", "chain")),
    "unknown top-level key": (train_words("trainr=3"), ("trainr", "trainer")),
    "unknown top-level group": (train_words("trainr.lr=3"), ("trainr", "trainer")),
    "unknown nested key": (train_words("trainer.lrr=1"), ("trainer.lrr", "lr")),
    "unknown drafter key": (train_words("drafter.ttt_step=1"), ("drafter.ttt_step", "ttt_steps")),
    "a group's runtime object": (train_words("drafter.target=tiny"), ("drafter.target",)),
    "number misspelt": (train_words("trainer.lr=abc"), ("trainer.lr=abc", "a number")),
    "fraction for a count": (
        train_words("trainer.max_steps=1.5"),
        ("trainer.max_steps=1.5", "a whole number"),
    ),
    "unknown value of a choice": (
        train_words("drafter.loss=forward_kll"),
        ("drafter.loss=forward_kll", "forward_kl"),
    ),
    "null for a number": (train_words("trainer.lr=null"), ("trainer.lr", "a number")),
    "count that no integer of 64 bits holds": (
        train_words("trainer.max_steps=99999999999999999999999"),
        ("trainer.max_steps=99999999999999999999999", "9223372036854775807"),
    ),
    "passes without end": (
        train_words("trainer.epochs=1e300"),
        ("trainer.epochs=1e+300", "1000000 or less"),
    ),
    "tree that only the score would refuse": (
        train_words("eval=default", "tree.depth=1000000000"),
        ("tree.depth=1000000000", "4096 or less"),
    ),
    "rate of zero": (train_words("trainer.lr=0"), ("trainer.lr=0",)),
    "resume misspelt": (train_words("trainer.resume=yes"), ("trainer.resume", "auto")),
    "resume without run": (
        train_words("run", "trainer.resume=auto"),
        ("trainer.resume=auto", "run="),
    ),
    "data.path missing": (train_words("data=jsonl"), ("data.path",)),
    "data file missing": (
        train_words("data=jsonl", "data.path=none.jsonl"),
        ("data.path=none.jsonl",),
    ),
    "data line bad": (train_words("data=jsonl", "data.path=bad.jsonl"), ("bad.jsonl, line 2",)),
    "prompts missing": (
        train_words("eval=default", "eval.prompts=none.jsonl"),
        ("eval.prompts=none.jsonl",),
    ),
    "run folder taken": (train_words("run=taken"), ("run=taken", "trainer.resume=auto")),
    "run is a file": (train_words("run=good.jsonl"), ("run=good.jsonl",)),
    "run of no name": (train_words("run="), ("run=", "empty")),
    "export to no name": (("export", "run=taken", "format=vllm", "out="), ("out=", "empty")),
    "a score's name leads away": (
        train_words("eval=default", "eval.name=../../escape"),
        ("eval.name=../../escape", "one folder"),
    ),
    "a score's name is a path": (
        train_words("eval=default", "eval.name=/tmp/escape"),
        ("eval.name=/tmp/escape", "one folder"),
    ),
    "a score's name is above": (
        train_words("eval=default", "eval.name=.."),
        ("eval.name=..", "one folder"),
    ),
    "a score without a name": (train_words("eval=default", "eval.name="), ("eval.name=", "empty")),
    "a command as family": (
        train_words("drafter._target_=os.system"),
        ("drafter._target_", "no such key"),
    ),
    "an order as a value": (
        train_words("recipe", "drafter=causal", "drafter.architecture={_target_: os.system}"),
        ("drafter.architecture._target_", "order"),
    ),
    "target.model missing": (train_words("target=hf"), ("target.model",)),
    "target without weights": (
        train_words("target=hf", "target.model=weightless"),
        ("target.model=weightless",),
    ),
    "target is no directory": (
        train_words("target=hf", "target.model=./none"),
        ("target.model=./none",),
    ),
    "dtype unheard of": (train_words("target.dtype=int3"), ("target.dtype=int3", "float32")),
    "override without a value": ((*TRAIN, "trainer"), ("trainer",)),
    "eval of nothing": (("eval",), ("run=",)),
    "eval of no folder": (("eval", "run=out"), ("run=out", "drafter")),
    "eval of a run without drafter": (("eval", "run=taken"), ("run=taken", "drafter")),
    "inspect past the end": (
        ("data", "inspect", "target=tiny", "data=jsonl", "data.path=good.jsonl", "index=1"),
        ("index=1", "0 to 0"),
    ),
    "regenerate to nowhere": (("data", "regenerate", "target=tiny"), ("out", "out=DIR")),
    "regenerate, unknown key": (
        regenerate_words("sampling.temprature=1"),
        ("sampling.temprature", "temperature"),
    ),
    "regenerate, unknown writer": (regenerate_words("writer=vllm"), ("writer=vllm", "engine")),
    "regenerate, turns misspelt": (
        regenerate_words("regenerate.turns=last"),
        ("regenerate.turns=last", "first"),
    ),
    "regenerate, a tree for nothing": (regenerate_words("tree=chain"), ("tree", "run=")),
    "regenerate with no drafter": (regenerate_words("run=taken"), ("run=taken", "drafter")),
    "regenerate among other files": (regenerate_words("out=."), ("out=.", "manifest.json")),
    "check what is not there": (regenerate_words("check=true"), ("out=out", "manifest.json")),
    "recipe without =": (("train", "recipe", "eagle3"), ("recipe=eagle3",)),
    "recipe in three words": (
        ("train", "recipe", "=", "eagle3"),
        ("recipe=eagle3", "without spaces"),
    ),
    "key without a value": (("train", "trainer.lr"), ("write trainer.lr=VALUE",)),
    "recipe of another family": (
        ("train", "recipe=eagle3", "target=tiny", "drafter=medusa"),
        ("recipe=eagle3 sets drafter.", "write recipe=medusa1"),
    ),
    "recipe as a command": (("recipe", "eagle3"), ("recipes",)),
    "recipe misspelt": (train_words("recipe", "receipe=eagle3"), ("receipe", "nearest", "recipe")),
    "recipe in capitals": (train_words("recipe=EAGLE3"), ("recipe=EAGLE3", "eagle3")),
    "recipe with dashes": (("train", "--recipe=eagle3"), ("recipe=VALUE", "dashes")),
    "several recipes": (train_words("recipe=eagle3,medusa1"), ("recipe=eagle3,medusa1", "-m")),
    "several settings in quotes": (
        train_words("recipe=eagle3 tree=chain"),
        ("one pair of quotes",),
    ),
    "train for trainer": (train_words("train.lr=1"), ("train", "trainer.lr")),
    "key without its group": (train_words("lr=1"), ("lr", "trainer.lr")),
    "key of several groups": (train_words("model=x"), ("target.model",)),
    "key with dashes": ((*TRAIN, "--max-steps", "3"), ("--max-steps", "trainer.max_steps=VALUE")),
    "no key": ((*TRAIN, "=3"), ("=3", "KEY=VALUE")),
    "number for a choice": (train_words("trainer=3"), ("trainer=3", "default")),
    "target by the model's name": (
        train_words("target=Llama"),
        ("target=Llama", "target=hf target.model="),
    ),
    "target by its place": (train_words("target=org/name"), ("target=hf target.model=org/name",)),
    "data by its file": (train_words("data=good.jsonl"), ("data=jsonl data.path=good.jsonl",)),
    "path for data without one": (
        train_words("data.path=good.jsonl"),
        ("data.path", "data=hub, jsonl"),
    ),
    "temperature of greedy": (
        train_words("acceptance.temperature=1"),
        ("acceptance.temperature", "match"),
    ),
    "number with a unit": (train_words("data.limit=10k"), ("data.limit=10k", "without a unit")),
    "comma in a number": (train_words("trainer.lr=0,001"), ("trainer.lr=0,001", "-m", "point")),
    "None for null": (train_words("data.limit=None"), ("data.limit=None", "write null")),
    "no value": (train_words("trainer.lr="), ("trainer.lr=", "empty")),
    "yes for true": (
        train_words("trainer.packing=yess"),
        ("trainer.packing=yess", "true or false"),
    ),
    "flag misspelt": (("train", "recipe=eagle3", "--jsn"), ("--jsn", "--json")),
    "flag of runs misspelt": (("runs", "--jsn"), ("--jsn", "--json")),
    "unknown part to show": ((*TRAIN, "--cfg", "jobb"), ("--cfg jobb", "job")),
    "no folder of configurations": (
        (*TRAIN, "--config-dir", "none"),
        ("--config-dir none", "folder"),
    ),
    "run without its key": (("eval", "taken"), ("taken", "run=taken")),
    "training key for eval": (
        ("eval", "run=taken", "trainer.lr=1"),
        ("trainer", "there is no such key"),
    ),
    "chat with nobody": (("chat",), ("run=", "drafter=ngram")),
    "drafter.init is no drafter": (
        train_words("drafter.init=taken"),
        ("drafter.init=taken", "drafter"),
    ),
    "data command left out": (("data",), ("data index", "data store")),
    "unknown shell": (("completion", "bsh"), ("bsh", "bash")),
    "no shell": (("completion",), ("completion bash",)),
    "recipe that is none": (("recipes", "eagle"), ("eagle", "eagle3")),
    "sweep of a misspelt recipe": (
        ("train", "-m", "recipe=eagle3,eagl"),
        ("recipe=eagl", "eagle3"),
    ),
    "export of nothing": (("export", "format=vllm"), ("run", "run=runs/NAME")),
    "convert to nothing": (("convert", "taken", "out"), ("--to",)),
    "convert without a drafter": (
        ("convert", "out=out", "format=vllm"),
        ("run", "IN OUT --to vllm"),
    ),
    "convert to a folder too many": (
        ("convert", "taken", "out", "more", "--to", "vllm"),
        ("more", "KEY=VALUE"),
    ),
    "convert to no format": (("convert", "taken", "out", "--to"), ("--to", "IN OUT --to vllm")),
    "convert, key misspelt": (
        ("convert", "run=taken", "fromat=vllm", "out=out"),
        ("fromat", "format"),
    ),
    "convert, target misspelt": (
        ("convert", "run=taken", "format=vllm", "out=out", "target=tiney"),
        ("target=tiney", "tiny"),
    ),
    "lint of nothing": (("lint", "none"), ("none", "no such folder")),
    "lint of nothing by key": (("lint", "run=none"), ("none", "no such folder")),
    "lint of nobody": (("lint",), ("run", "lint DIR")),
    "lint, flag misspelt": (("lint", "taken", "--targt", "tiny"), ("--targt", "--target")),
    "chat asked nothing": (("chat", "drafter=ngram", "--once"), ("--once", "What is a bee?")),
    "inspect with a training key": (
        ("data", "inspect", "target=tiny", "trainer.lr=1"),
        ("trainer",),
    ),
}


def run_refused(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> tuple[Any, str]:
    """Return the status and the stderr of a command that ends by itself."""
    monkeypatch.setattr(sys, "argv", ["spectrain", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr().err


def check_mistake(status: Any, stderr: str, expected: tuple[str, ...], folder: Path) -> None:
    """Check for status 2, a sentence that names every expected word, no traceback, and nothing
    written.
    """
    assert status == 2, stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("spectrain: ") and "Traceback" not in stderr
    assert all(word in stderr for word in expected), stderr
    assert sorted(path.name for path in folder.iterdir()) == [
        "bad.jsonl",
        "good.jsonl",
        "taken",
        "weightless",
    ]
    assert [path.name for path in (folder / "taken").iterdir()] == ["config.yaml"]


@pytest.mark.sweep(24, free=("words", "expected"))
@pytest.mark.parametrize("words, expected", MISTAKES.values(), ids=list(MISTAKES))
def test_mistake_is_a_single_sentence(
    words: tuple[str, ...],
    expected: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every mistake in the settings names its key and the nearest valid one."""
    check_mistake(*run_refused(words, monkeypatch, capsys), expected, folder)


@pytest.mark.sweep(1, free=("name",))
@pytest.mark.parametrize("name", ["unknown nested key", "data line bad"])
def test_mistake_is_a_single_sentence_from_the_shell(name: str, folder: Path) -> None:
    """The whole program, imports and warnings included, says nothing else on stderr."""
    words, expected = MISTAKES[name]
    ran = subprocess.run(
        [sys.executable, "-m", "spectrain", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"},
    )
    check_mistake(ran.returncode, ran.stderr, expected, folder)


REFUSED_EARLY = """
import sys
from spectrain.cli.main import main

for words in (
    ["lint"],
    ["lint", "none"],
    ["convert", "none", "out", "--to", "vllm"],
    ["convert", "runs", "out", "--to", "none"],
    ["export", "run=smollm2-eagle3", "format=none", "out=out"],
    ["export", "run=smollm2-eagle3", "format=vllm"],
    ["export", "run=smollm2-eagle3", "format=vllm", "out=runs"],
):
    sys.argv = ["spectrain", *words]
    try:
        main()
    except SystemExit as stopped:
        print(stopped.code, *{"torch", "transformers"} & sys.modules.keys())
"""


def test_files_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Who names a folder or a format that does not exist waits for no library."""
    (tmp_path / "runs" / "some").mkdir(parents=True)
    ran = subprocess.run(
        [sys.executable, "-c", REFUSED_EARLY],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert ran.stdout.split() == ["2"] * 7, ran.stdout + ran.stderr
    assert ran.stderr.count("\n") == 7, ran.stderr


@pytest.mark.parametrize("words, status", [((), 2), (("--help",), 0), (("help",), 0)])
def test_usage_lists_the_commands(
    words: tuple[str, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No command at all is a mistake, help is not; both show what there is."""
    monkeypatch.setattr(sys, "argv", ["spectrain", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == status
    shown = capsys.readouterr().out
    names = [line.strip().split("  ")[0] for line in shown.splitlines()]
    assert {"train", "eval", "data store", "recipes", "runs"} <= {*names}


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("trainer.lr=1", "++trainer.lr=1"),
        ("run=runs/a", "++run=runs/a"),
        ("target=tiny", "target=tiny"),
        ("target.model=a=b", "++target.model='a=b'"),
        ("+trainer.lr=1", "+trainer.lr=1"),
        ("~tracker", "~tracker"),
        ("--config-dir", "--config-dir"),
        ("recipe@_global_=a", "recipe@_global_=a"),
    ],
)
def test_keys_need_not_stand_in_a_yaml(argument: str, expected: str) -> None:
    """Single keys are added where they are missing; group choices and flags are left to hydra."""
    assert write_overrides([argument]) == [expected]


@pytest.mark.parametrize(
    "words, expected",
    [
        ("chat run=a --once It's=5", ["run=a", "chat.once='It\\'s=5'"]),
        ("convert a b --to vllm", ["run='a'", "out='b'", "format='vllm'"]),
        (
            "convert --to=hf a --target tiny out=b",
            ["format='hf'", "run='a'", "target=tiny", "out=b"],
        ),
        (
            "lint --config-dir mine a --target o/n",
            ["--config-dir", "mine", "run='a'", "target=hf", "target.model='o/n'"],
        ),
        ("data store recipe=a", ["source=store", "recipe=a"]),
        ("eval a", ["a"]),
    ],
)
def test_words_that_stand_for_settings(words: str, expected: list[str]) -> None:
    """Flags, positions and implied settings become settings; all else stays."""
    command = next(
        name for name in sorted(cli.COMMAND_TASKS, key=len, reverse=True) if words.startswith(name)
    )
    assert to_settings(command, words.removeprefix(command).split()) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trainer.lr=1 trainer.lr=2", ["trainer.lr is given 2 times; trainer.lr=2 holds"]),
        ("run=a +run=b ++run=a", ["run is given 3 times; run=a holds"]),
        ("recipe=a recipe=b", ["recipe is given 2 times; recipe=b holds"]),
        ("trainer.lr=1 trainer.lr=1 data.lr=2", []),
        ("~eval.baselines eval.baselines=[] -m --config-dir=a --config-dir=b", []),
    ],
)
def test_values_that_another_one_replaces_are_named(words: str, said: list[str]) -> None:
    """The last value of a key holds, as in hydra, and the command says so."""
    assert find_repeated(words.split()) == said


def test_groups_are_those_of_the_project_and_of_config_dir(tmp_path: Path) -> None:
    """A group of an outside folder is a choice as well."""
    (tmp_path / "mine" / "flavour").mkdir(parents=True)
    ours = list_config_groups(conf_folders())
    assert {"target", "drafter", "recipe", "data", "eval", "tree"} <= ours
    for flag in ("--config-dir", "-cd"):
        try:
            set_choice_folders(named_folders([flag, str(tmp_path / "mine")]))
            assert list_config_groups(conf_folders()) == ours | {"flavour"}
        finally:
            set_choice_folders([])


@pytest.mark.parametrize("text, expected", [("3e-4", 3e-4), ("1", 1.0), ("'1e-3'", 1e-3)])
def test_values_are_converted_to_the_declared_type(text: str, expected: float) -> None:
    """What yaml reads as text or as a whole number reaches the constructor as its type."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=["recipe=eagle3", f"++trainer.lr={text}"])
    lr = RunSpec.from_config(config).trainer.settings.get("lr")
    assert type(lr) is float and lr == expected


def test_flags_of_hydra_may_stand_between_settings() -> None:
    """Hydra itself refuses settings on both sides of a flag."""
    words = ["recipe=eagle3", "-m", "trainer.lr=1,2", "--config-dir", "conf", "run=a"]
    assert write_overrides(words) == [
        "-m",
        "--config-dir",
        "conf",
        "recipe=eagle3",
        "++trainer.lr=1,2",
        "++run=a",
    ]


def test_unresolvable_reference_is_named() -> None:
    """A reference to a key that is not there stops with the key that holds it."""
    config = OmegaConf.create({"run": "${nowhere}"})
    with pytest.raises(UserError, match=r"^run: .*nowhere"):
        check_config(config, ["run"])


@pytest.mark.parametrize(
    "variables, problem",
    [
        ({"RANK": "x"}, "RANK=x: this variable holds a number"),
        ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK=1.5: this variable holds a number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: there is no MASTER_ADDR beside it"),
    ],
)
def test_variables_of_no_launch_are_named(
    variables: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    cli.check_launch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=problem):
        cli.check_launch()


def test_paths_without_a_home_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """pathlib raises an error of no kind of its own."""
    with pytest.raises(SystemExit) as stopped:
        cli.with_exit_codes(lambda config: print(Path("~nobody-at-all/x").expanduser()))(None)
    assert stopped.value.code == 2 and "no such home folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["123", "1e3", "-5", "2026-11"])
def test_a_folder_may_be_named_by_a_number(name: str) -> None:
    """A run's name stays as it is written, and a list of runs stays a list."""
    assert write_overrides([f"run={name}"]) == [f"++run='{name}'"]
    assert write_overrides([f"run={name},5"]) == [f"++run={name},5"]

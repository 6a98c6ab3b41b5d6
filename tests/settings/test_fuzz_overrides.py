"""Random words of a command: each is accepted, or ends in one sentence and exit status 2.

The words are drawn from every group and setting of `train` and `eval`, with values of wrong types,
absurd sizes and hydra's own syntax. Nothing is trained: a word is accepted where the settings are
read and their groups are constructed.
"""

import os
import random
import re
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli import main as command_line
from spectrain.config.check import check_node
from spectrain.config.choices import choice_files, conf_folders, load_schema, load_yaml
from spectrain.config.signatures import list_keys

VALUES = (
    "true", "false", "True", "False", "null", "None", "nan", "inf", "-inf", "-1", "0", "1", "0.5",
    "1e400", "1e18",
    "1" + "0" * 30, "''", '""', "[]", "{}", "[[1]]", "[1,[2]]", "[true]", "[false,true]", "{a:1}",
    "{a:{b:[1]}}",
    "{a:true}", "x", "../x",
    "\u00fc\u4e2d\u6587", "\u202e", "[b]x[/b]", "m[/b].jsonl", "${x}", "${trainer.lr}",
    "${oc.env:HOME}", "${oc.env:NOT_THERE}",
    "${", "$", "${cpu_gpu:1,2}", "a,b", "1,2", "choice(1,2)", "range(1,3)", "glob(*)", "sort(1,2)",
    "int(1)", "'a b'", "a b",
    "a=b", "\\", "'", '"', "(", ")", "{", "[", "*", "???", "x" * 5000, "/dev/zero", "/", "\x1b[31m",
    "[" * 500, "9" * 5000,
)  # fmt: skip
"""What is written for any setting."""
REPEATED = re.compile(r"spectrain: \S+ is given \d+ times; ")
HYDRA_KEYS = (
    "hydra/sweeper", "hydra/launcher", "hydra/job_logging", "hydra/hydra_logging", "hydra/output",
    "hydra/help", "hydra/env",
    "hydra.run.dir", "hydra.sweep.dir", "hydra.job.name", "hydra.verbose", "hydra.mode",
    "hydra.sweeper", "hydra.searchpath",
    "hydra.output_subdir", "hydra.job.chdir", "hydra.callbacks", "hydra", "hydra.sweeper.params",
    "hydra.job.env_set",
)  # fmt: skip
PREFIXES = ("", "", "", "", "", "", "", "+", "++", "~")
RECIPES = ("eagle3", "medusa1", "gkd", "dflash", "layerskip", "eagle1", "pard")
STARTS = {"train": ("recipe={recipe}", "target=tiny"), "eval": ("drafter=ngram", "target=tiny")}
OWN_VALUES = {"path": "x", "model": "x", "init": "x"}


def list_settings(command: str) -> list[str]:
    """Return the keys of a command: those outside groups, the groups, and the settings of every
    choice of a group.
    """
    schema = load_schema(command)
    names = {key.name for key in schema.keys} | schema.groups.keys()
    for group in schema.groups.keys() - {"recipe"}:
        for path in choice_files(group, conf_folders()).values():
            target = load_yaml(path).get("_target_")
            names |= {f"{group}.{key.name}" for key in list_keys(target)} if target else set()
    return sorted(names)


def draw_words(command: str, draw: random.Random, settings: list[str]) -> list[str]:
    """Return the words of a command of which one is odd."""
    start = [word.format(recipe=draw.choice(RECIPES)) for word in STARTS[command]]
    if draw.random() < 0.15:
        key = draw.choice(HYDRA_KEYS)
    else:
        key = (
            draw.choice([name for name in settings if "." not in name])
            if draw.random() < 0.2
            else draw.choice(settings)
        )
        if "." in key:
            group = key.partition(".")[0]
            choice = draw.choice([*choice_files(group, conf_folders())])
            start += (
                [f"{group}={choice}"]
                if draw.random() < 0.3 and group not in ("drafter", "recipe")
                else []
            )
        if draw.random() < 0.1:
            key = draw.choice(
                (
                    f"{key}.x",
                    f"{key}.0",
                    f"x.{key}",
                    f"{key}@x",
                    f"{key}/x",
                    "",
                    f"{key}._target_",
                    f"/{key}",
                )
            )
    prefix = draw.choice(PREFIXES)
    value = draw.choice(VALUES)
    odd = f"{prefix}{key}" if prefix == "~" and draw.random() < 0.5 else f"{prefix}{key}={value}"
    return [command, *start, odd]


def read_and_build(config: Any) -> None:
    """Read the settings of a run, and construct the groups that need nothing else."""
    spec, _ = command_line.read_command_run(config)
    check_built(spec)


def read_and_build_eval(config: Any) -> None:
    from spectrain.runs.defaults import resolve_eval_spec

    if "server" in config or config.serve:
        from spectrain.config.resolve import resolve

        resolve(config, [*config], None)
        return
    spec, _ = resolve_eval_spec(config)
    check_built(spec)


def check_built(spec: Any) -> None:
    for group in (
        "tree",
        "acceptance",
        "source",
        "optimizer",
        "schedule",
        "adapter",
        "eval",
        "server",
    ):
        value = getattr(spec, group, None)
        if value and group in ("tree", "acceptance", "eval"):
            value.build()
        elif value:
            check_node(group, value.node)
    if spec.trainer:
        from spectrain.training.trainer import Trainer

        Trainer.from_spec(spec)


TASKS = {"train": read_and_build, "eval": read_and_build_eval}


def run_words(words: list[str]) -> tuple[str, str]:
    """Run the words in this process; return how they ended (accepted, refused, or the fault) and
    what was printed.
    """
    out = StringIO()
    err = StringIO()
    saved, command_line.COMMAND_TASKS[words[0]] = (
        command_line.COMMAND_TASKS[words[0]],
        TASKS[words[0]],
    )
    arguments = sys.argv
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # as main does
    try:
        with redirect_stdout(out), redirect_stderr(err):
            command_line.run_command(list(words))
        outcome = "accepted"
    except SystemExit as end:
        text = err.getvalue()
        # A sentence about values that are given twice may stand before it.
        lines = [line for line in text.splitlines() if not REPEATED.match(line)]
        is_sentence = len(lines) == 1 and lines[0].startswith("spectrain: ") and len(text) < 8000
        is_refused = end.code == 2 and is_sentence
        outcome = (
            "accepted"
            if not end.code
            else "refused"
            if is_refused
            else f"exit {end.code}: {text[-300:]!r}"
        )
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        outcome = f"traceback {type(error).__name__}: {str(error)[:150]!r} at {place}"
    finally:
        command_line.COMMAND_TASKS[words[0]] = saved
        sys.argv = arguments
    return outcome, out.getvalue() + err.getvalue()


def takes_booleans(key: str) -> bool:
    """Tell whether a setting may be true or false, in some choice of its group."""
    group, _, name = key.partition(".")
    targets = [
        load_yaml(path).get("_target_") for path in choice_files(group, conf_folders()).values()
    ]
    hints = [
        str(entry.hint)
        for target in targets
        if target
        for entry in list_keys(target)
        if entry.name == name
    ]
    return not hints or any(
        kind in hint
        for hint in hints
        for kind in ("bool", "Any", "dict", "Mapping", "str", "Literal")
    )


def is_wrong(words: list[str], outcome: str) -> bool:
    """Tell whether an outcome is a fault: anything but acceptance or one sentence, and a truth
    value taken for a number.
    """
    if outcome == "refused":
        return False
    if outcome != "accepted":
        return True
    match = re.fullmatch(r"(?:\+\+|\+)?(\w+\.\w+)=(\[?(?:true|false).*)", words[-1], re.IGNORECASE)
    return match is not None and not takes_booleans(match[1])


def fuzz(count: int, seed: int) -> list[str]:
    """Return the faults of so many random commands."""
    draw = random.Random(seed)
    faults = list[str]()
    settings = {command: list_settings(command) for command in STARTS}
    outcomes: dict[str, int] = {}
    for _ in range(count):
        command = draw.choice(("train", "train", "eval"))
        words = draw_words(command, draw, settings[command])
        outcome, _ = run_words(words)
        outcomes[outcome.split(" ")[0]] = outcomes.get(outcome.split(" ")[0], 0) + 1
        faults += [f"{' '.join(words)[:200]}: {outcome}"] if is_wrong(words, outcome) else []
    print(outcomes)
    return faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_words_end_in_a_sentence(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 random commands for each seed, none shows a traceback or takes a truth value for a
    number.
    """
    # Words of hydra may write its record into the working directory.
    monkeypatch.chdir(tmp_path)
    assert fuzz(100, seed) == []

"""The commands of this package, as the core's command line reads and runs them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from spectrain.cli import main as cli
from spectrain.cli.completion import complete_word
from spectrain.cli.help import COMMANDS, explain_command
from spectrain.cli.overrides import to_settings
from spectrain.config.resolve import resolve
from spectrain.data.readers import ConversationReader
from spectrain.models.bundled import load_tiny_tokenizer
from spectrain_studies.commands import COMMANDS as OWN
from spectrain_studies.planning.table import format_bytes, format_hours
from tests.cli.test_gguf import run
from tests.cli.test_output_flags import MESSAGES, TINY, check_json, list_named
from tests.cli.test_output_flags import run_command as run_shell_command
from tests.conf.test_conf import compose_settings
from tests.models.checkpoints import save_gguf_file


def test_commands_stand_behind_the_training() -> None:
    names = [*COMMANDS]
    start = names.index("train")
    assert names[start : start + 4] == ["train", "plan", "compare", "eval"]
    words = to_settings("compare", ["a", "b", "recipes=c,d"])
    assert words == ["recipes=[c,d]", 'runs=["a","b"]']


@pytest.mark.parametrize(
    "command, words, expected",
    [
        ("bench decode", "target=tiny", ["drafter=ngram", "target=tiny"]),
        ("bench decode", "recipe=a", ["recipe=a"]),
    ],
)
def test_words_that_stand_for_settings(command: str, words: str, expected: list[str]) -> None:
    """A setting is implied unless a word replaces it."""
    assert to_settings(command, words.split()) == expected


@pytest.mark.parametrize(
    "words, parts",
    [
        (["doctor", "--jsn"], ["--jsn", "--json"]),
        (["bench", "kernels"], ["bench kernels", "bench train"]),
        (["data", "inspekt"], ["data inspekt", "data inspect"]),
        (["bench"], ["bench decode", "bench train"]),
        (["doctor", "json"], ["doctor json", "no settings"]),
        (["data", "inspect", "target=tiny", "index=x"], ["index=x", "whole number"]),
        (["data", "inspect", "target=tiny", "index=1.5"], ["index=1.5", "whole number"]),
        (["data", "inspect", "target=tiny", "index=null"], ["index=null", "whole number"]),
        (["data", "inspect", "target=tiny", "index=true"], ["index=true", "whole number"]),
        (["data", "inspect", "target=tiny", "index=1 data.limit=3"], ["one pair of quotes"]),
        (["data", "inspect", "target=tiny", "idx=3", "--help"], ["idx", "index"]),
        (["data", "inspect", "target=tiny", "eval.limit=3"], ["eval", "no such key"]),
        (["data", "audit", "target=tiny", "eval.promts=x"], ["eval.promts", "prompts"]),
        (["data", "audit", "target=tiny", "json=true"], ["json", "no such key"]),
        (["plan", "recipe=eagle3", "plan.json=true"], ["plan.json", "no such key"]),
        (["plan", "recipe=eagle3", "plan.devices=many"], ["plan.devices=many", "whole number"]),
        (["plan", "recipe=eagle3", "plan.devices=0"], ["plan.devices=0"]),
        (["plan", "recipe=eagle3", "plan.devicegb=3"], ["plan.devicegb", "device_gb"]),
        (["plan", "recipe=eagle3", "plan.users=2 plan.context=3"], ["one pair of quotes"]),
        (["plan", "recipe=eagle3", "target=tiny", "plan.out=."], ["plan.out=.", "a folder"]),
        (["plan", "eagle3"], ["recipe=eagle3"]),
        (["compare", "none"], ["none", "no such folder"]),
        (["compare", "recipes=[eagl]", "target=tiny"], ["eagl", "eagle1"]),
        (["bench", "train", "recipe=eagle3", "trainer.batchtokens=3"], ["batch_tokens"]),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.run_command(words)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("spectrain: ") and len(error.splitlines()) == 1
    assert all(part in error for part in parts)


def test_values_of_help_are_those_of_the_example() -> None:
    """Of a training that is timed as of one that is run."""
    shown = " ".join(explain_command("bench train", [], "all").split())
    assert "Values are those of recipe=eagle3;" in shown and "drafter.ttt_steps=3" in shown
    assert complete_word(["doctor", "--"]) == ["--help ", "--json ", "--quiet "]


OUTPUTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("plan", "recipe=medusa1", *TINY, "plan.calibrate=false"): ("memory", "disk", "hours", "fits"),
    ("train", "recipe=medusa1", *TINY, "eval=none", "--dry-run"): ("plan", "samples"),
    ("data", "inspect", *TINY): ("index", "examples", "tokens", "supervised"),
    ("data", "audit", *TINY): ("sources", "total", "prompts"),
    ("doctor",): ("ok", "missing", "findings"),
    ("compare", "run", "run"): ("setting", "rows"),
    ("bench", "train", "recipe=medusa1", *TINY): ("steps", "tokens_per_second", "time_share"),
    ("bench", "decode", "target=tiny", "eval.limit=1", "eval.max_new_tokens=2"): (
        "forward_seconds", "seconds_per_token"
    ),
}  # fmt: skip
"""The commands of this package, and keys of the objects that they print."""


def test_json_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": MESSAGES}) + "\n" for _ in range(12))
    )
    run_shell_command(
        ("train", "recipe=medusa1", *TINY, "trainer.max_steps=1", "run=run", "eval.limit=1",
         "eval.max_new_tokens=4"), capsys
    )  # fmt: skip
    for words, keys in OUTPUTS.items():
        check_json(words, keys, capsys)
    own = {name for name in OWN.tasks if "--json" in COMMANDS[name].flags}
    assert list_named(lambda name: name in own, OUTPUTS) == own == {*OWN.tasks}


def test_inspect_composes() -> None:
    """The configuration of `data inspect` passes its check."""
    checked = resolve(compose_settings("inspect", "target=tiny"), ("target", "data", "index"))
    assert checked["index"] == 0 and isinstance(checked["data"].build(), ConversationReader)


def test_the_audit_composes() -> None:
    """Its configuration passes its check, and it stands behind the inspection."""
    names = [*COMMANDS]
    assert names[names.index("data inspect") + 1] == "data audit"
    checked = resolve(
        compose_settings("audit", "target=tiny", "++eval.prompts=x.jsonl"),
        ("target", "data", "eval"),
    )
    assert checked["eval"].settings.get("prompts") == "x.jsonl"


def test_a_gguf_file_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    file, *_ = save_gguf_file(tmp_path / "model", load_tiny_tokenizer().chat_template)
    assert "fits in" in run("plan", "recipe=eagle3", "target=hf", f"target.model={file}")


def test_a_dry_run_plans_before_it_shows_samples(tmp_path: Path) -> None:
    words = [
        "recipe=medusa1",
        "target=tiny",
        "data.limit=4",
        "eval=none",
        f"run={tmp_path / 'new'}",
    ]
    printed = run("train", *words, "--dry-run")
    assert printed.index("of memory a device") < printed.index("sample 1: ")
    # A dry run times no steps, and a GPU's rate says nothing about a CPU.
    assert torch.cuda.is_available() or "TFLOP/s" not in printed
    assert not [*tmp_path.iterdir()]


def test_sizes_and_times_have_units_that_fit() -> None:
    """Terabytes and minutes stand where gigabytes and hours would need exponents."""
    assert [format_bytes(size) for size in (5e6, 1.49e7, 9.999e8, 2.5e9, 9.99e11, 6.55e12)] == [
        *("5 MB", "14.9 MB", "1 GB", "2.5 GB", "999 GB", "6.55 TB")
    ]
    assert [format_hours(hours) for hours in (0.0982, 1.0, 2.38)] == [
        *("5.9 minutes", "1 hour", "2.38 hours")
    ]


@pytest.mark.parametrize("fits", [True, False, None])
def test_a_plan_begins_with_its_verdict(
    fits: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line says whether it fits, with memory, hours and disk; commands are notes."""
    words = ["plan", "recipe=medusa1", "target=tiny", "plan.calibrate=false", "plan.device=cuda"]
    words += ["data.limit=8"]
    words += [] if fits is None else [f"plan.device_gb={80 if fits else 0.01}"]
    printed = {}
    for flags in ([], ["--notes"]):
        monkeypatch.setattr(sys, "argv", ["spectrain", *words, *flags])
        cli.main()
        printed[len(flags)] = capsys.readouterr().out
    first = printed[0].splitlines()[0]
    expected = {True: "It fits in 80 GB", False: "It does not fit in", None: "It takes "}
    assert first.startswith(expected[fits])
    assert " of memory a device, " in first and " minutes, " in first and " on disk" in first
    assert "spectrain serve" not in printed[0] and "spectrain serve" in printed[1]
    # What this process composes next is for its own device.
    here = "gpu" if torch.cuda.is_available() else "cpu"
    assert OmegaConf.create({"value": "${cpu_gpu:cpu,gpu}"}).value == here


def test_help_of_bench_lists_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["spectrain", "help", "bench"])
    cli.main()
    assert "bench decode" in capsys.readouterr().out

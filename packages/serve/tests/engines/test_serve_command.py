"""`spectrain serve`: what it starts an engine with. A fake engine's interpreter stands in for
vLLM's.
"""

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packages.serve.tests.servers.engines import becomes_true, fake_python, is_running
from spectrain.cli.main import main
from spectrain.errors import Terminated
from spectrain.export.layouts import detect_layout, read_files
from spectrain.models.target import Target
from spectrain.servers.commands import EngineLaunch
from spectrain.servers.ports import find_free_port
from spectrain_serve.engines import serve
from spectrain_serve.servers.vllm import VllmServer, VllmSettings
from tests.export.test_converter import ours

Serve = Callable[..., str]


@pytest.fixture
def run_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Serve:
    """Run `spectrain serve` with these words, and return what it prints."""
    python = fake_python(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["spectrain", "serve", f"server.python={python}", *words])
        try:
            main()
        except SystemExit as ended:
            assert ended.code in (0, None), capsys.readouterr().err
        return capsys.readouterr().out

    return run


def parse_drafting(line: str) -> Any:
    """Return the drafting configuration in a printed command."""
    words = shlex.split(line)
    return json.loads(words[words.index("--speculative-config") + 1])


def test_capture_takes_the_layers_of_the_recipe_and_the_last(
    run_serve: Serve, tiny: Target
) -> None:
    """A recipe's layers and the last state in ascending order, each once; without a recipe it is
    refused.
    """
    layers = {
        recipe: parse_drafting(
            run_serve("--print", "target=tiny", f"recipe={recipe}", "capture=true")
        )["draft_model_config"]["hf_config"]
        for recipe in ("eagle3", "medusa1")
    }
    key = "eagle_aux_hidden_state_layer_ids"
    assert layers["eagle3"][key] == [2, 4, 5, 8] and tiny.num_layers == 8
    assert layers["medusa1"][key] == [8]
    with pytest.raises(
        AssertionError, match="drafter=ngram reads no hidden states; say which drafter they are for"
    ):
        run_serve("--print", "target=tiny", "capture=true")
    with pytest.raises(AssertionError, match="leave run out and give recipe=NAME"):
        run_serve("--print", "run=smollm2-eagle3", "capture=true")


def test_a_target_alone_has_no_drafter(run_serve: Serve) -> None:
    line = run_serve("--print", "target=tiny", "server.port=8123")
    assert (
        "--speculative-config" not in line and "--port 8123" in line and "--dtype float32" in line
    )
    with pytest.raises(AssertionError, match="recipe=eagle3: it has no drafter to serve"):
        run_serve("--print", "target=tiny", "recipe=eagle3")


def test_print_says_how_to_export_first(run_serve: Serve, tiny: Target, tmp_path: Path) -> None:
    """The first line writes what the second one reads; a folder that the engine reads already
    needs no export.
    """
    ours(tmp_path / "run" / "drafter", tiny, "eagle3", vocab_size=256)
    export, start = run_serve("--print", f"run={tmp_path / 'run'}").splitlines()
    assert (
        export == f"spectrain export run={tmp_path / 'run'} format=vllm out={tmp_path / 'run'}-vllm"
    )
    assert parse_drafting(start) == {
        "method": "eagle3",
        "model": f"{tmp_path / 'run'}-vllm",
        "num_speculative_tokens": 3,
    }
    serving_words = shlex.split(export)[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["spectrain", *serving_words])
        main()
    line = run_serve(
        "--print", f"run={tmp_path / 'run'}-vllm", "server.draft_tokens=5"
    ).splitlines()[-1]
    assert parse_drafting(line) == {
        "method": "eagle3",
        "model": f"{tmp_path / 'run'}-vllm",
        "num_speculative_tokens": 5,
    }


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineLaunch, str]]:
    """Record the launches that `serve` starts engines with, and the layouts of their drafters."""
    launches: list[tuple[EngineLaunch, str]] = []

    def record(server: VllmServer, launch: EngineLaunch) -> None:
        assert launch.drafter is not None and launch.drafter.path is not None
        launches.append((launch, detect_layout(read_files(Path(launch.drafter.path))).title))

    monkeypatch.setattr(serve, "run_engine", record)
    return launches


def test_a_run_is_exported_for_the_engine(
    run_serve: Serve, launches: list[tuple[EngineLaunch, str]], tiny: Target, tmp_path: Path
) -> None:
    """The export exists while the engine runs, and only then, unless a folder is given."""
    ours(tmp_path / "run" / "drafter", tiny, "eagle3", vocab_size=256)
    run_serve(f"run={tmp_path / 'run'}")
    run_serve(f"run={tmp_path / 'run'}", f"out={tmp_path / 'out'}")
    (scratch, title), (launch, _) = launches
    assert title == "EAGLE-3, speculators layout"
    assert scratch.drafter is not None and not Path(str(scratch.drafter.path)).exists()
    assert (
        launch.drafter is not None
        and launch.drafter.path == str(tmp_path / "out")
        and (tmp_path / "out").is_dir()
    )
    ours(tmp_path / "exits" / "drafter", tiny, "early_exit", exit_layer=2)
    with pytest.raises(AssertionError, match=r"vllm does not serve drafter=early_exit"):
        run_serve(f"run={tmp_path / 'exits'}")


def test_simulated_acceptance_needs_no_training(
    run_serve: Serve, launches: list[tuple[EngineLaunch, str]], tiny: Target
) -> None:
    """A recipe's untrained drafter is written and served, with the engine's own simulation."""
    run_serve(
        "target=tiny",
        "recipe=eagle3",
        "drafter.vocab_size=256",
        "server.acceptance_rates=[0.7,0.4]",
    )
    assert launches[0][1] == "EAGLE-3, speculators layout"
    with pytest.raises(AssertionError, match="leave --print out, or give run=DIR"):
        run_serve("--print", "target=tiny", "recipe=eagle3", "server.acceptance_rates=[0.7,0.4]")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_engine(
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends the command as that signal, also where a shell has let it ignore SIGINT, and nothing
    runs on.
    """
    child_file = tmp_path / "child"
    port = find_free_port()
    arguments = ["--child-file", str(child_file)]
    server = VllmServer(VllmSettings(python=fake_python(tmp_path), port=port, arguments=arguments))
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        # Tests under nohup ignore it, and so would the command.
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }

    def interrupt() -> None:
        becomes_true(lambda: "an interrupt stops it" in printed[0])
        os.kill(os.getpid(), number)

    printed = [""]
    monkeypatch.setattr(
        "builtins.print",
        lambda *words, **_: printed.__setitem__(0, printed[0] + " ".join(map(str, words))),
    )
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt) as stopped, serve.interrupt_on_signals():
            serve.run_engine(server, EngineLaunch("TARGET", "tiny"))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)
    if number != signal.SIGINT:
        assert isinstance(stopped.value, Terminated) and stopped.value.status == 128 + number
    assert becomes_true(lambda: not is_running(int(child_file.read_text())))

"""Starting and stopping engines, proven with a fake one: nothing of it is left, however
spectrain ends.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from packages.serve.tests.servers.engines import becomes_true, fake_python, is_running
from spectrain.errors import RunError, UserError
from spectrain.servers.commands import EngineLaunch
from spectrain.servers.ports import find_free_port
from spectrain_serve.engines.launch import explain_log, start_engine
from spectrain_serve.engines.process_group import stop_group
from spectrain_serve.servers.vllm import VllmServer, VllmSettings

LAUNCH = EngineLaunch("TARGET", "tiny")


@pytest.fixture(autouse=True)
def own_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let logs that stay be the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def make_server(folder: Path, *arguments: str, seconds: float = 30.0) -> VllmServer:
    return VllmServer(
        VllmSettings(
            python=fake_python(folder),
            port=find_free_port(),
            arguments=[*arguments],
            start_seconds=seconds,
        )
    )


def test_an_engine_runs_inside_the_block_alone(tmp_path: Path) -> None:
    """Inside the block it answers; after it, the engine and its child have ended and its log is
    gone.
    """
    child_file = tmp_path / "child"
    server = make_server(tmp_path, "--child-file", str(child_file))
    with start_engine(server, LAUNCH) as engine:
        assert engine.server.check_ready().name == "tiny"
        assert httpx.get(f"{engine.url}/models", trust_env=False).status_code == 200
        child = int(child_file.read_text())
        assert is_running(child)
    assert engine.process.returncode == -signal.SIGTERM
    assert becomes_true(lambda: not is_running(child))
    assert not engine.log.exists()


def test_an_engine_that_fails_explains_itself(tmp_path: Path) -> None:
    """The sentence has the root cause, not the pointer to it, and the log stays where it says."""
    with (
        pytest.raises(
            RunError, match=r"vllm has ended \(exit status 1\): ValueError: the model needs 9 GiB"
        ) as caught,
        start_engine(make_server(tmp_path, "--fail"), LAUNCH),
    ):
        pass
    log = Path(str(caught.value).rpartition(" ")[2])
    assert "starting" in log.read_text()
    log.unlink()


def test_an_engine_that_never_answers_is_stopped(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    server = make_server(tmp_path, "--silent", "--child-file", str(child_file), seconds=0.6)
    with (
        pytest.raises(RunError, match="does not answer after 0.6 seconds"),
        start_engine(server, LAUNCH),
    ):
        pass
    # On a slow machine the engine may be stopped before it has started its child.
    assert becomes_true(
        lambda: not child_file.exists() or not is_running(int(child_file.read_text()))
    )


def test_an_engine_that_dies_while_it_is_used_ends_the_block(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="was ended by SIGKILL from outside"),
        start_engine(make_server(tmp_path), LAUNCH) as engine,
    ):
        engine.process.kill()
        engine.wait()


def test_a_group_that_ignores_the_signal_is_killed() -> None:
    ignoring = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, "
        "flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", ignoring], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline()
    stop_group(process.pid, lambda: process.poll() is not None, seconds=0.2)
    assert process.wait() == -signal.SIGKILL


def package_path() -> dict[str, str]:
    """Return an environment in which a process of its own imports the core and this package."""
    root = Path(__file__).parents[4]
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'packages' / 'serve'}"}


OWNER = """
import os, signal, sys
# Commands in the background of a shell begin with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from spectrain_serve.engines.process_group import run_group
python, port, child = sys.argv[1:]
with run_group([python, "--port", port, "--child-file", child], os.environ, sys.stderr) as process:
    print(process.pid, flush=True)
    process.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_process_that_started_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Even if spectrain is killed, the engine and its child end."""
    child_file = tmp_path / "child"
    words = [fake_python(tmp_path), str(find_free_port())]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *words, str(child_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=package_path(),
    )
    assert owner.stdout is not None
    engine = int(owner.stdout.readline())
    assert becomes_true(lambda: child_file.exists() and child_file.read_text() != "")
    child = int(child_file.read_text())
    assert is_running(engine) and is_running(child)
    os.kill(owner.pid, number)
    owner.wait()
    assert becomes_true(lambda: not is_running(engine) and not is_running(child))


def test_mistakes_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(tmp_path)
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", server.settings.port))
        occupied.listen()
        with (
            pytest.raises(UserError, match=r"server.port=\d+: 127.0.0.1 cannot be listened at"),
            start_engine(server, LAUNCH),
        ):
            pass
    absent = VllmServer(VllmSettings(python=str(tmp_path / "nothing")))
    with (
        pytest.raises(UserError, match="it is no Python interpreter that runs"),
        start_engine(absent, LAUNCH),
    ):
        pass
    monkeypatch.setenv("FAKE_ENGINE_MISSING", "1")
    (tmp_path / "other").mkdir()
    without = make_server(tmp_path / "other")
    with (
        pytest.raises(UserError, match="vLLM is not installed there; install it"),
        start_engine(without, LAUNCH),
    ):
        pass


def test_a_log_is_explained_by_its_last_error_or_its_end() -> None:
    assert explain_log("") == "it printed nothing"
    assert explain_log("a\nb\n\nc\nd\n") == "b c d"
    assert (
        explain_log("x\nserver.py: error: unrecognized arguments: --foo\n")
        == "error: unrecognized arguments: --foo"
    )
    assert (
        explain_log("RuntimeError: no memory\nTraceback (most recent call last):\n")
        == "RuntimeError: no memory"
    )
    validation = (
        "pydantic.ValidationError: 1 validation error for ModelConfig\n  Value error, no such "
        "folder\n more\n"
    )
    assert (
        explain_log(validation)
        == "ValidationError: 1 validation error for ModelConfig Value error, no such folder"
    )

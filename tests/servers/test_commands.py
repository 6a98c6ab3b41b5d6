"""The commands of engines: what a launch means in the engine's own options."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from spectrain.servers.commands import DrafterLaunch, EngineLaunch, round_rates
from spectrain.servers.engines import ENGINES

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

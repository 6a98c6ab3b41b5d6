"""vLLM's counters, streams and files of states, as the client reads them."""

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spectrain.errors import UserError
from spectrain_serve.servers.base import (
    CompletionRequest,
    DraftCounters,
    DraftedRounds,
    RequestTimes,
    add_counters,
)
from spectrain_serve.servers.counters import parse_counters
from spectrain_serve.servers.errors import ServerError
from spectrain_serve.servers.openai import count_new_tokens, join_parts
from spectrain_serve.servers.vllm import (
    VllmServer,
    VllmSettings,
    add_engine_clock,
    read_states_file,
    time_steps,
    wait_for_writer,
)

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 403.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 1209.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 318.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="1"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"} 191.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="2"} 37.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 700.0
"""


def test_counters_are_added_over_engines() -> None:
    """Positions stand in any order, and each data-parallel engine has lines of its own."""
    counters = parse_counters(METRICS, "vllm")
    assert counters == DraftCounters(403, 1209, (191, 90, 37))
    assert parse_counters(
        METRICS + METRICS.replace('engine="0"', 'engine="1"'), "vllm"
    ) == add_counters([counters, counters])
    assert counters is not None and counters.num_accepted == 318


def test_server_without_drafter_has_no_counters() -> None:
    assert parse_counters('vllm:generation_tokens_total{engine="0"} 700.0\n', "vllm") is None


def test_difference_of_counters_is_what_came_between() -> None:
    """A position that was first reached in between counts from 0."""
    before = DraftCounters(2, 6, (1,))
    later = DraftCounters(5, 15, (3, 2, 1))
    assert later.subtract(before) == DraftCounters(3, 9, (2, 2, 1))


def test_joined_stream_equals_the_complete_answer() -> None:
    parts = [
        {"choices": [{"text": "A", "token_ids": [5, 6], "prompt_token_ids": [1, 2]}]},
        {"choices": [{"text": "B", "token_ids": [7], "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 3}, "metrics": {"mean_itl_ms": 2.0}},
    ]
    joined = join_parts(parts, is_chat=False)
    assert joined["choices"] == [{"finish_reason": "length", "text": "AB", "token_ids": [5, 6, 7]}]
    assert (joined["usage"], joined["metrics"], joined["prompt_token_ids"]) == (
        {"completion_tokens": 3},
        {"mean_itl_ms": 2.0},
        [1, 2],
    )
    assert [count_new_tokens(part) for part in parts] == [2, 1, 0]


def test_joined_chat_stream_has_text_and_reasoning() -> None:
    parts = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "Hm"}}]},
        {"choices": [{"delta": {"content": "Yes"}, "finish_reason": "stop"}]},
    ]
    message = join_parts(parts, is_chat=True)["choices"][0]["message"]
    assert message["content"] == "Yes" and message["reasoning_content"] == "Hm"
    assert [count_new_tokens(part) for part in parts] == [0, 1, 1]


def test_engine_clock_includes_waiting() -> None:
    """The time to the first token counts from the request's arrival; a server without the clock
    leaves the client's times.
    """
    times = RequestTimes(1.0, ((0.4, 1), (1.0, 2)))
    clocked = add_engine_clock(
        times, {"time_to_first_token_ms": 30.0, "queue_time_ms": 20.0, "mean_itl_ms": 4.0}
    )
    assert clocked.first_token == pytest.approx(0.05) and clocked.engine_per_token == pytest.approx(
        0.004
    )
    assert add_engine_clock(times, {}).first_token == 0.4


def write_states(path: Path, **metadata: str) -> None:
    tensors = {"hidden_states": torch.randn(4, 2, 8), "token_ids": torch.arange(4)}
    save_file(tensors, path, metadata=metadata)


def test_states_and_their_layers_are_read(tmp_path: Path) -> None:
    write_states(tmp_path / "a.safetensors", layers="2,8")
    states, tokens, layers = read_states_file(tmp_path / "a.safetensors")
    assert (states.shape, tokens, layers) == (torch.Size([4, 2, 8]), [0, 1, 2, 3], (2, 8))
    write_states(tmp_path / "b.safetensors")
    assert read_states_file(tmp_path / "b.safetensors")[2] is None


def test_cut_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_states(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ServerError, match="cannot be read"):
        read_states_file(path)
    with pytest.raises(ServerError, match=r"server\.states_folder"):
        read_states_file(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({"hidden_states": torch.zeros(4, 2, 8)}, {"layers": "2,x"}, "invalid literal"),
        ({"hidden_states": torch.zeros(4, 2, 8)}, {"layers": "2"}, "2 layers, and the names of 1"),
        ({"hidden_states": torch.zeros(4, 16)}, {}, "instead of"),
        ({"hidden_states": torch.zeros(3, 2, 8)}, {}, "instead of"),
        ({"hidden_states": torch.zeros(4, 2, 8), "token_ids": torch.zeros(2, 2)}, {}, "instead of"),
    ],
)
def test_states_of_another_form_are_refused(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"token_ids": torch.arange(4), **tensors}, path, metadata=metadata)
    with pytest.raises(ServerError, match=f"is malformed .*{words}"):
        read_states_file(path)


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": [1]},
        {"metrics": {"speculative_decoding": {"per_step_accepted": 3}}},
        {"metrics": {"speculative_decoding": {"per_step_accepted": [1]}}},
        {"usage": {"completion_tokens": "many"}},
        {"usage": [3]},
        {"kv_transfer_params": [3]},
    ],
)
def test_answers_of_another_form_are_refused(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence says what is malformed; a traceback would end a whole score."""
    server = VllmServer(VllmSettings(url="http://127.0.0.1:1/v1"))
    response = {"choices": [{"text": "a", "token_ids": [3], "finish_reason": "stop"}], **change}

    async def answer(*_: Any) -> tuple[dict[str, Any], RequestTimes]:
        return response, RequestTimes(0.1)

    monkeypatch.setattr(server, "request_response", answer)
    request = CompletionRequest([1, 2], 4, captures_states=True)
    with pytest.raises(ServerError, match="answer is malformed"):
        asyncio.run(server.request_completion(server.clients[0], request))


def test_reader_waits_for_the_writer(tmp_path: Path) -> None:
    """The file is read after its writer lets go of the lock; a writer that never does is given
    up.
    """
    path = tmp_path / "a.safetensors"
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)

    async def read() -> list[str]:
        events: list[str] = []

        async def write() -> None:
            await asyncio.sleep(0.02)
            events.append("written")
            os.close(lock)

        await asyncio.gather(wait_for_writer(path, 60.0), write())
        return [*events, "read"]

    with pytest.raises(ServerError, match="did not finish"):
        asyncio.run(wait_for_writer(path, 0.01))
    assert asyncio.run(read()) == ["written", "read"]


def test_servers_without_locks_are_read_at_once(tmp_path: Path) -> None:
    asyncio.run(wait_for_writer(tmp_path / "a.safetensors", 0.0))


def test_parts_of_a_stream_are_forwards() -> None:
    """If a forward had no drafts, the counts do not tell which, so that only accepted tokens
    count as drafted.
    """
    times = RequestTimes(1.0, ((0.1, 1), (0.3, 4), (0.4, 1), (0.6, 3)))
    seconds = [pytest.approx(0.2), pytest.approx(0.1), pytest.approx(0.2)]
    for rounds, drafted in (
        (None, [3, 0, 2]),
        (DraftedRounds((3, 2), (3, 3)), [3, 0, 2]),
        (DraftedRounds((3, 0, 2), (3, 3, 3)), [3, 3, 3]),
    ):
        steps = time_steps(times, rounds)
        assert [step.drafted for step in steps] == drafted and [
            step.seconds for step in steps
        ] == seconds
        assert [step.accepted for step in steps] == [3, 0, 2]


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


def test_a_server_cannot_name_any_file_as_states(tmp_path: Path) -> None:
    server = VllmServer(VllmSettings(url="http://127.0.0.1:1/v1"))
    for name in (
        "/etc/passwd",
        "/tmp/../etc/x.safetensors",
        str(Path.home() / "model.safetensors"),
        "states.bin",
    ):
        with pytest.raises(ServerError, match="outside of"):
            server.find_states_file(name)
    assert server.find_states_file("/tmp/spectrain-states-1/x.safetensors").name == "x.safetensors"
    own = VllmServer(VllmSettings(url="http://127.0.0.1:1/v1", states_folder=str(tmp_path)))
    assert own.find_states_file("/etc/x.safetensors") == tmp_path / "x.safetensors"

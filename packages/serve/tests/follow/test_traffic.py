"""Recorded traffic: what is kept of a request, kinds, and the bounded store."""

import json
from pathlib import Path
from typing import Any

from spectrain_serve.follow.exchange import Exchange
from spectrain_serve.follow.kinds import OTHER, KindRegistry
from spectrain_serve.follow.reservoir import Reservoir, is_for_proof, read_conversations
from spectrain_serve.follow.settings import FollowSettings
from spectrain_serve.follow.traffic import RecordedConversation, parse_exchange, parse_recorded
from spectrain_serve.follow.watch import TrafficWatch
from spectrain_serve.servers.base import DraftedRounds


def rounds_of(response: dict[str, Any]) -> DraftedRounds:
    counted = response["metrics"]["rounds"]
    return DraftedRounds(tuple(counted["accepted"]), tuple(counted["drafted"]))


METRICS = {"metrics": {"rounds": {"accepted": [1, 1], "drafted": [3, 3]}}}


def conversation(number: int, kind: str = "a", time: float = 0.0) -> RecordedConversation:
    return RecordedConversation(kind, time, {"prompt": f"prompt {number}"}, "answer")


def test_a_stream_and_a_complete_answer_are_recorded_alike() -> None:
    """Rounds, token ids and text are those of the answer; of the request no header is kept."""
    request = json.dumps(
        {"prompt": "Say it", "temperature": 0, "user": "someone", "stream": True}
    ).encode()
    complete = {
        "choices": [{"index": 0, "text": "it is", "token_ids": [5, 6]}],
        "prompt_token_ids": [1, 2],
        **METRICS,
    }
    parts = [
        {"choices": [{"index": 0, "text": "it", "token_ids": [5]}]},
        {"choices": [{"index": 0, "text": " is", "token_ids": [6]}]},
        {
            "choices": [{"index": 0, "text": "", "finish_reason": "stop"}],
            "prompt_token_ids": [1, 2],
            **METRICS,
        },
    ]
    stream = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
    recorded = [
        parse_exchange(
            Exchange("/v1/completions", request, content, time=1.0), KindRegistry(4), rounds_of
        )
        for content in (json.dumps(complete).encode(), stream.encode())
    ]
    assert recorded[0] == recorded[1] and recorded[0] is not None
    assert (
        recorded[0].answer == "it is"
        and recorded[0].answer_ids == [5, 6]
        and recorded[0].prompt_ids == [1, 2]
    )
    assert recorded[0].mean_accepted == 1.0 and recorded[0].request == {
        "prompt": "Say it",
        "temperature": 0,
    }
    assert parse_recorded(json.dumps(recorded[0].to_row()).encode()) == recorded[0]
    broken = stream.removesuffix("data: [DONE]\n\n").encode()
    assert (
        parse_exchange(Exchange("/v1/completions", request, broken), KindRegistry(4), rounds_of)
        is None
    )


def test_kinds_are_templates_and_bounded() -> None:
    kinds = KindRegistry(4)
    systems = [
        {"messages": [{"role": "system", "content": f"Today is {day}. You are {role}."}]}
        for day, role in ((1, "a cook"), (22, "a cook"), (3, "a poet"))
    ]
    names = [kinds.classify(body, None) for body in systems]
    assert names[0] == names[1] != names[2]
    assert kinds.classify({"prompt": "x"}, "agent-7") == "agent-7"
    assert kinds.classify({"prompt": "x"}, "bad\r\nname: 1") != "bad\r\nname: 1"
    for number in range(1000):
        kinds.classify({}, f"kind{number}")
    assert len(kinds.names) == 4 and kinds.classify({}, "kind999") == OTHER


def test_the_reservoir_is_bounded_fair_and_without_duplicates(tmp_path: Path) -> None:
    reservoir = Reservoir(limit=40, held_out=8, retention_seconds=100)
    for number in range(400):
        reservoir.add(conversation(number, time=1.0))
    assert not reservoir.add(conversation(399))
    for number in range(400, 500):
        reservoir.add(conversation(number, "b", time=50.0))
    counts = reservoir.count_kinds()
    assert len(reservoir) <= 48 and counts["a"] == counts["b"]
    assert all(
        is_for_proof(entry.digest) == is_proof
        for is_proof in (True, False)
        for entry in reservoir.select(is_proof)
    )
    reservoir.save(tmp_path / "kept.jsonl")
    again = Reservoir(40, 8, 100)
    again.load(read_conversations(tmp_path / "kept.jsonl"))
    assert sorted(e.digest for e in again.select()) == sorted(e.digest for e in reservoir.select())
    assert (tmp_path / "kept.jsonl").stat().st_mode & 0o077 == 0
    reservoir.delete_expired(120.0)
    assert set(reservoir.count_kinds()) == {"b"}
    (tmp_path / "kept.jsonl").write_text("{broken\n")
    assert not [*read_conversations(tmp_path / "kept.jsonl")]


def test_the_sample_is_uniform_and_then_favours_recent_conversations() -> None:
    """Up to twice its room, early and late conversations are equally often kept."""
    reservoir = Reservoir(limit=300, held_out=1, retention_seconds=1e9)
    for number in range(800):
        reservoir.add(conversation(number))
    numbers = [int(entry.request["prompt"].split()[1]) for entry in reservoir.select(False)]
    assert len(numbers) == 300 and abs(sum(number < 400 for number in numbers) - 150) < 4 * 75**0.5
    for number in range(800, 3000):
        reservoir.add(conversation(number))
    numbers = [int(entry.request["prompt"].split()[1]) for entry in reservoir.select(False)]
    assert sum(number > 2000 for number in numbers) > 200


def test_a_stream_without_usage_is_counted_right_or_not_at_all() -> None:
    """Parts of a stream hold several tokens, so only the server's own count counts, and rounds
    must explain it.
    """
    request = json.dumps({"prompt": "Say it", "stream": True}).encode()

    def record(*parts: dict[str, Any]) -> RecordedConversation:
        stream = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
        exchange = Exchange("/v1/completions", request, stream.encode())
        recorded = parse_exchange(
            exchange,
            KindRegistry(4),
            lambda response: rounds_of(response) if "metrics" in response else None,
        )
        assert recorded is not None
        return recorded

    text = {"choices": [{"index": 0, "text": "it is"}]}
    with_ids = {"choices": [{"index": 0, "text": "it is so", "token_ids": [5, 6, 7, 8]}]}
    usage = {"choices": [], "usage": {"completion_tokens": 4}}
    counted = [
        record(*parts) for parts in ((text,), (with_ids,), (text, usage), (text, usage | METRICS))
    ]
    assert [entry.num_tokens for entry in counted] == [None, 4, 4, 4]
    assert [entry.mean_accepted for entry in counted] == [None, None, None, 1.0]
    for accepted, drafted in (([5, 0], [5, 3]), ([4], [3]), ([1], [3, 3])):
        wrong = usage | {"metrics": {"rounds": {"accepted": accepted, "drafted": drafted}}}
        assert record(text, wrong).mean_accepted is None
    watch = TrafficWatch(FollowSettings())
    for entry in counted:
        watch.add(entry, "first")
    series = watch.series[counted[0].kind]
    assert (series.num_requests, series.num_unmeasured, series.num_tokens, [*series.values]) == (
        4,
        3,
        12,
        [1.0],
    )

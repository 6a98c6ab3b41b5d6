"""Request logs: every line is read once, whatever happens to its file, and gives what the proxy
would have recorded.
"""

import json
import time
from pathlib import Path
from typing import Any

from spectrain_serve.follow.kinds import KindRegistry
from spectrain_serve.follow.logs import READ_BYTES, RequestLogs
from spectrain_serve.follow.settings import ListenSettings
from spectrain_serve.follow.traffic import RecordedConversation, parse_exchange
from spectrain_serve.servers.base import DraftedRounds


def rounds_of(response: dict[str, Any]) -> DraftedRounds | None:
    counts = (response.get("metrics") or {}).get("rounds")
    return None if counts is None else DraftedRounds(tuple(counts[0]), tuple(counts[1]))


def read_entries(logs: RequestLogs) -> list[RecordedConversation]:
    entries = (parse_exchange(exchange, KindRegistry(4), rounds_of) for exchange in logs.take_all())
    return [entry for entry in entries if entry is not None]


def make_line(number: int, **fields: Any) -> str:
    response = {
        "choices": [{"index": 0, "text": "an answer"}],
        "metrics": {"rounds": [[1, 2], [3, 3]]},
    }
    return (
        json.dumps({"request": {"prompt": f"prompt {number}"}, "response": response, **fields})
        + "\n"
    )


def list_prompts(entries: list[RecordedConversation]) -> list[int]:
    return [int(entry.request["prompt"].split()[1]) for entry in entries]


def test_lines_are_read_once_as_files_grow_rotate_and_shrink(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    logs = RequestLogs(ListenSettings(), folder, tmp_path / "logs.json")
    path = folder / "a.jsonl"
    path.write_text(make_line(0) + make_line(1)[:20])
    assert list_prompts(read_entries(logs)) == [0] and not read_entries(logs)
    path.write_text(make_line(0) + make_line(1) + make_line(2))
    assert list_prompts(read_entries(logs)) == [1, 2]
    logs.save_positions()
    again = RequestLogs(ListenSettings(), folder, tmp_path / "logs.json")
    again.load_positions()
    path.rename(folder / "b.jsonl")
    path.write_text(make_line(3))
    assert list_prompts(read_entries(again)) == [3]
    (folder / "b.jsonl").write_text(make_line(4))
    assert list_prompts(read_entries(again)) == [4]
    (folder / "b.jsonl").unlink()
    assert not read_entries(again) and len(again.positions) == 1


def test_what_is_not_recorded(tmp_path: Path) -> None:
    """Malformed lines, old ones, long ones and other routes are left out, and a line without end
    takes no memory.
    """
    lines = [
        make_line(0, kind="agent", time=time.time()),
        make_line(1, time=time.time() - 1e6),
        make_line(2, route="/v1/embeddings"),
        json.dumps({"request": {"prompt": "x" * 5000}, "response": {"choices": []}}) + "\n",
        "{broken\n[]\n{}\n\n",
        "x" * (READ_BYTES + 5) + "\n",
        make_line(3, request={"url": "/v1/completions", "body": {"prompt": "prompt 3"}}),
    ]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    logs = RequestLogs(ListenSettings(max_record_bytes=3000), tmp_path, tmp_path / "logs.json")
    entries = [entry for _ in range(4) for entry in read_entries(logs)]
    assert list_prompts(entries) == [0, 3]
    assert (entries[0].kind, entries[0].answer, entries[0].accepted) == (
        "agent",
        "an answer",
        (1, 2),
    )
    assert logs.num_malformed == 4
    assert not read_entries(
        RequestLogs(ListenSettings(sample=1e-12), tmp_path, tmp_path / "logs.json")
    )


def test_a_streamed_answer_is_its_text(tmp_path: Path) -> None:
    parts = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("it ", "is")]
    stream = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
    entry = {"request": {"messages": [{"role": "user", "content": "Say it"}]}, "response": stream}
    (tmp_path / "a.jsonl").write_text(json.dumps(entry) + "\n")
    assert [
        entries.answer
        for entries in read_entries(RequestLogs(ListenSettings(), tmp_path, tmp_path / "logs.json"))
    ] == ["it is"]

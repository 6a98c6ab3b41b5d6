"""Rows of an unfinished shard that were damaged are written again, and none is taken as it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from spectrain.data.shards import Row, read_rows

ROW = {"id": 3, "messages": [{"role": "user", "content": "Hi"}], "finish_reason": ["stop"],
    "num_tokens": [2]}  # fmt: skip
DAMAGES: list[dict[str, Any]] = [
    {"id": [3]}, {"id": "3"}, {"id": True}, {"id": 3.5}, {"messages": "Hi"}, {"messages": [1]},
    {"finish_reason": "stop"}, {"num_tokens": [None]}, {"num_tokens": ["2"]}, {"answer_ids": [1]},
    {"tools": {}}, {"ended": 5}, {"more": 1},
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_row_of_other_types_is_left_out(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "part-00000.jsonl"
    lines = [json.dumps({**ROW, **damage}), json.dumps(ROW), json.dumps(ROW)[:20]]
    path.write_text("\n".join(lines))
    assert [*read_rows(path)] == [Row(**ROW)]

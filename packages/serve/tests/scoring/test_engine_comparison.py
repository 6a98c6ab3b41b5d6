"""One drafter in several engines: made-up scores of one run, read into one table."""

from pathlib import Path
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain_serve.scoring.engine_comparison import (
    compare_engines,
    print_engines,
    read_scores,
)
from tests.eval.made_scores import write_score


def make_server_entry(name: str, **settings: Any) -> dict[str, Any]:
    """The entry `server` of a score."""
    types = dict.fromkeys(("dtype", "weight_type", "drafter_dtype"), "float32")
    return {
        "name": name,
        **types,
        "threads": 2,
        "machine": "cpu of this machine",
        "draft_tokens": 3,
        **settings,
    }


def compare_run(
    run: Path, names: Any = "all"
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    comparison = compare_engines(run, names, run)
    return comparison, *comparison["recommendations"]


def test_scores_of_engines_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fastest engine is named with its setting; rows with other types are marked, and those
    with other prompts are not ranked."""
    write_score(tmp_path, "heldout", plain=30, speedup=1.3)
    tree = {"draft_tokens": 4, "tree_depth": 2, "branching_factor": 2, "dtype": "bfloat16"}
    write_score(
        tmp_path,
        "openvino-heldout",
        plain=70,
        speedup=1.2,
        server=make_server_entry("openvino", **tree),
    )
    write_score(
        tmp_path,
        "llamacpp-heldout",
        plain=80,
        speedup=0.8,
        server=make_server_entry("llamacpp", threads=None),
    )
    write_score(
        tmp_path, "vllm-other", plain=200, speedup=2.0, server=make_server_entry("vllm"), shift=1
    )
    write_score(
        tmp_path, "llamacpp-heldout.1", plain=300, speedup=1.0, server=make_server_entry("llamacpp")
    )
    comparison, fastest, where = compare_run(tmp_path)
    assert [row["name"] for row in comparison["rows"]] == [
        "heldout",
        "llamacpp-heldout",
        "openvino-heldout",
        "vllm-other",
    ]
    assert fastest["choice"] == "OpenVINO (tree of 4, depth 2, branching 2, float32, 2 threads)"
    assert (
        "84.0 tokens/s, 1.20 times its own" in fastest["because"]
        and "the drafter pays there" in fastest["because"]
    )
    assert (
        where["choice"] == "spectrain, OpenVINO"
        and "llama.cpp (chain of 3, float32) 0.80" in where["because"]
    )
    marks = {row["name"]: row["differs_in"] for row in comparison["rows"]}
    assert marks["heldout"] == [] and marks["llamacpp-heldout"] == ["threads"]
    assert marks["openvino-heldout"] == ["dtype"] and marks["vllm-other"] == ["prompts"]
    assert comparison["rows"][3]["label"] == "vLLM (vllm-other) #"
    print_engines(comparison)
    printed = capsys.readouterr().out
    assert (
        max(map(len, printed.splitlines())) <= 100
        and "1.10 to 1.30" in printed
        and "70.0" in printed
    )


def test_the_fastest_may_draft_nothing(tmp_path: Path) -> None:
    """Where an engine is faster without the drafter than any engine is with it, the advice is to
    use no drafter.
    """
    write_score(tmp_path, "heldout", plain=30, speedup=1.3)
    write_score(
        tmp_path, "llamacpp-heldout", plain=80, speedup=0.8, server=make_server_entry("llamacpp")
    )
    _, fastest, where = compare_run(tmp_path)
    assert fastest["choice"] == "llama.cpp (float32, 2 threads), without a drafter"
    assert (
        "llama.cpp (chain of 3, float32, 2 threads): 64.0 tokens/s, 0.80 times"
        in fastest["because"]
    )
    assert where["choice"] == "spectrain"
    assert compare_run(tmp_path, "heldout")[1]["choice"].startswith("spectrain (chain of 2")


def test_scores_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no score in it"):
        read_scores(tmp_path, "all")
    with pytest.raises(UserError, match="there is no score in it"):
        read_scores(tmp_path, ["openvino-heldout"])

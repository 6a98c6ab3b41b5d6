"""Measuring kernels: a toy run writes every row, a cut-off one goes on, and no failure takes the
others with it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.benchmarks import attention, compile_cases, correctness, kernel_table, kernels, measure
from lab.benchmarks.attention import (
    H200_CEILINGS,
    AttentionCell,
    AttentionProblem,
    Geometry,
    count_cost,
    time_bounds,
)
from lab.benchmarks.command import run_benchmark
from lab.benchmarks.kernels import TOY, KernelBench, KernelSizes
from lab.benchmarks.measure import ResultFile, paired_ratio, summarize_times, time_interleaved
from spectrain.errors import UserError
from spectrain.kernels.tree_attention import tree_attention_reference

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
TINY = Geometry(4, 2, 16, torch.float32, CPU)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(scope="module")
def results_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a full toy run."""
    path = tmp_path_factory.mktemp("bench") / "kernels.json"
    KernelBench(out=str(path), toy=True).run()
    return path


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def all_names() -> set[str]:
    names = {
        "ceilings/copy",
        "ceilings/product",
        *(name for name, *_ in correctness.iterate_cases(toy=True)),
    }
    names |= {f"tuning/{cell.name}" for cell in TOY.tuned_cells()}
    return (
        names
        | {cell.name for cell in TOY.table_cells()}
        | {loss.name for loss in TOY.loss_shapes()}
    )


def test_processes_share_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case is run by one process, and one that fails does not end the others."""
    cases_run: list[tuple[Any, ...]] = []

    def record(*case: Any) -> None:
        cases_run.append(case[:3])
        raise RuntimeError

    monkeypatch.setattr(compile_cases, "check_case", record)
    for number in range(3):
        compile_cases.run_share(number, 3, toy=True)
    cases = [case for _, *case in correctness.iterate_cases(toy=True)]
    assert len(cases_run) == len(cases) and all(cases_run.count(tuple(case)) == 1 for case in cases)


def test_toy_run_writes_every_row(results_path: Path) -> None:
    """Ceilings, every kernel in every dtype, every cell and loss; none failed, and all kernels
    are right.
    """
    content = read_json(results_path)
    assert set(content["rows"]) == all_names() and content["attempts"] == {}
    assert not [row for row in content["rows"].values() if "failed" in row]
    judged = [row for row in content["rows"].values() if "within" in row]
    assert len(judged) == len(list(correctness.iterate_cases(toy=True))) and all(
        row["within"] for row in judged
    )
    assert {
        "gpu",
        "driver",
        "torch",
        "triton",
        "dtype",
        "toy",
        "date",
        "commit",
        "clock",
        "power",
    } <= set(content["setting"])
    assert content["setting"]["toy"] is True


def test_rows_hold_what_the_report_derives_from(results_path: Path) -> None:
    """Shares and ratios follow from the times, floors and ceilings that stand beside them."""
    rows = read_json(results_path)["rows"]
    rates = {
        "bytes_per_second": rows["ceilings/copy"],
        "flops_per_second": rows["ceilings/product"],
    }
    ceilings = {name: row[name] for name, row in rates.items()}
    for cell in TOY.table_cells():
        row = rows[cell.name]
        assert (row["batch"], row["prefix"], row["nodes"]) == (cell.batch, cell.prefix, cell.nodes)
        assert set(row["us"]) | set(row["not_run"]) == set(attention.SYSTEMS) and not set(
            row["us"]
        ) & set(row["not_run"])
        assert all(us["p10"] <= us["median"] <= us["p90"] for us in row["us"].values())
        by_bytes = row["bytes"] / ceilings["bytes_per_second"]
        by_products = row["flops"] / ceilings["flops_per_second"]
        assert row["floor_us"] == pytest.approx(max(by_bytes, by_products) * 1e6)
        assert row["goal_us"] == pytest.approx(max(by_bytes, by_products / 0.6) * 1e6 + 5)
        assert row["share_of_floor"] == pytest.approx(row["floor_us"] / row["us"]["ours"]["median"])
        assert set(row["times_ours"]) == set(row["us"]) - {"ours"}
    (loss,) = TOY.loss_shapes()
    assert rows[loss.name]["time_ratio"] > 0
    # a CPU counts no peaks
    assert (rows[loss.name]["memory_ratio"] is None) == (not torch.cuda.is_available())


def test_another_run_measures_nothing_again(
    results_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row that is there is skipped, so the file stays as it is."""
    before = read_json(results_path)
    monkeypatch.setattr(
        KernelBench, "measure_row", lambda self, step: pytest.fail(f"{step.name} is there")
    )
    KernelBench(out=str(results_path), toy=True).run()
    assert read_json(results_path) == before


def test_missing_failed_and_outdated_rows_are_measured(
    results_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing row, a failed row and a row of another source are measured, and no others."""
    content = read_json(results_path)
    ran = []
    del content["rows"]["ceilings/copy"]
    content["rows"][TOY.table_cells()[0].name]["failed"] = "out of memory"
    content["rows"][TOY.loss_shapes()[0].name]["source"] = "older"
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(content))
    monkeypatch.setattr(KernelBench, "measure_row", lambda self, step: ran.append(step.name) or "")
    KernelBench(out=str(path), toy=True).run()
    # what failed before goes last
    assert ran == ["ceilings/copy", TOY.loss_shapes()[0].name, TOY.table_cells()[0].name]


def test_time_is_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After `seconds` nothing new is begun, and it says how much is left."""
    path = tmp_path / "kernels.json"
    KernelBench(out=str(path), toy=True, seconds=0).run()
    assert f"{len(all_names())} are left" in capsys.readouterr().out and not path.exists()


@pytest.mark.parametrize("part", ["ceilings", "correctness", "table", "tuning", "divergence"])
def test_a_part_brings_its_ceilings(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is measured alone, after the ceilings."""
    ran: list[str] = []
    monkeypatch.setattr(KernelBench, "measure_row", lambda self, step: ran.append(step.name) or "")
    KernelBench(part=part, out=str(tmp_path / "kernels.json"), toy=True).run()
    assert set(ran) == {name for name in all_names() if name.startswith(("ceilings/", f"{part}/"))}
    assert ran[:2] == ["ceilings/copy", "ceilings/product"]


def test_command_takes_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys part, out and toy reach the benchmark; another part is refused by name."""
    path = tmp_path / "found.json"
    words = ["kernels", "part=ceilings", f"out={path}", "toy=true"]
    monkeypatch.setattr(sys, "argv", words)
    run_benchmark(KernelBench)
    assert set(read_json(path)["rows"]) == {"ceilings/copy", "ceilings/product"}
    monkeypatch.setattr(sys, "argv", ["kernels", "part=celings"])
    with pytest.raises(SystemExit) as stopped:
        run_benchmark(KernelBench)
    assert stopped.value.code == 2 and "part=celings" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU measures at full size")
def test_full_size_needs_a_gpu(tmp_path: Path) -> None:
    """On a CPU it says how to run, and writes nothing."""
    with pytest.raises(UserError, match="toy=true"):
        KernelBench(out=str(tmp_path / "kernels.json")).run()
    assert not list(tmp_path.iterdir())


def test_another_machine_needs_another_file(results_path: Path, tmp_path: Path) -> None:
    """Rows of two machines, or of a toy run and a real one, never meet in one file; nor is
    another file overwritten.
    """
    setting = read_json(results_path)["setting"]
    for key, value in {"gpu": "NVIDIA H200", "torch": "1.0", "toy": False}.items():
        with pytest.raises(UserError, match=f"measured elsewhere.*{key}"):
            ResultFile(results_path, {**setting, key: value})
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(UserError, match="does not hold measured rows"):
        ResultFile(tmp_path / "other.json", setting)


def measure_row(path: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """Measure a single cell into a file."""
    ceilings = {"bytes_per_second": 1e9, "flops_per_second": 1e9}
    return attention.table_row(
        AttentionCell(1, 20, 5), TINY, ResultFile(path, setting), ceilings, launches=1, repeats=2
    )


def test_a_failing_system_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one cannot run and one computes something else, the reasons stand in the row beside
    the others' times.
    """
    systems = dict(attention.SYSTEMS)

    def fail_to_prepare(problem: AttentionProblem, notes: dict[str, Any]) -> Any:
        raise RuntimeError("no kernel\nimage")

    def compute_wrongly(problem: AttentionProblem, notes: dict[str, Any]) -> Any:
        return lambda i: problem.candidate_output + 1

    monkeypatch.setattr(
        attention, "SYSTEMS", systems | {"flex": fail_to_prepare, "sdpa": compute_wrongly}
    )
    row = measure_row(tmp_path / "kernels.json", measure.describe_setting(CPU, torch.float32, True))
    assert (
        row["not_run"]["flex"] == "RuntimeError: no kernel image"
        and "differs from tree attention" in row["not_run"]["sdpa"]
    )
    assert {"ours", "sdpa_repeated"} <= set(row["us"]) and "failed" not in row
    monkeypatch.setattr(attention, "SYSTEMS", systems | {"ours": fail_to_prepare})
    assert measure_row(
        tmp_path / "kernels.json", measure.describe_setting(CPU, torch.float32, True)
    )["failed"].startswith("RuntimeError")


def test_what_ends_the_process_is_left_out_the_third_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that never returned is tried once more, and then skipped with the reason."""
    path = tmp_path / "kernels.json"
    setting = measure.describe_setting(CPU, torch.float32, True)
    monkeypatch.setattr(
        attention, "SYSTEMS", {"ours": attention.candidate_work, "sdpa": attention.sdpa_work}
    )

    def interrupt(problem: AttentionProblem, notes: dict[str, Any]) -> Any:
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setitem(attention.SYSTEMS, "sdpa", interrupt)
            measure_row(path, setting)
    assert read_json(path)["attempts"] == {"table/B=1 prefix=20 N=5/sdpa": 2}
    for _ in range(2):
        row = measure_row(path, setting)
        assert (
            "ended twice while it ran" in row["not_run"]["sdpa"]
            and "ours" in row["us"]
            and len(row["not_run"]) == 1
        )


@pytest.mark.parametrize(
    "cell", [AttentionCell(1, 20, 5), AttentionCell(2, 3, 70), AttentionCell(2, 9, 1)]
)
def test_every_system_computes_tree_attention(cell: AttentionCell) -> None:
    """All systems with a mask equal the reference in every launch; the system without one
    attends to every slot.
    """
    problem = AttentionProblem(cell, TINY, num_buffers=2)
    for name in ("ours", "sdpa", "sdpa_repeated", "flex"):
        work = attention.SYSTEMS[name](problem, {})
        for i in range(3):
            expected = tree_attention_reference(
                *problem.launch_inputs(i), problem.visibility, problem.scale
            )
            torch.testing.assert_close(work(i), expected, atol=1e-5, rtol=1e-5)
    unmasked = torch.nn.functional.scaled_dot_product_attention(
        *problem.launch_inputs(1), scale=problem.scale, enable_gqa=True
    )
    torch.testing.assert_close(
        attention.unmasked_work(problem, {})(1), unmasked, atol=1e-5, rtol=1e-5
    )


def test_cost_counts_every_tensor_once() -> None:
    """The cost has the bytes of keys, values, queries and output, and the operations of both
    products, as in a profiler.
    """
    problem = AttentionProblem(AttentionCell(2, 30, 5), TINY, num_buffers=1)
    q, k, v = problem.launch_inputs(0)
    size, operations = count_cost(problem.cell, problem.geometry)
    assert size == 2 * q.nbytes + k.nbytes + v.nbytes
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        grouped = q.unflatten(1, (2, 2)).flatten(2, 3)  # [B, K, G N, D]
        (grouped @ k.mT) @ v
    assert operations == counter.get_total_flops()


@pytest.mark.parametrize(
    "batch, prefix, nodes, floor, goal",
    [
        (1, 1024, 64, 1.44, 7.4),
        (1, 8192, 64, 10.96, 23.3),
        (1, 32768, 64, 43.6, 77.6),
        (8, 1024, 64, 11.6, 24.3),
        (8, 8192, 64, 87.7, 151),
        (8, 32768, 64, 349, 586),
        (1, 32768, 16, 31.3, 36.3),
        (1, 32768, 1, 31.2, 36.2),
    ],
)
def test_floors_and_goals_of_an_h200(
    batch: int, prefix: int, nodes: int, floor: float, goal: float
) -> None:
    """Microseconds equal those by hand: 64 nodes are bound by products, 16 and 1 by bytes; floor
    < goal, whatever binds.
    """
    heads = Geometry(*KernelSizes().heads, torch.bfloat16, CPU)
    bounds = time_bounds(AttentionCell(batch, prefix, nodes), heads, H200_CEILINGS)
    assert bounds == pytest.approx((floor, goal), rel=5e-3)
    single = AttentionCell(batch, prefix, 1)
    wide = Geometry(32, 8, 256, torch.bfloat16, CPU)
    ungrouped = time_bounds(single, Geometry(32, 32, 128, torch.bfloat16, CPU)).floor
    assert ungrouped == pytest.approx(4 * time_bounds(single, heads).floor, rel=3e-3)
    assert time_bounds(AttentionCell(batch, prefix, nodes), wide).floor == pytest.approx(
        2 * bounds.floor
    )


def test_a_wrong_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output a little off, or not a number, is beyond tolerance."""
    check = correctness.CHECKS["tree_attention"]
    case = check.toy_cases["B=2 ragged N=9"]

    def scale_outputs(factor: float) -> correctness.Case:
        def run(dtype: torch.dtype, device: torch.device) -> correctness.KernelOutcome:
            outcome = case(dtype, device)
            outputs: dict[str, Tensor] = {name: x * factor for name, x in outcome.actual.items()}
            return correctness.KernelOutcome(outputs, outcome.expected, outcome.by_kernel)

        return run

    for dtype in correctness.DTYPES:
        assert correctness.check_case(check, scale_outputs(1.0), dtype, CPU)["within"]
        assert not correctness.check_case(
            check, scale_outputs(1.0 + 3 * check.tolerance[dtype]), dtype, CPU
        )["within"]
    row = correctness.check_case(check, scale_outputs(float("nan")), torch.float32, CPU)
    assert not row["within"] and row["relative_error"] is row["max_error"] is None
    json.dumps(row, allow_nan=False)


def test_every_kernel_is_checked() -> None:
    """Each file that registers an operation is one whose change makes some verdict void, and has
    cases in every type.
    """
    sources = ROOT.joinpath("kernels").glob("*.py")
    registering = {path.name for path in sources if 'custom_op("spectrain::' in path.read_text()}
    checked = {
        Path(str(module.__file__)).name
        for check in correctness.CHECKS.values()
        for module in check.modules
    }
    # used by the files with operations
    helpers = {"counter.py", "sampling_cuts.py", "tree_walks.py", "linear_divergence.py"}
    assert checked == registering | helpers
    assert all(check.cases and check.toy_cases for check in correctness.CHECKS.values())


def test_a_failing_row_is_recorded_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in one row is written down, and the next is measured."""
    monkeypatch.setattr(kernels, "check_case", lambda *arguments: 1 / 0)
    path = tmp_path / "kernels.json"
    KernelBench(part="correctness", out=str(path), toy=True).run()
    rows = read_json(path)["rows"]
    assert all(
        row["failed"].startswith("ZeroDivisionError")
        for name, row in rows.items()
        if name.startswith("correctness/")
    )
    assert "bytes_per_second" in rows["ceilings/copy"] and len(rows) == 2 + len(
        list(correctness.iterate_cases(toy=True))
    )


def test_a_row_that_ends_the_process_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel leaves the device unusable: every other row is measured by the next process,
    and it is tried last, twice.
    """
    path = tmp_path / "kernels.json"
    cases = [name for name, *_ in correctness.iterate_cases(toy=True)]
    fatal = cases[3]
    order: list[str] = []

    def check_case(
        check: Any, case: Any, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Any]:
        order.append(
            next(
                name
                for name, _, other, other_dtype in correctness.iterate_cases(toy=True)
                if other is case and other_dtype == dtype
            )
        )
        if order[-1] == fatal:
            raise KeyboardInterrupt
        return {"within": True, "relative_error": 0.0, "by_kernel": True}

    monkeypatch.setattr(kernels, "check_case", check_case)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            KernelBench(part="correctness", out=str(path), toy=True).run()
        assert order[-1] == fatal
    KernelBench(part="correctness", out=str(path), toy=True).run()
    rows = read_json(path)["rows"]
    assert (
        rows[fatal]["failed"] == "the process ended 2 times while this ran"
        and read_json(path)["attempts"] == {}
    )
    assert all(rows[name]["within"] for name in cases if name != fatal) and sorted(order) == sorted(
        [*cases, fatal]
    )
    assert order.index(fatal) < len(cases) - 1  # the first process did not reach them all


class LosableDevice:
    """A device that an illegal access leaves unusable, for all that the same process asks of it
    later.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost = False
        seconds = measure.TimedWork.measure_seconds
        monkeypatch.setattr(measure, "synchronize_device", self.ask)
        monkeypatch.setattr(
            measure.TimedWork, "measure_seconds", lambda work: (self.ask(), seconds(work))[1]
        )

    def ask(self, *_: Any) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def access_illegally(self) -> None:
        self.lost = True
        self.ask()

    def run_processes(self, path: Path, count: int) -> int:
        """Run `count` processes, as the script does while they fail; return how many of them
        failed.
        """
        for number in range(count):
            self.lost = False
            try:
                KernelBench(out=str(path), toy=True).run()
                return number
            except RuntimeError as error:
                assert "illegal memory access" in str(error)
        return count


@pytest.mark.slow
def test_an_illegal_access_of_a_kernel_starves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that ends the process in each of its cases: after the script's three processes all
    other rows are there, the table among them, and the report names what failed."""
    path = tmp_path / "kernels.json"
    device = LosableDevice(monkeypatch)

    def check_case(check: Any, case: Any, dtype: torch.dtype, of: torch.device) -> dict[str, Any]:
        device.ask()
        if check is correctness.CHECKS["row_kl"]:
            device.access_illegally()
        return {"within": True, "relative_error": 0.0, "by_kernel": True}

    monkeypatch.setattr(kernels, "check_case", check_case)
    monkeypatch.setattr(
        attention, "SYSTEMS", {"ours": attention.candidate_work, "sdpa": attention.sdpa_work}
    )
    assert device.run_processes(path, 3) == 3
    rows = read_json(path)["rows"]
    fatal = {name for name in all_names() if name.startswith("correctness/row_kl/")}
    failed = {name for name, row in rows.items() if "failed" in row}
    assert set(rows) - failed == all_names() - fatal and len(failed) == 3 and failed < fatal
    assert all("illegal memory access" in rows[name]["failed"] for name in failed)
    assert device.run_processes(path, 20) < 20  # each case twice, and then it is through
    content = read_json(path)
    assert set(content["rows"]) == all_names() and content["attempts"] == {}
    ends = (
        "the process ended 2 times while this ran (RuntimeError: CUDA error: an illegal "
        "memory access was encountered)"
    )
    assert {
        name: row["failed"] for name, row in content["rows"].items() if "failed" in row
    } == dict.fromkeys(fatal, ends)


def test_an_illegal_access_of_a_baseline_starves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the process in every cell is tried in one: the second process measures every row
    without it.
    """
    path = tmp_path / "kernels.json"
    device = LosableDevice(monkeypatch)

    def flex(problem: AttentionProblem, notes: dict[str, Any]) -> Any:
        return lambda i: device.access_illegally()

    monkeypatch.setattr(
        kernels,
        "check_case",
        lambda *arguments: {"within": True, "relative_error": 0.0, "by_kernel": True},
    )
    monkeypatch.setattr(
        attention,
        "SYSTEMS",
        {"ours": attention.candidate_work, "flex": flex, "sdpa": attention.sdpa_work},
    )
    assert device.run_processes(path, 3) == 1
    rows = read_json(path)["rows"]
    assert set(rows) == all_names() and not [row for row in rows.values() if "failed" in row]
    for cell in TOY.table_cells():
        assert (
            set(rows[cell.name]["us"]) == {"ours", "sdpa"}
            and "unusable" in rows[cell.name]["not_run"]["flex"]
        )


def test_the_script_goes_on_three_times_and_then_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part whose process fails is run three times in all; the report is written, and the
    status is the part's.
    """
    calls = tmp_path / "told"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "$2" >> {calls}\n[[ "$2" == *report ]]\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    script = ROOT / "scripts" / "gpu_check.sh"
    for part in (["kernels", "all", "toy"], ["engine", "counts", "toy"]):
        calls.write_text("")
        ran = subprocess.run(
            ["bash", str(script), *part], capture_output=True, text=True, check=False
        )
        words = [
            (line.endswith("report") and "report") or line.startswith("lab.benchmarks.")
            for line in calls.read_text().splitlines()
        ]
        assert ran.returncode == 1 and words == [True, True, True, "report"], ran.stderr
        assert (tmp_path / "out" / "report.md").exists()


@pytest.mark.slow
def test_a_row_that_never_ends_is_left(tmp_path: Path) -> None:
    """The watchdog writes that it took too long, and ends the process."""
    path = tmp_path / "kernels.json"
    hangs = (
        "import time; from lab.benchmarks import kernels, steps; steps.Bench.row_seconds = 1\n"
        "kernels.check_case = lambda *arguments: time.sleep(60)\n"
        f"kernels.KernelBench('correctness', {str(path)!r}, True, 50).run()"
    )
    left = subprocess.run(
        [sys.executable, "-c", hangs], capture_output=True, text=True, check=False
    )
    assert left.returncode == 1, left.stderr
    failed = [row["failed"] for row in read_json(path)["rows"].values() if "failed" in row]
    assert failed == ["it took longer than 1 seconds"]


def test_samples_are_paired_and_spread() -> None:
    """Every repeat times each once; the ratio is the median of paired ones, the spread lies
    around the median.
    """
    calls: list[str] = []
    replays = {
        name: measure.TimedWork(lambda i, name=name: calls.append(name), CPU, 1) for name in "ab"
    }
    calls.clear()
    samples = time_interleaved(replays, 4)
    assert (
        all(sorted(calls[i : i + 2]) == ["a", "b"] for i in range(0, 8, 2))
        and len(samples["a"]) == 4
    )
    assert paired_ratio([1.0, 2.0, 4.0], [2.0, 6.0, 4.0]) == 2.0
    assert summarize_times([float(i) for i in range(11)]) == {"median": 5e6, "p10": 1e6, "p90": 9e6}
    assert summarize_times([2.0]) == {"median": 2e6, "p10": 2e6, "p90": 2e6}


def test_the_table_has_the_requested_cells() -> None:
    """The table has Llama-3.1-8B's heads, both batches, three prefixes and five trees, 64 nodes
    first, and next other heads.
    """
    cells = KernelSizes().table_cells()
    others = cells[6:9]
    assert KernelSizes().heads == (32, 8, 128) and len({cell.name for cell in cells}) == len(
        cells
    ) == 30 + len(others)
    assert {(cell.batch, cell.prefix, cell.nodes) for cell in others} == {(1, 8192, 64)}
    geometry = KernelSizes().cell_geometry(others[0], torch.bfloat16, CPU)
    assert (
        (geometry.num_heads, geometry.num_kv_heads, geometry.head_size)
        == others[0].heads
        == (28, 4, 128)
    )
    assert others[0].title == "1 / 8192 / 64, 28 to 4 heads of 128" and not any(
        cell.heads for cell in cells[:6] + cells[9:]
    )
    assert {(cell.batch, cell.prefix) for cell in cells[:6]} == {
        (b, p) for b in (1, 8) for p in (1024, 8192, 32768)
    }
    assert all(cell.nodes == 64 for cell in cells[:6])


@pytest.fixture
def script_without_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the script, in an environment where only torch can be imported of what spectrain
    needs.
    """
    missing = (
        "hydra",
        "omegaconf",
        "pydantic",
        "transformers",
        "datasets",
        "peft",
        "accelerate",
        "gguf",
        "matplotlib",
    )
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({missing}))\n"
    )
    root = ROOT
    monkeypatch.setenv("PYTHONPATH", f"{hidden}:{root}")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return root / "scripts" / "gpu_check.sh"


@pytest.mark.slow
def test_gpu_check_runs_with_torch_alone(script_without_libraries: Path, tmp_path: Path) -> None:
    """The script that a GPU machine runs works here at toy size, and interprets nothing even
    where it was told to.
    """
    ran = subprocess.run(
        ["bash", str(script_without_libraries), "kernels", "correctness", "toy"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = read_json(tmp_path / "out" / "kernels-toy.json")["rows"]
    assert set(rows) == {
        name for name in all_names() if name.startswith(("ceilings/", "correctness/"))
    }
    assert any(row.get("by_kernel") for row in rows.values()) == torch.cuda.is_available()
    assert "not measured" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
def test_the_table_of_kernels_holds_what_the_compiler_makes() -> None:
    """A configuration is compiled for sm_90, and spills no register."""
    cells = kernel_table.build_kernel(64, 16).cells(64)
    assert cells[0] == "16 x 64, 4 w, 3 s" and cells[1].endswith("/ 0")

"""Measuring the engine: a toy run writes every row, scripted acceptance is exact, and ratios
follow from the times.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.benchmarks import engine, identity, rounds
from lab.benchmarks.command import run_benchmark
from lab.benchmarks.engine import TOY, EngineBench, EngineSizes
from lab.benchmarks.identity import FAMILIES
from lab.benchmarks.models import ModelGeometry, random_drafter, random_target
from lab.benchmarks.report import GOALS_PATH, gather_evidence, line_values, render_markdown
from lab.benchmarks.rounds import (
    BenchFixture,
    FixedTreeDrafter,
    RoundSample,
    ScriptedAcceptance,
    ScriptedRun,
    engine_maker,
    fixed_paths,
    fixed_tree,
    prepare,
    split_evenly,
)
from lab.benchmarks.speedup import AR, Roofline, RoundCosts, compute_gains, engine_goal_values
from lab.benchmarks.training import (
    compute_gradients,
    count_flops,
    count_visible_pairs,
    loss_functions,
    random_batch,
)
from spectrain.decoding.captured import CapturedRunner
from spectrain.drafters.base import Drafter
from spectrain.drafters.eagle3 import Eagle3
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from tests.decoding.rounds import begun, proposed
from tests.targets import cut_tiny
from tests.trees.tables import check_structure

CPU = torch.device("cpu")
SETTING = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "driver": "570",
    "toy": False,
    "date": "2026-01-01",
}


@cache
def make_toy() -> tuple[Target, Eagle3]:
    target = random_target(TOY.model, CPU, torch.float32)
    return target, random_drafter(target, TOY.model, torch.float32)


@dataclass
class MeasuredFile:
    """The file of a full run, and what the run measures."""

    path: Path
    sizes: EngineSizes
    families: list[str]

    def run(self) -> None:
        """Measure the missing rows."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "TOY", self.sizes)
            patch.setattr(engine, "FAMILIES", self.families)
            patch.setattr(identity, "load_tiny", lambda *_: cut_tiny(3))
            EngineBench(out=str(self.path), toy=True).run()


# every kind of row, once
SINGLE_CELL = replace(TOY, batches=(2,), prefixes=(20,), nodes=(4,), budgets=(6,), new_tokens=4)
RUNS = [
    (SINGLE_CELL, ["autoregressive", "eagle3 eagle2"]),
    pytest.param((TOY, list(FAMILIES)), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=RUNS, ids=["one cell", "toy"])
def measured_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> MeasuredFile:
    """Return the file of a full run, of a single cell or of all."""
    file = MeasuredFile(tmp_path_factory.mktemp("bench") / "engine.json", *request.param)
    file.run()
    return file


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def all_names(sizes: EngineSizes = TOY, families: Iterable[str] = FAMILIES) -> set[str]:
    names = {
        "ceilings/copy",
        "ceilings/product",
        *(f"identity/tiny/{family}" for family in families),
    }
    names |= {f"counts/{name}" for name in (AR, f"N={sizes.nodes[-1]}", *sizes.tree_builders())}
    for batch, prefix in sizes.cell_shapes():
        names |= {
            f"engine/B={batch} prefix={prefix}/{row}" for row in ("verify", *sizes.tree_builders())
        }
    conversations, length = sizes.conversations
    names |= {f"engine/B={batch} prefix={sizes.prefixes[0]}/eager" for batch in sizes.batches}
    return names | {f"training/eagle3 B={conversations} T={length}"}


def test_toy_run_writes_every_row(measured_file: MeasuredFile) -> None:
    """A toy run writes all rows; none failed, and all answers are right."""
    content = read_json(measured_file.path)
    assert set(content["rows"]) == all_names(measured_file.sizes, measured_file.families)
    assert not [row for row in content["rows"].values() if "failed" in row]
    identical = [row for name, row in content["rows"].items() if name.startswith("identity/")]
    assert all(
        row["differing"] == 0 and row["tokens"] == row["answers"] * measured_file.sizes.new_tokens
        for row in identical
    )
    assert "lines" not in content  # no goal is about toys


def test_rows_hold_what_is_derived_from_them(measured_file: MeasuredFile) -> None:
    """Parts add up to rounds, tau is the scripted one, and speedups, efficiencies and shares
    follow.
    """
    rows = read_json(measured_file.path)["rows"]
    sizes = measured_file.sizes
    for batch, prefix in sizes.cell_shapes():
        title = f"engine/B={batch} prefix={prefix}"
        verify = rows[f"{title}/verify"]
        names = {f"N={nodes}" for nodes in sizes.nodes}
        assert set(verify["v"]) == set(verify["v_floor"]) == names and set(verify["us"]) == {
            AR,
            *names,
        }
        assert verify["share_of_floor"] == pytest.approx(
            verify["floor_us"] / verify["us"][AR]["median"]
        )
        for tree, builder in sizes.tree_builders().items():
            row = rows[f"{title}/{tree}"]
            # less than the depth allows where a dynamic tree was not that deep
            oracle = row["tau"]["oracle"]
            assert (
                row["tau"] == {AR: 1, "tau=2": 2, "oracle": oracle}
                and 2 < oracle <= builder.depth + 1
            )
            assert not builder.traits.is_chain or oracle == builder.depth + 1
            assert row["gamma"] == builder.depth and row["tree"]["budget"] == builder.budget
            assert set(row["parts_us"]["oracle"]) == {"draft", "verify", "accept", "outside"}
            for name, speedup in row["speedup"].items():
                modelled = row["tau"][name] / (row["c"] * row["gamma"] + row["v"] + row["h"])
                assert speedup["model"] == pytest.approx(modelled)
                assert row["eta"][name] == pytest.approx(speedup["measured"] / row["tau"][name])
                assert row["share_of_roofline"][name] == pytest.approx(
                    row["eta"][name] / row["eta_roofline"]
                )
            assert row["host_synchronisations"] is None or torch.cuda.is_available()


def test_another_run_measures_nothing_again(
    measured_file: MeasuredFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row in the file is skipped; a missing one is measured."""
    content = read_json(measured_file.path)
    monkeypatch.setattr(
        EngineBench, "measure_row", lambda self, step: pytest.fail(f"{step.name} is there")
    )
    measured_file.run()
    assert read_json(measured_file.path) == content


@pytest.mark.parametrize(
    ("part", "starts"),
    [("single", "engine/B=1 "), ("batched", "engine/B=2 "), ("counts", "counts/")],
)
def test_a_part_brings_its_ceilings(
    part: Any, starts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is measured alone, after the ceilings; what has a line comes before what has
    none.
    """
    ran: list[str] = []
    monkeypatch.setattr(EngineBench, "measure_row", lambda self, step: ran.append(step.name) or "")
    EngineBench(part, str(tmp_path / "engine.json"), toy=True).run()
    assert set(ran[2:]) == {name for name in all_names() if name.startswith(starts)}
    have_priority = [
        name in TOY.priority_rows() for name in ran if name.split("/")[-1] in TOY.tree_builders()
    ]
    assert have_priority == sorted(have_priority, reverse=True)


def make_run(
    drafter: Drafter | None, builder: TreeBuilder | None, batch: int = 2, prefix: int = 50
) -> ScriptedRun:
    fixture = BenchFixture(make_toy()[0], batch, prefix, 40)
    return ScriptedRun(engine_maker(fixture, 2, drafter, builder)("captured"), fixture)


@pytest.mark.parametrize(("name", "most"), [("given", 4), ("chain", 4), ("eagle2", 5)])
@torch.inference_mode()
def test_rounds_follow_the_script(name: str, most: int) -> None:
    """Each row emits what the script says in every round, also where the mean is no integer."""
    fixed = fixed_tree(9, 3)
    drafter = FixedTreeDrafter(fixed, CPU) if name == "given" else make_toy()[1]
    builders = {"given": fixed, "chain": Chain(3), "eagle2": Eagle2(4, 12)}
    run = make_run(drafter, builders[name])
    for tau in (1.0, 2.0, 2.5, float(most)):
        run.reset(tau)
        assert run._run_rounds(pauses=3).round_lengths == split_evenly(tau, 6)
        assert (run.state.context.cache.lengths == 50 + sum(split_evenly(tau, 6))).all()
        assert run.sample_rounds(tau).tau == tau


@torch.inference_mode()
def test_forced_verdicts_lie_on_the_first_path() -> None:
    """The accepted path has the root and first children, as far as the tree has them; the bonus
    is the best token after it.
    """
    target, drafter = make_toy()
    rule = ScriptedAcceptance(100, CPU)
    rows = torch.arange(2)
    builder = Eagle2(3, 9, 3)
    context = begun(target, [[5, 6, 7], [8]], drafter, builder, 30)
    tree = proposed(drafter, context, builder)
    logits = torch.randn(2, 9, TOY.model.vocab)
    path = [[0], [0]]
    for row in range(2):
        while children := [
            node
            for node, parent in enumerate(tree.parents[row].tolist())
            if parent == path[row][-1]
        ]:
            path[row].append(min(children))
    for length in (1, 2, 3, 9):
        rule.set_script(0, [length] * 10)
        verdict = rule(tree, logits, rows, context.cache.lengths[:, None] + tree.depths + 1)
        for row, nodes in enumerate(path):
            accepted = nodes[:length]
            assert (
                verdict.counts[row] == len(accepted)
                and verdict.path[row, : len(accepted)].tolist() == accepted
            )
            assert verdict.bonus[row] == logits[row, accepted[-1]].argmax()


def test_given_trees_have_their_size() -> None:
    """A fixed tree has the requested nodes and depth, and a valid structure."""
    for nodes in (2, 5, 9, 64):
        paths = fixed_paths(nodes, 5)
        assert len(paths) == nodes - 1 and max(map(len, paths)) == min(5, nodes - 1)
        builder = fixed_tree(nodes, 5)
        context: Any = SimpleNamespace(root=torch.tensor([7, 8]))
        tree = proposed(FixedTreeDrafter(builder, CPU), context, builder)
        check_structure(tree)
        assert tree.tokens.shape == (2, nodes) and int(tree.depths.max()) == builder.depth == min(
            5, nodes - 1
        )
        assert tree.tokens[:, 0].tolist() == [7, 8] and builder.budget == nodes


@torch.inference_mode()
def test_parts_alone_leave_the_round_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are run or replayed the requested number of times, and rounds go on as before."""
    run = make_run(make_toy()[1], Chain(2))
    for part in (0, 1, 2):
        assert run.time_part(part, launches=3) > 0
    assert run.sample_rounds(2.0).tau == 2
    replayed: list[int] = []
    run.state.graphs = [
        SimpleNamespace(replay=lambda part=part: replayed.append(part)) for part in range(3)
    ]
    run.time_part(1, launches=3)
    assert replayed == [1, 1, 1]


@torch.inference_mode()
def test_waiting_inside_a_round_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the error that the error mode raises, or None; the mode is restored."""
    run = make_run(None, None)
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert run.find_synchronization() is None
    monkeypatch.setattr(run.engine, "run_uncaptured_round", lambda *arguments: 1 / 0)
    assert str(run.find_synchronization()).startswith("ZeroDivisionError")
    assert modes == ["error", "default"] * 2


@torch.inference_mode()
def test_what_cannot_be_compiled_or_captured_runs_without() -> None:
    """The modes are tried in turn: compiled, captured, neither. Each failure is noted; where
    nothing runs, it is an error.
    """
    fixture = BenchFixture(make_toy()[0], 1, 20, 40)
    make_engine = engine_maker(fixture, 2)

    def fail_for(*failing_ways: str) -> Any:
        return lambda way: 1 / 0 if way in failing_ways else make_engine(way)

    notes: dict[str, str] = {}
    assert type(prepare(fail_for("compiled"), fixture, notes).engine) is CapturedRunner
    assert notes == {"not compiled": "ZeroDivisionError: division by zero"}
    assert (
        type(prepare(fail_for("compiled", "captured"), fixture, notes).engine)
        is rounds.UncapturedRounds
    )
    assert set(notes) == {"not compiled", "not captured"}
    with pytest.raises(ZeroDivisionError):
        prepare(fail_for("compiled", "captured", "eager"), fixture, notes)


def test_attention_is_counted_by_what_it_sees() -> None:
    """Pairs are those of the mask; operations are seven products over them beside the linears',
    which a longer text multiplies by tokens alone."""
    eye = torch.eye(9, dtype=torch.bool)
    masks = [torch.cat([torch.ones_like(eye).tril(), *[eye] * step], dim=1) for step in range(3)]
    assert count_visible_pairs(9, 3) == sum(int(mask.sum()) for mask in masks)
    target = random_target(TOY.model, CPU, torch.float32)
    # toy has drafted: its weights learn no more
    drafter = random_drafter(target, TOY.model, torch.float32)
    counts = []
    for length in (10, 20, 40):
        loss = loss_functions(drafter, target, random_batch(target, drafter, 2, length))["unfused"]
        attention_flops = (
            14
            * 2
            * drafter.self_attn.q_proj.out_features
            * count_visible_pairs(length, drafter.num_steps)
        )
        counts.append(count_flops(loss, drafter, 2, length) - attention_flops)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])  # a linear function of the length


def test_speedup_is_tau_over_the_parts() -> None:
    """The speedup is S = tau / (c gamma + v + h), by hand 4 / (5 * 0.05 + 1.2 + 0.15)."""
    parts = RoundCosts(
        autoregressive=0.004, draft=0.001, verify=0.0048, accept=0.0004, outside=0.0002, steps=5
    )
    assert (parts.c, parts.v, parts.h) == (
        pytest.approx(0.05),
        pytest.approx(1.2),
        pytest.approx(0.15),
    )
    assert parts.predict_speedup(4) == pytest.approx(4 / 1.6)
    samples = {
        AR: [RoundSample(0.004, {}, 1.0)] * 2,
        "tau=4": [RoundSample(0.0064, {}, 4.0), RoundSample(0.008, {}, 4.0)],
    }
    row = compute_gains(samples, parts, ["tau=4"], best=0.8)
    assert row["speedup"]["tau=4"] == {"measured": pytest.approx(2.25), "model": pytest.approx(2.5)}
    assert row["eta"]["tau=4"] == pytest.approx(2.25 / 4) and row["share_of_roofline"][
        "tau=4"
    ] == pytest.approx(2.25 / 3.2)


def test_roofline_of_llama_8b_on_an_h200() -> None:
    """Floors equal those worked out by hand: 15.01 GB of weights at 4.3 TB/s, and 790 TFLOP/s
    where many nodes are run.
    """
    best = Roofline(ModelGeometry(), 4.3e12, 790e12)
    assert best.verify_seconds(1, 1024, 1) * 1e3 == pytest.approx(3.52, abs=0.005)
    assert best.verify_seconds(8, 32768, 1) * 1e3 == pytest.approx(11.48, abs=0.005)
    assert best.verify_seconds(8, 1024, 64) / best.verify_seconds(8, 1024, 1) == pytest.approx(
        2.70, abs=0.01
    )
    assert best.draft_seconds(1, 0, 7) * 1e3 == pytest.approx(1.24, abs=0.005)
    assert [best.max_efficiency(1, 1024, 64, depth) for depth in (1, 3, 5, 7)] == pytest.approx(
        [0.95, 0.87, 0.80, 0.74], abs=0.007
    )


def test_roofline_counts_the_weights_that_are_there() -> None:
    """The roofline counts all matrices but the embedding, and the layer of the drafter."""
    model = replace(TOY.model, inner=48)
    target = random_target(model, CPU, torch.float32)
    drafter = random_drafter(target, model, torch.float32)
    best = Roofline(model, 1.0, 1.0)
    read_json = sum(weight.numel() for weight in target.parameters() if weight.dim() > 1)
    assert (
        model.layers * best.layer_parameters + model.vocab * model.width
        == read_json - target.head.embedding.weight.numel()
    )
    layer = sum(w.numel() for part in (drafter.self_attn, drafter.mlp) for w in part.parameters())
    assert best.drafter_layer_parameters == layer


def complete_rows() -> dict[str, Any]:
    """Return every row that a goal needs, written by hand."""
    speedup = {
        "speedup": {"tau=2": {"measured": 1.5, "model": 1.6}},
        "share_of_roofline": {"tau=2": 0.9},
        "tau": {"tau=2": 2.0},
    }
    rest = {
        "tokens_per_second": {"tau=2": 400.0},
        "eta": {"tau=2": 0.75},
        "eta_roofline": 0.83,
        "host_synchronisations": 0,
    }
    rows: dict[str, Any] = {name: {**speedup, **rest} for name in EngineSizes().priority_rows()}
    rows["engine/B=1 prefix=1024/verify"] = {
        "share_of_floor": 0.85,
        "tokens_per_second": {AR: 240.0},
        "v": {"N=64": 1.1},
        "host_synchronisations": 0,
    }
    rows["identity/tiny/eagle3"] = {"differing": 0}
    rates = {"tokens_per_second": {"drafter": 26000.0}, "share_of_product_rate": 0.6}
    rows["training/eagle3 B=4 T=2048"] = {**rates, "time_ratio": 0.9, "memory_ratio": 0.5}
    return rows


def test_lines_fill_every_goal(tmp_path: Path) -> None:
    """Each goal of the engine and of training has its line, which the report prints and judges."""
    rows = complete_rows()
    values = engine_goal_values(rows, EngineSizes().priority_rows())
    assert set(values) == {
        goal["name"]
        for goal in json.loads(GOALS_PATH.read_text())
        if goal["name"].startswith(("engine", "training,"))
    }
    assert values["engine: measured speedup away from the model of its parts"] == pytest.approx(
        1 - 1.5 / 1.6
    )
    assert values["engine: speedup over acceptance length, as a share of the roofline's"] == 0.9
    (tmp_path / "engine.json").write_text(
        json.dumps({"setting": SETTING, "rows": rows, "lines": values})
    )
    (evidence,) = gather_evidence(tmp_path)
    assert all(line_values(evidence)[name] == value for name, value in values.items())
    printed = render_markdown(tmp_path)
    assert "| engine: host synchronisations a round | <= 0 | 0 | met |" in printed
    assert (
        "| B=1 prefix=1024/chain N=4, tau=2 | 2.00 | 400 | 1.50x | 1.60x | 0.75 | 0.83 |" in printed
    )


def test_lines_over_all_rows_need_them_all() -> None:
    """Where a row is missing or failed, or the waits are unknown, such a goal is not measured."""
    name = EngineSizes().priority_rows()[-1]
    least = "engine: speedup over acceptance length, as a share of the roofline's"
    waits = "engine: host synchronisations a round"
    for change in (
        {},
        {name: {"failed": "out of memory"}},
        {name: {**complete_rows()[name], "host_synchronisations": None}},
    ):
        values = engine_goal_values({**complete_rows(), **change}, EngineSizes().priority_rows())
        assert (least in values) == ("failed" not in change.get(name, {}))
        assert (waits in values) == (not change)
    assert engine_goal_values({}, EngineSizes().priority_rows()) == {}


def test_the_twin_computes_the_drafters_loss() -> None:
    """Loss and gradients of full matrices equal the drafter's own."""
    target = random_target(replace(TOY.model, layers=3), CPU, torch.float32)
    drafter = random_drafter(target, TOY.model, torch.float32)
    losses = loss_functions(drafter, target, random_batch(target, drafter, 2, 14))
    gradients = {
        name: torch.autograd.grad(loss(), list(drafter.parameters()))
        for name, loss in losses.items()
    }
    torch.testing.assert_close(losses["drafter"](), losses["unfused"]())
    for ours, reference in zip(*gradients.values()):
        torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-3)
    compute_gradients(losses["drafter"], drafter)


@pytest.mark.slow
def test_command_takes_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys part, out and toy reach the benchmark."""
    path = tmp_path / "found.json"
    words = ["engine", "part=counts", f"out={path}", "toy=true"]
    monkeypatch.setattr(sys, "argv", words)
    run_benchmark(EngineBench)
    assert {name.split("/")[0] for name in read_json(path)["rows"]} == {"ceilings", "counts"}
